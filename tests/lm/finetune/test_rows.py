"""Rows as data sets have them."""

import json

import pytest
from tokenizers import Tokenizer

from quaxlike.lm.finetune.data import Tokens
from quaxlike.lm.finetune.tasks import NextToken, Pairs, Preferences
from tests.lm.test_marks import E, tokeniser

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def tokens(tmp_path):
    """Of a tokeniser that knows the words of these rows; with a chat template."""
    tokeniser(tmp_path, "<s> $A")
    known = ["user", "assistant", "system", "tool", "one", "two", "three", "four", "and"]
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    for word in known:
        vocab.setdefault(word, len(vocab))
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return Tokens(tmp_path, {"vocab_size": 99, "eos_token_id": E}, 64)


def read(tokens, example):
    """Each text, and what of it is learned."""
    file = Tokenizer.from_file(str(tokens._directory / "tokenizer.json"))
    decode = lambda ids: file.decode(ids, skip_special_tokens=False)
    learned = [[i for i, own in zip(ids, example.learned, strict=False) if own] for ids in example.texts]
    return [decode(ids) for ids in example.texts], [decode(ids) for ids in learned]


USER, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
TALK = "user one </s> assistant two </s>"
OTHER = {"role": "assistant", "content": "three"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [USER, ANSWER]}, TALK),
        ({"messages": json.dumps([USER, ANSWER])}, TALK),
        ({"messages": [json.dumps(USER), json.dumps(ANSWER)], "tools": "[]", "id": 7}, TALK),
        ({"messages": [USER, ANSWER], "prompt": "one", "prompt_id": "a"}, TALK),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}, TALK),
        ({"conversations": [USER, ANSWER], "system": "three"}, f"system three </s> {TALK}"),
        ({"instruction": "one", "output": "two"}, TALK),
        ({"instruction": "one", "input": "", "output": "two", "text": "one two"}, TALK),
        ({"instruction": "one", "input": "and", "output": "two"}, TALK.replace("one", "one and")),
        ({"text": None, "instruction": "one", "input": None, "output": "two"}, TALK),
        ({"instruction": "one", "output": "two", "history": []}, TALK),
        ({"messages": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}, TALK),
        ({"messages": [USER, ANSWER], "prompt": [USER]}, TALK),
        ({"prompt": [USER], "completion": [ANSWER]}, TALK),
        ({"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER]), "tools": []}, TALK),
        ({"prompt": [USER], "completion": "two"}, TALK),
        ({"prompt": "one", "completion": ANSWER}, TALK),
        (
            {"prompt": [USER, OTHER, USER], "completion": [ANSWER]},
            f"user one </s> assistant three </s> {TALK}",
        ),
        ({"messages": [USER, ANSWER], "images": [], "label": ""}, TALK),
    ],
)
def test_conversations_of_all_forms(row, text, tokens):
    assert read(tokens, NextToken().encode(row, tokens)) == ([text], ["two </s>"])


def test_a_prompt_that_is_a_text_has_a_completion_of_any_json(tokens):
    completion = json.dumps([{"role": "one", "content": "two"}])
    (text,), (learned,) = read(
        tokens, NextToken().encode({"prompt": "one", "completion": completion}, tokens)
    )
    assert text == f"<s> one {learned}"
    assert "two" in learned


