"""Chat templates against what transformers makes of the same conversations."""

import json

import pytest
from tokenizers import Tokenizer

from quaxlike.files import CheckpointError
from quaxlike.lm.chat import ChatTemplate
from quaxlike.lm.finetune.data import Tokens
from quaxlike.lm.finetune.settings import FinetuneError
from quaxlike.lm.finetune.tasks import NextToken
from tests.fixtures import fixture

KINDS = ["chatml", "llama3", "gemma", "mistral"]


def cases(kind):
    return json.loads((folder(kind) / "cases.json").read_text())["cases"]


def folder(kind):
    return fixture(f"models/chat/{kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_tokens_and_what_is_learned(kind):
    template = ChatTemplate(folder(kind))
    tokens = Tokens(folder(kind), {"vocab_size": 1000}, 1000)
    for case in cases(kind):
        options = {"tools": case["tools"], "add_generation_prompt": case["add_generation_prompt"]}
        options |= case["template_kwargs"]
        if "error" in case:
            with pytest.raises(ValueError, match=case["error"]):
                template.render(case["messages"], **options)
            continue
        rendered = template.render(case["messages"], **options)
        assert rendered.text == case["rendered"], case["name"]
        ids, learned = tokens.spans(*rendered)
        assert ids == case["input_ids"]
        if "assistant_mask" in case:
            assert list(map(int, learned)) == case["assistant_mask"]


@pytest.mark.parametrize("kind", ["gemma", "mistral"])
def test_turns_of_templates_that_do_not_mark_them(kind):
    (case,) = [c for c in cases(kind) if c["name"] == "multi_turn_unicode" and not c["add_generation_prompt"]]
    text, spans = ChatTemplate(folder(kind)).learned(case["messages"])
    written = [text[start:end] for start, end in spans]
    answers = [m["content"].strip() for m in case["messages"] if m["role"] == "assistant"]
    assert len(written) == len(answers) == 2
    for found, answer in zip(written, answers, strict=True):
        assert found.strip().startswith(answer)
        assert "Straße" not in found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_messages(kind):
    """The first token is never learned; the text is not given a second beginning or another end."""
    tokens = Tokens(folder(kind), {"vocab_size": 1000, "eos_token_id": 3}, 1000)
    (case,) = [c for c in cases(kind) if c["name"] == "system" and not c["add_generation_prompt"]]
    row = {"messages": case["messages"], "chat_template_kwargs": case["template_kwargs"]}
    example = NextToken().encode(row, tokens)
    assert example.texts == (case["input_ids"],)
    tokenizer = Tokenizer.from_file(str(folder(kind) / "tokenizer.json"))
    written = [i for i, own in zip(example.texts[0], example.learned, strict=True) if own]
    assert "Three." in tokenizer.decode(written)
    assert "apples" not in tokenizer.decode(written)
    assert not any(NextToken().encode({**row, "messages": case["messages"][:2]}, tokens).learned)


def bad(tmp_path, template="{{ messages[0].content }}"):
    settings = {} if template is None else {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_template_is_no_program_of_ours(tmp_path):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match=r"rejects this conversation: .*unsafe"):
        ChatTemplate(bad(tmp_path, attack)).render([{"role": "user", "content": "hello"}])
    with pytest.raises(ValueError, match="rejects this conversation"):
        ChatTemplate(bad(tmp_path, "{{ messages.append(1) }}")).render([])


def test_templates_that_do_not_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no chat template, .* neither chat_template\.jinja nor"):
        ChatTemplate(bad(tmp_path, None))
    with pytest.raises(CheckpointError, match="is damaged"):
        ChatTemplate(bad(tmp_path, "{% if %}"))
    last = "{% for m in messages %}{{ m.content }}{% if loop.last %}<last>{% endif %}{% endfor %}"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="renders message 1 in a way that hides"):
        ChatTemplate(bad(tmp_path, last)).learned(talk * 2)


def test_templates_in_files(tmp_path):
    bad(tmp_path, "old")
    (tmp_path / "chat_template.jinja").write_text("new {{ strftime_now('%Y') }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | tojson }}")
    template = ChatTemplate(tmp_path)
    assert template.render([]).text.startswith("new 2")
    assert template.render([], tools=[{"é": "<"}]).text == 'tools [{"é": "<"}]'


def test_messages_must_be_messages():
    tokens = Tokens(folder("chatml"), {"vocab_size": 1000}, 1000)
    with pytest.raises(ValueError, match=r"'messages' must be a list of objects with role .*; found 'hello'"):
        NextToken().encode({"messages": "hello"}, tokens)


@pytest.mark.parametrize("options", [5, ["a"], {"messages": []}, {"add_generation_prompt": True}])
def test_variables_of_templates_are_no_arguments(options):
    tokens = Tokens(folder("chatml"), {"vocab_size": 1000}, 1000)
    fields = {"messages": [{"role": "user", "content": "hello"}], "chat_template_kwargs": options}
    with pytest.raises(ValueError, match="'chat_template_kwargs' must be an object"):
        NextToken().encode(fields, tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": 5},
        {"chat_template": ["a"]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": [{"name": "default", "template": 5}]},
        {"chat_template": "", "bos_token": 5},
        {"chat_template": "", "bos_token": {"content": 5}},
    ],
)
def test_settings_of_wrong_types(settings, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="it must be a text"):
        ChatTemplate(tmp_path)


