"""A quantised weight with an adapter: one kernel where there is one, the same by redispatch where not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.quantized import CODECS
from quaxlike.kernels import lora_matmul_p, nf4_matmul_p
from tests.primitives.jaxprs import equations
from tests.samples import normal

N, K, RANK = 32, 64, 4


def _adapted(base=ql.NF4Array.quantize, shape=(N, K), dtype=jnp.float32, **options):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    w = base(array(*shape).astype(dtype))
    a, b = array(RANK, shape[-1]).astype(dtype), array(shape[-2], RANK).astype(dtype)
    return ql.LoraArray(w, a, b, alpha=8, **options)


def _x(*shape, dtype=jnp.float32):
    return normal(*shape, seed=1, dtype=dtype)


def _found(fn, *args):
    eqns = equations(jax.make_jaxpr(fn)(*args))
    return [e.primitive for e in eqns if e.primitive in (lora_matmul_p, nf4_matmul_p)]


def _agrees(fn, lora, x, tolerance=2e-6):
    """With the product of the dense weight in float64."""
    with ql.on_materialise("error"):
        actual = jax.jit(ql.quaxify(fn))(lora, x)
    dense = np.float64(ql.materialise(lora.w)) + lora.scaling * np.float64(lora.b) @ np.float64(lora.a)
    expected = fn(dense, np.float64(x))
    assert actual.shape == expected.shape
    assert np.linalg.norm(np.float64(actual) - expected) <= tolerance * np.linalg.norm(expected)


def _of_sorted_columns(w):
    order = np.random.default_rng(2).permutation(K)
    sorted_ = ql.BlockArray.quantize(w[:, order], codec="uint4_block", block_size=16)
    return ql.BlockArray.from_codes(
        sorted_.codes,
        sorted_.scale,
        codec=sorted_.codec,
        block_size=16,
        order=order,
        count=K,
    )


DOUBLE = functools.partial(ql.NF4Array.quantize, double_quant=True)
ONE_KERNEL = {
    "x @ W.T": (_adapted, lambda w, x: x @ w.T, (3, K)),
    "W @ x": (_adapted, lambda w, x: w @ x, (K,)),
    "W @ matrix": (_adapted, lambda w, x: w @ x, (K, 5)),
    "more axes": (_adapted, lambda w, x: x @ w.T, (2, 3, K)),
    "nested scales": (lambda: _adapted(DOUBLE), lambda w, x: x @ w.T, (3, K)),
    "blocks across rows": (lambda: _adapted(shape=(N, 40)), lambda w, x: x @ w.T, (3, 40)),
    "odd": (lambda: _adapted(shape=(7, 9)), lambda w, x: x @ w.T, (3, 9)),
    "another codebook": (lambda: _adapted(ql.Int4Array.quantize), lambda w, x: x @ w.T, (3, K)),
    "int8": (lambda: _adapted(ql.Int8Array.quantize), lambda w, x: x @ w.T, (3, K)),
    "int8 in blocks": (
        lambda: _adapted(functools.partial(ql.Int8Array.quantize, block_size=16)),
        lambda w, x: w @ x,
        (K, 5),
    ),
    "sorted columns": (lambda: _adapted(_of_sorted_columns), lambda w, x: x @ w.T, (3, K)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name):
    make, fn, shape = ONE_KERNEL[name]
    lora = make()
    assert _found(ql.quaxify(fn), lora, _x(*shape)) == [lora_matmul_p]
    _agrees(fn, lora, _x(*shape))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(codec):
    """One kernel, which makes no dense copy of the weight."""
    quantise, fn = functools.partial(ql.BlockArray.quantize, codec=codec), lambda w, x: x @ w.T
    lora = _adapted(quantise)
    assert _found(ql.quaxify(fn), lora, _x(3, K)) == [lora_matmul_p]
    _agrees(fn, lora, _x(3, K))

    n = k = 2048
    of = jax.ShapeDtypeStruct
    large = lora.replace(
        w=jax.eval_shape(quantise, of((n, k), jnp.float32)),
        a=of((RANK, k), jnp.float32),
        b=of((n, RANK), jnp.float32),
    )
    compiled = jax.jit(ql.quaxify(fn)).lower(large, of((4, k), jnp.float32)).compile()
    # A tile of 1 MiB, and what it is decoded by, where the dense weight would take 16.
    assert compiled.memory_analysis().temp_size_in_bytes <= 5 * 2**20


REDISPATCHED = {
    "contraction of rows": (_adapted, lambda w, x: x @ w, (3, N)),
    "both axes": (_adapted, lambda w, x: jnp.einsum("oi,io->", w, x), (K, N)),
    "codes along the other axis": (
        lambda: _adapted(functools.partial(ql.NF4Array.quantize, axis=0)),
        lambda w, x: x @ w.T,
        (3, K),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REDISPATCHED)
def test_what_the_kernel_does_not_take(name):
    make, fn, shape = REDISPATCHED[name]
    lora = make()
    assert lora_matmul_p not in _found(ql.quaxify(fn), lora, _x(*shape))
    fn_of = (lambda w, x: np.einsum("oi,io->", w, x)) if name == "both axes" else fn
    with ql.on_materialise("error"):
        actual = ql.quaxify(fn)(lora, _x(*shape))
    dense = np.float64(ql.materialise(lora.w)) + lora.scaling * np.float64(lora.b) @ np.float64(lora.a)
    np.testing.assert_allclose(actual, fn_of(dense, np.float64(_x(*shape))), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_adapters_in_a_wider_dtype_are_applied_in_it():
    lora = _adapted(dtype=jnp.bfloat16)
    wide = lora.replace(a=lora.a.astype(jnp.float32), b=lora.b.astype(jnp.float32))
    x, product = _x(3, K, dtype=jnp.bfloat16), ql.quaxify(lambda w, x: x @ w.T)
    assert _found(product, lora, x) == [lora_matmul_p]
    assert _found(product, wide, x) == [nf4_matmul_p]
    assert product(lora, x).dtype == product(wide, x).dtype == jnp.bfloat16


def test_dropout_and_magnitudes_are_redispatched():
    dropping = _adapted(dropout=0.5, key=jax.random.key(0))
    dora = _adapted(magnitude=jnp.ones(N))
    for lora in (dropping, dora):
        assert _found(ql.quaxify(lambda w, x: x @ w.T), lora, _x(3, K)) == [nf4_matmul_p]


@pytest.mark.slow
@pytest.mark.parametrize("train_scales", [False, True])
def test_the_scales_are_trained_only_if_asked(train_scales):
    quantise = functools.partial(ql.NF4Array.quantize, train_scales=train_scales)
    lora, x = _adapted(quantise, gradients="train"), _x(3, K)

    def loss(scale, lora):
        lora = lora.replace(w=ql.NF4Array(lora.w.codes, scale, 64, gradients=lora.w.gradients))
        return jnp.sum(jnp.sin(ql.quaxify(lambda w: x @ w.T)(lora)))

    gradient = jax.grad(loss)(lora.w.scale, lora)
    assert bool(jnp.any(gradient != 0)) == train_scales


def test_explain_names_the_kernel():
    (note,) = {n for row in ql.explain(lambda w, x: x @ w.T)(_adapted(), _x(3, K)).rules for n in row.notes}
    assert note.startswith("lora_matmul on reference")


@pytest.mark.slow
def test_no_pair_is_ambiguous():
    ql.check_ambiguities(ql.LoraArray, ql.NF4Array, ql.FP4Array, ql.Int4Array, ql.Int8Array, ql.BlockArray)
