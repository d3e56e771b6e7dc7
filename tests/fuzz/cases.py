"""A case: one mutated folder for one reader."""

import itertools
import random
import time
import traceback
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.fuzz.mutations import mutate
from tests.fuzz.readers import OWN, READERS

MOST_SECONDS = 5.0
SLACK = 32 << 20  # bytes that the machinery takes whatever the file is


def one(name: str, seed: int, folder: Path) -> str | None:
    """One mutated folder for one reader; what is wrong with what came out, or None."""
    reader, draw = READERS[name], random.Random(f"{name} {seed}")
    case = reader.prepare(seed, folder)
    done = mutate(case, draw)
    size = sum(path.stat().st_size for path in case.rglob("*"))
    tracemalloc.start()
    start = time.process_time()  # a machine may be busy with other things
    problem = None
    try:
        reader.read(case)
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
    return None if problem is None else f"{name} {seed} ({done}): {problem}"


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
