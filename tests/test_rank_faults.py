"""Promise 6 and what goes with it, in counted trials: a rank that fails, hangs or dawdles, wherever it is; a collective
that some ranks do not reach; torchrun's machines that go and come back; numbers that are not finite."""

import itertools
import math
import os
import random
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Program, Ran, checkpoints, losses, metrics, run, state, torchrun, wait_for

SABOTAGED = [sys.executable, "tests/sabotaged.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT = 8


@pytest.fixture(scope="module")
def short(text: Path) -> list[object]:
    """12 steps of AdamW, for which the losses do not depend on the number of ranks, with all that a run does."""
    return [*TINY, "--optimizer", "adamw", "--data", text, "--steps", 12, "--log-every", 1, "--eval-every", 5,
            "--save-every", 5]  # fmt: skip


def complaints(ran: Ran) -> list[str]:
    """The lines of stderr, without the warnings of torch's C++ and torchrun's own report."""
    return [line for line in ran.err.splitlines() if not re.match(r"[EWI]\d{4} |\[[EWI]\d{4} .*\[c10d\]", line)]


def steps(out: Path) -> list[int]:
    return [step for step, _ in losses(out)]


# ------------------------------------------------------------------------------------- one rank fails or hangs

PLACES = {  # and at which call there
    "start": 1, "reading": 1, "forward": 4, "backward": 4, "collective": 4, "snapshot": 2, "writing": 2, "evaluation": 2,
    "teardown": 1,
}  # fmt: skip
WHATS = ("raise", "exit", "leave", "kill", "stop", "slow")
SAID = {  # by the program, of rank {0}
    "raise": r"Error on rank {0}: sabotaged",
    "exit": r"Error: rank {0} ended with exit code 7",
    "kill": r"Error: rank {0} was killed by SIGKILL",
    "stop": r"Error: (no answer from rank {0} \((timed out after 8 s|connection closed)\)|rank {0} did not end, .*)",
}
SAID["leave"] = SAID["exit"]


def ranks_and_faults() -> list[tuple[str, str, int, int]]:
    """(place, what, ranks, which of them): all combinations, in an order in which the first few tell most."""
    everywhere = itertools.product(PLACES, WHATS, ((2, 0), (2, 1), (3, 0), (3, 2)))
    all_of_them = [(place, what, *ranks) for place, what, ranks in everywhere if place != "writing" or not ranks[1]]
    random.Random(0).shuffle(all_of_them)
    first = [
        ("teardown", "stop", 2, 1),
        ("start", "exit", 3, 2),
        ("backward", "raise", 2, 1),
        ("writing", "slow", 2, 0),
    ]
    return [*first, *(fault for fault in all_of_them if fault not in first)]


@pytest.mark.torture
def test_one_rank_fails_hangs_or_dawdles_anywhere(trials, short, tmp_path):
    combinations = ranks_and_faults()

    def trial(number: int) -> None:
        place, what, size, rank = combinations[number]
        out, struck = tmp_path / f"{number}", tmp_path / f"{number} struck"
        when = f"{PLACES[place]}" + "+" * (what == "slow")
        env = {"TEST_FAULT": f"{place} {what} {rank} {when}", "TEST_FAULT_TIME": f"{struck}"}
        flags = [*short, "--spawn", size, "--timeout", TIMEOUT, "--out", out]
        with Program(*flags, launcher=SABOTAGED, env=env) as program:
            ran = program.finish()
        took = time.monotonic() - float(struck.read_text())
        about = (combinations[number], took, ran)
        if what == "slow":
            assert ran.code == 0 and complaints(ran) == [] and steps(out) == list(range(1, 13)), about
            return
        assert ran.code != 0 and took < (TIMEOUT + 5 if what == "stop" else 5), about
        assert ran.err.count("Traceback") == (what == "raise"), about
        [line] = [line for line in complaints(ran) if line.startswith("Error")] if what == "raise" else complaints(ran)
        assert re.fullmatch(SAID[what].format(rank), line), about

    trials("one rank raises, exits, is killed, stopped, slow; --spawn", trial, few=2, many=len(combinations))


@pytest.mark.torture
def test_one_rank_fails_hangs_or_dawdles_under_torchrun(trials, short, tmp_path):
    """Its agent has its own report; our line is there once, or not at all where the agent alone sees what happened."""
    combinations = list(
        itertools.product(("raise", "exit", "kill", "stop", "slow"), ("forward", "collective", "evaluation"))
    )

    def trial(number: int) -> None:
        what, place = combinations[number]
        out, struck = tmp_path / f"{number}", tmp_path / f"{number} struck"
        when = f"{PLACES[place]}" + "+" * (what == "slow")
        env = {"TEST_FAULT": f"{place} {what} 1 {when}", "TEST_FAULT_TIME": f"{struck}"}
        launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "tests/sabotaged.py"]
        with Program(*short, "--timeout", TIMEOUT, "--out", out, launcher=launcher, env=env) as program:
            ran = program.finish()
        took = time.monotonic() - float(struck.read_text())
        about = (combinations[number], took, ran)
        said = [line for line in complaints(ran) if line.startswith("Error")]
        assert all("rank 1" in line for line in said), about
        assert len(said) <= 1 if what in ("exit", "kill") else len(said) == (what != "slow"), about
        if what == "slow":
            assert ran.code == 0 and steps(out) == list(range(1, 13)), about
        else:  # its agent gives a stopped process 30 s to hear SIGTERM, and no flag changes that
            assert ran.code != 0 and took < (TIMEOUT + 5 + 30 if what == "stop" else 5), about

    trials("the same under torchrun", trial, few=0, many=len(combinations))