@pytest.mark.parametrize("form", [lambda x: x, json.dumps, lambda x: [*map(json.dumps, x)]])
def test_calls_of_tools(form, tokens, tmp_path):
    """They can be JSON, as in columns of a table."""
    call = "{% for call in m.tool_calls %}{{ call.function.name }} {% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("{{ m.content }} ", call))
    calls = [{"type": "function", "function": {"name": "three", "arguments": "{}"}}]
    row = {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": form(calls)}]}
    assert read(tokens, NextToken().encode(row, tokens))[1] == ["three </s>"]
    row["messages"][1]["tool_calls"] = "three"
    with pytest.raises(ValueError, match=r"'messages' has tool_calls='three'; it must be a list of objects"):
        NextToken().encode(row, tokens)


def test_weights_of_conversations(tokens):
    shared = [("human", "one", {}), ("gpt", "two", {"weight": 0}), ("human", "one", {}), ("gpt", "three", {})]
    row = {"conversations": [{"from": who, "value": text, **more} for who, text, more in shared]}
    assert read(tokens, NextToken().encode(row, tokens))[1] == ["three </s>"]


@pytest.mark.parametrize("form", [list, json.dumps])
def test_the_turns_before_an_instruction(form, tokens):
    """Whose answers are learned too, as in LLaMA-Factory."""
    row = {"instruction": "one", "output": "two", "history": form([["three", "four"]]), "system": "and"}
    text = f"system and </s> user three </s> assistant four </s> {TALK}"
    assert read(tokens, NextToken().encode(row, tokens)) == ([text], ["four </s> two </s>"])


def test_instructions_without_a_chat_template(tokens, tmp_path):
    (tmp_path / "chat_template.jinja").unlink()
    row = {"instruction": "one", "input": "two", "output": "three"}
    ((text,), learned) = read(tokens, NextToken().encode(row, tokens))
    assert text.startswith("<s> ")
    assert text.index("one") < text.index("two") < text.index("three </s>")
    assert learned == ["three </s>"]
    with pytest.raises(ValueError, match="'history' needs a chat template, which the checkpoint does not"):
        NextToken().encode({**row, "history": [["one", "two"]]}, tokens)


# As in TRL and in LLaMA-Factory: a row is wanted or not.
KTO = (
    ({"prompt": "one", "completion": "two"}, True),
    ({"prompt": [USER], "completion": [ANSWER]}, False),
    ({"prompt": "one", "completion": "two"}, 0),
    ({"messages": [USER, ANSWER]}, False),
    ({"instruction": "one", "output": "two"}, False),
)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "one"},
            "'text' must be a text; there are question. Rows are .*conversations.*instruction",
        ),
        ({"prompt": None, "completion": "two"}, "'prompt' must be a text; found None"),
        ({"completion": "two"}, "'prompt' must be a text; there are completion. Rows are"),
        ({"prompt": "one", "completion": None}, "'completion' must be a text; found None"),
        ({"messages": None, "id": 5}, "'messages' is null. Rows are"),
        ({"instruction": None, "output": "two"}, "'instruction' is null. Rows are"),
        ({"prompt": "one", "response": "two"}, "'completion' must be a text; there are .*Rows are"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences, which --task dpo learns"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}, "preferences, which --task dpo learns"),
        ({"chosen": "b", "rejected": "c"}, "preferences, which --task dpo learns"),
        ({"text": "one", "weight": 0}, "'weight' is not used beside text: leave it out$"),
        ({"text": "one", "label": 0}, "'label' is 0, which --task classify learns"),
        *(
            (row | {"label": label}, f"'label' is {label}, which says .*KTO.*--task dpo")
            for row, label in KTO
        ),
        ({"messages": [USER, ANSWER], "functions": [1]}, "'functions' is not used beside messages"),
        ({"messages": [USER, ANSWER | {"train": False}]}, "message 1 has 'train', which the chat template"),
        (
            {"instruction": "one", "output": "two", "history": [1]},
            "'history' must be a list of pairs of texts",
        ),
        ({"instruction": "one", "output": "two", "text": "four"}, "'text' .* does not repeat 'instruction'"),
        (
            {"instruction": "one", "chosen": "two", "rejected": "three"},
            "preferences, which --task dpo learns",
        ),
        (
            {"messages": [USER, ANSWER], "prompt": "two"},
            "'prompt' says something else than 'messages'.*'two'",
        ),
        ({"messages": [USER, ANSWER], "prompt": [ANSWER]}, "'prompt' says something else than 'messages'"),
        (
            {"conversations": "one"},
            "'conversations' must be a list of objects with role and content, or with from and .*'one'",
        ),
        ({"conversations": [{"from": "me", "value": "one"}]}, "from='me'; expected one of human, user, gpt"),
        ({"conversations": [{"from": "gpt"}]}, "value=None; it must be a text"),
        (
            {"messages": [USER, {"role": "gpt", "content": "two"}]},
            "have role='gpt', and none has role='assistant'",
        ),
        ({"messages": [USER, ANSWER], "tools": "f"}, "'tools' must be a list of functions; found 'f'"),
    ],
)
def test_other_rows_are_named(row, message, tokens):
    with pytest.raises(ValueError, match=message):
        NextToken().encode(row, tokens)


