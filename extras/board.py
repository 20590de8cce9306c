"""Write metrics for TensorBoard. `tensorboard --logdir out` shows them during the training.

    writer = open_board("out", start=0)
    write(writer, {"step": 10, "loss": 2.5, "lr": 0.006})

    files = storage(ckpt, "out", start=0)      # writes each line of metrics for TensorBoard too
    files.append_text("out", "metrics.jsonl", '{"step": 10, "loss": 2.5}\n')

Needs torch and tensorboard.
"""

import json
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError("pip install tensorboard to write metrics for it") from error


def open_board(folder: str, start: int) -> SummaryWriter:
    """Return a writer into `folder`.

    TensorBoard then hides what an earlier run wrote after step `start`, as it is done again.
    """
    return SummaryWriter(folder, purge_step=start + 1)


def write(writer: SummaryWriter, record: dict[str, Any]) -> None:
    """Write each finite number of `record` under its name, at record["step"]; flush the file."""
    for name, value in record.items():
        if name != "step" and math.isfinite(value):
            writer.add_scalar(name, value, record["step"])
    writer.flush()


def storage(inner: Any, folder: str, start: int) -> SimpleNamespace:
    """Return the functions of `inner` (ckpt.py, or a record with its functions).

    append_text also writes the line, which is a JSON object, for TensorBoard. Its first call
    creates the file, so that ranks that never call it create none.
    """
    open_once = cache(open_board)

    def append_text(out: str, name: str, line: str) -> None:
        inner.append_text(out, name, line)
        values = json.loads(line).items()
        record = {key: math.nan if value is None else value for key, value in values}
        write(open_once(folder, start), record)

    functions = {name: getattr(inner, name) for name in dir(inner) if not name.startswith("_")}
    return SimpleNamespace(**{**functions, "append_text": append_text})
