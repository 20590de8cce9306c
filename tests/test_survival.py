"""What comes over a run from outside, in counted trials: it is killed, asked to stop, started twice, its data change,
it is at home in odd places, and all of it at once. A few of each here; all with -m torture."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from conftest import (
    PYTHON,
    ROOT,
    TABLE,
    TINY,
    Program,
    Ran,
    checkpoints,
    losses,
    run,
    same,
    same_training,
    state,
    torchrun,
    wait_for,
)  # fmt: skip
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import loop

pytestmark = pytest.mark.torture
STEPS = 100  # of a whole run, see conftest.flags
FAULTS = 10  # in a chain of starts
LAUNCH = {"python": ([], PYTHON, 1), "spawn": (["--spawn", 2], PYTHON, 2), "torchrun": ([], torchrun(2), 2)}


# ------------------------------------------------------------------------------------------- again and again


def chain(
    number: int,
    folder: Path,
    launch: str,
    flags: list[object],
    undisturbed: Callable[[int], Path],
    disturb: Callable[[Program, random.Random], None],
    check: Callable[[Ran, int, Path], None],
) -> None:
    """Start a run FAULTS times, each time where the one before was ended, and then let it come to its own end: the
    very same weights as one that nobody disturbed. A run that is over too soon is followed by another.

    check(what came of it, the step that was reached before it, its folder)
    """
    more, launcher, ranks = LAUNCH[launch]
    chance, out, reached = random.Random(number), folder / f"{launch} {number}", 0
    command = [*flags, *more, "--out", out]
    for fault in range(FAULTS + 1):
        with Program(*command, launcher=launcher, seconds=200) as program:
            if fault < FAULTS:
                disturb(program, chance)
            ran = program.finish()
        assert "set aside" not in ran.err and f'File "{ROOT}/run.py' not in ran.err, ran
        if ran.code == 0:
            assert [step for step, _ in losses(out)] == list(range(1, STEPS + 1)), ran
            assert same_training(out, undisturbed(ranks)), ran
            shutil.rmtree(out)
            reached = 0
        else:
            check(ran, reached, out)
            reached = max(reached, *steps_said(ran))


def steps_said(ran: Ran) -> list[int]:
    return [0, *map(int, re.findall(r"^step (\d+)/", ran.out, re.MULTILINE))]


def random_moment(program: Program, chance: random.Random) -> None:
    """While it starts, or anywhere in a step, an evaluation or a write."""
    if chance.random() < 0.3:
        time.sleep(chance.uniform(0, 2))
    else:
        program.read_lines(chance.randint(1, 8))
        time.sleep(chance.uniform(0, 0.02))


KILLED = {  # how it is started, who is killed, in how many chains
    "all ranks": ("python", lambda program, chance: [program.process.pid], 2, 70),
    "a rank of --spawn": ("spawn", lambda program, chance: chance.choices(program.children() or [0]), 0, 12),
    "the --spawn parent": ("spawn", lambda program, chance: [program.process.pid], 0, 12),
    "the torchrun agent": ("torchrun", lambda program, chance: [program.process.pid], 0, 6),
}


@pytest.mark.parametrize("who", KILLED)
def test_killed(who, trials, flags, undisturbed, tmp_path):
    launch, victims, few, many = KILLED[who]

    def disturb(program: Program, chance: random.Random) -> None:
        random_moment(program, chance)
        for pid in filter(None, victims(program, chance)):
            kill(pid, signal.SIGKILL)

    def trial(number: int) -> None:
        every = random.Random(-number).choice([1, 3, 10])

        def check(ran: Ran, reached: int, out: Path) -> None:
            """finish() has seen that nobody is left. The write that was under way is lost, not the one before."""
            assert ran.code in (-signal.SIGKILL, 1), ran
            began = min(steps_said(ran)[1:], default=STEPS)
            assert began > ((reached - 1) // every - 1) * every, f"reached {reached}, save every {every}: {ran}"

        chain(number, tmp_path, launch, [*flags, "--save-every", every], undisturbed, disturb, check)

    trials(f"SIGKILL of {who}, at random moments", trial, few, many, each=FAULTS)


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it had ended
        pass


def hears(pid: int) -> bool:
    """Whether a process blocks or handles SIGTERM. Until then, a tenth of a second, run.py is not there yet."""
    try:
        masks = re.findall(r"^Sig(?:Blk|Cgt):\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except FileNotFoundError:
        return True
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


def own(program: Program) -> int:
    return program.process.pid


def group(program: Program) -> int:
    return -program.process.pid


def rank(program: Program) -> int:
    return wait_for(lambda: program.children()[1:] or program.family("\0RANK=1\0"), "rank 1")[0]


ASKED = {  # how it is started, whom the signal can go to, chains, flags
    "python": ([own], 2, 20, []),
    "spawn": ([own, group, rank], 0, 8, []),
    "torchrun": ([own, rank], 0, 2, []),
    "python --compile": ([own], 0, 1, ["--compile"]),
}


@pytest.mark.parametrize("how", ASKED)
def test_asked_to_stop(how, trials, flags, undisturbed, tmp_path):
    targets, few, many, more = ASKED[how]
    asked_at = {}

    def disturb(program: Program, chance: random.Random) -> None:
        target = chance.choice(targets)
        wait_for(lambda: hears(abs(target(program))), "the program to hear")
        if "--compile" in more:
            time.sleep(chance.uniform(0, 30))
        else:
            random_moment(program, chance)
        asked_at[program.process.pid] = time.monotonic()
        agent = how == "torchrun" and target is own  # which just dies of SIGUSR1
        kill(target(program), chance.choice([signal.SIGTERM, signal.SIGINT, *[signal.SIGUSR1] * (not agent)]))
        program.read_lines(STEPS)
        assert time.monotonic() - asked_at.pop(program.process.pid) < 10 + 30 * ("--compile" in more)

    def check(ran: Ran, reached: int, out: Path) -> None:
        last = steps_said(ran)[-1]
        if how == "torchrun" and last == 0:  # its agent had not started us yet
            return
        assert last > reached and state(out)["step"] == last, ran
        stopped = f"Stopped as asked, after step {last} of {STEPS}; the same command goes on from there."
        assert ran.out.splitlines()[-1] == stopped, ran
        assert (ran.code, ran.err) == (3, "") or how == "torchrun", ran  # which has a code and words of its own

    def compiled(_: int) -> Path:
        """Nobody disturbed it, and it is compiled like the others, as that rounds in its own way."""
        if not (tmp_path / "whole").exists():
            assert run(*flags, *more, "--out", tmp_path / "whole", seconds=200).code == 0
        return tmp_path / "whole"

    def trial(number: int) -> None:
        every = ["--save-every", 2, "--eval-every", 3, *more]
        chain(number, tmp_path, how.split()[0], [*flags, *every], compiled if more else undisturbed, disturb, check)

    trials(f"SIGTERM, SIGINT, SIGUSR1 to {how}, at random moments", trial, few, many, each=FAULTS)


# -------------------------------------------------------------------------------------------- one run to a folder


def test_two_runs_on_one_folder(trials, flags, undisturbed, tmp_path):
    def trial(number: int) -> None:
        chance, out = random.Random(number), tmp_path / f"{number}"
        (out_of_two := out.with_suffix(".link")).symlink_to(out)  # another name is no way round
        with Program(*flags, "--out", out) as first:
            random_moment(first, chance)
            while not (out / ".lock").exists() or not (out / ".lock").read_text():
                time.sleep(0.01)
            second = run(*flags, "--out", chance.choice([out, out_of_two]), *chance.choice([[], ["--fresh"]]))
            assert second.code == 2 and second.err.count("\n") == 1 and second.out == "", second
            holder = (
                rf"in use by another run: {re.escape(socket.gethostname())}, pid {first.process.pid}, since 20\d\d-"
            )
            assert re.search(holder, second.err), second
            if chance.random() < 0.5:
                first.process.kill()
            first.finish()
        complete(out, undisturbed(1), *flags)

    trials("two runs on one folder, and the next once the first is dead", trial, 1, 20)


def complete(out: Path, whole: Path, *command: object, **how: Any) -> Ran:
    """Let a run come to its end, which is the very one that nobody disturbed."""
    ran = run(*command, "--out", out, **how)
    assert ran.code == 0 and ran.err == "", ran
    assert same_training(out, whole), ran
    return ran


def test_two_runs_started_together(trials, flags, tmp_path):
    def trial(number: int) -> None:
        command = [*flags, "--out", tmp_path / f"{number}"]
        with Program(*command) as one, Program(*command) as other:
            ends = sorted([one.finish(), other.finish()])
        assert [ran.code for ran in ends] == [0, 2] and ends[1].err.count("\n") == 1, ends
        assert re.search("in use by another run|another run has written to it just now", ends[1].err), ends

    trials("two runs started together on one folder", trial, 1, 20, at_once=1)


# --------------------------------------------------------------------------------------------------- changed data


def write_data(folder: Path, kind: str, text: Path) -> list[object]:
    """-> the flags that read it"""
    raw = np.frombuffer(text.read_bytes(), np.uint8)
    data = folder / {"char": "a.txt", "byte": "b.txt", "bin": "c.bin", "npy": "d.npy"}[kind]
    if kind == "npy":
        np.save(data, raw.astype(np.uint32))
    else:
        data.write_bytes((raw.astype("<u2") if kind == "bin" else raw).tobytes())
    return ["--data", data, "--tokens", "byte" if kind == "byte" else "char"]


def cut(data: Path, chance: random.Random) -> None:
    os.truncate(data, chance.choice([0, data.stat().st_size // 4 * 2]))


def grow(data: Path, chance: random.Random) -> None:
    data.write_bytes(data.read_bytes() + b"  ")


def alter(data: Path, chance: random.Random) -> None:
    content = bytearray(data.read_bytes())
    content[chance.randrange(200, len(content)) // 2 * 2] ^= 1
    with open(data, "r+b") as file:
        file.write(content)


def replace(data: Path, chance: random.Random) -> None:
    other = data.with_name(f"other-{data.name}")
    shutil.copy(data, other)
    alter(other, chance)
    os.replace(other, data)


def delete(data: Path, chance: random.Random) -> None:
    data.unlink()


CHANGES = [(kind, change) for kind in ("char", "byte", "bin", "npy") for change in (cut, grow, alter, replace, delete)]


def test_data_changed_between_stop_and_resume(trials, flags, text, tmp_path):
    def trial(number: int) -> None:
        kind, change = CHANGES[number * 7 % len(CHANGES)]
        folder, out = tmp_path / f"{number}", tmp_path / f"{number}" / "out"
        folder.mkdir()
        reads = write_data(folder, kind, text)
        assert run(*flags, *reads, "--steps", 10, "--out", out).code == 0
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        change(reads[1], random.Random(number))
        ran = run(*flags, *reads, "--out", out)
        assert ran.code == 2 and ran.err.count("\n") == 1 and reads[1].name in ran.err, (kind, change, ran)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before

    trials("data cut, grown, altered, replaced or deleted between stop and resume", trial, 3, 50)


def test_data_changed_while_training(trials, flags, text, tmp_path):
    mapped = [(kind, change) for kind, change in CHANGES if kind != "char"]

    def trial(number: int) -> None:
        kind, change = mapped[number * 7 % len(mapped)]
        chance, folder, out = random.Random(number), tmp_path / f"{number}", tmp_path / f"{number}" / "out"
        folder.mkdir()
        reads = write_data(folder, kind, text)
        good = shutil.copy(reads[1], folder / "good")
        more = [*flags, *reads, "--save-every", 3, "--eval-every", 5, "--out", out]
        with Program(*more) as program:
            program.read_lines(chance.randint(5, 40))
            change(reads[1], chance)
            ran = program.finish()
        if change is cut and ran.code == -signal.SIGBUS:  # in the very microseconds of a read: it can only say where
            assert "Bus error" in ran.err and "chardata.py" in ran.err, ran
        else:
            assert ran.code == 2 and ran.err.count("\n") == 1 and reads[1].name in ran.err, (kind, change, ran)
        os.replace(good, reads[1])
        complete(out, undisturbed_of[kind], *more[:-2])

    undisturbed_of = {}
    for kind in ("byte", "bin", "npy"):
        undisturbed_of[kind] = tmp_path / kind / "out"
        (tmp_path / kind).mkdir()
        assert run(*flags, *write_data(tmp_path / kind, kind, text), "--out", undisturbed_of[kind]).code == 0
    trials("mapped data cut, grown, altered, replaced or deleted while training", trial, 3, 50)


def test_a_text_is_in_memory_and_may_change_while_training(flags, undisturbed, text, tmp_path):
    data = Path(shutil.copy(text, tmp_path / "text.txt"))
    with Program(*flags, "--data", data, "--out", tmp_path / "out") as program:
        program.read_lines(5)
        data.write_text("something else")
        ran = program.finish()
    assert ran.code == 0 and ran.err == "" and same_training(tmp_path / "out", undisturbed(1)), ran


# ------------------------------------------------------------------------------------------------ strange places

BACK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {  /* each look at the calendar is an hour before the last */
    static int looks;
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec -= 3600 * ++looks;
    return failed;
}
"""
LIMITS = ["-n 24", "-n 64", "-f 4", "-s 200", "-c 0", "-l 0", "-m 1000", "-q 0", "-i 0", "-x 0", "-u 1", "-d 300000", "-v 700000", "-v 4000000", "-t 1"]  # fmt: skip
UNSHARED = ["unshare", "--mount", "--uts", "sh", "-c"]
PLACES: dict[str, Any] = {
    "the clock runs backwards": {"LD_PRELOAD": "{folder}/back.so"},
    "a path with spaces and Unicode": ["cd '{folder}' && mkdir 'a ü 📁' && cd 'a ü 📁' && cp {text} 'té xt.txt' && exec \"$@\" --data 'té xt.txt' --out 'öut 1'"],
    "a read-only code folder, another hostname": ["mount --bind {root} {root} && mount -o remount,ro,bind {root} && hostname elsewhere && exec \"$@\""],
    "no TMPDIR": {"TMPDIR": "/no/such"},
    "no HOME": {"HOME": None},
    "HOME that is not": {"HOME": "/no/such"},
    "hash seed 1": {"PYTHONHASHSEED": "1"},
    "hash seed 4294967295": {"PYTHONHASHSEED": "4294967295"},
    "locale C": {"LC_ALL": "C"},
    "ASCII alone": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "a terminal of one column": {"COLUMNS": "1", "TERM": "dumb", "NO_COLOR": "1"},
    "no PATH": {"PATH": None},
    **{f"ulimit {limit}": [f"ulimit {limit} && exec \"$@\""] for limit in LIMITS},
}  # fmt: skip


