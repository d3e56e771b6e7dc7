"""`python -m tests.fuzz`: readers meet mutated files, public functions wrong arguments.

Nothing but the library's own errors may come out, within seconds, and without memory beyond the file's.
"""

import argparse
import collections
import functools
import json
import random
import shutil
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

import quaxlike as ql
from quaxlike import interop
from quaxlike.interop import CheckpointError, bitsandbytes, peft
from quaxlike.interop.tensors import open_tensors
from quaxlike.models import UnsupportedConfigError
from tests.fixtures import fixture

OWN = (CheckpointError, UnsupportedConfigError, FileNotFoundError)
MOST_SECONDS = 5.0
SLACK = 32 << 20  # bytes that the machinery takes whatever the file is


class Reader(NamedTuple):
    """A reader and the folder, or the file in a folder, that it reads."""

    read: Callable[[Path], Any]
    source: str


def _adapter(path: Path) -> Any:
    return peft.load_adapter(path, _base())


@functools.cache
def _base() -> dict[str, Any]:
    tensors = open_tensors(fixture("peft_llama/base"))
    return {name: jnp.asarray(array) for name, array in tensors.items()}


READERS = {
    "safetensors": Reader(lambda path: list(open_tensors(path).values()), "peft_llama/base"),
    "load": Reader(interop.load, "peft_llama/base"),
    "bitsandbytes": Reader(bitsandbytes.load, "qlora_llama_double/base4bit"),
    "models": Reader(ql.models.load, "peft_llama/base"),
    "adapter": Reader(_adapter, "peft_llama/adapters/qv"),
}
# What stands for a value of JSON that was changed.
_OTHERS = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf"), 1e308),
    *("", "(", "(.*)*!", "nf4", "\ud800", "x" * 1000),
    *([], [1], ["a"], {}, {"a": 1}, [[]] * 50),
)


def _mutated_bytes(raw: bytes, draw: random.Random) -> bytes:
    out = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(out) + 1) if draw.random() < 0.3 else draw.randrange(min(len(out), 400) + 1)
        match draw.randrange(4):
            case 0 if at < len(out):
                out[at] = draw.randrange(256)
            case 1:
                del out[at : at + draw.choice((1, 2, 8, 1000))]
            case 2:
                out[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
            case _:
                out[at : at + 8] = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return bytes(out)


def _mutated_json(node: Any, draw: random.Random) -> Any:
    """The tree with one of its values, or one of its names, changed."""
    if isinstance(node, dict) and node and draw.random() < 0.9:
        name = draw.choice(list(node))
        if draw.random() < 0.1:
            return {key: value for key, value in node.items() if key != name}
        return node | {name: _mutated_json(node[name], draw)}
    if isinstance(node, list) and node and draw.random() < 0.7:
        at = draw.randrange(len(node))
        return [*node[:at], _mutated_json(node[at], draw), *node[at + 1 :]]
    return draw.choice(_OTHERS)


def _mutated_header(raw: bytes, draw: random.Random) -> bytes:
    """A safetensors file with an entry of its header changed."""
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(_mutated_json(json.loads(raw[8 : 8 + length]), draw)).encode()
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def mutate(folder: Path, draw: random.Random) -> str:
    """Changes one file of a folder; tells what was done."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors"))
    path = draw.choice(files)
    raw, kind = path.read_bytes(), draw.randrange(3)
    if kind == 0:
        path.write_bytes(_mutated_bytes(raw, draw))
    elif path.suffix == ".safetensors":
        path.write_bytes(_mutated_header(raw, draw))
    else:
        path.write_text(json.dumps(_mutated_json(json.loads(raw), draw)))
    return f"{path.name}, {('bytes', 'an entry', 'an entry')[kind]}"


def small(source: str, folder: Path) -> Path:
    """A copy of the JSON and safetensors files of a fixture."""
    target = folder / "case"
    shutil.rmtree(target, ignore_errors=True)
    found = fixture(source)
    wanted = [path for path in found.iterdir() if path.suffix in (".json", ".safetensors")]
    target.mkdir()
    for path in wanted:
        shutil.copyfile(path, target / path.name)
    return target


def one(name: str, seed: int, folder: Path) -> str | None:
    """One mutated folder for one reader; what is wrong with what came out, or None."""
    reader, draw = READERS[name], random.Random(f"{name} {seed}")
    case = small(reader.source, folder)
    done = mutate(case, draw)
    size = sum(path.stat().st_size for path in case.rglob("*"))
    tracemalloc.start()
    start = time.process_time()  # a machine may be busy with other things
    problem = None
    try:
        reader.read(case)
    except OWN:
        pass
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {str(error)[:100]} at {Path(frame.filename).name}:{frame.lineno}"
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if problem is None and seconds > MOST_SECONDS:
        problem = f"took {seconds:.1f} s"
    if problem is None and peak > 3 * size + SLACK:
        problem = f"took {peak / 2**20:.0f} MiB for {size / 2**20:.1f} MiB of files"
    return None if problem is None else f"{name} {seed} ({done}): {problem}"


def warm_up(folder: Path) -> None:
    """Reads every fixture as it is: what is imported and compiled once belongs to no case."""
    for reader in READERS.values():
        reader.read(small(reader.source, folder))


def cases(first: int = 0) -> Iterator[tuple[str, int]]:
    """Readers in turn, each with the next seed."""
    seed = first
    while True:
        yield from ((name, seed) for name in READERS)
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        warm_up(Path(folder))
    end = time.monotonic() + 60 * arguments.minutes
    count: collections.Counter[str] = collections.Counter()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in cases(arguments.seed):
            if time.monotonic() > end:
                break
            count[name] += 1
            if (problem := one(name, seed, Path(folder))) is not None:
                place = problem.rpartition("): ")[2]
                if place not in found:
                    print(found.setdefault(place, problem), flush=True)
    for name, n in count.items():
        print(f"{name:14} {n:7,} files")
    print(f"{len(found)} findings")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
