#!/usr/bin/env python3
"""Convert models: GPT-2 of Hugging Face in both directions, nanoGPT in, safetensors out.

python extras/convert.py out/best -o gpt2-mine           for transformers, if --arch is gpt2
python extras/convert.py out/best -o mine.safetensors    any model, with the names of gpt.py
python run.py --init-from gpt2-mine --data train.npy     train it further
python run.py --init-from nanoGPT/out-shakespeare-char --data mine.txt

--init-from reads a folder that transformers has written with save_pretrained, the ckpt.pt of
nanoGPT or its folder, or a checkpoint of run.py. Nothing is downloaded. For a nanoGPT of
characters, copy its meta.pkl beside the ckpt.pt. No code from a file runs.

All but nanoGPT's files need the package safetensors.
"""

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

State = dict[str, Any]
BLOCK = {  # the modules of a block: our name and GPT-2's
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
GPT2 = {  # what a config.json must say, if it says anything
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
SIZES = {
    "layers": "n_layer",
    "heads": "n_head",
    "embd": "n_embd",
    "block_size": "n_positions",
    "vocab": "vocab_size",
}


# --------------------------------------------------------------------------------------------- read


def start_state(path: str, found: State, block_size: int | None = None) -> State:
    """Return what run.py starts from with --init-from: model, config (flags), chars, name.

    path: what --init-from says. found: the checkpoint of run.py there, or {}.
    block_size: a context that may be shorter than that of the model. ValueError if it is longer.
    """
    found = found or read(path)
    if "parts" in found:
        from extras import sharded

        found = found | {"model": sharded.read_model(found)}
    config, weights = found["config"], found["model"]
    config = {name: config[name] for name in config if name in (*SIZES, "arch", "tokenizer")}
    longest = config["block_size"]
    if block_size and block_size > longest:
        raise ValueError(f"--block-size {block_size}: the context of {path} has {longest} tokens")
    config["block_size"] = block_size or longest
    if "positions.weight" in weights:
        weights = weights | {"positions.weight": weights["positions.weight"][:block_size]}
    return {"model": weights, "config": config, "chars": found["chars"], "name": path}


def read(path: str) -> State:
    """Return model, config and chars of a model of another program. ValueError if it is none."""
    folder = Path(path)
    try:
        if (folder / "config.json").exists():
            return read_hf(folder)
        return read_nanogpt(folder / "ckpt.pt" if folder.is_dir() else folder)
    except (OSError, ImportError):
        raise
    except Exception as error:  # A damaged file can raise anything.
        raise ValueError(f"{path} cannot be converted: {error!r:.150}") from error


def read_hf(folder: Path) -> State:
    """Read a GPT-2 that transformers has written, in one or several files."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    for key, value in GPT2.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; it must be {value!r}")
    weights: dict[str, Tensor] = {}
    for file in [*folder.glob("model-*.safetensors")] or [folder / "model.safetensors"]:
        weights |= load_file(file)
    state = from_gpt2(weights, config["n_layer"], config["n_head"], True)
    if (tokenizer := folder / "tokenizer.json").exists():
        state["config"]["tokenizer"] = f"{tokenizer.absolute()}"
        state["chars"] = tokenizer.read_text("utf-8")
    return state


class DataUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers, but no function or class."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"meta.pkl contains code: {module}.{name}")


def read_nanogpt(file: Path) -> State:
    """Read the ckpt.pt of nanoGPT, with the characters of a meta.pkl beside it."""
    found = torch.load(file, "cpu", weights_only=True)
    sizes = found["model_args"]
    state = from_gpt2(found["model"], sizes["n_layer"], sizes["n_head"], False)
    if (meta := file.with_name("meta.pkl")).exists():
        with meta.open("rb") as opened:
            chars = DataUnpickler(opened).load()["itos"]
        state["chars"] = "".join(chars[i] for i in range(len(chars)))
        state["config"]["tokenizer"] = "char"
    return state


def from_gpt2(theirs: dict[str, Tensor], layers: int, heads: int, conv1d: bool) -> State:
    """Return the model of GPT-2's weights in float32. If there are no biases, they are zero.

    conv1d: the matrices of the blocks are (in, out), as in transformers.
    """
    theirs = {
        re.sub(r"^(_orig_mod\.)?(transformer\.)?", "", name): weight.float()
        for name, weight in theirs.items()
        if not re.search(r"\.attn\.(masked_)?bias$|lm_head", name)  # old buffers; the tied weight
    }
    ours: dict[str, Tensor] = {}
    for name, their_name in gpt2_names(layers).items():
        if name.endswith(".bias") and not any(name.endswith(".bias") for name in theirs):
            ours[name] = torch.zeros(len(ours[name.replace("bias", "weight")]))
        else:
            ours[name] = transpose(theirs[their_name], their_name, conv1d)
    if extra := theirs.keys() - gpt2_names(layers).values():
        raise ValueError(f"{min(extra)} is not a weight of GPT-2")
    vocab, embd = ours["embedding.weight"].shape
    sizes = {"vocab": vocab, "embd": embd, "block_size": len(ours["positions.weight"])}
    config = {"arch": "gpt2", "layers": layers, "heads": heads} | sizes
    ours["head.weight"] = ours["embedding.weight"]
    return {"model": ours, "config": config, "chars": ""}


def gpt2_names(layers: int) -> dict[str, str]:
    """Return {our name: GPT-2's name} of each weight but the head, which is the embedding."""
    names = {"embedding.weight": "wte.weight", "positions.weight": "wpe.weight"}
    modules = {"norm": "ln_f"}
    for i in range(layers):
        modules |= {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for ours, theirs in BLOCK.items()}
    for ours, theirs in modules.items():
        names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    return names


def transpose(weight: Tensor, name: str, conv1d: bool) -> Tensor:
    """Transpose the matrices of the blocks of GPT-2, if they are (in, out)."""
    return weight.T.contiguous() if conv1d and name[:2] == "h." and weight.ndim == 2 else weight


# -------------------------------------------------------------------------------------------- write


def write_hf(folder: Path, weights: dict[str, Tensor], config: State, chars: str) -> None:
    """Write a folder for AutoModelForCausalLM and AutoTokenizer. config: flags of run.py."""
    from safetensors.torch import save

    theirs = GPT2 | {theirs: config[ours] for ours, theirs in SIZES.items()}
    theirs |= {
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(theirs, indent=1))
    named = {
        f"transformer.{name}": transpose(weights[ours], name, True)
        for ours, name in gpt2_names(config["layers"]).items()
    }
    (folder / "model.safetensors").write_bytes(save(named, {"format": "pt"}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        )
    )
    if chars or config["tokenizer"] == "byte":
        if config["tokenizer"] in ("char", "byte"):
            chars = json.dumps(make_tokenizer(chars))
        (folder / "tokenizer.json").write_text(chars, "utf-8")


def make_tokenizer(chars: str) -> State:
    """Return a tokenizer.json of characters, or of bytes if there are none."""
    model: State
    if chars:
        # No token has the name [UNK], so unknown characters are an error.
        ids = {char: i for i, char in enumerate(chars)}
        model = {"type": "WordLevel", "vocab": ids, "unk_token": "[UNK]"}
        split = dict(type="Split", pattern={"Regex": r"[\s\S]"}, behavior="Isolated", invert=False)
        decoder = {"type": "Fuse"}
    else:
        # These characters stand for the bytes 0 to 255 in GPT-2's tokenizer.
        others = map(chr, range(256, 512))
        latin = map(chr, range(256))
        names = (c if c.isprintable() and c != " " else next(others) for c in latin)
        model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(names)}, "merges": []}
        split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
        decoder = split  # type: ignore[assignment]
    # null and not missing: transformers.js needs these keys.
    empty: State = dict(version="1.0", added_tokens=[], normalizer=None, post_processor=None)
    return empty | dict(pre_tokenizer=split, decoder=decoder, model=model)


@click.command()
@click.argument("checkpoint")
@click.option("-o", "--output", required=True, help="FILE.safetensors, or a folder for GPT-2.")
def main(checkpoint: str, output: str) -> None:
    """Write the model of a checkpoint, such as out/best, for other programs."""
    sys.path.insert(0, f"{Path(__file__).resolve().parents[1]}")
    import ddp_setup
    import run

    if Path(output).exists():
        raise click.UsageError(f"{output} exists")
    model, flags, saved = run.load_model(checkpoint, ddp_setup.World())
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if output.endswith(".safetensors"):
        from safetensors.torch import save

        config = json.dumps(vars(flags))
        Path(output).write_bytes(save(weights, {"config": config, "chars": saved["chars"]}))
    elif flags.arch == "gpt2":
        write_hf(Path(output), weights, vars(flags), saved["chars"])
    else:
        raise click.UsageError(f"transformers has no {flags.arch}: name a file .safetensors")
    click.echo(f"wrote {output}")


if __name__ == "__main__":
    main()
