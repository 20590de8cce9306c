"""The line that tells how a training goes: its text, and what it leaves on a terminal's screen."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from conftest import ENVIRONMENT, ROOT, TINY, metrics, run
from hypothesis import given, settings
from hypothesis import strategies as st

from extras import progress

FULL = {"step": 120, "total": 400, "epoch": 0.3, "loss": 2.34567, "val_loss": 2.40123, "lr": 5.4e-3, "tokens_per_s": 51234.5,
        "mfu": 0.43, "memory": 512e6, "eta": 83.2, "skipped": 0}  # fmt: skip

# -------------------------------------------------------------------------------------------------------- text

WIDTHS = {
    20: "120/400 loss 2.346",
    40: "120/400 loss 2.346 val 2.401 eta 1:23",
    50: "120/400 loss 2.346 val 2.401 eta 1:23",  # for tokens/s there is no room, for what is less important there would be
    60: "|█▌   | 120/400 loss 2.346 val 2.401 51.2k tok/s eta 1:23",
    80: "|█▊    | 120/400 epoch 0.30 loss 2.346 val 2.401 51.2k tok/s mfu 43% eta 1:23",
    120: "|████████▍                   | 120/400 epoch 0.30 loss 2.346 val 2.401 lr 5.4e-03 51.2k tok/s mfu 43%  512MB eta 1:23",
    200: "|█████████                     | 120/400 epoch 0.30 loss 2.346 val 2.401 lr 5.4e-03 51.2k tok/s mfu 43%  512MB eta 1:23",
}  # fmt: skip


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_line_has_what_fits(columns):
    assert progress.line(FULL, columns - 1).rstrip() == WIDTHS[columns]


@settings(max_examples=200, deadline=None)
@given(
    record=st.fixed_dictionaries(
        {"step": st.integers(0, 10**9), "total": st.just(10**9)},
        optional={
            "epoch": st.floats(0, 1e4), "loss": st.floats(0, 1e3) | st.just(float("nan")), "val_loss": st.floats(0, 1e3),
            "lr": st.floats(0, 1), "tokens_per_s": st.floats(0, 1e12), "mfu": st.floats(0, 2), "memory": st.floats(0, 1e15),
            "eta": st.floats(0, 1e8), "skipped": st.integers(0, 10**6), "doing": st.sampled_from(["", "evaluating"]),
        },
    ),
    columns=st.integers(0, 250),
)  # fmt: skip
def test_no_line_is_too_long_or_cut_in_a_word_and_a_wider_one_tells_more(record, columns):
    words = {*progress.line(record, 10**3, ascii=True).split()}
    line, wider = (progress.line(record, c, ascii=True) for c in (columns, columns + 1))
    assert len(line) <= columns and line.isascii()
    told, told_wider = ([word for word in text.split() if not word.startswith("[")] for text in (line, wider))
    assert {*told} <= words and {*told} <= {*told_wider}


def test_what_is_drawn_is_ascii_where_there_is_nothing_else_and_coloured_where_that_says_something():
    latin, utf8 = (io.TextIOWrapper(io.BytesIO(), encoding) for encoding in ("latin-1", "utf-8"))
    assert progress.able(latin, {}) == {"ascii": True, "color": True}
    assert progress.able(utf8, {"NO_COLOR": "1"}) == {"ascii": False, "color": False}
    assert progress.line(FULL, 79, ascii=True).startswith("[#-----] 120/400")
    coloured, plain = (progress.line({**FULL, "skipped": 3}, 79, color=color) for color in (True, False))
    assert "\033" not in progress.line(FULL, 79, color=True) + plain
    assert re.sub(r"\033\[\d+m", "", coloured) == plain and "\033[33mskipped 3\033[0m" in coloured


def test_a_log_tells_all_of_it():
    assert progress.plain(FULL) == (
        "step 120/400  epoch 0.30  loss 2.3457  val 2.4012  lr 5.4e-03  51,234 tokens/s  mfu 43%  512MB  eta 1:23"
    )


def test_numbers_are_short():
    numbers = [0.5, 3.2, 99.94, 99.95, 512, 999.4, 999.5, 51234, 999_499, 999_500, 1.234e6, 5e17]
    assert [progress.short(n) for n in numbers] == (
        ["0.50", "3.20", "99.9", "100", "512", "999", "1.00k", "51.2k", "999k", "1.00M", "1.23M", "500P"]
    )
    assert [progress.clock(seconds) for seconds in (0, 83.2, 3599.6)] == ["0:00", "1:23", "1:00:00"]


# ------------------------------------------------------------------------------------------------------ figures


def test_the_loss_is_a_mean_without_bias_and_without_what_is_not_finite():
    live = progress.Live()
    assert progress.mean(live) is None
    for seconds, loss in enumerate((3.0, float("nan"), 5.0, float("inf"))):
        for _ in range(2):  # the second time it is the same step
            live = progress.follow(live, 0, float(seconds), lambda: (loss, 7))
    assert progress.mean(live) == pytest.approx((0.9 * 3 + 5) / 1.9) and live.latest[1] == 7
    for i in range(50):
        live = progress.follow(live, 0, 100.0 + i, lambda: (4.0, 0))
    assert progress.mean(live) == pytest.approx(4, abs=0.01)


def test_a_loss_on_a_device_is_read_at_the_next_drawing():
    asked = []
    first = progress.follow(progress.Live(), 0, 0.0, lambda: asked.append(1) or (3.0, 0), late=True)
    assert not asked and progress.mean(first) is None
    second = progress.follow(first, 0, 1.0, lambda: asked.append(2) or (9.0, 0), late=True)
    assert asked == [1] and progress.mean(second) == 3


def test_tokens_a_second_are_those_of_the_last_stretch():
    live, rates = progress.Live(), []
    for i in range(31):  # 100 tokens/s for 1.5 s, then 1,000
        live = progress.follow(live, 10 * i if i <= 15 else 150 + 100 * (i - 15), i / 10, lambda: (1.0, 0))
        rates.append(live.rate)
    assert rates[:10] == [None] * 10 and rates[10] == pytest.approx(100) and rates[-1] == pytest.approx(1000)


def test_the_time_left_is_not_that_of_steps_like_the_first():
    assert progress.eta(1, 30.0, 30.0, 99) is None
    assert progress.eta(11, 35.0, 30.0, 100) == pytest.approx(50)


def test_a_line_is_due_ten_times_a_second_and_when_something_begins():
    live = progress.Live(shown=True, drawn=5.0)
    assert [progress.due(live, s, doing) for s, doing in ((5.05, None), (5.11, None), (5.0, "saving"), (5.0, ""))] == [
        False,
        True,
        True,
        True,
    ]
    assert not progress.due(progress.Live(), 9.0, "saving")  # no terminal


def test_the_memory_told_is_that_of_this_process():
    assert 10e6 < progress.memory("cpu") < 1e12


# ----------------------------------------------------------------------------------------------------- a terminal


def on_a_terminal(*args, columns, resize=(), env={}, meanwhile=lambda: None):
    """(exit code, what was written, the screen that a terminal shows at the end): of a run whose standard output and
    error are a terminal of so many columns. `resize`: other widths, each from so many drawings on;
    `meanwhile` is called after the first."""
    pyte = pytest.importorskip("pyte")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    screen, heard, widths, drawn = pyte.Screen(columns, 50), [], dict(resize), False
    stream = pyte.ByteStream(screen)
    command = [sys.executable, "run.py", *map(str, args)]
    program = subprocess.Popen(
        command, cwd=ROOT, env={**ENVIRONMENT, "TERM": "xterm", **env}, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )  # fmt: skip
    os.close(theirs)
    while True:
        try:
            heard.append(os.read(ours, 1 << 16))
        except OSError:  # all who could write to it have left
            break
        stream.feed(heard[-1])
        if b"\033[J\r" in heard[-1] and not drawn:
            drawn = True
            meanwhile()
        for count in [count for count in widths if b"".join(heard).count(b"\033[J\r") >= count]:
            width = widths.pop(count)
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
            screen.resize(50, width)
    os.close(ours)
    return program.wait(timeout=60), b"".join(heard).decode(), [row.rstrip() for row in screen.display if row.strip()]


def drawings(written):
    """Each text that was drawn at the foot."""
    return re.findall(r"\r([^\r\n]*)\033\[J\r", written)


@pytest.fixture
def job(text, tmp_path):
    return [*TINY, "--data", text, "--steps", 40, "--eval-every", 20, "--save-every", 20, "--out", tmp_path]


@pytest.mark.parametrize("columns, more", [(80, ["--spawn", 2]), (40, [])])
def test_on_a_terminal_the_validation_losses_scroll_by_and_the_line_stays_at_the_foot(job, columns, more):
    code, written, screen = on_a_terminal(*job, *more, columns=columns)
    assert code == 0, written
    lines = drawings(written)
    assert max(map(len, lines)) < columns
    assert [sum(doing in line for line in lines) for doing in ("evaluating", "saving")] == [2, 2]
    history = [
        f"step {line['step']}  validation loss {line['val_loss']:.4f}"
        for line in metrics(job[-1])
        if "val_loss" in line
    ]
    assert screen[:2] == history and len(history) == 2
    assert screen[2] == lines[-1].rstrip() and "40/40 " in screen[2] and "eta 0:00" in screen[2]
    assert screen[3].startswith("Done: 40 steps") and "A sample:" in screen
    assert not [row for row in screen[3:] if "loss 2" in row and "Done" not in row]  # nothing is left over


def test_in_a_window_that_is_resized_each_line_is_as_wide_as_the_window(job):
    code, written, screen = on_a_terminal(*job, columns=120, resize={2: 40, 6: 90})
    assert code == 0, written
    widths = [len(line) for line in drawings(written)]
    assert max(widths) > 80 and widths[-1] < 90 and any(width < 40 for width in widths[2:])
    assert sum("40/40" in row for row in screen) == 1


def test_a_warning_has_a_line_of_its_own(job):
    """The folder goes while the line is there; standard error is the same terminal."""
    code, written, screen = on_a_terminal(
        *job, "--log-every", 1, columns=80, meanwhile=lambda: os.rename(job[-1], f"{job[-1]}-gone")
    )
    (warning,) = [row for row in screen if "Warning" in row]
    assert code == 0 and warning.startswith("Warning: metrics not written: ") and "loss" not in warning, written
    assert len(drawings(written)) > 2


def test_a_dumb_terminal_and_a_file_get_the_lines_of_a_log():
    ours, theirs = pty.openpty()
    with open(ours), open(theirs, "w") as stream, open(os.devnull, "w") as file:
        assert (
            progress.terminal(stream, {"TERM": "xterm"})
            and progress.over("a", stream, {"TERM": "xterm"}) == "\r\033[Ja"
        )
        assert not any(progress.terminal(stream, env) for env in ({"TERM": "dumb"}, {}))
        assert not progress.terminal(file, {"TERM": "xterm"}) and progress.over("a", file) == "a"


def test_a_log_has_a_line_as_often_as_was_asked_and_no_escapes(job):
    ran = run(*job)
    assert ran.code == 0 and ran.err == "" and "\033" not in ran.out and "\r" not in ran.out
    steps = [int(step) for step in re.findall(r"^step (\d+)/40  epoch ", ran.out, re.MULTILINE)]
    assert steps == [10, 20, 30, 40]