@pytest.mark.torture
def test_torchruns_agent_is_killed_and_leaves_no_worker(trials, short, tmp_path):
    chance = random.Random(0)
    waits = [chance.uniform(0, 8) for _ in range(20)]

    def trial(number: int) -> None:
        flags = [*short, "--steps", 10**6, "--epochs", 10**6, "--log-every", 10**6, "--out", tmp_path / f"{number}"]
        with Program(*flags, "--eval-every", 500, "--save-every", 100, launcher=torchrun(2)) as program:
            wait_for(lambda: len(program.family("\0RANK=")) == 2, "the workers to be born")
            time.sleep(waits[number] if number else 1)  # they import torch, meet, train
            assert len(program.family("\0RANK=")) == 2
            program.process.kill()
            program.process.wait()
            wait_for(lambda: not program.family(), "the workers to end", 5)

    trials("torchrun's agent killed: no worker 5 s later", trial, few=1, many=len(waits))


# ------------------------------------------------------------------------ a collective that some ranks do not reach


def partly(kind: str, missing: int, size: int) -> None:
    """Rank `missing` is not where the others wait for it. Run by the program at the end of this file."""
    import torch
    import torch.distributed as dist

    import ddp_setup

    try:
        with ddp_setup.process_group("cpu", timeout=3) as world:
            dist.all_reduce(torch.ones(4))
            if world.rank != missing:
                dist.all_reduce(torch.ones(4))  # "others"
            elif kind == "computes":
                time.sleep(60)
            elif kind == "is in another":
                ddp_setup.from_rank_zero(lambda: 0, world)  # "missing"
            if kind == "is one behind":
                dist.all_reduce(torch.ones(4))
    except ConnectionError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


@pytest.mark.torture
def test_a_collective_reached_by_some_ranks_only(trials):
    kinds = ("is in another", "computes", "has left", "is one behind")
    where = ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2))
    combinations = [(kind, missing, size) for size, missing in where for kind in kinds]
    source = Path(__file__).read_text().splitlines()
    others, elsewhere = (
        next(f"test_rank_faults.py:{n}" for n, line in enumerate(source, 1) if line.endswith(f'# "{what}"'))
        for what in ("others", "missing")
    )

    def trial(number: int) -> None:
        kind, missing, size = combinations[number]
        ran = run(kind, missing, size, launcher=[sys.executable, __file__], env={"PYTHONPATH": f"{ROOT}"})
        about = (combinations[number], ran)
        assert ran.code == 1, about
        [line] = complaints(ran)
        if kind == "is in another":
            at = ", ".join(f"rank {r} at {elsewhere if r == missing else others}" for r in range(size))
            assert line == f"the ranks wait for one another, {at} (timed out after 3 s)", about
        else:
            assert re.fullmatch(rf"no answer from rank {missing} \((timed out after 3 s|connection closed)\)", line), (
                about
            )

    trials("a collective that one rank does not reach", trial, few=1, many=len(combinations))


