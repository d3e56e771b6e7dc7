"""Arrays, made by NumPy: JAX would compile a program for every shape. Tables, and a mark of tests."""

import functools
import importlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike, DTypeLike

from quaxlike import _cache

#: Whether jaxtyping's wrappers stand around the package's functions, as in `.ci/run` (conftest).
checks_annotations = os.environ.get("QUAXLIKE_CHECK_ANNOTATIONS") == "1"

#: Whether to ask all that tables of cases leave out: `some_of`, and the mark `each_value`.
all_cases = os.environ.get("QUAXLIKE_ALL_CASES") == "1"

wrong_types = pytest.mark.skipif(
    checks_annotations,
    reason="Checked annotations stand between the callers and the functions, and refuse other types first.",
)


def normal(*shape: int, seed: int = 0, dtype: DTypeLike = "float32", scale: float = 1.0) -> jax.Array:
    """Normal numbers of a shape, the same for the same seed."""
    numbers = scale * np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jax.device_put(numbers.astype(jnp.dtype(dtype)))  # `jnp.asarray` compiles a program as well


def array(values: ArrayLike, dtype: DTypeLike | None = None) -> jax.Array:
    """What NumPy made, as an array of JAX: `jnp.array`, `jnp.arange` and the like compile a program each."""
    return jax.device_put(np.asarray(values, dtype))


def tree_equal(*trees: Any, **options: Any) -> bool:
    """`equinox.tree_equal`, by NumPy."""
    host = lambda x: (
        np.asarray(x) if eqx.is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return bool(eqx.tree_equal(*(jax.tree.map(host, tree) for tree in trees), **options))


def random_key(seed: int = 0) -> jax.Array:
    """`jax.random.key(seed)`, of which nothing is compiled."""
    return jax.random.wrap_key_data(np.array([0, seed], np.uint32))


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """A constant of a test module that JAX has to make, for each of its arguments: made when it is first
    asked for, and not in a trace that asks for it."""

    @functools.cache
    def made(*args: Any, **options: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return make(*args, **options)

    return made


def drawn(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The module that `make` builds, filled with normal numbers: its own initialisation would be compiled."""
    leaves, treedef = jax.tree.flatten(eqx.filter_eval_shape(make, *args, **options))
    filled = [
        normal(*leaf.shape, seed=i, dtype=leaf.dtype, scale=0.1) if hasattr(leaf, "shape") else leaf
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, filled)


def use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes a folder the user's cache, for this process, which read it at import, and for those it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(_cache, "FOLDER", _cache._folder())


def covering(*tables: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with an entry of each table, such that any two entries of two tables meet in some row: a covering
    array of strength two (Cohen et al., "The AETG System", 1997). A product of three tables asks many times
    what two of them do together; this asks it about once.
    """
    entries = [list(table) for table in tables]
    columns = list(itertools.combinations(range(len(entries)), 2))
    missing = {pair: set(itertools.product(*(range(len(entries[i])) for i in pair))) for pair in columns}
    rows: list[tuple[Any, ...]] = []
    while first := next((pair for pair in columns if missing[pair]), None):
        row = dict(zip(first, min(missing[first]), strict=True))
        for column in sorted(set(range(len(entries))) - set(row), key=lambda i: -len(entries[i])):

            def gain(entry: int, column: int = column) -> int:
                met = (
                    (tuple(sorted((column, other))), (entry, at) if column < other else (at, entry))
                    for other, at in row.items()
                )
                return sum(pair in missing[places] for places, pair in met)

            # Ties are broken by turns, so that no entry is in all rows that are free to choose.
            turns = [(entry + len(rows)) % len(entries[column]) for entry in range(len(entries[column]))]
            row[column] = max(turns, key=gain)
        for places in columns:
            missing[places].discard((row[places[0]], row[places[1]]))
        rows.append(tuple(table[row[i]] for i, table in enumerate(entries)))
    return rows


def some_of(table: Mapping[str, Any], name: str, n: int) -> dict[str, Any]:
    """About one in `n` entries of a table, others for another name: if each of many types meets so many
    programs, each program meets so many types. With `QUAXLIKE_ALL_CASES=1`, the whole table."""
    turn = lambda key: zlib.crc32(f"{name}: {key}".encode()) % n
    return {key: entry for key, entry in table.items() if all_cases or turn(key) == 0}


class Late:
    """A package, imported when a test first asks for something of it: some of them take half a second."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if (
            attribute.startswith("_") or attribute == "pytestmark"
        ):  # pytest looks behind every name of a module
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


class Lazy(Mapping[str, Any]):
    """A table of functions that reads as one of what they return. Each is called when its entry is first
    asked for: to collect tests compiles nothing."""

    def __init__(self, entries: Mapping[str, Callable[[], Any]]) -> None:
        self._entries, self._made = entries, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._entries[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
