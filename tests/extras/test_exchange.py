"""Tests of extras/exchange.py, and of the command export and --init-from of run.py."""

import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, Ran, contents, losses, run, same, same_training, state

import chardata
import ckpt
import gpt
from extras import exchange, export

pytest.importorskip("safetensors")
VOCABULARIES = {
    "char": {"kind": "char", "chars": "\x00\n\r !Aaé\u0301\u2028😀€"},
    "byte": {"kind": "byte", "chars": ""},
    "ids": {"kind": "ids", "chars": ""},
}


def mistaken(ran: Ran, *parts: object) -> None:
    """Check that a run ended with exit code 2 and one line on stderr, which contains `parts`."""
    assert ran.code == 2 and ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
    assert [f"{part}" for part in parts if f"{part}" not in ran.err] == [], ran.err


def of(kind: str, arch: str = "gpt2") -> tuple[gpt.GPT, exchange.Model]:
    """Return a model with random weights, biases and norms, also as an exchange.Model."""
    vocab = {"char": len(VOCABULARIES["char"]["chars"]), "byte": 256, "ids": 100}[kind]
    sizes = dict(vocab=vocab, block_size=24, layers=3, heads=4, embd=32)
    model = gpt.build(gpt.Config(**sizes, arch=arch), seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, exchange.Model(sizes | {"arch": arch}, VOCABULARIES[kind], model.state_dict())


def write(model: exchange.Model, format: str, path: Path) -> Path:
    export.write(model, format, f"{path}", exchange.to_gpt2, exchange.make_tokenizer)
    return path


def same_model(found: exchange.Model, model: exchange.Model) -> bool:
    return same([*found[:2], dict(found.weights)], [*model[:2], dict(model.weights)])


def assert_same_logits(theirs: Any, ours: gpt.GPT) -> None:
    ids = torch.randint(ours.config.vocab, (3, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("how", ["whole", "in parts", "half", "bare"])
def test_a_model_that_transformers_saved_gives_the_same_logits(tmp_path, how):
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
    found = exchange.read(f"{tmp_path}")
    ours = gpt.build(gpt.Config(**found.config), seed=0).eval()
    ours.load_state_dict(found.weights)
    assert_same_logits(theirs.float(), ours)


@pytest.mark.parametrize("in_parts", [False, True])
def test_files_of_another_model_in_the_folder_are_not_read(tmp_path, in_parts):
    model = of("ids")[1]
    other = model._replace(weights={name: weight + 1 for name, weight in model.weights.items()})
    folder = write(model, "hf", tmp_path / "a")
    theirs = write(other, "hf", tmp_path / "b") / "model.safetensors"
    theirs.rename(folder / "model_old.safetensors")
    if in_parts:  # the index names the parts
        part = (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        names = exchange.load_safetensors(part)[0]
        index = json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")})
        (folder / "model.safetensors.index.json").write_text(index)
    assert same_model(exchange.read(f"{folder}"), model)


LN = "transformer.ln_f.bias"
FC = "transformer.h.1.mlp.c_fc.bias"
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another activation": ({"activation_function": "relu"}, {}, "activation_function is 'relu'"),
    "another model": ({"model_type": "llama"}, {}, "model_type is 'llama'"),
    "a weight is missing": ({}, {FC: None}, f"{FC} is missing"),
    "a weight too many": ({}, {"h.1.extra": torch.ones(1)}, "h.1.extra is not a weight"),
    "its own head": ({}, {"lm_head.weight": torch.ones(12, 32)}, "lm_head.weight differs"),
    "not finite": ({}, {LN: torch.full((32,), math.nan)}, "norm.bias is not a tensor of finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_is_not_gpt2_is_refused(tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch")
    told, changed, said = WRONG[name]
    folder = write(of("char")[1], "hf", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **told}))
    weights = {**safetensors.load_file(folder / "model.safetensors"), **changed}
    weights = {key: weight for key, weight in weights.items() if weight is not None}
    safetensors.save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"^{folder}: .*{re.escape(said)}"):
        exchange.read(f"{folder}")


# ------------------------------------------------------------------------------ nanoGPT, safetensors


@pytest.mark.parametrize("arch", gpt.ARCHS)
def test_an_exported_model_is_imported_unchanged(tmp_path, arch):
    model = of("char", arch)[1]
    assert same_model(
        exchange.read(f"{write(model, 'safetensors', tmp_path / 'a.safetensors')}"), model
    )


def nano(model: exchange.Model, file: Path, **more: Any) -> None:
    """Write a checkpoint as nanoGPT saves it: compiled, with masks, an optimizer, and no vocabulary."""
    theirs = exchange.to_gpt2(model.weights, 3)
    theirs = {n: w.T if ".h." in n and w.ndim == 2 else w for n, w in theirs.items()}
    theirs |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24).tril()}
    state = {"model": {f"_orig_mod.{name}": weight for name, weight in theirs.items()}}
    state |= {"model_args": {"n_head": 4}, "optimizer": {"state": {0: {"step": torch.ones(())}}}}
    torch.save({**state, "iter_num": 5, **more}, file)


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


