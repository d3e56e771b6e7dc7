"""Conversion from a checkpoint's tokeniser to GGUF metadata.

This follows `conversion/base.py` in <https://github.com/ggml-org/llama.cpp>. However, their converter copies
scores from SentencePiece's model file, whereas we recover them from the merge order, derived from these
scores by SentencePiece. See `tokenizer.py` for the opposite direction.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files.errors import CheckpointError, file_error, quoted
from ...files.json_text import read_json_file
from ..families import FAMILIES
from ..folders.added_tokens import completed
from .tokenizer import (
    BYTE,
    CONTROL,
    GPT2,
    IGNORE_MERGES,
    LINES,
    LONGEST,
    PATTERNS,
    UNKNOWN,
    USER_DEFINED,
    line_breaks_apart,
)

_NORMAL, _UNUSED = 1, 5
_UNREACHABLE = -1000.0  # from llama.cpp's converter, for tokens not created by merges
# Maps transformers' names of special tokens to llama.cpp's. (For end-of-text, see `ends_in_vocabulary`.)
_SPECIAL = {"bos": "bos", "unk": "unknown", "pad": "padding"}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def vocabulary_of(
    folder: Path,
    config: Mapping[str, Any],
    rows: int,
    templates: Mapping[str, str],
    special: Mapping[str, str],
) -> dict[str, Any]:
    """Converts a checkpoint's tokeniser, chat templates and name to GGUF metadata.

    This excludes end-of-text tokens; see `ends_in_vocabulary`. GGUF requires a token for each of the
    embedding's `rows`, so we pad the vocabulary with unused tokens.

    **Raises:** `FileNotFoundError` if there is no `tokenizer.json`. `CheckpointError` if it is damaged, or if
    llama.cpp would tokenise differently.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}, which GGUF takes the tokeniser from.")
    described = completed(folder, read_json_file(path, "the tokeniser"))
    vocab, merges = _model(path, described)
    tokens, kinds, added = _tokens(path, described, vocab, rows)
    around_texts = _around(path, described.get("post_processor"))
    if described["model"].get("byte_fallback"):
        _mark_kinds(described, vocab, {a + b for a, b in merges}, tokens, kinds, added)
        is_merged = around_texts[0] and _vocabulary(config) == "gemma4"
        keys = _merged_keys(described, vocab, merges) if is_merged else {}
        keys = keys or _sentencepiece_keys(path, described, vocab, merges, tokens, kinds)
    else:
        merged = [" ".join(pair) for pair in merges]
        keys = {"model": "gpt2", "pre": _split_by(path, described), "merges": merged}
    ids = {token: i for i, token in enumerate(tokens)}
    marks = zip(("bos", "eos"), around_texts, strict=True)
    around = {kind: _number(path, ids, token) for kind, token in marks if token}
    keys |= {"tokens": tokens, "token_type": kinds} | _special(folder, config, ids, special, around)
    keys |= {f"add_{kind}_token": kind in around for kind in ("bos", "eos")}
    strips = any(token.get("rstrip") for token in described.get("added_tokens") or ())
    name = _name(folder, config, strips)
    named = {f".{name}": text for name, text in templates.items() if name != "default"}
    texts = {"": templates["default"], **named} if "default" in templates else named
    texts = {name: _with_tokens(text, special) for name, text in texts.items()}
    out = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    out |= {f"tokenizer.chat_template{name}": text for name, text in texts.items()}
    out |= {} if name is None else {"general.name": name}
    return out | ({"tokenizer.chat_templates": [name[1:] for name in named]} if named else {})


def _with_tokens(template: str, special: Mapping[str, str]) -> str:
    """Defines a template's special tokens at its start: llama.cpp only knows two of them.

    Each definition has its own line, absent from the rendered text.
    """
    words = {*re.findall(r"\w+", template)} - {"bos_token", "eos_token"}
    used = [name for name in special if name in words]
    lines = (f"{{% set {name} = {json.dumps(special[name], ensure_ascii=False)} %}}\n" for name in used)
    return "".join(lines) + template


def _name(folder: Path, config: Mapping[str, Any], strips: bool) -> str | None:
    """Chooses the model's name. llama.cpp looks for "phi-3" in it.

    If it is found, then tokens absorb any whitespace after them (`rstrip`), and models with any other
    architecture fail to load.
    """
    name = folder.resolve().name
    named = any(word in name.lower() for word in ("phi-3", "phi3"))
    if strips and config.get("model_type") != "phi3":
        problem = "tokens have rstrip=true; llama.cpp keeps the text around tokens, but for those of Phi-3"
        raise file_error(folder / "tokenizer.json", "added_tokens", problem)
    if strips:
        return name if named else f"Phi-3 {name}"
    return None if named else name


