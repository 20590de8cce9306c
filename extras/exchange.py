"""Read models of other programs: Hugging Face's GPT-2, nanoGPT, and files of export.py.

    found = read("gpt2-theirs")
    model = gpt.build(gpt.Config(**found.config), seed=0)
    model.load_state_dict(found.weights)

All formats but nanoGPT's need the package safetensors. Of Hugging Face's models, only GPT-2 can be
read, and nothing is downloaded. Files are read with safetensors and torch.load(weights_only=True),
which do not run code from a file, and nanoGPT's meta.pkl with an unpickler that refuses code.
export.py writes the other two formats.
"""

import json
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

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


def read(path: str) -> Model:
    """Read a Hugging Face folder, a nanoGPT ckpt.pt or its folder, or a .safetensors of export.py.

    If nanoGPT's meta.pkl is beside a ckpt.pt, the vocabulary is the characters in it.
    ValueError, OSError or ImportError says why a model cannot be read.
    """
    folder = Path(path)
    file = folder / "ckpt.pt" if folder.is_dir() else folder
    try:
        if any(folder.glob("model.safetensors*")):
            return read_hf(folder)
        if not folder.exists():
            raise ValueError("no such file or folder; models of a hub are not downloaded")
        if any(folder.glob("pytorch_model*.bin")):
            raise ValueError(
                "has only pytorch_model.bin; to get a model.safetensors, load it with transformers "
                "(from_pretrained) and write it with save_pretrained"
            )
        if not file.is_file():
            raise ValueError(
                "is not a file, and not a folder with a checkpoint of run.py, a model.safetensors "
                "or a ckpt.pt"
            )
        return read_safetensors(file) if file.suffix == ".safetensors" else read_nanogpt(file)
    except (OSError, ImportError):
        raise
    except Exception as error:  # a damaged file can raise anything
        reason = error if isinstance(error, ValueError) else f"has a wrong format: {error!r}"
        raise ValueError(f"{path}: {reason}") from error


def start_state(path: str, found: dict[str, Any], block_size: int | None = None) -> dict[str, Any]:
    """Return what run.py starts from with --init-from: model, config (flags), vocabulary, name.

    path: what --init-from says. found: the checkpoint of run.py there. {}: `read` reads `path`.
    block_size: a context that may be shorter than that of the model; ValueError if it is longer.
    """
    if found:
        sizes, vocabulary, weights = (found[k] for k in ("config", "vocabulary", "model"))
    else:
        sizes, vocabulary, weights = read(path)
        vocabulary = {**vocabulary, "vocab": sizes["vocab"]}
    flags = {name: sizes[name] for name in ("arch", "layers", "heads", "embd", "block_size")}
    longest = flags["block_size"]
    if block_size:
        if block_size > longest:
            raise ValueError(
                f"--block-size {block_size}: the context of {path} has {longest} tokens; give "
                f"{longest} or less"
            )
        flags["block_size"] = block_size
        if "positions.weight" in weights:
            weights = {**weights, "positions.weight": weights["positions.weight"][:block_size]}
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


