"""`python -m tests.differential --minutes 60 --jobs 2`: hunts for programs that differ on Values."""

import argparse
import concurrent.futures
import importlib
import multiprocessing
import os
import random
import signal
import sys
import time

import tests.conftest  # noqa: F401  (the settings of JAX under test)
from tests.array_types import TYPES

from .hunt import Tally, hunt_for


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=None, help="of the first round")
    parser.add_argument("--rounds", type=int, default=10**9, help="at most")
    parser.add_argument("--examples", type=int, default=10, help="programs, or lists of them, in a round")
    parser.add_argument(
        "--types", nargs="*", default=[""], help="only types whose name contains one of these"
    )
    args = parser.parse_args()
    names = tuple(name for name in TYPES if any(part in name for part in args.types))
    # Each round is about one type: hypothesis would stay with few of them.
    order = random.Random(0).sample(names, len(names))
    first = random.randrange(10**6) if args.seed is None else args.seed
    until = time.monotonic() + 60 * args.minutes
    print(f"{len(names)} types, rounds of {args.examples} draws, seeds from {first}", flush=True)
    total, seed, running = Tally(), first, {}
    more = lambda: seed < first + args.rounds and time.monotonic() < until
    of_workers = {
        "mp_context": multiprocessing.get_context("spawn"),
        "max_tasks_per_child": 8,  # compiled programs take memory
        "initializer": importlib.import_module,
        "initargs": ("tests.conftest",),  # the settings of JAX under test
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with concurrent.futures.ProcessPoolExecutor(args.jobs, **of_workers) as pool:
            while running or more():
                while len(running) < args.jobs and more():
                    known = frozenset(total.findings)
                    future = pool.submit(
                        hunt_for,
                        (order[seed % len(order)],),
                        seed_=seed,
                        examples=args.examples,
                        known=known,
                        until=until,
                    )
                    running[future] = seed
                    seed += 1
                done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for future in done:
                    of_seed, tally = running.pop(future), future.result()
                    for key, text in tally.findings.items():
                        if key not in total.findings:
                            print(
                                f"\n--- finding {len(total.findings) + 1}, seed {of_seed}: {key}\n{text}",
                                flush=True,
                            )
                            total.findings[key] = text
                    total.merge(tally)
    except KeyboardInterrupt:  # what ran until then is told
        for worker in multiprocessing.active_children():
            worker.kill()
    print(f"\n{total}\n\nseeds {first} to {seed - 1}: {len(total.findings)} findings")
    return bool(total.findings)


if __name__ == "__main__":
    sys.exit(main())
