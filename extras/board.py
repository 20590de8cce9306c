"""Figures for TensorBoard: `tensorboard --logdir out` shows them while the training goes on.

    board = open_board("out", start=0)
    write(board, {"step": 10, "loss": 2.5, "lr": 0.006})

Needs torch and tensorboard.
"""

import math
from typing import Any


def open_board(folder: str, start: int) -> Any:
    """A torch.utils.tensorboard.SummaryWriter into `folder`. Of what an earlier run wrote there the steps after `start`
    are no longer shown, as they are done again."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=start + 1)


def write(board: Any, record: dict[str, Any]) -> None:
    """Each finite number of `record` under its name, at record["step"]; it is in the file when this returns."""
    for name, value in record.items():
        if name != "step" and math.isfinite(value):
            board.add_scalar(name, value, record["step"])
    board.flush()