def to_gpt2(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return our weights as transformers stores them, with the blocks' matrices as (in, out)."""
    names = gpt2_names(layers)
    return {theirs: _convert(theirs, weights[ours], True) for ours, theirs in names.items()}


def _convert(name: str, weight: Tensor, conv1d: bool) -> Tensor:
    """Return a weight as float32. The matrix of a Conv1D is transposed."""
    transposed = conv1d and ".h." in name and weight.ndim == 2
    return (weight.T if transposed else weight).float().contiguous()


def from_gpt2(weights: dict[str, Tensor], heads: int, conv1d: bool) -> Model:
    """Return the model of GPT-2's weights. If all biases are missing, they are zero."""
    theirs = {
        re.sub(r"^(_orig_mod\.)?(transformer\.)?", "transformer.", name): weight
        for name, weight in weights.items()
        if not re.fullmatch(r".*\.attn\.(masked_)?bias", name)  # a buffer of older files
    }
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
    config = {"arch": "gpt2", "heads": heads, "block_size": len(ours["positions.weight"])}
    return check_model(config, {"kind": "ids", "chars": ""}, ours)


def check_model(config: dict[str, Any], vocabulary: Any, weights: dict[str, Tensor]) -> Model:
    """Return a model with the sizes of its weights. ValueError if its parts do not fit together.

    Otherwise, a damaged file could ask for a model of any size.
    """
    for name, weight in weights.items():
        if not weight.is_floating_point() or not weight.float().isfinite().all():
            raise ValueError(f"{name} is not a tensor of finite numbers")
    arch, heads, block_size = config["arch"], config["heads"], config["block_size"]
    vocab, embd = weights["embedding.weight"].shape
    layers = sum(name.endswith(".qkv.weight") for name in weights)
    shapes = {f"blocks.{i}.qkv.weight": (3 * embd, embd) for i in range(layers)}
    if arch == "gpt2":
        shapes["positions.weight"] = (block_size, embd)
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} is {tuple(weights[name].shape)}; it must be {shape}")
    kind, chars = vocabulary["kind"], vocabulary["chars"]
    if [*map(type, (arch, heads, block_size, chars))] != [str, int, int, str]:
        raise ValueError("its config or vocabulary has values of wrong types")
    if {"char": len(chars), "byte": 256}.get(kind, vocab) != vocab:
        raise ValueError(f"its vocabulary does not have {vocab} tokens")
    sizes = dict(vocab=vocab, block_size=block_size, layers=layers, heads=heads, embd=embd)
    return Model({"arch": arch, **sizes}, {"kind": kind, "chars": chars}, weights)


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
    model = from_gpt2(weights, config.get("n_head", 12), conv1d=True)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        return model
    text = tokenizer.read_text(encoding="utf-8")
    return model._replace(vocabulary={"kind": "tokenizer", "chars": text})


def read_nanogpt(path: Path) -> Model:
    """Read the ckpt.pt of nanoGPT."""
    try:
        state = torch.load(path, "cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"torch.load(weights_only=True) raises {type(error).__name__}. If you trust the file, "
            "torch.load it, and torch.save its 'model' and 'model_args' alone"
        ) from error
    match state:
        case {"model": dict(weights), "model_args": {"n_head": heads}}:
            model = from_gpt2(weights, heads, conv1d=False)
        case _:
            raise ValueError(
                "is not a nanoGPT checkpoint with 'model' and 'model_args'; for a checkpoint of "
                "run.py name its folder"
            )
    meta = path.with_name("meta.pkl")
    if not meta.exists():
        return model
    chars = read_nanogpt_chars(meta)
    if len(chars) != (vocab := model.config["vocab"]):
        raise ValueError(f"meta.pkl has {len(chars)} tokens; the model has {vocab}")
    return model._replace(vocabulary={"kind": "char", "chars": chars})


class _DataUnpickler(pickle.Unpickler):
    """Reads numbers, texts and containers. What a pickle can call has a name, so it is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"contains code, which is not run: {module!r}, {name!r}")


def read_nanogpt_chars(path: Path) -> str:
    """Return the characters of nanoGPT's meta.pkl, in the order of their ids."""
    with open(path, "rb") as file:
        try:
            itos = dict(_DataUnpickler(file).load()["itos"])
            chars = [itos[i] for i in range(len(itos))]
            if not all(isinstance(char, str) and len(char) == 1 for char in chars):
                raise ValueError("its tokens are not characters")
            if len({*chars}) < len(chars):
                raise ValueError("a character occurs twice")
        except Exception as error:  # a damaged file can raise anything
            reason = f"{error}" if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"{path.name} is not the vocabulary of nanoGPT: {reason}") from None
    return "".join(chars)


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
