"""Block arrays of every codec keep their type and give what the dense array gives, under every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.quantized import CODECS, BlockArray, Codec
from quaxlike.arrays.quantized.scales import encode
from quaxlike.kernels import bits as bitstream
from tests.samples import array, normal, some_of


def _ordered(k=0):
    """Columns out of order, as GPTQ leaves them."""
    codes = (np.arange(4 * 32).reshape(4, 32) * 7 + k) % 16
    w = BlockArray.quantize(jnp.asarray(normal(4, 32, seed=k)), codec="uint4_block", block_size=8)
    order = np.random.default_rng(0).permutation(32).astype(np.int32)
    return BlockArray.from_codes(
        codes.astype(np.uint8), w.scale, codec=w.codec, block_size=8, order=order, dtype=w.dtype
    )


def _of(codec):
    return lambda k=0: BlockArray.quantize(jnp.asarray(normal(4, 32, seed=k)), codec=codec)


def _scaled(cls, **options):
    return lambda k=0: cls.quantize(jnp.asarray(normal(4, 32, seed=k)), block_size=32, **options)


MAKE = {
    **{name: _of(name) for name in CODECS},
    **{cls.__name__: _scaled(cls) for cls in (ql.NF4Array, ql.FP4Array, ql.Int4Array, ql.Int8Array)},
    "columns out of order": _ordered,
}

X, Y = jnp.asarray(normal(3, 32, seed=5)), jnp.asarray(normal(3, 4, seed=6))
INDEX = array([2, 0, 3])
SIGNAL = jnp.asarray(normal(2, 32, 5, seed=7))  # of 32 channels


def _conv(x, w, layout):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NCH", layout, "NCH"))


#: Of a matrix and another one, (4, 32) each.
PROGRAMS = {
    "forward": lambda w, v: X @ w.T,
    "transposed": lambda w, v: Y @ w,
    "on the left": lambda w, v: w @ X.T,
    "vmap": lambda w, v: jax.vmap(lambda x: w @ x)(X),
    "vmap over weights": lambda w, v: jax.vmap(lambda w: w @ X.T)(jnp.stack([w, v])),
    "stack, scan": lambda w, v: lax.scan(lambda x, w: (x @ w.T @ w, None), X, jnp.stack([w, v]))[0],
    "cond": lambda w, v: lax.cond(X[0, 0] > 0, lambda w, v: w, lambda w, v: v, w, v) @ X.T,
    "cond, scaled": lambda w, v: lax.cond(X[0, 0] > 0, lambda: w, lambda: -2.0 * w) @ X.T,
    "loop, scaled": lambda w, v: lax.fori_loop(0, 2, lambda _, w: -2.0 * w, w) @ X.T,
    "rows": lambda w, v: w[INDEX],
    "row": lambda w, v: w[1],
    "scaled": lambda w, v: (-w * 2.0) @ X.T,
    "bfloat16": lambda w, v: (w.astype(jnp.bfloat16) @ X.T.astype(jnp.bfloat16)).astype(jnp.float32),
    "jit": lambda w, v: jax.jit(lambda w: X @ w.T)(w),
    "grad by x": lambda w, v: jax.grad(lambda x: jnp.sum((x @ w.T) ** 2))(X),
    "hessian by x": lambda w, v: jax.hessian(lambda x: jnp.sum((w @ x) ** 2))(X[0]),
    "remat": lambda w, v: jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w.T))(x)))(X),
    "convolution": lambda w, v: _conv(SIGNAL, jnp.stack([w, v], axis=2), "OIH"),
    "convolution, gradient": lambda w, v: jax.grad(
        lambda x: jnp.sum(_conv(x, jnp.stack([w, v]).swapaxes(1, 2), "HIO") ** 2)
    )(SIGNAL),
    "embedding": lambda w, v: jax.vmap(lambda i: w[i])(INDEX) @ X.T,
    "experts by einsum": lambda w, v: jnp.einsum("nk,eok->neo", X, jnp.stack([w, v])),
    "experts": lambda w, v: lax.ragged_dot(X, jnp.stack([w, v]).swapaxes(1, 2), jnp.array([1, 2])),
}


@pytest.mark.parametrize(
    ("codec", "programs"),
    [
        ("q2_k", ("forward", "cond, scaled")),
        *(pytest.param(x, some_of(PROGRAMS, x, 2), marks=pytest.mark.slow) for x in MAKE),
    ],
    ids=["q2_k, a few", *MAKE],
)
def test_programs(codec, programs):
    w, v = MAKE[codec](), MAKE[codec](1)
    dense = [ql.materialise(w), ql.materialise(v)]

    # Rows that share an order of columns stay together.
    ordered = isinstance(w, BlockArray) and w.order is not None
    names = [name for name in programs if not (ordered and name in ("row", "embedding"))]

    def run(w, v):
        return {name: PROGRAMS[name](w, v) for name in names}

    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(run))(w, v)
    for name, expected in jax.jit(run)(*dense).items():
        tolerance = 5e-2 if name == "bfloat16" else 1e-4
        scale = float(jnp.max(jnp.abs(expected))) + 1
        np.testing.assert_allclose(
            np.asarray(ql.materialise(found[name])),
            expected,
            atol=tolerance * scale,
            err_msg=f"{codec}: {name}",
        )


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", ["q4_1", "nvfp4"])
def test_a_factor_gets_its_gradient(codec):
    w = MAKE[codec]()
    with ql.on_materialise("error"):
        found = jax.jit(jax.grad(lambda s: jnp.sum(ql.quaxify(lambda w: X @ (s * w).T)(w) ** 2)))(2.0)
    product = np.float64(X) @ np.float64(ql.materialise(w)).T
    np.testing.assert_allclose(found, 2 * 2.0 * np.sum(product**2), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("codec", MAKE)
def test_an_adapter_over_codes_learns(codec):
    w = ql.LoraArray(MAKE[codec](), jnp.asarray(normal(2, 32)), jnp.zeros((4, 2)))
    loss = lambda ab, w: jnp.mean((X @ ql.materialise(w.replace(a=ab[0], b=ab[1])).T - Y) ** 2)
    fast = lambda ab: jnp.mean((ql.quaxify(lambda w, x: x @ w.T)(w.replace(a=ab[0], b=ab[1]), X) - Y) ** 2)
    ab = (w.a, w.b)
    with ql.on_materialise("error"):
        grads = jax.grad(fast)(ab)
    expected = jax.grad(loss)(ab, w)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=1e-4), grads, expected)
    assert fast((ab[0] - 0.01 * grads[0], ab[1] - 0.01 * grads[1])) < fast(ab)


@pytest.mark.quick("6")
@pytest.mark.parametrize("bits", range(1, 9))
def test_streams_of_bits(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 21)).astype(np.uint8)
    packed = bitstream.pack(codes, bits)
    assert packed.shape == (3, bitstream.num_bytes(21, bits))
    np.testing.assert_array_equal(bitstream.unpack(packed, bits, 21), codes)
    np.testing.assert_array_equal(bitstream.unpack(jnp.asarray(packed), bits, 21), codes)
    whole = sum(int(code) << (bits * i) for i, code in enumerate(codes[0]))
    assert bytes(packed[0]) == whole.to_bytes(packed.shape[1], "little")


@pytest.mark.slow
def test_rows_that_are_not_there_are_nan():
    for codec in ("nvfp4", "mxfp4", "q4_0", "q2_k"):
        row = ql.quaxify(lambda w: w.at[jnp.array([9])].get(mode="fill"))(MAKE[codec]())
        assert jnp.isnan(ql.materialise(row)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: BlockArray.quantize(w, codec="q7"), "There is no codec 'q7'; there are int2_block, "),
        (lambda w: BlockArray.quantize(w, block_size=0), "must be positive or None, got 0"),
        (lambda w: BlockArray.quantize(w, double_quant=True), "A codec says how its scales are stored"),
        (lambda w: BlockArray.quantize(w[0, 0]), "at least one axis; found a scalar"),
        (
            lambda w: BlockArray.from_codes(
                np.zeros((4, 32), np.uint8), MAKE["q4_0"](0).scale, codec=Codec(4, bias=8), block_size=16
            ),
            r"takes scale of shape \(4, 2\); found \(4, 1\)",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.asarray(normal(4, 32)))


@pytest.mark.slow
def test_scales_that_are_powers_of_two_cut_nothing_off():
    x = normal(64, 32)
    found = np.abs(BlockArray.quantize(x, codec="mxfp4").materialise())
    largest = np.abs(x).argmax(-1)[:, None]
    kept = np.take_along_axis(found, largest, -1) / np.take_along_axis(np.abs(x), largest, -1)
    assert kept.min() >= 0.79  # 5 may become 4, of codes up to 6


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_rounds_to_near_codes(codec):
    # As a share of as many steps as the bits allow; floating-point codes are denser at zero.
    most = {"e4m3": 7.0, "e5m2": 14.0}.get(CODECS[codec].codes, 2.1) / 2 ** CODECS[codec].bits
    x = jnp.asarray(normal(8, 512))
    error = BlockArray.quantize(x, codec=codec).materialise() - x
    assert float(jnp.sqrt(jnp.mean(error**2))) < most


@pytest.mark.each_value
@pytest.mark.quick("mxfp4-float16-65000.0", "q8_0-bfloat16-10000000000.0")
@pytest.mark.parametrize(
    ("dtype", "largest"), [("float16", 6.5e4), ("bfloat16", 1e10), ("float32", 1e10), ("float32", 1e37)]
)
@pytest.mark.parametrize("codec", CODECS)
def test_finite_numbers_stay_finite(codec, dtype, largest):
    w = np.random.default_rng(0).uniform(-largest, largest, (2, 512)).astype(np.float32)
    w[:, ::96], w[:, 1::96] = largest, -largest
    q = BlockArray.quantize(jnp.asarray(w, dtype), codec=codec)
    assert jnp.isfinite(q.materialise()).all()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["q2_k", "q3_k", "q4_k", "q6_k"])
def test_scales_of_zeros_are_stored_as_zeros(codec):
    w = BlockArray.quantize(jnp.zeros((2, 256)), codec=codec)
    stored = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(w)}
    parts = [leaf for path, leaf in stored.items() if "codes" not in path]
    assert len(parts) >= 2
    assert not any(np.any(part) for part in parts)


@pytest.mark.quick("q4_k")
@pytest.mark.parametrize("codec", ["int3_block", "q8_0", "nf4", "int8", "fp8", "q4_k"])
def test_rounds_up_or_down_at_random(codec):
    """To one of two neighbours, with the number itself as the mean."""
    x = jnp.asarray(normal(2, 256))
    codec = CODECS[codec]
    decoded = lambda codes, scales: BlockArray.from_codes(
        codes, scales, codec=codec, block_size=codec.block
    ).materialise()
    block = codec.block or 256
    keys = jax.random.split(jax.random.key(0), 512)
    drawn = np.asarray(jax.vmap(lambda key: decoded(*encode(x, codec, block, key=key)))(keys), np.float64)
    nearest = np.asarray(decoded(*encode(x, codec, block)))
    step = drawn.max(0) - drawn.min(0)
    assert np.max(np.abs(drawn - nearest) - step) < 1e-6
    inside = np.abs(x - nearest) <= step  # the last number of a range has no neighbour
    assert inside.mean() > 0.95
    assert np.all(np.abs(drawn.mean(0) - x)[inside] <= 5 * 0.5 / 512**0.5 * step[inside] + 1e-6)
