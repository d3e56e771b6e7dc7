"""The formats of training data for decoders, as found in published datasets."""

import json
from collections.abc import Collection, Mapping, Sequence
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
#: Entries safe to ignore, along with the reason why.
WITHOUT_EFFECT = {
    **dict.fromkeys(("id", "idx", "index", "uid", "uuid", "prompt_id", "conversation_id"), _NAMED),
    **dict.fromkeys(("source", "dataset", "url", "title", "timestamp", "category", "language"), _ABOUT),
    **dict.fromkeys(("meta", "metadata"), _ABOUT),
    "parallel_tool_calls": "a setting of OpenAI's servers",
}
_OF_MESSAGES = ("tools", "chat_template_kwargs")
_OF_INSTRUCTION = ("instruction", "input", "system", "history")
_OF_CONVERSATIONS = ("conversations", "system")
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip

# The roles that only ask, or give the assistant something to answer.
_ASKING = ("system", "developer", "user", "tool", "function", "ipython")

_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the "
    "request."
)
_ALPACA_INPUT = ", paired with an input that provides further context"


def check_entries(fields: Mapping[str, Any], used: Collection[str]) -> None:
    """Raises `ValueError` if there is an unused entry, unless it's empty or in `WITHOUT_EFFECT`.

    Silently ignoring an entry may mean training on something other than the user intended.
    """
    for name, value in fields.items():
        if value not in (None, "", [], {}) and name not in used and name not in WITHOUT_EFFECT:
            there = ", ".join(x for x in used if x in fields)
            free = ", ".join(x for x in used if x not in fields)
            rename = f", or give it one of the names {free}" if free else ""
            raise ValueError(f"{name!r} is not used beside {there}: leave it out{rename}")