def test_strange_places(trials, flags, undisturbed, text, tmp_path):
    """It works, or says in one line why not and goes on from there where it can work."""
    can = {
        "the clock runs backwards": shutil.which("gcc"),
        "a read-only code folder, another hostname": os.geteuid() == 0,
    }
    places = [name for name in PLACES if can.get(name, True)]
    (tmp_path / "back.c").write_text(BACK)
    if places[0] == "the clock runs backwards":
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "back.so", tmp_path / "back.c", "-ldl"], check=True)

    def trial(number: int) -> None:
        name = places[number]
        folder, out = tmp_path / f"{number}", tmp_path / f"{number}" / "out"
        folder.mkdir()
        how, launcher, env = PLACES[name], [sys.executable, f"{ROOT}/run.py"], {}
        if isinstance(how, list):
            script = how[0].format(folder=folder, text=text, root=ROOT)
            launcher = [*(UNSHARED if "mount" in script else ["bash", "-c"]), script, "sh", *launcher]
        else:
            env = {key: value and value.format(folder=tmp_path) for key, value in how.items()}
        with Program(*flags, "--out", out, launcher=launcher, env=env) as program:
            ran = program.finish()
        if ran.code == 0:
            assert "Traceback" not in ran.err, (name, ran)
            assert ran.err == "" or name == "ulimit -i 0", (name, ran)
        elif ran.code != -signal.SIGKILL:  # which is how the kernel says that CPU time is up
            lines = ran.err.splitlines()
            assert len(lines) == 1 or all(re.match("Warning|OpenBLAS|libgomp", line) for line in lines), (name, ran)
        done = next((place for place in (out, folder / "a ü 📁" / "öut 1") if checkpoints(place)), out)
        if ran.code:
            complete(done, undisturbed(1), *flags)
        assert same_training(done, undisturbed(1)), (name, ran)

    trials("strange clock, host, paths, environment, limits", trial, 3, len(places))


