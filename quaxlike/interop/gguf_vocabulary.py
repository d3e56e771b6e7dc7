"""The tokeniser of a checkpoint as the metadata of a GGUF file: the inverse of `gguf_tokenizer`.

Source: the converter of llama.cpp, <https://github.com/ggml-org/llama.cpp>, `conversion/base.py`. It takes
scores from SentencePiece's own file; here they follow the order of the merges, which was made from them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, complain, quoted
from .gguf_tokenizer import BYTE, CONTROL, GPT2, IGNORE_MERGES, LONGEST, PATTERNS, UNKNOWN, USER_DEFINED
from .json_text import read_json_file
from .templates import read_templates

_NORMAL, _UNUSED = 1, 5
_UNREACHABLE = -1000.0  # the score of a token that no merge makes, as llama.cpp's converter has it
# Kinds of special tokens by their names in transformers.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def vocabulary_of(folder: Path, config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The name, the tokeniser and the chat templates of a checkpoint as keys and values of a GGUF file.

    **Arguments:**

    - `folder`: the checkpoint, with `tokenizer.json`.
    - `config`: its `config.json`, for special tokens that the tokeniser does not name.
    - `rows`: the number of rows of the embedding. Rows without a token get one that no text has.

    **Raises:** `FileNotFoundError` without `tokenizer.json`; `CheckpointError` for a tokeniser that is
    damaged, or that llama.cpp would not follow.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}, which GGUF takes the tokeniser from.")
    described = read_json_file(path, "the tokeniser")
    vocab, merges = _model(path, described)
    tokens, kinds, added = _tokens(path, described, vocab, rows)
    if described["model"].get("byte_fallback"):
        keys = _sentencepiece(path, described, vocab, merges, tokens, kinds, added)
    else:
        merged = [" ".join(pair) for pair in merges]
        keys = {"model": "gpt2", "pre": _split_by(path, described), "merges": merged}
    ids = {token: i for i, token in enumerate(tokens)}
    begins, ends = _around(path, described.get("post_processor"))
    around = {kind: _number(path, ids, token) for kind, token in (("bos", begins), ("eos", ends)) if token}
    keys |= {"tokens": tokens, "token_type": kinds} | _special(folder, config, ids, around)
    keys |= {"add_bos_token": begins is not None, "add_eos_token": ends is not None}
    strips = any(token.get("rstrip") for token in described.get("added_tokens") or ())
    name = _name(folder, config, strips)
    templates, _ = read_templates(folder)
    named = {f".{name}": text for name, text in templates.items() if name != "default"}
    texts = {"": templates["default"], **named} if "default" in templates else named
    out = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    out |= {f"tokenizer.chat_template{name}": text for name, text in texts.items()}
    out |= {} if name is None else {"general.name": name}
    return out | ({"tokenizer.chat_templates": [name[1:] for name in named]} if named else {})


def _name(folder: Path, config: Mapping[str, Any], strips: bool) -> str | None:
    """The name of the model. By it, llama.cpp decides whether tokens of Phi-3 take the spaces after them, and
    does not load other models of such a name."""
    name = folder.resolve().name
    named = any(word in name.lower() for word in ("phi-3", "phi3"))
    if strips and config.get("model_type") != "phi3":
        problem = "tokens have rstrip=true; llama.cpp keeps the text around tokens, but for those of Phi-3"
        raise complain(folder / "tokenizer.json", "added_tokens", problem)
    if strips:
        return name if named else f"Phi-3 {name}"
    return None if named else name


def _model(path: Path, described: Mapping[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The tokens of the model by their texts, and the pairs that are merged, in order."""
    model = described.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise complain(path, "model", f"GGUF is written for 'BPE'; found {quoted(kind)}")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise complain(path, "vocab", "expected the numbers of tokens by their texts")
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else m for m in merges if isinstance(m, str | list)] \
        if isinstance(merges, list) else []  # fmt: skip
    strings = (len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in pairs)
    if not isinstance(merges, list) or len(pairs) < len(merges) or not all(strings):
        raise complain(path, "merges", "expected pairs of tokens")
    if odd := next((name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
                    if model.get(name)), None):  # fmt: skip
        raise complain(path, odd, f"llama.cpp does without; found {quoted(model[odd])}")
    return vocab, [(a, b) for a, b in pairs]


