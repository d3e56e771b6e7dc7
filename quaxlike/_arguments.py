"""Helpers for the command lines of several commands."""

import argparse
import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ._checked import did_you_mean

#: The packages installed by the extras `lm` and `demo`.
_EXTRA = ("jinja2", "matplotlib", "optax", "rich", "sklearn", "tokenizers")

#: The help text of an option shared by several commands.
COMPILATION_CACHE = (
    "a folder to keep compiled programs in for later runs, or off (default: in your cache, or where "
    "JAX_COMPILATION_CACHE_DIR says)"
)


class Parser(argparse.ArgumentParser):
    """An argument parser reporting errors on a single line and suggesting similarly spelt options."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}\n`{self.prog} --help` lists the options.", file=sys.stderr)
        sys.exit(2)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # argparse would report a misspelt option as missing, so check for unknown options ourselves.
        given = sys.argv[1:] if args is None else list(args)
        for argument in itertools.takewhile(lambda x: x != "--", given):
            name = argument.partition("=")[0]
            known = self._option_string_actions
            is_option = re.match(r"--?[A-Za-z]", name) and " " not in argument
            if is_option and not any(x.startswith(name) for x in known):
                self.error(f"there is no option {name}.{did_you_mean(name, known, n=1, show=str)}")
        return super().parse_known_args(given, namespace)


def number(
    kind: type[int] | type[float], least: float | int, most: float | int = float("inf")
) -> Callable[[str], Any]:
    """Returns an argparse `type` parsing a number and rejecting anything outside the given range."""
    what = "a whole number" if kind is int else "a number"
    limits = f"of at least {least}" if most == float("inf") else f"from {least} to {most}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {what} {limits}, found {text!r}")
        return value

    return parse


@contextlib.contextmanager
def importing_extra(parser: argparse.ArgumentParser, extra: str) -> Iterator[None]:
    """A context manager exiting with advice on how to install `extra` if a package from it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        parser.error(f"{package} is not installed: pip install 'quaxlike[{extra}]'")
