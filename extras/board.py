"""Convert the metrics of a run for TensorBoard. `tensorboard --logdir out` then shows them.

    write_events(Path("out/metrics.jsonl").read_text(), "out")

Needs torch and tensorboard.
"""

import json
import math
from pathlib import Path

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError("pip install tensorboard to write metrics for it") from error


def write_events(metrics: str, folder: str) -> None:
    """Write an event file with each finite number of `metrics` under its name, at its step.

    metrics: lines of JSON objects with numbers or null, each with a "step". folder: an existing
    local folder. Event files that it has are deleted, so the function can be called again during a
    training.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: is not a local folder")
    for path in Path(folder).glob("events.out.tfevents.*"):
        path.unlink()
    with SummaryWriter(folder) as writer:
        for line in metrics.splitlines():
            record = json.loads(line)
            for name, value in record.items():
                if name != "step" and value is not None and math.isfinite(value):
                    writer.add_scalar(name, value, record["step"])
