"""Read models of other programs: Hugging Face's GPT-2, nanoGPT, and files of export.py.

    found = read("gpt2-theirs", reader.read)
    model = gpt.build(gpt.Config(**found.config), seed=0)
    model.load_state_dict(found.weights)

All formats but nanoGPT's need the package safetensors. Of Hugging Face's models, only GPT-2 can be
read, and nothing is downloaded. No file is trusted: code in it is not run, and a model cannot be
larger than the weights in the file. export.py writes the same formats.
"""

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

BLOCK = {  # the modules of a block: our name and GPT-2's
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
GPT2 = {  # the values that a config.json may have
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


class Model(NamedTuple):
    """A model, as this file returns it and export.py takes it."""

    config: dict[str, Any]  # arch, vocab, block_size, layers, heads, embd
    # "kind": "char", "byte", "ids" or "tokenizer". "chars": for "char", the character of each id;
    # for "tokenizer", the text of a tokenizer.json; otherwise ""
    vocabulary: dict[str, Any]
    weights: dict[str, Tensor]  # named as in gpt.py's state dict; those of GPT-2 are float32


def read(path: str, load: Callable[[BinaryIO], Any]) -> Model:
    """Read a Hugging Face folder, a nanoGPT ckpt.pt or its folder, or a .safetensors of export.py.

    load: returns what torch.save wrote to an open file, without running code from the file.
    ValueError, OSError or ImportError says why a model cannot be read.
    """
    folder = Path(path)
    file = folder / "ckpt.pt" if folder.is_dir() else folder
    try:
        if any(folder.glob("model.safetensors*")):
            return read_hf(folder)
        if not folder.exists():
            raise ValueError("no such file or folder; models of a hub are not downloaded")
        if not file.is_file():
            raise ValueError(
                "is not a file, and not a folder with a checkpoint of run.py, a model.safetensors "
                "or a ckpt.pt"
            )
        with open(file, "rb") as opened:
            start = opened.read(9)  # a safetensors file begins with 8 bytes and a JSON object
        return read_safetensors(file) if start.endswith(b"{") else read_nanogpt(file, load)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else f"has a wrong format: {error!r}"
        raise ValueError(f"{path}: {reason}") from error


def start_state(
    path: str, out: str, storage: Any, load: Callable[[BinaryIO], Any]
) -> dict[str, Any]:
    """Return what run.py starts from with --init-from: model, config (flags), vocabulary, name.

    path: the --out folder of another run, or what `read` takes. out: this run's folder. storage:
    the functions of ckpt.py for `path`. load: see `read`.
    """
    if "://" in path:  # do not print it, because it can contain a password
        raise ValueError("--init-from cannot read a URL; download the model and name its folder")
    if os.path.realpath(path) == os.path.realpath(out):
        raise ValueError(f"--init-from {path} is the folder of --out; choose another --out")

    def load_checked(folder: str, entry: Any) -> Model:
        """Load a checkpoint. ValueError if it could do harm, or is not a model."""
        file = Path(folder, entry.name)
        if file.is_file():  # otherwise it is sharded, and storage.load does the same check
            with open(file, "rb") as opened:
                load(opened)
        state = storage.load(folder, entry)
        try:
            return check_model(state["config"], state["vocabulary"], state["model"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"was not written by run.py: {error!r}") from error

    found, rejected = storage.newest(path, load=load_checked)
    for name, reason in rejected.items():
        warnings.warn(f"{name}: {reason}; using {found.entry.name}", stacklevel=2)
    sizes, vocabulary, weights = found.state if found else read(path, load)
    vocabulary = {**vocabulary, "vocab": sizes["vocab"]}
    flags = {name: sizes[name] for name in ("arch", "layers", "heads", "embd", "block_size")}
    kind = vocabulary["kind"]
    if kind in ("ids", "tokenizer"):
        flags["vocab"] = vocabulary["vocab"]
    if kind != "ids":
        flags["tokenizer"] = f"{path}/tokenizer.json" if kind == "tokenizer" else kind
    return {"model": weights, "config": flags, "vocabulary": vocabulary, "name": path}


# ---------------------------------------------------------------------------------- names and sizes


def gpt2_names(layers: int) -> dict[str, str]:
    """Return {our name: GPT-2's name} of each weight but the head, which is the embedding."""
    modules = {"norm": "ln_f"}
    for i in range(layers):
        modules |= {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for ours, theirs in BLOCK.items()}
    names = {"embedding.weight": "wte.weight", "positions.weight": "wpe.weight"}
    for kind in ("weight", "bias"):
        names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items()}
    return {ours: f"transformer.{theirs}" for ours, theirs in names.items()}


def to_gpt2(weights: dict[str, Tensor], layers: int, conv1d: bool) -> dict[str, Tensor]:
    """Return our weights under GPT-2's names. conv1d: the blocks' matrices become (in, out)."""
    names = gpt2_names(layers)
    return {theirs: _convert(theirs, weights[ours], conv1d) for ours, theirs in names.items()}


def _convert(name: str, weight: Tensor, conv1d: bool) -> Tensor:
    """Return a weight as float32. The matrix of a Conv1D is transposed."""
    transposed = conv1d and ".h." in name and weight.ndim == 2
    return (weight.T if transposed else weight).float().contiguous()


def from_gpt2(weights: dict[str, Tensor], heads: Any, conv1d: bool) -> Model:
    """Return the model of GPT-2's weights. If all biases are missing, they are zero."""
    theirs = {
        re.sub(r"^(_orig_mod\.)?(transformer\.)?", "transformer.", name): weight
        for name, weight in weights.items()
        if not re.fullmatch(r".*\.attn\.(masked_)?bias", name)  # a buffer of older files
    }
    check_weights(theirs)
    head = theirs.pop("transformer.lm_head.weight", None)
    layers = sum(name.endswith(".ln_1.weight") for name in theirs)
    biased = any(name.endswith(".bias") for name in theirs)
    ours: dict[str, Tensor] = {}
    for name, their_name in gpt2_names(layers).items():
        if not biased and name.endswith(".bias"):
            ours[name] = torch.zeros(len(ours[name.replace("bias", "weight")]))
        elif their_name in theirs:
            ours[name] = _convert(their_name, theirs.pop(their_name), conv1d)
        else:
            raise ValueError(f"{their_name} is missing")
    if theirs:
        raise ValueError(f"{min(theirs)} is not a weight of GPT-2")
    ours["head.weight"] = ours["embedding.weight"]
    if head is not None and not torch.equal(head.float(), ours["head.weight"]):
        raise ValueError("lm_head.weight differs from wte.weight; in GPT-2 they are the same")
    config = infer_config("gpt2", heads, len(ours["positions.weight"]), ours)
    return Model(config, {"kind": "ids", "chars": ""}, ours)


def check_model(config: Any, vocabulary: Any, weights: dict[str, Any]) -> Model:
    """Return a model with the sizes of its weights. ValueError if its parts do not fit."""
    check_weights(weights)
    sizes = infer_config(config["arch"], config["heads"], config["block_size"], weights)
    if sizes["arch"] == "gpt2" and not torch.equal(
        weights["head.weight"], weights["embedding.weight"]
    ):
        raise ValueError("head.weight differs from embedding.weight; in GPT-2 they are the same")
    return Model(sizes, check_vocabulary(vocabulary, sizes["vocab"]), weights)


def check_weights(weights: dict[str, Any]) -> None:
    """Raise ValueError unless all values are tensors of finite floats that use their own memory."""
    storages = {}
    for name, weight in weights.items():
        floats = isinstance(weight, Tensor) and weight.is_floating_point()
        if not floats or not weight.float().isfinite().all():
            raise ValueError(f"{name} is not a tensor of finite numbers")
        storages[weight.untyped_storage().data_ptr()] = weight.untyped_storage().nbytes()
    # A head and an embedding may share their memory. If all weights did, copies of them could need
    # any amount of it.
    if sum(weight.nbytes for weight in weights.values()) > 2 * sum(storages.values()):
        raise ValueError("its weights share memory")


def infer_config(
    arch: Any, heads: Any, block_size: Any, weights: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the config of weights under our names.

    ValueError if its model would be larger than the weights: a small file could then take any
    amount of memory.
    """
    if type(arch) is not str:
        raise ValueError(f"arch is {arch!r}; it must be a name")
    for what, value in (("heads", heads), ("block size", block_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a positive integer")
    vocab, embd = weights["embedding.weight"].shape
    layers = sum(name.endswith(".qkv.weight") for name in weights)
    shapes = {f"blocks.{i}.qkv.weight": (3 * embd, embd) for i in range(layers)}
    if arch == "gpt2":
        shapes["positions.weight"] = (block_size, embd)
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} is {tuple(weights[name].shape)}; it must be {shape}")
    sizes = dict(vocab=vocab, block_size=block_size, layers=layers, heads=heads, embd=embd)
    return {"arch": arch, **sizes}


def check_vocabulary(vocabulary: Any, vocab: int) -> dict[str, Any]:
    """Return the vocabulary of a file. ValueError if it does not have `vocab` different tokens."""
    if not isinstance(vocabulary, dict):
        raise ValueError("its vocabulary is not a dict")
    kind, chars = vocabulary["kind"], vocabulary["chars"]
    sizes = {"char": len(chars), "byte": 256, "ids": vocab, "tokenizer": vocab}
    repeated = kind == "char" and len(set(chars)) < len(chars)
    if type(chars) is not str or sizes[kind] != vocab or repeated:
        raise ValueError(f"its vocabulary does not have {vocab} tokens")
    return {"kind": kind, "chars": chars}


# -------------------------------------------------------------------------------------------- files


def read_hf(folder: Path) -> Model:
    """Read a GPT-2 that save_pretrained wrote, in one or several files."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, values in GPT2.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"{key} is {config[key]!r}; GPT-2 has {values[0]!r}")
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.exists() and not (folder / names[0]).exists():
        # Only the listed files, because others can be of another model. `.name` keeps to the
        # folder.
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({Path(name).name for name in weight_map.values()})
    weights: dict[str, Tensor] = {}
    for name in names:
        weights |= load_safetensors(folder / name)[0]
    heads = config.get("n_head", config.get("num_attention_heads", 12))
    model = from_gpt2(weights, heads, conv1d=True)
    layers = model.config["layers"]
    if config.get("n_layer", config.get("num_hidden_layers", layers)) != layers:
        raise ValueError(f"config.json has another number of layers than the weights, {layers}")
    vocabulary = read_vocabulary(folder / "tokenizer.json", model.config["vocab"])
    return model._replace(vocabulary=vocabulary)


def read_nanogpt(path: Path, load: Callable[[BinaryIO], Any]) -> Model:
    """Read the ckpt.pt of nanoGPT."""
    with open(path, "rb") as file:
        try:
            state = load(file)
        except Exception as error:
            raise ValueError(
                f"{str(error).splitlines()[0]}. Only tensors and plain values are read. If you "
                "trust the file, torch.load it, and torch.save its 'model' and 'model_args' alone"
            ) from error
    match state:
        case {"model": dict(weights), "model_args": {"n_head": heads}}:
            model = from_gpt2(weights, heads, conv1d=False)
        case _:
            raise ValueError(
                "is not a nanoGPT checkpoint with 'model' and 'model_args'; for a checkpoint of "
                "run.py name its folder"
            )
    vocabulary = state.get("vocabulary", model.vocabulary)
    return model._replace(vocabulary=check_vocabulary(vocabulary, model.config["vocab"]))


def read_safetensors(path: Path) -> Model:
    """Read a .safetensors of export.py, with config and vocabulary in its header."""
    weights, header = load_safetensors(path)
    if "ddpkit" not in header:
        raise ValueError("its header has no config; for a model of Hugging Face name the folder")
    about = json.loads(header["ddpkit"])
    return check_model(about["config"], about["vocabulary"], weights)


def load_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and the texts in its header."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("pip install safetensors to exchange models") from None
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None


# --------------------------------------------------------------------------------------- vocabulary


def make_tokenizer(kind: str, chars: str) -> Any:
    """Return the tokenizer.json of a vocabulary of kind "char", "byte" or "tokenizer"."""
    if kind == "tokenizer":
        return json.loads(chars)
    ids = {char: i for i, char in enumerate(byte_names() if kind == "byte" else chars)}
    model: dict[str, Any]
    if kind == "byte":
        model = {"type": "BPE", "vocab": ids, "merges": []}
        split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
        decoder = split
    else:
        # No token has the name [UNK], so unknown characters are an error.
        model = {"type": "WordLevel", "vocab": ids, "unk_token": "[UNK]"}
        split = dict(type="Split", pattern={"Regex": r"[\s\S]"}, behavior="Isolated", invert=False)
        decoder = {"type": "Fuse"}
    # null and not missing: transformers.js needs these keys.
    empty = dict(normalizer=None, post_processor=None)
    parts = dict(pre_tokenizer=split, decoder=decoder, model=model)
    return dict(version="1.0", added_tokens=[], **empty, **parts)


def byte_names() -> str:
    """Return the characters that stand for the bytes 0 to 255 in GPT-2's tokenizer."""
    others = map(chr, range(256, 512))
    latin = map(chr, range(256))
    return "".join(c if c.isprintable() and c != " " else next(others) for c in latin)


def read_vocabulary(path: Path, vocab: int) -> dict[str, Any]:
    """Return the vocabulary of a tokenizer.json, "ids" if there is none. ValueError if damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        model = json.loads(text)["model"]
        ids = model.get("vocab")
    except FileNotFoundError:
        return {"kind": "ids", "chars": ""}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: {error!r}") from None
    if isinstance(ids, dict) and len(ids) == vocab:
        in_order = "".join(sorted(ids, key=ids.__getitem__))
        for kind, chars in (("char", in_order), ("byte", "")):
            # Not ==, because transformers adds items when it saves the file again.
            if make_tokenizer(kind, chars)["model"].items() <= model.items():
                return {"kind": kind, "chars": chars}
    return {"kind": "tokenizer", "chars": text}
