"""How a training goes, in one line: at the foot of a terminal, or in a log.

    live = follow(live, tokens, seconds, read)       # each time that it is drawn; at first it is Live()
    record = {"step": 3, "total": 9, "loss": mean(live), "tokens_per_s": live.rate}
    print(drawn(record, sys.stdout), end="")         # in a log: print(plain(record))

A record has step and total, and of epoch, loss, val_loss, lr, tokens_per_s, mfu, memory (bytes), eta (seconds), skipped
(steps) and doing (what else than training) those that are known. Needs Python alone.
"""

import math
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

EVERY = 0.1  # seconds from one drawing to the next, at least
WEIGHT = 0.9  # of a loss in the mean, where the next one that is read has 1
STRETCH = 1.0  # seconds over which tokens/s are counted, at least
CLEAR = "\r\033[J"  # from the start of the line to the end of the screen
IMPORTANCE = "step doing loss eta val_loss skipped tokens_per_s bar mfu epoch memory lr".split()
CELLS = 5, 30  # of the bar, least and most
Read = Callable[[], Sequence[float]]


class Live(NamedTuple):
    """What has been told of a training, as far as the next line needs it. Seconds are those of the training alone."""

    shown: bool = False  # in a terminal
    step: int = 0  # of the last line of a log
    logged: float = 0.0  # seconds, then
    first: float = 0.0  # seconds that the first step took: longer than others, and no measure for them
    val_loss: float | None = None  # of the last evaluation
    drawn: float = -math.inf  # seconds, when a terminal's line was drawn last
    rate: float | None = None  # tokens/s, over the last stretch
    since: tuple[int, float] | None = None  # tokens and seconds at its end
    losses: float = 0.0  # the sum of those drawn, each times WEIGHT to the power of how many followed it
    weights: float = 0.0  # the sum of these factors
    latest: Sequence[float] = ()  # what was read last
    read: Read | None = None  # what was there to be read, when it was drawn


def due(live: Live, seconds: float, doing: str | None) -> bool:
    """Whether to draw: it has been EVERY seconds, or something begins. `doing` is "" if that is nothing but training."""
    return live.shown and (doing is not None or seconds - live.drawn >= EVERY)


def follow(live: Live, tokens: int, seconds: float, read: Read, late: bool = False) -> Live:
    """One drawing on, after so many tokens and seconds of training.

    read: gives (loss, ...). With `late` it is called at the next drawing, when a copy from the device that has begun now
        will have arrived: nothing waits for the device, and the loss is one drawing old. A loss that is not finite is
        left out of the mean.
    """
    if seconds == live.drawn:  # a step that is drawn again, as it is evaluated or saved
        return live
    latest = (live.read() if live.read else ()) if late else read()
    if latest and math.isfinite(latest[0]):
        live = live._replace(losses=WEIGHT * live.losses + latest[0], weights=WEIGHT * live.weights + 1)
    if not live.since or seconds - live.since[1] >= STRETCH:
        rate = (tokens - live.since[0]) / (seconds - live.since[1]) if live.since else None
        live = live._replace(rate=rate, since=(tokens, seconds))
    return live._replace(drawn=seconds, latest=latest, read=read)


def mean(live: Live) -> float | None:
    """The exponential mean of the losses read, without the bias of a beginning at zero."""
    return live.losses / live.weights if live.weights else None


def eta(done: int, seconds: float, first: float, left: int) -> float | None:
    """Seconds that `left` more steps take if they go on as those `done` did, less the first one."""
    return (seconds - first) / (done - 1) * left if done > 1 else None


