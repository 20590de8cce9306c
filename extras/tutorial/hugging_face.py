"""Train a language model of Hugging Face transformers, with padded batches that are dicts.

    python extras/tutorial/hugging_face.py
    torchrun --nproc-per-node 2 extras/tutorial/hugging_face.py

It needs `pip install transformers`. It downloads nothing: the model is tiny, the data are made up.
The sequences differ in length, so micro-batches and ranks differ in their number of targets. Losses
and weights are the same on 1 and 2 ranks nevertheless. Started again, the script continues from its
newest checkpoint. At the end, it writes the folder `model`, for `from_pretrained("model")`.
"""

import math
import os
import sys
from functools import partial
from itertools import islice

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
import ckpt
import ddp_setup
import loop


def make_sequences(number):
    """Return sequences of 4 to 40 token ids. In each, the ids grow by 1, 2 or 3, modulo 64."""
    starts, strides, sizes = (torch.randint(*r, (number,)) for r in ((0, 64), (1, 4), (4, 41)))
    return [(a + b * torch.arange(n)) % 64 for a, b, n in zip(starts, strides, sizes)]


def collate(sequences):
    """Pad the sequences of a micro-batch to the longest one."""
    ids = pad_sequence(sequences, batch_first=True)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    # The model's loss ignores the label -100.
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def count_targets(batch):
    # The model compares its output at position t with label t + 1, so the first label has no use.
    return (batch["labels"][:, 1:] != -100).sum()


def loss_fn(model, batch):
    # The model returns the mean over the targets of this micro-batch, but train_ needs their sum:
    # the mean of the means of unequal parts is not the mean of the whole. (Leave out micro-batches
    # without a target: their mean is NaN.)
    count = count_targets(batch)
    return model(**batch).loss * count, count


def resume_(model, opt, world):
    found, rejected = ddp_setup.wait_together(
        lambda: ckpt.newest("out-hugging-face") if world.rank == 0 else (None, {}), world
    )
    for name, reason in rejected.items():
        print(f"{name}: {reason}")
        ckpt.set_aside("out-hugging-face", name)
    if found:  # on rank 0
        print(f"continuing after step {found.entry.step}; to start again, delete out-hugging-face")
    ckpt.restore_(found.state if found else {}, model, [opt])
    return ddp_setup.from_rank_zero(lambda: found.entry.step if found else 0, world)


def main(world, stop):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    train, test = make_sequences(480), make_sequences(90)
    # To fine-tune: AutoModelForCausalLM.from_pretrained(name).float(), and token ids of your text.
    # transformers 5 keeps the dtype of the file; small updates of bfloat16 weights would be lost.
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.003)
    rows = 24 // 2 // world.size  # sequences in a micro-batch: 2 of them per rank and step
    steps_per_epoch = math.ceil(len(train) / (2 * rows * world.size))
    step = resume_(replica, opt, world)
    for epoch in range(step // steps_per_epoch, 3):
        mine = chardata.rank_indices(len(train), world.rank, world.size, epoch, seed=0)
        loader = DataLoader(train, batch_size=rows, sampler=mine, collate_fn=collate)
        steps = loop.group_batches(loader, accum=2, count=lambda batch: int(count_targets(batch)))
        steps = islice(steps, step % steps_per_epoch, None)  # skip finished steps
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype, stop=stop
        ):
            if report.stop or step % steps_per_epoch == 0:
                state = ckpt.snapshot(replica, [opt])
                save = partial(ckpt.save, "out-hugging-face", state, step, keep=3)
                ddp_setup.from_rank_zero(save, world)
            if report.stop:
                break
        if step % steps_per_epoch == 0:
            mine = range(world.rank, len(test), world.size)
            loader = DataLoader(test, batch_size=24, sampler=mine, collate_fn=collate)
            test_loss = loop.evaluate(replica, loader, loss_fn)
            if world.rank == 0:
                print(f"epoch {epoch}: loss {report.loss:.4f}, test loss {test_loss:.4f}")
        if report.stop and step < 3 * steps_per_epoch:
            if world.rank == 0:
                print(f"stopped after step {step}")
            return True
    if world.rank == 0:
        model.save_pretrained("model")
    return False


with ddp_setup.stop_signals() as stop, ddp_setup.process_group() as world:
    stopped = main(world, stop)
if stopped:
    sys.exit(3)  # saved, but not finished
