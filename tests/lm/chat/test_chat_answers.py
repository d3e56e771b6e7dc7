"""Each answer is found in the one text that is trained on, whatever the template does with earlier turns."""

import json

import pytest

from quaxlike.lm.chat import ChatTemplate

# As Qwen3's: the last answer alone has a block of thoughts, which may be empty.
THOUGHTS_IN_THE_LAST = """\
{%- for m in messages %}
{{- '<|' ~ m.role ~ '|>\n' }}
{%- set parts = m.content.split('</think>') %}
{%- if m.role == 'assistant' and loop.last %}
{{- '<think>\n' ~ (parts[0].split('<think>')[-1].strip() if parts | length > 1 else '') ~ '\n</think>\n\n' }}
{%- endif %}
{{- parts[-1].lstrip('\n') ~ '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
# As DeepSeek-R1's: the prompt begins the thoughts, which earlier turns lack.
THOUGHTS_IN_THE_PROMPT = """\
{%- for m in messages %}
{%- set last = m.role == 'assistant' and loop.last %}
{{- '<|' ~ m.role ~ '|>\n' ~ ('<think>\n' ~ m.content if last else m.content.split('</think>')[-1]) }}
{{- '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n<think>\n' }}{% endif %}"""
# As Llama 3's: the header of a next answer ends each text.
HEADER_AT_THE_END = """\
{% for m in messages %}\
{% set text = '<|start|>' + m['role'] + '<|header|>\n\n' + m['content'] | trim + '<|eot|>' %}\
{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}\
{{ '<|start|>assistant<|header|>\n\n' }}"""


def learned(tmp_path, template, messages):
    settings = {"chat_template": template, "bos_token": "<|begin|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    roles = ["user", "assistant"] * len(messages)
    rows = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    text, spans = ChatTemplate(tmp_path).learned(rows)
    assert text == ChatTemplate(tmp_path).render(rows).text
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (["Hi", "Hello"], ["<think>\n\n</think>\n\nHello<|end|>\n"]),
        (["x", "x", "x", "x"], ["x<|end|>\n", "<think>\n\n</think>\n\nx<|end|>\n"]),
        (
            ["Hi", "<think>hm</think>\nHello", "So?", "<think>so</think>\nYes"],
            ["Hello<|end|>\n", "<think>\nso\n</think>\n\nYes<|end|>\n"],
        ),
    ],
)
def test_thoughts_in_the_last_answer(messages, expected, tmp_path):
    assert learned(tmp_path, THOUGHTS_IN_THE_LAST, messages) == expected


def test_thoughts_that_the_prompt_begins(tmp_path):
    messages = ["Hi", "hm</think>Hello", "So?", "so</think>Yes", "And?", "and</think>No"]
    expected = ["Hello<|end|>\n", "Yes<|end|>\n", "and</think>No<|end|>\n"]
    assert learned(tmp_path, THOUGHTS_IN_THE_PROMPT, messages) == expected


def test_the_header_of_the_next_answer_is_not_learned(tmp_path):
    assert learned(tmp_path, HEADER_AT_THE_END, ["a", " b ", "c", "d"]) == ["b<|eot|>", "d<|eot|>"]


def test_an_answer_that_is_hidden(tmp_path):
    template = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}.{% endfor %}"
    with pytest.raises(ValueError, match=r"renders message 1 in a way that hides where .*{% generation %}"):
        learned(tmp_path, template, ["a", "b", "c", "d"])
