"""Compiled, a program on Values costs what the same program costs that is written on their arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.arrays.zero import Identity, Zero
from quaxlike.kernels import block_sparse_matmul, csr_matmul, lora_matmul, nf4_matmul
from tests.samples import Lazy, array

SHAPE, RANK, ROWS = (128, 256), 4, 16
_RNG = np.random.default_rng(0)
W, A, B, X = (array(_RNG.normal(size=s), jnp.float32) for s in (SHAPE, (RANK, 256), (128, RANK), (ROWS, 256)))


def _times(x: Any, w: Any) -> Any:
    return x @ w.T


def _nf4(q: ql.NF4Array) -> dict[str, Any]:
    codes, scale = q.codes.reshape(-1), q.scale.reshape(-1)
    return {"packed": codes, "absmax": scale, "codebook": jnp.asarray(q.codebook)}


def _on_nf4(x: Any, q: ql.NF4Array) -> Any:
    return nf4_matmul(x, **_nf4(q), shape=SHAPE, block_size=64)


def _on_qlora(x: Any, w: ql.LoraArray) -> Any:
    args = (x, *_nf4(w.w).values(), w.a, w.b)
    return lora_matmul(*args, shape=SHAPE, block_size=64, scaling=w.scaling)


def _on_blocks(x: Any, w: ql.BlockSparseArray) -> Any:
    return block_sparse_matmul(x, w.blocks, w.col_idx, w.transposed_idx)


def _on_one_hot(x: Any, w: OneHotVector) -> Any:
    place = jnp.where(w.index < 0, w.index + 256, w.index)
    held = (place >= 0) & (place < 256)  # elsewhere the vector is zero, whatever its value
    column = x.at[:, jnp.where(held, place, 0)].get(mode="promise_in_bounds")
    return jnp.where(held, column, 0.0) * jnp.where(held, w.value, 0.0)


CASES = Lazy(
    {
        "LoRA": lambda: (
            _times,
            lambda x, w: x @ w.w.T + (x @ w.a.T * w.scaling) @ w.b.T,
            ql.LoraArray(W, A, B, alpha=8),
        ),
        "NF4": lambda: (_times, _on_nf4, ql.NF4Array.quantize(W)),
        "QLoRA": lambda: (_times, _on_qlora, ql.LoraArray(ql.NF4Array.quantize(W), A, B, alpha=8)),
        "block-sparse": lambda: (
            _times,
            _on_blocks,
            ql.BlockSparseArray.from_dense(W, block_size=64, density=0.5),
        ),
        "sparse": lambda: (
            _times,
            lambda x, w: csr_matmul(x, w.data, w.csr),
            ql.SparseArray.from_dense(W, density=0.1),
        ),
        "zero": lambda: (
            lambda x, w: x @ w.T + x[:, :128],
            lambda x, w: x[:, :128],
            Zero(SHAPE, jnp.float32),
        ),
        "identity": lambda: (lambda x, w: w @ x, lambda x, w: x, Identity(ROWS)),
        "one-hot": lambda: (lambda x, w: x @ w, _on_one_hot, OneHotVector(jnp.float32(2), jnp.int32(3), 256)),
    }
)


def _cost(f: Callable[..., Any], *args: Any) -> dict[str, float]:
    analysis: Any = jax.jit(f).lower(*args).compile().cost_analysis()
    return {key: analysis.get(key, 0.0) for key in ("flops", "bytes accessed")}


@pytest.mark.quick(2)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_costs_what_is_written_by_hand(name: str, backward: bool):
    program, by_hand, w = CASES[name]

    if backward:
        program, by_hand = (lambda x, w, f=f: jnp.sum(f(x, w) ** 2) for f in (program, by_hand))
    program, transform = ql.quaxify(program), jax.value_and_grad if backward else lambda f: f
    with ql.on_materialise("error"):
        ours = _cost(transform(program), X, w)
    expected = _cost(transform(by_hand), X, w)
    assert all(ours[key] <= expected[key] for key in expected), (ours, expected)