def write_meta(folder: Path, chars: str, **more: Any) -> None:
    """Write the vocabulary of a text, as nanoGPT's prepare.py does."""
    itos, stoi = dict(enumerate(chars)), {char: i for i, char in enumerate(chars)}
    meta = {"vocab_size": len(chars), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta | more))


@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_model_of_nanogpt_has_the_characters_of_meta_pkl(tmp_path, named):
    """Otherwise it needs a tokenizer.json that is made by hand."""
    chars = VOCABULARIES["char"]["chars"][::-1]
    nano(of("char")[1], tmp_path / "ckpt.pt")
    write_meta(tmp_path, chars)
    (tmp_path / "text.txt").write_text(200 * chars)
    named = tmp_path if named == "folder" else tmp_path / "ckpt.pt"
    begin = ["--init-from", named, "--data", tmp_path / "text.txt", "--steps", 1]
    ran = run(*begin, "--out", tmp_path / "out")
    assert ran.code == 0, ran
    assert state(tmp_path / "out")["vocabulary"] == {
        "vocab": len(chars),
        "kind": "char",
        "chars": chars,
    }


META: dict[str, tuple[Any, str]] = {
    "code": ({"itos": Intruder()}, "contains code"),
    "another length": ({"itos": {0: "a"}}, "1 tokens; the model has 12"),
    "a hole": ({"itos": dict.fromkeys(range(1, 13), "a")}, "not the vocabulary of nanoGPT"),
    "words": ({"itos": dict.fromkeys(range(12), "ab")}, "not the vocabulary of nanoGPT"),
    "twice": ({"itos": dict.fromkeys(range(12), "a")}, "not the vocabulary of nanoGPT"),
    "bytes": ({"itos": dict.fromkeys(range(12), b"a")}, "not the vocabulary of nanoGPT"),
    "a list": ({"itos": ["a"]}, "not the vocabulary of nanoGPT"),
    "cut": (b"\x80\x04", "not the vocabulary of nanoGPT"),
    "not a pickle": (b"hello", "not the vocabulary of nanoGPT"),
    "an old opcode for code": (b"(S'touch was-run'\nios\nsystem\n.", "contains code"),
    "a number": (pickle.dumps(3), "not the vocabulary of nanoGPT"),
}


@pytest.mark.parametrize("kind", META)
def test_a_malicious_or_damaged_meta_pkl_is_refused_in_one_line_and_runs_nothing(
    tmp_path, monkeypatch, kind
):
    monkeypatch.chdir(tmp_path)
    nano(of("char")[1], tmp_path / "ckpt.pt")
    wrong, said = META[kind]
    if isinstance(wrong, bytes):
        (tmp_path / "meta.pkl").write_bytes(wrong)
    else:
        write_meta(tmp_path, VOCABULARIES["char"]["chars"], **wrong)
    with pytest.raises(ValueError, match=f"^{tmp_path}: meta.pkl .*{said}") as caught:
        exchange.read(f"{tmp_path}")
    assert "\n" not in f"{caught.value}" and not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path, bias):
    """Missing biases are zero."""
    model = of("ids")[1]
    nano(model, tmp_path / "ckpt.pt")
    if not bias:
        state = torch.load(tmp_path / "ckpt.pt")
        weights = state["model"]
        state["model"] = {n: w for n, w in weights.items() if not n.endswith("bias")}
        torch.save(state, tmp_path / "ckpt.pt")
        zeros = {n: 0 * w if n.endswith("bias") else w for n, w in model.weights.items()}
        model = model._replace(weights=zeros)
    found = exchange.read(f"{tmp_path}")
    assert found[:2] == model[:2]
    torch.testing.assert_close(found.weights, dict(model.weights), rtol=0, atol=0)


def foreign(kind: str, folder: Path) -> Path:
    """Write a file that is not a model, and return its path or that of its folder."""
    file, ours = folder / "ckpt.pt", folder / "a.safetensors"
    nano(of("ids")[1], file, **({"config": Intruder()} if kind == "code" else {}))
    if kind == "a cut file":
        file.write_bytes(file.read_bytes()[:-1000])
    elif kind == "a tensor":
        torch.save(torch.ones(3), file)
    elif kind == "no weights":
        torch.save({"model": {}, "model_args": {"n_head": 1}}, file)
    elif kind == "another safetensors":
        export.save_safetensors({"w": torch.ones(3)}, ours)
    elif kind == "another config":
        model = of("char")[1]
        write(model._replace(config=model.config | {"block_size": 10**9}), "safetensors", ours)
    elif kind == "a damaged safetensors":
        ours.write_bytes(b"12345678{}")
    elif kind == "a list":
        (folder / "model.safetensors").touch()
        (folder / "config.json").write_text("[]")
    return ours if ours.exists() else folder


