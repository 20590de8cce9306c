"""What is for people and other programs: plot, info, export, --init-from, --tensorboard, --profile, completion."""

import ast
import itertools
import json
import math
import os
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ROOT,
    TINY,
    Ran,
    ahead,
    checkpoints,
    losses,
    metrics,
    run,
    same_training,
    state,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import chardata
import gpt
import run as program
from extras import exchange, plot

RUNS = [*TINY, "--dropout", 0, "--steps", 40, "--log-every", 1, "--eval-every", 10, "--save-every", 10]


@pytest.fixture(scope="module", autouse=True)
def done(text, tmp_path_factory):
    """done(name): (what was printed, the out folder) of a run below. They go on in the background from the start."""
    folder = tmp_path_factory.mktemp("extras")
    runs = {
        "gpt2": ["--arch", "gpt2", "--tensorboard", "--profile", 2],
        "modern": ["--tokens", "byte", "--steps", 12],
        "spawned": ["--spawn", 2, "--tensorboard", "--profile", 1, "--steps", 12],
    }

    def train(name: str) -> tuple[Ran, Path]:
        ran = run(*RUNS, "--data", text, "--out", folder / name, *runs[name])
        assert ran.code == 0, ran
        return ran, folder / name

    with ahead(**{name: partial(train, name) for name in runs}) as begun:
        yield lambda name: begun[name].result()


def mistaken(ran: Ran, *said: object) -> None:
    assert ran.code == 2 and ran.out == "" and ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran
    assert [str(part) for part in said if str(part) not in ran.err] == [], ran.err


# ------------------------------------------------------------------------------------------------- files on their own

USES = {
    "plot": """
        import sys
        run = plot.parse("a/b", '{"step": 1, "tokens": 9, "loss": 2.0}\\n{', "{}")
        assert plot.labels([run]) == ["b"] and plot.curve(run, "tokens", "loss") == ([9], [2.0])
        assert "torch" not in sys.modules
    """,
    "describe": """
        assert describe.last([{"loss": 1.5}, {"loss": None}], "loss", ".2f") == "1.50"
    """,
    "profiling": """
        assert list(profiling.traced(range(9), 2, "trace.json")) == list(range(9))
        assert "ProfilerStep#2" in open("trace.json").read()
    """,
    "board": """
        import glob
        board.write(board.open_board("out", start=0), {"step": 1, "loss": 2.0, "val_loss": float("nan")})
        (events,) = glob.glob("out/events*")
        assert b"loss" in open(events, "rb").read() and b"val_loss" not in open(events, "rb").read()
    """,
    "progress": """
        live = progress.follow(progress.Live(), tokens=9, seconds=1.0, read=lambda: (2.0, 0))
        record = {"step": 3, "total": 9, "loss": progress.mean(live)}
        assert progress.line(record, 79).endswith("3/9 loss 2.000") and progress.plain(record) == "step 3/9  loss 2.0000"
    """,
    "tokenizer": """
        words = '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 3}, "unk_token": "a"}}'
        assert tokenizer.size(words) == 4 and tokenizer.encode("a", words).tolist() == [3]
        assert "".join(tokenizer.decoded([], [3], words)) == "a"
    """,
    "sharded": """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(2, 3)
        wait = sharded.save(".saving", lambda digest: f"a-{digest}", model, [], sharded.group(9.0), step=4)
        wait()
        (path,) = __import__("glob").glob("a-*")
        assert sharded.damage(path, 0, 1) == "" and sharded.load(path)["step"] == 4
        assert torch.equal(sharded.load(path)["model"]["weight"], model.weight)
    """,
    "machine": """
        import torch
        cpu = torch.device("cpu")
        assert machine.memory(cpu) > 1e8 and machine.matmul_rate(cpu, torch.float32) > 1e6
        assert machine.arithmetic("float16", cpu) == "float16" and not machine.compiling(None, cpu, flops=1.0)
    """,
    "folder": """
        import sys
        for where in (".", "memory://out"):
            folder.write(where, "metrics.jsonl", folder.line({"step": 1, "loss": float("nan")}) + '{"step": 2')
            assert folder.metrics(where, 9) == ['{"step": 1, "loss": null}\\n'], where
        folder.append(".", "metrics.jsonl", "}\\n")
        assert len(folder.metrics(".", 9)) == 2 and len(folder.metrics(".", 1)) == 1
        try:
            folder.read("nothing://out", "metrics.jsonl")
        except ValueError as error:
            assert "nothing" in str(error)
        assert "torch" not in sys.modules
    """,
    "flags": """
        import click
        options = {"Model": [click.option("--rows", type=int)], "Other": [click.option("--config", callback=flags.from_toml, is_eager=True)]}
        main = click.command()(flags.all_of(options)(lambda rows, config: rows))
        flags.in_groups(main, options)
        open("a.toml", "w").write("rows = 3\\n")
        assert main.main(["--config", "a.toml"], standalone_mode=False) == 3
        assert "Other:" in main.get_help(click.Context(main)).split("--rows")[1]
    """,
    "mistakes": """
        import click
        try:
            with mistakes.users_mistakes(), mistakes.about("--data"):
                open("none")
        except click.ClickException as error:
            assert (error.format_message(), error.exit_code) == ("--data: none: No such file or directory", 2)
        assert mistakes.out_of_memory(MemoryError()) == "MemoryError" and not mistakes.out_of_memory(OSError("full"))
    """,
    "exchange": """
        import torch
        weights = {"embedding.weight": torch.ones(5, 4), "blocks.0.qkv.weight": torch.ones(12, 4)}
        config = {"arch": "any", "vocab": 5, "block_size": 7, "layers": 1, "heads": 2, "embd": 4}
        exchange.write(exchange.Model(config, {"kind": "char", "chars": "abcde"}, weights), "safetensors", "a")
        found = exchange.read("a")
        assert found.config == config and torch.equal(found.weights["embedding.weight"], weights["embedding.weight"])
    """,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    def use(name: str) -> subprocess.CompletedProcess:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / "extras" / f"{name}.py", folder)
        lines = [f"import {name}", *(line.removeprefix(" " * 8) for line in USES[name].splitlines())]
        env = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-c", "\n".join(lines)]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90)

    with ahead(**{name: partial(use, name) for name in USES}) as begun:
        yield lambda name: begun[name].result()


