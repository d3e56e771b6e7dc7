"""A case: one mutated folder for one reader."""

import functools
import itertools
import random
import time
import traceback
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import quaxlike as ql
from tests.fuzz.mutations import mutate
from tests.fuzz.readers import OWN, READERS

MOST_SECONDS = 5.0
SLACK = 32 << 20  # bytes that the machinery takes whatever the file is


def one(name: str, seed: int, folder: Path) -> str | None:
    """One mutated folder for one reader; what is wrong with what came out, or None."""
    reader, draw = READERS[name], random.Random(f"{name} {seed}")
    case = reader.prepare(seed, folder)
    done, noticeable = mutate(case, draw)
    found = None
    size = sum(path.stat().st_size for path in case.rglob("*"))
    tracemalloc.start()
    start = time.process_time()  # a machine may be busy with other things
    problem = None
    try:
        found = reader.read(case)
    except OWN:
        pass
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a library in Rust panics by another class than Exception
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {str(error)[:100]} at {Path(frame.filename).name}:{frame.lineno}"
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if problem is None and seconds > MOST_SECONDS:
        problem = f"took {seconds:.1f} s"
    if problem is None and peak > 3 * size + SLACK:
        problem = f"took {peak / 2**20:.0f} MiB for {size / 2**20:.1f} MiB of files"
    if problem is None and noticeable and found is not None:
        problem = _silent(_whole(name, seed % len(reader.sources), folder), found)
    return None if problem is None else f"{name} {seed} ({done}): {problem}"


@functools.cache
def _whole(name: str, source: int, folder: Path) -> Any:
    """What is read from a source as it is."""
    reader = READERS[name]
    return reader.read(reader.prepare(source, folder))


def _silent(whole: Any, found: Any) -> str | None:
    """What nobody can notice in what was read from a file with a tensor missing, or of another shape.

    Of weights by name, that one is missing, or has another shape, is noticed when they are used; of a model,
    nothing is.
    """
    if isinstance(whole, list):  # of arrays, without their names
        return None
    by_name = isinstance(whole, Mapping)
    before, after = (whole, found) if by_name else ({"": whole}, {"": found})
    if not after.keys() <= before.keys() or len(before) - len(after) > 1:
        return f"other names: {sorted(after.keys() ^ before.keys())[:3]}"
    for key, x in after.items():
        shapes = by_name and tuple(x.shape) != tuple(before[key].shape)
        if not shapes and not _agree(x, before[key]):
            return f"other values, silently: {key}"
    return None


def _agree(found: Any, expected: Any) -> bool:
    pairs = [[np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (found, expected)]
    same = lambda x, y: x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if len(pairs[0]) == len(pairs[1]) and all(map(same, *pairs)):
        return True
    return ql.is_value(found) and np.array_equal(
        *(np.asarray(ql.materialise(x)) for x in (found, expected)), equal_nan=True
    )


def warm_up(names: Iterable[str], folder: Path) -> None:
    """Reads every source as it is: what is imported and compiled once belongs to no case."""
    for name in names:
        reader = READERS[name]
        for i in range(len(reader.sources)):
            reader.read(reader.prepare(i, folder))


def cases(names: Iterable[str], first: int = 0) -> Iterator[tuple[str, int]]:
    """Readers in turn, each with the next seed."""
    names = tuple(names)
    for seed in itertools.count(first):
        yield from ((name, seed) for name in names)
