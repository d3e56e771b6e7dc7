"""Products of a few rows with dense weights: the forms of each platform, derivatives, who uses them."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike import kernels
from quaxlike.kernels.dense_matmul import dense_matmul, dense_matmul_p, dot_general
from quaxlike.lm.models.layers import each
from tests.primitives.jaxprs import equations
from tests.samples import normal

from .weights import lowered, relative_error

N, K = 24, 40


def _operands(*lead, dtype="bfloat16"):
    return normal(*lead, K, dtype=dtype), normal(N, K, dtype=dtype, seed=1)


def _products(f, *args):
    return [eqn for eqn in equations(jax.make_jaxpr(f)(*args)) if eqn.primitive is dense_matmul_p]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (0,)])
def test_values_and_derivatives(lead, dtype):
    x, w = _operands(*lead, dtype=dtype)
    exact = np.float64(x) @ np.float64(w).T
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert relative_error(jax.jit(dense_matmul)(x, w), exact) < tolerance
    loss = lambda x, w: jnp.sum(jnp.square(dense_matmul(x, w).astype(jnp.float32)))
    of_x, of_w = jax.grad(loss, argnums=(0, 1))(x, w)
    assert relative_error(of_x, 2 * exact @ np.float64(w)) < tolerance
    by_rows = lambda z: z.reshape(-1, z.shape[-1])
    assert relative_error(of_w, 2 * by_rows(exact).T @ by_rows(np.float64(x))) < tolerance


def test_one_row_is_multiplied_as_it_is_read():
    x, w = _operands()
    with kernels.backend("reference"):  # also where native products are compiled
        text = jax.jit(dense_matmul).lower(x, w).as_text()
        assert "dot_general" not in text
        assert "dot_general" in jax.jit(dense_matmul).lower(jnp.stack([x, x]), w).as_text()
    assert "dot_general" in lowered(dense_matmul, x, w)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "form"), [(2, (N, 2)), (64, (N, 64)), (65, (65, N))])
def test_some_rows_come_second(rows, form, dtype):
    """XLA's CPU compiler keeps `w @ x.T`, since it would transpose the weight for `x @ w.T`."""
    x, w = _operands(rows, dtype=dtype)
    with kernels.backend("reference"):
        text = jax.jit(dense_matmul).lower(x, w).compile().as_text()
    shape = ",".join(map(str, form))
    assert re.search(rf"\[{shape}\]\S* dot\(", text)


@pytest.mark.quick("100")
@pytest.mark.parametrize("rows", [3, 100])
def test_bfloat16_is_summed_in_float32_on_cpus(rows):
    """For XLA's fast products; the gradient for rows of x, too, but not on other platforms."""
    x, w = _operands(rows)
    pull = lambda ct: jax.vjp(lambda x: dense_matmul(x, w), x)[1](ct)[0]
    with kernels.backend("reference"):
        for f, operand in ((lambda x: dense_matmul(x, w), x), (pull, normal(rows, N, dtype="bfloat16"))):
            program = jax.jit(f).trace(operand)
            dots = {"cpu": "f32", "cuda": "bf16"}
            for platform, dtype in dots.items():
                text = program.lower(lowering_platforms=(platform,)).as_text()
                (dot,) = (line for line in text.splitlines() if "dot_general" in line)
                assert re.search(rf"-> tensor<\d+x\d+x{dtype}>", dot), dot
            assert jax.jit(f)(operand).dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_batch_of_rows_is_one_product():
    x, w = _operands(3)
    f = jax.vmap(dense_matmul, in_axes=(0, None))
    (eqn,) = _products(f, x, w)
    assert eqn.invars[0].aval.shape == x.shape
    np.testing.assert_array_equal(f(x, w), dense_matmul(x, w))
    of_weights = jax.vmap(dense_matmul, in_axes=(None, 0))(x, jnp.stack([w, 2 * w]))
    assert relative_error(of_weights[1], 2 * np.float64(x) @ np.float64(w).T) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("on_left", [False, True])
def test_the_general_product(on_left):
    x, w = _operands(2, 3)
    operands, axes = ((w, x), ((1,), (2,))) if on_left else ((x, w), ((2,), (1,)))
    f = lambda *operands: dot_general(*operands, (axes, ((), ())))
    assert len(_products(f, *operands)) == 1
    assert relative_error(f(*operands), lax.dot_general(*operands, (axes, ((), ())))) < 1e-2
    wide = lambda *operands: dot_general(*operands, (axes, ((), ())), preferred_element_type=jnp.float32)
    assert not _products(wide, *operands)


@pytest.mark.slow
def test_models_and_adapters_use_it():
    x, w = _operands(1)
    layer = eqx.tree_at(lambda layer: layer.weight, eqx.nn.Linear(K, N, key=jax.random.key(0)), w)
    layer = eqx.tree_at(lambda layer: layer.bias, layer, normal(N, dtype="bfloat16"))
    assert len(_products(lambda x: each(layer, x), x)) == 1
    np.testing.assert_allclose(
        np.float32(each(layer, x)), np.float32(jax.vmap(layer)(x)), rtol=2e-2, atol=2e-2
    )
    lora = ql.LoraArray(w, normal(2, K, dtype="bfloat16"), normal(N, 2, dtype="bfloat16"))
    product = ql.quaxify(lambda x, w: jax.vmap(lambda x: w @ x)(x))
    assert [eqn.invars[1].aval.shape for eqn in _products(product, x, lora)] == [(N, K)]
    dense = np.float64(w) + lora.scaling * np.float64(lora.b) @ np.float64(lora.a)
    assert relative_error(product(x, lora), np.float64(x) @ dense.T) < 1e-2
