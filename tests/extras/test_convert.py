"""Tests of extras/convert.py, and of --init-from of run.py."""

import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, losses, metrics, run, same, state
from hypothesis import given, settings
from hypothesis import strategies as st

import chardata
import gpt
import run as program
from extras import convert

safetensors = pytest.importorskip("safetensors.torch")
CHARS = "\x00\n\r !Aaé\u0301\u2028😀€"
FLAGS = "--steps 1 --lr 1e-9 --dtype float32".split()  # the weights stay almost the same


def make(vocab: int = 12, arch: str = "gpt2") -> tuple[gpt.GPT, dict[str, Any]]:
    """Return a model with random weights, biases and norms, and its flags."""
    sizes = dict(vocab=vocab, block_size=24, layers=3, heads=4, embd=32)
    model = gpt.build(gpt.Config(**sizes, arch=arch), seed=1).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, sizes | {"arch": arch}


def write_hf(folder: Path, tokenizer: str = "char", chars: str = CHARS) -> gpt.GPT:
    """Write a folder of Hugging Face, and return its model."""
    model, config = make(256 if tokenizer == "byte" else 12)
    convert.write_hf(folder, model.state_dict(), config | {"tokenizer": tokenizer}, chars)
    return model


def write_nanogpt(folder: Path, model: gpt.GPT, bias: bool = True, **more: Any) -> None:
    """Write a checkpoint as nanoGPT saves it: compiled, with masks and an optimizer."""
    weights = model.state_dict()
    named = {
        f"transformer.{theirs}": weights[ours] for ours, theirs in convert.gpt2_names(3).items()
    }
    named |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24).tril()}
    named |= {"lm_head.weight": weights["head.weight"]}
    saved = {f"_orig_mod.{n}": w for n, w in named.items() if bias or not n.endswith("bias")}
    optimizer = {"state": {0: {"step": torch.ones(())}}}
    state = {"model": saved, "model_args": {"n_layer": 3, "n_head": 4}, "optimizer": optimizer}
    torch.save(state | more, folder / "ckpt.pt")


def assert_same_logits(theirs: Any, ours: gpt.GPT) -> None:
    ids = torch.randint(ours.config.vocab, (3, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)


def converted(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "extras" / "convert.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


# -------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("how", ["whole", "in parts", "half", "bare"])
def test_a_gpt2_that_transformers_saved_gives_the_same_logits(tmp_path, how):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    sizes = {"vocab_size": 70, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    saved = theirs.half() if how == "half" else theirs
    saved = theirs.transformer if how == "bare" else saved
    saved.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if how == "in parts" else {}))
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (how == "in parts")
    found = convert.start_state(f"{tmp_path}", {})
    config = {name: found["config"][name] for name in gpt.Config._fields if name != "dropout"}
    ours = gpt.build(gpt.Config(**config), seed=0).eval()
    ours.load_state_dict(found["model"])
    assert_same_logits(theirs.float(), ours)


@pytest.mark.parametrize(
    "told, changed, said",
    [
        ({"activation_function": "relu"}, {}, "activation_function is 'relu'"),
        ({"model_type": "llama"}, {}, "model_type is 'llama'"),
        ({}, {"transformer.h.1.mlp.c_fc.bias": None}, "h.1.mlp.c_fc.bias"),
        ({}, {"h.1.extra": torch.ones(1)}, "h.1.extra is not a weight"),
        ({"n_layer": 9}, {}, "h.[3-8].ln_1.weight"),  # for example if a file of several is missing
    ],
)
def test_a_model_that_is_not_gpt2_is_refused(tmp_path, told, changed, said):
    """Otherwise it would compute something else, without an error."""
    folder = tmp_path / "hf"
    write_hf(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | told))
    weights = safetensors.load_file(folder / "model.safetensors") | changed
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    safetensors.save_file(kept, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"^{folder} .*{said}"):
        convert.read(f"{folder}")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Return, for characters and bytes: (our model, the model and tokenizer of transformers)."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("theirs")
    found = {}
    for kind, chars in (("char", CHARS), ("byte", "")):
        ours = write_hf(folder / kind, kind, chars)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / kind).eval()
        found[kind] = ours, model, transformers.AutoTokenizer.from_pretrained(folder / kind)
    return found


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_transformers_computes_and_generates_the_same(theirs, kind):
    ours, model, _ = theirs[kind]
    assert_same_logits(model, ours)
    prompt = torch.tensor([[3, 1, 4]])
    how = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    said = model.generate(prompt, max_new_tokens=20, **how)[0, 3:].tolist()
    sampled = gpt.sample(ours, prompt[0], temperature=0)
    assert said == [int(token) for token in itertools.islice(sampled, 20)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    chars=st.text(CHARS, min_size=1),
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)
def test_transformers_encodes_and_decodes_as_chardata_does(theirs, chars, text):
    for kind, text in (("char", chars), ("byte", text)):
        ids, tokenizer = chardata.encode(text, kind, CHARS).tolist(), theirs[kind][2]
        assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text
    with pytest.raises(Exception, match="vocabulary"):
        theirs["char"][2]("Z")


