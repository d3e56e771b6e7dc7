"""Converts messages to whichever format a chat template supports.

A message's content can be a text, or a list of parts such as `{"type": "text", "text": ...}`. Likewise, the
arguments of a tool call can be an object, or JSON as a text. Data has either, but many templates support only
one of them. Given the other one, most don't fail. Instead they write Python's notation for a list, escape the
JSON once more, or leave out the content altogether. So this first renders short conversations to find out
what a template does, and then converts messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]

# Substituted for a message's content, to find out where the template puts it. These characters are escaped in
# Python's notation for lists and objects.
PROBE = "\ue000probe\ue001"
_ARGUMENTS = {PROBE: PROBE}
_ROLES = ("system", "user", "assistant")


class _Form(NamedTuple):
    """Which of the two formats a template supports."""

    text: bool
    other: bool


class Forms:
    """The formats a template supports. `render` should raise `ValueError` if it rejects a conversation."""

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render
        self._content = {role: self._form_of_content(role) for role in _ROLES}
        self._arguments = self._form_of_arguments()

    def _form_of_content(self, role: str) -> _Form:
        contents = (PROBE, [{"type": "text", "text": PROBE}])
        texts = [self._rendered({"role": role, "content": content}) for content in contents]
        return _Form(*(PROBE in x and "'type'" not in x and '"type"' not in x for x in texts))

    def _form_of_arguments(self) -> _Form:
        written = json.dumps(_ARGUMENTS, ensure_ascii=False)
        return _Form(self._writes_call(written, written), self._writes_call(_ARGUMENTS, PROBE))

    def _writes_call(self, arguments: Any, expected: str) -> bool:
        """Returns whether the template writes `expected` for a tool call with these arguments."""
        function = {"name": "name", "arguments": arguments}
        calls = [{"id": "123456789", "type": "function", "function": function}]
        message = {"role": "assistant", "tool_calls": calls}
        # Some templates only look for calls if there is no content, and others need an empty one.
        return any(expected in self._rendered({**message, "content": x}) for x in ("", None))

    def _writes_object(self, role: str | None, content: Any) -> bool:
        """Returns whether `content` is an object and the template writes it as JSON.

        Some templates do so for a tool's result.
        """
        if role in _ROLES or not isinstance(content, Mapping):
            return False
        call = {"id": "123456789", "type": "function", "function": {"name": "name", "arguments": {}}}
        returned = {"role": role, "name": "name", "tool_call_id": "123456789", "content": {PROBE: PROBE}}
        before = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return PROBE in self._render([*before, returned])
        except ValueError:
            return False

    def _rendered(self, message: Mapping[str, Any]) -> str:
        """Renders a message in a short conversation. Returns "" if the template rejects it."""
        question = {"role": "user", "content": "question"}
        before = [question] if message["role"] == "assistant" else []
        after = [question] if message["role"] == "system" else []
        try:
            return self._render([*before, message, *after])
        except ValueError:
            return ""

    def converted(self, i: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a message to the formats supported by the template.

        **Raises:** `ValueError` if the role isn't a text, or if a part of the content isn't, such as an
        image.
        """
        out, role, content = dict(message), message.get("role"), message.get("content")
        if not isinstance(role, str | None):
            raise ValueError(f"message {i} has role={role!r}; it must be a text")
        if not isinstance(content, str | list | None) and not self._writes_object(role, content):
            raise ValueError(
                f"message {i} has content={content!r}; it must be a text, or a list of texts, which are "
                '{"type": "text", "text": ...}'
            )
        form = self._content.get(str(role), self._content["user"])
        if isinstance(content, list):
            texts = [_text_of(i, part) for part in content]
            if form.text and not form.other:
                out["content"] = "".join(texts)
        elif isinstance(content, str) and form.other and not form.text:
            out["content"] = [{"type": "text", "text": content}]
        if isinstance(calls := message.get("tool_calls"), list):
            out["tool_calls"] = [self._with_arguments(call) for call in calls]
        return out

    def _with_arguments(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(function := call.get("function"), Mapping):
            return {**call, "function": self._with_arguments(function)}
        arguments, form = call.get("arguments"), self._arguments
        if isinstance(arguments, str) and form.other and not form.text:
            try:
                read = json.loads(arguments)
            except (ValueError, RecursionError):
                return call
            return {**call, "arguments": read} if isinstance(read, dict) else call
        if isinstance(arguments, dict) and form.text and not form.other:
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return call


def _text_of(i: int, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ValueError(
            f"message {i} has a part of type {kind!r} in its content; only texts are supported, which are "
            '{"type": "text", "text": ...}'
        )
    return part["text"]
