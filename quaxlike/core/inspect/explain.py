"""`explain`: reports how a quaxified function treats Values, without running it.

The report must match an actual call. So nothing is simulated: the function is traced through the very same
dispatch, with a recorder attached.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..._checked import PyTree
from ..quaxify import check_filter_spec, quaxify
from ..recording import in_bytes, recording
from ..rules import RuleSet
from ..values import is_value
from . import page
from .exchange import Exchange, exchanges
from .recorder import Event, Outcome, Recorder


@dataclasses.dataclass(frozen=True)
class Row:
    """All events of one primitive at one line, with the same operand types."""

    primitive: str
    operands: tuple[str, ...]
    """Each operand's type, such as `LoraArray f32[4,3]`, or `f32[3]` for a plain array."""
    results: tuple[str, ...]
    outcome: Outcome
    """`"rule"`: a registered rule. `"default"`: a type's own `default`. `"built-in"`: quaxlike itself handles
    control flow, and primitives which only move data. `"materialised"`: there was no rule.
    """
    rule: str | None
    """Where the rule was written, as `file:line`."""
    source: str
    """The line of the user's own code."""
    through: str
    """The line in a library where this happened, provided that the user's line called a library."""
    where: tuple[str, ...]
    """What this happened inside of, outermost first: any nested jit, scan, cond and so on, and any rules."""
    count: int
    """How often this occurs in the traced program. (The body of a loop only counts once.)"""
    bytes: int
    """How many bytes are materialised in total, over all `count` occurrences."""
    notes: tuple[str, ...]
    hint: str
    """For a materialisation: the rule that the author of the type could write."""


class Report:
    """The result of [`quaxlike.explain`][]. Prints as a table, including in notebooks."""

    def __init__(
        self, rows: Sequence[Row], devices: int = 1, exchange: Callable[[], tuple[Exchange, ...]] = tuple
    ) -> None:
        self.rows = tuple(rows)
        """One [`Row`][quaxlike.Row] per primitive, operand types, outcome and place, in program order."""
        self._devices, self._exchange = devices, exchange

    @functools.cached_property
    def exchanged(self) -> tuple[Exchange, ...]:
        """What the devices exchange, largest first: one [`Exchange`][quaxlike.Exchange] per kind of array.

        Only useful if the arguments are on a mesh. The compiler decides on communication, so accessing this
        compiles the program for these devices.
        """
        return self._exchange()

    @property
    def rules(self) -> tuple[Row, ...]:
        """The rows where a registered rule was used."""
        return tuple(row for row in self.rows if row.outcome == "rule")

    @property
    def materialised(self) -> tuple[Row, ...]:
        """The rows where Values are materialised."""
        return tuple(row for row in self.rows if row.outcome == "materialised")

    @property
    def first_loss(self) -> Row | None:
        """The first row, in program order, where a Value is materialised; None if there is none."""
        return next(iter(self.materialised), None)

    @property
    def summary(self) -> str:
        """How many events there are of each kind, and the first materialisation, with a rule to prevent
        it."""
        return "\n".join([*self._dispatch(), *self._gathered()])

    def _gathered(self) -> list[str]:
        if self._devices == 1:
            return []
        # Compiling may take minutes, so don't compile just to print the report.
        if "exchanged" not in self.__dict__:
            return [f"What its {self._devices} devices exchange is in `exchanged`, which compiles it."]
        packed = [e for e in self.exchanged if e.packed]
        gathered, size = sum(e.count for e in packed), sum(e.bytes for e in packed)
        found = f"in {gathered} gathers, {in_bytes(size)} a device" if packed else "nowhere"
        total = in_bytes(sum(e.bytes for e in self.exchanged))
        return [f"Its {self._devices} devices gather packed weights {found}; in all they exchange {total}."]

    def _dispatch(self) -> list[str]:
        losses = self.materialised
        n = sum(row.count for row in self.rows)
        head = f"{n} primitive{'' if n == 1 else 's'} met Values; "
        if (loss := self.first_loss) is None:
            return [head + "none of them was materialised."]
        count, size = sum(row.count for row in losses), in_bytes(sum(row.bytes for row in losses))
        return [
            f"{head}{count} of them had to materialise, {size} in all.",
            f"First loss: {loss.primitive} of ({', '.join(loss.operands)}), at {loss.source}.",
            *loss.hint.splitlines(),
        ]

    def __str__(self) -> str:
        # `rich` is an optional dependency, so fall back to plain text if it isn't installed.
        if importlib.util.find_spec("rich") is None:
            notes = _numbered(self.rows)
            return "\n".join([page.plain_table(_table(self.rows, notes)), *_listed(notes), "", self.summary])
        import rich.console

        console = rich.console.Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:  # e.g. a file, which can be of any width
            console.width = max(console.width, _WIDTH)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Any:
        import rich.table
        import rich.text

        notes = _numbered(self.rows)
        columns, *lines = _table(self.rows, notes)
        widths = [max(map(len, column)) + 3 for column in zip(columns, *lines, strict=True)]
        # Don't wrap each cell separately: this would break up file names.
        if sum(widths) >= options.max_width:
            columns, *lines = _narrow(columns, lines)
        table = rich.table.Table()
        for name in columns:
            numbers = name in ("count", "bytes")
            table.add_column(name, overflow="fold", no_wrap=numbers, justify="right" if numbers else "left")
        for row, line in zip(self.rows, lines, strict=True):
            style = "red" if row.outcome == "materialised" else None
            table.add_row(*map(rich.text.Text, line), style=style)
        yield table
        yield rich.text.Text("\n".join([*_listed(notes), self.summary]))

    def _repr_html_(self) -> str:
        return page.fragment(self.rows, _table(self.rows), self.summary)

    def to_html(self, path: str | pathlib.Path) -> None:
        """Writes this report as a self-contained HTML page.

        **Arguments:**

        - `path`: the file to write. An existing file is replaced atomically.
        """
        page.write(path, self.rows, _table(self.rows), self.summary)