def _model(path: Path, described: Mapping[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Reads the vocabulary, and the merges in order."""
    model = described.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise file_error(path, "model", f"GGUF is written for 'BPE'; found {quoted(kind)}")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise file_error(path, "vocab", "expected the numbers of tokens by their texts")
    pairs = [_merge(merge) for merge in merges] if isinstance(merges, list) else [None]
    if None in pairs:
        raise file_error(path, "merges", "expected pairs of tokens")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise file_error(path, option, f"llama.cpp does without; found {quoted(model[option])}")
    return vocab, [pair for pair in pairs if pair is not None]


def _merge(merge: Any) -> tuple[str, str] | None:
    """Parses a merge, i.e. a pair of tokens or a space-separated string. Returns None if it is neither."""
    match merge.split(" ") if isinstance(merge, str) else merge:
        case [str(first), str(second)]:
            return first, second
    return None


def _tokens(
    path: Path, described: Mapping[str, Any], vocab: Mapping[str, int], rows: int
) -> tuple[list[str], list[int], dict[str, int]]:
    """Returns every token's text and kind, along with the IDs of added tokens."""
    texts: dict[int, str] = {}
    kinds: dict[int, int] = {}
    added: dict[str, int] = {}
    for text, i in vocab.items():
        if i >= rows or i in texts:
            problem = f"has the number of {texts[i]!r}" if i in texts else f"the embedding has {rows} rows"
            raise file_error(path, "vocab", f"the token {quoted(text)} is number {i}: {problem}")
        texts[i], kinds[i] = text, _NORMAL
    found = described.get("added_tokens") or []
    if not isinstance(found, list):
        raise file_error(path, "added_tokens", f"expected a list; found {quoted(found)}")
    for token in found:
        match token:
            case {"id": int(i), "content": str(text)}:
                pass
            case _:
                raise file_error(
                    path, "added_tokens", f"expected tokens with id and content; found {quoted(token)}"
                )
        if flag := next((key for key in ("single_word", "lstrip") if token.get(key)), None):
            problem = f"{quoted(text)} has {flag}=true; llama.cpp keeps the text around tokens"
            raise file_error(path, "added_tokens", problem)
        if not 0 <= i < rows:  # the embedding has no such row, so this token is never used
            continue
        if texts.get(i, text) != text or vocab.get(text, i) != i or added.get(text, i) != i:
            raise file_error(path, "added_tokens", f"{quoted(text)} is number {i}, which is another token's")
        texts[i], added[text] = text, i
        kinds[i] = CONTROL if token.get("special") else USER_DEFINED
    for i in range(rows):
        if i not in texts:
            texts[i], kinds[i] = f"[PAD{i}]", _UNUSED
    tokens = [texts[i] for i in range(rows)]
    if len(set(tokens)) < rows:
        raise file_error(path, "vocab", "a token has the text of one of the unused rows, such as '[PAD1]'")
    return tokens, [kinds[i] for i in range(rows)], added


def _split_by(path: Path, described: Mapping[str, Any]) -> str:
    """Finds llama.cpp's name for the pre-tokeniser. This splits the input before applying merges."""
    normal = described.get("normalizer")
    # llama.cpp doesn't normalise inputs, but this only matters for the few that aren't already NFC.
    if not isinstance(normal, dict | None) or (normal or {}).get("type", "NFC") != "NFC":
        raise file_error(path, "normalizer", f"llama.cpp does without any but NFC; found {quoted(normal)}")
    before = described.get("pre_tokenizer")
    regexes: list[str] = []
    for step in _steps(before, "pretokenizers"):
        match step:
            case {
                "type": "Split",
                "pattern": {"Regex": str(regex)},
                "behavior": "Isolated",
                "invert": False,
            } | {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Removed", "invert": True}:
                regexes.append(regex)
            case {"type": "Digits", "individual_digits": True}:
                regexes.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                regexes += [GPT2] if step.get("use_regex", True) else []
            case _:
                raise file_error(path, "pre_tokenizer", f"llama.cpp has nothing like {quoted(step)}")
    names = [name for name, patterns in PATTERNS.items() if patterns == tuple(regexes)]
    if not names:
        known = ", ".join({patterns: name for name, patterns in reversed(PATTERNS.items())}.values())
        raise file_error(
            path,
            "pre_tokenizer",
            f"splits texts in a way that is not known of llama.cpp; known are those of {known}. Found "
            f"{quoted(regexes)}",
        )
    ignores = bool(described["model"].get("ignore_merges"))
    # Several names can share the same expressions, differing only in whether they ignore merges.
    return next((name for name in names if (name in IGNORE_MERGES) == ignores), names[0])


def _vocabulary(config: Mapping[str, Any]) -> str:
    known = (family.gguf for family in FAMILIES.values() if family.gguf)
    return next((gguf.vocabulary for gguf in known if gguf.model_type == config.get("model_type")), "")


def _mark_kinds(
    described: Mapping[str, Any],
    vocab: Mapping[str, int],
    made: set[str],
    tokens: list[str],
    kinds: list[int],
    added: Mapping[str, int],
) -> None:
    """Marks bytes and the unknown token in `kinds`, given the tokens `made` by merges."""
    for i, token in enumerate(tokens):
        if _BYTE_TOKEN.fullmatch(token) and kinds[i] == _NORMAL:
            kinds[i] = BYTE
        elif token in added and token in made and "▁" in token:
            # An added token for whitespace, also created by a merge.
            kinds[i] = _NORMAL
    unknown = described["model"].get("unk_token")
    if isinstance(unknown, str) and unknown in vocab:
        kinds[vocab[unknown]] = UNKNOWN


def _merged_keys(
    described: Mapping[str, Any], vocab: Mapping[str, int], merges: list[tuple[str, str]]
) -> dict[str, Any]:
    """Returns the keys of a "gemma4" vocabulary, or `{}` if llama.cpp would then split texts differently."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    before = described.get("pre_tokenizer")
    is_whole = before in (None, LINES) or before.get("pattern") == {"String": " "}
    mixed = any("\n" in a + b and (a + b).strip("\n") for a, b in merges) and before != LINES
    if not is_whole or mixed or _steps(described.get("normalizer"), "normalizers") != [space]:
        return {}
    if any(" " in a + b for a, b in merges) or line_breaks_apart(vocab, merges):
        return {}
    merged = [" ".join(pair) for pair in merges]
    return {"model": "gemma4", "merges": merged, "add_space_prefix": False}


def _sentencepiece_keys(
    path: Path,
    described: Mapping[str, Any],
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    tokens: list[str],
    kinds: list[int],
) -> dict[str, Any]:
    """Returns the keys of a "llama" vocabulary, with scores decreasing in merge order."""
    rank: dict[str, int] = {}
    for a, b in merges:
        rank.setdefault(a + b, len(rank))
    _check_merges(path, vocab, merges, {text for text in vocab if kinds[vocab[text]] == _NORMAL})
    scores = [-float(rank[token]) if token in rank else _UNREACHABLE * len(tokens) for token in tokens]
    prefix = _space_prefix(path, described)
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}


def _check_merges(
    path: Path, vocab: Mapping[str, int], merges: list[tuple[str, str]], plain: set[str]
) -> None:
    """Checks that llama.cpp would merge the same pairs.

    This isn't always the case: for this kind of vocabulary, llama.cpp stores no merges, but merges any pair
    of tokens forming another token.
    """
    if long := next((text for text in vocab if len(text) > LONGEST), None):
        raise file_error(
            path, "vocab", f"number {vocab[long]} has {len(long):,} characters; at most {LONGEST:,} fit"
        )
    if stranger := next(((a, b) for a, b in merges if not {a, b, a + b} <= vocab.keys()), None):
        raise file_error(path, "merges", f"{quoted(list(stranger))} are not two tokens that form a third")
    pairs = set(merges)
    for text in plain:
        for cut in range(1, len(text)):
            pair = text[:cut], text[cut:]
            if pair[0] in vocab and pair[1] in vocab and pair not in pairs:
                problem = f"{quoted(list(pair))} are not merged, and llama.cpp would merge them to a token"
                raise file_error(path, "merges", problem)


def _space_prefix(path: Path, described: Mapping[str, Any]) -> bool:
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normal, before = described.get("normalizer"), described.get("pre_tokenizer")
    match _steps(normal, "normalizers"), before:
        case [{"type": "Prepend", "prepend": "▁"}, last], None if last == space:
            return True
        case [only], None | {"type": "Split", "pattern": {"String": " "}} if only == space:
            return False
        case [None], {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always" | "never" as scheme,
        } if not before.get("split", True):
            return scheme == "always"
    found = f"normalizer={quoted(normal)}, pre_tokenizer={quoted(before)}"
    raise file_error(path, None, f"llama.cpp has no such treatment of spaces: {found}")


def _around(path: Path, processor: Any) -> tuple[str | None, str | None]:
    begins = ends = None
    for step in _steps(processor, "processors"):
        match step:
            case None | {"type": "ByteLevel"}:
                continue
            case {"type": "TemplateProcessing", "single": list(parts)}:
                pass
            case _:
                raise file_error(path, "post_processor", f"llama.cpp has nothing like {quoted(step)}")
        match parts:
            case [
                {"SpecialToken": {"id": str(begins)}},
                {"Sequence": _},
                {"SpecialToken": {"id": str(ends)}},
            ]:
                ...
            case [{"SpecialToken": {"id": str(begins)}}, {"Sequence": _}]:
                ...
            case [{"Sequence": _}, {"SpecialToken": {"id": str(ends)}}]:
                ...
            case [{"Sequence": _}]:
                ...
            case _:
                problem = f"llama.cpp puts one token before a text, and one after it; found {quoted(parts)}"
                raise file_error(path, "post_processor", problem)
    return begins, ends


def _steps(described: Any, name: str) -> list[Any]:
    """Returns a sequence's steps, treating a single step as a sequence of length one."""
    steps = described.get(name, described) if isinstance(described, dict) else described
    return steps if isinstance(steps, list) else [steps]


def _number(path: Path, ids: Mapping[str, int], token: str) -> int:
    if token not in ids:
        raise file_error(path, None, f"has no token {quoted(token)}, which is a special one")
    return ids[token]


def _special(
    folder: Path,
    config: Mapping[str, Any],
    ids: Mapping[str, int],
    named: Mapping[str, str],
    around: Mapping[str, int],
) -> dict[str, int]:
    """Finds the special tokens.

    Several files can specify these. The post-processor has priority over the tokeniser's configuration, and
    either over the model configuration.
    """
    found = {"eos": around["eos"]} if "eos" in around else {}
    for ours, theirs in _SPECIAL.items():
        token, number = named.get(f"{ours}_token"), config.get(f"{ours}_token_id")
        if ours in around:
            found[theirs] = around[ours]
        elif token is not None:
            found[theirs] = _number(folder / "tokenizer_config.json", ids, token)
        elif type(number) is int and 0 <= number < len(ids):
            found[theirs] = number
    return {f"{name}_token_id": number for name, number in found.items()}


def ends_in_vocabulary(
    folder: Path,
    vocabulary: Mapping[str, Any],
    eos_token: str | None,
    ends: Sequence[int],
    answer: Sequence[int],
) -> dict[str, int]:
    """Chooses the metadata for end-of-text tokens. llama.cpp stops generating at any of these.

    `vocabulary` is the output of `vocabulary_of`, `ends` are the end-of-text tokens, and `answer` contains
    the chat template's token after each answer, if any.

    llama.cpp also uses the `eos` token for two other purposes: it can be appended to inputs, and is available
    to chat templates as `eos_token`. If a template uses this, then the `eos` token must be the tokeniser's
    own.

    **Raises:** `CheckpointError` if there are more end-of-text tokens than available keys.
    """
    tokens = vocabulary["tokenizer.ggml.tokens"]
    if out := next((end for end in ends if end >= len(tokens)), None):
        raise CheckpointError(
            f"{folder} has {out} among the tokens that end a text, of {len(tokens)} tokens."
        )
    if eos_token is not None and eos_token not in tokens:
        raise file_error(folder / "tokenizer_config.json", None, f"has no token {quoted(eos_token)}")
    own = None if eos_token is None else tokens.index(eos_token)
    templates = (text for key, text in vocabulary.items() if key.startswith("tokenizer.chat_template"))
    keeps = own in ends or any("eos_token" in text for text in templates)
    first = own if own is not None and keeps else next(iter(ends), None)
    first = vocabulary.get("tokenizer.ggml.eos_token_id", first)
    others = [end for end in ends if end != first]
    if len(others) > 2:
        raise CheckpointError(f"{folder} has {len(ends)} tokens that end a text; GGUF has keys for three.")
    others = list(dict.fromkeys([*(x for x in answer if x != first), *others]))
    if len(others) > 2:
        others = [end for end in others if end in ends]
    found = {"eos": first} if first is not None else {}
    found |= zip(("eot", "eom"), others, strict=False)
    return {f"tokenizer.ggml.{name}_token_id": number for name, number in found.items()}
