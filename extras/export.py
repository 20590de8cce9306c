"""Write models for other programs: Hugging Face's GPT-2, and safetensors files.

    model = (config, vocabulary, weights)                            # see Model in exchange.py
    write(model, "hf", "gpt2-mine", exchange.to_gpt2, exchange.make_tokenizer)
    model = AutoModelForCausalLM.from_pretrained("gpt2-mine")        # in transformers

Needs torch and safetensors.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write(
    model: tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]],
    format: str,
    path: str,
    to_gpt2: Callable[[dict[str, Tensor], int], dict[str, Tensor]],
    make_tokenizer: Callable[[str, str], Any],
) -> None:
    """Write a model to `path`: a folder for "hf", a file for "safetensors".

    model: config, vocabulary and weights, as in exchange.Model. to_gpt2 and make_tokenizer: these
    functions of exchange.py; "safetensors" does not use them.
    `path` must not exist, and its folder must exist. It appears when all of it is written.
    ValueError if the format cannot hold the architecture. ImportError names a missing package.
    """
    config, vocabulary, weights = model
    if format != "safetensors" and config["arch"] != "gpt2":
        arch = config["arch"]
        raise ValueError(f"--format {format} can hold --arch gpt2 only; use safetensors for {arch}")
    if "://" in path:
        raise ValueError(f"{path}: --format {format} cannot write to a URL; name a local path")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already; choose another path")
    target = Path(os.path.abspath(path))
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        if format == "hf":
            bare = vocabulary["kind"] == "ids"
            tokenizer = None if bare else make_tokenizer(vocabulary["kind"], vocabulary["chars"])
            write_hf(config, tokenizer, to_gpt2(weights, config["layers"]), temporary)
        else:
            write_safetensors(config, vocabulary, weights, temporary)
        os.rename(temporary, target)


def write_hf(
    config: dict[str, Any], tokenizer: Any, weights: dict[str, Tensor], folder: Path
) -> None:
    """Write a folder for AutoModelForCausalLM and, unless `tokenizer` is None, AutoTokenizer.

    tokenizer: the content of tokenizer.json. weights: GPT-2's names, matrices (in, out).
    """
    theirs = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": config["vocab"],
        "n_positions": config["block_size"],
        "n_layer": config["layers"],
        "n_head": config["heads"],
        "n_embd": config["embd"],
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        "dtype": "float32",
    }
    files = {"config.json": theirs}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["block_size"],
            "clean_up_tokenization_spaces": False,
        }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    save_safetensors(weights, folder / "model.safetensors")


def write_safetensors(
    config: dict[str, Any], vocabulary: dict[str, Any], weights: dict[str, Tensor], path: Path
) -> None:
    """Write the state dict of any architecture; config and vocabulary are JSON in the header."""
    plain = torch.contiguous_format
    unshared = {name: weight.clone(memory_format=plain) for name, weight in weights.items()}
    save_safetensors(unshared, path, ddpkit=json.dumps(dict(config=config, vocabulary=vocabulary)))


def save_safetensors(weights: dict[str, Tensor], path: Path, **header: str) -> None:
    """Write a safetensors file with texts in its header. No two tensors may share memory."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError("pip install safetensors to exchange models") from None
    # save_file would let only the owner read the file.
    path.write_bytes(save(weights, {"format": "pt", **header}))
