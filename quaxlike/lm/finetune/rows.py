"""The forms of rows that decoders learn from, as data sets have them."""

import json
from collections.abc import Collection, Mapping
from typing import Any

FORMS = (
    'Rows are {"text": ...}, {"prompt": ..., "completion": ...}, '
    '{"messages": [{"role": ..., "content": ...}, ...]}, '
    '{"conversations": [{"from": ..., "value": ...}, ...]}, '
    '{"instruction": ..., "input": ..., "output": ...}, '
    'or with --task dpo {"prompt": ..., "chosen": ..., "rejected": ...}'
)

_NAMED = "it names the row"
_ABOUT = "it says where the row is from, or what it is about"
#: Entries of rows that may stand there although nothing is learned from them, and why.
WITHOUT_EFFECT = {
    **dict.fromkeys(("id", "idx", "index", "uid", "uuid", "prompt_id", "conversation_id"), _NAMED),
    **dict.fromkeys(("source", "dataset", "url", "title", "timestamp", "category", "language"), _ABOUT),
    **dict.fromkeys(("meta", "metadata"), _ABOUT),
    "parallel_tool_calls": "a setting of OpenAI's servers",
}
_OF_MESSAGES = ("tools", "chat_template_kwargs")
# Entries of single forms: UltraChat has the first message twice, Alpaca the whole row as a text.
_TWICE = {"messages": ("prompt",), "instruction": ("text",)}
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip

_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the "
    "request."
)
_ALPACA_INPUT = ", paired with an input that provides further context"


def check_entries(fields: Mapping[str, Any], used: Collection[str]) -> None:
    """Raises `ValueError` for an entry that is not used, unless `WITHOUT_EFFECT` names it or it is null."""
    for name, value in fields.items():
        if value is not None and name not in used and name not in WITHOUT_EFFECT:
            raise ValueError(f"{name!r} is not used beside {', '.join(x for x in used if x in fields)}")


def text_of(fields: Mapping[str, Any], name: str, forms: str = "") -> str:
    """An entry that must be a non-empty text. `forms` is what an error says if there is no such entry."""
    text = fields.get(name)
    if name not in fields:
        end = f". {forms}" if forms else ""
        raise ValueError(f"{name!r} must be a text; there are {', '.join(fields) or 'no entries'}{end}")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name!r} must be a text; found {text!r}")
    return text


def messages_of(fields: Mapping[str, Any], name: str = "messages") -> list[dict[str, Any]]:
    """An entry that must be a conversation, or the text of one in JSON."""
    found = _from_json(fields[name])
    messages = [*map(_from_json, found)] if isinstance(found, list) else []
    if not messages or not all(isinstance(x, dict) and "role" in x for x in messages):
        raise ValueError(f"{name!r} must be a list of objects with a role; found {found!r}")
    return messages


