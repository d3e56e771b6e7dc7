"""The command-line interface for the demonstration."""

import argparse
import sys
import tempfile
from pathlib import Path

from .._arguments import Parser, importing_extra, number


def _make_writable(directory: Path) -> str | None:
    """Creates a directory. Returns the reason if it isn't writable, and otherwise None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Train a small vision transformer on upright digits, then adapt it to rotated "
        "ones in full, by LoRA and by QLoRA (LoRA over NF4 weights).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=number(int, 1), default=300, help="steps of each of the four runs")
    parser.add_argument(
        "--seed", type=number(int, 0, 2**32 - 1), default=0, help="of data, weights and batches"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("quaxlike-demo"),
        metavar="DIR",
        help="directory for the figure; created if it does not exist",
    )
    return parser


def main(argv: list[str] | None = None, prog: str = "python -m quaxlike.demo") -> int:
    """Runs the demonstration. Exits with status 2 if this cannot start."""
    # Importing JAX and scikit-learn takes seconds, so parse the arguments first.
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    if reason := _make_writable(arguments.output):
        parser.error(
            f"argument --output: cannot write to '{arguments.output}' ({reason}); choose a writable directory"
        )
    with importing_extra(parser, "demo"):
        from .show import show
    show(seed=arguments.seed, steps=arguments.steps, output=arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
