"""Train a language model of Hugging Face transformers, with padded batches that are dicts.

    python extras/tutorial/hugging_face.py
    torchrun --nproc-per-node 2 extras/tutorial/hugging_face.py

It needs `pip install transformers`. It downloads nothing: the model is tiny, the data are made up.
The sequences differ in length, so micro-batches and ranks differ in their number of targets. Losses
and weights are the same on 1 and 2 ranks nevertheless. At the end, the script writes the folder
`model`, for `from_pretrained("model")`. To save and resume, add the lines of 4_checkpoints.py.
"""

import os
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
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
    # The model returns the mean over the targets of a micro-batch. The mean of the means of unequal
    # parts is not the mean of the whole, so train_ needs the sum and the count. (Leave out
    # micro-batches without a target: their mean is NaN.)
    count = count_targets(batch)
    return model(**batch).loss * count, count


def main(world):
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
    step, accum = 0, 2  # finished steps; micro-batches per step and rank
    rows = 24 // (accum * world.size)  # sequences in a micro-batch
    sampler = chardata.RankSampler(len(train), world.rank, world.size)
    loader = DataLoader(train, batch_size=rows, sampler=sampler, collate_fn=collate)
    test_rows = range(world.rank, len(test), world.size)
    test_loader = DataLoader(test, batch_size=24, sampler=test_rows, collate_fn=collate)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        steps = loop.group_batches(loader, accum, count=lambda batch: int(count_targets(batch)))
        for step, report in loop.train_(
            replica, [opt], steps, loss_fn, start=step, clip=1.0, dtype=dtype
        ):
            pass
        test_loss = loop.evaluate(replica, test_loader, loss_fn)
        if world.rank == 0:
            print(f"epoch {epoch}: loss {report.loss:.4f}, test loss {test_loss:.4f}")
    if world.rank == 0:
        model.save_pretrained("model")


with ddp_setup.process_group() as world:
    main(world)
