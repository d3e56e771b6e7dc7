"""A process of one side: `python -m benchmarks.rivals.worker '{"side": …}'`.

It tells in lines of JSON that it is ready, or what is missing. Then it runs once for each line that it reads,
and tells the seconds.
"""

import importlib
import json
import os
import pathlib
import sys
from typing import Any

from .files import Size


def main() -> None:
    job = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):  # before the libraries count the cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["cores"]])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too

    def tell(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    side = importlib.import_module(f"benchmarks.rivals.{job['side']}")
    try:
        make = getattr(side, job["function"])
        run = make(pathlib.Path(job["folder"]), Size(*job["size"]), job["cores"], **job["options"])
    except ModuleNotFoundError as error:
        tell(missing=f"{error.name} is not installed: pip install 'quaxlike[rivals]'")
        return
    tell(ready=True)
    for _ in sys.stdin:
        tell(seconds=run())


if __name__ == "__main__":
    main()
