"""Arguments shared by the command lines."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

#: The packages that the extras `lm` and `demo` install.
_EXTRA = ("jinja2", "matplotlib", "optax", "rich", "sklearn", "tokenizers")

#: Of an option that several commands have.
COMPILATION_CACHE = (
    "a folder to keep compiled programs in for later runs, or off (default: in your cache, or where "
    "JAX_COMPILATION_CACHE_DIR says)"
)


def number(
    kind: type[int] | type[float], least: float | int, most: float | int = float("inf")
) -> Callable[[str], Any]:
    """Makes the type of an argument that is a number in a range."""
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
    """Ends the command with advice if a package of this extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        parser.error(f"{package} is not installed: pip install 'quaxlike[{extra}]'")
