"""Parameters of Linen and Haiku, in the dicts that these frameworks keep them in."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import quaxlike as ql

pytestmark = pytest.mark.frameworks

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 5, 32))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((4, 8), name="split")(x)
        x = nn.DenseGeneral(32, axis=(-2, -1), name="join")(x)
        x = nn.LayerNorm()(x)
        x = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False, name="attention")(x)
        x = nn.Conv(32, (3,))(x)
        return nn.Dense(3, name="end")(x)


def haiku_net(x):
    x = hk.nets.MLP([64, 32])(x)
    x = hk.LayerNorm(-1, True, True)(x)
    x = hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling(1.0))(x, x, x)
    return hk.Linear(4, with_bias=False, name="end")(x)


def in_linen():
    variables = Net().init(KEY, X)
    return variables, lambda v, x: Net().apply(v, x)


def in_haiku():
    net = hk.without_apply_rng(hk.transform(haiku_net))
    return net.init(KEY, X), net.apply


MODELS = {"Linen": in_linen, "Haiku": in_haiku}
KINDS = {
    "LoRA": lambda v, layout: ql.loraify(v, rank=2, key=KEY, init="gaussian", layout=layout),
    "NF4": lambda v, layout: ql.quantize(v, "nf4", block_size=32, layout=layout),
    "QLoRA": lambda v, layout: ql.loraify(
        ql.quantize(v, "int8", layout=layout), rank=2, key=KEY, init="gaussian", layout=layout
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_modules_tell_the_layouts_of_their_parameters(model, kind):
    variables, apply = MODELS[model]()
    layout = ql.traced_layouts(apply, variables, X)
    changed = KINDS[kind](variables, layout)
    loss = lambda v, x: jnp.sum(apply(v, x) ** 2)
    grad = jax.grad(loss, 1)
    with ql.on_materialise("error"):
        y = jax.jit(ql.quaxify(apply))(changed, X)
        g = jax.jit(jax.grad(ql.quaxify(loss), 1))(changed, X)
    dense = ql.materialise(changed)
    np.testing.assert_allclose(y, apply(dense, X), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(g, grad(dense, X), rtol=1e-2, atol=1e-3 * float(jnp.abs(g).max()))
    if model == "Linen":
        shown = {n.removeprefix("params."): str(x) for n, x in ql.layouts(variables, layout).items() if x}
        assert shown == {
            "split.kernel": "ioo", "join.kernel": "iio", "attention.query.kernel": "ioo",
            "attention.key.kernel": "ioo", "attention.value.kernel": "ioo", "attention.out.kernel": "iio",
            "Conv_0.kernel": "wio", "end.kernel": "io",
        }  # fmt: skip


def test_a_layout_that_names_do_not_tell_is_an_error_without_the_module():
    variables, _ = in_linen()
    with pytest.raises(ValueError, match=r"'all-linear' cannot tell.*join\.kernel \(4, 8, 32\)"):
        ql.loraify(variables["params"] | {"split": {}}, rank=2, key=KEY)
    with pytest.raises(ValueError, match="calls no module of Linen or Haiku"):
        ql.traced_layouts(lambda x: x + 1, X)


def test_boxes_of_linen_are_no_part_of_names():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    variables = nn.Dense(4, kernel_init=init).init(KEY, X)
    assert list(ql.select(variables)) == ["params.kernel"]
    model = ql.loraify(variables, rank=2, key=KEY)
    assert isinstance(model["params"]["kernel"], nn.Partitioned)
    with ql.on_materialise("error"):
        ql.quaxify(nn.Dense(4, kernel_init=init).apply)(model, X)


def test_serialization_of_flax():
    variables, apply = in_linen()
    changed = KINDS["QLoRA"](variables, ql.traced_layouts(apply, variables, X))
    to_state = lambda value: {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(value))}
    from_state = lambda value, state: jax.tree.unflatten(jax.tree.structure(value), list(state.values()))
    for cls in (ql.LoraArray, ql.Int8Array):
        serialization.register_serialization_state(cls, to_state, from_state)
    blank = jax.tree.map(jnp.zeros_like, changed)
    restored = serialization.from_bytes(blank, serialization.to_bytes(changed))
    assert jax.tree.structure(restored) == jax.tree.structure(changed)
    jax.tree.map(np.testing.assert_array_equal, restored, changed)