def check_label(fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a row has a label: no task for text-generating decoders learns it.

    In particular, TRL's `KTOTrainer` has a label for whether the completion is any good. Without this check,
    training would include the bad ones too.
    """
    label = fields.get("label")
    if label in (None, "", [], {}):
        return
    if isinstance(label, bool) or "completion" in fields:
        raise ValueError(
            f"'label' is {label!r}, which says whether the completion is wanted, as for KTO. There is no "
            "task for such rows: keep those that are wanted, without 'label', to learn their completions; or "
            "make a wanted and an unwanted one of the same prompt 'chosen' and 'rejected', which --task dpo "
            "learns"
        )
    raise ValueError(f"'label' is {label!r}, which --task classify learns: use that task, or leave it out")


def text_of(fields: Mapping[str, Any], name: str, forms: str = "") -> str:
    """Returns a non-empty text. If it is missing then the error message includes `forms`."""
    text = fields.get(name)
    if name not in fields:
        end = f". {forms}" if forms else ""
        raise ValueError(f"{name!r} must be a text; there are {', '.join(fields) or 'no entries'}{end}")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name!r} must be a text; found {text!r}")
    return text


def messages_of(fields: Mapping[str, Any], name: str = "messages") -> list[dict[str, Any]]:
    """Parses a conversation in OpenAI's or ShareGPT's format, possibly encoded as JSON."""
    found = _from_json(fields[name])
    messages = [*map(_from_json, found)] if isinstance(found, list) else []
    if not messages or not all(map(_is_message, messages)):
        raise ValueError(
            f"{name!r} must be a list of objects with role and content, or with from and value; found "
            f"{found!r}"
        )
    return [_message(name, message) for message in messages]


def _is_message(x: Any) -> bool:
    return isinstance(x, dict) and bool(x.keys() & {"from", "role"})


def _message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    if (calls := message.get("tool_calls")) is not None:
        found = _from_json(calls)
        found = [*map(_from_json, found)] if isinstance(found, list) else [found]
        if not all(isinstance(call, dict) for call in found):
            raise ValueError(f"{name!r} has tool_calls={calls!r}; it must be a list of objects")
        message = {**message, "tool_calls": found}
    if "from" not in message:
        return message
    speaker, value = message["from"], message.get("value")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise ValueError(f"{name!r} has from={speaker!r}; expected one of {', '.join(_ROLES)}")
    if not isinstance(value, str):
        raise ValueError(f"{name!r} has value={value!r}; it must be a text")
    others = {name: x for name, x in message.items() if name not in ("from", "value")}
    return {"role": _ROLES[speaker], "content": value, **others}


def check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ValueError` if there are only answers by someone other than the assistant.

    Treating these as rows without answers would quietly leave out most of the data.
    """
    roles = [str(message.get("role")) for message in messages]
    others = [role for role in roles if role not in _ASKING]
    if "assistant" not in roles and others:
        raise ValueError(
            f"the messages have role={others[0]!r}, and none has role='assistant', whose answers are learned"
        )


def template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parses `"tools"` and `"chat_template_kwargs"` into variables of the chat template."""
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
    """Converts a row to one of just three formats: messages, prompt and completion, or text.

    ShareGPT conversations, Alpaca instructions, and prompts and completions in the form of messages (as in
    TRL) all become messages. However, without a chat template, instructions instead become prompts in
    Stanford Alpaca's format.
    """
    row, fields = fields, _without_nulls(fields)
    if {"chosen", "rejected"} <= fields.keys():
        raise ValueError("'chosen' and 'rejected' are preferences, which --task dpo learns")
    check_label(fields)
    if "messages" in fields:  # UltraChat repeats the first message as the prompt
        check_entries(fields, ("messages", *_OF_MESSAGES, "prompt"))
        messages = messages_of(fields)
        _check_prompt(fields, messages, "messages")
        return {**fields, "messages": messages}
    if "conversations" in fields:
        check_entries(fields, (*_OF_CONVERSATIONS, *_OF_MESSAGES))
        return {**fields, "messages": [*_system(fields), *messages_of(fields, "conversations")]}
    if "instruction" in fields:  # Alpaca repeats the whole row as a text
        output = text_of(fields, "output", FORMS)
        check_entries(fields, (*_OF_INSTRUCTION, "output", *_OF_MESSAGES, "text"))
        question = _instruction(fields, has_template)
        _check_repeats(fields)
        if isinstance(question, str):
            return {"prompt": question, "completion": output}
        return {**fields, "messages": [*question, _answer(output)]}
    is_pair = "prompt" in fields or ("completion" in fields and "text" not in fields)
    used = ("prompt", "completion") if is_pair else ("text",)
    for name in used:
        if name not in fields:
            if not is_pair:
                _check_nulls(row)
            text_of(row, name, FORMS)
    # If the prompt is a text then the completion can be any JSON for the model to write.
    talk = "prompt" in fields and (_is_talk(fields["prompt"]) or not isinstance(fields["completion"], str))
    check_entries(fields, (*used, *(_OF_MESSAGES if talk else ())))
    if not talk:
        return fields
    # Only the completion is learned, even if the prompt contains answers too.
    prompt, completion = _part(fields, "prompt"), _part(fields, "completion")
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [_answer(completion)] if isinstance(completion, str) else completion
    return {**fields, "messages": [*not_learned(prompt), *completion]}


def not_learned(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Excludes all of the assistant's answers from the loss."""
    return [{**m, "weight": 0} if m.get("role") == "assistant" else {**m} for m in messages]


def _without_nulls(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in fields.items() if value is not None} or fields


def _check_nulls(row: Mapping[str, Any]) -> None:
    """Raises `ValueError` if an entry with the row's content is null."""
    for name in ("messages", "conversations", "instruction", "prompt", "completion"):
        if name in row and row[name] is None:
            raise ValueError(f"{name!r} is null. {FORMS}")


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _system(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text_of(fields, "system")}] if fields.get("system") else []


# Labelled words ------------------------------------------------------------------------------------

#: The label for words excluded from the loss. (The same value as in PyTorch.)
NO_LABEL = -100
_WORDS = ("tokens", "words")


def has_words(fields: Mapping[str, Any]) -> bool:
    """Returns whether a row consists of words with one label each."""
    return any(isinstance(fields.get(name), list) for name in _WORDS)