# ------------------------------------------------------------------------------------------------ nonsense

WHOLE = ["0", "1", "2", "-1", "3.5", "1e3", "0x10", "1_0", "٣", "²", "", " ", "nan", "None"]
WHOLE += ["9" * 30, f"{2**63}", f"-{2**64}"]
REAL = [*WHOLE, "0.5", "1e-320", "1e308", "1e309", "-0.0", "inf", "-inf", "1,5", "1e", "٠.٥"]
NAMES = ["", "/dev/null", "/dev/null/x", "/dev/zero", "/proc/self/mem", "/proc/x", "/", ".", "no*such", "[", "~", "\udcff", "://", "s3://", "file://", "http://[", "memory://a", "README.md", "-", "--"]  # fmt: skip
OFTEN = {"config": NAMES, "data": NAMES, "device": ["", "cpu", "cuda", "cuda:9", "mps", "CPU", "tpu", "meta"]}
DEAR = {"steps": 3, "layers": 3, "embd": 64, "spawn": 0, "tokens": 9}  # the largest value that is still quickly done


def nonsense(command: click.Command) -> Any:
    """Arguments for a command: its flags, with values of right and wrong types, in and out of range."""

    def flag(param: click.Parameter) -> Any:
        name = st.just(param.opts[0])
        if param.name == "compile":  # takes half a minute where it is meant
            return st.tuples(st.just("--no-compile"))
        if param.name == "out":
            return st.tuples(name, st.sampled_from(["", "/dev/null", "/dev/null/x", "/proc/x", "/proc/self/fd/1"]))
        values = OFTEN.get(param.name, [*REAL, *getattr(param.type, "choices", [])])
        value = st.sampled_from(values) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=4)
        return st.tuples(
            name,
            value.map(lambda text: text.replace("\0", "").encode("utf-8", "replace").decode()).filter(
                partial(cheap, param.name)
            ),
        )

    flags = st.one_of([flag(param) for param in command.params])
    rubbish = st.text(min_size=1, max_size=6).map(
        lambda text: (text.replace("\0", "").encode("utf-8", "replace").decode(),)
    )
    return st.lists(flags | flags | flags | rubbish, max_size=5).map(
        lambda pairs: [word for pair in pairs for word in pair]
    )


