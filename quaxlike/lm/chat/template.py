"""Conversations as text, rendered with a checkpoint's chat template.

Templates are rendered as in transformers (`utils/chat_template_utils.py`): by jinja2 in a sandbox, with
`raise_exception`, `strftime_now`, loop controls, and `{% generation %}` around the text that the model should
write. Unlike there, the sandbox bounds the sizes of texts.
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

# In place of the content of a message, to see where the template writes it.
_PROBE = "\ue000probe\ue001"


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    written: list[tuple[int, int]]
    """The start and end of each span of characters that the assistant writes."""


class ChatTemplate:
    """The chat template of a checkpoint.

    **Arguments:**

    - `directory`: the folder with `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`; or a
        GGUF file. It may hold other named templates (in `additional_chat_templates/`, or a list in
        `tokenizer_config.json`): `tool_use` is for conversations with tools.

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
        except Exception as error:  # jinja2 writes Python, which may be nested too deeply, or not be Python
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

        - `messages`: with `"role"`, `"content"`, and other entries that the template uses.
        - `tools`: the functions that the assistant may call, as JSON schemas.
        - `add_generation_prompt`: whether to end the text where the assistant starts to write.
        - `variables`: for the template.

        **Raises:** `ValueError` with the template's message, if it rejects the conversation.
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
        """Renders a conversation, and finds the parts that the assistant writes and that are learned: those
        without `"weight": 0`.

        If the template does not mark these, each is what follows the prompt for it, to the end of its turn.

        **Raises:** `ValueError` as `render`; for another weight; for an entry that the template does not use,
        unless `WITHOUT_EFFECT` names it.
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
        apart = lambda one, other: one[1] <= other[0] or other[1] <= one[0]
        return Rendered(whole.text, [x for x in marked if all(apart(x, other) for other in left_out)])

    def _check_used(self, messages: Messages, text: str, options: Mapping[str, Any]) -> None:
        """Raises `ValueError` for entries that the template neither names nor writes."""
        names = self._names[self._named(options.get("tools"))]

        def passed_over(name: str, messages: Messages, options: Mapping[str, Any]) -> bool:
            """Whether `name` has no effect, since these others make the same text."""
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
    """The variables, attributes and constant texts in a template, among which are all keys that it reads."""
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
    """`{% generation %}…{% endgeneration %}`, which reports where its text is in the rendering."""

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
# Where the answers of the assistant are in the text of a conversation.
#
# Few templates mark them, and many render a turn differently when others follow. Qwen3's shows an empty block
# of thoughts in the last answer alone, others drop the thoughts of all but the last, and Llama 3's ends each
# text with the header of a next answer. So each answer is looked for in the one text that is trained on.
# -------------------------------------------------------------------------------------------------


def _find_answers(render: Render, messages: Messages) -> list[tuple[int, int]]:
    """The start and end of each answer in the text of a conversation.

    An answer starts where the prompt for it ends, and ends with its turn. `render` is a function of messages
    and of whether a prompt for an answer follows. Raises `ValueError` if an answer cannot be found.
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
    """The text that the template writes after the last message, whether or not a prompt is asked for."""
    if render(messages, True) != render(messages, False):
        return ""
    try:
        return render([], False)
    except ValueError:  # the template needs messages
        return ""


def _start(render: Render, messages: Messages, i: int, whole: str, after: int) -> int:
    """Where the text agrees with the prompt for the answer, up to the end of the latter."""
    prompt = render(messages[:i], True) if i else ""
    if whole.startswith(prompt) and len(prompt) >= after:
        return len(prompt)
    # The end of the message before is in both: what follows it is the header of the answer.
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
    # Where more follows, the text may lack the beginning of the answer, which are thoughts.
    answer = alone[_start(render, messages[: i + 1], i, alone, 0) :]
    for dropped in range(len(answer)):
        if whole.startswith(answer[dropped:], start):
            if not answer[dropped:].strip():
                break
            return start + len(answer) - dropped
    raise _NotFoundError


def _content_end(render: Render, messages: Messages, i: int, prompt: bool) -> int:
    """The position where the content of a message ends. The text after it does not depend on the content."""
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
