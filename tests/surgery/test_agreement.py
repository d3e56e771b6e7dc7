"""Functions that take several models compare what they must share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import drawn, normal, random_key


def _mlp(**options):
    return drawn(eqx.nn.MLP, 4, 3, 8, depth=1, key=random_key(0), **options)


BASE = _mlp()


def _adapted(base=BASE, seed=1, **options):
    options = {"rank": 2, "key": jax.random.key(seed), "init": "gaussian"} | options
    model = ql.loraify(base, **options)
    return jax.tree.map(
        lambda x: x.replace(b=0.3 * normal(*x.b.shape, seed=seed)) if isinstance(x, ql.LoraArray) else x,
        model,
        is_leaf=lambda x: isinstance(x, ql.LoraArray),
    )


def _with(where, change, base=BASE):
    return eqx.tree_at(where, base, replace_fn=change)


_bias, _weight = (lambda m: m.layers[1].bias), (lambda m: m.layers[0].weight)

# Bases that differ from BASE, and the path that the message names.
OTHERS = {
    "bias": (lambda: _with(_bias, lambda x: x.at[0].add(1)), "layers.1.bias has other values"),
    "weight": (lambda: _with(_weight, lambda x: x.at[2, 3].set(9)), "layers.0.weight has other values"),
    "nan": (lambda: _with(_bias, lambda x: x.at[0].set(jnp.nan)), "layers.1.bias has other values"),
    "dtype": (
        lambda: _with(_bias, lambda x: x.astype(jnp.bfloat16)),
        r"layers.1.bias is float32\[3\] in one and bfloat16\[3\] in the other",
    ),
    "activation": (lambda: _mlp(activation=jnp.tanh), "activation is .* in one and .*tanh"),
    "static field": (
        lambda: _with(lambda m: m.layers[0], lambda x: _static(x, "use_bias", False)),
        "layers.0.use_bias is True in one and False in the other",
    ),
    "no bias": (lambda: _with(_bias, lambda x: None), "layers.1.bias"),
}


def _static(layer, name, value):
    new = object.__new__(type(layer))
    for field, x in vars(layer).items():
        object.__setattr__(new, field, x)
    object.__setattr__(new, name, value)
    return new


FUNCTIONS = {
    "stack_adapters": lambda x, y: ql.stack_adapters([x, x, y]),
    "combine_adapters": lambda x, y: ql.combine_adapters([x, y], [0.5, 0.5]),
    "unmerge": lambda x, y: ql.unmerge(ql.merge(x), y),
}


@pytest.mark.quick("stack_adapters-static field", "combine_adapters-dtype", "combine_adapters-no bias")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_differs_is_named(function, name):
    make, message = OTHERS[name]
    if function == "unmerge" and name in ("weight",):
        message = "layers.0.weight is not the sum of its base and its adapter"
    if name == "no bias":
        message = "different names" if function != "unmerge" else "layers.1.bias"
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](_adapted(), _adapted(make(), seed=1 if function == "unmerge" else 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Adapters were merged")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_bases_are_compared(function, kind):
    base = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=0, key=jax.random.key(0)), kind)
    other = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=0, key=jax.random.key(1)), kind)
    biased = eqx.tree_at(lambda m: m.layers[0].bias, base, replace_fn=lambda x: x + 1)
    for y, message in ((other, r"layers\.0\.weight"), (biased, r"layers\.0\.bias")):
        with pytest.raises(ValueError, match=message):
            FUNCTIONS[function](_adapted(base), _adapted(y))


def test_equal_copies_are_the_same_base():
    """And so are models that were made twice, with NaN in them, or with an activation of their own."""

    def make():
        scale = 2.0
        base = _mlp(activation=lambda x: scale * x)
        return eqx.tree_at(_bias, base, replace_fn=lambda x: jnp.array(x).at[0].set(jnp.nan))

    ql.stack_adapters([_adapted(make(), 1), _adapted(make(), 2)])
    as_numpy = jax.tree.map(lambda x: np.array(x) if eqx.is_array(x) else x, BASE)
    ql.stack_adapters([_adapted(), _adapted(as_numpy, 2)])


def test_an_adapter_that_was_not_merged_is_noticed():
    with pytest.raises(ValueError, match=r"layers\.0\.weight is not the sum of its base and its adapter"):
        ql.unmerge(ql.merge(_adapted(seed=1)), _adapted(seed=2))


def test_traced_models_are_taken_to_be_equal():
    x, y = (eqx.filter(_adapted(seed=s), eqx.is_array) for s in (1, 2))
    stacked = jax.jit(lambda x, y: ql.stack_adapters([x, y]))(x, y)
    assert stacked.layers[0].weight.a.shape == (2, 2, 4)


def test_a_layer_that_the_first_model_does_not_adapt_stays_frozen():
    part = _adapted(where=["layers.1"])
    for model in (
        ql.stack_adapters([part, _adapted(seed=2)]),
        ql.combine_adapters([part, _adapted()], [1, 1]),
    ):
        assert not ql.trainable(model).layers[0].weight.w
        assert ql.trainable(model).layers[0].weight.a