TEXTS = (
    ["user one </s> assistant two </s>", "user one </s> assistant three </s>"],
    ["two </s>", "three </s>"],
)


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}, TEXTS),
        ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, TEXTS),
        ({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, TEXTS),
        ({"prompt": "one", "chosen": [USER, ANSWER], "rejected": [USER, OTHER], "score_chosen": 1.0}, TEXTS),
        ({"prompt": "one", "chosen": [ANSWER], "rejected": [OTHER]}, TEXTS),
        (
            {"prompt": [USER, ANSWER, USER], "chosen": [ANSWER], "rejected": [OTHER]},
            ([f"{TALK} {text}" for text in TEXTS[0]], TEXTS[1]),
        ),
        ({"prompt": [USER], "chosen": ANSWER, "rejected": json.dumps(OTHER)}, TEXTS),
        ({"prompt": [USER], "chosen": "two", "rejected": "three"}, TEXTS),
        ({"messages": [USER], "chosen": "two", "rejected": "three"}, TEXTS),
        (
            {
                "conversations": [{"from": "human", "value": "one"}],
                "chosen": {"from": "gpt", "value": "two"},
                "rejected": {"from": "gpt", "value": "three"},
            },
            TEXTS,
        ),
        ({"instruction": "one", "input": "", "chosen": "two", "rejected": "three"}, TEXTS),
        (
            {
                "chosen": [USER, ANSWER],
                "rejected": [USER, OTHER],
                "messages": [USER, ANSWER],
                "prompt": "one",
            },
            TEXTS,
        ),
        (
            {"chosen": "one two", "rejected": "one three"},
            (["<s> one two </s>", "<s> one three </s>"], TEXTS[1]),
        ),
    ],
)
def test_preferences_of_all_forms(row, texts, tokens):
    assert read(tokens, Preferences().encode(row, tokens)) == texts


def test_preferences_of_instructions_without_a_chat_template(tokens, tmp_path):
    (tmp_path / "chat_template.jinja").unlink()
    row = {"instruction": "one", "chosen": '{"one": 1}', "rejected": "[two]"}
    texts, _ = read(tokens, Preferences().encode(row, tokens))
    assert all(text.startswith("<s> ") and "one" in text for text in texts)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "one"}, "'chosen' must be a text; there are text. Rows are .* --task dpo"),
        *(
            (row | {"label": label}, f"'label' is {label}, which says .*KTO.*--task dpo")
            for row, label in KTO
        ),
        ({"chosen": [USER, ANSWER], "rejected": "two"}, "must both be texts or both be lists"),
        ({"chosen": "one", "rejected": "two"}, "no 'prompt', and 'chosen' and 'rejected' do not begin alike"),
        (
            {"prompt": [USER], "chosen": [ANSWER | {"weight": 0}], "rejected": [OTHER]},
            "'weight' has no meaning",
        ),
        ({"prompt": [USER], "chosen": [USER], "rejected": [OTHER]}, "'chosen' has no answer"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "are the same text"),
        ({"prompt": "one", "chosen": "two", "rejected": "three", "margin": 2}, "'margin' is not used beside"),
        (
            {"question": "one", "chosen": "two", "rejected": "three"},
            "'question' is not used .* the names prompt,",
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, OTHER], "prompt": "four"},
            "'prompt' says something else than 'chosen'.*found 'four'",
        ),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER], "messages": [OTHER]},
            "'messages' is neither the prompt nor",
        ),
        (
            {"prompt": "one", "chosen": {"a": 1}, "rejected": "two"},
            "'chosen' must be a list of objects with role",
        ),
    ],
)
def test_other_preferences_are_named(row, message, tokens):
    with pytest.raises(ValueError, match=message):
        Preferences().encode(row, tokens)


def test_a_text_and_its_label_are_no_pair(tokens):
    with pytest.raises(ValueError, match="a text and its label are what --task classify learns"):
        Pairs().encode({"text": "one", "label": "two"}, tokens)