@pytest.mark.parametrize("name", USES)
def test_an_extra_copied_by_itself_into_an_empty_folder_works(alone, name):
    ended = alone(name)
    assert ended.returncode == 0, ended.stderr


def test_an_extra_knows_nothing_of_the_others_nor_of_the_modules():
    files = {path.stem: path for path in (ROOT / "extras").glob("*.py") if path.stem != "__init__"}
    assert files.keys() == USES.keys()
    ours = {*files, "extras", *(path.stem for path in ROOT.glob("*.py"))}
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [f"{node.module}"]
                assert not ours & {name.split(".")[0] for name in names}, f"{path.name}: {ast.unparse(node)}"


# --------------------------------------------------------------------------------------------------------------- plot

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency" (2009):
# of linear RGB, with no cones of one kind at all
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color: str) -> np.ndarray:
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ rgb.clip(0, 1) / XYZ.sum(1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_colours_of_two_runs_differ_for_everybody(blindness):
    """By 15 in CIE L*a*b*, where 2.3 is a difference that can just be seen."""
    seen = [lab(BLINDNESS[blindness] @ linear(color)) for color in plot.COLORS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


@pytest.mark.parametrize("color", plot.COLORS)
def test_a_colour_stands_out_from_the_paper(color):
    assert 1.05 / (XYZ[1] @ linear(color) + 0.05) >= 3  # WCAG 2.1, 1.4.11: of graphics


def test_twenty_runs_are_drawn_in_twenty_ways():
    ways = [(way["color"], str(way["linestyle"])) for way in itertools.islice(plot.styles(), 20)]
    assert len({*ways}) == 20 and len({dash for _, dash in ways[:4]}) == 4


def test_what_is_drawn_are_the_metrics(done):
    out = done("gpt2")[1]
    drawn = plot.figure([parsed(out)])
    training = [line for line in metrics(out) if "loss" in line]
    validation = {line["step"]: line["val_loss"] for line in metrics(out) if "val_loss" in line}
    tokens = {line["step"]: line["tokens"] for line in training}
    for panel, x in zip(drawn.axes, (dict(zip(tokens, tokens)), tokens)):
        raw, smoothed, dots = panel.get_lines()
        assert list(zip(*raw.get_data())) == [(x[line["step"]], line["loss"]) for line in training]
        assert list(zip(*dots.get_data())) == [(x[step], loss) for step, loss in validation.items()]
        assert list(smoothed.get_xdata()) == list(raw.get_xdata())
    assert list(drawn.axes[2].get_lines()[0].get_ydata()) == [line["tokens_per_s"] for line in training]
    assert list(drawn.axes[3].get_lines()[0].get_ydata()) == [line["lr"] for line in training]


def parsed(out: Path) -> plot.Run:
    return plot.parse(str(out), (out / "metrics.jsonl").read_text(), (out / "config.json").read_text())


def test_a_smoothed_curve_keeps_lines_straight_and_gaps_open():
    rising = [float(i) for i in range(100)]
    assert plot.smooth(rising, np.mean)[:97] == pytest.approx(rising[:97])  # at the end there is less to average
    assert plot.smooth([5.0] * 50, np.median) == [5.0] * 50
    gap = plot.smooth([1.0, math.nan, 3.0], np.mean)
    assert math.isnan(gap[1]) and gap[0] == 1 and gap[2] == 3
    assert max(plot.smooth([1.0] * 40 + [99.0] + [1.0] * 40, np.median)) == 1


def test_what_is_no_line_of_metrics_is_dropped_and_what_was_not_finite_is_a_gap():
    lines = ['{"step": 1, "tokens": 9, "loss": null}', "[1]", '"step"', '{"loss": 1}', '{"step": 2, "lo', "\x00",
             '{"step": 1, "val_loss": 3.0}']  # fmt: skip
    found = plot.parse("a", "\n".join(lines), "{}")
    (x,), (y,) = plot.curve(found, "tokens", "loss")
    assert x == 9 and math.isnan(y)
    assert plot.curve(found, "tokens", "val_loss") == ([9], [3.0])


def test_runs_are_named_by_what_they_differ_in():
    configs = [{"lr": 0.1, "seed": 0, "layers": 2}, {"lr": 0.2, "seed": 0, "layers": 2}]
    runs = [plot.Run(f"runs/{i}/", [], config) for i, config in enumerate(configs)]
    assert plot.labels(runs) == ["0 (lr 0.1)", "1 (lr 0.2)"]
    assert plot.labels(runs[:1]) == ["0"]
    assert plot.labels([run._replace(name=f"{run.name}out") for run in runs])[0] == "runs/0/out (lr 0.1)"


def test_a_plot_of_two_runs_is_one_picture_always_the_same(done, tmp_path):
    outs = [done("gpt2")[1], done("modern")[1]]
    for name in ("a.svg", "b.svg", "a.png"):
        assert run("plot", *outs, "-o", tmp_path / name) == Ran(0, "", "")
    picture = (tmp_path / "a.svg").read_text()
    assert picture == (tmp_path / "b.svg").read_text() and "gpt2 (arch gpt2)" in picture
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_does_without_torch(done, tmp_path):
    launcher = [sys.executable, "-X", "importtime", "run.py"]
    ran = run("plot", done("gpt2")[1], "-o", tmp_path / "a.svg", launcher=launcher)
    imported = {line.split("|")[-1].strip() for line in ran.err.splitlines()}
    assert ran.code == 0 and "matplotlib" in imported and "torch" not in imported


def test_what_cannot_be_plotted_is_one_line(done, tmp_path):
    out = done("gpt2")[1]
    mistaken(run("plot", tmp_path, "-o", tmp_path / "a.png"), tmp_path, "metrics.jsonl", "No such file")
    mistaken(run("plot", out, "-o", tmp_path / "a.doc"), "a.doc", ".png", ".svg")
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    mistaken(run("plot", out, "-o", tmp_path / "a.png", env={"PYTHONPATH": f"{tmp_path}"}), "pip install matplotlib")
    assert not [*tmp_path.glob("a.*")]


# ---------------------------------------------------------------------------------------------- tensorboard, profile


def shown(out: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: tag -> [(step, value), ...]."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def logged(out: Path) -> dict[str, list[tuple[int, float]]]:
    keys = {key for line in metrics(out) for key in line if key != "step"}
    return {key: [(line["step"], pytest.approx(line[key])) for line in metrics(out) if key in line] for key in keys}


def test_tensorboard_shows_the_metrics(done):
    assert shown(done("gpt2")[1]) == logged(done("gpt2")[1])


def test_rank_0_alone_writes_for_tensorboard_and_a_trace(done):
    out = done("spawned")[1]
    assert len([*out.glob("events.*")]) == 1 and shown(out) == logged(out)
    assert len([*out.glob("trace*")]) == 1


def test_tensorboard_shows_steps_that_are_done_again_once(done, tmp_path):
    pytest.importorskip("tensorboard")
    out = shutil.copytree(done("gpt2")[1], tmp_path / "out")
    checkpoints(out)[-1].unlink()
    ran = run("--out", out, "--log-every", 1, "--tensorboard")
    assert ran.code == 0 and len([*out.glob("events.*")]) == 2, ran
    assert [step for step, _ in shown(out)["loss"]] == list(range(1, 41))


def test_a_trace_is_of_as_many_steps_as_asked_for(done):
    events = json.loads((done("gpt2")[1] / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
    assert sum(name.startswith("Optimizer.step#AdamW") for name in names) == 2


def test_a_trace_of_more_steps_than_are_left_is_a_warning(text, tmp_path):
    ran = run(*RUNS, "--data", text, "--out", tmp_path, "--steps", 3, "--profile", 5)
    assert ran.code == 0 and "Warning: --profile 5: 3 steps are left" in ran.err, ran


# --------------------------------------------------------------------------------------------------------------- info


def test_info_tells_what_the_newest_checkpoint_is_and_which_verify(done, tmp_path):
    out = shutil.copytree(done("gpt2")[1], tmp_path / "out")
    damaged = bytearray(checkpoints(out)[0].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    checkpoints(out)[0].write_bytes(damaged)
    ran = run("info", out)
    assert ran.code == 0 and ran.err == "", ran
    last, model = metrics(out)[-2], gpt.build(gpt.Config(18, 16, 1, 2, 16, arch="gpt2"), 0)
    for told in ("gpt2, 1 layers, 2 heads, 16 wide, block size 16", "18 tokens of kind char",
                 f"{sum(p.numel() for p in model.parameters()):,} (", f"40 steps, {last['tokens']:,} tokens",
                 f"training {last['loss']:.4f}, validation {metrics(out)[-1]['val_loss']:.4f}",
                 f"torch {torch.__version__}", "--batch-size 8"):  # fmt: skip
        assert told in ran.out
    verdicts = dict(re.findall(r"(step-\S+)  (\w+)", ran.out))
    assert verdicts == {path.name: "verified" for path in checkpoints(out)} | {checkpoints(out)[0].name: "damaged"}


def test_info_needs_nothing_but_the_checkpoint(done, tmp_path):
    shutil.copy(checkpoints(done("gpt2")[1])[-1], tmp_path)
    ran = run("info", tmp_path)
    assert ran.code == 0 and "40 steps, unknown tokens" in ran.out and "made with   unknown" in ran.out, ran


def test_info_of_nothing_is_one_line(tmp_path):
    mistaken(run("info", tmp_path), tmp_path, "no checkpoint")


# ------------------------------------------------------------------------------------------------- export, --init-from


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


VOCABULARIES = {
    "char": {"kind": "char", "chars": "\x00\n\r !Aaé\u0301\u2028😀€"},
    "byte": {"kind": "byte", "chars": ""},
    "ids": {"kind": "ids", "chars": ""},
}


def of(kind: str, arch: str = "gpt2") -> tuple[gpt.GPT, exchange.Model]:
    """A model with random weights, biases and norms too."""
    vocab = {"char": len(VOCABULARIES["char"]["chars"]), "byte": 256, "ids": 100}[kind]
    model = gpt.build(gpt.Config(vocab, block_size=24, layers=3, heads=4, embd=32, arch=arch), seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    config = {key: value for key, value in model.config._asdict().items() if key != "dropout"}
    return model, exchange.Model(config, VOCABULARIES[kind], model.state_dict())


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
        torch.testing.assert_close(theirs(tokens(ours)).logits, ours(tokens(ours)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_transformers_computes_and_generates_the_same(transformers, tmp_path, kind):
    ours, model = of(kind)
    exchange.write(model, "hf", f"{tmp_path / 'hf'}")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert_same_logits(theirs, ours)
    prompt = torch.tensor([[3, 1, 4]])
    said = theirs.generate(prompt, do_sample=False, max_new_tokens=20, attention_mask=torch.ones_like(prompt))
    assert said[0, 3:].tolist() == list(itertools.islice(gpt.sample(ours, prompt[0], temperature=0), 20))
    assert same_model(exchange.read(f"{tmp_path / 'hf'}"), model)


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "20KB"}, {"half": True}, {"bare": True}], ids=str)
def test_a_model_that_transformers_saved_is_the_same_here(transformers, tmp_path, how):
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
    found = exchange.read(f"{tmp_path}")
    ours = gpt.build(gpt.Config(**found.config), seed=0).eval()
    ours.load_state_dict(found.weights)
    assert_same_logits(theirs.float(), ours)


@pytest.fixture(scope="module")
def tokenizers(transformers, tmp_path_factory):
    """tokenizers[kind]: transformers' own, as it reads what we write and saves it again."""
    folder, found = tmp_path_factory.mktemp("tokenizers"), {}
    for kind in ("char", "byte"):
        exchange.write(of(kind)[1], "hf", f"{folder / kind}")
        found[kind] = transformers.AutoTokenizer.from_pretrained(folder / kind)
        found[kind].save_pretrained(folder / kind)
        assert exchange.read(f"{folder / kind}").vocabulary == VOCABULARIES[kind]
    return found


@settings(max_examples=50, deadline=None)
@given(text=st.text(VOCABULARIES["char"]["chars"], min_size=1))
def test_characters_are_the_same_tokens_to_transformers(tokenizers, text):
    ids = chardata.encode(text, **VOCABULARIES["char"]).tolist()
    assert tokenizers["char"](text)["input_ids"] == ids and tokenizers["char"].decode(ids) == text


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_bytes_are_the_same_tokens_to_transformers(tokenizers, text):
    assert tokenizers["byte"](text)["input_ids"] == list(text.encode())
    assert tokenizers["byte"].decode(list(text.encode())) == text


def test_a_character_that_is_not_in_the_vocabulary_is_an_error_to_transformers_too(tokenizers):
    with pytest.raises(Exception, match="vocabulary"):
        tokenizers["char"]("Z")


@pytest.mark.parametrize("format, arch", [("nanogpt", "gpt2"), ("safetensors", "gpt2"), ("safetensors", "modern")])
def test_what_is_exported_is_imported(tmp_path, format, arch):
    model = of("char", arch)[1]
    exchange.write(model, format, f"{tmp_path / 'file'}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert same_model(exchange.read(f"{tmp_path / 'file'}"), model)


def nano(tmp_path: Path) -> dict[str, Any]:
    exchange.write(of("char")[1], "nanogpt", f"{tmp_path / 'mine'}")
    return torch.load(tmp_path / "mine" / "ckpt.pt", weights_only=True)


def test_a_nanogpt_file_has_its_names_and_shapes(tmp_path):
    state, c = nano(tmp_path), 32
    layer = {"ln_1": (c,), "attn.c_attn": (3 * c, c), "attn.c_proj": (c, c), "ln_2": (c,), "mlp.c_fc": (4 * c, c),
             "mlp.c_proj": (c, 4 * c)}  # fmt: skip
    expected = {"transformer.wte.weight": (12, c), "transformer.wpe.weight": (24, c), "lm_head.weight": (12, c),
                "transformer.ln_f.weight": (c,), "transformer.ln_f.bias": (c,)}  # fmt: skip
    for i, (name, shape) in itertools.product(range(3), layer.items()):
        expected |= {f"transformer.h.{i}.{name}.weight": shape, f"transformer.h.{i}.{name}.bias": shape[:1]}
    assert {name: tuple(weight.shape) for name, weight in state["model"].items()} == expected
    assert state["model_args"] == {"n_layer": 3, "n_head": 4, "n_embd": c, "block_size": 24, "bias": True,
                                   "vocab_size": 12, "dropout": 0.0}  # fmt: skip


def test_nanogpts_sampling_finds_the_characters_and_no_code(tmp_path):
    """It looks for data/DATASET/meta.pkl, a dict of two dicts, under the name that the checkpoint tells."""
    assert nano(tmp_path)["config"] == {"dataset": "mine"}
    pickled = (tmp_path / "mine" / "meta.pkl").read_bytes()
    assert not {op.name for op, *_ in pickletools.genops(pickled)} & {"GLOBAL", "STACK_GLOBAL", "INST", "REDUCE"}
    chars, meta = VOCABULARIES["char"]["chars"], pickle.loads(pickled)
    assert [meta["stoi"][char] for char in chars] == [*range(meta["vocab_size"])] == [*range(len(chars))]
    assert "".join(map(meta["itos"].get, range(len(chars)))) == chars
    for kind in ("byte", "ids"):
        exchange.write(of(kind)[1], "nanogpt", f"{tmp_path / kind}")
        assert [path.name for path in (tmp_path / kind).iterdir()] == ["ckpt.pt"]


def test_a_nanogpt_folder_is_read_as_it_is_saved_there(tmp_path):
    """Compiled, with masks as buffers, an optimizer, a config; of a vocabulary it says nothing."""
    state = nano(tmp_path)
    state["model"] = {f"_orig_mod.{name}": weight for name, weight in state["model"].items()}
    state["model"]["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    more = {"optimizer": {"state": {0: {"step": torch.tensor(5.0)}}}, "iter_num": 5, "best_val_loss": torch.tensor(2.0)}
    del state["vocabulary"]
    torch.save({**state, **more, "config": {"dataset": "any", "compile": True}}, tmp_path / "ckpt.pt")
    assert same_model(exchange.read(f"{tmp_path}"), of("char")[1]._replace(vocabulary=VOCABULARIES["ids"]))


def test_a_nanogpt_without_biases_has_zeros_here(tmp_path):
    state, model = nano(tmp_path), of("char")[1]
    state["model"] = {name: weight for name, weight in state["model"].items() if not name.endswith("bias")}
    torch.save(state, tmp_path / "ckpt.pt")
    weights = {n: torch.zeros_like(w) if n.endswith("bias") else w for n, w in model.weights.items()}
    assert same_model(exchange.read(f"{tmp_path}"), model._replace(weights=weights))


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def test_code_in_a_nanogpt_file_is_not_run_and_the_line_says_what_to_do(text, tmp_path):
    state, intruder = nano(tmp_path), Intruder()
    intruder.target = tmp_path / "the code has run"
    torch.save({**state, "config": intruder}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="Where you trust the file"):
        exchange.read(f"{tmp_path}")
    begin = ["--data", text, "--out", tmp_path / "out", "--init-from", tmp_path / "ckpt.pt"]
    mistaken(run(*begin), "ckpt.pt", "system", "torch.save its 'model' and 'model_args' alone")
    assert not intruder.target.exists() and not (tmp_path / "out").exists()
    torch.load(tmp_path / "ckpt.pt", weights_only=False)
    assert intruder.target.exists()  # so it would have been


WRONG = {
    "another activation": ({"activation_function": "relu"}, {}, "activation_function is 'relu'"),
    "another norm": ({"layer_norm_epsilon": 1e-6}, {}, "layer_norm_epsilon is 1e-06"),
    "another model": ({"model_type": "llama"}, {}, "model_type is 'llama'"),
    "no heads": ({"n_head": "4"}, {}, "heads is '4'"),
    "a weight is missing": ({}, {"transformer.h.1.mlp.c_fc.bias": None}, "transformer.h.1.mlp.c_fc.bias is missing"),
    "a weight too many": ({}, {"transformer.h.1.extra": torch.ones(1)}, "transformer.h.1.extra is not one"),
    "a head of its own": ({}, {"lm_head.weight": torch.ones(12, 32)}, "lm_head.weight is another"),
    "not finite": (
        {},
        {"transformer.ln_f.bias": torch.full((32,), math.nan)},
        "transformer.ln_f.bias is not a tensor of finite",
    ),
    "whole numbers": ({}, {"transformer.ln_f.bias": torch.ones(32).long()}, "transformer.ln_f.bias is not a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_gpt2_is_refused(tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch")
    told, changed, said = WRONG[name]
    exchange.write(of("char")[1], "hf", f"{tmp_path / 'hf'}")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
    weights = {**safetensors.load_file(tmp_path / "hf" / "model.safetensors"), **changed}
    weights = {key: weight for key, weight in weights.items() if weight is not None}
    safetensors.save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        exchange.read(f"{tmp_path / 'hf'}")
    assert str(caught.value).startswith(f"{tmp_path / 'hf'}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("format", ["hf", "nanogpt"])
def test_another_architecture_is_exported_as_safetensors_alone(done, tmp_path, format):
    export = ["export", done("modern")[1], "-o", tmp_path / "a", "--format"]
    mistaken(run(*export, format), f"--format {format}", "--arch modern", "safetensors")
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
    """A run that begins with an exported model, on a text that lacks some of its characters."""
    folder = tmp_path_factory.mktemp("further")
    (folder / "text.txt").write_text(text.read_text().replace("w", "").replace("\n", " "))
    flags = ["--data", folder / "text.txt", "--batch-size", 8, "--dtype", "float32", "--lr", 1e-3, "--dropout", 0.1]
    flags += ["--init-from", exported, "--log-every", 1, "--save-every", 5, "--eval-every", 10]
    ran = run(*flags, "--steps", 10, "--out", folder / "out", "--dropout", 0)
    assert ran.code == 0 and ran.err == "", ran
    return flags, folder / "out"


def test_training_goes_on_from_the_loss_that_transformers_computes(transformers, exported, further):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    flags, out = further
    ids = np.array(tokenizer(flags[1].read_text())["input_ids"])
    train, _ = chardata.split((ids,), 0.1)
    ((x, y),), _ = next(chardata.steps(train, 16, 8))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert dict(losses(out))[1] == pytest.approx(float(loss), rel=1e-5)
    assert losses(out)[-1][1] < float(loss) < 0.9 * math.log(18)
    assert state(out)["vocabulary"]["chars"] == exchange.read(f"{exported}").vocabulary["chars"]


def test_a_run_that_began_elsewhere_resumes_without_it(exported, further, tmp_path):
    flags, _ = further
    begin = [*flags, "--init-from", shutil.copytree(exported, tmp_path / "hf")]
    for steps, out, args in [(4, "once", begin), (2, "twice", begin), (4, "twice", ["--log-every", 1])]:
        if args is not begin:
            shutil.rmtree(tmp_path / "hf")
        ran = run(*args, "--steps", steps, "--out", tmp_path / out)
        assert ran.code == 0, ran
    assert same_training(tmp_path / "once", tmp_path / "twice")
    mistaken(run(*flags, "--out", tmp_path / "once"), f"--init-from {exported}", f"--init-from {tmp_path / 'hf'}")


def test_two_ranks_begin_with_the_same_model(further, tmp_path):
    flags, out = further
    ran = run(*flags, "--dropout", 0, "--steps", 10, "--out", tmp_path, "--spawn", 2)
    assert ran.code == 0, ran
    assert dict(losses(tmp_path))[1] == pytest.approx(dict(losses(out))[1], rel=1e-5)


def test_an_out_folder_is_begun_with_as_it_is(done, text, tmp_path):
    source = done("modern")[1]
    ran = run(
        "--data", text, "--init-from", source, "--out", tmp_path, "--steps", 1, "--lr", 1e-9, "--dtype", "float32"
    )
    assert ran.code == 0, ran
    assert state(tmp_path)["vocabulary"] == state(source)["vocabulary"]
    torch.testing.assert_close(state(tmp_path)["model"], state(source)["model"], rtol=0, atol=1e-8)


CONTRADICTIONS = {
    "layers": (["--layers", 3], ["--layers 3", "--layers 1"]),
    "window": (["--block-size", 8], ["--block-size 8", "--block-size 16"]),
    "architecture": (["--arch", "modern"], ["--arch modern", "--arch gpt2"]),
    "tokens": (["--tokens", "byte"], ["--tokens byte", "--tokens char"]),
    "another text": (["--data", ROOT / "README.md"], ["README.md", "is not among the 18"]),
    "no model": (["--init-from", ROOT / "tests"], [ROOT / "tests", "config.json", "ckpt.pt"]),
    "an empty file": (["--init-from", ROOT / "extras" / "__init__.py"], ["__init__.py", "torch.save"]),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_an_imported_model_is_one_line(exported, text, tmp_path, name):
    more, said = CONTRADICTIONS[name]
    mistaken(run("--init-from", exported, "--data", text, *more, "--out", tmp_path / "out"), *said)
    assert not (tmp_path / "out").exists()


def test_what_is_begun_with_is_not_overwritten(done, text, tmp_path):
    out = shutil.copytree(done("gpt2")[1], tmp_path / "out")
    beginning = ["--init-from", out, "--data", text, "--fresh", "--out", f"{tmp_path}/./out"]
    mistaken(run(*beginning), "--init-from", "--out itself")
    assert checkpoints(out)


def test_ids_are_those_of_the_model(tmp_path):
    exchange.write(of("ids")[1], "nanogpt", f"{tmp_path / 'a'}")
    begin = ["--init-from", tmp_path / "a", "--steps", 1, "--out", tmp_path / "out", "--data"]
    for name, top in (("fitting.npy", 99), ("larger.npy", 100)):
        np.save(tmp_path / name, np.arange(3000, dtype=np.uint16) % (top + 1))
    mistaken(run(*begin, tmp_path / "larger.npy"), "larger.npy", "id 100", "ends at 99")
    ran = run(*begin, tmp_path / "fitting.npy")
    assert ran.code == 0 and state(tmp_path / "out")["vocabulary"]["vocab"] == 100, ran


# ---------------------------------------------------------------------------------------- the command line's own parts


def plainly(*args: object, **env: str) -> Ran:
    """Without the warm start, as these are answered without torch."""
    return run(*args, launcher=[sys.executable, "-X", "importtime", "run.py"], env=env)


def test_the_version_is_told_without_torch():
    ran = plainly("--version")
    assert ran.code == 0 and ran.out == f"ddpkit, version {program.__version__}\n" and " torch" not in ran.err


@pytest.mark.parametrize("name", program.cli.commands)
def test_the_help_of_a_command_has_an_example(name):
    command = program.cli.commands[name]
    assert f"  python run.py {name}" in command.get_help(program.click.Context(command))


def test_a_shell_completes_commands_and_flags():
    words = {"_RUN_PY_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    ran = plainly(**words, COMP_WORDS="run.py ex")
    assert ran.out == "plain,export\n" and " torch" not in ran.err
    assert plainly(**words, COMP_WORDS="run.py --init").out == "plain,--init-from\n"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_weights_of_few_bits_are_checked_as_others_are(dtype):
    exchange.check({"w": torch.ones(2).to(dtype)})
    with pytest.raises(ValueError, match="w is not a tensor of finite numbers"):
        exchange.check({"w": torch.full((2,), math.nan).to(dtype)})
