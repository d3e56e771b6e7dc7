"""Every type meets every other: what comes out is that of the dense arrays, or an error that says why not."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays import named, unitful
from quaxlike.arrays.unitful import DimensionError, Unit
from quaxlike.testing.compare import disagreement
from tests import array_types
from tests.samples import normal

N = 4

# Operands of a pair have different seeds. No layer holds a vector, or what has a unit.
BESIDE = (
    "OneHotVector",
    "Unitful, metres",
    "Unitful of LoraArray",
    "NamedArray of Unitful of BlockSparseArray",
)
TYPES: dict[str, Callable[[int], Any]] = {
    "array": lambda seed: normal(N, N, seed=seed),
    **array_types.WEIGHTS,
    **{name: array_types.TYPES[name] for name in BESIDE},
}


def parts(x: Any) -> tuple[tuple[str | None, ...], Unit, Any]:
    """The names of the axes, the unit, and the numbers."""
    names: tuple[str | None, ...] = (None,) * jnp.ndim(x)
    unit = Unit()
    if isinstance(x, named.NamedArray):
        names, x = x.names, x.array
    if isinstance(x, unitful.Unitful):
        unit, x = x.unit, x.array
    assert not isinstance(x, named.NamedArray | unitful.Unitful)
    return names, unit, np.asarray(ql.materialise(x))


# What is done, and the names and units that come out of it.


def _same_names(x: Any, y: Any) -> tuple[str | None, ...]:
    return tuple(a or b for a, b in itertools.zip_longest(x[::-1], y[::-1]))[::-1]


def _product_names(x: Any, y: Any) -> tuple[str | None, ...]:
    return (*x[:-1], *y[:-2], *(y[-1:] if len(y) > 1 else ()))


def _same_unit(x: Unit, y: Unit) -> Unit | None:
    return x if x == y else None


MASK = np.eye(N, dtype=bool) | (np.arange(N) == 1)
OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[..., Any], Callable[..., Any]]] = {
    "add": (jnp.add, _same_names, _same_unit),
    "multiply": (jnp.multiply, _same_names, lambda x, y: x * y),
    "matmul": (jnp.matmul, _product_names, lambda x, y: x * y),
    "where": (lambda x, y: jnp.where(MASK, x, y), _same_names, _same_unit),
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), _same_names, _same_unit),
}


@pytest.mark.quick("KroneckerMatrix-LowRankUpdate")
@pytest.mark.parametrize("right", TYPES)
@pytest.mark.parametrize("left", TYPES)
def test_pair(left, right, default_promotion):
    x, y = TYPES[left](0), TYPES[right](1)
    with ql.on_materialise("allow"):
        (x_names, x_unit, x_dense), (y_names, y_unit, y_dense) = parts(x), parts(y)
    for name, (fn, names_of, unit_of) in OPERATIONS.items():
        if name == "concatenate" and x_dense.ndim != y_dense.ndim:
            continue  # nor do plain arrays
        unit = unit_of(x_unit, y_unit)
        if unit is None:
            message = r"in the same unit; found \((m, dimen|dimensionless, m)"
            with ql.on_materialise("allow"), pytest.raises(DimensionError, match=message):
                ql.quaxify(fn)(x, y)
            continue
        with ql.on_materialise("allow"):  # sparse arrays warn of it
            names, found_unit, numbers = parts(ql.quaxify(fn)(x, y))
        expected = np.asarray(fn(x_dense, y_dense))
        assert not disagreement(numbers, expected, tolerance=1e-5, scale=1.0), name
        assert found_unit == unit, name
        expected_names = names_of(x_names, y_names)
        assert names == (None,) * (numbers.ndim - len(expected_names)) + expected_names, name


@pytest.mark.slow
def test_no_pair_is_ambiguous():
    types = {type(part) for make in TYPES.values() for part in array_types.parts(make(0))}
    ql.check_ambiguities(*types)
