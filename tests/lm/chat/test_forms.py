"""Contents and calls in the form that data has, for templates that take the other one."""

import json

import pytest

from quaxlike.lm.chat import ChatTemplate

START = "{% for m in messages %}[{{ m.role }}]"
END = ";{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
OF_TEXT = "{{ m.content }}"
OF_PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
OF_BOTH = "{% if m.content is string %}{{ m.content }}{% else %}" + OF_PARTS + "{% endif %}"


def template(folder, body):
    (folder / "chat_template.jinja").write_text(START + body + END)
    return ChatTemplate(folder)


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("body", [OF_TEXT, OF_PARTS, OF_BOTH, "{{ m['content'] | trim }}"])
@pytest.mark.parametrize("form", [lambda x: x, parts])
def test_content_is_a_text_or_parts(form, body, tmp_path):
    turns = [
        ("system", "Be kind"),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "?"),
        ("assistant", "Yes"),
    ]
    messages = [{"role": role, "content": form(text)} for role, text in turns]
    text, spans = template(tmp_path, body).learned(messages)
    assert text == "[system]Be kind;[user]Hi;[assistant]Hello;[user]?;[assistant]Yes;"
    assert [text[start:end] for start, end in spans] == ["Hello;", "Yes;"]


def test_several_parts(tmp_path):
    """A template that takes parts writes them as it likes."""
    messages = [{"role": "user", "content": parts("a", "b")}]
    assert template(tmp_path, OF_TEXT).render(messages).text == "[user]ab;"
    spaced = OF_BOTH.replace("{{ part.text }}", "{{ part.text }} ")
    assert template(tmp_path, spaced).render(messages).text == "[user]a b ;"


@pytest.mark.parametrize("body", [OF_TEXT, OF_PARTS, OF_BOTH])
@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "text", "text": None}, "a", 5])
def test_parts_that_are_no_texts(part, body, tmp_path):
    messages = [{"role": "user", "content": [part, *parts("What is this?")]}]
    with pytest.raises(ValueError, match=r"message 0 has a part of type .* only texts are supported"):
        template(tmp_path, body).render(messages)


@pytest.mark.parametrize("body", [OF_TEXT, OF_PARTS, OF_BOTH])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"content": 5}, r"message 1 has content=5; it must be a text, or a list of texts"),
        ({"content": {"a": 1}}, r"message 1 has content=\{'a': 1\}; it must be a text"),
        ({"role": "tool", "content": {"a": 1}}, r"message 1 has content=\{'a': 1\}; it must be a text"),
        ({"role": ["user"]}, r"message 1 has role=\['user'\]; it must be a text"),
    ],
)
def test_roles_and_contents_of_other_types(entry, message, body, tmp_path):
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b", **entry}]
    with pytest.raises(ValueError, match=message):
        template(tmp_path, body).render(messages)


def test_an_object_that_a_tool_returns(tmp_path):
    """As of Llama 3.1, whose template writes it as JSON."""
    body = "{% if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    messages = [{"role": "tool", "content": {"a": 1}}]
    assert template(tmp_path, body).render(messages).text == '[tool]{"a": 1};'


CALL = "{% for call in m.tool_calls %}<{{ call.function.name }}:ARGUMENTS>{% endfor %}"
OF_OBJECTS = CALL.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
OF_JSON = CALL.replace("ARGUMENTS", "{{ '' + call.function.arguments }}")
OF_EITHER = CALL.replace(
    "ARGUMENTS",
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}",
)
WITHOUT_CONTENT = "{% if m.content is none %}" + OF_OBJECTS + "{% else %}{{ m['content'] + '' }}{% endif %}"


@pytest.mark.parametrize("body", [OF_OBJECTS, OF_JSON, OF_EITHER, WITHOUT_CONTENT])
@pytest.mark.parametrize("form", [lambda x: x, json.dumps])
def test_arguments_are_objects_or_json(form, body, tmp_path):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": form({"x": "é"})}}]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    text = template(tmp_path, body).render(messages).text.replace("\\u00e9", "é")
    assert text.endswith('[assistant]<f:{"x": "é"}>;')


def test_arguments_that_are_not_json(tmp_path):
    """They are passed on as they are."""
    calls = [{"function": {"name": "f", "arguments": "(1, 2)"}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert template(tmp_path, OF_OBJECTS).render(messages).text == '[assistant]<f:"(1, 2)">;'


@pytest.mark.parametrize("first", ["", "{{ raise_exception('empty') if not messages }}"])
@pytest.mark.parametrize("body", [OF_TEXT, OF_PARTS])
def test_an_answer_that_comes_first(body, first, tmp_path):
    """Its header is not learned."""
    (tmp_path / "chat_template.jinja").write_text(first + "<s>" + START + body + END)
    turns = [("assistant", "Welcome"), ("user", "Hi"), ("assistant", "Hello")]
    text, spans = ChatTemplate(tmp_path).learned([{"role": x, "content": y} for x, y in turns])
    assert [text[start:end] for start, end in spans] == ["Welcome;", "Hello;"]
