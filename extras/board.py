"""Convert the metrics of a run for TensorBoard. `tensorboard --logdir out` then shows them.

    write_events(Path("out/metrics.jsonl").read_text(), "out")

Needs torch and tensorboard.
"""

import json
import math
from contextlib import suppress
from pathlib import Path

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError("pip install tensorboard to write metrics for it") from error

SUFFIX = ".ddpkit"  # the names of event files that this file writes end with it


def write_events(metrics: str, folder: str) -> None:
    """Write an event file with each finite number of `metrics` under its name, at its step.

    metrics: lines of JSON objects with numbers or null, each with a "step" and perhaps a "time", in
    seconds since 1970. Other lines, such as one that is being written, are left out. folder: an
    existing local folder. Event files of earlier calls are deleted, so this function can be called
    again during a training. ValueError if there are no metrics or no such folder.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: is not a local folder")
    records = []
    for line in metrics.splitlines():
        with suppress(ValueError, TypeError):
            record = json.loads(line)
            numbers = {k: v for k, v in dict(record).items() if isinstance(v, (int, float))}
            records += [numbers] if "step" in numbers else []
    if not records:
        raise ValueError(f"{folder}: there are no metrics")
    for path in Path(folder).glob(f"events.out.tfevents.*{SUFFIX}"):
        path.unlink()
    with SummaryWriter(folder, filename_suffix=SUFFIX) as writer:
        for record in records:
            for name, value in record.items():
                if name not in ("step", "time") and math.isfinite(value):
                    writer.add_scalar(name, value, record["step"], record.get("time"))
