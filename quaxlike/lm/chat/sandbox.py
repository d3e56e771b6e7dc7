"""A sandbox for chat templates. On top of jinja2's own, this bounds texts, lists and numbers in size.

Templates are untrusted programs, and a short one can exhaust memory. So if an operation's result can be much
larger than its operands, then its size is checked before performing the operation. (This doesn't limit a
template's running time.)
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX = 1 << 23  # the maximum length of a text in characters, or of a list in elements
_MAX_BITS = 1 << 16  # the maximum size of an integer: powers can exhaust memory too
# Operations whose results can be much larger than their operands.
_PADDING = (
    "center",
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "indent",
    "batch",
    "slice",
    "wordwrap",
    "tojson",
)
_FORMATTING = ("format", "format_map")


class _Parts(list[str]):
    """The parts of a text stored by a template, e.g. using `{% set %}`."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def append(self, part: str) -> None:
        self._size += len(part) + 1
        _check(self._size)
        super().append(part)

    def extend(self, parts: Iterable[str]) -> None:
        for part in parts:
            self.append(part)


class _Generator(CodeGenerator):
    def buffer(self, frame: Frame) -> None:
        """Begins a text to be stored by the template."""
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.parts()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Compiles concatenation, written `a ~ b`."""
        self.write("environment.concat(map(str, (")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")))")


class Sandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment that raises `SecurityError` if an operation's result would be too large."""

    code_generator_class = _Generator
    parts = _Parts
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, tojson: Callable[..., str], **options: Any) -> None:
        super().__init__(**options)
        # This can generate texts of any length.
        del self.globals["lipsum"]
        self.filters["tojson"] = tojson  # jinja2's own version escapes HTML
        self.filters.update({name: _bounded(name, function) for name, function in self.filters.items()})

    @staticmethod
    def concat(parts: Any) -> str:
        """Concatenates a block's parts."""
        parts = list(parts)
        _check(sum(map(len, parts)))
        return "".join(parts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method, after checking its arguments."""
        name, method = getattr(__obj, "__name__", ""), getattr(__obj, "__wrapped__", __obj)
        own = getattr(method, "__self__", None)
        text = (own,) if isinstance(own, str | bytes) else ()
        _check_arguments(name, (*text, *args), kwargs)
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluates one of `intercepted_binops`, after checking its operands."""
        if operator == "%":
            _check_arguments("format" if isinstance(left, str | bytes) else "", (left, right), {})
        elif isinstance(left, int | float) and isinstance(right, int | float):
            if isinstance(left, int) and isinstance(right, int) and operator != "+":
                bits, others = left.bit_length(), right.bit_length()
                _check(bits * abs(right) if operator == "**" else bits + others, _MAX_BITS)
        elif operator == "*":
            _check(_size(left, 0) * right if isinstance(right, int) else _size(right, 0) * left)
        else:
            _check(_size(left, 0) + _size(right, 0))
        return _checked(super().call_binop(context, operator, left, right))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter to bound its result. The context (if it takes one) isn't checked."""
    skipped = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)  # also copies some attributes needed by jinja2
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, args[skipped:], kwargs)
        return _checked(function(*args, **kwargs))

    return bounded


def _check_arguments(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises an error if a function or method would return something too large given its arguments."""
    if name == "translate":
        raise SecurityError("translate is not supported")
    if not args:
        return
    first, *others = *args, *kwargs.values()
    numbers = [abs(x) for x in (*others, *_inside(others)) if isinstance(x, int)]
    if name in _PADDING:
        length = _size(first, 1) if name in ("expandtabs", "indent", "wordwrap", "tojson") else 1
        _check(max([_size(x, 1) for x in others] + numbers, default=1) * length)
    elif name in _FORMATTING and isinstance(first, str | bytes):
        text = first.decode("latin-1") if isinstance(first, bytes) else first
        _check(max((int(digits[:9]) for digits in re.findall(r"\d+", text)), default=0))
        if re.search(r"%[^%a-zA-Z]*\*|\{[^{}]*\{", text):  # the width is one of the arguments itself
            _check(max(numbers, default=0))
    elif name == "replace" and len(others) >= 2 and isinstance(first, str):
        _check((len(first) // max(_size(others[0], 1), 1) + 1) * _size(others[1], 1))
    elif name == "join":
        items, between = (others[0] if others else (), first) if isinstance(first, str) else (first, "")
        if isinstance(items, list | tuple):
            separator = max((_size(x, 1) for x in (between, *others) if isinstance(x, str)), default=0)
            _check(sum(_size(x, 1) + separator for x in items))


def _inside(values: Sequence[Any]) -> list[Any]:
    return [x for value in values if isinstance(value, list | tuple) for x in value]


def _size(x: Any, otherwise: int) -> int:
    return len(x) if isinstance(x, str | bytes | list | tuple) else otherwise


def _check(size: float | int, most: int = _MAX) -> None:
    if size > most:
        raise SecurityError("it makes a text, a list or a number that is too large")


def _checked(result: Any) -> Any:
    _check(_size(result, 0))
    return result
