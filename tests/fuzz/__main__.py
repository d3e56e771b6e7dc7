"""`python -m tests.fuzz`: readers meet mutated files; with --arguments, public functions wrong arguments.

Nothing but the library's own errors may come out, within seconds, and without memory beyond the file's. All
other tensors of a file with one missing, or of another shape, are read as they were.
"""

import argparse
import collections
import tempfile
import time
from pathlib import Path

from tests.fuzz.arguments import problems
from tests.fuzz.cases import cases, one, warm_up
from tests.fuzz.readers import READERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--files", type=int, help="ends after so many")
    parser.add_argument("--arguments", action="store_true", help="wrong arguments, about 7,000 of them")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=list(READERS), metavar="NAME")
    arguments = parser.parse_args()
    if arguments.arguments:
        return _meet_arguments()
    end = time.monotonic() + 60 * arguments.minutes
    count: collections.Counter[str] = collections.Counter()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        warm_up(arguments.readers, Path(folder))
        for name, seed in cases(arguments.readers, arguments.seed):
            if time.monotonic() > end or count.total() == arguments.files:
                break
            count[name] += 1
            if (problem := one(name, seed, Path(folder))) is not None:
                place = problem.rpartition("): ")[2]
                if place not in found:
                    print(found.setdefault(place, problem), flush=True)
    for name, n in count.items():
        print(f"{name:26} {n:7,} files")
    print(f"{count.total():,} files, {len(found)} findings; go on with --seed {seed}")
    return bool(found)


def _meet_arguments() -> int:
    with tempfile.TemporaryDirectory() as folder:
        number, found = problems(Path(folder))
    print(*found, f"{number:,} calls, {len(found)} findings", sep="\n")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
