"""Where the answers of the assistant are in the text of a conversation.

Few templates mark them, and many render a turn differently when others follow. Qwen3's shows an empty block
of thoughts in the last answer alone, others drop the thoughts of all but the last, and Llama 3's ends each
text with the header of a next answer. So each answer is looked for in the one text that is trained on.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]

# In place of the content of a message, to see where the template writes it.
_PROBE = "\ue000probe\ue001"


def find_answers(render: Render, messages: Messages) -> list[tuple[int, int]]:
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
