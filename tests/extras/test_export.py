"""Tests of extras/export.py: what transformers reads in the files that it writes."""

import itertools
import os
import resource
import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange import VOCABULARIES, assert_same_logits, of, same_model, write

import chardata
import gpt
from extras import exchange, export


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_transformers_computes_and_generates_the_same(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    ours, model = of(kind)
    write(model, "hf", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert_same_logits(theirs, ours)
    prompt = torch.tensor([[3, 1, 4]])
    settings = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    said = theirs.generate(prompt, max_new_tokens=20, **settings)[0, 3:].tolist()
    sampled = gpt.sample(ours.eval(), prompt[0], temperature=0)
    assert said == [*itertools.islice(sampled, 20)]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Return kind -> tokenizer, which transformers has read."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        kind: transformers.AutoTokenizer.from_pretrained(write(of(kind)[1], "hf", folder / kind))
        for kind in ("char", "byte")
    }


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    chars=st.text(VOCABULARIES["char"]["chars"], min_size=1),
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)
def test_transformers_encodes_and_decodes_as_chardata_does(tokenizers, chars, text):
    for kind, text in (("char", chars), ("byte", text)):
        ids = chardata.encode(text, **VOCABULARIES[kind]).tolist()
        assert tokenizers[kind](text)["input_ids"] == ids and tokenizers[kind].decode(ids) == text


def test_a_character_outside_the_vocabulary_is_an_error_in_transformers_too(tokenizers):
    with pytest.raises(Exception, match="vocabulary"):
        tokenizers["char"]("Z")


def test_weights_that_are_not_contiguous_are_exported_for_all_whom_the_umask_lets_read(tmp_path):
    model, name = of("char")[1], "blocks.0.qkv.weight"
    turned = model.weights | {name: model.weights[name].T.contiguous().T}
    before = os.umask(0o027)
    try:
        path = write(model._replace(weights=turned), "safetensors", tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert same_model(exchange.read(f"{path}"), model)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("format", ["hf", "safetensors"])
def test_an_export_that_fails_is_an_error_of_the_system_and_leaves_nothing(tmp_path, format):
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, no_limit[1]))  # bytes in a file
    try:
        with pytest.raises(OSError, match="File too large"):
            write(of("char")[1], format, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    for path in (f"{tmp_path}/no/a", f"file://{tmp_path}/a", f"{tmp_path}"):
        with pytest.raises((OSError, ValueError)):
            export.write(of("ids")[1], format, path, exchange.to_gpt2, dict)
    assert not [*tmp_path.iterdir()]
