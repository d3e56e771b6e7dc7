"""Texts, prompts and completions of tokenisers with and without marks, beside those of transformers."""

import pytest

from quaxlike.lm.chat import ChatTemplate
from quaxlike.lm.finetune.data import Tokens
from quaxlike.lm.finetune.tasks import NextToken, Preferences
from quaxlike.lm.text import TextTokenizer
from tests.lm.chat.test_chat import NAMED
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


@pytest.mark.parametrize("case", NAMED)
def test_templates_have_the_special_tokens_of_transformers(case, tmp_path):
    import transformers

    files = {"tokenizer_config": {}, **NAMED[case]}
    files["tokenizer_config"] = SETTINGS | files["tokenizer_config"]
    tokeniser(tmp_path, "$A", **files)
    template = "{{ user_token }}{{ messages[0].content }}{{ eos_token }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "one"}]
    text = theirs.apply_chat_template(messages, tokenize=False)
    assert ChatTemplate(tmp_path).render(messages).text == text == "<|user|>one</s>"
    assert TextTokenizer(tmp_path).encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("answer", ["one", "one \N{GRINNING FACE}", "\u4f60\u597d"])
def test_what_is_learned_of_answers_is_that_of_transformers(answer, tmp_path):
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %};{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "two"}, {"role": "assistant", "content": answer}]
    found = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    tokens = Tokens(tmp_path, {"vocab_size": len(letters)}, 64)
    ids, learned = tokens.spans(*ChatTemplate(tmp_path).learned(messages))
    assert ids == found["input_ids"]
    assert [int(own) for own in learned] == found["assistant_masks"]


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
