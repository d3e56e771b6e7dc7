"""`python -m tests.kills`: writers are killed at random moments."""

import argparse
import functools

from tests.kills.kill import kills
from tests.kills.runs import interrupts_of_runs, kills_of_runs
from tests.kills.writers import WRITERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=60, help="of each writer (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    runs = {"finetune": kills_of_runs, "interrupts": interrupts_of_runs}
    names = [*WRITERS, *runs]
    parser.add_argument("--writers", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    found = []
    for name in arguments.writers:
        every = runs[name] if name in runs else functools.partial(kills, name)
        problems = every(arguments.kills, arguments.seed)
        print(
            f"{name:20} {arguments.kills} kills, {len(problems)} problems",
            *problems,
            sep="\n    ",
            flush=True,
        )
        found += problems
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
