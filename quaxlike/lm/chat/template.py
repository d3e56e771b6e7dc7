"""Conversations as text, rendered with a checkpoint's chat template.

Templates are rendered as in transformers (`utils/chat_template_utils.py`): by jinja2 in a sandbox, with
`raise_exception`, `strftime_now`, loop controls, and `{% generation %}` around the text that the model should
write. In addition, our sandbox bounds the sizes of texts.
"""

import datetime
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols

from ...files.errors import CheckpointError, shortened
from ..tokenizer import read_templates
from .sandbox import Sandbox

_MAX_CHARACTERS = 1 << 23  # of a conversation
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]

# Replaces a message's content, to find where the template writes it.
_PROBE = "\ue000probe\ue001"


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    written: list[tuple[int, int]]
    """The start and end of each span of characters from the assistant."""


class ChatTemplate:
    """The chat template of a checkpoint.

    **Arguments:**

    - `directory`: a folder with `chat_template.jinja`, or with `chat_template` in `tokenizer_config.json`; or
        a GGUF file. It may contain further named templates (in `additional_chat_templates/`, or as a list in
        `tokenizer_config.json`). The template `tool_use` is used for conversations with tools.

    **Raises:** `CheckpointError` if there is no template, or if it is damaged.
    """

    def __init__(self, directory: Path) -> None:
        sources, self._special = read_templates(directory)
        if "default" not in sources:
            raise CheckpointError(
                f"{directory} has no chat template, which turns messages into text, neither "
                "chat_template.jinja nor chat_template in tokenizer_config.json. Use texts in place of "
                "messages."
            )
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
            self._names = {name: _names_in(environment, text) for name, text in sources.items()}
        except Exception as error:  # jinja2 generates Python, which may be invalid or nested too deeply
            problem = f"{type(error).__name__}: {shortened(str(error))}"
            raise CheckpointError(f"The chat template in {directory} is damaged: {problem}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Rendered:
        """Renders a conversation as text.

        **Arguments:**

        - `messages`: dicts with `"role"`, `"content"`, and other entries for the template.
        - `tools`: the functions that the assistant may call, as JSON schemas.
        - `add_generation_prompt`: whether to end the text where the assistant starts to write.
        - `variables`: further variables for the template.

        **Raises:** `ValueError` if the template rejects the conversation, with its message.
        """
        template = self._templates[self._named(tools)]
        spans: list[tuple[int, int]] = []
        blocks: list[str] = []

        def generation(text: str) -> str:
            start = sum(map(len, blocks))
            spans.append((start, start + len(text)))
            return text

        length = 0
        kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            for block in template.generate(
                **{**self._special, **variables}, messages=kept, tools=tools, documents=None,
                add_generation_prompt=add_generation_prompt, _generation=generation,
            ):  # fmt: skip
                blocks.append(block)
                if (length := length + len(block) + 1) > _MAX_CHARACTERS:
                    raise ValueError(f"it makes more than {_MAX_CHARACTERS:,} characters of it")
        except Exception as error:  # the template is a program
            raise ValueError(
                f"the chat template rejects this conversation: {shortened(str(error))}"
            ) from None
        return Rendered("".join(blocks), spans)

    def learned(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Rendered:
        """Renders a conversation, and finds the spans to train on.

        These are the assistant's turns without `"weight": 0`. If the template does not mark them, then a span
        is everything after the prompt, up to the end of the turn.

        **Raises:** `ValueError` as for `render`. Also for another weight, and for an entry that the template
        does not use, unless it is in `WITHOUT_EFFECT`.
        """
        wanted = [_is_learned(i, message) for i, message in enumerate(messages)]
        messages = [{key: x for key, x in message.items() if key != "weight"} for message in messages]
        whole = self.render(messages, **options)
        self._check_used(messages, whole.text, options)
        answers = [own for own, m in zip(wanted, messages, strict=True) if m.get("role") == "assistant"]
        if whole.written and all(answers):
            return whole

        def render(some: Sequence[Mapping[str, Any]], prompt: bool) -> str:
            return self.render(some, add_generation_prompt=prompt, **options).text

        try:
            found = _find_answers(render, messages)
        except ValueError:
            if len(whole.written) != len(answers):
                raise
            found = whole.written
        marked = whole.written or found
        left_out = [span for span, own in zip(found, answers, strict=True) if not own]

        def apart(one: Any, other: Any) -> Any:
            return one[1] <= other[0] or other[1] <= one[0]

        return Rendered(whole.text, [x for x in marked if all(apart(x, other) for other in left_out)])

    def _check_used(self, messages: Messages, text: str, options: Mapping[str, Any]) -> None:
        """Raises `ValueError` for entries that the template does not use."""
        names = self._names[self._named(options.get("tools"))]

        def passed_over(name: str, messages: Messages, options: Mapping[str, Any]) -> bool:
            """Returns whether `name` has no effect: the text is the same without it."""
            if name in names:
                return False
            try:
                return self.render(messages, **options).text == text
            except ValueError:
                return False

        places: dict[str, int] = {}
        for i, message in enumerate(messages):
            for key, value in message.items():
                if value not in (None, [], {}) and key not in ("role", *WITHOUT_EFFECT):
                    places.setdefault(key, i)
        for key, i in places.items():
            rest = [{name: x for name, x in message.items() if name != key} for message in messages]
            if passed_over(key, rest, options):
                raise ValueError(
                    f"message {i} has {key!r}, which the chat template does not use; leave it out, or choose "
                    "a template that does"
                )
        if options.get("tools") and passed_over("tools", messages, {**options, "tools": None}):
            raise ValueError("the row has 'tools', which the chat template does not use; leave them out")

    def _named(self, tools: Any) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"


#: Entries of messages that may stand there although a template does not use them, and why.
WITHOUT_EFFECT = {
    "id": "it names the message, not what is said",
    "name": "it tells speakers of one role apart; most templates write the role alone",
    "reasoning_content": "templates of models that do not think leave thoughts out",
    "tool_call_id": "many templates pair calls and results by their order",
}


def _names_in(environment: Sandbox, source: str) -> set[str]:
    """Collects variables, attributes and constant texts of a template: a superset of the keys it reads."""
    tree = environment.parse(source)
    return (
        {node.name for node in tree.find_all(nodes.Name)}
        | {node.attr for node in tree.find_all(nodes.Getattr)}
        | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    )


def _is_learned(i: int, message: Mapping[str, Any]) -> bool:
    weight = message.get("weight")
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"message {i} has weight={weight!r}; it must be 0 (not learned) or 1 (learned)")
    if weight and message.get("role") != "assistant":
        raise ValueError(f"message {i} has weight={weight!r}; only messages of the assistant are learned")
    return bool(weight)


def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], tojson=_to_json
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """The tag `{% generation %}…{% endgeneration %}`. It reports the span of its text."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        own = nodes.ContextReference()
        call = self.call_method("_tell", [own])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _tell(self, context: Any, caller: Any) -> str:
        return context["_generation"](caller())


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# -------------------------------------------------------------------------------------------------
# Finding the assistant's answers in a conversation's text.
#
# Few templates mark answers, and many render a turn differently if more turns follow. Qwen3 writes an empty
# block of thoughts only in the last answer, other templates drop the thoughts of all answers but the last,
# and Llama 3 ends each text with the header of a next answer. So we search for each answer in the whole text,
# the one to train on.
# -------------------------------------------------------------------------------------------------


def _find_answers(render: Render, messages: Messages) -> list[tuple[int, int]]:
    """Returns the start and end of each answer in a conversation's text.

    An answer starts where its prompt ends, and ends with its turn. `render` takes messages, and whether to
    append a prompt. Raises `ValueError` if an answer cannot be found.
    """
    whole, closing = render(messages, False), _closing(render, messages)
    spans, after = [], 0
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            start = _start(render, messages, i, whole, after)
            after = _end(render, messages, i, whole, start, closing)
        except _NotFoundError:
            raise ValueError(
                f"the chat template renders message {i} in a way that hides where its answer is; mark the "
                "assistant's text in the template with {% generation %}, or end the conversation there"
            ) from None
        spans.append((start, after))
    return spans


class _NotFoundError(Exception):
    pass


def _closing(render: Render, messages: Messages) -> str:
    """Returns the text after the last message, if it does not depend on the prompt."""
    if render(messages, True) != render(messages, False):
        return ""
    try:
        return render([], False)
    except ValueError:  # the template needs messages
        return ""


def _start(render: Render, messages: Messages, i: int, whole: str, after: int) -> int:
    """Finds the start of an answer, by matching the text with the prompt."""
    prompt = render(messages[:i], True) if i else ""
    if whole.startswith(prompt) and len(prompt) >= after:
        return len(prompt)
    # Both contain the end of the previous message. The answer's header follows.
    end, end_in_prompt = (
        _content_end(render, messages, i - 1, False),
        _content_end(render, messages[:i], i - 1, True),
    )
    pairs = zip(whole[end:], prompt[end_in_prompt:], strict=False)
    agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not agreed or end < after:
        raise _NotFoundError
    return end + agreed


def _end(render: Render, messages: Messages, i: int, whole: str, start: int, closing: str) -> int:
    alone = render(messages[: i + 1], False)
    if closing and alone.endswith(closing):
        alone = alone[: -len(closing)]
    if whole.startswith(alone) and len(alone) > start:
        return len(alone)
    # If more turns follow, the text may lack the start of the answer (thoughts).
    answer = alone[_start(render, messages[: i + 1], i, alone, 0) :]
    for dropped in range(len(answer)):
        if whole.startswith(answer[dropped:], start):
            if not answer[dropped:].strip():
                break
            return start + len(answer) - dropped
    raise _NotFoundError


def _content_end(render: Render, messages: Messages, i: int, prompt: bool) -> int:
    """Finds where a message's content ends. The text after it does not depend on the content."""
    if i < 0 or not isinstance(messages[i].get("content"), str):
        raise _NotFoundError
    text = render(messages, prompt)
    changed = [{**m, "content": _PROBE} if j == i else m for j, m in enumerate(messages)]
    other = render(changed, prompt)
    if (at := other.find(_PROBE)) < 0:
        raise _NotFoundError
    behind = other[at + len(_PROBE) :]
    if not text.endswith(behind):
        raise _NotFoundError
    return len(text) - len(behind)