def cheap(name: str, text: str) -> bool:
    """Not a value that is right and takes long."""
    try:
        return name not in DEAR or not DEAR[name] < float(text) < 10**9
    except ValueError:
        return True


def test_nonsense_flags(request, flags, text, tmp_path):
    """Done, or a mistake named in one line before anything was written."""
    import run as program

    count = 2000 if request.config.option.markexpr == "torture" else 15
    commands = {"": program.cli, **program.cli.commands}
    trained, began, seen = tmp_path / "trained", time.monotonic(), 0
    assert run(*TINY, "--data", text, "--steps", 2, "--out", trained).code == 0

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink])
    @given(st.data())
    def trial(data: Any) -> None:
        nonlocal seen
        seen += 1
        name = data.draw(st.sampled_from([*commands, "", "", ""]))
        out = tmp_path / f"{seen}"
        start = [name, "--out", trained] if name else [*TINY, "--data", text, "--out", out, "--steps", 2]
        before = {*ROOT.glob("[!.]*")}
        ran = run(*start, *data.draw(nonsense(commands[name])))
        assert "Traceback" not in ran.err, ran
        assert ran.code in (0, 2) or (ran.code == 1 and "the loss is" in ran.err), ran
        if ran.code == 2:
            assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1 and ran.out == "", ran
            assert not out.exists(), ran
        assert {*ROOT.glob("[!.]*")} == before, ran

    trial()
    request.config.stash[TABLE].append(("nonsense flags, by hypothesis", seen, seen, time.monotonic() - began))


