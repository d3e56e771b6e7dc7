"""Parts of adapted and quantised arrays at positions that are data, in and out of bounds."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.samples import normal


def adapted(batch=((), (), ()), *, transposed=False, dora=False, quantise=lambda w: w):
    w, a, b = (normal(*lead, *shape) for lead, shape in zip(batch, ((4, 64), (2, 64), (4, 2)), strict=True))
    options = {}
    if transposed:
        w, options = jnp.matrix_transpose(w), {"out_axes": (-1,), "in_axes": (-2,)}
    magnitude = 1 + jnp.square(normal(*batch[2], 4, seed=1)) if dora else None
    return ql.LoraArray(quantise(w), a, b, magnitude=magnitude, **options)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("look_up", "kind"),
    [
        (look_up, kind)
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