def memory(device: str) -> int:
    """The most bytes so far: on "cuda" allocated by torch, elsewhere resident of this process."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# -------------------------------------------------------------------------------------------------------- text


def plain(record: Mapping[str, Any]) -> str:
    """The line of a log: all of the record."""
    formats = {
        "step": f"step {{}}/{record['total']}",
        "epoch": "epoch {:.2f}",
        "loss": "loss {:.4f}",
        "val_loss": "val {:.4f}",
        "lr": "lr {:.1e}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "mfu": "mfu {:.0%}",
    }
    texts = [form.format(record[key]) for key, form in formats.items() if record.get(key) is not None]
    return "  ".join([*texts, *(text for text in _ends(record).values() if text)])


def _ends(record: Mapping[str, Any]) -> dict[str, str]:
    """What is the same in a log and in a terminal."""
    memory, eta, skipped = (record.get(key) for key in ("memory", "eta", "skipped"))
    return {
        "memory": f"{short(memory)}B" if memory else "",
        "skipped": f"skipped {skipped:.0f}" if skipped else "",
        "eta": f"eta {clock(eta)}" if eta is not None else "",
    }


def line(record: Mapping[str, Any], columns: int, ascii: bool = False, color: bool = False) -> str:
    """The line of a terminal, of at most `columns` characters: what is least important goes first, and whole."""
    texts, left = _texts(record), columns + 1
    kept = []
    for key in IMPORTANCE:
        size = CELLS[0] + 2 if key == "bar" else len(texts[key])
        if size and size + 1 > left:
            break
        if size:
            left -= size + 1
            kept.append(key)
    texts["bar"] = bar(record["step"] / record["total"], min(CELLS[0] + left, CELLS[1]), ascii)
    if color and texts["skipped"]:  # nothing else that it says is a warning
        texts["skipped"] = f"\033[33m{texts['skipped']}\033[0m"
    return " ".join(text for key, text in texts.items() if key in kept)


def _texts(record: Mapping[str, Any]) -> dict[str, str]:
    """Each part of the terminal's line, in their order, or "". Their lengths change seldom, so that nothing jumps."""
    formats = {
        "step": f"{{:{len(str(record['total']))}}}/{record['total']}",
        "epoch": "epoch {:.2f}",
        "loss": "loss {:.3f}",
        "val_loss": "val {:.3f}",
        "lr": "lr {:.1e}",
        "mfu": "mfu {:3.0%}",
    }
    known = {key: form.format(record[key]) for key, form in formats.items() if record.get(key) is not None}
    ends, rate, doing = _ends(record), record.get("tokens_per_s"), record.get("doing") or ""
    known["tokens_per_s"] = f"{short(rate):>5} tok/s" if rate is not None else ""
    known |= {"memory": f"{ends['memory']:>6}" if ends["memory"] else "", "skipped": ends["skipped"]}
    known |= {"doing": f"{doing:<10}"} if doing else {"eta": f"{ends['eta']:<10}" if ends["eta"] else ""}
    order = "bar step epoch loss val_loss lr tokens_per_s mfu memory skipped eta doing".split()
    return {key: known.get(key, "") for key in order}


def bar(part: float, cells: int, ascii: bool) -> str:
    """`part`, from 0 to 1, of so many cells; in eighths of one where there are characters for them."""
    if ascii:
        return f"[{'#' * int(part * cells):-<{cells}}]"
    whole, eighths = divmod(int(part * cells * 8), 8)
    return f"|{'█' * whole + ' ▏▎▍▌▋▊▉'[eighths] * (eighths > 0):<{cells}}|"


def short(number: float) -> str:
    """Three digits, and a letter for the thousands: 512, 51.2k, 1.23M."""
    power = 0
    while number >= 999.5 and power < 5:
        number, power = number / 1000, power + 1
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}{' kMGTP'[power].strip()}"


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


# ---------------------------------------------------------------------------------------------------- terminal


def terminal(stream: TextIO, env: Mapping[str, str] = os.environ) -> bool:
    """Whether a line of `stream` can be drawn again; TERM=dumb says that it cannot."""
    return stream.isatty() and env.get("TERM", "dumb") != "dumb"


def able(stream: TextIO, env: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """What line() may use: no more than ASCII if `stream` has no more, no colour if NO_COLOR is set."""
    try:
        "█▏".encode(stream.encoding)
        ascii = False
    except UnicodeEncodeError:
        ascii = True
    return {"ascii": ascii, "color": not env.get("NO_COLOR")}


def columns(stream: TextIO) -> int:
    """How wide the terminal is now, whatever COLUMNS said when the program began."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:  # it was closed
        return 80


def drawn(record: Mapping[str, Any], stream: TextIO) -> str:
    """What draws the record's line over the one that is there. The cursor goes back to its start: a terminal that is
    made narrower breaks the line in two, and from there the next drawing erases both."""
    return f"\r{line(record, columns(stream) - 1, **able(stream))}\033[J\r"


def over(text: str, stream: TextIO, env: Mapping[str, str] = os.environ) -> str:
    """What writes a line of its own, in a terminal in the place of the one that is drawn there."""
    return f"{CLEAR}{text}" if terminal(stream, env) else text
