"""The tokeniser of a GGUF file as `tokenizer.json`, which the package `tokenizers` reads.

Source: the tokenisers of llama.cpp, <https://github.com/ggml-org/llama.cpp>, `src/llama-vocab.cpp`.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import complain, quoted

_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_THREE_DIGITS = (rf"{_CONTRACTED}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",)
_ONE_DIGIT = (rf"{_CONTRACTED}|{_LETTERS}|\p{{N}}|{_REST}",)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*")


def _cased(ending: str, digits: str) -> tuple[str, ...]:
    word = r"[^\r\n\p{L}\p{N}]?"
    return (f"{word}{_UPPER}*{_LOWER}+{ending}|{word}{_UPPER}+{_LOWER}*{ending}|{digits}|{_SLASHED}",)


#: How text is split before pairs are merged, by `tokenizer.ggml.pre`; the usual name first.
PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), (GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _ONE_DIGIT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("gpt-4o", "llama4"), _cased(f"{_CONTRACTED}?", r"\p{N}{1,3}")),
    "tekken": _cased("", r"\p{N}"),
}
#: A split text that is a token stays one, whatever the merges make of it; and texts begin with BOS unless the
#: file says otherwise.
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
#: The most characters of a token that others are merged to, which is cut in two at each place.
LONGEST = 1_024


def tokenizer_of(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of `tokenizer.json` for the vocabulary of a GGUF file.

    **Arguments:**

    - `path`: the name of the file in errors.
    - `metadata`: its keys and values: byte-level BPE ("gpt2") or SentencePiece ("llama").

    **Returns:** an object for `tokenizers.Tokenizer.from_str(json.dumps(…))`.

    **Raises:** `CheckpointError` for another kind of vocabulary, or an inconsistent one.
    """
    get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)
    bad = lambda key, problem: complain(path, f"tokenizer.ggml.{key}", problem)
    model, tokens = get("model"), get("tokens")
    if model not in ("gpt2", "llama"):
        raise bad(
            "model", f"'gpt2' and 'llama' can be read; found {quoted(model)}. Use a tokenizer.json instead"
        )
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise bad("tokens", "expected the texts of all tokens")
    kinds = get("token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise bad("token_type", f"expected one for each of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise bad("tokens", "two of them have the same text")
    special = (UNKNOWN, CONTROL)
    added = [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind in special,
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (*special, USER_DEFINED)
    ]  # fmt: skip
    parts = _byte_level(vocab, get, bad) if model == "gpt2" else _sentencepiece(vocab, kinds, get, bad)
    begins = get("add_bos_token", model == "llama" or get("pre") in IGNORE_MERGES)
    ends = get("add_eos_token", False)
    around = [_token(tokens, get(f"{name}_token_id"), name, bad) for name, there in
              (("bos", begins), ("eos", ends)) if there]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        **parts, "post_processor": _template(around, bool(begins)) if around else None,
    }  # fmt: skip


def _byte_level(vocab: dict[str, int], get: Any, bad: Any) -> dict[str, Any]:
    merges, pre = get("merges"), get("pre", "absent")
    if not isinstance(merges, list) or not all(isinstance(m, str) and m.count(" ") == 1 for m in merges):
        raise bad("merges", "expected pairs of tokens, with a space between them")
    pairs = [merge.split(" ") for merge in merges]
    strangers = [pair for pair in pairs if not {*pair, "".join(pair)} <= vocab.keys()]
    if strangers:
        raise bad("merges", f"{quoted(strangers[0])} are not two tokens that form a third")
    if not isinstance(pre, str) or pre not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise bad(
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


def _sentencepiece(vocab: dict[str, int], kinds: list[Any], get: Any, bad: Any) -> dict[str, Any]:
    """Merges in the order of scores: the neighbours whose union scores highest are merged first."""
    scores = get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise bad("scores", f"expected one for each of {len(vocab)} tokens")
    if not all(type(score) in (int, float) for score in scores):
        raise bad("scores", "expected numbers")
    plain = {token: i for token, i in vocab.items() if kinds[i] not in (UNKNOWN, CONTROL, BYTE)}
    if long := next((token for token in plain if len(token) > LONGEST), None):
        problem = f"number {plain[long]} has {len(long):,} characters; at most {LONGEST:,} can be merged"
        raise bad("tokens", problem)
    lengths = set(map(len, plain))
    order = sorted((token for token in plain if len(token) > 1), key=lambda token: -scores[plain[token]])
    pairs = [
        [token[:cut], token[cut:]]
        for token in order
        for cut in range(1, len(token))
        if cut in lengths and len(token) - cut in lengths and token[:cut] in plain and token[cut:] in plain
    ]
    prefix = get("add_space_prefix", True)
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


def _token(tokens: list[str], i: Any, name: str, bad: Any) -> tuple[str, int]:
    if type(i) is not int or not 0 <= i < len(tokens):
        raise bad(f"{name}_token_id", f"expected one of {len(tokens)} tokens; found {quoted(i)}")
    return tokens[i], i


def _template(around: list[tuple[str, int]], begins: bool) -> dict[str, Any]:
    """The template of one or two texts, each with a token before it, after it, or both."""
    special = lambda token, kind: {"SpecialToken": {"id": token, "type_id": kind}}

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
