"""Texts, prompts and completions of tokenisers with and without marks, beside those of transformers."""

import pytest

from quaxlike.lm.finetune.tasks import NextToken, Preferences
from tests.lm.checkpoints.test_added_tokens import FLAGS, FLAGS_OF_WORDS, with_stop
from tests.lm.clients.suite import client
from tests.lm.test_marks import TOKENISERS, E, tokeniser

pytestmark = client("transformers", "tokenizers")

SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}]
)
@pytest.mark.parametrize("kind", TOKENISERS)
def test_texts_and_prompts_are_those_of_transformers(kind, flags, tmp_path):
    """Apart from ends: a prompt has none, and what is learned has one."""
    import transformers

    tokens = tokeniser(tmp_path, TOKENISERS[kind][0], tokenizer_config={**SETTINGS, **flags})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    encode = lambda text: [i for i in theirs(text)["input_ids"] if i != E]
    assert tokens.marks.begun(tokens.ids("one two")) == encode("one two")
    assert tokens.cut("one two")[0] == theirs("one two")["input_ids"]
    (text,) = NextToken().encode({"text": "one two"}, tokens).texts
    assert text == [*encode("one two"), theirs.eos_token_id]
    (text,) = NextToken().encode({"prompt": "one", "completion": "two"}, tokens).texts
    assert text == [*encode("one two"), theirs.eos_token_id]
    pair = Preferences().encode({"prompt": "one", "chosen": "two", "rejected": "three"}, tokens)
    assert pair.texts == tuple([*encode(f"one {end}"), theirs.eos_token_id] for end in ("two", "three"))


@pytest.mark.parametrize("flags", [{}, {"split_special_tokens": False}, {"split_special_tokens": True}])
def test_special_tokens_within_a_text_are_those_of_transformers(flags, tmp_path):
    import transformers

    tokens = tokeniser(tmp_path, "<s> $A", tokenizer_config={**SETTINGS, **flags})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "one </s> two<s>three <end>"
    assert tokens.marks.begun(tokens.ids(text)) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("is_listed", "case"), [*((True, case) for case in FLAGS), *((False, case) for case in FLAGS_OF_WORDS)]
)
def test_flags_of_added_tokens_are_those_of_transformers(is_listed, case, tmp_path):
    import transformers

    settings, _ = (FLAGS if is_listed else FLAGS_OF_WORDS)[case]
    ours = with_stop(tmp_path, {**SETTINGS, **settings}, is_listed)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("one <end> two", "one<end>two", " <end> "):
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.decode([4, 3, 5]).split() == theirs.decode([4, 3, 5], skip_special_tokens=True).split()
