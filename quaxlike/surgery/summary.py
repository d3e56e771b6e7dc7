"""`summary`: a model's arrays, their sizes, and which of them are trained."""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray, innermost, without_numbers
from ..arrays.layout import Layout
from ..arrays.quantized import BlockArray, CacheArray
from ..core.values import is_value
from .recipes import Recipe, recipe_of, scheme_text
from .records import Layouts, records_of
from .trainable import trained_leaves


@dataclasses.dataclass(frozen=True)
class SummaryRow:
    """A row of a [`quaxlike.summary`][], for a single array in the model."""

    path: str
    type: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    """The number of elements in the array."""
    adapter_size: int
    """The number of elements in its adapter."""
    trainable: int
    """The number of trained elements, including its adapter."""
    logical_bytes: int
    """The size in bytes of the equivalent dense array."""
    stored_bytes: int
    """The size in bytes as stored, including the adapter."""
    layout: Layout | None = None
    """The output and input axes, or `None` if the array is not the weight of a layer."""


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """A table of the arrays in a model, along with their totals.

    This can be printed as plain text or with `rich`.
    """

    rows: Sequence[SummaryRow]
    recipe: Recipe = dataclasses.field(default_factory=dict[str, Any])
    """The [`quaxlike.quantize`][] recipe for the quantised arrays, empty if there are none."""

    def _total(self, field: str) -> int:
        return sum(getattr(row, field) for row in self.rows)

    @property
    def size(self) -> int:
        """The total number of elements in all the model's arrays, excluding adapters."""
        return self._total("size")

    @property
    def trainable(self) -> int:
        """The total number of trained elements."""
        return self._total("trainable")

    @property
    def trainable_share(self) -> float:
        """The trained fraction of all elements, including adapters."""
        return self.trainable / max(1, self.size + self._total("adapter_size"))

    @property
    def logical_bytes(self) -> int:
        """The total size in bytes of the equivalent dense arrays."""
        return self._total("logical_bytes")

    @property
    def stored_bytes(self) -> int:
        """The total size in bytes as stored, including adapters."""
        return self._total("stored_bytes")

    def _cells(self) -> list[tuple[str, ...]]:
        def cells(path: str, kind: str, shape: str, axes: str, of: "SummaryRow | Summary") -> tuple[str, ...]:
            numbers = of.logical_bytes, of.stored_bytes, of.trainable
            return path, kind, shape, axes, *(f"{n:,}" for n in numbers)

        def shape(row: Any) -> Any:
            return f"{row.dtype}[{','.join(map(str, row.shape))}]"

        rows = [cells(row.path, row.type, shape(row), _axes(row.layout), row) for row in self.rows]
        return [*rows, cells("total", f"{self.trainable_share:.3%} trained", f"{self.size:,}", "", self)]

    def __str__(self) -> str:
        *rows, total = self._cells()
        longest = [max(map(len, column)) for column in zip(*rows, total, strict=True)]
        # Wrap headings wider than their columns, so that they don't widen the table.
        heads = [
            textwrap.wrap(name, max(n, *map(len, name.split())))
            for name, n in zip(_HEADER, longest, strict=True)
        ]
        widths = [max(n, *map(len, head)) for n, head in zip(longest, heads, strict=True)]

        def line(row: Sequence[str]) -> str:
            left = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=False)]
            right = [cell.rjust(width) for cell, width in zip(row[4:], widths[4:], strict=True)]
            return "  ".join([*left, *right]).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        head = map(line, itertools.zip_longest(*heads, fillvalue=""))
        return "\n".join([*head, rule, *map(line, rows), rule, line(total), *self._recipe_lines()])

    def _recipe_lines(self) -> list[str]:
        rules = [f"  {where}: {scheme_text(scheme)}" for where, scheme in self.recipe.items()]
        return ["", "recipe:", *rules] if rules else []

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.table import Table

        *rows, total = self._cells()
        table = Table(
            show_footer=True, caption="\n".join(self._recipe_lines()) or None, caption_justify="left"
        )
        for i, (name, foot) in enumerate(zip(_HEADER, total, strict=True)):
            table.add_column(name, foot, justify="left" if i < 4 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        return table


_HEADER = ("path", "type", "shape", "axes", "dense bytes", "stored bytes", "trained")


def _axes(layout: Layout | None) -> str:
    return "" if layout is None or layout.kind == "other" else str(layout)


@checked
def summary(model: PyTree, *, layout: Layouts = None) -> Summary:
    """Tabulates each array in a model, with its type, shape, size and number of trained elements.

    This is useful for checking the result of e.g. [`quaxlike.quantize`][].

    **Arguments:**

    - `model`: any pytree. A Value counts as a single array.
    - `layout`: layouts that cannot be inferred from the model, as in [`quaxlike.layouts`][]. Default: none.

    **Returns:**

    A printable table, with attributes `rows`, the totals `size`, `trainable`, `trainable_share`,
    `logical_bytes` and `stored_bytes`, and the quantised weights' `recipe`.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 64, depth=2, key=jax.random.key(0))
        print(ql.summary(ql.loraify(mlp, rank=4, key=jax.random.key(1))))
        ```
    """
    counted: set[int] = set()
    records = records_of(model, layout)
    rows = [_row(name, x.array, x.layout, counted) for name, x in records.items()]
    arrays = {name: record.array for name, record in records.items()}
    return Summary(rows, recipe_of(arrays, {name: record.layout for name, record in records.items()}))


def _row(path: str, x: Any, layout: Layout | None, counted: set[int]) -> SummaryRow:
    """Builds the row for a single array.

    Adapters can share arrays: those in `counted` belong to an earlier row, and are not counted again.
    """
    stored = without_numbers(x)  # Hyperparameters such as `alpha` aren't usually counted as parameters.
    again = [leaf for leaf in _adapters(stored) if id(leaf) in counted]
    counted |= {id(leaf) for leaf in _adapters(stored)}
    spec = trained_leaves(x)
    leaves = zip(jtu.tree_leaves(x), jtu.tree_leaves(spec), strict=True)
    base = innermost(x)
    size = math.prod((x if base is None else base).shape)  # Stacked adapters share a single base.
    return SummaryRow(
        path=path,
        type=_type(x),
        shape=tuple(x.shape),
        dtype=jnp.dtype(x.dtype).name if not jnp.issubdtype(x.dtype, jax.dtypes.extended) else str(x.dtype),
        size=size,
        adapter_size=sum(leaf.size for leaf in _adapters(stored)) - sum(leaf.size for leaf in again),
        trainable=sum(leaf.size for leaf, is_trained in leaves if is_trained),
        logical_bytes=size * x.dtype.itemsize,
        stored_bytes=sum(leaf.nbytes for leaf in jtu.tree_leaves(stored))
        - sum(leaf.nbytes for leaf in again),
        layout=layout,
    )


def _adapters(x: Any) -> list[Any]:
    """Collects the arrays in all adapters on a weight, excluding PRNG keys."""
    if not isinstance(x, AdaptedArray):
        return []
    own = jtu.tree_leaves(x.with_base(None))
    parts = [leaf for leaf in own if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    return [*parts, *_adapters(x.w)]


def _type(x: Any) -> str:
    if not is_value(x):
        return "array"
    if isinstance(x, AdaptedArray):
        return f"{x.description()} of {_type(x.w)}" if is_value(x.w) else x.description()
    of_any = isinstance(x, BlockArray | CacheArray)
    kind = f"{type(x).__name__}[{x.codec.name}]" if of_any else type(x).__name__
    held = [part for field in dataclasses.fields(x) if is_value(part := getattr(x, field.name, None))]
    return " of ".join([kind, *map(_type, held[:1])])