def template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The entries `"tools"` and `"chat_template_kwargs"`, which is variables for the chat template."""
    found = _from_json(fields.get("chat_template_kwargs") or {})
    if not isinstance(found, dict) or found.keys() & {"messages", "add_generation_prompt", "tools"}:
        raise ValueError(
            "'chat_template_kwargs' must be an object with variables other than the messages; "
            f"found {found!r}"
        )
    tools = _from_json(fields.get("tools"))
    if not isinstance(tools, list | None):
        raise ValueError(f"'tools' must be a list of functions; found {tools!r}")
    return {"tools": tools, **found}


def normal(fields: Mapping[str, Any], has_template: bool) -> Mapping[str, Any]:
    """A row in one of three forms: with messages, with a prompt and its completion, or with a text.

    ShareGPT's conversations and Alpaca's instructions become messages; without a chat template, instructions
    become prompts as Stanford's Alpaca has them.
    """
    fields = {name: value for name, value in fields.items() if value is not None} or fields
    form = next((x for x in ("messages", "conversations", "instruction", "prompt") if x in fields), "text")
    if form in ("prompt", "text") and {"chosen", "rejected"} <= fields.keys():
        raise ValueError("'chosen' and 'rejected' are preferences, which --task dpo learns")
    used: tuple[str, ...] = {
        "messages": ("messages", *_OF_MESSAGES),
        "conversations": ("conversations", "system", *_OF_MESSAGES),
        "instruction": ("instruction", "input", "output", "system", *_OF_MESSAGES),
        "prompt": ("prompt", "completion"),
        "text": ("text",),
    }[form]
    needed = {"text": "text", "prompt": "completion", "instruction": "output"}.get(form)
    if needed and needed not in fields:
        text_of(fields, needed, FORMS)
    check_entries(fields, (*used, *_TWICE.get(form, ())))
    if form == "conversations":
        return {**fields, "messages": [*_system(fields), *_shared(fields)]}
    if form == "instruction":
        return _instruction(fields, has_template)
    return fields


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _system(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text_of(fields, "system")}] if fields.get("system") else []


def _shared(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = _from_json(fields["conversations"])
    messages = [*map(_from_json, found)] if isinstance(found, list) else []
    if not messages or not all(isinstance(x, dict) and x.keys() & {"from", "role"} for x in messages):
        raise ValueError(f"'conversations' must be a list of objects with from and value; found {found!r}")
    out = []
    for message in messages:
        if "from" in message:
            speaker, value = message["from"], message.get("value")
            if not isinstance(speaker, str) or speaker not in _ROLES:
                raise ValueError(f"'conversations' has from={speaker!r}; expected one of {', '.join(_ROLES)}")
            if not isinstance(value, str):
                raise ValueError(f"'conversations' has value={value!r}; it must be a text")
            others = {name: x for name, x in message.items() if name not in ("from", "value")}
            message = {"role": _ROLES[speaker], "content": value, **others}
        out.append(message)
    return out


def _instruction(fields: Mapping[str, Any], has_template: bool) -> dict[str, Any]:
    instruction, output = text_of(fields, "instruction"), text_of(fields, "output")
    given = text_of(fields, "input") if fields.get("input") else ""
    if has_template:
        question = f"{instruction}\n\n{given}" if given else instruction
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return {**fields, "messages": [*_system(fields), *talk]}
    if fields.get("tools"):
        raise ValueError("'tools' need a chat template, which the checkpoint does not have")
    parts = [fields.get("system") or _ALPACA.format(more=_ALPACA_INPUT if given else "")]
    parts += [f"### Instruction:\n{instruction}", *([f"### Input:\n{given}"] if given else [])]
    return {"prompt": "\n\n".join([*parts, "### Response:\n"]), "completion": output}


def preference_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of preferences with all of `"prompt"`, `"chosen"` and `"rejected"`, texts or lists of messages.

    As in TRL, a row without a prompt, or with a text as the prompt of messages, has the prompt at the
    beginning of both others. If these do not begin alike, that text is a question.
    """
    fields = {name: value for name, value in fields.items() if value is not None} or fields
    for name in ("chosen", "rejected"):
        if not isinstance(fields.get(name), list):
            text_of(fields, name, FORMS)
    check_entries(
        fields,
        ("prompt", "chosen", "rejected", *_OF_MESSAGES, "messages", "score_chosen", "score_rejected"),
    )
    chosen, rejected, prompt = fields["chosen"], fields["rejected"], fields.get("prompt")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError("'chosen' and 'rejected' must both be texts or both be lists of messages")
    if isinstance(chosen, list):
        chosen, rejected = (messages_of(fields, name) for name in ("chosen", "rejected"))
        if "prompt" in fields and not isinstance(prompt, str):
            prompt = messages_of(fields, "prompt")
            if all(x[: len(prompt)] == prompt for x in (chosen, rejected)):  # which repeat the prompt
                chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
            return {**fields, "prompt": prompt, "chosen": chosen, "rejected": rejected}
    elif "prompt" in fields:
        return {**fields, "prompt": text_of(fields, "prompt")}
    pairs = enumerate(zip(chosen, rejected, strict=False))
    alike = next((i for i, (x, y) in pairs if x != y), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):  # between words, of which tokens begin with the space
        alike = max(chosen.rfind(" ", 0, alike), chosen.rfind("\n", 0, alike) + 1, 0)
    if alike:
        prompt = chosen[:alike]
    elif prompt is not None:
        prompt = [{"role": "user", "content": prompt}]
    else:
        raise ValueError("there is no 'prompt', and 'chosen' and 'rejected' do not begin alike")
    return {**fields, "prompt": prompt, "chosen": chosen[alike:], "rejected": rejected[alike:]}
