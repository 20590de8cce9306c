"""Exchange models with other programs: Hugging Face's GPT-2, nanoGPT, and safetensors files.

    write(Model(config, vocabulary, model.state_dict()), "hf", "gpt2-mine")
    model = AutoModelForCausalLM.from_pretrained("gpt2-mine")        # in transformers
    found = read("gpt2-mine", reader.read)                           # weights under our names

Needs torch, and safetensors for all but nanoGPT. No file is trusted: config files are JSON, weights
are safetensors or are read by the function that the caller passes, and sizes are taken from the
weights, not from what a file claims.
"""

import glob
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

PARTS = {  # the modules of a block: our name and GPT-2's
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
GPT2 = {  # the values in config.json, if present, of GPT-2 as it was published
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


class Model(NamedTuple):
    """A model in the form in which this file exchanges it."""

    config: dict[str, Any]  # arch, vocab, block_size, layers, heads, embd
    # "kind": "char", "byte", "ids" or "tokenizer". "chars": for "char", id i stands for chars[i];
    # for "tokenizer", the text of a tokenizer.json; otherwise ""
    vocabulary: dict[str, Any]
    weights: dict[str, Tensor]  # float32, named as in gpt.py's state dict


# -------------------------------------------------------------------------------------------- files


def write(model: Model, format: str, path: str) -> None:
    """Write a model to `path`: a folder for "hf" and "nanogpt", a file for "safetensors".

    `path` must not exist; it appears when all of it is written. ValueError if the format cannot
    hold the architecture. ImportError names a missing package.
    """
    if format != "safetensors" and model.config["arch"] != "gpt2":
        arch = model.config["arch"]
        raise ValueError(f"--format {format} can hold --arch gpt2 only; use safetensors for {arch}")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already; choose another path")
    temporary = f"{path}.{os.getpid()}"
    try:
        if format == "hf":
            write_hf(model, temporary)
        elif format == "nanogpt":
            write_nanogpt(model, temporary, os.path.basename(os.path.abspath(path)))
        else:
            write_safetensors(model, temporary)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read(path: str, load: Callable[[BinaryIO], Any]) -> Model:
    """Read a Hugging Face folder, a nanoGPT ckpt.pt or its folder, or a .safetensors of `write`.

    load: returns what torch.save wrote to an open file, without running code from the file.
    ValueError or OSError says what is wrong with a file. ImportError names a missing package.
    """
    file = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    try:
        if os.path.exists(os.path.join(path, "config.json")):
            return read_hf(path)
        if not os.path.isfile(file):
            raise ValueError("is not a file, and not a folder with a config.json or a ckpt.pt")
        with open(file, "rb") as opened:
            start = opened.read(9)  # a safetensors file begins with 8 bytes and a JSON object
        return read_safetensors(file) if start.endswith(b"{") else read_nanogpt(file, load)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else f"has a wrong format: {error!r}"
        raise ValueError(f"{path}: {reason}") from error


def start_state(
    path: str,
    out: str,
    newest_checkpoint: Callable[[str], dict[str, Any]],
    load: Callable[[BinaryIO], Any],
) -> dict[str, Any]:
    """Return what run.py starts from with --init-from: model, config (flags), vocabulary, name.

    path: the --out folder of another run, or what `read` takes. out: this run's folder.
    newest_checkpoint: returns the newest checkpoint of a folder, as run.py saves it.
    """
    if os.path.realpath(path) == os.path.realpath(out):
        raise ValueError(f"--init-from {path} is the folder of --out; choose another --out")
    files = sorted(glob.glob(os.path.join(glob.escape(path), "step-*.pt")))
    if files or glob.glob(os.path.join(glob.escape(path), "step-*")):
        for file in files[
            -1:
        ]:  # refuse a file that could do harm, before another function reads it
            with open(file, "rb") as opened:
                load(opened)
        state = newest_checkpoint(path)
        sizes, vocabulary, weights = state["config"], state["vocabulary"], state["model"]
    else:
        sizes, vocabulary, weights = read(path, load)
        vocabulary = {**vocabulary, "vocab": sizes["vocab"]}
    flags = {name: sizes[name] for name in ("arch", "layers", "heads", "embd", "block_size")}
    kind = vocabulary["kind"]
    if kind in ("ids", "tokenizer"):
        flags["vocab"] = vocabulary["vocab"]
    if kind != "ids":
        flags["tokenizer"] = f"{path}/tokenizer.json" if kind == "tokenizer" else kind
    return {"model": weights, "config": flags, "vocabulary": vocabulary, "name": path}


# -------------------------------------------------------------------------------------------- GPT-2


def _names(layers: int) -> Iterator[tuple[str, str]]:
    """Yield (our name, GPT-2's name) of each weight but the head, which is the embedding."""
    yield from (("embedding.weight", "wte.weight"), ("positions.weight", "wpe.weight"))
    for i in range(layers):
        for ours, theirs in PARTS.items():
            yield from (
                (f"blocks.{i}.{ours}.{kind}", f"h.{i}.{theirs}.{kind}")
                for kind in ("weight", "bias")
            )
    yield from ((f"norm.{kind}", f"ln_f.{kind}") for kind in ("weight", "bias"))


def to_gpt2(model: Model, conv1d: bool) -> dict[str, Tensor]:
    """Return the weights under GPT-2's names. conv1d: the blocks' matrices are (in, out)."""
    pairs = _names(model.config["layers"])
    named = {f"transformer.{theirs}": model.weights[ours] for ours, theirs in pairs}
    return {name: _layout(name, weight, conv1d).contiguous() for name, weight in named.items()}


def _layout(name: str, weight: Tensor, conv1d: bool) -> Tensor:
    return weight.T if conv1d and ".h." in name and weight.ndim == 2 else weight


def from_gpt2(
    weights: dict[str, Tensor], heads: Any, conv1d: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return our (config, weights) of GPT-2's weights. Biases are zero if there are none."""
    prefix = r"^(_orig_mod\.)?(transformer\.)?"
    left = {re.sub(prefix, "transformer.", name): weight for name, weight in weights.items()}
    mask = r".*\.attn\.(masked_)?bias"  # a buffer of older files, not a weight
    left = {name: weight for name, weight in left.items() if not re.fullmatch(mask, name)}
    check_weights(left)
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
            ours[name] = _layout(theirs, weight, conv1d).float().contiguous()
        else:
            ours[name] = torch.zeros(len(ours[name.replace("bias", "weight")]))
    if left:
        raise ValueError(f"{min(left)} is not a weight of GPT-2")
    ours["head.weight"] = ours["embedding.weight"]
    if head is not None and not torch.equal(head.float(), ours["head.weight"]):
        raise ValueError("lm_head.weight differs from wte.weight; in GPT-2 they are the same")
    return infer_config("gpt2", heads, len(ours["positions.weight"]), ours), ours


def check_weights(weights: dict[str, Any]) -> None:
    """ValueError names the first value that is not a tensor of finite floats."""
    for name, weight in weights.items():
        floats = isinstance(weight, Tensor) and weight.is_floating_point()
        if not floats or not weight.float().isfinite().all():
            raise ValueError(f"{name} is not a tensor of finite numbers")


def infer_config(
    arch: Any, heads: Any, block_size: Any, weights: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the config of these weights, which are under our names."""
    if type(arch) is not str:
        raise ValueError(f"arch is {arch!r}; it must be a name")
    for what, value in (("heads", heads), ("block size", block_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a positive integer")
    vocab, embd = weights["embedding.weight"].shape
    layers = sum(name.endswith(".qkv.weight") for name in weights)
    sizes = dict(vocab=vocab, block_size=block_size, layers=layers, heads=heads, embd=embd)
    return {"arch": arch, **sizes}


# ------------------------------------------------------------------------------------- Hugging Face


def write_hf(model: Model, folder: str) -> None:
    """Write a folder for AutoModelForCausalLM and, unless tokens are bare ids, AutoTokenizer."""
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
        files["tokenizer.json"] = make_tokenizer(**model.vocabulary)
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
    """Read a GPT-2 that save_pretrained wrote, in one file or in several."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    for key, values in GPT2.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"{key} is {config[key]!r}; GPT-2 has {values[0]!r}")
    names = sorted(glob.glob(os.path.join(glob.escape(folder), "model*.safetensors")))
    if not names:
        raise ValueError("there is no model.safetensors; transformers' save_pretrained writes it")
    weights: dict[str, Tensor] = {}
    for name in names:
        weights |= _load(name)[0]
    ours, named = from_gpt2(weights, config.get("n_head", 12), conv1d=True)
    vocabulary = read_vocabulary(os.path.join(folder, "tokenizer.json"), ours["vocab"])
    return Model(ours, vocabulary, named)


def make_tokenizer(kind: str, chars: str) -> Any:
    """Return the tokenizer.json of a vocabulary.

    It has no token for unknown characters: these are an error there, as they are here.
    """
    if kind == "tokenizer":
        return json.loads(chars)
    if kind == "char":
        vocab = {char: i for i, char in enumerate(chars)}
        split = dict(type="Split", pattern={"Regex": r"[\s\S]"}, behavior="Isolated", invert=False)
        parts = {
            "pre_tokenizer": split,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
        }
    else:
        vocab = {char: i for i, char in enumerate(byte_names())}
        level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
        parts = {
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    fixed: dict[str, Any] = dict.fromkeys(("normalizer", "post_processor"))
    return {"version": "1.0", "added_tokens": [], **fixed, **parts}


def byte_names() -> str:
    """Return the characters that stand for the bytes 0 to 255 in GPT-2's tokenizer.

    Printable bytes of Latin-1 stand for themselves; the others are the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = [byte if byte in printable else 256 + others.index(byte) for byte in range(256)]
    return "".join(map(chr, codes))


def read_vocabulary(path: str, vocab: int) -> dict[str, Any]:
    """Return the vocabulary of a tokenizer.json; "ids" if there is none.

    A file of `make_tokenizer`, also if transformers has saved it again, is "char" or "byte"; any
    other is kept as text.
    """
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


# ------------------------------------------------------------------------------------------ nanoGPT


def write_nanogpt(model: Model, folder: str, name: str) -> None:
    """Write ckpt.pt and, for characters, the meta.pkl that nanoGPT's sample.py looks for.

    Put the folder into nanoGPT's data/ as `name`. To resume training there, it lacks the state of
    the optimizer.
    """
    c = model.config
    model_args = {
        **{"n_layer": c["layers"], "n_head": c["heads"], "n_embd": c["embd"]},
        **{"block_size": c["block_size"], "bias": True, "vocab_size": c["vocab"]},
        "dropout": c.get("dropout", 0.0),
    }
    weights = to_gpt2(model, conv1d=False)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    state = {
        "model": weights,
        "model_args": model_args,
        "vocabulary": model.vocabulary,
        "config": {"dataset": name},
    }
    os.mkdir(folder)
    torch.save(state, os.path.join(folder, "ckpt.pt"))
    if model.vocabulary["kind"] == "char":
        tokens = dict(enumerate(model.vocabulary["chars"]))
        meta = {
            "vocab_size": len(tokens),
            "itos": tokens,
            "stoi": {char: i for i, char in tokens.items()},
        }
        with open(os.path.join(folder, "meta.pkl"), "wb") as file:
            pickle.dump(meta, file)  # plain values only, so reading it runs no code


def read_nanogpt(path: str, load: Callable[[BinaryIO], Any]) -> Model:
    """Read a ckpt.pt. Its state dict may be of a compiled model and may contain masks."""
    with open(path, "rb") as file:
        try:
            state = load(file)
        except Exception as error:
            raise ValueError(
                f"{str(error).splitlines()[0]}. Only tensors and plain values are read. If you "
                "trust the file, torch.load it, and torch.save its 'model' and 'model_args' alone"
            ) from error
    if not isinstance(state, dict) or not {"model", "model_args"} <= state.keys():
        raise ValueError(
            "is not a nanoGPT checkpoint with 'model' and 'model_args'; for a checkpoint of run.py "
            "name its folder"
        )
    config, weights = from_gpt2(state["model"], state["model_args"]["n_head"], conv1d=False)
    vocabulary = state.get("vocabulary", {"kind": "ids", "chars": ""})
    return Model(config, check_vocabulary(vocabulary, config["vocab"]), weights)


def check_vocabulary(vocabulary: Any, vocab: int) -> dict[str, Any]:
    """Return the vocabulary of a file, or raise ValueError if it does not have `vocab` tokens."""
    kind, chars = vocabulary["kind"], vocabulary["chars"]
    distinct = len(set(chars)) if len(set(chars)) == len(chars) else -1
    sizes = {"char": distinct, "byte": 256, "ids": vocab, "tokenizer": vocab}
    if type(chars) is not str or sizes[kind] != vocab:
        raise ValueError(f"its vocabulary does not have {vocab} tokens")
    return {"kind": kind, "chars": chars}


# ------------------------------------------------------------------------------------- safetensors


def write_safetensors(model: Model, path: str) -> None:
    """Write the state dict of any architecture; config and vocabulary are JSON in the header."""
    about = json.dumps({"config": model.config, "vocabulary": model.vocabulary})
    weights = {name: weight.clone() for name, weight in model.weights.items()}  # nothing is shared
    _safetensors().torch.save_file(weights, path, {"format": "pt", "ddpkit": about})


def read_safetensors(path: str) -> Model:
    """Read a file of `write_safetensors`."""
    weights, header = _load(path)
    check_weights(weights)
    if "ddpkit" not in header:
        raise ValueError("its header has no config; for a model of Hugging Face name the folder")
    about = json.loads(header["ddpkit"])
    c = about["config"]
    config = infer_config(c["arch"], c["heads"], c["block_size"], weights)
    return Model(config, check_vocabulary(about["vocabulary"], config["vocab"]), weights)


def _load(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file and the texts in its header."""
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{os.path.basename(path)} is damaged: {error}") from None


def _safetensors() -> Any:
    """Import safetensors, which nanoGPT's format does not need."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("pip install safetensors to exchange models") from None
    return safetensors
