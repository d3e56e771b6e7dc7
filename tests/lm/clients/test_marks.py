"""Texts, prompts and completions of tokenisers with and without marks, beside those of transformers."""

import pytest

from quaxlike.lm.finetune.tasks import NextToken, Preferences
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
