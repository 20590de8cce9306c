"""Tests of extras/exchange.py, and of the command export and --init-from in runs of run.py."""

import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, Ran, ahead, checkpoints, losses, run, same, same_training, state

import chardata
import ckpt
import gpt
from extras import exchange, export, reader

RUNS = [
    *TINY,
    "--dropout",
    0,
    "--steps",
    40,
    "--log-every",
    1,
    "--eval-every",
    10,
    "--save-every",
    10,
]


@pytest.fixture(scope="module", autouse=True)
def done(text, tmp_path_factory):
    """Start runs in the background. Return a function: name -> (printed text, --out folder)."""
    folder = tmp_path_factory.mktemp("extras")
    runs = {
        "gpt2": ["--arch", "gpt2"],
        "modern": ["--tokenizer", "byte", "--steps", 12],
    }

    def train(name: str) -> tuple[Ran, Path]:
        ran = run(*RUNS, "--data", text, "--out", folder / name, *runs[name])
        assert ran.code == 0, ran
        return ran, folder / name

    with ahead(**{name: partial(train, name) for name in runs}) as begun:
        yield lambda name: begun[name].result()


def mistaken(ran: Ran, *parts: object) -> None:
    """Check that a run ended with exit code 2 and one line on stderr, which contains `parts`.

    Ids that are too high are found in the first step, after the line that begins a training.
    """
    assert ran.code == 2 and ran.err.startswith("Error: "), ran
    assert [line for line in ran.out.splitlines() if not line.startswith("Training: ")] == [], ran
    assert ran.err.count("\n") == 1, ran
    assert parts and [f"{part}" for part in parts if f"{part}" not in ran.err] == [], ran.err


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


VOCABULARIES = {
    "char": {"kind": "char", "chars": "\x00\n\r !Aaé\u0301\u2028😀€"},
    "byte": {"kind": "byte", "chars": ""},
    "ids": {"kind": "ids", "chars": ""},
}


def of(kind: str, arch: str = "gpt2") -> tuple[gpt.GPT, exchange.Model]:
    """Return a model with random weights, biases and norms, also as an exchange.Model."""
    vocab = {"char": len(VOCABULARIES["char"]["chars"]), "byte": 256, "ids": 100}[kind]
    model = gpt.build(
        gpt.Config(vocab, block_size=24, layers=3, heads=4, embd=32, arch=arch), seed=1
    )
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    config = {key: value for key, value in model.config._asdict().items() if key != "dropout"}
    return model, exchange.Model(config, VOCABULARIES[kind], model.state_dict())


def write(model: exchange.Model, format: str, path: Path) -> None:
    export.write(model, format, f"{path}", exchange.to_gpt2, exchange.make_tokenizer)


def same_model(found: exchange.Model, model: exchange.Model) -> bool:
    return (
        found[:2] == model[:2]
        and found.weights.keys() == model.weights.keys()
        and all(torch.equal(found.weights[name], weight) for name, weight in model.weights.items())
    )


def tokens(model: gpt.GPT) -> torch.Tensor:
    return torch.randint(model.config.vocab, (3, 24), generator=torch.Generator().manual_seed(3))


