"""Tests of extras/export.py: what transformers and nanoGPT read in the files that it writes."""

import itertools
import os
import pickle
import pickletools
import resource
import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange import VOCABULARIES, assert_same_logits, nano, of, same_model, write

import chardata
import gpt
from extras import exchange, export, reader


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_transformers_computes_and_generates_the_same(transformers, tmp_path, kind):
    ours, model = of(kind)
    write(model, "hf", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert_same_logits(theirs, ours)
    prompt = torch.tensor([[3, 1, 4]])
    said = theirs.generate(
        prompt, do_sample=False, max_new_tokens=20, attention_mask=torch.ones_like(prompt)
    )
    assert said[0, 3:].tolist() == list(
        itertools.islice(gpt.sample(ours.eval(), prompt[0], temperature=0), 20)
    )
    assert same_model(exchange.read(f"{tmp_path / 'hf'}", reader.read), model)


@pytest.fixture(scope="module")
def tokenizers(transformers, tmp_path_factory):
    """Return kind -> tokenizer, which transformers has read, and has saved again."""
    folder, found = tmp_path_factory.mktemp("tokenizers"), {}
    for kind in ("char", "byte"):
        write(of(kind)[1], "hf", folder / kind)
        found[kind] = transformers.AutoTokenizer.from_pretrained(folder / kind)
        found[kind].save_pretrained(folder / kind)
        assert exchange.read(f"{folder / kind}", reader.read).vocabulary == VOCABULARIES[kind]
    return found


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=st.text(VOCABULARIES["char"]["chars"], min_size=1))
def test_transformers_encodes_characters_as_chardata_does(tokenizers, text):
    ids = chardata.encode(text, **VOCABULARIES["char"]).tolist()
    assert tokenizers["char"](text)["input_ids"] == ids and tokenizers["char"].decode(ids) == text


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_transformers_encodes_bytes_as_chardata_does(tokenizers, text):
    assert tokenizers["byte"](text)["input_ids"] == list(text.encode())
    assert tokenizers["byte"].decode(list(text.encode())) == text


def test_a_character_outside_the_vocabulary_is_an_error_in_transformers_too(tokenizers):
    with pytest.raises(Exception, match="vocabulary"):
        tokenizers["char"]("Z")


def test_an_exported_nanogpt_file_has_the_names_and_shapes_of_nanogpt(tmp_path):
    state, c = nano(tmp_path), 32
    layer = {
        "ln_1": (c,),
        "attn.c_attn": (3 * c, c),
        "attn.c_proj": (c, c),
        "ln_2": (c,),
        "mlp.c_fc": (4 * c, c),
        "mlp.c_proj": (c, 4 * c),
    }
    expected = {
        "transformer.wte.weight": (12, c),
        "transformer.wpe.weight": (24, c),
        "lm_head.weight": (12, c),
        "transformer.ln_f.weight": (c,),
        "transformer.ln_f.bias": (c,),
    }
    for i, (name, shape) in itertools.product(range(3), layer.items()):
        expected |= {
            f"transformer.h.{i}.{name}.weight": shape,
            f"transformer.h.{i}.{name}.bias": shape[:1],
        }
    assert {name: tuple(weight.shape) for name, weight in state["model"].items()} == expected
    assert state["model_args"] == {
        "n_layer": 3,
        "n_head": 4,
        "n_embd": c,
        "block_size": 24,
        "bias": True,
        "vocab_size": 12,
        "dropout": 0.0,
    }


def test_a_safetensors_file_can_be_read_by_those_whom_the_umask_lets_read(tmp_path):
    before = os.umask(0o027)
    try:
        export.save_safetensors({"w": torch.ones(2)}, tmp_path / "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_a_missing_folder_is_named_as_the_user_wrote_it(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=f"^{tmp_path}/a/b: there is no folder {tmp_path}/a$"
    ):
        export.write(of("ids")[1], "safetensors", f"{tmp_path}/a/b", dict, dict)


def test_a_url_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot write to a URL"):
        export.write(of("ids")[1], "hf", f"file://{tmp_path}/a", dict, dict)


def test_the_sampling_of_nanogpt_finds_the_characters_and_no_code(tmp_path):
    """sample.py looks for data/DATASET/meta.pkl, with the name DATASET from the checkpoint."""
    assert nano(tmp_path)["config"] == {"dataset": "mine"}
    pickled = (tmp_path / "mine" / "meta.pkl").read_bytes()
    assert not {op.name for op, *_ in pickletools.genops(pickled)} & {
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "REDUCE",
    }
    chars, meta = VOCABULARIES["char"]["chars"], pickle.loads(pickled)
    assert (
        [meta["stoi"][char] for char in chars]
        == [*range(meta["vocab_size"])]
        == [*range(len(chars))]
    )
    assert "".join(map(meta["itos"].get, range(len(chars)))) == chars
    for kind in ("byte", "ids"):
        write(of(kind)[1], "nanogpt", tmp_path / kind)
        assert [path.name for path in (tmp_path / kind).iterdir()] == ["ckpt.pt"]


def test_weights_that_are_not_contiguous_are_exported(tmp_path):
    model = of("char")[1]
    name = "blocks.0.qkv.weight"
    turned = model.weights | {name: model.weights[name].T.contiguous().T}
    write(model._replace(weights=turned), "safetensors", tmp_path / "a")
    assert same_model(exchange.read(f"{tmp_path / 'a'}", reader.read), model)


@pytest.mark.parametrize("format", ["hf", "nanogpt", "safetensors"])
def test_an_export_that_fails_in_the_middle_leaves_nothing(tmp_path, monkeypatch, format):
    seen = []

    def fail(*_: object, **header: str) -> None:
        seen.extend(tmp_path.iterdir())
        raise OSError("the disk is full")

    monkeypatch.setattr(export, "save_safetensors", fail)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk is full"):
        write(of("char")[1], format, tmp_path / "a")
    assert len(seen) == 1 and seen[0].name != "a" and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("format", ["hf", "nanogpt", "safetensors"])
def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path, format):
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, no_limit[1]))  # bytes in a file
    try:
        with pytest.raises(OSError, match="File too large"):
            write(of("char")[1], format, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert not [*tmp_path.iterdir()]
