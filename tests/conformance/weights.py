"""Every shipped array type as a weight of shape (4, 4): one line each, and it is in the table."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

import quaxlike as ql
from quaxlike.arrays import named, structured, unitful, zero
from tests.samples import normal


def _dense() -> Array:
    return 0.3 * normal(4, 4)


def _lora(w: Array | ql.ArrayValue) -> ql.LoraArray:
    a, b = 0.3 * normal(2, 2, 4)
    return ql.LoraArray(w, a, b.T, alpha=4)


WEIGHTS: dict[str, Callable[[], ql.ArrayValue]] = {
    "LoraArray": lambda: _lora(_dense()),
    "NF4Array": lambda: ql.NF4Array.quantize(_dense(), block_size=32),
    "NF4Array, double": lambda: ql.NF4Array.quantize(_dense(), block_size=32, double_quant=True),
    "FP4Array": lambda: ql.FP4Array.quantize(_dense(), block_size=32),
    "Int4Array": lambda: ql.Int4Array.quantize(_dense(), block_size=32),
    "Int8Array": lambda: ql.Int8Array.quantize(_dense()),
    "LoraArray of NF4Array": lambda: _lora(ql.NF4Array.quantize(_dense(), block_size=32)),
    "BlockSparseArray": lambda: ql.BlockSparseArray.from_dense(_dense(), block_size=2, density=0.5),
    "LoraArray of BlockSparseArray": lambda: _lora(
        ql.BlockSparseArray.from_dense(_dense(), block_size=2, density=0.5)
    ),
    "SparseArray": lambda: ql.SparseArray.from_dense(_dense(), density=0.5),
    "LoraArray of SparseArray": lambda: _lora(ql.SparseArray.from_dense(_dense(), density=0.5)),
    "Zero": lambda: zero.Zero((4, 4), jnp.float32),
    "Full": lambda: zero.Full(0.25, (4, 4)),
    "Identity": lambda: zero.Identity(4),
    # With one name, since layers take their own results again.
    "NamedArray": lambda: named.NamedArray(_dense(), (None, "in")),
    # In no unit, since the products are added to numbers.
    "Unitful": lambda: unitful.Unitful(_dense(), unitful.dimensionless),
    "NamedArray of Unitful of LoraArray": lambda: named.NamedArray(
        unitful.Unitful(_lora(_dense()), unitful.dimensionless), (None, "in")
    ),
    "DiagonalMatrix": lambda: structured.DiagonalMatrix(_dense()[0]),
    "TridiagonalMatrix": lambda: structured.TridiagonalMatrix(_dense()[0, 1:], _dense()[1], _dense()[2, 1:]),
    "KroneckerMatrix": lambda: structured.KroneckerMatrix(_dense()[:2, :2], _dense()[2:, 2:]),
    "LowRankUpdate": lambda: structured.LowRankUpdate(_dense(), _dense()[:, :1], _dense()[:, 1:2]),
}
