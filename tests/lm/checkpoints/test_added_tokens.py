"""Tokens that stand beside `tokenizer.json`, as transformers adds them."""

import pytest

from quaxlike.files import CheckpointError
from quaxlike.lm import read_tokenizer
from quaxlike.lm.text import TextTokenizer
from tests.lm.test_marks import ONE, WORDS, tokeniser

NEW = {"content": "<new>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
FILES = {
    "decoder": {"tokenizer_config": {"added_tokens_decoder": {"7": NEW}}},
    "old file": {"added_tokens": {"<new>": 7}},
    "list": {"tokenizer_config": {"additional_special_tokens": ["<new>"]}},
    "list of objects": {"tokenizer_config": {"extra_special_tokens": [NEW]}},
    "by name": {"tokenizer_config": {"extra_special_tokens": {"image": "<new>"}}},
    "special": {"tokenizer_config": {"pad_token": "<new>"}},
    "map": {"special_tokens_map": {"pad_token": NEW}},
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_tokens_of_other_files(files, tmp_path):
    tokeniser(tmp_path, "$A", {}, **files)
    assert TextTokenizer(tmp_path).encode("one<new> one").ids == [ONE, 7, ONE]


def test_several_in_order(tmp_path):
    decoder = {"10": "<c>", "8": "<a>", "9": {"content": "b", "special": False}, "5": "two", "7": NEW}
    settings = {"added_tokens_decoder": decoder, "pad_token": "<pad>", "bos_token": "<s>"}
    tokeniser(tmp_path, "$A", {}, tokenizer_config=settings, added_tokens={"<left out>": 7})
    tokenizer = TextTokenizer(tmp_path)
    assert [tokenizer.number(x) for x in ("<new>", "<a>", "b", "<c>", "<pad>")] == [7, 8, 9, 10, 11]
    assert tokenizer.number("<left out>") is None
    assert tokenizer.decode([9]) == "b"
    assert tokenizer.decode([8]) == ""


def test_the_file_is_left_as_it_is_if_it_has_all(tmp_path):
    tokeniser(tmp_path, "$A", {}, tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert read_tokenizer(tmp_path) == (tmp_path / "tokenizer.json").read_text()
    assert TextTokenizer(tmp_path).number("<s>") == WORDS.index("<s>")


@pytest.mark.parametrize("number", [6, 9])
def test_another_number(number, tmp_path):
    settings = {"added_tokens_decoder": {str(number): NEW}}
    with pytest.raises(CheckpointError, match=rf"'<new>': is number {number}; .* next number there is 7"):
        tokeniser(tmp_path, "$A", {}, tokenizer_config=settings)
    settings = {"added_tokens_decoder": {"first": NEW}}
    with pytest.raises(CheckpointError, match="'added_tokens_decoder': 'first' is no number"):
        tokeniser(tmp_path, "$A", {}, tokenizer_config=settings)