#: Files that name `<|user|>` beside the usual tokens, as versions of transformers write them.
NAMED = {
    "entry": {"tokenizer_config": {"user_token": "<|user|>"}},
    "object": {"tokenizer_config": {"user_token": {"content": "<|user|>", "__type": "AddedToken"}}},
    "extra": {"tokenizer_config": {"extra_special_tokens": {"user_token": "<|user|>"}}},
    "additional": {"tokenizer_config": {"additional_special_tokens": {"user_token": "<|user|>"}}},
    "model specific": {"tokenizer_config": {"model_specific_special_tokens": {"user_token": "<|user|>"}}},
    "map": {"special_tokens_map": {"user_token": "<|user|>"}},
}


@pytest.mark.parametrize("case", NAMED)
def test_special_tokens_with_names_of_their_own(case, tmp_path):
    settings = {"eos_token": "</s>", "add_bos_token": True, "extra_special_tokens": ["<|other|>"]}
    files = {"tokenizer_config": {}, **NAMED[case]}
    files["tokenizer_config"] = settings | files["tokenizer_config"]
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    template = "{{ user_token }}{{ messages[0].content }}{{ eos_token }}{{ add_bos_token }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    text = ChatTemplate(tmp_path).render([{"role": "user", "content": "hello"}]).text
    assert text == "<|user|>hello</s>"


def test_a_named_token_that_is_no_text(tmp_path):
    settings = {"chat_template": "", "extra_special_tokens": {"user_token": 5}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="has user_token=5; it must be a text"):
        ChatTemplate(tmp_path)


def test_a_template_that_is_no_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8 text"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "vocab_size=None; it must be a whole number"),
        ({"vocab_size": "many"}, "vocab_size='many'; it must be a whole number"),
        ({"vocab_size": 1000, "eos_token_id": "2"}, "eos_token_id='2' and a vocab_size of 1000"),
        ({"vocab_size": 1000, "eos_token_id": [-1]}, "eos_token_id=\\[-1\\] and a vocab_size of 1000"),
    ],
)
def test_configurations_of_wrong_types(config, message):
    with pytest.raises(FinetuneError, match=message):
        Tokens(folder("chatml"), config, 1000)


def test_halves_of_pairs_of_surrogates():
    tokens = Tokens(folder("chatml"), {"vocab_size": 1000}, 1000)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        NextToken().encode({"text": "\ud800"}, tokens)


# -------------------------------------------------------------------------------------------------
# What messages hold
# -------------------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls }}{% endif %};"
    "{% endfor %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"


def talk(**of_answer):
    answers = [{"role": "assistant", "content": "no", **of_answer}, {"role": "assistant", "content": "yes"}]
    return [x for answer in answers for x in ({"role": "user", "content": "well"}, answer)]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("weight", "learned"), [(0, ["yes;"]), (0.0, ["yes;"]), (1, ["no;", "yes;"]), (None, ["no;", "yes;"])]
)
def test_answers_of_weight_0_are_not_learned(template, weight, learned, tmp_path):
    text, spans = ChatTemplate(bad(tmp_path, template + PROMPT)).learned(talk(weight=weight))
    assert text == "[user]well;[assistant]no;[user]well;[assistant]yes;"
    assert [text[start:end] for start, end in spans] == learned


@pytest.mark.parametrize("weight", [0.5, 2, True, "0"])
def test_other_weights_are_refused(weight, tmp_path):
    template = ChatTemplate(bad(tmp_path, PLAIN + PROMPT))
    with pytest.raises(ValueError, match=r"message 1 has weight=.*; it must be 0 \(not learned\) or 1"):
        template.learned(talk(weight=weight))
    with pytest.raises(
        ValueError, match="message 0 has weight=1; only messages of the assistant are learned"
    ):
        template.learned([{"role": "user", "content": "a", "weight": 1}])


def test_entries_of_messages_are_used_or_named(tmp_path):
    template = ChatTemplate(bad(tmp_path, "The reasoning: " + PLAIN + PROMPT))
    for entry in ({"tool_calls": [1]}, {"name": "Jo"}, {"refusal": None}, {"audio": []}, {"id": "7"}):
        template.learned(talk(**entry))
    with pytest.raises(ValueError, match="message 1 has 'reasoning', which the chat template does not use"):
        template.learned(talk(reasoning="since"))
    with pytest.raises(ValueError, match="'tools', which the chat template does not"):
        template.learned(talk(), tools=[{"name": "f"}])
    whole = "{% for m in messages %}{{ m | tojson }}{% endfor %}" + PROMPT
    assert '"since"' in ChatTemplate(bad(tmp_path, whole)).render(talk(reasoning="since")).text
