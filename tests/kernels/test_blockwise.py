"""Block-wise quantisation against bitsandbytes' own output, bit for bit."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from quaxlike.kernels import blockwise
from tests.fixtures import fixture

_CASES = json.loads(fixture("nf4/cases.json").read_text())["cases"]
_ARRAYS = dict(np.load(fixture("nf4/cases.npz")))
_TRANSFORMS = [pytest.param(lambda f: f, id="eager"), pytest.param(jax.jit, id="jit", marks=pytest.mark.slow)]


def _stored(case, name):
    bits = _ARRAYS.get(f"{case['case']}/{name}__bf16bits")
    return _ARRAYS[f"{case['case']}/{name}"] if bits is None else bits.view(ml_dtypes.bfloat16)


def _same_bits(actual, expected):
    actual = np.asarray(actual)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["case"])
def test_nf4_is_bit_exact(case, transform):
    x, block_size = _stored(case, "x"), case["blocksize"]
    packed, absmax = transform(lambda x: blockwise.quantize_codebook(x, blockwise.NF4, block_size))(x)
    _same_bits(packed, _stored(case, "packed")[:, 0])
    _same_bits(absmax, _stored(case, "absmax_before_nesting" if case["nested"] else "absmax"))
    dequantize = transform(
        lambda packed, absmax: blockwise.dequantize_codebook(
            packed, absmax, blockwise.NF4, n=x.size, block_size=block_size, dtype=x.dtype
        ).reshape(x.shape)
    )
    _same_bits(dequantize(packed, _stored(case, "absmax")), _stored(case, "dequant"))


@pytest.mark.slow
@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("case", [c for c in _CASES if c["nested"]], ids=lambda case: case["case"])
def test_double_quantisation(case, transform):
    """A mean that is summed in another order differs in the last bit, and so does what is left."""
    absmax, offset = _stored(case, "absmax_before_nesting"), _stored(case, "nested_offset")
    codes, nested, mean = transform(blockwise.quantize_scales)(absmax)
    np.testing.assert_allclose(mean, offset, rtol=2e-7)
    _same_bits(codes, _stored(case, "absmax_q"))
    np.testing.assert_allclose(nested, _stored(case, "nested_absmax"), rtol=3e-7)
    restored = transform(blockwise.dequantize_scales)(codes, _stored(case, "nested_absmax"), offset)
    _same_bits(restored, _stored(case, "absmax"))


@pytest.mark.slow
@pytest.mark.parametrize("transform", _TRANSFORMS)
def test_fp4_is_bit_exact(transform):
    stored = load_file(fixture("linear4bit/fp4_not_nf4.safetensors"))
    arrays = np.load(fixture("linear4bit/io.npz"))
    weight = arrays["fp4_not_nf4/weight_original"]
    _same_bits(blockwise.FP4, stored["weight.quant_map"])
    packed, absmax = transform(lambda x: blockwise.quantize_codebook(x, blockwise.FP4, 64))(weight)
    _same_bits(packed, stored["weight"][:, 0])
    _same_bits(absmax, stored["weight.absmax"])
    dense = transform(
        lambda packed, absmax: blockwise.dequantize_codebook(
            packed, absmax, blockwise.FP4, n=weight.size, block_size=64
        )
    )(packed, absmax)
    _same_bits(dense.reshape(weight.shape), arrays["fp4_not_nf4/weight_dequant"])


def test_tables_are_the_published_ones():
    _same_bits(blockwise.NF4, _ARRAYS["nf4_code"])
    _same_bits(blockwise.dynamic_map(), _ARRAYS["nested_quant_map"])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "zero"), [(3, 7), (64, 7), (65, 7)])
def test_zeros_stay_zero_and_odd_counts_are_filled_with_zero(n, zero):
    packed, absmax = blockwise.quantize_codebook(jnp.zeros(n), blockwise.NF4, 64)
    assert set(np.asarray(packed).tolist()) == {zero << 4 | zero}
    expected = np.where(np.arange(len(absmax)) < n // 64, 0, 1e-38).astype(np.float32)
    _same_bits(absmax, expected)
    dense = blockwise.dequantize_codebook(packed, absmax, blockwise.NF4, n=n, block_size=64)
    np.testing.assert_array_equal(dense, 0)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.integers(1, 300),
    st.sampled_from([32, 64, 256]),
    st.sampled_from(["NF4", "FP4"]),
    st.integers(0, 2**32 - 1),
)
def test_codes_are_nearest_and_vmap_agrees(n, block_size, name, seed):
    codebook = getattr(blockwise, name)
    x = np.random.default_rng(seed).standard_normal((2, n)).astype(np.float32)
    packed, absmax = jax.vmap(lambda x: blockwise.quantize_codebook(x, codebook, block_size))(x)
    dense = jax.vmap(lambda p, a: blockwise.dequantize_codebook(p, a, codebook, n=n, block_size=block_size))(
        packed, absmax
    )
    scale = np.repeat(np.asarray(absmax, np.float64), block_size, axis=1)[:, :n]
    candidates = scale[..., None] * codebook.astype(np.float64)
    best = np.abs(candidates - x[..., None]).min(-1)
    # One rounding of the scaled value may move it across a midpoint, by no more than that.
    assert np.all(np.abs(np.asarray(dense, np.float64) - x) <= best + 2e-7 * scale)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(1, 40), st.sampled_from([None, 7, 16]), st.sampled_from([7, 127]))
def test_integers_are_within_half_a_step(n, block_size, largest):
    x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
    x[0] = 0
    integers, scale = blockwise.quantize_int(x, largest, block_size)
    assert np.abs(integers).max() <= largest
    steps = np.repeat(scale, block_size or n, axis=1)[:, :n]
    dense = np.float32(integers) * steps
    assert np.all(np.abs(dense - x) <= 0.5001 * steps)
    np.testing.assert_array_equal(dense[0], 0)


@pytest.mark.parametrize("block_size", [0, 16, 48, 8192, -64])
def test_block_sizes_are_checked(block_size):
    with pytest.raises(ValueError, match=f"power of two from 32 to 4096, got {block_size}"):
        blockwise.quantize_codebook(jnp.ones(64), blockwise.NF4, block_size)
