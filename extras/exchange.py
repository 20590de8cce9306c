"""A model to and from the files of others: Hugging Face's GPT-2, nanoGPT's, and safetensors.

    write(Model(config, vocabulary, model.state_dict()), "hf", "gpt2-mine")    # AutoModelForCausalLM reads it
    found = read("gpt2-mine")                                                  # weights under our names

Needs torch, and safetensors for all but nanoGPT's. No file is trusted: JSON, safetensors, and of what torch.save
wrote tensors and plain values alone; sizes follow from the weights that are there, not from what a file claims.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

PARTS = {  # of a block, here and in GPT-2
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
GPT2 = {  # what a config.json must say, or leave unsaid, for the model to be GPT-2 as it was published
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


class Model(NamedTuple):
    """A model as it is exchanged."""

    config: dict[str, Any]  # arch, vocab, block_size, layers, heads, embd
    # "kind": "char", "byte", "ids" or "tokenizer"; "chars": id i stands for chars[i], or a tokenizer.json, else ""
    vocabulary: dict[str, Any]
    weights: dict[str, Tensor]  # float32, named as in the state dict


# ------------------------------------------------------------------------------------------------------- files


def write(model: Model, format: str, path: str) -> None:
    """Write `path`, which must not exist: "hf" and "nanogpt" a folder, "safetensors" a file.

    It is there when it is whole. ValueError for an architecture that the format cannot hold, and as OSError for
    `path`; ImportError names a package that is wanting.
    """
    if format != "safetensors" and model.config["arch"] != "gpt2":
        raise ValueError(f"--format {format} holds GPT-2 alone; of --arch {model.config['arch']} make safetensors")
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: exists already; name another")
    temporary = f"{path}.{os.getpid()}"
    writers: dict[str, Callable[[Model, str], None]] = {
        "hf": write_hf,
        "nanogpt": partial(write_nanogpt, name=os.path.basename(os.path.abspath(path))),
        "safetensors": write_safetensors,
    }
    try:
        writers[format](model, temporary)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            os.unlink(temporary)
        raise


def plain(file: BinaryIO) -> Any:
    """What torch.save wrote, if that is tensors and plain values alone; nothing in it is run."""
    return torch.load(file, map_location="cpu", weights_only=True)


def read(path: str, load: Callable[[BinaryIO], Any] = plain) -> Model:
    """The model in a Hugging Face folder, a nanoGPT ckpt.pt or the folder that it is in, or our .safetensors file.

    load: what reads a file of torch.save's. ValueError or OSError says what is wrong, ImportError what is wanting.
    """
    file = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    try:
        if os.path.exists(os.path.join(path, "config.json")):
            return read_hf(path)
        if not os.path.isfile(file):
            raise ValueError("no such file, and no folder with a config.json or ckpt.pt")
        with open(file, "rb") as opened:
            start = opened.read(9)
        return read_safetensors(file) if start.endswith(b"{") else read_nanogpt(file, load)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error if isinstance(error, ValueError) else f'malformed: {error!r}'}") from error


# -------------------------------------------------------------------------------------------------------- GPT-2


def _names(layers: int) -> Iterator[tuple[str, str]]:
    """(our name, GPT-2's) of each weight but the head, which is tied to the embedding."""
    yield from (("embedding.weight", "wte.weight"), ("positions.weight", "wpe.weight"))
    for i in range(layers):
        for ours, theirs in PARTS.items():
            yield from ((f"blocks.{i}.{ours}.{kind}", f"h.{i}.{theirs}.{kind}") for kind in ("weight", "bias"))
    yield from ((f"norm.{kind}", f"ln_f.{kind}") for kind in ("weight", "bias"))


def to_gpt2(model: Model, conv1d: bool) -> dict[str, Tensor]:
    """The weights as GPT-2's; conv1d: matrices of the blocks are (in, out), as Hugging Face has them."""
    named = {f"transformer.{theirs}": model.weights[ours] for ours, theirs in _names(model.config["layers"])}
    return {name: (_turned(name, w) if conv1d else w).contiguous() for name, w in named.items()}


def _turned(name: str, weight: Tensor) -> Tensor:
    return weight.T if ".h." in name and weight.ndim == 2 else weight


def from_gpt2(weights: dict[str, Tensor], heads: Any, conv1d: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, weights) of GPT-2's weights, by any of their names. Biases, if there are none at all, are zero."""
    left = {re.sub(r"^(_orig_mod\.)?(transformer\.)?", "transformer.", name): w for name, w in weights.items()}
    left = {name: w for name, w in left.items() if not re.fullmatch(r".*\.attn\.(masked_)?bias", name)}  # no weights
    check(left)
    head = left.pop("transformer.lm_head.weight", None)
    layers = sum(name.endswith(".ln_1.weight") for name in left)
    biased = any(name.endswith(".bias") for name in left)
    ours = {}
    for name, theirs in _names(layers):
        theirs = f"transformer.{theirs}"
        if biased or not theirs.endswith(".bias"):
            if theirs not in left:
                raise ValueError(f"{theirs} is missing")
            weight = left.pop(theirs)
            ours[name] = (_turned(theirs, weight) if conv1d else weight).float().contiguous()
        else:
            ours[name] = torch.zeros(len(ours[name.replace("bias", "weight")]))
    if left:
        raise ValueError(f"{min(left)} is not one of GPT-2's weights")
    ours["head.weight"] = ours["embedding.weight"]
    if head is not None and not torch.equal(head.float(), ours["head.weight"]):
        raise ValueError("lm_head.weight is another than wte.weight; in GPT-2 they are one")
    return sizes("gpt2", heads, len(ours["positions.weight"]), ours), ours


def check(weights: dict[str, Any]) -> None:
    """ValueError names what is not a tensor of finite floats: quantised weights are none."""
    for name, weight in weights.items():
        if not (isinstance(weight, Tensor) and weight.is_floating_point() and weight.float().isfinite().all()):
            raise ValueError(f"{name} is not a tensor of finite numbers")


def sizes(arch: Any, heads: Any, block_size: Any, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The config of these weights, under our names."""
    if type(arch) is not str:
        raise ValueError(f"arch is {arch!r}; needs a name")
    for what, value in (("heads", heads), ("block size", block_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{what} is {value!r}; needs a whole number")
    vocab, embd = weights["embedding.weight"].shape
    layers = sum(name.endswith(".qkv.weight") for name in weights)
    return {"arch": arch, "vocab": vocab, "block_size": block_size, "layers": layers, "heads": heads, "embd": embd}


# ------------------------------------------------------------------------------------------------ Hugging Face


def write_hf(model: Model, folder: str) -> None:
    """A folder for AutoModelForCausalLM and AutoTokenizer. Bare ids have no tokenizer."""
    safetensors, c = _safetensors(), model.config
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in GPT2.items()},
        **{"vocab_size": c["vocab"], "n_positions": c["block_size"]},
        **{"n_layer": c["layers"], "n_head": c["heads"], "n_embd": c["embd"]},
        **{key: c.get("dropout", 0.0) for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
        **{"bos_token_id": None, "eos_token_id": None, "dtype": "float32"},
    }
    files = {"config.json": config}
    if model.vocabulary["kind"] != "ids":
        files["tokenizer.json"] = tokenizer(**model.vocabulary)
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": c["block_size"],
            "clean_up_tokenization_spaces": False,
        }
    os.mkdir(folder)
    for name, content in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    path = os.path.join(folder, "model.safetensors")
    safetensors.torch.save_file(to_gpt2(model, conv1d=True), path, {"format": "pt"})


def read_hf(folder: str) -> Model:
    """A GPT-2 as save_pretrained writes it, in one file or several."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    for key, values in GPT2.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"{key} is {config[key]!r}; of GPT-2 it is {values[0]!r}")
    names = sorted(name for name in os.listdir(folder) if re.fullmatch(r"model.*\.safetensors", name))
    if not names:
        raise ValueError("there is no model.safetensors; save_pretrained of transformers writes it")
    weights = {name: w for file in names for name, w in _load(os.path.join(folder, file))[0].items()}
    sized, ours = from_gpt2(weights, config.get("n_head", 12), conv1d=True)
    return Model(sized, vocabulary(os.path.join(folder, "tokenizer.json"), sized["vocab"]), ours)


def tokenizer(kind: str, chars: str) -> Any:
    """The tokenizer.json of a vocabulary. That of characters or bytes has no other token, not even for the unknown:
    a character that is not in the vocabulary is an error there, as here."""
    if kind == "tokenizer":
        return json.loads(chars)
    parts: dict[str, Any]
    if kind == "char":
        parts = {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"[\s\S]"},
                "behavior": "Isolated",
                "invert": False,
            },
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(chars)}, "unk_token": "[UNK]"},
        }
    else:
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(byte_names())}, "merges": []}
        parts = {"pre_tokenizer": level, "decoder": level, "model": model}
    return {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, **parts}


