"""Every type meets every other: what comes out is that of the dense arrays, or an error that says why not.

A type joins with one line in `TYPES`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import quaxlike as ql
from quaxlike.arrays import named, sparse, structured, unitful, zero
from quaxlike.arrays.unitful import DimensionError, Unit
from tests.samples import normal

N = 4


def _dense(seed: int) -> Array:
    return normal(N, N, seed=seed)


def _lora(w: Any, seed: int) -> ql.LoraArray:
    a, b = normal(2, 2, N, seed=seed + 2)
    return ql.LoraArray(w, a, b.T, alpha=4)


def _nf4(seed: int) -> ql.NF4Array:
    return ql.NF4Array.quantize(_dense(seed), block_size=32)


def _blocks(seed: int) -> ql.BlockSparseArray:
    return ql.BlockSparseArray.from_dense(_dense(seed), block_size=2, density=0.5)


def _tridiagonal(seed: int) -> structured.TridiagonalMatrix:
    lower, diagonal, upper, _ = _dense(seed)
    return structured.TridiagonalMatrix(lower[1:], diagonal, upper[1:])


def _metres(x: Any) -> unitful.Unitful:
    return unitful.Unitful(x, "m")


def _named(x: Any) -> named.NamedArray:
    return named.NamedArray(x, ("i", "i"))


# Operands of a pair have different seeds.
TYPES: dict[str, Callable[[int], Any]] = {
    "array": _dense,
    "LoraArray": lambda seed: _lora(_dense(seed), seed),
    "NF4Array": _nf4,
    "Int8Array": lambda seed: ql.Int8Array.quantize(_dense(seed)),
    "LoraArray of NF4Array": lambda seed: _lora(_nf4(seed), seed),
    "SparseArray": lambda seed: ql.SparseArray.from_dense(jnp.maximum(_dense(seed), 0)),
    "BlockSparseArray": _blocks,
    "LoraArray of BlockSparseArray": lambda seed: _lora(_blocks(seed), seed),
    "DiagonalMatrix": lambda seed: structured.DiagonalMatrix(_dense(seed)[0]),
    "TridiagonalMatrix": _tridiagonal,
    "KroneckerMatrix": lambda seed: structured.KroneckerMatrix(_dense(seed)[:2, :2], _dense(seed)[2:, 2:]),
    "LowRankUpdate": lambda seed: structured.LowRankUpdate(
        *jnp.split(normal(N, N + 2, seed=seed), [N, N + 1], 1)
    ),
    "OneHotVector": lambda seed: sparse.OneHotVector(5.0 + seed, 2 - seed, length=N),
    "Zero": lambda seed: zero.Zero((N, N), jnp.float32),
    "Full": lambda seed: zero.Full(0.25 + seed, (N, N)),
    "Identity": lambda seed: zero.Identity(N),
    "Unitful": lambda seed: _metres(_dense(seed)),
    "Unitful of LoraArray": lambda seed: _metres(_lora(_dense(seed), seed)),
    "NamedArray": lambda seed: _named(_dense(seed)),
    "NamedArray of Unitful of BlockSparseArray": lambda seed: _named(_metres(_blocks(seed))),
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


@pytest.mark.slow
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
        np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        assert numbers.dtype == expected.dtype, name
        assert found_unit == unit, name
        expected_names = names_of(x_names, y_names)
        assert names == (None,) * (numbers.ndim - len(expected_names)) + expected_names, name


@pytest.mark.slow
def test_no_pair_is_ambiguous():
    types = {type(part) for make in TYPES.values() for part in _values(make(0))}
    ql.check_ambiguities(*types, ql.FP4Array, ql.Int4Array)  # which have the rules of NF4Array


def _values(x: Any) -> list[Any]:
    """The Value and the Values that it is made of."""
    if not ql.is_value(x):
        return []
    return [x, *(v for part in vars(x).values() for v in _values(part))]