def explain(
    fn: Callable[..., Any], /, filter_spec: PyTree = True, *, rules: RuleSet | None = None
) -> Callable[..., Report]:
    """Reports what `quaxify(fn)` does with its Values: which rules it uses, and where it materialises.

    Traces `fn` with shapes rather than arrays, so nothing is actually computed. Arguments (and fields of
    Values) can be `jax.ShapeDtypeStruct`s, so you can use this on arbitrarily large models. Neither an error
    from `materialise` nor `on_materialise("error")` stops the report; these are rows like any others.

    **Arguments:**

    - `fn`, `filter_spec`, `rules`: as in [`quaxlike.quaxify`][]. If `fn` is quaxified, or calls quaxified
        functions, the report also includes what happens inside these.

    **Returns:**

    A function with the same arguments as `fn`, returning a [`Report`][quaxlike.Report]. JAX arrays and
    `ShapeDtypeStruct`s in its arguments are treated as abstract, and anything else is passed unchanged. If
    the arguments are sharded over a mesh, `exchanged` lists what the devices communicate, e.g. which weights
    are gathered.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql


        class Doubled(ql.ArrayValue):
            array: jax.Array

            def materialise(self):
                return 2 * self.array


        report = ql.explain(jnp.sin)(
            Doubled(jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32))
        )
        print(report)
        assert (
            report.first_loss.primitive == "sin"
            and report.first_loss.bytes == 4 * 10**12
        )
        ```
    """

    check_filter_spec("explain", filter_spec)

    @functools.wraps(fn)
    def explained(*args: Any, **kwargs: Any) -> Report:
        dynamic, static = eqx.partition((fn, args, kwargs), _is_abstract)

        def run(dynamic: Any) -> Any:
            fn, args, kwargs = eqx.combine(dynamic, static)
            return eqx.filter(quaxify(fn, filter_spec, rules=rules)(*args, **kwargs), eqx.is_array)

        with recording(Recorder()) as recorder:
            jax.eval_shape(run, dynamic)
        return Report(_rows(recorder.events()), *_exchange_of(run, dynamic))

    return explained


def _exchange_of(run: Callable[..., Any], dynamic: Any) -> tuple[int, Callable[[], tuple[Exchange, ...]]]:
    """Returns how many devices the arguments are on, and a function computing what these exchange."""

    def spread(x: Any) -> bool:
        sharding = getattr(x, "sharding", None)
        return isinstance(sharding, jax.NamedSharding) and sharding.mesh.size > 1

    meshes = [x.sharding.mesh for x in jax.tree.leaves(dynamic) if spread(x)]
    if not meshes:
        return 1, tuple
    mesh, explicit = meshes[0], jax.sharding.AxisType.Explicit in meshes[0].axis_types

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if spread(x) else None)

    shapes = jax.tree.map(shape, dynamic)  # don't keep the arrays alive

    def exchange() -> tuple[Exchange, ...]:
        with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
            text = jax.jit(run).lower(shapes).compile().as_text()
        return exchanges(text or "", _packed(shapes))

    return mesh.size, exchange