def byte_names() -> str:
    """How GPT-2's tokenizer writes the bytes 0 to 255: the printable ones of Latin-1 as they are, the others as the
    characters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256))


def vocabulary(path: str, vocab: int) -> dict[str, Any]:
    """Of a tokenizer.json as above, also as transformers saves it again; any other is kept as it is. None: bare ids."""
    try:
        with open(path, encoding="utf-8") as file:
            words = file.read()
        model = json.loads(words)["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return {"kind": "ids", "chars": ""}
    try:
        tokens = {i: token for token, i in model["vocab"].items()}
        chars = "".join(tokens[i] for i in range(vocab))
    except (KeyError, TypeError, AttributeError):
        return {"kind": "tokenizer", "chars": words}
    if model.get("type") == "WordLevel" and len(chars) == len(tokens) == vocab:
        return {"kind": "char", "chars": chars}
    if model.get("type") == "BPE" and not model.get("merges") and chars == byte_names():
        return {"kind": "byte", "chars": ""}
    return {"kind": "tokenizer", "chars": words}


# ----------------------------------------------------------------------------------------------------- nanoGPT


def write_nanogpt(model: Model, folder: str, name: str) -> None:
    """A folder to lie in its data/ as `name`: ckpt.pt, and of characters the meta.pkl in which its sample.py then looks
    them up. For resuming there it lacks the state of the optimizer."""
    c = model.config
    shape = {"n_layer": c["layers"], "n_head": c["heads"], "n_embd": c["embd"], "block_size": c["block_size"]}
    model_args = {**shape, "bias": True, "vocab_size": c["vocab"], "dropout": c.get("dropout", 0.0)}
    weights = to_gpt2(model, conv1d=False)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    state = {"model": weights, "model_args": model_args, "vocabulary": model.vocabulary, "config": {"dataset": name}}
    os.mkdir(folder)
    torch.save(state, os.path.join(folder, "ckpt.pt"))
    if model.vocabulary["kind"] == "char":
        tokens = dict(enumerate(model.vocabulary["chars"]))
        meta = {"vocab_size": len(tokens), "itos": tokens, "stoi": {char: i for i, char in tokens.items()}}
        with open(os.path.join(folder, "meta.pkl"), "wb") as file:
            pickle.dump(meta, file)  # plain values: to read it runs nothing


def read_nanogpt(path: str, load: Callable[[BinaryIO], Any]) -> Model:
    with open(path, "rb") as file:
        try:
            state = load(file)
        except Exception as error:
            raise ValueError(
                f"{str(error).splitlines()[0]}; nothing but tensors and plain values is read. Where you trust the file, "
                "torch.load it and torch.save its 'model' and 'model_args' alone"
            ) from error
    if not isinstance(state, dict) or not {"model", "model_args"} <= state.keys():
        raise ValueError("no checkpoint of nanoGPT, with 'model' and 'model_args'; of one of ours name the folder")
    config, weights = from_gpt2(state["model"], state["model_args"]["n_head"], conv1d=False)
    return Model(config, checked(state.get("vocabulary", {"kind": "ids", "chars": ""}), config["vocab"]), weights)


def checked(vocabulary: Any, vocab: int) -> dict[str, Any]:
    """A vocabulary that a file told of, if it is one of `vocab` tokens."""
    kind, chars = vocabulary["kind"], vocabulary["chars"]
    lengths = {"char": {len(set(chars))} & {len(chars)}, "byte": {256}, "ids": {vocab}, "tokenizer": {vocab}}
    if type(chars) is not str or vocab not in lengths[kind]:
        raise ValueError(f"its vocabulary is not one of {vocab} tokens")
    return {"kind": kind, "chars": chars}


# -------------------------------------------------------------------------------------------------- safetensors


def write_safetensors(model: Model, path: str) -> None:
    """The state dict under its own names, of any architecture; config and vocabulary are in the header, as JSON."""
    about = json.dumps({"config": model.config, "vocabulary": model.vocabulary})
    weights = {name: weight.clone() for name, weight in model.weights.items()}  # the format has no shared memory
    _safetensors().torch.save_file(weights, path, {"format": "pt", "ddpkit": about})


def read_safetensors(path: str) -> Model:
    weights, header = _load(path)
    check(weights)
    if "ddpkit" not in header:
        raise ValueError("its header does not tell the model's sizes; of Hugging Face's files name the folder")
    about = json.loads(header["ddpkit"])
    c = about["config"]
    config = sizes(c["arch"], c["heads"], c["block_size"], weights)
    return Model(config, checked(about["vocabulary"], config["vocab"]), weights)


def _load(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, what the header tells besides) of a safetensors file."""
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{os.path.basename(path)} is not whole: {error}") from None


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("pip install safetensors to exchange models") from None
    return safetensors
