"""Tests of extras/flags.py and extras/machine.py through run.py: configuration, help, names, mfu.

Also tested here: what run.py prints about extras that are not installed.
"""

import importlib.util
import json
import math
import re

import click
import pytest
from conftest import MODEL, TINY, ahead, metrics, run

from extras import flags, machine

NO_GCSFS = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed"
)


def test_the_command_line_wins_over_the_environment_and_the_environment_over_the_file(
    text, tmp_path
):
    file, out = tmp_path / "a.toml", tmp_path / "out"
    file.write_text(
        "steps = 1\nseed = 5\nclip = 0.5\nbatch-size = 4\ncheckpoint_activations = true\n"
    )
    env = {"DDPKIT_SEED": "6", "DDPKIT_CLIP": "0.6", "DDPKIT_CONFIG": f"{file}"}
    ran = run(*MODEL, "--data", text, "--out", out, "--clip", 0.7, env=env)
    assert ran.code == 0, ran
    config = json.loads((out / "config.json").read_text())
    expected = {"steps": 1, "batch_size": 4, "checkpoint_activations": True}
    expected |= {"seed": 6, "clip": 0.7, "layers": 1}
    assert {key: config[key] for key in expected} == expected


def test_a_group_of_another_program_reads_variables_with_the_prefix(monkeypatch):
    seen = {}
    group = click.Group(
        "program",
        params=[click.Option(["--seed"], type=int, default=0)],
        invoke_without_command=True,
        callback=lambda **values: seen.update(values),
    )
    flags.extend(group, "MYPROGRAM", {})
    monkeypatch.setenv("MYPROGRAM_SEED", "3")
    group.main([], standalone_mode=False)
    assert seen == {"seed": 3}


def test_a_command_takes_the_folder_from_the_file_but_not_other_flags(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(f'out = "{tmp_path}/mine"\nseed = 5\n')
    starts = [["--config", file], {}], [[], {"DDPKIT_CONFIG": f"{file}"}]
    for command in ("sample", "eval", "info"):
        for flag, env in starts:
            ran = run(*flag, command, env=env)
            assert ran.code == 2 and f"{tmp_path}/mine: there is no checkpoint" in ran.err, ran


def test_config_json_has_the_peak_rate_and_its_source_and_mfu_is_relative_to_it(text, tmp_path):
    ran = run(*TINY, "--data", text, "--out", tmp_path, "--steps", 10)
    assert ran.code == 0, ran
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["peak_flops"] > 1e8 and config["peak_flops_source"] == "measured"
    line = metrics(tmp_path)[0]
    flops = machine.flops_per_token(layers=1, embd=16, vocab=18, block_size=16)
    mfu = line["tokens_per_s"] * flops / config["peak_flops"]
    assert math.isclose(line["mfu"], mfu, abs_tol=1e-4)


def test_help_shows_the_flags_in_sections():
    ran = run("--help")
    groups = re.split(r"\n(\w+):\n", ran.out)
    shown = {
        title: set(re.findall(r"^  (--[\w-]+)", body, re.MULTILINE))
        for title, body in zip(groups[1::2], groups[2::2])
    }
    assert {"Data", "Model", "Training", "Machine", "Output", "Commands"} <= shown.keys()
    assert "--data" in shown["Data"] and "--layers" in shown["Model"]
    assert "--lr" in shown["Training"] and "--spawn" in shown["Machine"]
    assert "--out" in shown["Output"]


# name: (arguments, environment, contents of a.toml, what the error must contain)
MISTAKES = {
    "unknown variable": ([], {"DDPKIT_BATCHSIZE": "8"}, "", ["DDPKIT_BATCHSIZE"]),
    "variable that no flag reads": (["info"], {"DDPKIT_INFO_OUT": "x"}, "", ["DDPKIT_OUT"]),
    "variable of --version": ([], {"DDPKIT_VERSION": "1"}, "", ["DDPKIT_VERSION"]),
    "old variable": ([], {"DDPKIT_TOKENS": "byte"}, "", ["DDPKIT_TOKENS", "DDPKIT_TOKENIZER"]),
    "old variable of sample": (
        ["sample"],
        {"DDPKIT_SAMPLE_TOKENS": "9"},
        "",
        ["DDPKIT_SAMPLE_TOKENS"],
    ),
    "no such file": (["--config", "no/such.toml"], {}, "", ["no/such.toml"]),
    "no TOML": (["--config", "{toml}"], {}, "seed = ", ["a.toml"]),
    "no regular file": (["--config", "/dev/null"], {}, "", ["/dev/null", "not a regular file"]),
    "unknown key": (
        ["--config", "{toml}"],
        {},
        "batchsize = 8",
        ["a.toml", "'batchsize'", "batch_size"],
    ),
    "old key": (["--config", "{toml}"], {}, "tokens = 'byte'", ["a.toml", "'tokens'", "tokenizer"]),
    "no flag": (["--config", "{toml}"], {}, "version = true", ["a.toml", "'version'"]),
    "a flag twice": (
        ["--config", "{toml}"],
        {},
        "log-every = 7\nlog_every = 9",
        ["a.toml", "given twice"],
    ),
    "no number": (["--config", "{toml}"], {}, 'clip = "much"', ["--clip", "'much'"]),
    "a pattern without quotes": (["a.txt", "b.txt"], {}, "", ["'a.txt'", "quotes: 'books/*.txt'"]),
    "a name for the training": (["train"], {}, "", ["'train'", "To train, give no command"]),
    "a flag after --": (["--", "-x"], {}, "", ["-x"]),
    "missing option": (["export"], {}, "", ["--format", "hf", "safetensors"]),
    "missing package": (["--data", "gs://a/b.txt"], {}, "", ["gcsfs"]),
}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """Return a function: a name from MISTAKES -> (exit code and output, the --out folder)."""

    def make(name):
        folder = tmp_path_factory.mktemp("mistake")
        args, env, toml, _ = MISTAKES[name]
        (folder / "a.toml").write_text(toml)
        args = [arg.format(toml=folder / "a.toml") for arg in args]
        if args[:1] not in (["sample"], ["export"], ["info"]):
            args = [*TINY, "--steps", 2, "--out", folder / "out", *args]
        return run(*args, env=env), folder / "out"

    with ahead(**{name: lambda name=name: make(name) for name in MISTAKES}) as runs:
        yield lambda name: runs[name].result()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=NO_GCSFS) if n == "missing package" else n for n in MISTAKES],
)
def test_a_mistake_gives_one_line_and_exit_code_2(mistaken, name):
    ran, out = mistaken(name)
    assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1, ran.err
    assert [text for text in MISTAKES[name][3] if text not in ran.err] == [], ran.err
    assert ran.code == 2 and ran.out == "" and not out.exists()
