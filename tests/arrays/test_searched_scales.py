"""Scales that are searched for: errors beside those of llama.cpp's quantiser, and weights of errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.quantized import CODECS, BlockArray
from quaxlike.arrays.quantized.scales import encode
from tests.samples import normal

#: The errors (root mean squares) of `ggml_quantize_chunk` on the matrix of `_matrix`, and with an importance
#: matrix, weighted by it; `pytest -m clients` compares with llama.cpp itself.
LLAMA_CPP = {
    "q4_0": (1.713e-3, 3.503e-3),
    "q4_1": (1.550e-3, 2.418e-3),
    "q5_0": (0.8513e-3, 1.726e-3),
    "q5_1": (0.7559e-3, 1.176e-3),
    "q2_k": (5.844e-3, 8.771e-3),
    "q3_k": (3.019e-3, 5.605e-3),
    "q4_k": (1.414e-3, 2.499e-3),
    "q5_k": (0.7217e-3, 1.362e-3),
    "q6_k": (0.3524e-3, 0.6999e-3),
    "iq4_nl": (1.522e-3, 2.975e-3),
    "iq4_xs": (1.535e-3, 3.035e-3),
    "mxfp4": (2.291e-3, 6.131e-3),
}


def _matrix():
    rng = np.random.default_rng(0)
    w = np.float32(0.02) * rng.normal(size=(32, 512)).astype(np.float32)
    return w, np.exp(2 * rng.normal(size=512)).astype(np.float32)


def _dense(q):
    return np.asarray(jax.jit(ql.materialise)(q))


def _error(w, q, importance=(1,)):
    return float(np.mean(np.asarray(importance, np.float32)[None] * (_dense(q) - w) ** 2) ** 0.5)


@pytest.mark.quick("q4_1", "mxfp4")
@pytest.mark.parametrize("codec", LLAMA_CPP)
def test_errors_are_at_most_those_of_llama_cpp(codec):
    w, importance = _matrix()
    plain, weighted = LLAMA_CPP[codec]
    q = ql.BlockArray.quantize(w, codec=codec)
    assert _error(w, q) < 1.02 * plain
    of_important = ql.BlockArray.quantize(w, codec=codec, importance=importance)
    assert _error(w, of_important, importance) < 1.02 * weighted
    assert _error(w, of_important, importance) < _error(w, q, importance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "mxfp4"])
def test_scales_that_cover_the_range_are_worse(name):
    w, codec = normal(16, 256), CODECS[name]
    codes, scales = encode(w, codec, codec.block)
    covering = ql.BlockArray.from_codes(codes, scales, codec=codec, block_size=codec.block)
    assert _error(w, ql.BlockArray.quantize(w, codec=name)) < 0.99 * _error(w, covering)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["q4_0", "q4_1", "q4_k", "iq4_nl", "mxfp4"])
def test_unusual_blocks(codec):
    """Zeros, a constant, tiny and large numbers, and rows that blocks do not fill."""
    numbers = [np.asarray(normal(80, seed=seed)) for seed in (0, 1)]
    rows = np.stack([np.zeros(80), np.full(80, 0.5), 1e-3 * numbers[0], 1e3 * numbers[1]]).astype(np.float32)
    found = _dense(ql.BlockArray.quantize(rows, codec=codec))
    assert found.shape == rows.shape
    assert np.all(np.abs(found - rows) <= 0.2 * np.max(np.abs(rows), axis=1, keepdims=True))


@pytest.mark.slow
def test_columns_without_importance_still_count():
    w, importance = _matrix()
    for weights in (np.where(np.arange(512) < 256, 0, importance), np.zeros(512, np.float32)):
        q = ql.BlockArray.quantize(w, codec="q4_k", importance=weights)
        assert _error(w, q) < 2 * LLAMA_CPP["q4_k"][0]


@pytest.mark.slow
def test_importance_of_each_array_of_a_stack():
    w = np.asarray(normal(2, 4, 64))
    importance = np.stack([np.arange(1.0, 65), np.ones(64)]).astype(np.float32)
    q = ql.BlockArray.quantize(w, codec="q4_0", importance=importance, stacked=1)
    for i in range(2):
        one = ql.BlockArray.quantize(w[i], codec="q4_0", importance=importance[i])
        np.testing.assert_array_equal(_dense(q)[i], _dense(one))
    turned = ql.BlockArray.quantize(w[0].T, codec="q4_0", importance=importance[0], axis=0)
    np.testing.assert_array_equal(_dense(turned).T, _dense(q)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"codec": "q4_0", "importance": np.ones(32)},
            r"one entry for each of the 64 elements .* shape \(32,\)",
        ),
        (
            {"codec": "int4_block", "importance": np.ones(64)},
            "codecs whose scales are searched for, .*'int4_block'",
        ),
    ],
)
def test_importance_that_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        ql.BlockArray.quantize(normal(4, 64), **options)


def test_calibration_takes_the_diagonal_of_moments():
    """Vectors are an importance matrix: the codes are rounded one by one."""
    weights = {"layer": normal(8, 64)}
    importance = jnp.arange(1.0, 65)
    q = ql.quantize(weights, "q4_k", calibrate={"layer": importance})["layer"]
    wanted = ql.BlockArray.quantize(weights["layer"], codec="q4_k", importance=importance)
    np.testing.assert_array_equal(_dense(q), _dense(wanted))
    with pytest.raises(
        ValueError, match=r"layer: moments must have shape \(64, 64\), or \(64,\).*found \(3,\)"
    ):
        ql.quantize(weights, "q4_k", calibrate={"layer": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"layer: an importance matrix is for schemes .* found 'int8'"):
        ql.quantize(weights, "int8", calibrate={"layer": importance})


def test_minima_above_zero():
    """`q4_1` stores any minimum, so that numbers far above 0 are rounded as those around it."""
    x = 1 + np.random.default_rng(0).uniform(size=(2, 256)).astype(np.float32)
    w = BlockArray.quantize(x, codec="q4_1")
    assert np.std(w.materialise() - x) < 1.2 / 15 / np.sqrt(12)  # of 15 equal steps between 1 and 2
