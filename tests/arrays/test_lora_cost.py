"""What an adapted layer costs, once compiled: what one writes by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql

from ..primitives.jaxprs import equations

OUT, IN, RANK, SCALING = 96, 64, 4, 2.0


def parts():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((OUT, IN), (RANK, IN), (OUT, RANK))]


def cost(f, *args):
    analysis = jax.jit(f).lower(*args).compile().cost_analysis()
    return {"flops": analysis["flops"], "bytes accessed": analysis["bytes accessed"]}


def lora(w, a, b):
    return ql.LoraArray(w, a, b, alpha=SCALING * RANK)


# By hand: as our rule does it, and as it is most often written.
PRODUCTS = {
    "W @ x": (
        lambda w, x: w @ x,
        lambda w, a, b, x: w @ x + b @ (SCALING * (a @ x)),
        lambda w, a, b, x: w @ x + SCALING * b @ (a @ x),
        (IN,),
    ),
    "W @ X": (
        lambda w, x: w @ x,
        lambda w, a, b, x: w @ x + b @ (SCALING * (a @ x)),
        lambda w, a, b, x: w @ x + SCALING * b @ (a @ x),
        (IN, 16),
    ),
    "X @ W.T": (
        lambda w, x: x @ w.T,
        lambda w, a, b, x: x @ w.T + (x @ a.T * SCALING) @ b.T,
        lambda w, a, b, x: x @ w.T + (x @ a.T) @ (SCALING * b).T,
        (16, IN),
    ),
    "vmap": (
        lambda w, x: jax.vmap(lambda x: w @ x)(x),
        lambda w, a, b, x: jax.vmap(lambda x: w @ x + b @ (SCALING * (a @ x)))(x),
        lambda w, a, b, x: jax.vmap(lambda x: w @ x + SCALING * b @ (a @ x))(x),
        (16, IN),
    ),
}


def backward(f):
    """Of the adapter and of what comes in; the base is frozen."""
    return jax.value_and_grad(lambda abx, w: jnp.sum(f(w, *abx) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_costs_what_is_written_by_hand(name):
    product, same, usual, shape = PRODUCTS[name]
    w, a, b = parts()
    x = jnp.ones(shape)
    ours = lambda w, a, b, x: ql.quaxify(product)(lora(w, a, b), x)
    forward = [cost(f, w, a, b, x) for f in (ours, same, usual)]
    with_backward = [cost(backward(f), (a, b, x), w) for f in (ours, same, usual)]
    # XLA turns the cotangent of the result of a batch, so that its library multiplies it.
    most = 1.12 if name == "vmap" else 1
    for ours, *by_hand in (forward, with_backward):
        for metric, value in ours.items():
            assert all(value <= most * other[metric] for other in by_hand), (metric, ours, by_hand)


@pytest.mark.slow
def test_a_linear_layer_of_equinox_costs_what_is_written_by_hand():
    layer = eqx.nn.Linear(IN, OUT, key=jax.random.key(0))
    model = ql.loraify(layer, rank=RANK, alpha=SCALING * RANK, key=jax.random.key(1))
    x = jnp.ones((16, IN))
    lora = model.weight

    def by_hand(w, a, b, alpha, bias, x):
        return jax.vmap(lambda x: w @ x + b @ (alpha / RANK * (a @ x)) + bias)(x)

    ours = lambda model, x: ql.quaxify(lambda m, x: jax.vmap(m)(x))(model, x)
    expected = cost(by_hand, lora.w, lora.a, lora.b, lora.alpha, layer.bias, x)
    assert cost(ours, model, x) == expected


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_nothing_of_the_size_of_the_base_is_computed(name, dora):
    """Neither forward nor backward, in all that is left after the compiler's first look."""
    product, _, _, shape = PRODUCTS[name]
    w, a, b = parts()
    m = jnp.ones(OUT)

    def ours(w, a, b, x):
        array = lora(w, a, b)
        return ql.quaxify(product)(array.replace(magnitude=m) if dora else array, x)

    jaxpr = jax.make_jaxpr(backward(ours))((a, b, jnp.ones(shape)), w).jaxpr
    made = [
        eqn.primitive.name
        for eqn in equations(jaxpr)
        for v in eqn.outvars
        if sorted(v.aval.shape) == sorted((OUT, IN))
    ]
    assert set(made) <= {"stop_gradient", "transpose"}  # the base itself, under other names
