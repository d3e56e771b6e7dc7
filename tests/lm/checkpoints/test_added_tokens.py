"""Tokens that stand beside `tokenizer.json`, as transformers adds them."""

import contextlib
import json

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
    "model specific": {"tokenizer_config": {"model_specific_special_tokens": {"image": "<new>"}}},
    "own entry": {"tokenizer_config": {"image_token": "<new>"}},
    "special": {"tokenizer_config": {"pad_token": "<new>"}},
    "map": {"special_tokens_map": {"pad_token": NEW}},
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_tokens_of_other_files(files, tmp_path):
    tokeniser(tmp_path, "$A", {}, **files)
    assert TextTokenizer(tmp_path).encode("one<new> one").ids == [ONE, 7, ONE]


_STOP = {"content": "<end>", "lstrip": True, "rstrip": True, "normalized": False, "special": True}
_NAMED = {**_STOP, "__type": "AddedToken"}
_OTHERS = {"7": NEW}
#: Settings beside a tokenizer.json in which "<end>" is listed without flags: `lstrip`, `rstrip`, `special`.
FLAGS = {
    "decoder": ({"added_tokens_decoder": {"3": _STOP}}, "lrs"),
    "decoder, not special": ({"added_tokens_decoder": {"3": {**_STOP, "special": False}}}, "lr"),
    "decoder and by name": (
        {"added_tokens_decoder": {"3": {**_STOP, "special": False}}, "pad_token": "<end>"}, "lrs",
    ),
    "by name": ({"pad_token": "<end>"}, "s"),
    "object by name": ({"pad_token": _NAMED}, "s"),
    "by a name of its own": ({"extra_special_tokens": {"stop_token": "<end>"}}, "s"),
    "decoder of others": ({"added_tokens_decoder": _OTHERS, "pad_token": _NAMED}, ""),
    "list": ({"extra_special_tokens": ["<end>"]}, ""),
}  # fmt: skip
#: The same where "<end>" is a word of the vocabulary alone.
FLAGS_OF_WORDS = {
    "decoder": ({"added_tokens_decoder": {"3": _STOP}}, "lrs"),
    "by name": ({"pad_token": "<end>"}, "s"),
    "object by name": ({"pad_token": _NAMED}, "lrs"),
    "list": ({"additional_special_tokens": ["<end>"]}, "s"),
    "decoder of others": (
        {"added_tokens_decoder": _OTHERS, "pad_token": {**_NAMED, "special": False}},
        "lrs",
    ),
}


def with_stop(folder, settings, is_listed):
    """A tokeniser that has `<end>`, without flags or as a word of the vocabulary."""
    tokeniser(folder, "$A", {}, tokenizer_config=settings)
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    stop = next(token for token in described["added_tokens"] if token["content"] == "<end>")
    stop["special"] = False
    if not is_listed:
        described["added_tokens"].remove(stop)
    path.write_text(json.dumps(described))
    return TextTokenizer(folder)


@pytest.mark.parametrize(
    ("is_listed", "case"), [*((True, case) for case in FLAGS), *((False, case) for case in FLAGS_OF_WORDS)]
)
def test_flags_of_other_files(is_listed, case, tmp_path):
    settings, flags = (FLAGS if is_listed else FLAGS_OF_WORDS)[case]
    with_stop(tmp_path, settings, is_listed)
    described = json.loads(read_tokenizer(tmp_path))
    stop = next(token for token in described["added_tokens"] if token["content"] == "<end>")
    assert stop["id"] == 3
    assert {name[0] for name in ("lstrip", "rstrip", "special") if stop[name]} == {*flags}


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


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"do_lower_case": False, "tokenizer_class": "BertTokenizer"}, "do_lower_case=False"),
        (
            {"tokenize_chinese_chars": False, "add_prefix_space": True},
            "chinese_chars=False, add_prefix",
        ),
        ({"do_lower_case": True, "strip_accents": None, "add_prefix_space": False}, ""),
        ({"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, ""),
    ],
)
def test_settings_that_contradict_the_tokeniser(settings, warned, tmp_path):
    """transformers builds some tokenisers anew by their settings."""
    tokeniser(tmp_path, "$A", {}, tokenizer_config=settings)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    steps = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    described["normalizer"] = {
        "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
        "lowercase": True,
    }  # fmt: skip
    path.write_text(json.dumps(described))
    with pytest.warns(UserWarning, match=warned) if warned else contextlib.nullcontext():
        TextTokenizer(tmp_path)
