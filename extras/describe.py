"""Describe checkpoints as text, from their state and from the metrics that their run wrote.

    state, lines = verify_all(ckpt.list_checkpoints("out"), partial(ckpt.load, "out"))
    print(describe(state, text_of_metrics_jsonl, text_of_config_json))

Needs Python alone; the tensors in a state are only counted.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


def verify_all(
    entries: Iterable[Any], load: Callable[[Any], dict[str, Any]]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Load all checkpoints; return the state of the last good one (or None) and a line on each.

    load: raises OSError or ValueError for a checkpoint that cannot be used.
    """
    state, lines = None, []
    for entry in entries:
        try:
            state = load(entry)
            lines.append(f"{entry.name}  verified, {_size([*_weights(state), *_moments(state)])}")
        except (OSError, ValueError) as error:
            lines.append(f"{entry.name}  {error}")
    return state, lines


def describe(state: dict[str, Any], metrics: str, config: str) -> str:
    """Return a description of several lines. ValueError if run.py did not write the checkpoint.

    state: a checkpoint of run.py. metrics, config: the texts of metrics.jsonl and config.json, or
    "". Only metrics up to the step of the checkpoint count, and of these the last values. "unknown"
    stands for missing values.
    """
    if not {"config", "vocabulary", "step"} <= state.keys():
        raise ValueError("the checkpoint was not written by run.py")
    records, run = list[dict[str, Any]](), dict[str, Any]()
    for line in metrics.splitlines():
        with suppress(ValueError, TypeError, KeyError):  # a crash can leave an incomplete line
            record = json.loads(line)
            records += [record] if record["step"] <= state["step"] else []
    with suppress(ValueError, TypeError):
        run = dict(json.loads(config))
    c, v, weights = state["config"], state["vocabulary"], _weights(state)
    parameters = sum(weight.numel() for weight in weights)
    shown = {
        "model": f"{c['arch']}, {c['layers']} layers, {c['heads']} heads, width {c['embd']}, "
        f"block size {c['block_size']}",
        "vocabulary": f"{v['vocab']} tokens of kind {v['kind']}",
        "parameters": f"{parameters:,} ({_size(weights)}; optimizers {_size(_moments(state))})",
        "trained": f"{state['step']:,} steps; {_last(records, 'tokens', ',')} tokens, "
        f"{_last(records, 'epoch', '.4g')} epochs",
        "loss": f"training {_last(records, 'loss', '.4f')}, "
        f"validation {_last(records, 'val_loss', '.4f')}",
        "made with": ", ".join(
            f"{key} {run[key]}" for key in ("torch", "ranks", "device") if key in run
        ),
        "flags": " ".join(
            f"--{k.replace('_', '-')} {value}"
            for k, values in c.items()
            for value in (values if isinstance(values, tuple) else [values])
            if value is not None
        ),
    }
    return "\n".join(f"{key:<11} {text or 'unknown'}" for key, text in shown.items())


def _weights(state: dict[str, Any]) -> list[Any]:
    """Return the tensors of the model. One with two names, such as a tied head, counts once."""
    tensors = (value for value in state["model"].values() if hasattr(value, "data_ptr"))
    return [*{(tensor.data_ptr(), tensor.shape): tensor for tensor in tensors}.values()]


def _moments(state: dict[str, Any]) -> list[Any]:
    states = [optimizer.get("state", {}) for optimizer in state.get("optimizers", [])]
    values = (value for of in states for moments in of.values() for value in moments.values())
    return [value for value in values if hasattr(value, "nbytes")]


def _last(records: Iterable[dict[str, Any]], key: str, format: str) -> str:
    """Return the last number under `key`, formatted, or "unknown"."""
    numbers = [record[key] for record in records if isinstance(record.get(key), (int, float))]
    return f"{numbers[-1]:{format}}" if numbers else "unknown"


def _size(tensors: Iterable[Any]) -> str:
    return f"{sum(tensor.nbytes for tensor in tensors) / 1e6:,.1f} MB"
