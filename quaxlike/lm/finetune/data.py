"""Tokenised batches, read from files with one JSON object per line."""

import bisect
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from ..folders.companions import hint_for
from ..tokenizer import read_templates
from .settings import FinetuneError, open_data

#: Rows have at least this many tokens.
LEAST_LENGTH = 16


class Tokens:
    """A checkpoint's tokeniser, for use in training. Texts are truncated to `max_length` tokens."""

    def __init__(self, directory: Path, config: Mapping[str, Any], max_length: int) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no {path}, which the tokeniser is read from.{hint_for(directory)}"
            )
        from ..marks import Marks  # not at module level, so that `--help` works without the extra `lm`
        from ..text import TextTokenizer

        self._tokenizer = TextTokenizer(directory)
        size = config.get("vocab_size")
        if type(size) is not int:
            raise FinetuneError(f"config.json has vocab_size={size!r}; it must be a whole number.")
        self.max_length, self._directory, self._size = max_length, directory, size
        eos = config.get("eos_token_id")
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(token) is int and 0 <= token < size for token in ends):
            raise FinetuneError(f"config.json has eos_token_id={eos!r} and a vocab_size of {size}.")
        self.marks = Marks.of(self._tokenizer, directory, config)

    def ids(self, text: str) -> list[int]:
        """Encodes a text without any special tokens."""
        return self._encoded(text).ids

    def _encoded(self, text: str) -> Any:
        """Encodes a text. Tokens without an embedding (e.g. Gemma 3's image token) are an error."""
        encoding = self._tokenizer.encode(text, special=False)
        if (last := max(encoding.ids, default=0)) >= self._size:
            token = encoding.tokens[encoding.ids.index(last)]
            raise ValueError(
                f"the text has the token {token!r}, number {last}, and the model's vocab_size is {self._size}"
            )
        return encoding

    def spans(self, text: str, written: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Encodes a text without special tokens. Also returns whether each token overlaps with a span."""
        encoding = self._encoded(text)
        learned = [False] * len(encoding.ids)
        for start, end in written:
            # Several tokens can have the offsets of a single character, each for some of its bytes.
            inside = [i for i, (x, y) in enumerate(encoding.offsets) if x < end and start < y]
            if inside:
                first, last = inside[0], inside[-1]
                learned[first : last + 1] = [True] * (last + 1 - first)
        return encoding.ids, learned

    def cut_words(self, words: Sequence[str]) -> tuple[list[int], list[int | None], bool]:
        """As `cut`, but for words. These are joined by spaces before encoding.

        Also returns the position of each word's first token. This is None if the token was truncated, or if
        it's already part of the previous word.
        """
        encoding = self._encoded(" ".join(words))
        ids, was_cut = self.marks.around(encoding.ids, self.max_length)
        before = len(self.marks.begun(encoding.ids)) - len(encoding.ids)
        end, start, last = len(ids) - len(self.marks.end), 0, -1
        firsts: list[int | None] = []
        for word in words:
            found = (encoding.char_to_token(i) for i in range(start, start + len(word)))
            own = [token for token in found if token is not None and token > last]
            firsts.append(before + own[0] if own and before + own[0] < end else None)
            start, last = start + len(word) + 1, max(own, default=last)
        return ids, firsts, was_cut

    @functools.cached_property
    def chat(self) -> Any:
        try:
            from ..chat import ChatTemplate
        except ModuleNotFoundError as error:
            raise FinetuneError(f"Rows of messages need {error.name}: pip install 'quaxlike[lm]'") from None
        return ChatTemplate(self._directory)

    @functools.cached_property
    def has_template(self) -> bool:
        return "default" in read_templates(self._directory)[0]

    def cut(self, text: str) -> tuple[list[int], bool]:
        """Encodes a text, truncating it if necessary (but not any special tokens at its end).

        Also returns whether it was truncated.
        """
        return self.marks.around(self.ids(text), self.max_length)


class Example(NamedTuple):
    """A tokenised row of data."""

    texts: tuple[list[int], ...]
    learned: list[bool] = []  # noqa: RUF012 (never mutated)
    """Which tokens contribute to the loss. Empty if the task is about whole texts."""
    label: int | tuple[float, ...] | list[int] = 0
    """Depending on the task: a class index, a number for each label, or a class index per token."""
    was_cut: bool = False
    segments: list[int] = []  # noqa: RUF012
    """Each token's segment id, starting from 1. Only used if several texts are packed into a row."""


class Batch(NamedTuple):
    """A batch of examples, padded to equal length."""

    ids: Int[Array | np.ndarray, "examples texts tokens"]
    segments: Int[Array | np.ndarray, "examples texts tokens"]
    """Each token's segment id, starting from 1 because 0 means padding."""
    learned: Bool[Array | np.ndarray, "examples texts tokens"]
    """Which tokens contribute to the loss."""
    labels: Shaped[Array | np.ndarray, "examples *labels"]

    @property
    def seen(self) -> Bool[Array | np.ndarray, "*examples texts tokens"]:
        """False for padding."""
        return self.segments > 0


class Examples(NamedTuple):
    """The examples in a file, along with the number of modified or dropped rows."""

    examples: list[Example]
    cut: int
    """The number of truncated texts."""
    empty: int
    """The number of examples dropped because truncation left nothing to train on."""
    without_answer: int
    """The number of rows dropped because there was nothing to train on in the first place."""


def read_examples(path: Path, encode: Callable[[Mapping[str, Any]], Example | None]) -> Examples:
    """Reads a file with one JSON object per line, or a JSON array of objects. Empty lines are skipped.

    `encode` converts each object to an example, or returns None if truncation leaves nothing to train on.

    **Raises:** `FileNotFoundError` if the file doesn't exist. `FinetuneError` (naming the file and the line)
    if a line isn't a JSON object, or isn't suitable for the model.
    """
    examples: list[Example] = []
    empty = without_answer = 0
    with open_data(path) as file:
        for where, fields in _rows_of(path, file):
            if not isinstance(fields, dict):
                raise FinetuneError(f"{where}: expected a JSON object; found {json.dumps(fields)[:60]!r}")
            try:
                example = encode(fields)
            except ValueError as error:
                raise FinetuneError(f"{where}: {error}") from None
            if example is None:
                empty += 1
            elif example.learned and not any(example.learned):
                without_answer += 1
            else:
                examples.append(example)
    cut = sum(example.was_cut for example in examples) + empty
    return Examples(examples, cut, empty, without_answer)


_OTHER_FILES = {
    b"PAR1": "Parquet, which `datasets.load_dataset(...).to_json(...)` converts",
    b"\x1f\x8b": "compressed by gzip: use the output of `zcat`, for example as `--data -`",
    b"PK\x03\x04": "a ZIP archive: unpack it",
    b"(\xb5/\xfd": "compressed by zstd: use the output of `zstdcat`, for example as `--data -`",
}


def _rows_of(path: Path, file: io.BufferedIOBase) -> Iterator[tuple[str, Any]]:
    """Parses the rows of a file: either one per line, or a single JSON array.

    Also yields the location of each row, for error messages.
    """
    start = file.read(256)
    file.seek(0)
    if kind := next((x for magic, x in _OTHER_FILES.items() if start.startswith(magic)), None):
        raise FinetuneError(f"{path}: expected lines of JSON; the file is {kind}.")
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):  # UTF-8 files can begin with a mark
        rows = _from_json(str(path), file.read())
        yield from ((f"{path}, row {i}", row) for i, row in enumerate(rows, start=1))
        return
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _from_json(where, line)