# ------------------------------------------------------------------------------------------- nanoGPT


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path, bias):
    """Missing biases are zero, and text has the characters of meta.pkl."""
    model, config = make()
    write_nanogpt(tmp_path, model, bias)
    meta = {"vocab_size": 12, "itos": dict(enumerate(CHARS))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    found = convert.start_state(f"{tmp_path}/ckpt.pt", {})
    expected = dict(model.state_dict())
    if not bias:
        expected = {n: 0 * w if n.endswith("bias") else w for n, w in expected.items()}
    torch.testing.assert_close(found["model"], expected, rtol=0, atol=0)
    assert found["config"] == config | {"tokenizer": "char"} and found["chars"] == CHARS
    (tmp_path / "text.txt").write_text(200 * CHARS[::-1], newline="")
    ran = run(
        "--init-from", tmp_path, "--data", tmp_path / "text.txt", *FLAGS, "--out", tmp_path / "o"
    )
    assert ran.code == 0 and state(tmp_path / "o")["chars"] == CHARS, ran
    torch.testing.assert_close(state(tmp_path / "o")["model"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["code", "code in meta", "a cut file", "a tensor", "no weights"])
def test_a_foreign_or_damaged_file_is_one_line_and_no_code_runs(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    write_nanogpt(tmp_path, make()[0], **({"config": Intruder()} if kind == "code" else {}))
    file = tmp_path / "ckpt.pt"
    if kind == "code in meta":
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Intruder()}))
    elif kind == "a cut file":
        file.write_bytes(file.read_bytes()[:-1000])
    elif kind == "a tensor":
        torch.save(torch.ones(3), file)
    elif kind == "no weights":
        torch.save({"model": {}, "model_args": {"n_layer": 1, "n_head": 1}}, file)
    with pytest.raises(ValueError, match=f"^{tmp_path} cannot be converted: ") as caught:
        convert.read(f"{tmp_path}")
    assert "\n" not in f"{caught.value}" and not (tmp_path / "was-run").exists()


# ------------------------------------------------------------------------ --init-from and the script


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Return the --out folder of a run. Tests must not change it."""
    out = tmp_path_factory.mktemp("trained") / "out"
    flags = "--arch gpt2 --tokenizer byte --steps 12 --log-every 1 --save-every 6".split()
    ran = run(*TINY, *flags, "--data", text, "--out", out)
    assert ran.code == 0, ran
    return out


@pytest.mark.parametrize("arch", ["gpt2", "modern2"])
def test_the_script_writes_safetensors_of_any_model(arch, text, tmp_path):
    out, file = tmp_path / "out", tmp_path / "a.safetensors"
    assert run(*TINY, "--arch", arch, "--steps", 1, "--data", text, "--out", out).code == 0
    ended = converted(f"{out}/best", "-o", file)
    assert ended.returncode == 0, ended
    assert same(safetensors.load_file(file), dict(state(out)["model"]))
    with safetensors.safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert json.loads(about["config"])["arch"] == arch and about["chars"] == state(out)["chars"]
    assert converted(out, "-o", file).returncode == 2  # it exists
    assert converted(out, "-o", tmp_path / "hf").returncode == (0 if arch == "gpt2" else 2)


def test_training_starts_from_a_chosen_checkpoint_of_a_run_also_with_a_shorter_context(
    trained, text, tmp_path
):
    """Learned positions are cut. The context cannot become longer."""
    begin = [*FLAGS, "--data", text, "--init-from", trained / "step-6"]
    ran = run(*begin, "--block-size", 9, "--out", tmp_path / "a")
    assert ran.code == 0, ran
    [first, _] = sorted(trained.glob("step-*"))
    expected = torch.load(first, weights_only=True)["model"]
    expected["positions.weight"] = expected["positions.weight"][:9]
    torch.testing.assert_close(state(tmp_path / "a")["model"], expected, rtol=0, atol=1e-7)
    assert state(tmp_path / "a")["config"]["block_size"] == 9
    assert run("--out", tmp_path / "a", "--steps", 2).code == 0  # a resume
    for more, said in (
        (["--block-size", 17], "--block-size 17: the context of"),
        (["--layers", 3], "--layers 3 contradicts"),
        (["--init-from", tmp_path / "no"], "No such file"),
    ):
        ran = run(*begin, *more, "--out", tmp_path / "new")
        assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 1, ran
    assert not (tmp_path / "new").exists()


def test_a_run_starts_from_a_sharded_checkpoint(text, tmp_path):
    """Rank 0's file has zeros in place of the weights."""
    sharded = "--strategy fsdp --checkpoint sharded --spawn 2 --steps 2".split()
    assert run(*TINY, *sharded, "--data", text, "--out", tmp_path / "a").code == 0
    found = program.find_checkpoint(f"{tmp_path}/a")
    weights = convert.start_state("a", found)["model"]
    ended = converted(tmp_path / "a", "-o", tmp_path / "a.safetensors")
    assert ended.returncode == 0, ended
    assert same(weights, safetensors.load_file(tmp_path / "a.safetensors"))
    assert weights["blocks.0.up.weight"].count_nonzero() > 100
    begin = ["--init-from", tmp_path / "a", "--data", text, "--steps", 1, "--log-every", 1]
    assert run(*begin, "--dtype", "float32", "--out", tmp_path / "b").code == 0
    assert losses(tmp_path / "b")[0][1] < metrics(tmp_path / "a")[-1]["val_loss"] + 0.2


def test_training_starts_from_the_loss_that_transformers_computes(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert converted(trained, "-o", tmp_path / "hf").returncode == 0
    ids = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    begin = ["--init-from", tmp_path / "hf", "--data", tmp_path / "ids.npy", "--log-every", 1]
    ran = run(*begin, "--steps", 1, "--dtype", "float32", "--out", tmp_path / "a")
    assert ran.code == 0 and state(tmp_path / "a")["config"]["vocab"] == 256, ran
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    train, _ = chardata.split(ids, 0.1)
    ((x, y),), _ = next(chardata.steps(chardata.BatchPlan(train, 16, 16)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert losses(tmp_path / "a")[0][1] == pytest.approx(float(loss), rel=1e-5)