@pytest.mark.parametrize(
    "kind",
    "code, a cut file, a tensor, no weights, another safetensors, another config, "
    "a damaged safetensors, a list".split(", "),
)
def test_a_foreign_or_damaged_file_is_an_error_of_one_line_and_no_code_runs(
    tmp_path, monkeypatch, kind
):
    monkeypatch.chdir(tmp_path)
    path = foreign(kind, tmp_path)
    with pytest.raises(ValueError, match=f"^{path}: ") as caught:
        exchange.read(f"{path}")
    assert "\n" not in f"{caught.value}" and not (tmp_path / "was-run").exists()
    trusted = "If you trust the file" in f"{caught.value}"
    assert trusted == (kind in ("code", "a cut file"))


def test_a_path_that_does_not_exist_is_named_as_such(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder; models of a hub"):
        exchange.read(f"{tmp_path}/gpt2")


# ---------------------------------------------------------------------------------- --init-from


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Return the --out folder of a run. Tests must not change it."""
    out = tmp_path_factory.mktemp("trained") / "out"
    flags = "--arch gpt2 --tokenizer byte --steps 12 --log-every 1 --save-every 6".split()
    ran = run(*TINY, *flags, "--data", text, "--out", out)
    assert ran.code == 0, ran
    return out


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "hf"
    ran = run("export", trained, "--format", "hf", "-o", path)
    assert ran.code == 0 and ran.err == "", ran
    return path


def test_a_run_starts_from_an_out_folder_with_unchanged_weights(trained, text, tmp_path):
    flags = ["--data", text, "--steps", 1, "--lr", 1e-9, "--dtype", "float32"]
    ran = run(*flags, "--init-from", trained, "--out", tmp_path)
    assert ran.code == 0, ran
    assert state(tmp_path)["vocabulary"] == state(trained)["vocabulary"]
    torch.testing.assert_close(state(tmp_path)["model"], state(trained)["model"], rtol=0, atol=1e-8)


@pytest.mark.parametrize("arch", ["gpt2", "modern2"])
def test_a_run_starts_with_a_shorter_context_than_that_of_the_model(arch, text, tmp_path):
    """Learned positions are cut, and the others need nothing. The context cannot become longer."""
    model = of("byte", arch)[1]
    path = write(model, "safetensors", tmp_path / "a.safetensors")
    flags = ["--data", text, "--steps", 1, "--lr", 1e-9, "--dtype", "float32"]
    begin = [*flags, "--init-from", path, "--block-size"]
    mistaken(run(*begin, 25, "--out", tmp_path), "--block-size 25", "24 or less")
    planned = run("plan", *begin, 9)
    assert planned.code == 0 and "tokens       144 in a step" in planned.out, planned
    again = [*flags, "--init-from", tmp_path / "a", "--block-size"]
    for out, size, args in ((tmp_path / "a", 9, begin), (tmp_path / "b", 5, again)):
        ran = run(*args, size, "--out", out)
        assert ran.code == 0, ran
        weights = model.weights
        if arch == "gpt2":
            weights = weights | {"positions.weight": weights["positions.weight"][:size]}
        torch.testing.assert_close(state(out)["model"], weights, rtol=0, atol=1e-7)
        assert state(out)["config"]["block_size"] == size
    ran = run("--out", tmp_path / "b", "--steps", 2, "--block-size", 5)
    assert ran.code == 0 and state(tmp_path / "b")["step"] == 2, ran
    assert run("eval", "--out", tmp_path / "b").code == 0


def test_a_run_starts_from_a_chosen_checkpoint(trained, text, tmp_path):
    """A damaged newest one is left out, with a warning, and nothing is renamed."""
    flags = ["--data", text, "--steps", 1, "--lr", 1e-9, "--dtype", "float32"]
    out = shutil.copytree(trained, tmp_path / "out")
    first, last = sorted(path.name for path in out.glob("step-*"))
    for chosen in ("step-6", first):
        begun = tmp_path / f"from {chosen}"
        assert run(*flags, "--init-from", out / chosen, "--out", begun).code == 0
        expected = torch.load(out / first, weights_only=True)["model"]
        torch.testing.assert_close(state(begun)["model"], expected, rtol=0, atol=1e-8)
    (out / last).write_bytes(b"damaged")
    ran = run(*flags, "--init-from", out, "--out", tmp_path / "new")
    assert ran.code == 0 and f"{last}: damaged" in ran.err and f"using {out}/{first}" in ran.err
    torch.testing.assert_close(state(tmp_path / "new")["model"], expected, rtol=0, atol=1e-8)
    mistaken(run(*flags, "--init-from", out / "step-6", "--out", out), "--init-from")
    (out / first).unlink(), (out / last).unlink()
    ckpt.save(f"{out}", {"model": {"w": torch.ones(1)}}, 3)
    ran = run(*flags, "--init-from", out, "--out", tmp_path / "other")
    mistaken(ran, "step-00000003-", "not written by this program")


def test_training_starts_from_the_loss_of_transformers_and_resumes_without_the_model(
    exported, text, tmp_path
):
    transformers = pytest.importorskip("transformers")
    hf = shutil.copytree(exported, tmp_path / "hf")
    flags = ["--data", text, "--batch-size", 8, "--dtype", "float32", "--log-every", 1]
    # With these, the rates of the first steps do not depend on the number of steps.
    flags += ["--lr", 0.001, "--warmup", 0, "--schedule", "constant"]
    begin = [*flags, "--init-from", hf]
    for steps, out, args in [(4, "once", begin), (2, "twice", begin), (4, "twice", flags)]:
        if args is flags:
            shutil.rmtree(hf)
        ran = run(*args, "--steps", steps, "--out", tmp_path / out)
        assert ran.code == 0 and ran.err == "", ran
    assert same_training(tmp_path / "once", tmp_path / "twice")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    train, _ = chardata.split((np.array(tokenizer(text.read_text())["input_ids"]),), 0.1)
    ((x, y),), _ = next(chardata.steps(chardata.BatchPlan(train, 16, 8)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert dict(losses(tmp_path / "once"))[1] == pytest.approx(float(loss), rel=1e-5)


def test_flags_that_contradict_an_imported_model_are_an_error_of_one_line(
    exported, trained, text, tmp_path
):
    begin = ["--data", text, "--out", tmp_path / "out", "--init-from", exported]
    old, wordless = tmp_path / "old", shutil.copytree(exported, tmp_path / "wordless")
    old.mkdir(), (old / "pytorch_model.bin").touch()
    (wordless / "tokenizer.json").unlink()
    for more, said in (
        (["--init-from", old], [f"{old}: has only pytorch_model.bin", "save_pretrained"]),
        (["--init-from", wordless], [text, "needs its tokenizer", ".npy"]),
        (["--layers", 3], ["--layers 3", "--layers 1", "or start without --init-from"]),
        (["--arch", "modern"], ["--arch modern", "--arch gpt2"]),
        (["--init-from", ROOT / "tests"], [ROOT / "tests", "model.safetensors", "ckpt.pt"]),
        (["--init-from", ROOT / "setup.cfg"], ["setup.cfg", "torch.load(weights_only=True)"]),
    ):
        mistaken(run(*begin, *more), *said)
    assert not (tmp_path / "out").exists()


def test_ids_must_be_in_the_vocabulary_of_the_imported_model(tmp_path):
    nano(of("ids")[1], tmp_path / "ckpt.pt")
    begin = ["--init-from", tmp_path, "--steps", 1, "--out", tmp_path / "out", "--data"]
    for name, top in (("fitting.npy", 99), ("larger.npy", 100)):
        np.save(tmp_path / name, np.arange(3000, dtype=np.uint16) % (top + 1))
    mistaken(run(*begin, tmp_path / "larger.npy"), "id 100", "ends at 99")
    ran = run(*begin, tmp_path / "fitting.npy")
    assert ran.code == 0 and state(tmp_path / "out")["vocabulary"]["vocab"] == 100, ran


def test_an_imported_folder_is_not_overwritten(exported, text, tmp_path):
    """Without a check of config.json, a new run would begin in it."""
    out = shutil.copytree(exported, tmp_path / "out")
    before = contents(out)
    ran = run("--init-from", out, "--data", text, "--out", f"{tmp_path}/./out")
    mistaken(ran, "--out", "config.json", "name another --out")
    assert contents(out) == before


# ------------------------------------------------------------------------------------------ export


def test_an_export_writes_no_other_architecture_and_over_nothing(trained, text, tmp_path):
    modern = [*TINY, "--steps", 1, "--data", text, "--out", tmp_path / "modern"]
    assert run(*modern).code == 0
    begin = ["export", tmp_path / "modern", "-o", tmp_path / "a", "--format"]
    mistaken(run(*begin, "hf"), "--format hf", "--arch gpt2 only", "modern2", "safetensors")
    assert run(*begin, "safetensors").code == 0
    before = contents(tmp_path)
    mistaken(run(*begin, "safetensors"), tmp_path / "a", "exists")
    theirs = f"file://{tmp_path}/modern"  # a URL of another run
    ran = run("export", trained, "--format", "checkpoint", "-o", theirs)
    mistaken(ran, f"{theirs} exists already")
    assert contents(tmp_path) == before