def _tokens(
    path: Path, described: Mapping[str, Any], vocab: Mapping[str, int], rows: int
) -> tuple[list[str], list[int], dict[str, int]]:
    """The texts of all tokens and their kinds, and the numbers of those beside the model."""
    texts: dict[int, str] = {}
    kinds: dict[int, int] = {}
    added: dict[str, int] = {}
    for text, i in vocab.items():
        if i >= rows or i in texts:
            problem = f"has the number of {texts[i]!r}" if i in texts else f"the embedding has {rows} rows"
            raise complain(path, "vocab", f"the token {quoted(text)} is number {i}: {problem}")
        texts[i], kinds[i] = text, _NORMAL
    found = described.get("added_tokens") or []
    if not isinstance(found, list):
        raise complain(path, "added_tokens", f"expected a list; found {quoted(found)}")
    for token in found:
        match token:
            case {"id": int(i), "content": str(text)}:
                pass
            case _:
                raise complain(
                    path, "added_tokens", f"expected tokens with id and content; found {quoted(token)}"
                )
        if flag := next((key for key in ("single_word", "lstrip") if token.get(key)), None):
            problem = f"{quoted(text)} has {flag}=true; llama.cpp keeps the text around tokens"
            raise complain(path, "added_tokens", problem)
        if not 0 <= i < rows:  # the model has no embedding for it, and cannot take it
            continue
        if texts.get(i, text) != text or vocab.get(text, i) != i or added.get(text, i) != i:
            raise complain(path, "added_tokens", f"{quoted(text)} is number {i}, which is another token's")
        texts[i], added[text] = text, i
        kinds[i] = CONTROL if token.get("special") else USER_DEFINED
    for i in range(rows):
        if i not in texts:
            texts[i], kinds[i] = f"[PAD{i}]", _UNUSED
    tokens = [texts[i] for i in range(rows)]
    if len(set(tokens)) < rows:
        raise complain(path, "vocab", "a token has the text of one of the unused rows, such as '[PAD1]'")
    return tokens, [kinds[i] for i in range(rows)], added


def _split_by(path: Path, described: Mapping[str, Any]) -> str:
    """llama.cpp's name for the way in which texts are split before byte-level pairs are merged."""
    normal = described.get("normalizer")
    # llama.cpp has no normaliser here; texts are usually in NFC.
    if not isinstance(normal, dict | None) or (normal or {}).get("type", "NFC") != "NFC":
        raise complain(path, "normalizer", f"llama.cpp does without any but NFC; found {quoted(normal)}")
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
                raise complain(path, "pre_tokenizer", f"llama.cpp has nothing like {quoted(step)}")
    names = [name for name, patterns in PATTERNS.items() if patterns == tuple(regexes)]
    if not names:
        known = ", ".join({patterns: name for name, patterns in reversed(PATTERNS.items())}.values())
        raise complain(
            path,
            "pre_tokenizer",
            f"splits texts in a way that is not known of llama.cpp; known are those of {known}. Found "
            f"{quoted(regexes)}",
        )
    ignores = bool(described["model"].get("ignore_merges"))
    # If llama.cpp has both, the one that ignores merges too; otherwise merges make the same tokens.
    return next((name for name in names if (name in IGNORE_MERGES) == ignores), names[0])


def _sentencepiece(
    path: Path,
    described: Mapping[str, Any],
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    tokens: list[str],
    kinds: list[int],
    added: Mapping[str, int],
) -> dict[str, Any]:
    """Scores, which decrease in the order in which merges make tokens. Changes `kinds`."""
    rank: dict[str, int] = {}
    for a, b in merges:
        rank.setdefault(a + b, len(rank))
    for i, token in enumerate(tokens):
        if _BYTE_TOKEN.fullmatch(token) and kinds[i] == _NORMAL:
            kinds[i] = BYTE
        elif token in added and token in rank and "▁" in token:
            kinds[i] = _NORMAL  # it stands for spaces
    unknown = described["model"].get("unk_token")
    if isinstance(unknown, str) and unknown in vocab:
        kinds[vocab[unknown]] = UNKNOWN
    _check_merges(path, vocab, merges, {text for text in vocab if kinds[vocab[text]] == _NORMAL})
    scores = [-float(rank[token]) if token in rank else _UNREACHABLE * len(tokens) for token in tokens]
    prefix = _space_prefix(path, described)
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}


