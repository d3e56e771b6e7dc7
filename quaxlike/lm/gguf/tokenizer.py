"""Conversion from a GGUF file's tokeniser to a `tokenizer.json`, as used by `tokenizers`.

This follows `src/llama-vocab.cpp` in <https://github.com/ggml-org/llama.cpp>. See `vocabulary.py` for the
opposite direction.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files.errors import CheckpointError, file_error, quoted

_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_THREE_DIGITS = (rf"{_CONTRACTED}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",)
_ONE_DIGIT = (rf"{_CONTRACTED}|{_LETTERS}|\p{{N}}|{_REST}",)
_WITH_MARKS = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    + _REST.replace(r"\p{L}\p{N}", r"\p{L}\p{M}\p{N}"),
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*")


def _cased(ending: str, digits: str) -> tuple[str, ...]:
    word = r"[^\r\n\p{L}\p{N}]?"
    return (f"{word}{_UPPER}*{_LOWER}+{ending}|{word}{_UPPER}+{_LOWER}*{ending}|{digits}|{_SLASHED}",)


#: Maps values of `tokenizer.ggml.pre` to the regular expressions splitting the input before merges. When
#: writing a file, the first name to fit is used.
PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), (GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _ONE_DIGIT),
    "qwen35": _WITH_MARKS,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("gpt-4o", "llama4"), _cased(f"{_CONTRACTED}?", r"\p{N}{1,3}")),
    "tekken": _cased("", r"\p{N}"),
}
#: These pre-tokenisers never split a piece that is itself a token, regardless of the merges. They also
#: prepend BOS by default.
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
#: How llama.cpp splits inputs before applying the merges of a "gemma4" vocabulary.
LINES = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}
#: The maximum length of a merged token. Each token is tried with a split at every position, which takes too
#: long for longer ones.
LONGEST = 1_024


def tokenizer_of(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the tokeniser in a GGUF file's metadata to a `tokenizer.json`.

    Load this with `tokenizers.Tokenizer.from_str(json.dumps(…))`. The supported vocabularies are byte-level
    BPE ("gpt2"), SentencePiece ("llama"), and SentencePiece with merges ("gemma4").

    **Raises:** `CheckpointError` for any other vocabulary, or if it is inconsistent.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    def damaged(key: str, problem: str) -> CheckpointError:
        return file_error(path, f"tokenizer.ggml.{key}", problem)

    model, tokens = get("model"), get("tokens")
    if model not in _READERS:
        known = ", ".join(_READERS)
        raise damaged("model", f"{known} can be read; found {quoted(model)}. Use a tokenizer.json instead")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise damaged("tokens", "expected the texts of all tokens")
    kinds = get("token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise damaged("token_type", f"expected one for each of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise damaged("tokens", "two of them have the same text")
    special = (UNKNOWN, CONTROL)
    added = [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind in special,
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (*special, USER_DEFINED)
    ]  # fmt: skip
    parts = _READERS[model](vocab, kinds, get, damaged)
    begins = get("add_bos_token", model == "llama" or get("pre") in IGNORE_MERGES) or model == "gemma4"
    ends = get("add_eos_token", False)
    names = [name for name, is_added in (("bos", begins), ("eos", ends)) if is_added]
    around = [_token(tokens, get(f"{name}_token_id"), name, damaged) for name in names]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        **parts, "post_processor": _template(around, bool(begins)) if around else None,
    }  # fmt: skip


def _pairs(vocab: dict[str, int], get: Any, damaged: Any) -> list[list[str]]:
    merges = get("merges")
    if not isinstance(merges, list) or not all(isinstance(m, str) and m.count(" ") == 1 for m in merges):
        raise damaged("merges", "expected pairs of tokens, with a space between them")
    pairs = [merge.split(" ") for merge in merges]
    strangers = [pair for pair in pairs if not {*pair, "".join(pair)} <= vocab.keys()]
    if strangers:
        raise damaged("merges", f"{quoted(strangers[0])} are not two tokens that form a third")
    return pairs


def _byte_level(vocab: dict[str, int], kinds: list[Any], get: Any, damaged: Any) -> dict[str, Any]:
    pairs, pre = _pairs(vocab, get, damaged), get("pre", "absent")
    if not isinstance(pre, str) or pre not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise damaged(
            "pre", f"{known} can be read; found {quoted(pre)}. Use the tokenizer.json of the model instead"
        )
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in PATTERNS[pre]
    ]
    model = _bpe(vocab, pairs, ignore_merges=pre in IGNORE_MERGES)
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": level,
        "model": model,
    }


def _sentencepiece(vocab: dict[str, int], kinds: list[Any], get: Any, damaged: Any) -> dict[str, Any]:
    """Recovers the merges from the scores.

    This is possible because llama.cpp always merges the pair forming the token with the highest score.
    """
    scores = get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise damaged("scores", f"expected one for each of {len(vocab)} tokens")
    if not all(type(score) in (int, float) for score in scores):
        raise damaged("scores", "expected numbers")
    plain = {token: i for token, i in vocab.items() if kinds[i] not in (UNKNOWN, CONTROL, BYTE)}
    if long := next((token for token in plain if len(token) > LONGEST), None):
        problem = f"number {plain[long]} has {len(long):,} characters; at most {LONGEST:,} can be merged"
        raise damaged("tokens", problem)
    lengths = set(map(len, plain))
    order = sorted((token for token in plain if len(token) > 1), key=lambda token: -scores[plain[token]])
    pairs = [
        [token[:cut], token[cut:]]
        for token in order
        for cut in range(1, len(token))
        if cut in lengths and len(token) - cut in lengths and token[:cut] in plain and token[cut:] in plain
    ]
    return _with_spaces(vocab, kinds, pairs, get("add_space_prefix", True))


def _merged(vocab: dict[str, int], kinds: list[Any], get: Any, damaged: Any) -> dict[str, Any]:
    pairs = _pairs(vocab, get, damaged)
    if split := line_breaks_apart(vocab, pairs):
        raise damaged("merges", f"do not form the token {quoted(split)}, which llama.cpp never splits")
    return {**_with_spaces(vocab, kinds, pairs, False), "pre_tokenizer": LINES}


_READERS: dict[Any, Any] = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _merged}


def line_breaks_apart(vocab: Mapping[str, int], merges: Sequence[Sequence[str]]) -> str | None:
    """Returns a token of several line breaks not formed by merges. llama.cpp never splits these."""
    rank = {(a, b): i for i, (a, b) in reversed([*enumerate(merges)])}
    for text in (text for text in vocab if len(text) > 1 and not text.strip("\n")):
        parts = list(text) if len(text) <= LONGEST else []
        while found := [(rank[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in rank]:
            _, i = min(found)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if parts != [text]:
            return text
    return None


def _with_spaces(
    vocab: dict[str, int], kinds: list[Any], pairs: list[list[str]], prefix: bool
) -> dict[str, Any]:
    """Describes a tokeniser replacing spaces by "▁", optionally with another one in front."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [{"type": "Prepend", "prepend": "▁"}, space] if prefix else [space]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = next((token for token, i in vocab.items() if kinds[i] == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    defaults = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {"type": "BPE", **defaults, **options, "vocab": vocab, "merges": merges}


def _token(tokens: list[str], i: Any, name: str, damaged: Any) -> tuple[str, int]:
    if type(i) is not int or not 0 <= i < len(tokens):
        raise damaged(f"{name}_token_id", f"expected one of {len(tokens)} tokens; found {quoted(i)}")
    return tokens[i], i


def _template(around: list[tuple[str, int]], begins: bool) -> dict[str, Any]:
    """Creates a template, for single inputs and for pairs, adding a token before or after each input."""

    def special(token: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def text(which: str, kind: int) -> list[Any]:
        before, after = (around[:1], around[1:]) if begins else ([], around)
        ours = {"Sequence": {"id": which, "type_id": kind}}
        return [*(special(t, kind) for t, _ in before), ours, *(special(t, kind) for t, _ in after)]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": list(itertools.chain(text("A", 0), text("B", 1))),
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in around},
    }
