"""The example types that come with quax, run by quaxlike: the same results as with quax itself.

Runs where quax is installed: `pip install -e '.[benchmark]' && pytest -m slow tests/test_quax_examples.py`.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import quaxlike as ql

quax = pytest.importorskip("quax", reason="its examples are run where quax is installed")
_EXAMPLES = Path(quax.__file__).parent / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_promotion")]


def _of_quaxlike(name: str) -> types.ModuleType:
    """An example of quax, in which `import quax` gives quaxlike."""
    path = _EXAMPLES / name / "_core.py"
    spec = importlib.util.spec_from_file_location(f"quaxlike_examples_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    before = sys.modules["quax"]
    sys.modules["quax"] = ql
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules["quax"] = before
    return module


def lora(m: Any, quaxify: Any) -> Any:
    mlp = eqx.nn.MLP(3, 2, 4, depth=1, key=jax.random.key(0))
    mlp = m.loraify(mlp, rank=2, key=jax.random.key(1))
    dynamic, static = eqx.partition(mlp, eqx.is_array)
    call = lambda dynamic, x: quaxify(eqx.combine(dynamic, static))(x)
    x = jnp.arange(3.0)
    gradients = jax.grad(lambda d: jnp.sum(call(d, x)))(dynamic)
    return call(dynamic, x), jax.jit(call)(dynamic, x), jax.vmap(call, (None, 0))(dynamic, x[None]), gradients


def named(m: Any, quaxify: Any) -> Any:
    width, height = m.Axis(3), m.Axis(4)
    x = m.NamedArray(jnp.arange(12.0).reshape(3, 4), (width, height))
    y = m.NamedArray(jnp.arange(4.0), (height,))
    total, product = quaxify(lambda x: x + x)(x), quaxify(jnp.matmul)(x, y)
    return total.array, product.array, product.axes == (width,)


def prng(m: Any, quaxify: Any) -> Any:
    key = m.ThreeFry(jnp.uint32(0))
    a, b = m.split(key)
    chosen = quaxify(jnp.where)(jnp.array(True), a, b)
    return m.normal(a, (3,)), m.uniform(b, (2, 2)), chosen.value


def sparse(m: Any, quaxify: Any) -> Any:
    x = m.BCOO(jnp.array([1.0, 2.0]), jnp.array([[0, 1], [2, 0]]), (3, 2), allow_materialise=False)
    y = jnp.arange(6.0).reshape(3, 2)
    both = quaxify(lambda x: x + x)(x)
    return quaxify(jnp.add)(x, y), quaxify(jnp.multiply)(x, y).data, both.data, both.indices


def structured_matrices(m: Any, quaxify: Any) -> Any:
    x = m.TridiagonalMatrix(jnp.arange(3.0), jnp.arange(4.0), jnp.arange(3.0) + 2)
    apply = lambda x, y: quaxify(jnp.matmul)(x, y)
    y = jnp.arange(4.0)
    gradient = jax.grad(lambda x, y: jnp.sum(apply(x, y)))(x, y)
    return apply(x, y), jax.jit(apply)(x, y), apply(x, jnp.stack([y, y], 1)), jtu.tree_leaves(gradient)


def unitful(m: Any, quaxify: Any) -> Any:
    x, t = m.Unitful(jnp.arange(3.0), m.meters), m.Unitful(jnp.array(2.0), m.seconds)
    area, path = quaxify(lambda x: x**2)(x), jax.jit(quaxify(jnp.multiply))(x, t)
    with pytest.raises(ValueError, match="Cannot add two arrays with units"):
        quaxify(jnp.add)(x, m.Unitful(jnp.arange(3.0), m.seconds))
    with pytest.raises(ValueError, match="Refusing to materialise Unitful array"):
        quaxify(jnp.sin)(x)
    return area.array, area.units == {m.meters: 2}, path.array, path.units == {m.meters: 1, m.seconds: 1}


def zero(m: Any, quaxify: Any) -> Any:
    x, y = m.Zero((2, 2), jnp.float32), jnp.arange(4.0).reshape(2, 2)
    zeros = [quaxify(f)(x, y) for f in (jnp.multiply, jnp.matmul)]
    rows = quaxify(lambda x: x[0])(x)
    return quaxify(jnp.add)(x, y), [type(z) is m.Zero and z.shape == (2, 2) for z in zeros], rows.shape


@pytest.mark.parametrize(
    "program", [lora, named, prng, sparse, structured_matrices, unitful, zero], ids=lambda p: p.__name__
)
def test_example(program: Any):
    found = program(_of_quaxlike(program.__name__), ql.quaxify)
    try:
        expected = program(importlib.import_module(f"quax.examples.{program.__name__}"), quax.quaxify)
    except Exception as error:  # quax does worse
        pytest.skip(f"quax itself fails: {type(error).__name__}: {error}")
    for a, b in zip(jtu.tree_leaves(found), jtu.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
