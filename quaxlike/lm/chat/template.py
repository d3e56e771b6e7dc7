"""Converts conversations to text, using a checkpoint's chat template.

Templates are rendered in the same way as in transformers (`utils/chat_template_utils.py`): using a jinja2
sandbox with `raise_exception`, `strftime_now` and loop controls, and with `{% generation %}` to mark text
written by the model. In addition, the sandbox limits the size of texts.
"""

import contextlib
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
from .forms import PROBE, Forms, Messages
from .sandbox import Sandbox

_MAX_CHARACTERS = 1 << 23  # for each conversation
# Variables expected by templates, but possibly missing from conversations.
_UNSET = {"tools": None, "documents": None, "add_generation_prompt": False}
Render = Callable[[Messages, bool], str]


class Rendered(NamedTuple):
    """A conversation rendered as text."""

    text: str
    written: list[tuple[int, int]]
    """The (start, end) of each character span written by the assistant."""


class ChatTemplate:
    """A checkpoint's chat template.

    **Arguments:**

    - `directory`: either a GGUF file, or a folder with `chat_template.jinja` or a `chat_template` entry in
        `tokenizer_config.json`. There can be additional named templates, either in
        `additional_chat_templates/` or as a list in `tokenizer_config.json`. This only uses `tool_use`, for
        conversations with tools.

    **Raises:** `CheckpointError` if there is no template, or if it isn't valid.
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
        self._forms: dict[str, Forms] = {}
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
            self._names = {name: _names_in(environment, text) for name, text in sources.items()}
        except Exception as error:  # they compile to Python, which can be invalid or nested too deeply
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

        - `messages`: dictionaries with `"role"`, `"content"` and anything else used by the template. The
            content can be a text or a list of texts (`{"type": "text", "text": ...}`), and the arguments of
            tool calls can be objects or JSON. They are converted if the template only supports the other one.
        - `tools`: the JSON schemas of the functions available to the assistant.
        - `add_generation_prompt`: whether to end with the prompt for the assistant's next answer.
        - `variables`: any additional variables for the template.

        **Raises:** `ValueError` if the template rejects the conversation. The message includes its reason.
        """
        name = self._named(tools)
        if name not in self._forms:
            self._forms[name] = Forms(lambda messages: self._rendered(name, messages).text)
        forms = self._forms[name]
        messages = [forms.converted(i, message) for i, message in enumerate(messages)]
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._rendered(name, kept, **variables)
        except ValueError:  # some templates ask whether there is a null in place of the content
            nulls = [{"content": None} if "content" in m and m["content"] is None else {} for m in messages]
            with contextlib.suppress(ValueError):
                if any(nulls):
                    kept = [message | null for message, null in zip(kept, nulls, strict=True)]
                    return self._rendered(name, kept, **variables)
            raise

    def _rendered(self, name: str, messages: Messages, **variables: Any) -> Rendered:
        template = self._templates[name]
        spans: list[tuple[int, int]] = []
        blocks: list[str] = []

        def generation(text: str) -> str:
            start = sum(map(len, blocks))
            spans.append((start, start + len(text)))
            return text

        length = 0
        try:
            for block in template.generate(
                {**_UNSET, **self._special, **variables, "messages": messages, "_generation": generation}
            ):
                blocks.append(block)
                if (length := length + len(block) + 1) > _MAX_CHARACTERS:
                    raise ValueError(f"it makes more than {_MAX_CHARACTERS:,} characters of it")
        except Exception as error:  # a template can raise anything
            raise ValueError(
                f"the chat template rejects this conversation: {shortened(str(error))}"
            ) from None
        return Rendered("".join(blocks), spans)

    def learned(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Rendered:
        """Renders a conversation and finds the spans to train on.

        By default this finds all the assistant's turns, but you can exclude a turn by giving it `"weight":
        0`. If the template doesn't mark these turns, then each span is the text from after the prompt until
        the end of the turn.

        **Raises:** `ValueError` as in `render`; for weights other than 0 and 1; or for an entry not used by
        the template, unless it is in `WITHOUT_EFFECT`.
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
        """Raises `ValueError` if there are any entries not used by the template."""
        names = self._names[self._named(options.get("tools"))]

        def passed_over(name: str, messages: Messages, options: Mapping[str, Any]) -> bool:
            """Returns whether the text is the same without `name`."""
            if name in names:
                return False
            try:
                return self.render(messages, **options).text == text
            except ValueError:
                return False

        first: dict[str, int] = {}  # the first message with each entry
        for i, message in enumerate(messages):
            for key, value in message.items():
                if value not in (None, [], {}) and key not in ("role", *WITHOUT_EFFECT):
                    first.setdefault(key, i)
        for key, i in first.items():
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


#: Messages can have these entries even if a template doesn't use them, for the given reasons.
WITHOUT_EFFECT = {
    "id": "it names the message, not what is said",
    "name": "it tells speakers of one role apart; most templates write the role alone",
    "reasoning_content": "templates of models that do not think leave thoughts out",
    "tool_call_id": "many templates pair calls and results by their order",
}


def _names_in(environment: Sandbox, source: str) -> set[str]:
    """Collects all variable names, attribute names and strings in a template.

    This is a superset of the keys read by the template.
    """
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
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, reporting the span in between."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        own = nodes.ContextReference()
        call = self.call_method("_report", [own])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _report(self, context: Any, caller: Any) -> str:
        return context["_generation"](caller())


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# -------------------------------------------------------------------------------------------------
# Locating the assistant's answers in the text of a conversation.
#
# This is awkward. Few templates mark the answers, and many render a turn differently depending on the text
# after it. For example, Qwen3 only writes an (empty) block of thoughts in the last answer; other templates
# drop the thoughts of all but the last answer; and Llama 3 ends every text with the header for yet another
# answer. So we can't just render each turn by itself. Instead we locate each answer in the full text. (This
# is also the text to train on.)
# -------------------------------------------------------------------------------------------------


def _find_answers(render: Render, messages: Messages) -> list[tuple[int, int]]:
    """Returns the (start, end) of each answer in a conversation's text.

    An answer starts at the end of its prompt and ends at the end of its turn. This calls `render` with the
    messages, and with whether to append a prompt. Raises `ValueError` if an answer can't be located.
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
    """Returns the template's text after the last message, if it doesn't depend on the prompt."""
    if render(messages, True) != render(messages, False):
        return ""
    try:
        return render([], False)
    except ValueError:  # the template needs at least one message
        return ""


def _start(render: Render, messages: Messages, i: int, whole: str, after: int) -> int:
    """Finds the start of an answer by comparing the full text with the prompt."""
    if not i:
        return _start_of_first(render, messages, whole)
    prompt = render(messages[:i], True)
    if whole.startswith(prompt) and len(prompt) >= after:
        return len(prompt)
    # Both the text and the prompt contain the end of the previous message, and then the answer's header.
    end, end_in_prompt = (
        _content_end(render, messages, i - 1, False),
        _content_end(render, messages[:i], i - 1, True),
    )
    agreed = _agreed(whole[end:], prompt[end_in_prompt:])
    if not agreed or end < after:
        raise _NotFoundError
    return end + agreed


def _start_of_first(render: Render, messages: Messages, whole: str) -> int:
    """Finds the start of an answer with nothing asked before it."""
    try:
        if (prompt := render([], True)) and whole.startswith(prompt):
            return len(prompt)
    except ValueError:  # the template needs at least one message
        pass
    if not messages[0].get("content"):
        raise _NotFoundError
    other = render([{**messages[0], "content": PROBE}, *messages[1:]], False)
    return _agreed(whole, other)


def _agreed(one: str, other: str) -> int:
    """Returns the length of two texts' common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _end(render: Render, messages: Messages, i: int, whole: str, start: int, closing: str) -> int:
    alone = render(messages[: i + 1], False)
    if closing and alone.endswith(closing):
        alone = alone[: -len(closing)]
    if whole.startswith(alone) and len(alone) > start:
        return len(alone)
    # If there are later turns, then the beginning of the answer (i.e. its thoughts) may be missing.
    answer = alone[_start(render, messages[: i + 1], i, alone, 0) :]
    for dropped in range(len(answer)):
        if whole.startswith(answer[dropped:], start):
            if not answer[dropped:].strip():
                break
            return start + len(answer) - dropped
    raise _NotFoundError


def _content_end(render: Render, messages: Messages, i: int, prompt: bool) -> int:
    """Finds the end of a message's content. The text after it must not depend on it."""
    if messages[i].get("content") is None:
        raise _NotFoundError
    text = render(messages, prompt)
    changed = [{**m, "content": PROBE} if j == i else m for j, m in enumerate(messages)]
    other = render(changed, prompt)
    if (at := other.find(PROBE)) < 0:
        raise _NotFoundError
    behind = other[at + len(PROBE) :]
    if not text.endswith(behind):
        raise _NotFoundError
    return len(text) - len(behind)
