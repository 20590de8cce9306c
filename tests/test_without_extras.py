"""Without extras/, the core works alone; a run that needs one of its files ends with one line and changes nothing.

That is: the presence of a file never changes what a run computes, writes or sends, or how it ends.
"""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, TINY, contents, run, same_training, state
from test_run import FIFTY, at_loss, config, evaluations, on_two_ranks, stop_at

pytestmark = pytest.mark.skipif(not (ROOT / "extras").is_dir(), reason="compares with extras/")
# Run several command lines, given as JSON, in one process of a copy of the core.
PROGRAM = "import json, run, sys; print([run.main(args) for args in json.loads(sys.argv[1])])"
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_JOB_ID": "1"}


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """Copy the six modules of the core, and return their folder."""
    folder = tmp_path_factory.mktemp("core")
    for name in "ddp_setup gpt chardata loop ckpt run".split():
        shutil.copy(ROOT / f"{name}.py", folder)
    return folder


def run_all(
    core: Path, *lines: list[object], env: dict[str, str] = {}
) -> tuple[list[int], str, list[str]]:
    """Run command lines in the copy. Return their exit codes, what they printed, and the lines of stderr."""
    text = json.dumps([[*map(str, line)] for line in lines])
    ran = run(launcher=[sys.executable, "-c", PROGRAM, text], env=env, root=core)
    *printed, codes = ran.out.splitlines(keepends=True)
    return json.loads(codes), "".join(printed), ran.err.splitlines()


def test_a_run_with_torchs_muon_continues_without_extras_bit_for_bit_and_one_with_fast_muon_is_refused(
    core, monkeypatch, text, tmp_path
):
    for optimizer in ("muon", "fast-muon"):
        at_loss(monkeypatch, partial(stop_at, 20))
        flags = [*FIFTY, "--data", text, "--out", tmp_path / optimizer, "--optimizer", optimizer]
        assert run(*flags).code == 3
    for name in ("with", "without"):
        shutil.copytree(tmp_path / "muon", tmp_path / name)
    assert run("--out", tmp_path / "with", "--log-every", 1).code == 0
    before = contents(tmp_path / "fast-muon")
    codes, out, err = run_all(
        core,
        ["--out", tmp_path / "without", "--log-every", 1],
        ["--out", tmp_path / "fast-muon"],
        ["--out", tmp_path / "fast-muon", "--optimizer", "auto"],
        ["eval", "--out", tmp_path / "without"],
        ["sample", "--out", tmp_path / "without", "--prompt", "the ", "--max-new-tokens", 9],
    )
    assert codes == [0, 2, 2, 0, 0] and len(err) == 2, err
    assert all(line.startswith("Error: ") and "extras/muon.py" in line for line in err), err
    assert contents(tmp_path / "fast-muon") == before
    assert same_training(tmp_path / "without", tmp_path / "with")
    assert f"\nloss {evaluations(tmp_path / 'without')[50]:.4f} nats per token" in out
    assert len(out.splitlines()[-1]) == len("the ") + 9 or "\nthe " in out


NEED = {
    "--data s3://bucket/a.txt": "remote",
    "--out s3://bucket/run": "remote",
    "--tokenizer x.json": "tokenizer",
    "--init-from x": "exchange",
    "--strategy fsdp": "compose",
    "--use replicas": "compose",
    "--optimizer fast-muon": "muon",
    "--out {sharded}": "sharded",
    "sample --out {sharded}": "sharded",
    "eval --out s3://bucket/run": "remote",
}


def test_what_needs_an_extra_gives_one_line_and_exit_code_2(core, text, undisturbed, tmp_path):
    sharded = shutil.copytree(undisturbed(1), tmp_path / "sharded")
    folder = sharded / f"step-00000999-{'0123456789abcdef' * 2}"
    folder.mkdir()
    (folder / "rank-0.pt").write_bytes(b"a shard")
    lines = []
    for case in NEED:
        words = case.format(sharded=sharded).split()
        start = [*TINY, "--data", text, "--steps", 2, "--out", tmp_path / "new"]
        lines.append(words if words[0] in ("sample", "eval") else [*start, *words])
    before = contents(tmp_path)
    codes, out, err = run_all(core, *lines)
    assert codes == [2] * len(NEED) and out == "", (out, err)
    wrong = [
        line
        for line, name in zip(err, NEED.values(), strict=True)
        if not line.startswith("Error: ") or f"extras/{name}.py" not in line
    ]
    assert not wrong and contents(tmp_path) == before and not (tmp_path / "new").exists(), wrong
    codes, out, err = run_all(core, ["--out", tmp_path / "new"], ["info"], env=SLURM)
    assert codes == [2, 2] and len(err) == 2 and "extras/slurm.py" in err[0], err


def test_if_one_rank_lacks_a_file_all_ranks_end_with_one_line(core, text, tmp_path):
    args = [*TINY, "--data", text, "--out", tmp_path / "out"]
    ended = on_two_ranks(*args, roots=[ROOT, core])
    errors = "".join(ran.err for ran in ended)
    assert {ran.code for ran in ended} <= {1, 2} and errors.count("\n") == 1, ended
    assert errors.startswith("Error: ") and "extras/muon.py" in errors, ended
    assert not (tmp_path / "out").exists()


def test_all_ranks_use_the_flags_that_rank_0_was_given(core, text, tmp_path):
    """Rank 1 was given others, also one with its default value, and only it has extras/. With its own, it would hang.

    Under a profiler, the module __main__ is that of the profiler, so no class of run.py can be pickled.
    """
    profiler = [sys.executable, "-m", "cProfile", "-o", "/dev/null", "run.py"]
    roots, out = [core, ROOT], tmp_path / "out"
    env = {"DDPKIT_STEPS": "9", "DDPKIT_EVAL_EVERY": "100", "DDPKIT_SEED": "1"}
    args = [*TINY, "--data", text, "--out", out]
    settings = [{"DDPKIT_STEPS": "4", "DDPKIT_EVAL_EVERY": "1"}, env]
    ended = on_two_ranks(*args, env=settings, roots=roots, launcher=profiler)
    assert [(ran.code, ran.err) for ran in ended] == [(0, "")] * 2, ended
    assert [*evaluations(out)] == [1, 2, 3, 4]
    expected = {"steps": 4, "seed": 0, "optimizer": "muon"}
    assert (
        expected.items() <= config(out).items() and expected.items() <= state(out)["config"].items()
    )
