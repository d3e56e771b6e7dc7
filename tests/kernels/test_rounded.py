"""Products that round their inputs (`compute=`): values, derivatives, and what cannot be met."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import kernels
from quaxlike.arrays.quantized import CODECS, Codec
from tests.samples import normal

from .test_native import _choice, _dense, _quantised, _times, built, unloaded, use_native
from .weights import relative_error

__all__ = ["built", "unloaded", "use_native"]
_IN_BYTES = [name for name in CODECS if CODECS[name].bits < 8 or CODECS[name].codes in ("integer", "signed")]
_REFERENCE = functools.partial(kernels.backend, "reference")


def _computed(name, x):
    return dataclasses.replace(_quantised(name, x), compute="int8")


def _rounded(x):
    """In float64: blocks of 32, each with a scale, as numbers from -127 to 127."""
    x = np.asarray(x, np.float32)
    blocks = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)]).reshape(*x.shape[:-1], -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / np.where(most, most, 1)))
    return (np.float64(codes) * np.float64(most / np.float32(127))).reshape(*x.shape[:-1], -1)[
        ..., : x.shape[-1]
    ]


def test_the_reference_rounds_blocks_and_differentiates_straight_through():
    w, x = _computed("q4_0", normal(24, 64)), normal(3, 64, seed=1)
    dense, times = _dense(w), _times(w)[0]
    with _REFERENCE():
        assert relative_error(times(x, w), _rounded(x) @ dense.T) < 1e-6
        y, of_x = jax.value_and_grad(lambda x: jnp.sum(times(x, w)))(x)
        assert abs(float(y) - (_rounded(x) @ dense.T).sum()) < 1e-3
        assert relative_error(of_x, np.broadcast_to(dense.sum(0), x.shape)) < 1e-5
    assert 1e-3 < relative_error(_rounded(x) @ dense.T, np.float64(x) @ dense.T) < 1e-2


def _narrow(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_0", "nf4", "fp8"])
def test_inputs_in_bfloat16(name):
    """Sums are in float32, and the result has the dtype of the inputs."""
    w, x = dataclasses.replace(_quantised(name, normal(24, 64)), compute="bfloat16"), normal(3, 64, seed=1)
    dense, times = _dense(w), _times(w)[0]
    adapted = ql.LoraArray(w, normal(4, 64, seed=2), normal(24, 4, seed=3), alpha=8)
    low_rank = 2 * np.float64(x) @ np.float64(adapted.a).T @ np.float64(adapted.b).T
    with _REFERENCE():
        y, of_x = jax.value_and_grad(lambda x: jnp.sum(times(x, w)))(x)
        assert relative_error(times(x, w), _narrow(x) @ _narrow(dense).T) < 1e-6
        assert relative_error(times(x, adapted), _narrow(x) @ _narrow(dense).T + low_rank) < 1e-6
        assert relative_error(ql.quaxify(jnp.matmul)(x[:, :24], w), np.float64(x[:, :24]) @ dense) < 1e-6
    assert abs(float(y) - (_narrow(x) @ _narrow(dense).T).sum()) < 1e-3
    assert relative_error(of_x, np.broadcast_to(dense.sum(0), x.shape)) < 1e-5
    assert "inputs are rounded to bfloat16; " in _choice(w, x)


@pytest.mark.quick("q8_0")
@pytest.mark.parametrize("name", ["q2_k", "q4_0", "q4_k", "q6_k", "q8_0", "mxfp4"])
def test_rounding_to_bfloat16_is_less_than_that_of_the_format(name):
    dense, x = normal(64, 512), normal(8, 512, seed=1)
    w = dataclasses.replace(_quantised(name, dense), compute="bfloat16")
    exact = np.float64(x) @ _dense(w).T
    by_format = relative_error(exact, np.float64(x) @ np.float64(dense).T)
    with _REFERENCE():
        assert relative_error(_times(w)[0](x, w), exact) < by_format / 2


def test_parts_of_rows_of_codes():
    """Their product is not rounded if it contracts rows, and has nothing to round without elements."""
    w = ql.BlockArray.quantize(normal(4, 256), codec="q4_k", compute="int8")
    assert _times(w)[0](normal(3, 256), w[:0]).shape == (3, 0)
    parts, x = dataclasses.replace(w, inner=(2, 128)), normal(3, 4, 2)
    by_rows = ql.quaxify(lambda x, w: jnp.einsum("mni,nij->mj", x, w))
    expected = np.einsum("mni,nij->mj", x, np.float64(parts.materialise()))
    assert relative_error(by_rows(x, parts), expected) < 1e-5
    with pytest.raises(ValueError, match="takes matrices that have rows of codes; found one of shape"):
        ql.quaxify(lambda x, w: jnp.einsum("mj,nij->mni", x, w))(normal(3, 128), parts)


def test_what_cannot_be_met_is_an_error(unloaded):
    x = normal(4, 64)
    with pytest.raises(ValueError, match=r"takes codes that bytes can hold.*BlockArray of fp8"):
        ql.BlockArray.quantize(x, codec="fp8", compute="int8")
    with pytest.raises(ValueError, match="compute must be 'int8', 'bfloat16' or None; found 'int4'"):
        ql.NF4Array.quantize(x, compute="int4")
    with pytest.raises(ValueError, match="`activations` and `compute` each say"):
        dataclasses.replace(ql.Int8Array.quantize(x), activations="int8", compute="int8")
    wide = Codec(bits=6, codes="table", table=tuple(map(float, range(64))), block=32)
    with pytest.raises(ValueError, match="tables of at most 16 values; found BlockArray of 6-bit"):
        ql.BlockArray.quantize(x, codec=wide, compute="int8")
    w = _computed("nf4", x)
    with pytest.raises(
        ValueError, match=r"nf4_matmul cannot compute in int8 on platform 'cpu'.*not compiled"
    ):
        _times(w)[0](x, w)
    lowered = jax.jit(_times(w)[0]).trace(x, w)
    with pytest.raises(ValueError, match="on platform 'cuda': there is no kernel for platform 'cuda'"):
        lowered.lower(lowering_platforms=("cuda",))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(24, 256), (37, 288), (21, 320), (6, 96)])
@pytest.mark.parametrize("name", [*_IN_BYTES, "nested"])
def test_products_of_all_formats(use_native, name, shape):
    in_two_bytes = name in ("nf4", "fp4", "nested")
    for dtype in (jnp.float32, jnp.bfloat16):
        w = _computed(name, normal(*shape))
        fn = jax.jit(ql.quaxify(lambda x, w: jnp.matmul(x, w.T, preferred_element_type=jnp.float32)))
        for rows in (1, 2, 5, 8, 40):
            x = normal(rows, shape[1], dtype=dtype, seed=rows)
            expected = _rounded(x) @ _dense(w).T
            assert relative_error(fn(x, w), expected) < (1e-4 if in_two_bytes else 1e-6)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(24, 256), (37, 288), (6, 96)])
@pytest.mark.parametrize("name", [*CODECS, "nested"])
def test_products_in_bfloat16_of_all_formats(use_native, name, shape):
    w = dataclasses.replace(_quantised(name, normal(*shape)), compute="bfloat16")
    fn = jax.jit(_times(w)[0])
    for rows in (1, 2, 8, 40):
        x = normal(rows, shape[1], seed=rows)
        y = fn(x, w)
        assert y.dtype == jnp.float32
        # Up to 16 rows multiply either the exact weight or that in bfloat16, depending on the processor.
        assert relative_error(y, _narrow(x) @ _dense(w).T) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "nf4", "int8"])
def test_derivatives_and_transforms(use_native, name):
    w, x = _computed(name, normal(48, 256)), normal(3, 256, seed=1)
    dense, times = _dense(w), _times(w)[0]
    y = times(x, w)
    assert _choice(w, x).partition(":")[0].endswith(" on native")
    assert "inputs are rounded to 8 bits in blocks of 32" in _choice(w, x)
    with _REFERENCE():
        assert relative_error(times(x, w), y) < 1e-4
    with ql.on_materialise("error"):
        of_x = jax.jit(jax.grad(lambda x: jnp.sum(times(x, w))))(x)
        assert relative_error(of_x, np.broadcast_to(dense.sum(0), x.shape)) < 1e-5
        assert relative_error(jax.jvp(lambda x: times(x, w), (x,), (x,))[1], np.float64(x) @ dense.T) < 1e-5
        assert relative_error(jax.vmap(times, (0, None))(x, w), y) < 1e-6
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
        assert relative_error(jax.vmap(times, (None, 0))(x, stack), [y, y]) < 1e-6
    adapted = ql.LoraArray(w, normal(4, 256, seed=2), normal(48, 4, seed=3), alpha=8)
    low_rank = 2 * np.float64(x) @ np.float64(adapted.a).T @ np.float64(adapted.b).T
    assert relative_error(times(x, adapted), np.float64(y) + low_rank) < 1e-5


@pytest.mark.slow
def test_exported_programs_round_without_the_library(built):
    w, x = _computed("q4_k", normal(48, 256)), normal(3, 256)
    fn = jax.jit(lambda x: _times(w)[0](x, w))
    assert "quaxlike_multiply_rounded" in fn.lower(x).as_text()
    exported = jax.export.export(fn)(x)
    assert "quaxlike_multiply" not in exported.mlir_module()
    assert relative_error(exported.call(x), fn(x)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_of_any_size(use_native, rows):
    w = _computed("q4_k", normal(40, 512))
    times, dense = _times(w)[0], _dense(w)
    for x in (normal(rows, 512) * 1e20, normal(rows, 512) * 1e-20):
        assert relative_error(times(x, w) / np.abs(x).max(), _rounded(x) @ dense.T / np.abs(x).max()) < 1e-6
    assert not times(jnp.zeros((rows, 512)), w).any()
    for special in (jnp.nan, jnp.inf):
        assert np.isnan(times(normal(rows, 512).at[0, 77].set(special), w)[0]).all()


@pytest.mark.slow
def test_trained_scales_and_models(use_native):
    w, x = ql.train_scales(_computed("nf4", normal(48, 256))), normal(3, 256, seed=1)
    loss = lambda scale: jnp.sum(_times(w)[0](x, dataclasses.replace(w, scale=scale)))
    with _REFERENCE():
        expected = jax.grad(loss)(w.scale)
    assert float(jnp.linalg.norm(expected)) > 0
    assert relative_error(jax.grad(loss)(w.scale), expected) < 1e-5
    model = ql.quantize({"weight": normal(48, 256)}, "q4_0", where="weight", layout="oi", compute="int8")
    assert model["weight"].compute == "int8"
