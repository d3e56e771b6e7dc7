"""What the gradient of a scan keeps of each iteration, and that it is the same gradient."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.testing.compare import disagreement
from tests.samples import Lazy, normal

W = normal(3, 64, 64, scale=0.2)
A, B = normal(3, 2, 64, scale=0.2), normal(3, 64, 2, scale=0.2)
X = normal(5, 64)
BASES = Lazy({
    "dense": lambda: W,
    "bfloat16": lambda: W.astype(jnp.bfloat16),
    "nf4": lambda: ql.NF4Array.quantize(W),
    "int8": lambda: ql.Int8Array.quantize(W),
    "of another LoRA": lambda: ql.LoraArray(W, jnp.concatenate([A, A], 1), jnp.concatenate([B, B], 2)),
})  # fmt: skip


def layers(x, w):
    times = lambda x, w: jnp.einsum("bk,nk->bn", x, w)
    return lax.scan(lambda x, w: (jnp.tanh(times(x.astype(w.dtype), w).astype(x.dtype) + x), None), x, w)[0]


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from scans(inner)


def kept(fn, *args):
    """The types of what the scans of a gradient write in each of the three iterations."""
    found = scans(jax.make_jaxpr(jax.grad(fn))(*args).jaxpr)
    return [x.aval for eqn in found for x in eqn.outvars if x.aval.shape[:1] == (3,)]


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_no_copy_of_a_frozen_weight_is_kept(name):
    base = BASES[name]
    loss = lambda parts, base: jnp.sum(ql.quaxify(layers)(X, ql.LoraArray(base, *parts)) ** 2)
    types = lambda arrays: {(x.shape, x.dtype) for x in arrays}
    frozen = types(x for x in jax.tree.leaves(base) if x.ndim > 1)  # numbers such as alpha take no memory
    with ql.on_materialise("error"):
        assert types(kept(loss, (A, B), base)).isdisjoint(frozen)
        found = jax.jit(jax.grad(loss))((A, B), base)
    dense = ql.materialise(base).astype(jnp.float32)
    by_hand = lambda parts: jnp.sum(layers(X, ql.materialise(ql.LoraArray(dense, *parts))) ** 2)
    tolerance = 0.1 if name == "bfloat16" else 1e-3
    assert not disagreement(found, jax.grad(by_hand)((A, B)), tolerance=tolerance)


class Held(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


PROGRAMS = {
    # The carry is another array in each iteration: nothing before the scan can make it a constant.
    "a carry that is a constant in each iteration": lambda w, c, xs: lax.scan(
        lambda c, x: (lax.stop_gradient(c) * x + w @ x, c), c, xs
    ),
    "an array that is read in both ways": lambda w, c, xs: lax.scan(
        lambda c, x: (c + w * lax.stop_gradient(w) + x * lax.stop_gradient(x), x), c, xs
    ),
    "constants that are results": lambda w, c, xs: lax.scan(
        lambda c, x: (c * x, (lax.stop_gradient(w), lax.stop_gradient(x))), c, xs
    ),
    "a constant that is used twice": lambda w, c, xs: lax.scan(
        lambda c, x: (c * lax.stop_gradient(w) + lax.stop_gradient(w), lax.stop_gradient(c)), c, xs
    ),
    "conversions of one array": lambda w, c, xs: lax.scan(
        lambda c, x: (
            c * x + w.astype(jnp.float16).astype(c.dtype) * w.astype(jnp.float16).astype(c.dtype),
            x,
        ),
        c,
        xs,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_constants_stay_what_they_are(name):
    def loss(w, c, xs):
        out = ql.quaxify(PROGRAMS[name])(w, c, xs)
        return sum(jnp.sum(jnp.sin(x).astype(jnp.float32)) for x in jax.tree.leaves(ql.materialise(out)))

    w, c, xs = W[0, :4, :4], W[1, :4, :4], W[:, 4:8, :4]
    found = jax.grad(loss, argnums=(0, 1, 2))(Held(w), c, xs)
    expected = jax.grad(loss, argnums=(0, 1, 2))(w, c, xs)
    assert not disagreement((found[0].array, *found[1:]), expected)
    assert not disagreement(loss(Held(w), c, xs), loss(w, c, xs))
    one = lambda x: loss(Held(w), c, x)
    assert not disagreement(jax.jvp(one, (xs,), (xs,))[1], jax.jvp(lambda x: loss(w, c, x), (xs,), (xs,))[1])


@pytest.mark.slow
def test_an_equation_without_results(capfd):
    """As of `jax.debug.print`, and of assertions."""

    def step(c, x):
        jax.debug.print("at {}", c[0, 0])
        return c * x, None

    last = ql.quaxify(lambda c, xs: lax.scan(step, c, xs)[0])
    loss = lambda c, xs: jnp.sum(ql.materialise(last(Held(c), xs)))
    assert not disagreement(jax.grad(loss)(W[0], W), jnp.prod(W, 0))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("at ") == 3