def _packed(tree: Any) -> list[Any]:
    """Returns the integer arrays in Values."""
    out: list[Any] = []
    for value in filter(is_value, jax.tree.leaves(tree, is_leaf=is_value)):
        parts = jax.tree.leaves(value, is_leaf=lambda x, value=value: x is not value and is_value(x))
        own = [x for x in parts if not is_value(x)]
        out += own if any(jnp.issubdtype(x.dtype, jnp.integer) for x in own) else []
        out += _packed([x for x in parts if is_value(x)])
    return out


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _rows(events: Any) -> list[Row]:
    alike: dict[Any, list[Event]] = {}
    for where, e in events:
        rule = None if e.rule is None else e.rule.source
        key = (e.primitive, e.operands, e.results, e.outcome, rule, e.source, e.through, where)
        alike.setdefault(key, []).append(e)
    return [_row(key, group) for key, group in alike.items()]


def _row(key: tuple[Any, ...], group: Sequence[Event]) -> Row:
    notes = dict.fromkeys(note for e in group for note in e.notes)
    size = sum(e.size for e in group)
    return Row(*key, count=len(group), bytes=size, notes=tuple(notes), hint=group[0].hint)


# As a table ---------------------------------------------------------------------------------------

#: The width of a table if it isn't printed to a terminal.
_WIDTH = 160
_COLUMNS = ("primitive", "operands → results", "outcome", "line", "inside", "count", "bytes", "notes")


def _table(rows: Sequence[Row], numbers: Mapping[str, int] | None = None) -> list[tuple[str, ...]]:
    """Returns the column headings and the cells of each row, omitting empty columns.

    **Arguments:**

    - `numbers`: each note's number. If given, cells contain these, and the notes themselves are shown below
        the table.
    """
    lines = [_cells(row, numbers) for row in rows]
    kept = [i for i, name in enumerate(_COLUMNS) if name == "primitive" or any(line[i] for line in lines)]
    return [tuple(line[i] for i in kept) for line in (_COLUMNS, *lines)]


def _narrow(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns the table for a narrow terminal, stacking a row's text in a single cell."""
    texts = [i for i, name in enumerate(columns) if name in _COLUMNS[1:5]]
    others = [i for i in range(1, len(columns)) if i not in texts]

    def narrow(line: Sequence[str]) -> tuple[str, ...]:
        place = {columns[i]: line[i] for i in texts if line[i]}
        types = place.pop(_COLUMNS[1])
        place["line"] = f"at {place['line']}"
        if "inside" in place:
            place["inside"] = f"inside {place['inside']}"
        return line[0], "\n".join([types, *place.values()]), *(line[i] for i in others)

    head = columns[0], columns[1], *(columns[i] for i in others)
    return [head, *map(narrow, lines)]


def _notes_of(row: Row) -> list[str]:
    return [*([f"in {_short(row.through)}"] if row.through else []), *row.notes]


def _numbered(rows: Sequence[Row]) -> dict[str, int]:
    """Assigns a number to each distinct note. Identical notes share a number."""
    return {note: i for i, note in enumerate(dict.fromkeys(n for row in rows for n in _notes_of(row)), 1)}


def _listed(numbers: Mapping[str, int]) -> list[str]:
    return [f"Note {i}: {note}" for note, i in numbers.items()]


def _cells(row: Row, numbers: Mapping[str, int] | None) -> tuple[str, ...]:
    types = ", ".join(row.operands) + (" → " + ", ".join(row.results) if row.results else "")
    notes = _notes_of(row)
    return (
        row.primitive,
        types,
        f"rule at {_short(row.rule)}" if row.rule else row.outcome,
        _short(row.source),
        " › ".join(row.where),
        str(row.count),
        f"{row.bytes:,}" if row.bytes else "",
        "; ".join(notes) if numbers is None else ", ".join(str(numbers[note]) for note in notes),
    )


def _short(source: str) -> str:
    """Shortens a source line's path to its last folder. (The full path is available on the `Row`.)"""
    path, _, rest = source.rpartition(":")
    return ":".join(["/".join(pathlib.PurePath(path).parts[-2:]), rest])
