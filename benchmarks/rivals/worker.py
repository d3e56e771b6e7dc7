"""A process of one side: `python -m benchmarks.rivals.worker CORES`.

Each line that it reads is a job to prepare, in JSON, or `null`: then it runs the last one. It tells, in lines
of JSON, that a job is ready or what it lacks, and the seconds of a run.
"""

import importlib
import json
import os
import pathlib
import sys
from typing import Any

from .files import Size


def main() -> None:
    cores = int(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):  # before the libraries count the cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too

    def tell(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    run: Any = None
    for line in sys.stdin:
        job = json.loads(line)
        if job is None:
            tell(seconds=run())
            continue
        make = getattr(importlib.import_module(f"benchmarks.rivals.{job['side']}"), job["function"])
        try:
            run = make(pathlib.Path(job["folder"]), Size(*job["size"]), cores, **job["options"])
            tell(ready=True)
        except ModuleNotFoundError as error:
            tell(missing=f"{error.name} is not installed: pip install 'quaxlike[rivals]'")


if __name__ == "__main__":
    main()
