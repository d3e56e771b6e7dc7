"""`python -m tests.flags`: the tests under flags that will become JAX's default, in one table.

`jax_scan3` is not among them: in JAX 0.12 it ignores `reverse`, and has no rule for `vmap`.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import jax

_ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3")
SUITES = {
    "core": ["pytest", "-q", "tests/core", "tests/primitives", "tests/test_hijax.py"],
    "arrays": ["pytest", "-q", "tests/arrays"],
    "differential": ["tests.differential", "--minutes", "2"],
}


def run(flags: tuple[str, ...], suite: str) -> tuple[str, bool]:
    """What the last line of a suite says, and whether it passed."""
    settings = {flag.upper(): "1" for flag in flags}
    command = [sys.executable, "-m", *SUITES[suite]]
    ran = subprocess.run(command, cwd=_ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    if ran.returncode:
        print(ran.stdout, ran.stderr, sep="\n", flush=True)
    lines = (ran.stdout.strip() or ran.stderr.strip() or "nothing was told").splitlines()
    return lines[-1].strip("= "), ran.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flags", description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="FLAG",
        help=f"alone, or 'all' together: {', '.join(FLAGS)}; default: each",
    )
    arguments = parser.parse_args()
    rows, failed = [], False
    for name in arguments.flags or [*FLAGS, "all"]:
        flags = FLAGS if name == "all" else (name,)
        for flag in flags:
            if flag not in FLAGS:
                parser.error(f"the flags are {', '.join(FLAGS)}, and 'all'; found {flag}")
            if not hasattr(jax.config, flag):
                parser.error(f"JAX {jax.__version__} has no flag {flag}; JAX 0.12 has all three")
        for suite in arguments.suites:
            start = time.monotonic()
            told, passed = run(flags, suite)
            failed |= not passed
            seconds = time.monotonic() - start
            rows.append(f"{name:16} {suite:13} {seconds:6.0f} s  {'' if passed else 'FAILED: '}{told}")
            print(rows[-1], flush=True)
    print(f"\nJAX {jax.__version__}", *rows, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