def _from_json(where: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        # Its message counts the lines in `data`, but this may be just one line of the file.
        line = "" if error.lineno == 1 else f"line {error.lineno}, "
        raise FinetuneError(f"{where}: not JSON: {error.msg}, at {line}column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise FinetuneError(f"{where}: not JSON: {error}") from None


def length_for(examples: Sequence[Example], max_length: int) -> int:
    """Returns the length to pad to: a power of two, so as not to compile too many programs."""
    longest = max(len(ids) for example in examples for ids in example.texts)
    return min(max_length, max(LEAST_LENGTH, 1 << (longest - 1).bit_length()))


def collate(examples: Sequence[Example], max_length: int) -> Batch:
    """Collates examples into a batch, padded to `length_for(examples)`."""
    shape = (len(examples), len(examples[0].texts), length_for(examples, max_length))
    ids, segments, learned = (np.zeros(shape, dtype) for dtype in (np.int32, np.int32, bool))
    for i, example in enumerate(examples):
        for j, text in enumerate(example.texts):
            ids[i, j, : len(text)] = text
            segments[i, j, : len(text)] = example.segments or 1
            learned[i, j, : len(example.learned)] = example.learned
    each = [example.label for example in examples]
    labels = np.array([x + (shape[-1] - len(x)) * [0] if isinstance(x, list) else x for x in each])
    labels = labels.astype(np.float32 if labels.dtype.kind == "f" else np.int32)
    return Batch(ids, segments, learned, labels)


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Packs several texts into each row, using at most `length` tokens per row.

    Finding the smallest number of rows is too expensive, so this uses the best-fit decreasing heuristic. From
    longest to shortest, each text is added to the fullest row with enough space for it.
    """
    rows: list[list[Example]] = []
    free: list[tuple[int, int]] = []  # (room, index) of each row, sorted
    for example in sorted(examples, key=lambda example: -len(example.texts[0])):
        needed = len(example.texts[0])
        # `free` is sorted by remaining space, so this finds the fullest row with enough of it.
        at = bisect.bisect_left(free, (needed, -1))
        room, row = free.pop(at) if at < len(free) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(example)
        bisect.insort(free, (room - needed, row))
    return [_packed(row) for row in rows]


def _packed(texts: Sequence[Example]) -> Example:
    return Example(
        ([token for text in texts for token in text.texts[0]],),
        [token for text in texts for token in text.learned],
        was_cut=any(text.was_cut for text in texts),
        segments=[i for i, text in enumerate(texts, start=1) for _ in text.texts[0]],
    )


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Splits examples into a training set and a held-out set. Both stay in the original order.

    At least one example is held out, provided that there are several and that `share` isn't zero.
    """
    n = max(round(share * len(examples)), int(share > 0 and len(examples) > 1))
    chosen = set(np.random.default_rng(seed).permutation(len(examples))[:n].tolist())
    parts: tuple[list[Example], list[Example]] = ([], [])
    for i, example in enumerate(examples):
        parts[i in chosen].append(example)
    return parts


def chosen_for(batch: int, n: int, size: int, seed: int) -> Int[np.ndarray, " size"]:
    """Selects the examples of a batch. Each epoch is a new permutation, without any incomplete batch.

    There must be no state in here: if the result depends only on the arguments, then a stopped run can be
    resumed from anywhere.
    """
    epoch, at = divmod(batch, n // size)
    order = np.random.default_rng([seed, epoch + 1]).permutation(n)
    return order[at * size : (at + 1) * size]