def assert_same_logits(theirs: Any, ours: gpt.GPT) -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(tokens(ours)).logits, ours(tokens(ours)), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    "how", [{}, {"max_shard_size": "20KB"}, {"half": True}, {"bare": True}], ids=str
)
def test_a_model_that_transformers_saved_gives_the_same_logits(transformers, tmp_path, how):
    torch.manual_seed(4)
    sizes = {"vocab_size": 70, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    if how.get("half"):
        theirs.half()
    saved = theirs.transformer if how.get("bare") else theirs
    saved.save_pretrained(tmp_path, **{key: how[key] for key in how if key == "max_shard_size"})
    assert len([*tmp_path.glob("*.safetensors")]) > 1 or "max_shard_size" not in how
    found = exchange.read(f"{tmp_path}", reader.read)
    ours = gpt.build(gpt.Config(**found.config), seed=0).eval()
    ours.load_state_dict(found.weights)
    assert_same_logits(theirs.float(), ours)


@pytest.mark.parametrize("in_parts", [False, True])
def test_files_of_another_model_in_the_folder_are_not_read(tmp_path, in_parts):
    model, other = of("ids")[1], of("ids")[1]
    other = other._replace(weights={name: weight + 1 for name, weight in other.weights.items()})
    write(model, "hf", tmp_path / "a")
    write(other, "hf", tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").rename(tmp_path / "a" / "model_old.safetensors")
    if in_parts:  # the index names the parts
        (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "model-1.safetensors")
        names = exchange.load_safetensors(tmp_path / "a" / "model-1.safetensors")[0]
        index = json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")})
        (tmp_path / "a" / "model.safetensors.index.json").write_text(index)
    assert same_model(exchange.read(f"{tmp_path / 'a'}", reader.read), model)


@pytest.mark.parametrize(
    "format, arch",
    [
        ("nanogpt", "gpt2"),
        ("safetensors", "gpt2"),
        ("safetensors", "modern"),
        ("safetensors", "modern2"),
    ],
)
def test_an_exported_model_is_imported_unchanged(tmp_path, format, arch):
    model = of("char", arch)[1]
    write(model, format, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert same_model(exchange.read(f"{tmp_path / 'file'}", reader.read), model)


def nano(tmp_path: Path) -> dict[str, Any]:
    write(of("char")[1], "nanogpt", tmp_path / "mine")
    return torch.load(tmp_path / "mine" / "ckpt.pt", weights_only=True)


def test_a_checkpoint_as_nanogpt_saves_it_is_read(tmp_path):
    """It is compiled and has masks as buffers, an optimizer and a config, and no vocabulary."""
    state = nano(tmp_path)
    state["model"] = {f"_orig_mod.{name}": weight for name, weight in state["model"].items()}
    state["model"]["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    more = {
        "optimizer": {"state": {0: {"step": torch.tensor(5.0)}}},
        "iter_num": 5,
        "best_val_loss": torch.tensor(2.0),
    }
    del state["vocabulary"]
    torch.save(
        {**state, **more, "config": {"dataset": "any", "compile": True}}, tmp_path / "ckpt.pt"
    )
    assert same_model(
        exchange.read(f"{tmp_path}", reader.read),
        of("char")[1]._replace(vocabulary=VOCABULARIES["ids"]),
    )


def test_a_nanogpt_without_biases_gets_zero_biases(tmp_path):
    state, model = nano(tmp_path), of("char")[1]
    state["model"] = {
        name: weight for name, weight in state["model"].items() if not name.endswith("bias")
    }
    torch.save(state, tmp_path / "ckpt.pt")
    weights = {
        n: torch.zeros_like(w) if n.endswith("bias") else w for n, w in model.weights.items()
    }
    assert same_model(exchange.read(f"{tmp_path}", reader.read), model._replace(weights=weights))


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def test_code_in_a_nanogpt_file_is_not_run_and_the_error_says_what_to_do(text, tmp_path):
    state, intruder = nano(tmp_path), Intruder()
    intruder.target = tmp_path / "the code has run"
    torch.save({**state, "config": intruder}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="If you trust the file"):
        exchange.read(f"{tmp_path}", reader.read)
    begin = ["--data", text, "--out", tmp_path / "out", "--init-from", tmp_path / "ckpt.pt"]
    mistaken(run(*begin), "ckpt.pt", "system", "torch.save its 'model' and 'model_args' alone")
    assert not intruder.target.exists() and not (tmp_path / "out").exists()
    torch.load(tmp_path / "ckpt.pt", weights_only=False)
    assert intruder.target.exists()  # the file does contain code that would run


WRONG = {
    "another activation": ({"activation_function": "relu"}, {}, "activation_function is 'relu'"),
    "another norm": ({"layer_norm_epsilon": 1e-6}, {}, "layer_norm_epsilon is 1e-06"),
    "another model": ({"model_type": "llama"}, {}, "model_type is 'llama'"),
    "other layers": ({"n_layer": 1}, {}, "another number of layers than the weights, 3"),
    "other layers by another name": (
        {"n_layer": None, "num_hidden_layers": 1},
        {},
        "another number of layers than the weights, 3",
    ),
    "heads that are not a number": ({"n_head": "4"}, {}, "heads is '4'"),
    "a weight is missing": (
        {},
        {"transformer.h.1.mlp.c_fc.bias": None},
        "transformer.h.1.mlp.c_fc.bias is missing",
    ),
    "a weight too many": (
        {},
        {"transformer.h.1.extra": torch.ones(1)},
        "transformer.h.1.extra is not a weight",
    ),
    "a head of its own": ({}, {"lm_head.weight": torch.ones(12, 32)}, "lm_head.weight differs"),
    "not finite": (
        {},
        {"transformer.ln_f.bias": torch.full((32,), math.nan)},
        "transformer.ln_f.bias is not a tensor of finite",
    ),
    "whole numbers": (
        {},
        {"transformer.ln_f.bias": torch.ones(32).long()},
        "transformer.ln_f.bias is not a tensor",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_is_not_gpt2_is_refused(tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch")
    told, changed, said = WRONG[name]
    write(of("char")[1], "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    told = {**json.loads(path.read_text()), **told}
    told = {key: value for key, value in told.items() if value is not None}
    path.write_text(json.dumps(told))
    weights = {**safetensors.load_file(tmp_path / "hf" / "model.safetensors"), **changed}
    weights = {key: weight for key, weight in weights.items() if weight is not None}
    safetensors.save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        exchange.read(f"{tmp_path / 'hf'}", reader.read)
    assert str(caught.value).startswith(f"{tmp_path / 'hf'}: ") and "\n" not in str(caught.value)


def test_the_number_of_heads_can_have_its_other_name(tmp_path):
    pytest.importorskip("safetensors")
    write(of("char")[1], "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    told = json.loads(path.read_text())
    heads = told.pop("n_head")
    assert heads != 12  # the default
    path.write_text(json.dumps({**told, "num_attention_heads": heads}))
    assert exchange.read(f"{tmp_path / 'hf'}", reader.read).config["heads"] == heads


def test_a_head_that_differs_from_its_embedding_is_refused():
    """In a model of gpt2, one of them would be ignored."""
    config, vocabulary, weights = of("char")[1]
    weights = {**weights, "head.weight": weights["head.weight"] + 1}
    with pytest.raises(ValueError, match="head.weight differs from embedding.weight"):
        exchange.check_model(config, vocabulary, weights)


def test_weights_that_share_memory_are_refused():
    """A small file could otherwise hold a model of any size. A tied head is no such case."""
    whole = torch.ones(1000)
    exchange.check_weights({"embedding": whole, "head": whole, "one": torch.ones(3)})
    with pytest.raises(ValueError, match="share memory"):
        exchange.check_weights({f"{i}": whole[i:] for i in range(300)})


@pytest.mark.parametrize("key", ["model", "model_args", "vocabulary"])
def test_a_tensor_in_place_of_a_dict_is_an_error(tmp_path, key, recwarn):
    torch.save({**nano(tmp_path), key: torch.ones(3)}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="not a nanoGPT checkpoint|vocabulary is not a dict"):
        exchange.read(f"{tmp_path}", reader.read)
    assert not recwarn.list


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"block_size": 10**12},
            r"positions.weight is \(24, 32\); it must be \(1000000000000, 32\)",
        ),
        ({"arch": "gpt2"}, "'positions.weight'"),
        ({"embd": 10**6}, r"blocks.0.qkv.weight is \(96, 32\); it must be \(3000000, 1000000\)"),
    ],
    ids=lambda value: f"{value}"[:20],
)
def test_a_model_that_would_be_larger_than_its_weights_is_refused(tmp_path, change, message):
    """To build it would take any amount of memory, whatever the size of the file."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = of("char", "modern" if "arch" in change else "gpt2")[1]
    weights = {name: weight.clone() for name, weight in model.weights.items()}
    if "embd" in change:
        weights["embedding.weight"] = torch.zeros(0, change["embd"])
    about = {"config": {**model.config, **change}, "vocabulary": model.vocabulary}
    metadata = {"ddpkit": json.dumps(about)}
    safetensors.save_file(weights, tmp_path / "model", metadata)
    with pytest.raises(ValueError, match=message):
        exchange.read(f"{tmp_path / 'model'}", reader.read)


@pytest.mark.parametrize("config", ["", "[]", "[" * 100_000], ids=["nothing", "a list", "deep"])
def test_a_config_of_another_form_is_an_error_of_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path}')}: .+$") as caught:
        exchange.read(f"{tmp_path}", reader.read)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format", ["hf", "nanogpt"])
def test_another_architecture_is_exported_as_safetensors_only(done, tmp_path, format):
    export = ["export", done("modern")[1], "-o", tmp_path / "a", "--format"]
    mistaken(
        run(*export, format), f"--format {format}", "--arch gpt2 only", "modern", "safetensors"
    )
    assert run(*export, "safetensors").code == 0
    mistaken(run(*export, "safetensors"), tmp_path / "a", "exists")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.fixture(scope="module")
def exported(done, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    ran = run("export", done("gpt2")[1], "--format", "hf", "-o", folder / "hf")
    assert ran.code == 0 and ran.err == "", ran
    return folder / "hf"


@pytest.fixture(scope="module")
def further(exported, text, tmp_path_factory):
    """Train from an exported model, on a text that lacks some of its characters."""
    folder = tmp_path_factory.mktemp("further")
    (folder / "text.txt").write_text(text.read_text().replace("w", "").replace("\n", " "))
    flags = [
        "--data",
        folder / "text.txt",
        "--batch-size",
        8,
        "--dtype",
        "float32",
        "--lr",
        1e-3,
        "--dropout",
        0.1,
    ]
    flags += ["--init-from", exported, "--log-every", 1, "--save-every", 5, "--eval-every", 10]
    ran = run(*flags, "--steps", 10, "--out", folder / "out", "--dropout", 0)
    assert ran.code == 0 and ran.err == "", ran
    return flags, folder / "out"


def test_training_continues_from_the_loss_that_transformers_computes(
    transformers, exported, further
):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    flags, out = further
    ids = np.array(tokenizer(flags[1].read_text())["input_ids"])
    train, _ = chardata.split((ids,), 0.1)
    ((x, y),), _ = next(chardata.steps(chardata.BatchPlan(train, 16, 8)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert dict(losses(out))[1] == pytest.approx(float(loss), rel=1e-5)
    assert losses(out)[-1][1] < float(loss) < 0.9 * math.log(18)
    assert (
        state(out)["vocabulary"]["chars"]
        == exchange.read(f"{exported}", reader.read).vocabulary["chars"]
    )


def test_a_run_from_an_imported_model_resumes_without_the_model(exported, further, tmp_path):
    flags, _ = further
    begin = [*flags, "--init-from", shutil.copytree(exported, tmp_path / "hf")]
    for steps, out, args in [
        (4, "once", begin),
        (2, "twice", begin),
        (4, "twice", ["--log-every", 1]),
    ]:
        if args is not begin:
            shutil.rmtree(tmp_path / "hf")
        ran = run(*args, "--steps", steps, "--out", tmp_path / out)
        assert ran.code == 0, ran
    assert same_training(tmp_path / "once", tmp_path / "twice")
    mistaken(
        run(*flags, "--out", tmp_path / "once"),
        f"--init-from {exported}",
        f"--init-from {tmp_path / 'hf'}",
    )


def test_two_ranks_start_from_the_same_imported_model(further, tmp_path):
    flags, out = further
    ran = run(*flags, "--dropout", 0, "--steps", 10, "--out", tmp_path, "--spawn", 2)
    assert ran.code == 0, ran
    assert dict(losses(tmp_path))[1] == pytest.approx(dict(losses(out))[1], rel=1e-5)


def test_a_run_starts_from_an_out_folder_with_unchanged_weights(done, text, tmp_path):
    source = done("modern")[1]
    ran = run(
        "--data",
        text,
        "--init-from",
        source,
        "--out",
        tmp_path,
        "--steps",
        1,
        "--lr",
        1e-9,
        "--dtype",
        "float32",
    )
    assert ran.code == 0, ran
    assert state(tmp_path)["vocabulary"] == state(source)["vocabulary"]
    torch.testing.assert_close(state(tmp_path)["model"], state(source)["model"], rtol=0, atol=1e-8)


def start_from(path: Path, storage: Any = ckpt, read: Any = reader.read) -> dict[str, Any]:
    return exchange.start_state(f"{path}", "out", storage, read)


def test_each_checkpoint_of_another_run_is_checked_before_it_is_read(tmp_path):
    """If one of them could do harm, the one before it is used, as in a resume."""
    model = of("char")[1]
    config = {**model.config, "dropout": 0.0}
    vocabulary = {**model.vocabulary, "vocab": config["vocab"]}
    for step in (1, 2, 3):
        whole = {"model": dict(model.weights), "config": config, "vocabulary": vocabulary}
        ckpt.save(f"{tmp_path}", {**whole, "step": step}, step)
    (tmp_path / "step-zzz.pt").write_bytes(b"not the name of a checkpoint")
    newest, loaded = ckpt.list_checkpoints(f"{tmp_path}")[-1], []

    def read(file: Any) -> Any:
        if file.name.endswith(newest.name):
            raise ValueError("harmful")
        return reader.read(file)

    def load(folder: str, entry: ckpt.Entry) -> Any:
        loaded.append(entry.step)
        return ckpt.load(folder, entry)

    storage = SimpleNamespace(newest=ckpt.newest, load=load)
    with pytest.warns(UserWarning, match=f"^{newest.name}: harmful; using step-00000002-"):
        found = start_from(tmp_path, storage, read)
    assert same(found["model"], dict(model.weights)) and loaded == [2]


FORGED = {
    "a large size": ({"config": {"layers": 10**9}}, ""),  # the sizes of the weights are used
    "no architecture": ({"config": {"arch": None}}, "arch is None; it must be a name"),
    "heads": ({"config": {"heads": "4"}}, "heads is '4'; it must be a positive integer"),
    "block size": ({"config": {"block_size": 1 << 30}}, "positions.weight is (24, 32); it must"),
    "vocabulary": ({"vocabulary": {"kind": "byte"}}, "its vocabulary does not have"),
    "kind": ({"vocabulary": {"kind": "x"}}, "was not written by run.py: KeyError('x')"),
    "config": ({"config": None}, "was not written by run.py: TypeError"),
    "infinity": ({"model": {"norm.bias": torch.full((32,), math.inf)}}, "norm.bias is not a"),
    "integers": ({"model": {"norm.bias": torch.ones(32).int()}}, "norm.bias is not a tensor of f"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_checkpoint_of_another_run_is_checked_as_other_formats_are(name, tmp_path):
    model = of("char")[1]
    state = dict(config=model.config, vocabulary=model.vocabulary, model=dict(model.weights))
    changes, message = FORGED[name]
    for key, change in changes.items():
        state[key] = change and {**state[key], **change}
    ckpt.save(f"{tmp_path}", state, 1)
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            start_from(tmp_path)
    else:
        assert start_from(tmp_path)["config"]["layers"] == 3


def test_a_folder_beside_the_files_that_looks_like_a_checkpoint_does_not_matter(tmp_path):
    model = of("ids")[1]
    write(model, "hf", tmp_path / "a")
    (tmp_path / "a" / "step-1000").mkdir()
    assert same(start_from(tmp_path / "a")["model"], dict(model.weights))


@pytest.mark.parametrize("flag", ["--init-from", "--tokenizer"])
def test_a_url_is_refused_and_not_shown(text, tmp_path, flag):
    url = "ftp://me:doNotSayThis@127.0.0.1:1/tokenizer.json"
    ran = run(flag, url, "--data", text, "--out", tmp_path / "out")
    mistaken(ran, flag, "URL")
    assert "doNotSayThis" not in ran.err + ran.out and not (tmp_path / "out").exists()


def test_an_export_to_the_url_of_another_run_is_refused(done, tmp_path):
    out, theirs = done("gpt2")[1], shutil.copytree(done("modern")[1], tmp_path / "theirs")
    before = sorted(os.listdir(theirs))
    ran = run("export", out, "--format", "checkpoint", "-o", f"file://{theirs}")
    mistaken(ran, f"file://{theirs} exists already")
    for format in ("checkpoint", "safetensors"):
        mistaken(run("export", theirs, "--format", format, "-o", ""), "--output '' is empty")
    assert sorted(os.listdir(theirs)) == before


CONTRADICTIONS = {
    "layers": (["--layers", 3], ["--layers 3", "--layers 1", "or start without --init-from"]),
    "window": (["--block-size", 8], ["--block-size 8", "--block-size 16"]),
    "architecture": (["--arch", "modern"], ["--arch modern", "--arch gpt2"]),
    "tokens": (["--tokenizer", "byte"], ["--tokenizer byte", "--tokenizer char"]),
    "another text": (
        ["--data", ROOT / "README.md"],
        ["README.md", "is not in the vocabulary of 18"],
    ),
    "another kind": (
        ["--data", "ids.npy"],
        ["ids.npy: its tokens are of kind ids; the model needs char"],
    ),
    "no model": (["--init-from", ROOT / "tests"], [ROOT / "tests", "model.safetensors", "ckpt.pt"]),
    "an empty file": (
        ["--init-from", ROOT / "extras" / "__init__.py"],
        ["__init__.py", "torch.save"],
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_flag_that_contradicts_an_imported_model_is_an_error_of_one_line(
    exported, text, tmp_path, name
):
    more, said = CONTRADICTIONS[name]
    np.save(tmp_path / "ids.npy", np.zeros(3000, np.uint16))
    more = [tmp_path / value if value == "ids.npy" else value for value in more]
    mistaken(run("--init-from", exported, "--data", text, *more, "--out", tmp_path / "out"), *said)
    assert not (tmp_path / "out").exists()


def test_an_imported_folder_is_not_overwritten(exported, text, tmp_path):
    """It has no checkpoint of this program, so without a check, a new run would begin in it."""
    out = shutil.copytree(exported, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    mistaken(
        run("--init-from", out, "--data", text, "--out", f"{tmp_path}/./out"),
        "--init-from",
        "is the folder of --out",
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_imported_run_is_not_overwritten(done, text, tmp_path):
    out = shutil.copytree(done("gpt2")[1], tmp_path / "out")
    beginning = ["--init-from", out, "--data", text, "--out", f"{tmp_path}/./out"]
    mistaken(run(*beginning), "--init-from", "contradicts", "another --out")
    assert checkpoints(out)


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[]", b"{}", b'{"model": 1}', b"[" * 100_000])
def test_a_damaged_tokenizer_of_an_imported_model_is_named(tmp_path, data):
    write(of("char")[1], "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"^\S+/hf: tokenizer\.json is damaged: "):
        exchange.read(f"{tmp_path / 'hf'}", reader.read)


def test_ids_must_be_in_the_vocabulary_of_the_imported_model(tmp_path):
    write(of("ids")[1], "nanogpt", tmp_path / "a")
    begin = ["--init-from", tmp_path / "a", "--steps", 1, "--out", tmp_path / "out", "--data"]
    for name, top in (("fitting.npy", 99), ("larger.npy", 100)):
        np.save(tmp_path / name, np.arange(3000, dtype=np.uint16) % (top + 1))
    mistaken(run(*begin, tmp_path / "larger.npy"), "id 100", "ends at 99")
    ran = run(*begin, tmp_path / "fitting.npy")
    assert ran.code == 0 and state(tmp_path / "out")["vocabulary"]["vocab"] == 100, ran


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_weights_with_few_bits_are_checked_too(dtype):
    exchange.check_weights({"w": torch.ones(2).to(dtype)})
    with pytest.raises(ValueError, match="w is not a tensor of finite numbers"):
        exchange.check_weights({"w": torch.full((2,), math.nan).to(dtype)})


@pytest.mark.parametrize("name", ["gpt2", "no/such/folder"])
def test_a_path_that_does_not_exist_is_named_as_such(tmp_path, name):
    with pytest.raises((ValueError, OSError), match="no such file or folder; models of a hub"):
        exchange.read(f"{tmp_path}/{name}", reader.read)