def words_of(fields: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Returns a row's words along with their labels, for named entity or part-of-speech tagging.

    The labels are in the entry `"labels"`, or failing that in `"tags"` or `"..._tags"`. If there are several
    of the latter (e.g. in CoNLL-2003), then this uses `"ner_tags"`, like `run_ner.py` in transformers.
    """
    fields = _without_nulls(fields)
    name = next((x for x in _WORDS if x in fields), None)
    words: Any = fields.get(name or "")
    if name is None or not isinstance(words, list) or not all(isinstance(x, str) for x in words):
        raise ValueError(
            f"'tokens' must be a list of words; found {words!r}"
            if name
            else f"there is no list of words 'tokens'; there are {', '.join(fields) or 'no entries'}"
        )
    tags = [x for x in fields if x in ("labels", "tags") or x.endswith("_tags")]
    chosen = [x for x in ("labels", "ner_tags") if x in tags] or tags
    if len(chosen) > 1 and chosen[0] != "labels":
        raise ValueError(f"{' and '.join(chosen)} are labels: keep one, or call the one to learn 'labels'")
    if not chosen:
        found = ", ".join(fields)
        raise ValueError(f"there must be 'labels' for {name!r}, or entries like 'ner_tags'; found {found}")
    check_entries(fields, (name, *tags))
    labels = fields[chosen[0]]
    if not isinstance(labels, list) or len(labels) != len(words):
        count = f"{len(labels)} labels" if isinstance(labels, list) else f"{labels!r}"
        raise ValueError(f"{chosen[0]!r} must be a label for each of {len(words)} words; found {count}")
    return words, labels


# Redundant entries ---------------------------------------------------------------------------------


def _check_prompt(fields: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raises `ValueError` if there is a `"prompt"` inconsistent with `messages`."""
    if "prompt" not in fields:
        return
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        prompt = messages_of(fields, "prompt")
        if messages[: len(prompt)] == prompt:
            return
    elif any(_same(prompt, m.get("content")) for m in messages if m.get("role") != "assistant"):
        return
    raise ValueError(
        f"'prompt' says something else than {name!r}, which is what is learned: leave it out, or add it to "
        f"{name!r}; found {prompt!r}"
    )


def _same(text: str, content: Any) -> bool:
    return isinstance(content, str) and content.strip() == text.strip()


def _check_repeats(fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless `"text"` just repeats the rest of the row, as in Alpaca."""
    if not fields.get("text"):
        return
    text = text_of(fields, "text")
    for name in ("instruction", "input", "output"):
        if isinstance(own := fields.get(name), str) and own.strip() not in text:
            raise ValueError(
                f"'text' stands beside 'instruction' and does not repeat {name!r}: leave it out to learn the "
                f"instruction, or leave out the instruction to learn it; found {text!r}"
            )


# Alpaca --------------------------------------------------------------------------------------------


def _instruction(fields: Mapping[str, Any], has_template: bool) -> str | list[dict[str, Any]]:
    """Converts an instruction to messages, or (without a chat template) to Stanford Alpaca's prompt."""
    instruction, history = text_of(fields, "instruction"), _history(fields)
    given = text_of(fields, "input") if fields.get("input") else ""
    if has_template:
        question = f"{instruction}\n\n{given}" if given else instruction
        return [*_system(fields), *history, {"role": "user", "content": question}]
    for name in ("tools", "history"):
        if fields.get(name):
            raise ValueError(f"{name!r} needs a chat template, which the checkpoint does not have")
    parts = [fields.get("system") or _ALPACA.format(more=_ALPACA_INPUT if given else "")]
    parts += [f"### Instruction:\n{instruction}", *([f"### Input:\n{given}"] if given else [])]
    return "\n\n".join([*parts, "### Response:\n"])


def _history(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Converts previous turns to messages. As in LLaMA-Factory, they are (question, answer) pairs."""
    found = _from_json(fields.get("history") or [])
    if not isinstance(found, list) or not all(map(_is_pair, found)):
        raise ValueError(
            f"'history' must be a list of pairs of texts, a question and its answer; found {found!r}"
        )
    turns = [({"role": "user", "content": question}, _answer(answer)) for question, answer in found]
    return [message for turn in turns for message in turn]


def _is_pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(isinstance(text, str) for text in x)


# Preferences ---------------------------------------------------------------------------------------


def preference_of(fields: Mapping[str, Any], has_template: bool) -> Mapping[str, Any]:
    """Parses a row of preferences. In the result, the prompt and both answers are either texts or messages.

    If the answers are lists of messages then the prompt can be missing, or can be just a text. As in TRL, the
    prompt is then everything the answers have in common at the start. If that's nothing, then the text is the
    question.

    As in LLaMA-Factory, the prompt can also be a conversation or an Alpaca instruction, and an answer can be
    a single message or a text.
    """
    fields = _without_nulls(fields)
    check_label(fields)
    chosen, rejected = (_part(fields, name) for name in ("chosen", "rejected"))
    asking = {"prompt": ("prompt",), "conversations": _OF_CONVERSATIONS, "instruction": _OF_INSTRUCTION}
    form = next((x for x in asking if x in fields), None)
    asked: tuple[str, ...] = tuple(asking) if form is None else asking[form]
    scores = ("score_chosen", "score_rejected")
    check_entries(fields, (*asked, "chosen", "rejected", "messages", *_OF_MESSAGES, *scores))
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError("'chosen' and 'rejected' must both be texts or both be lists of messages")
    prompt: Any = None
    if form == "instruction":
        prompt = _instruction(fields, has_template)
    elif form == "conversations":
        prompt = [*_system(fields), *messages_of(fields, form)]
    elif form == "prompt":
        prompt = messages_of(fields, form) if _is_talk(fields[form]) else text_of(fields, form)
    elif "messages" in fields and messages_of(fields) != chosen:
        prompt = messages_of(fields)
    if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = [_answer(chosen)], [_answer(rejected)]
    prompt, chosen, rejected = _parted(fields, prompt, chosen, rejected)
    if "messages" in fields and messages_of(fields) not in (prompt, chosen, [*prompt, *chosen]):
        raise ValueError("'messages' is neither the prompt nor the prompt with 'chosen': leave it out")
    return {**fields, "prompt": prompt, "chosen": chosen, "rejected": rejected}


def _is_talk(value: Any) -> bool:
    """Returns whether a value is a list of messages, possibly as JSON. (Other JSON doesn't count.)"""
    found = _from_json(value)
    return not isinstance(value, str) or (isinstance(found, list) and any(map(_is_message, found)))


def _part(fields: Mapping[str, Any], name: str) -> str | list[dict[str, Any]]:
    """Parses a part of a conversation: a text, a message, or a list of messages."""
    found = fields.get(name)
    if _is_message(alone := _from_json(found)):
        return [_message(name, alone)]
    return (
        text_of(fields, name, FORMS)
        if name not in fields or not _is_talk(found)
        else messages_of(fields, name)
    )


def _parted(fields: Mapping[str, Any], prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Separates the prompt from the two answers, e.g. if the answers include it."""
    if isinstance(prompt, list):
        n = len(prompt)
        both_repeat = all(x[:n] == prompt for x in (chosen, rejected))
        return (prompt, chosen[n:], rejected[n:]) if both_repeat else (prompt, chosen, rejected)
    if isinstance(chosen, str) and prompt is not None:
        return prompt, chosen, rejected
    pairs = enumerate(zip(chosen, rejected, strict=False))
    alike = next((i for i, (x, y) in pairs if x != y), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):  # split before a space: it belongs to the token of the next word
        alike = max(chosen.rfind(" ", 0, alike), chosen.rfind("\n", 0, alike) + 1, 0)
    if alike:
        if prompt is not None and isinstance(chosen, list):
            _check_prompt(fields, chosen[:alike], "chosen")
        return chosen[:alike], chosen[alike:], rejected[alike:]
    if prompt is None:
        raise ValueError("there is no 'prompt', and 'chosen' and 'rejected' do not begin alike")
    return [{"role": "user", "content": prompt}], chosen, rejected
