"""A primitive that the compiler cannot look into is split over devices as it says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quaxlike.primitives import Partitioning, define_primitive
from tests.samples import array

MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
X = array(np.arange(32.0).reshape(4, 8))
W = array(np.arange(64.0).reshape(8, 8))


def _opaque(x, w):
    """The compiler sees a call to the host, and would gather its operands for it."""
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype)
    product = jax.pure_callback(lambda x, w: np.asarray(x) @ np.asarray(w).T, shape, x, w)
    return product, product.max(1)


RULE = Partitioning("m k, n k -> m n, m", sums=())
product_p = define_primitive(
    "test_product",
    lambda x, w: x @ w.T,
    partitioning=Partitioning("m k, n k -> m n", sums=("k",)),
)


def _run(fn, *args_and_specs):
    args = [jax.device_put(x, NamedSharding(MESH, spec)) for x, spec in args_and_specs]
    compiled = jax.jit(fn).lower(*args).compile()
    ops = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return compiled(*args), {op for op in ops if op in compiled.as_text()}


@pytest.mark.quick("x_spec2-w_spec2-out_spec2-collectives2", "x_spec4-w_spec4-out_spec4-collectives4")
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "out_spec", "collectives"),
    [
        (P("a"), P("b"), P("a", "b"), set()),
        (P("a"), P(), P("a"), set()),
        (P("a", "b"), P(None, "b"), P("a"), {"all-reduce"}),
        (P(None, ("a", "b")), P(None, ("a", "b")), P(), {"all-reduce"}),
        (P(), P(), P(), set()),
    ],
)
def test_split_without_gathering(x_spec, w_spec, out_spec, collectives):
    out, found = _run(product_p, (X, x_spec), (W, w_spec))
    assert found == collectives
    assert out.sharding.is_equivalent_to(NamedSharding(MESH, out_spec), out.ndim)
    np.testing.assert_allclose(out, X @ W.T)


@pytest.mark.slow
def test_one_mesh_axis_splits_one_dimension():
    out, _ = _run(product_p, (X, P("a", "b")), (W, P("a", "b")))
    np.testing.assert_allclose(out, X @ W.T)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_batched(dim):
    xs = jnp.stack([X, X + 1, X + 2, X + 3], axis=dim)
    spec = [None, None]
    spec.insert(dim, "a")
    out, found = _run(jax.vmap(product_p, in_axes=(dim, None)), (xs, P(*spec)), (W, P("b")))
    assert found == set()
    assert out.sharding.is_equivalent_to(NamedSharding(MESH, P("a", None, "b")), 3)
    np.testing.assert_allclose(out, jnp.moveaxis(xs, dim, 0) @ W.T)


@pytest.mark.slow
def test_gradient_of_a_split_primitive():
    grad = jax.grad(lambda x, w: jnp.sum(product_p(x, w) ** 2), argnums=(0, 1))
    found, _ = _run(grad, (X, P("a")), (W, P("b")))
    expected = jax.grad(lambda x, w: jnp.sum((x @ w.T) ** 2), argnums=(0, 1))(X, W)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


@pytest.mark.slow
def test_contracted_dimensions_are_whole_unless_summed():
    shapes = []

    def impl(x):
        shapes.append(x.shape)
        return jnp.sort(x, axis=1)[:, 0]

    p = define_primitive("test_smallest", impl, partitioning=Partitioning("m k -> m"))
    out, found = _run(p, (X, P("a", "b")))
    assert shapes[-1] == (2, 8)
    assert found == {"all-gather"}
    np.testing.assert_allclose(out, X[:, 0])


@pytest.mark.slow
def test_a_rule_from_types_and_parameters():
    def rule(x, *, axis):
        names = ["rows", "columns"]
        return Partitioning(f"rows columns -> {names[1 - axis]}", sums=(names[axis],))

    p = define_primitive("test_sum_axis", lambda x, *, axis: x.sum(axis), partitioning=rule)
    for axis in (0, 1):
        out, found = _run(partial(p, axis=axis), (X, P("a", "b")))
        assert found == {"all-reduce"}
        np.testing.assert_allclose(out, X.sum(axis))
    batched = jax.vmap(partial(p, axis=0), in_axes=2)
    out, _ = _run(batched, (jnp.stack([X, X], 2), P("a", "b")))
    np.testing.assert_allclose(out[1], X.sum(0))


def test_rules_that_cannot_be_read():
    for rule in ("m k, n k", "m -> n -> k", "m* -> m"):
        with pytest.raises(ValueError, match="cannot read the partitioning rule"):
            Partitioning(rule)
    for sums in (("m",), ("j",)):
        with pytest.raises(ValueError, match=r"found .*, expected some of \['k'\]"):
            Partitioning("m k -> m", sums=sums)
