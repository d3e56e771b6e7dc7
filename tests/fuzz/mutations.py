"""Changes of one file of a folder: of bytes, of an entry of its JSON, of its header, of a whole tensor."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quaxlike.lm.gguf.metadata import MAGIC, Cursor, encode_text, encode_value, read_value
from tests.fuzz import tensors

# What stands for a value that was changed.
OTHERS = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        10**6,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**63 - 1,
        2**63,
        10**400,
        0.5,
        float("nan"),
        float("inf"),
        1e308,
    ),
    *("", "(", "(.*)*!", "nf4", "\ud800", "x" * 1000),
    *([], [1], ["a"], {}, {"a": 1}, [[]] * 50),
)

_NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def change_bytes(raw: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, taken out or put in, often near the beginning, where headers are."""
    out = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 8))):
        reach = min(len(out), draw.choice((64, 400, 4000, len(out))))
        at = draw.randrange(reach + 1)
        match draw.randrange(4):
            case 0 if at < len(out):
                out[at] = draw.randrange(256)
            case 1:
                del out[at : at + draw.choice((1, 2, 8, 1000))]
            case 2:
                out[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
            case _:
                out[at : at + 8] = draw.choice(_NUMBERS).to_bytes(8, "little")
    return bytes(out)


def change_tree(node: Any, draw: random.Random) -> Any:
    """The tree with one of its values, or one of its names, changed."""
    if isinstance(node, dict) and node and draw.random() < 0.9:
        name = draw.choice(list(node))
        if draw.random() < 0.1:
            return {key: value for key, value in node.items() if key != name}
        return node | {name: change_tree(node[name], draw)}
    if isinstance(node, list) and node and draw.random() < 0.7:
        at = draw.randrange(len(node))
        return [*node[:at], change_tree(node[at], draw), *node[at + 1 :]]
    return draw.choice(OTHERS)


def _change_json(raw: bytes, draw: random.Random) -> bytes:
    return json.dumps(change_tree(json.loads(raw), draw)).encode()


def _change_line(raw: bytes, draw: random.Random) -> bytes:
    lines = raw.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = _change_json(lines[at], draw)
    return b"\n".join([*lines, b""])


def _change_safetensors(raw: bytes, draw: random.Random) -> bytes:
    """An entry of the header changed, or one of the JSON texts in its metadata."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    texts = {k: v for k, v in header.get("__metadata__", {}).items() if v.startswith("{")}
    if texts and draw.random() < 0.5:
        name = draw.choice(list(texts))
        header["__metadata__"][name] = json.dumps(change_tree(json.loads(texts[name]), draw))
    else:
        header = change_tree(header, draw)
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + raw[8 + length :]


def _change_gguf(path: Path, draw: random.Random) -> bytes:
    """A key or a value of the metadata changed; the tensors follow as they are."""
    raw = path.read_bytes()
    with open(path, "rb") as file:
        cursor = Cursor(path, file, len(raw))
        cursor.take(8)
        count, keys = cursor.number("<u8"), cursor.number("<u8")
        metadata = {cursor.text(): read_value(cursor) for _ in range(keys)}
        infos = cursor.at
        for _ in range(count):
            cursor.text()
            cursor.take(8 * cursor.number("<u4") + 12)
        described = raw[infos : cursor.at]
        data = raw[-(-cursor.at // 32) * 32 :]
    changed = change_tree(metadata, draw)
    entries = []
    for key, value in changed.items() if isinstance(changed, dict) else ():
        try:
            entries.append(encode_text(key) + encode_value(value))
        except (TypeError, OverflowError, UnicodeEncodeError, struct.error):
            continue  # there is no such value
    head = MAGIC + struct.pack("<IQQ", 3, count, len(entries)) + b"".join(entries) + described
    return head + bytes(-len(head) % 32) + data


_BY_SUFFIX: dict[str, Callable[[Path, random.Random], bytes]] = {
    ".json": lambda path, draw: _change_json(path.read_bytes(), draw),
    ".jsonl": lambda path, draw: _change_line(path.read_bytes(), draw),
    ".safetensors": lambda path, draw: _change_safetensors(path.read_bytes(), draw),
    ".gguf": _change_gguf,
    ".jinja": lambda path, draw: change_bytes(path.read_bytes(), draw),
}
SUFFIXES = tuple(_BY_SUFFIX)


#: Tensors whose presence alone says that a model has them: one without is another model.
_TOLD_BY_PRESENCE = ("output.weight", "rope_freqs.weight")


def change_tensor(path: Path, draw: random.Random) -> str:
    """Takes a tensor out of a file, or gives it another shape; the file, and its index, stay consistent."""
    stored = tensors.read(path)
    name = draw.choice([name for name in stored.tensors if name not in _TOLD_BY_PRESENCE])
    shapes = tensors.other_shapes(stored.tensors[name])
    others, what = dict(stored.tensors), "removed"
    if shapes and draw.random() < 0.5:
        what = draw.choice(sorted(shapes))
        others[name] = shapes[what]
    else:
        del others[name]
        index = path.parent / "model.safetensors.index.json"
        if index.exists():
            listed = json.loads(index.read_text())
            listed["weight_map"].pop(name)
            index.write_text(json.dumps(listed))
    tensors.write(path, stored._replace(tensors=others))
    return f"{name}: {what}"


class Mutation(NamedTuple):
    """What was done, and whether that is a change that a reader can notice."""

    done: str
    noticeable: bool


def mutate(folder: Path, draw: random.Random) -> Mutation:
    """Changes one file of a folder."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES))
    if path.suffix in (".safetensors", ".gguf") and draw.randrange(2) == 0:
        return Mutation(f"{path.name}, {change_tensor(path, draw)}", True)
    if draw.randrange(3) == 0:
        path.write_bytes(change_bytes(path.read_bytes(), draw))
        return Mutation(f"{path.name}, bytes", False)
    path.write_bytes(_BY_SUFFIX[path.suffix](path, draw))
    return Mutation(f"{path.name}, an entry", False)
