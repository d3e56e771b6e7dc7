"""Kills a writer, and looks at what it leaves."""

import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.kills.writers import WRITERS


def _go_on(name: str, folder: Path, first: int, told: Any) -> None:
    """What the process that is killed does."""
    n = first
    while True:
        WRITERS[name].write(folder, n)
        told.value = n
        n += 1


def kills(name: str, count: int, seed: int = 0) -> list[str]:
    """Kills a writer so many times; what is wrong with what it leaves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kills.writers"])  # so that each process need not import JAX
    writer, draw, problems = WRITERS[name], random.Random(f"{name} {seed}"), []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "files")
        folder.mkdir()
        writer.write(folder, 1)
        undisturbed = _files(folder)
        last = 1
        for i in range(count):
            told = context.Value("q", last)
            child = context.Process(target=_go_on, args=(name, folder, last + 1, told), daemon=True)
            start = time.monotonic()
            child.start()
            while told.value < last + 2:  # the second is written as fast as all that follow
                if not child.is_alive():
                    return [*problems, f"{name}: the writer ended by itself, with status {child.exitcode}"]
                time.sleep(0.001)
            each = (time.monotonic() - start) / 20
            time.sleep(draw.uniform(0, min(each, 0.2)))
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            finished = told.value
            try:
                found = writer.read(folder)
            except Exception as error:
                problems.append(f"{name}, kill {i}: {type(error).__name__}: {error}")
                found = {finished}
            if found not in ({finished}, {finished + 1}):
                problems.append(f"{name}, kill {i}: {finished} was finished; found parts of {sorted(found)}")
            last = max(found)
            writer.write(folder, last + 1)
            last += 1
            if (left := _files(folder)) != undisturbed:
                problems.append(f"{name}, kill {i}: left {sorted(left ^ undisturbed)} behind")
    return problems


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