# ------------------------------------------------------------------------------------------------ for a long time


def test_a_million_steps_leave_nothing_behind(request):
    """Memory, handles, threads: after a tenth of the steps what they are at the end."""
    steps, began = 1_000_000 if request.config.option.markexpr == "torture" else 3_000, time.monotonic()
    model = nn.Linear(4, 1)
    batches = ([(torch.ones(2, 4), torch.zeros(2, 1))] for _ in range(steps))
    taken = []
    for step, report in loop.train_(
        model, [torch.optim.SGD(model.parameters(), 1e-3)], zip(batches, iter(lambda: 2, 0)), squares
    ):
        if step in (steps // 10, steps):
            taken.append(resources())
    assert step == steps and report.loss.isfinite()
    (memory, *others), (memory_then, *others_then) = taken
    assert others == others_then and memory_then < memory + 4, taken  # MB; one float a step would be 24
    request.config.stash[TABLE].append(("steps of a one-layer model, all flat", steps, steps, time.monotonic() - began))


def squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def resources() -> tuple[float, int, int]:
    """MB resident, open handles, threads, of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# ------------------------------------------------------------------------------------------------ all of it at once


def a_rank_dies(program: Program, out: Path) -> None:
    kill((program.children() or [0])[-1] or program.process.pid, signal.SIGKILL)


def the_parent_dies(program: Program, out: Path) -> None:
    program.process.kill()


def it_is_asked_to_stop(program: Program, out: Path) -> None:
    program.process.terminate()


def a_rank_is_held_up(program: Program, out: Path) -> None:
    for pid in program.children()[:1]:
        kill(pid, signal.SIGSTOP)
        time.sleep(3)
        kill(pid, signal.SIGCONT)
    it_is_asked_to_stop(program, out)


def the_disk_is_full(program: Program, out: Path) -> None:
    filler = out.parent / "filler"
    try:
        with open(filler, "wb") as file:
            while file.write(bytes(1 << 20)):
                file.flush()
    except OSError:
        program.read_lines(30)
    filler.unlink()
    it_is_asked_to_stop(program, out)


def the_newest_checkpoint_rots(program: Program, out: Path) -> None:
    program.process.kill()
    if program.finish().code == 0:  # it was at its end before, and is about to be compared
        return
    for path in checkpoints(out)[-1:]:
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


def a_second_run_comes(program: Program, out: Path) -> None:
    assert run("--out", out).code == 2 or program.process.poll() is not None
    it_is_asked_to_stop(program, out)


FATE = [a_rank_dies, the_parent_dies, it_is_asked_to_stop, a_rank_is_held_up, the_disk_is_full, the_newest_checkpoint_rots, a_second_run_comes]  # fmt: skip


def assert_same(out: Path, whole: Path) -> None:
    """As same_training, but that a full disk may have cost lines of metrics."""
    ours, theirs = state(out), state(whole)
    assert ours["config"] == theirs["config"]
    assert {*losses(out)} <= {*losses(whole)}
    assert {key for key in ours if not same(ours[key], theirs[key])} <= {"scaler"}


def test_soak(request, tmp_path):
    """The default model on two ranks for half an hour, on a small disk, and every fault at random."""
    if request.config.option.markexpr != "torture" or os.geteuid():
        pytest.skip("takes half an hour, and root to mount a small disk, so only with -m torture")
    whole, disk = tmp_path / "whole", tmp_path / "disk"
    out, chance, met, finished = disk / "out", random.Random(0), 0, 0
    command = ["--spawn", 2, "--epochs", 2, "--save-every", 20, "--log-every", 1]
    assert run(*command, "--out", whole, seconds=900).code == 0
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", disk], check=True)
    try:
        began = time.monotonic()
        while time.monotonic() < began + 30 * 60 or met == 0:
            with Program(*command, "--out", out, seconds=300) as program:
                program.read_lines(chance.randint(0, 200))
                time.sleep(chance.uniform(0, 3))
                chance.choice(FATE)(program, out)
                ran = program.finish()
            met += 1
            assert "Traceback" not in ran.err, ran
            for path in out.glob("*.damaged"):
                path.unlink()
            if ran.code == 0:
                finished += 1
                assert_same(out, whole)
                shutil.rmtree(out)
        ran = run(*command, "--out", out, seconds=900)
        assert ran.code == 0, ran
        assert_same(out, whole)
    finally:
        subprocess.run(["umount", disk], check=True)
    fault = f"soak: the default run on two ranks, all at random, {finished + 1} runs to their end"
    request.config.stash[TABLE].append((fault, met, met, time.monotonic() - began))
