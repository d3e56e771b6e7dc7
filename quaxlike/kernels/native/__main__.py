"""The native library's command-line interface."""

import sys
from pathlib import Path

from ..._arguments import Parser
from .library import Library, NativeError, build, library
from .wheel import write_wheel


def main(argv: list[str] | None = None, prog: str = "python -m quaxlike.kernels.native") -> int:
    """Compiles the library and reports what was done. Returns exit status 1 if this fails."""
    parser = Parser(
        prog=prog,
        description="Compiles products with quantised weights, and of few rows, for this machine's "
        "processor, by its C++ compiler, into the user's cache. Programs find them there; QUAXLIKE_NATIVE=0 "
        "turns them off.",
    )
    parser.add_argument("--again", action="store_true", help="compile even if it is there")
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="DIR",
        help="write the library to this folder as a wheel, quaxlike-cpu, for machines without a compiler",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.wheel is not None:
            print(f"Written: {write_wheel(arguments.wheel)}")
            return 0
        built = build(again=arguments.again)
    except NativeError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    did = "Was there" if built.seconds is None else f"Compiled by {built.compiler} in {built.seconds:.1f} s"
    print(f"{did}: {built.path}")
    loaded = library()
    if not isinstance(loaded, Library):
        print(f"{parser.prog}: error: {loaded}", file=sys.stderr)
        return 1
    print(f"It uses {loaded.instructions} on this processor.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