# ----------------------------------------------------------------------- torchrun's world shrinks and grows


def agent(port: int, *flags: object, shared: bool) -> Program:
    """One of two machines' torchrun. A lost one is missed after 3 s, and a round waits 1 s for who else may come.

    A machine that comes back is not taken in as long as the agents share the rendezvous' store with their workers,
    which torch 2.13 does by default: the one that stayed does not tell its address again (pytorch issue 135712).
    """
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=20"
    place = ["--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf]
    launcher = [*TORCHRUN, "--nnodes", "2" if shared else "1:2", "--nproc-per-node", "1", "--max-restarts", "3", *place]
    env = {"TEST_FAULT": "backward pause all 1+", "OMP_NUM_THREADS": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = f"{1 - shared}"
    return Program(*flags, launcher=[*launcher, "tests/sabotaged.py"], env=env, seconds=150)


@pytest.fixture(scope="module")
def smooth(short, tmp_path_factory) -> list[tuple[int, float]]:
    """The losses of 100 steps that nobody disturbed."""
    out = tmp_path_factory.mktemp("smooth")
    assert run(*short, "--steps", 100, "--out", out).code == 0
    return losses(out)


@pytest.mark.torture
def test_the_world_shrinks_and_grows_again(trials, short, smooth, tmp_path):
    """Number 0: only a worker is killed, and both machines start theirs again. Others: a whole machine is lost and
    comes back, which makes two restarts."""

    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        flags = [*short, "--steps", 100, "--save-every", 4, "--eval-every", 1000, "--timeout", 20, "--out", out]

        def now(name: str, key: str) -> int:
            with suppress(FileNotFoundError):
                return int(([0] + re.findall(rf'"{key}": (\d+)', (out / name).read_text()))[-1])
            return 0

        def reached(step: int) -> None:
            wait_for(lambda: now("metrics.jsonl", "step") >= step, f"step {step}")

        def of(ranks: int) -> None:
            wait_for(lambda: now("config.json", "ranks") == ranks, f"{ranks} ranks")

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with ExitStack() as stack, ThreadPoolExecutor(3) as pool:

            def start() -> tuple[Program, object]:
                program = stack.enter_context(agent(port, *flags, shared=number == 0))
                return program, pool.submit(program.finish)

            stays, stays_ends = start()
            wait_for(lambda: stays.family("--rdzv-id"), "the agent that serves the rendezvous")
            time.sleep(1)
            goes, goes_ends = start()
            reached(chance.randint(5, 12))
            of(2)
            if number:
                goes.process.kill()
                wait_for(lambda: not goes.family(), "its worker to end", 5)
                of(1)
                reached(now("metrics.jsonl", "step") + chance.randint(1, 8))
                goes, goes_ends = start()
                of(2)
            else:
                os.kill(goes.family("\0RANK=")[0], signal.SIGKILL)
            ended = stays_ends.result(), goes_ends.result()
        assert [ran.code for ran in ended] == [0, 0], ended
        assert steps(out) == list(range(1, 101)), ended
        for (_, loss), (_, undisturbed) in zip(losses(out), smooth):
            assert math.isclose(loss, undisturbed, rel_tol=1e-4), ended

    trials("torchrun: a worker killed (1), a machine lost and back (25)", trial, few=0, many=26)


# ------------------------------------------------------------------------------------- numbers that are not finite


def finite(out: Path) -> bool:
    import torch

    return all(
        tensor.isfinite().all()
        for path in checkpoints(out)
        for tensor in torch.load(path, weights_only=True)["model"].values()
    )


ONCE = [  # fault, flags
    (f"{place} {value} {rank} 4", flags)
    for flags, ranks in (([], "0"), (["--spawn", 2], "01"), (["--accum", 2], "0"), (["--dtype", "float16"], "0"))
    for rank in ranks
    for place, value in (("loss", "nan"), ("loss", "inf"), ("gradient", "nan"), ("gradient", "inf"))
]
TOO_HIGH = [
    ["--lr", lr, "--optimizer", optimizer, "--clip", clip, "--dtype", dtype, *more]
    for lr, optimizer, clip, dtype, more in itertools.product(
        ("1e6", "1e11"), ("adamw", "muon"), (1, 0), ("float32", "float16"), ([], ["--spawn", 2])
    )
]


@pytest.mark.torture
def test_a_step_with_a_number_that_is_not_finite_is_skipped_and_counted(trials, short, tmp_path):
    def trial(number: int) -> None:
        fault, flags = ONCE[number]
        out = tmp_path / f"{number}"
        ran = run(
            *short, *flags, "--save-every", 1, "--keep", 99, "--out", out, launcher=SABOTAGED, env={"TEST_FAULT": fault}
        )
        about = (ONCE[number], ran)
        assert ran.code == 0 and complaints(ran) == [] and steps(out) == list(range(1, 13)), about
        skipped = [line.get("skipped", 0) for line in metrics(out) if "loss" in line]
        assert skipped[-1] == 1 and sorted(skipped) == skipped, about
        assert finite(out) and state(out)["step"] == 12, about

    trials("NaN or inf once, in the loss or one gradient", trial, few=1, many=len(ONCE))


@pytest.mark.torture
def test_five_in_a_row_stop_it_and_name_the_last_good_checkpoint(trials, short, tmp_path):
    combinations = list(itertools.product(("loss", "gradient"), ("nan", "inf"), ([], ["--spawn", 2])))

    def trial(number: int) -> None:
        (place, value, flags), out = combinations[number], tmp_path / f"{number}"
        env = {"TEST_FAULT": f"{place} {value} 0 7+"}
        ran = run(*short, *flags, "--eval-every", 99, "--out", out, launcher=SABOTAGED, env=env)
        about = (combinations[number], ran)
        assert ran.code == 1, about
        [line] = complaints(ran)
        assert "up to step 11" in line and checkpoints(out)[-1].name in line, about
        assert state(out)["step"] == 5 and finite(out), about  # not 10, though no weight was changed since 6

    trials("NaN or inf at every step", trial, few=1, many=len(combinations))


@pytest.mark.torture
def test_a_learning_rate_far_too_high(trials, short, tmp_path):
    def trial(number: int) -> None:
        out = tmp_path / f"{number}"
        ran = run(*short, *TOO_HIGH[number], "--warmup", 0, "--steps", 40, "--out", out)
        about = (TOO_HIGH[number], ran)
        assert finite(out), about
        if ran.code == 0:
            assert complaints(ran) == [] and steps(out) == list(range(1, 41)), about
        else:
            [line] = complaints(ran)
            assert ran.code == 1 and re.search(r"up to step \d+", line) and "checkpoint" in line, about

    trials("learning rate of 1e6 and 1e11", trial, few=1, many=len(TOO_HIGH))


@pytest.mark.torture
def test_data_that_is_not_finite_in_another_model(trials):
    """Through loop.train_: the weights are those of the data without the bad batches."""
    import torch

    import loop

    def loss_fn(model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    def trained(batches: list) -> tuple[list[torch.Tensor], list]:
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        reports = [
            r for _, r in loop.train_(model, [optimizer], (([b], len(b[0])) for b in batches), loss_fn, clip=1.0)
        ]
        return [p.detach() for p in model.parameters()], reports

    def trial(number: int) -> None:
        chance, generator = random.Random(number), torch.Generator().manual_seed(number)
        batches = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(20)]
        bad = {*chance.sample(range(20), chance.randint(1, 4))}
        spoilt = [tuple(part.clone() for part in batch) for batch in batches]
        for n in bad:
            part = spoilt[n][chance.randrange(2)]
            part.view(-1)[chance.randrange(part.numel())] = chance.choice([math.nan, math.inf, -math.inf])
        weights, reports = trained(spoilt)
        without, _ = trained([batch for n, batch in enumerate(batches) if n not in bad])
        assert all(map(torch.equal, weights, without)), (number, bad)
        assert [int(r.skipped) for r in reports] == [sum(b <= n for b in bad) for n in range(20)], (number, bad)
        batches[9][0][0, 0] = math.nan
        with pytest.raises(loop.Diverged, match="5 times in a row, up to step 14"):
            trained(batches[:10] + batches[9:10] * 4 + batches[10:])

    trials("NaN and inf in another model's data", trial, few=20, many=500)


if __name__ == "__main__":
    import ddp_setup

    try:
        code = ddp_setup.spawn(partly, int(sys.argv[3]), sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), timeout=10)
    except ChildProcessError as error:
        print(error, file=sys.stderr)
        code = 1
    sys.exit(code)
