"""What a checkpoint is, in words, from its state dict and what was logged on the way to it."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any


def newest(entries: Iterable[Any], load: Callable[[Any], dict[str, Any]]) -> tuple[dict[str, Any] | None, list[str]]:
    """(what `load` makes of the last of `entries` for which it does not raise, a line on each), oldest first."""
    state, verdicts = None, []
    for entry in entries:
        try:
            state = load(entry)
            verdict = f"verified, {size(tensors(state))}"
        except (OSError, ValueError) as error:
            verdict = f"{error}"
        verdicts.append(f"{entry.name}  {verdict}")
    return state, verdicts


def describe(state: dict[str, Any], metrics: Iterable[str], config: str) -> str:
    """state: the checkpoint; metrics: lines of JSON objects up to its step; config: what its run left beside it."""
    lines, ran_on = [json.loads(line) for line in metrics], {}
    with suppress(ValueError, TypeError):
        ran_on = dict(json.loads(config))
    c, v = state["config"], state["vocabulary"]
    weights, moments = list(tensors(state["model"])), list(tensors(state["optimizers"]))
    shown = {
        "model": f"{c['arch']}, {c['layers']} layers, {c['heads']} heads, {c['embd']} wide, block size {c['block_size']}",
        "vocabulary": f"{v['vocab']} tokens of kind {v['kind']}",
        "parameters": f"{sum(w.numel() for w in weights):,} ({size(weights)}; the optimizer's state {size(moments)})",
        "trained": f"{state['step']:,} steps, {last(lines, 'tokens', ',')} tokens, {last(lines, 'epoch', '.4g')} epochs",
        "loss": f"training {last(lines, 'loss', '.4f')}, validation {last(lines, 'val_loss', '.4f')}",
        "made with": ", ".join(f"{key} {ran_on[key]}" for key in ("torch", "ranks", "device") if key in ran_on),
        "flags": " ".join(f"--{key.replace('_', '-')} {value}" for key, value in c.items() if value is not None),
    }
    return "\n".join(f"{key:<11} {text or 'unknown'}" for key, text in shown.items())


def tensors(state: Any) -> Iterable[Any]:
    """Those in a nest of dicts and lists; one that is there under two names, as a tied head is, once."""
    found, left = {}, [state]
    while left:
        value = left.pop()
        if isinstance(value, (dict, list)):
            left += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "data_ptr"):
            found[value.data_ptr(), value.shape] = value
    return found.values()


def last(lines: Iterable[dict[str, Any]], key: str, format: str) -> str:
    """The last number under `key`, or "unknown"."""
    numbers = [line[key] for line in lines if isinstance(line.get(key), (int, float))]
    return f"{numbers[-1]:{format}}" if numbers else "unknown"


def size(those: Iterable[Any]) -> str:
    return f"{sum(tensor.nbytes for tensor in those) / 1e6:,.1f} MB"