def _check_merges(
    path: Path, vocab: Mapping[str, int], merges: list[tuple[str, str]], plain: set[str]
) -> None:
    """Raises unless llama.cpp, which merges whatever neighbours are a token together, merges the same."""
    if long := next((text for text in vocab if len(text) > LONGEST), None):
        raise complain(
            path, "vocab", f"number {vocab[long]} has {len(long):,} characters; at most {LONGEST:,} fit"
        )
    if stranger := next(((a, b) for a, b in merges if not {a, b, a + b} <= vocab.keys()), None):
        raise complain(path, "merges", f"{quoted(list(stranger))} are not two tokens that form a third")
    pairs = set(merges)
    for text in plain:
        for cut in range(1, len(text)):
            pair = text[:cut], text[cut:]
            if pair[0] in vocab and pair[1] in vocab and pair not in pairs:
                problem = f"{quoted(list(pair))} are not merged, and llama.cpp would merge them to a token"
                raise complain(path, "merges", problem)


def _space_prefix(path: Path, described: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text."""
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
    raise complain(path, None, f"llama.cpp has no such treatment of spaces: {found}")


def _around(path: Path, processor: Any) -> tuple[str | None, str | None]:
    """The tokens before and after each text."""
    begins = ends = None
    for step in _steps(processor, "processors"):
        match step:
            case None | {"type": "ByteLevel"}:
                continue
            case {"type": "TemplateProcessing", "single": list(parts)}:
                pass
            case _:
                raise complain(path, "post_processor", f"llama.cpp has nothing like {quoted(step)}")
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
                raise complain(path, "post_processor", problem)
    return begins, ends


def _steps(described: Any, name: str) -> list[Any]:
    """The steps of a sequence, or the one that there is."""
    steps = described.get(name, described) if isinstance(described, dict) else described
    return steps if isinstance(steps, list) else [steps]


def _number(path: Path, ids: Mapping[str, int], token: str) -> int:
    if token not in ids:
        raise complain(path, None, f"has no token {quoted(token)}, which is a special one")
    return ids[token]


def _special(
    folder: Path, config: Mapping[str, Any], ids: Mapping[str, int], around: Mapping[str, int]
) -> dict[str, int]:
    """The special tokens: those around texts first, then those of the tokeniser, then of the model."""
    _, named = read_templates(folder)
    found: dict[str, int] = {}
    for ours, theirs in _SPECIAL.items():
        token, number = named.get(f"{ours}_token"), config.get(f"{ours}_token_id")
        if ours in around:
            found[theirs] = around[ours]
        elif token is not None:
            found[theirs] = _number(folder / "tokenizer_config.json", ids, token)
        elif type(number) is int and 0 <= number < len(ids):
            found[theirs] = number
    ends = _ends(folder, config, len(ids))
    if "eos" not in found and ends:
        found["eos"] = ends[0]
    others = [end for end in ends if end != found.get("eos")]
    if len(others) > 2:
        raise CheckpointError(f"{folder} has {len(ends)} tokens that end a text; GGUF has keys for three.")
    found |= zip(("eot", "eom"), others, strict=False)
    return {f"{name}_token_id": number for name, number in found.items()}


def _ends(folder: Path, config: Mapping[str, Any], size: int) -> list[int]:
    path = folder / "generation_config.json"
    settings = read_json_file(path, "the settings of generation") if path.is_file() else {}
    ends = config.get("eos_token_id") if settings.get("eos_token_id") is None else settings["eos_token_id"]
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int and 0 <= end < size for end in ends):
        raise CheckpointError(f"{folder} has eos_token_id={quoted(ends)}; expected the numbers of tokens.")
    return ends
