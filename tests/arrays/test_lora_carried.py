"""Adapted arrays where control flow, choices and writes meet them with other arrays: the values, and the
gradients by every leaf and every operand, of the same program on dense arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import Unitful
from quaxlike.arrays.zero import Identity
from tests.samples import normal

SCALING = 1.5
_RNG = np.random.default_rng(0)
W, A, B, Y = (_RNG.normal(size=s) for s in ((4, 3), (2, 3), (4, 2), (4, 3)))


def holds(y):
    """A traced predicate that is true."""
    return y[0, 0] > -9


# name: (program of an adapted and a plain array, whether it stays adapted)
PROGRAMS = {
    "cond, adapted or plain": (lambda x, y: lax.cond(holds(y), lambda: x, lambda: y), True),
    "cond, plain or adapted": (lambda x, y: lax.cond(holds(y), lambda: y, lambda: x), True),
    "cond, dense result": (lambda x, y: lax.cond(holds(y), lambda: jnp.sin(x), lambda: x), True),
    "cond, scaled": (lambda x, y: lax.cond(holds(y), lambda: x * y[0, 1], lambda: x), True),
    "cond, not scaled": (lambda x, y: lax.cond(holds(y), lambda: x, lambda: x * y[0, 1]), True),
    "cond, other rank": (lambda x, y: lax.cond(holds(y), lambda: x + x * y[0, 1], lambda: x), True),
    "switch": (
        lambda x, y: lax.switch(jnp.where(holds(y), 2, 0), [lambda: x, lambda: y, lambda: x * y[0, 1]]),
        True,
    ),
    "where, plain": (lambda x, y: jnp.where(holds(y), y, x), True),
    "where, adapted": (lambda x, y: jnp.where(holds(y), x, y), True),
    "where, scaled": (lambda x, y: jnp.where(holds(y), x * 2, x), True),
    "scan, dense result": (lambda x, y: lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=3)[0], True),
    "scan, plain start": (lambda x, y: lax.scan(lambda c, _: (x * c[0, 0], None), y, length=2)[0], True),
    "fori, scaled by a number": (lambda x, y: lax.fori_loop(0, 3, lambda i, c: c * 0.9, x), True),
    "fori, scaled": (lambda x, y: lax.fori_loop(0, 3, lambda i, c: c * y[0, 0], x), True),
    "fori, added to": (lambda x, y: lax.fori_loop(0, 3, lambda i, c: c + y, x), True),
    "fori, transposed": (lambda x, y: lax.fori_loop(0, 3, lambda i, c: c.T, x[:3]), True),
    "cond, transposed": (lambda x, y: lax.cond(holds(y), lambda: x[:3].T, lambda: x[:3]), True),
    "moving average": (lambda x, y: lax.fori_loop(0, 4, lambda i, c: c * 0.9 + x * 0.1, y), False),
    "moving average of itself": (lambda x, y: lax.fori_loop(0, 4, lambda i, c: c * 0.9 + x * 0.1, x), False),
    "at.add": (lambda x, y: jnp.stack([y, y]).at[1].add(x), False),
    "at.set": (lambda x, y: jnp.stack([y, y]).at[1].set(x), False),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(jnp.stack([y, y]), x[None], (1, 0, 0)),
        False,
    ),
    "into more rows": (lambda x, y: lax.dynamic_update_slice(jnp.concatenate([y, y]), x, (1, 0)), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["none", pytest.param("train", marks=pytest.mark.slow)])
def test_differentiates_as_the_dense_array(gradients, x64):
    adapted = {}

    def ours(name, w, a, b, y):
        x = ql.LoraArray(w, a, b, alpha=2 * SCALING, gradients=gradients)
        out = ql.quaxify(PROGRAMS[name][0])(x, y)
        adapted[name] = isinstance(out, ql.LoraArray)
        return jnp.sum(jnp.sin(ql.materialise(out)))

    def expected(name, w, a, b, y):
        w = w if gradients == "train" else lax.stop_gradient(w)
        return jnp.sum(jnp.sin(PROGRAMS[name][0](w + SCALING * b @ a, y)))

    def each(of, *args):
        return {name: jax.value_and_grad(of, (1, 2, 3, 4))(name, *args) for name in PROGRAMS}

    both = lambda *args: (each(ours, *args), each(expected, *args))
    with ql.on_materialise("allow"):
        got, want = jax.jit(both)(*map(jnp.asarray, (W, A, B, Y)))
    for name in PROGRAMS:
        close = lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12, err_msg=name)
        jax.tree.map(close, got[name], want[name])
    assert adapted == {name: stays for name, (_, stays) in PROGRAMS.items()}


@pytest.mark.slow
def test_while_loop_that_scales(x64):
    def program(w, a, b, s):
        x = ql.LoraArray(w, a, b)
        scaled = lambda carry: (carry[0] + 1, carry[1] * s)
        return ql.quaxify(lambda x: lax.while_loop(lambda c: c[0] < 3, scaled, (0, x))[1])(x)

    args = (*map(jnp.asarray, (W, A, B)), jnp.asarray(0.5))
    with ql.on_materialise("error"):
        out, tangent = jax.jvp(program, args, tuple(map(jnp.ones_like, args)))
    exact = lambda w, a, b, s: (lax.stop_gradient(w) + b @ a) * s**3
    want, want_dot = jax.jvp(exact, args, tuple(map(jnp.ones_like, args)))
    np.testing.assert_allclose(ql.materialise(out), want, rtol=1e-9)
    # The tangent of the parts, as that of the array.
    dense = lambda w, a, b: out.replace(w=w, a=a, b=b).materialise()
    parts = [[getattr(x, name) for name in "wab"] for x in (out, tangent)]
    np.testing.assert_allclose(jax.jvp(dense, *parts)[1], want_dot, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ql.NF4Array.quantize, ql.Int8Array.quantize])
def test_a_quantised_base_is_carried(wrap):
    w, a, b = (jnp.asarray(_RNG.normal(size=s), jnp.float32) for s in ((8, 64), (2, 64), (8, 2)))
    x = ql.LoraArray(wrap(w), a, b)
    with ql.on_materialise("error"):
        out = ql.quaxify(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5, x))(x)
    assert type(out.w) is type(x.w)
    np.testing.assert_allclose(ql.materialise(out), x.materialise() / 8, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inside_another_type():
    x = NamedArray(ql.LoraArray(*(jnp.asarray(p, jnp.float32) for p in (W, A, B))), ("out", "in"))
    with ql.on_materialise("error"):
        out = ql.quaxify(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5, x))(x)
    assert isinstance(out.array, ql.LoraArray)
    np.testing.assert_allclose(ql.materialise(out), ql.materialise(x) / 8, rtol=1e-5)


BASES = {
    "quantised": lambda w: ql.NF4Array.quantize(w, block_size=32),
    "sparse": lambda w: ql.BlockSparseArray.from_dense(w, block_size=4, density=0.5),
    "identity": lambda w: Identity(8, w.dtype),
    "stacked": lambda w: jnp.stack([w, 2 * w]),
}


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_beside_one_with_a_dense_base(base):
    """A sum of two adapted arrays has a dense base, and adapters of twice the rank."""
    programs = [
        lambda x: lax.fori_loop(0, 2, lambda i, c: 0.5 * c + 0.5 * x, x),
        lambda x: lax.cond(x.ravel()[0] > -9, lambda: x, lambda: x + x),
        lambda x: lax.scan(lambda c, _: (c + x, None), jnp.zeros(x.shape, x.dtype), length=2)[0],
    ]
    w, a, b = (jnp.asarray(_RNG.normal(size=s), jnp.float32) for s in ((8, 8), (2, 8), (8, 2)))
    w = BASES[base](w)

    def loss(a, b, program, exact):
        x = ql.LoraArray(w, a, b)
        return jnp.sum(jnp.sin(program(x.materialise()) if exact else ql.materialise(ql.quaxify(program)(x))))

    with ql.on_materialise("allow"):
        for program in programs:
            got, want = (
                jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=(2, 3))(a, b, program, exact)
                for exact in (False, True)
            )
            jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.quick(1)
@pytest.mark.parametrize("start", ["zeros", "itself", "half of it"])
@pytest.mark.parametrize(
    "wrap",
    [lambda w: Unitful(w, "m"), lambda w: NamedArray(w, ("out", "in"))],
    ids=["units", "names"],
)
def test_a_part_that_grows_in_a_loop_is_dense_and_what_holds_it_stays(wrap, start, x64):
    """The rank grows in each iteration."""

    def run(x):
        init = {"zeros": jnp.zeros(x.shape, x.dtype), "itself": x, "half of it": x * 0.5}[start]
        return lax.scan(lambda c, _: (c + x, None), init, length=3)[0]

    def found(w, a, b):
        return ql.quaxify(run)(wrap(ql.LoraArray(w, a, b, alpha=3.0)))

    def value_and_grads(f):
        total = lambda *parts: jnp.sum(jnp.sin(f(*parts)))
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(W, A, B)

    with ql.on_materialise("allow"):
        y = jax.jit(found)(W, A, B)
        ours = value_and_grads(lambda *parts: ql.materialise(found(*parts)))
    assert jax.tree.structure(y) == jax.tree.structure(wrap(jnp.asarray(W)))
    dense = value_and_grads(lambda w, a, b: run(w + SCALING * b @ a))
    # The base is not trained.
    np.testing.assert_allclose(ours[0], dense[0])
    for x, expected in zip(ours[1][1:], dense[1][1:], strict=True):
        np.testing.assert_allclose(x, expected)


@pytest.mark.slow
def test_matrices_in_a_loop_that_carries():
    """`a` is the same for all of them: an input that does not change, beside what is carried."""
    w = ql.LoraArray(normal(5, 4, 3), normal(2, 3, seed=1), normal(5, 4, 2, seed=2))

    def program(w, x):
        def step(carry, matrix):
            total, last = carry
            return (total + matrix @ x, jnp.sum(x)), last * total

        return jax.lax.scan(step, (jnp.zeros(4), jnp.ones(())), w)

    x = normal(3, seed=3)
    found, expected = ql.quaxify(program)(w, x), program(w.materialise(), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
