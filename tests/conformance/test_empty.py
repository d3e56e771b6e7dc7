"""Every type with an axis of size 0, in programs that every type may meet: shapes, dtypes, and gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.array_types import TYPES
from tests.samples import some_of

pytestmark = pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")


def _along(x, program):
    return [program(axis) for axis in range(x.ndim)]


PROGRAMS = {
    "itself": lambda x: x,
    "sums": lambda x: [jnp.sum(x), *_along(x, lambda axis: jnp.sum(x, axis))],
    "rearranged": lambda x: [x.T, x.mT, x[None], jnp.ravel(x), x.reshape(x.shape[::-1])],
    "more of it": lambda x: [jnp.stack([x, x]), *_along(x, lambda axis: jnp.concatenate([x, x], axis))],
    "larger": lambda x: [jnp.pad(x, [(1, 1)] * x.ndim), jnp.broadcast_to(x, (3, *x.shape))],
    "parts": lambda x: _along(x, lambda axis: lax.slice_in_dim(x, 0, x.shape[axis], 1, axis)),
    "arithmetic": lambda x: [x + x, x * x, -x, x * 2, x / 2, x * jnp.ones(x.shape, x.dtype)],
    "chosen": lambda x: jnp.where(jnp.ones(x.shape, bool), x, x),
    "cast": lambda x: x.astype(jnp.bfloat16),
    "added up": lambda x: [lax.associative_scan(jnp.add, x), *_along(x, lambda axis: jnp.cumsum(x, axis))],
    "loops": lambda x: [lax.map(jnp.sum, x), lax.scan(lambda c, r: (c + jnp.sum(r), r), 0.0, x)[0]],
    "products": lambda x: [
        x @ jnp.ones((x.shape[-1], 3), x.dtype),
        x @ jnp.ones((x.shape[-1], 0), x.dtype),
        jnp.ones((3, x.shape[-2]), x.dtype) @ x,
        x @ x.mT,
    ],
}


def _without_elements(x):
    """Functions of `x` whose results have an axis of size 0."""
    along = {
        f"axis {axis}": lambda x, axis=axis: lax.slice_in_dim(x, 0, 0, 1, axis) for axis in range(x.ndim)
    }
    return along | {"no stack": lambda x: jnp.stack([x, x])[:0]}


def _told(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_shapes_and_dtypes(name, default_promotion):
    """Nothing is computed: results and gradients are traced."""
    x = TYPES[name]()
    trained, rest = eqx.partition(x, eqx.is_inexact_array)
    for where, cut in _without_elements(x).items():
        for program in some_of(PROGRAMS, f"{name}, {where}", 6).values():
            run = lambda x, cut=cut, program=program: program(cut(x))
            try:
                expected = jax.eval_shape(run, jax.ShapeDtypeStruct(x.shape, x.dtype))
            except (TypeError, ValueError, IndexError, DeprecationWarning):
                continue  # not for arrays of this dtype, or of so few axes
            with ql.on_materialise("allow"):
                found = jax.eval_shape(lambda x, run=run: ql.materialise(ql.quaxify(run)(x)), x)

                def loss(trained, run=run):
                    out = jax.tree.leaves(ql.materialise(ql.quaxify(run)(eqx.combine(trained, rest))))
                    real = [jnp.real(y) for y in out if jnp.issubdtype(y.dtype, jnp.inexact)]
                    return sum((jnp.sum(y).astype(float) for y in real), jnp.zeros(()))

                jax.eval_shape(jax.grad(loss), trained)
            assert _told(found) == _told(expected)


@pytest.mark.quick("LowRankUpdate of Int8Array")
@pytest.mark.parametrize("name", TYPES)
def test_no_part_becomes_infinite(name, default_promotion):
    """A Value without elements may have parts with some: dividing by zero leaves their gradients zero."""
    whole = TYPES[name]()
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return
    for cut in _without_elements(whole).values():
        with ql.on_materialise("allow"):
            x = ql.quaxify(cut)(whole)
        trained, rest = eqx.partition(x, eqx.is_inexact_array)

        def both(x, zero):
            quotient = x / zero
            ahead = quotient @ jnp.ones((x.shape[-1], 3), x.dtype)
            return [jnp.sum(jnp.real(y)) for y in (quotient, quotient * zero, ahead)]

        @jax.jit
        @jax.value_and_grad
        def loss(trained, zero, rest=rest, both=both):
            out = ql.quaxify(both)(eqx.combine(trained, rest), zero)
            return sum(ql.materialise(out)).astype(float)

        with ql.on_materialise("allow"):
            value, gradients = loss(trained, jnp.zeros((), x.dtype))
        for leaf in [value, *jax.tree.leaves(gradients)]:
            np.testing.assert_array_equal(leaf, 0)
