"""Conversations as text, rendered with a checkpoint's chat template.

Templates are rendered as in transformers (`utils/chat_template_utils.py`): by jinja2 in a sandbox, with
`raise_exception`, `strftime_now`, loop controls, and `{% generation %}` around the text that the model should
write. Unlike there, the sandbox bounds the sizes of texts.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols

from ..files.errors import CheckpointError, shortened
from ..tokenizer import read_templates
from .answers import find_answers
from .sandbox import Sandbox

_MAX_CHARACTERS = 1 << 23  # of a conversation


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
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
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
        """Renders a conversation, and finds the parts that the assistant writes.

        If the template does not mark these, each is what follows the prompt for it, to the end of its turn.
        """
        whole = self.render(messages, **options)
        if whole.written:
            return whole

        def render(some: Sequence[Mapping[str, Any]], prompt: bool) -> str:
            return self.render(some, add_generation_prompt=prompt, **options).text

        return Rendered(whole.text, find_answers(render, messages))


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
