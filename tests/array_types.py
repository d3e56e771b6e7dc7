"""Every shipped array type, one line each: in this table it is held to all that the tests ask of a type.

`WEIGHTS` are the weights of shape (4, 4) that layers of models may hold, `CORNERS` other shapes and dtypes.
`nested` puts each wrapper around each weight. `STRICT` are the tests' own, which no transform may lose. An
entry makes another value for another seed `k`; its dtype is that of Python's `float`, float64 if 64-bit types
are on.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array, lax

import quaxlike as ql
from quaxlike import adapters
from quaxlike.arrays import named, quantized, sparse, structured, unitful, zero
from quaxlike.arrays.lora import LoraBias
from tests import users
from tests.samples import normal
from tests.strict import product, strict, strict_pair

Make = Callable[..., Any]


def _dense(k: int = 0, *shape: int, dtype: Any = float) -> Array:
    return jnp.asarray(0.3 * normal(*(shape or (4, 4)), seed=k, dtype="float64"), dtype)


def _integers(k: int, *shape: int) -> Array:
    return jnp.asarray(jnp.floor(4 * normal(*shape, seed=k)), jnp.int32)


def _pruned(k: int, *shape: int) -> Array:
    """About half of the elements are zero; how many are not differs between the rows."""
    x = _dense(k, *shape)
    return jnp.where(x > 0, x, jnp.zeros_like(x))


def _lora(w: Any, k: int = 0, **options: Any) -> ql.LoraArray:
    a, b = _dense(k, 2, 2, 4)
    return ql.LoraArray(w, a, b.T, alpha=4, **options)


def _blocks(k: int = 0) -> ql.BlockSparseArray:
    return ql.BlockSparseArray.from_dense(_dense(k), block_size=2, density=0.5)


def _stacked(make: Make) -> Make:
    """Two weights on a leading axis."""
    return lambda k=0: jtu.tree_map(lambda *leaves: jnp.stack(leaves), make(k), make(k + 10))


def _nan_in_padding(x: Any) -> Any:
    """A sparse array with NaN where a slot holds nothing: it may neither be seen nor differentiated."""
    if isinstance(x, ql.BlockSparseArray):
        empty = (x.col_idx == x.transposed_idx.shape[-2])[..., None, None]
        return x.replace(blocks=jnp.where(empty, jnp.nan, x.blocks))
    return x.replace(data=jnp.where(x.indices[0] == x.sizes[0], jnp.nan, x.data))


def _uneven_blocks(k: int = 0) -> ql.BlockSparseArray:
    """Rows of blocks that hold two, one and no block."""
    x = _dense(k, 6, 4).at[2:4, :2].set(0.0).at[4:].set(0.0)
    return _nan_in_padding(ql.BlockSparseArray.from_dense(x, block_size=2))


def _pruned_blocks(k: int) -> Array:
    """Two matrices, of which the second has more blocks."""
    return _dense(k, 2, 4, 4).at[0, :2].set(0.0).at[1, 2:, :2].set(0.0)


def _kronecker(k: int = 0) -> structured.KroneckerMatrix:
    return structured.KroneckerMatrix(_dense(k)[:2, :2], _dense(k)[2:, 2:])


def _cache(k: int = 0) -> quantized.CacheArray:
    """A cache, of which all is written."""
    empty = quantized.CacheArray.empty((4, 4), "int8", dtype=jnp.result_type(float))
    return ql.quaxify(lax.dynamic_update_slice)(empty, _dense(k), (0, 0))


def _tridiagonal(k: int = 0, dtype: Any = float) -> structured.TridiagonalMatrix:
    x = _dense(k, dtype=dtype)
    return structured.TridiagonalMatrix(x[0, 1:], x[1], x[2, 1:])


WEIGHTS: dict[str, Make] = {
    "LoraArray": lambda k=0: _lora(_dense(k), k),
    "NF4Array": lambda k=0: ql.NF4Array.quantize(_dense(k), block_size=32),
    "NF4Array, double": lambda k=0: ql.NF4Array.quantize(_dense(k), block_size=32, double_quant=True),
    "FP4Array": lambda k=0: ql.FP4Array.quantize(_dense(k), block_size=32),
    "Int4Array": lambda k=0: ql.Int4Array.quantize(_dense(k), block_size=32),
    "Int8Array": lambda k=0: ql.Int8Array.quantize(_dense(k)),
    "CacheArray": _cache,
    "BlockSparseArray": _blocks,
    "SparseArray": lambda k=0: ql.SparseArray.from_dense(_dense(k), density=0.5),
    "Zero": lambda k=0: zero.Zero((4, 4)),
    "Full": lambda k=0: zero.Full(0.25 + k, (4, 4)),
    "Identity": lambda k=0: zero.Identity(4),
    # With one name, since layers take their own results again.
    "NamedArray": lambda k=0: named.NamedArray(_dense(k), (None, "in")),
    # In no unit, since the products are added to numbers.
    "Unitful": lambda k=0: unitful.Unitful(_dense(k), unitful.dimensionless),
    "DiagonalMatrix": lambda k=0: structured.DiagonalMatrix(_dense(k)[0]),
    "TridiagonalMatrix": _tridiagonal,
    "KroneckerMatrix": _kronecker,
    "LowRankUpdate": lambda k=0: structured.LowRankUpdate(_dense(k), _dense(k)[:, :1], _dense(k)[:, 1:2]),
    "TrainableArray": lambda k=0: ql.TrainableArray(_dense(k)),
    "LoraArray of NF4Array": lambda k=0: _lora(ql.NF4Array.quantize(_dense(k), block_size=32), k),
    "LoraArray of BlockSparseArray": lambda k=0: _lora(_blocks(k), k),
    "LoraArray of SparseArray": lambda k=0: _lora(ql.SparseArray.from_dense(_dense(k), density=0.5), k),
    "NamedArray of Unitful of LoraArray": lambda k=0: named.NamedArray(
        unitful.Unitful(_lora(_dense(k), k), unitful.dimensionless), (None, "in")
    ),
}

CORNERS: dict[str, Make] = {
    "LoraArray, trained base": lambda k=0: _lora(_dense(k), k, gradients="train"),
    "LoraArray, magnitude": lambda k=0: _lora(_dense(k), k, magnitude=1.0 + _dense(k, 4)),
    "LoraArray, stacked": _stacked(lambda k: _lora(_dense(k), k)),
    "LoraArray, shared base": lambda k=0: ql.LoraArray(_dense(k), _dense(k, 2, 2, 4), _dense(k, 2, 4, 2)),
    "LoraArray, shared adapter": lambda k=0: ql.LoraArray(
        _dense(k, 2, 4, 4), _dense(k, 2, 4), _dense(k, 4, 2)
    ),
    "LoraArray, embedding": lambda k=0: _lora(_dense(k), k, out_axes=(-1,), in_axes=(-2,)),
    "LoraArray, magnitude, embedding": lambda k=0: _lora(
        _dense(k), k, magnitude=1.0 + _dense(k, 4), out_axes=(-1,), in_axes=(-2,)
    ),
    "LoraArray, row": lambda k=0: ql.LoraArray(_dense(k, 1, 4), _dense(k, 2, 4), _dense(k, 1, 2)),
    "LoraArray, rank 0": lambda k=0: ql.LoraArray(_dense(k), _dense(k, 0, 4), _dense(k, 4, 0)),
    "LoraArray, empty": lambda k=0: ql.LoraArray(_dense(k, 0, 4), _dense(k, 2, 4), _dense(k, 0, 2)),
    "LoraArray, bfloat16": lambda k=0: jtu.tree_map(lambda x: x.astype(jnp.bfloat16), _lora(_dense(k), k)),
    "LoraArray, bfloat16 base": lambda k=0: _lora(_dense(k, dtype=jnp.bfloat16), k),
    "LoraBias": lambda k=0: LoraBias(_dense(k, 4), _dense(k + 1, 4), 0.5),
    "LoraBias, trained": lambda k=0: LoraBias(ql.TrainableArray(_dense(k, 4)), _dense(k + 1, 4), 0.5),
    "LoraBias, no bias": lambda k=0: LoraBias(None, _dense(k, 4), 0.5),
    "TrainableRows": lambda k=0: ql.TrainableRows(_dense(k), _dense(k + 1, 2, 4), (3, 1)),
    "TrainableRows, transposed": lambda k=0: ql.TrainableRows(
        _dense(k, 5, 3), _dense(k + 1, 2, 3), (4, 0), transposed=True
    ),
    "TrainableRows of NF4Array": lambda k=0: ql.TrainableRows(
        ql.NF4Array.quantize(_dense(k), block_size=32), _dense(k + 1, 2, 4), (0, 2)
    ),
    "a user's array and scale": lambda k=0: users.Scaled(_dense(k, 3, 3), _dense(k + 1)[0, 0]),
    "a user's transpose": lambda k=0: users.Transposed(_dense(k, 3, 3)),
    "a user's multiple": lambda k=0: users.Rescaled(_dense(k, 3, 3)),
    "a user's product without rules": lambda k=0: users.Bare(_dense(k, 3, 3), _dense(k + 1, 3, 3)),
    "a user's array that passes through": lambda k=0: users.Passing(_dense(k, 3, 3)),
    "BlockArray": lambda k=0: ql.BlockArray.quantize(_dense(k), codec="q4_1"),
    "BlockArray, two levels": lambda k=0: ql.BlockArray.quantize(_dense(k, 2, 4, 4), codec="q3_k"),
    "BlockArray, no minima": lambda k=0: ql.BlockArray.quantize(_dense(k, 4, 16), codec="nvfp4"),
    "NF4Array, bfloat16": lambda k=0: ql.NF4Array.quantize(_dense(k, dtype=jnp.bfloat16), block_size=32),
    "NF4Array, trained scales": lambda k=0: ql.NF4Array.quantize(_dense(k), block_size=32, train_scales=True),
    "NF4Array, blocks in rows": lambda k=0: ql.NF4Array.quantize(_dense(k, 2, 64), block_size=32),
    "NF4Array, double, blocks in rows": lambda k=0: ql.NF4Array.quantize(
        _dense(k, 2, 64), block_size=32, double_quant=True
    ),
    "NF4Array, blocks across rows": lambda k=0: ql.NF4Array.quantize(_dense(k, 3, 24), block_size=32),
    "Int8Array, blocks in rows": lambda k=0: ql.Int8Array.quantize(_dense(k), block_size=2),
    "NF4Array, stacked": lambda k=0: ql.NF4Array.quantize(_dense(k, 2, 4, 4), block_size=32, stacked=1),
    "Int8Array, stacked": lambda k=0: ql.Int8Array.quantize(_dense(k, 2, 4, 4), stacked=1),
    "Int8Array, column": lambda k=0: ql.Int8Array.quantize(_dense(k, 4, 3, 1)),
    "Int8Array, vector": lambda k=0: ql.Int8Array.quantize(_dense(k, 6), block_size=4),
    "Int8Array, empty": lambda k=0: ql.Int8Array.quantize(_dense(k, 0, 4)),
    "Int8Array, trained scales": lambda k=0: ql.Int8Array.quantize(_dense(k), train_scales=True),
    "BlockSparseArray, uneven": _uneven_blocks,
    "BlockSparseArray, stacked": lambda k=0: _nan_in_padding(
        ql.BlockSparseArray.from_dense(_pruned_blocks(k), block_size=2)
    ),
    "BlockSparseArray, transposed": lambda k=0: _uneven_blocks(k).T,
    "SparseArray, vector": lambda k=0: ql.SparseArray.from_dense(_pruned(k, 6)),
    "SparseArray, stacked": lambda k=0: _nan_in_padding(
        ql.SparseArray.from_dense(_pruned(k, 3, 5), stacked=1)
    ),
    "SparseArray, stacked matrices": lambda k=0: _nan_in_padding(
        ql.SparseArray.from_dense(_pruned(k, 2, 3, 4), stacked=1)
    ),
    "SparseArray, empty": lambda k=0: ql.SparseArray.from_dense(_dense(k, 0, 3)),
    "SparseArray, nothing stored": lambda k=0: ql.SparseArray.from_dense(jnp.zeros((3, 3), float)),
    "SparseArray, bfloat16": lambda k=0: ql.SparseArray.from_dense(
        _dense(k, dtype=jnp.bfloat16), density=0.5
    ),
    "SparseArray, integers": lambda k=0: ql.SparseArray.from_dense(_integers(k, 3, 4)),
    "SparseArray, booleans": lambda k=0: ql.SparseArray.from_dense(_pruned(k, 3, 4) != 0),
    "SparseArray, complex": lambda k=0: ql.SparseArray.from_dense(_pruned(k, 3, 4) * (1 + 2j), density=0.5),
    "OneHotVector": lambda k=0: sparse.OneHotVector(_dense(k)[0, 0], 2 + k % 2, length=4),
    "OneHotVector, stacked": lambda k=0: sparse.OneHotVector(_dense(k, 2), jnp.array([3, 0]), length=6),
    "OneHotVector, out of bounds": lambda k=0: sparse.OneHotVector(_dense(k)[0, 0], 7, length=6),
    "OneHotVector, integers": lambda k=0: sparse.OneHotVector(5, 2, length=6),
    "OneHotVector, length 1": lambda k=0: sparse.OneHotVector(_dense(k)[0, 0], 0, length=1),
    "Zero, scalar": lambda k=0: zero.Zero(()),
    "Zero, integers": lambda k=0: zero.Zero((3, 4), jnp.int32),
    "Zero, booleans": lambda k=0: zero.Zero((4,), bool),
    "Full, array": lambda k=0: zero.Full(_dense(k)[0, 0], (3, 4)),
    "Full, one": lambda k=0: zero.Full(1.0, (4, 4)),
    "Full, scalar": lambda k=0: zero.Full(_dense(k)[0, 0], ()),
    "Full, stacked": lambda k=0: zero.Full(_dense(k, 2), (3, 4)),
    "Full, empty": lambda k=0: zero.Full(2.0, (0, 3)),
    "Full, empty infinity": lambda k=0: zero.Full(jnp.inf, (0,)),
    "Full, infinity": lambda k=0: zero.Full(jnp.inf, (3,)),
    "Full, nan": lambda k=0: zero.Full(jnp.nan, (3,)),
    "Full, booleans": lambda k=0: zero.Full(True, (3, 3)),
    "Full, integers": lambda k=0: zero.Full(3, (3, 3), jnp.int32),
    "Identity, integers": lambda k=0: zero.Identity(3, jnp.int32),
    "Identity, complex": lambda k=0: zero.Identity(3, complex),
    "Identity, 1": lambda k=0: zero.Identity(1),
    "NamedArray, names": lambda k=0: named.NamedArray(_dense(k, 3, 4), ("i", "j")),
    "Unitful, metres": lambda k=0: unitful.Unitful(_dense(k), "m"),
    "Unitful, scalar": lambda k=0: unitful.Unitful(_dense(k)[0, 0], "m"),
    "NamedArray of Unitful of BlockSparseArray": lambda k=0: named.NamedArray(
        unitful.Unitful(_blocks(k), "m"), ("in", "in")
    ),
    "Unitful of OneHotVector": lambda k=0: unitful.Unitful(
        sparse.OneHotVector(_dense(k)[0, 0], 2, length=6), "m"
    ),
    "DiagonalMatrix, stacked": lambda k=0: structured.DiagonalMatrix(_dense(k, 2, 3)),
    "DiagonalMatrix, integers": lambda k=0: structured.DiagonalMatrix(_integers(k, 3)),
    "DiagonalMatrix, complex": lambda k=0: structured.DiagonalMatrix(_dense(k, 3) * (1 + 2j)),
    "DiagonalMatrix, 1": lambda k=0: structured.DiagonalMatrix(_dense(k, 1)),
    "DiagonalMatrix, empty": lambda k=0: structured.DiagonalMatrix(_dense(k, 0)),
    "TridiagonalMatrix, stacked": _stacked(_tridiagonal),
    "TridiagonalMatrix, integers": lambda k=0: structured.TridiagonalMatrix(
        _integers(k, 2), _integers(k, 3), _integers(k + 1, 2)
    ),
    "TridiagonalMatrix, mixed": lambda k=0: structured.TridiagonalMatrix(
        _dense(k, 2), _dense(k, 3) * (1 + 1j), _dense(k + 1, 2)
    ),
    "KroneckerMatrix, stacked": _stacked(_kronecker),
    "KroneckerMatrix, oblong": lambda k=0: structured.KroneckerMatrix(_dense(k, 1, 2), _dense(k, 3, 2)),
    "KroneckerMatrix, mixed": lambda k=0: structured.KroneckerMatrix(_dense(k, 2, 2), _dense(k, 2, 2) * 1j),
    "BlockDiagonalMatrix": lambda k=0: structured.BlockDiagonalMatrix(_dense(k, 2, 2, 2)),
    "BlockDiagonalMatrix, oblong": lambda k=0: structured.BlockDiagonalMatrix(_dense(k, 2, 3, 1, 2)),
    "BlockCirculantMatrix": lambda k=0: structured.BlockCirculantMatrix(_dense(k, 2, 2, 2)),
    "BlockCirculantMatrix, oblong": lambda k=0: structured.BlockCirculantMatrix(_dense(k, 2, 1, 2, 3)),
    "LowRankUpdate, stacked": lambda k=0: structured.LowRankUpdate(
        _dense(k), _dense(k, 2, 4, 1), _dense(k, 4, 1)
    ),
    "LowRankUpdate of DiagonalMatrix": lambda k=0: structured.LowRankUpdate(
        structured.DiagonalMatrix(1 + _dense(k, 4)), _dense(k, 4, 1)
    ),
    "LowRankUpdate, mixed": lambda k=0: structured.LowRankUpdate(
        structured.DiagonalMatrix(1 + _dense(k, 3)), _dense(k, 3, 1) * 1j, _dense(k + 1, 3, 1)
    ),
    "BlockSparseArray of NF4Array": lambda k=0: ql.BlockSparseArray.from_blocks(
        ql.NF4Array.quantize(_dense(k, 2, 1, 4, 4), block_size=32), [[0], [1]], 2
    ),
}

# Adapters of published methods, on a weight `w`; `x` is a stack of matrices (4, 4).
METHODS: dict[str, Callable[[Array, Array], Any]] = {
    "SumArray": lambda w, x: adapters.SumArray(w, structured.KroneckerMatrix(x[0, :2, :2], x[0, 2:, 2:])),
    "ScaledArray": lambda w, x: adapters.ScaledArray(w, 1 + x[0, 0], 1 + x[0, 1]),
    "RotatedArray": lambda w, x: adapters.RotatedArray(
        w, structured.BlockDiagonalMatrix(x[:2, :2, :2]), out_axes=(-1,), in_axes=(-2,)
    ),
    "HadamardArray": lambda w, x: adapters.HadamardArray(w, 1 + x[0]),
    "IA3Array": lambda w, x: adapters.IA3Array(w, inputs=1 + x[0, 0]),
    "OFTArray": lambda w, x: adapters.OFTArray(w, x[0, :2, :1]),
    "BOFTArray": lambda w, x: adapters.BOFTArray(w, x[:2, :, :2].reshape(2, 2, 2, 2), 1 + x[3, 0]),
    "HRAArray": lambda w, x: adapters.HRAArray(w, x[0, :, :2]),
    "VeRAArray": lambda w, x: adapters.VeRAArray(w, x[0, :2], x[1, :, :2], x[2, 0, :2], x[2, 1]),
    "AdaLoRAArray": lambda w, x: adapters.AdaLoRAArray(w, x[0, :2], x[1, :, :2], x[2, 0, :2]),
    "DeLoRAArray": lambda w, x: adapters.DeLoRAArray(w, x[0, :2], x[1, :, :2], x[2, 0, 0], x[2, 1]),
    "MiSSArray": lambda w, x: adapters.MiSSArray(w, x[0, :3]),
    "MiSSArray, bat": lambda w, x: adapters.MiSSArray(w, bat=x[:2, :2, :2]),
    "GraLoRAArray": lambda w, x: adapters.GraLoRAArray(w, x[:2, :2], x[2:4, :, :2], x[4, :1], x[4, :, :1]),
    "RandLoRAArray": lambda w, x: adapters.RandLoRAArray(
        w, x[0, :2, None], x[1:3, :, :2].swapaxes(0, 1), x[3, :2, :2], 1 + x[4, :2]
    ),
    "LoHaArray": lambda w, x: adapters.LoHaArray(w, x[0, :, :1], x[1, :1], x[2, :, :1], x[3, :1]),
    "LoHaArray, dense": lambda w, x: adapters.LoHaArray(w, x[0, :, :2], x[1, :2], x[2, :, :2], x[3, :2]),
    "LoKrArray": lambda w, x: adapters.LoKrArray(w, x[0, :2, :2], x[1, :2, :1], second_b=x[2, :1, :2]),
    "HiRAArray": lambda w, x: adapters.HiRAArray(w, x[0, :2], x[1, :, :2]),
    "SHiRAArray": lambda w, x: adapters.SHiRAArray(
        w, ql.SparseArray.from_coo(x[0, 0], np.asarray([[0, 1], [1, 3], [2, 0], [2, 2]]), (4, 4))
    ),
    "C3AArray": lambda w, x: adapters.C3AArray(w, x[0].reshape(2, 2, 4)[..., :2]),
    "FourierFTArray": lambda w, x: adapters.FourierFTArray(w, x[0, 0], jnp.asarray([3, 5, 8, 14])),
}  # fmt: skip
CORNERS |= {
    name: lambda k=0, make=make: make(_dense(k), _dense(k + 1, 5, 4, 4)) for name, make in METHODS.items()
}
CORNERS |= {
    f"{name}, stacked": _stacked(CORNERS[name])
    for name in ("SumArray", "RotatedArray", "OFTArray", "VeRAArray")
}

# One value around another, of shape (4, 4) where that matters.
WRAPPERS: dict[str, Callable[[Any, int], Any]] = {
    "LoraArray": _lora,
    "NamedArray": lambda x, k: named.NamedArray(x, ("i", *(None,) * (x.ndim - 1))),
    "Unitful": lambda x, k: unitful.Unitful(x, "m"),
    "TrainableArray": lambda x, k: ql.TrainableArray(x),
    "LowRankUpdate": lambda x, k: structured.LowRankUpdate(x, _dense(k, 4, 1), _dense(k + 1, 4, 1)),
    "KroneckerMatrix": lambda x, k: structured.KroneckerMatrix(x, _dense(k, 1, 2)),
}


def nested() -> dict[str, Make]:
    """Each wrapper around each weight of another class."""
    out: dict[str, Make] = {}
    for outer, wrap in WRAPPERS.items():
        for inner, make in WEIGHTS.items():
            if inner.split(" of ")[0].split(",")[0] != outer:
                out[f"{outer} of {inner}"] = functools.partial(_wrapped, wrap, make)
    return out


def _wrapped(wrap: Callable[[Any, int], Any], make: Make, k: int = 0) -> Any:
    return wrap(make(k), k)


STRICT: dict[str, Make] = {
    make.__name__: lambda k=0, make=make: make(_dense(k, 4)) for make in (strict, strict_pair, product)
}
TYPES: dict[str, Make] = nested() | WEIGHTS | CORNERS


def parts(x: Any) -> list[Any]:
    """A Value and the Values that it is made of."""
    return [x, *(v for part in vars(x).values() for v in parts(part))] if ql.is_value(x) else []
