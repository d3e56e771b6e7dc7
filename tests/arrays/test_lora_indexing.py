"""Parts of adapted and quantised arrays at positions that are data, in and out of bounds."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.differential.compare import check
from tests.differential.program import Program, Step
from tests.samples import Lazy, normal


def adapted(batch=((), (), ()), *, transposed=False, dora=False, quantise=lambda w: w):
    w, a, b = (normal(*lead, *shape) for lead, shape in zip(batch, ((4, 64), (2, 64), (4, 2)), strict=True))
    options = {}
    if transposed:
        w, options = jnp.matrix_transpose(w), {"out_axes": (-1,), "in_axes": (-2,)}
    magnitude = 1 + jnp.square(normal(*batch[2], 4, seed=1)) if dora else None
    return ql.LoraArray(quantise(w), a, b, magnitude=magnitude, **options)


ARRAYS = Lazy(
    {
        "plain": lambda: adapted(),
        "dora": lambda: adapted(dora=True),
        "transposed": lambda: adapted(transposed=True),
        "transposed dora": lambda: adapted(transposed=True, dora=True),
        "stacked": lambda: adapted(((2,), (2,), (2,))),
        "adapters on one base": lambda: adapted(((), (2,), (2,))),
        "one adapter": lambda: adapted(((2,), (), ())),
        "qlora": lambda: adapted(quantise=ql.NF4Array.quantize),
        "stacked qlora": lambda: adapted(
            ((2,), (2,), (2,)), quantise=functools.partial(ql.NF4Array.quantize, stacked=1)
        ),
        "nf4": lambda: ql.NF4Array.quantize(normal(4, 64)),
        "nf4, blocks across rows": lambda: ql.NF4Array.quantize(normal(5, 32)),
        "nf4, nested": lambda: ql.NF4Array.quantize(normal(4, 64), double_quant=True),
        "stacked nf4": lambda: ql.NF4Array.quantize(normal(2, 4, 64), stacked=1),
        "int8": lambda: ql.Int8Array.quantize(normal(4, 64)),
        "stacked int8": lambda: ql.Int8Array.quantize(normal(2, 4, 64), stacked=1),
    }
)


def agrees(program, x, *args):
    """The program's results, those of one compiled program for all `args`."""

    @jax.jit
    def both(x, arg):
        return ql.materialise(ql.quaxify(program)(x, arg)), program(ql.materialise(x), arg)

    for arg in args:
        with ql.on_materialise("allow"):
            got, want = both(x, arg)
        for g, w in zip(got, want, strict=True):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.quick("int8")
@pytest.mark.parametrize("kind", ARRAYS)
def test_starts_out_of_bounds(kind):
    def program(x, start):
        return [lax.dynamic_index_in_dim(x, start, axis) for axis in range(x.ndim)]

    agrees(program, ARRAYS[kind], *map(jnp.int32, (-70, -5, -3, -1, 1, 70)))


@pytest.mark.quick("one adapter-7.0")
@pytest.mark.parametrize("fill", [None, 7.0])
@pytest.mark.parametrize("kind", ARRAYS)
def test_look_ups_out_of_bounds(kind, fill):
    options = {"mode": "fill", "fill_value": fill}

    def program(x, at):
        return [
            *(jnp.take(x, at, axis, **options) for axis in range(x.ndim)),
            x.at[at, at[::-1]].get(**options),
        ]

    agrees(program, ARRAYS[kind], jnp.array([1, 99, -1, -99, 0]))


@pytest.mark.slow
def test_what_a_base_with_names_is_filled_with():
    look_up = Step('jnp.take(x, jnp.array([1, 99]), 0, mode="fill", fill_value=7)')
    program = Program("LoraArray of NamedArray", (look_up,), outer=("grad_and_result",), jit=True)
    assert check(program).status == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "dora", "transposed", "qlora"])
def test_gradients_beside_what_is_filled_with_nan(kind):
    """What was read out of bounds has a gradient of NaN, and belongs to no element."""
    x = ARRAYS[kind]

    def loss(x):
        filled = [jnp.take(x, jnp.array([1, 99]), axis) for axis in range(x.ndim)]
        return sum(jnp.sum(y**2) for y in filled)

    with ql.on_materialise("allow"):
        got = eqx.filter_grad(ql.quaxify(loss))(x)
        want = eqx.filter_grad(lambda x: loss(ql.materialise(x)))(x)
    for name in ("w", "a", "b", "magnitude"):
        leaves = [jax.tree.leaves(getattr(grads, name)) for grads in (got, want)]
        for g, w in zip(*leaves, strict=True):
            assert jnp.isfinite(w).all()
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


STACKS = {
    "stacked": (((3,), (3,), (3,)), {}),
    "stacked dora": (((3,), (3,), (3,)), {"dora": True}),
    "stacked, transposed": (((3,), (3,), (3,)), {"transposed": True}),
    "adapters on one base": (((), (3,), (3,)), {}),
    "one adapter": (((3,), (), ()), {}),
    "stacked qlora": (((3,), (3,), (3,)), {"quantise": functools.partial(ql.NF4Array.quantize, stacked=1)}),
    "stacked qlora, transposed": (
        ((3,), (3,), (3,)),
        {
            "quantise": lambda w: ql.quaxify(jnp.matrix_transpose)(
                ql.NF4Array.quantize(jnp.matrix_transpose(w), stacked=1)
            ),
            "transposed": True,
        },
    ),
    "int8": (((3,), (3,), (3,)), {"quantise": ql.Int8Array.quantize}),
}


LOOK_UPS = {
    "dynamic slices": lambda w, i: lax.dynamic_index_in_dim(w, i, keepdims=False),
    "take": lambda w, i: jnp.take(w, i, 0),
}
QUICK = [("dynamic slices", "stacked qlora"), ("take", "adapters on one base")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("look_up", "kind"),
    [
        pytest.param(look_up, kind, marks=() if (look_up, kind) in QUICK else pytest.mark.slow)
        for look_up in LOOK_UPS
        for kind in STACKS
        if look_up != "take" or kind in ("stacked", "adapters on one base")
    ],
)
def test_matrices_of_a_stack_stay_adapted(look_up, kind):
    """Another one for each of a batch, as experts of one token each are: gradients by every leaf, too."""
    batch, options = STACKS[kind]
    stack = adapted(batch, **options).replace(gradients="train")
    trained, rest = eqx.partition(stack, eqx.is_inexact_array)
    x, at = normal(4, 64, seed=2), jnp.array([2, 0, 2, 1])

    def loss(trained, x, read):
        def one(w, x, i):
            w = LOOK_UPS[look_up](read(w), i)
            return (w.T if w.shape[-1] == 4 else w) @ x

        y = ql.quaxify(jax.vmap(one, in_axes=(None, 0, 0)))(eqx.combine(trained, rest), x, at)
        return jnp.sum(jnp.sin(y)), y

    with ql.on_materialise("error"):
        got = jax.jit(jax.value_and_grad(functools.partial(loss, read=lambda w: w), (0, 1), True))(trained, x)
    want = jax.value_and_grad(functools.partial(loss, read=ql.materialise), (0, 1), True)(trained, x)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)
