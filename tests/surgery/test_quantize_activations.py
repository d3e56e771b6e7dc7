"""Models whose products are in 8 bits: `quantize(…, activations=…)`."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.sharding import shard
from tests.lm.models.fixtures import in_float32
from tests.samples import drawn, normal, random_key

SCHEMES = ["int8", "fp8"]
X = normal(6, 64, seed=1)


def mlp(**options):
    return drawn(eqx.nn.MLP, 64, 32, 128, 2, activation=jnp.tanh, key=random_key(), **options)


@eqx.filter_jit
def run(model, x):
    return jax.vmap(ql.quaxify(model))(x)


def relative(found, wanted):
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def products(fn, *args):
    """The operands of the products of a program for GPUs, as StableHLO names their types."""
    lines = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text().splitlines()
    types = [line.rpartition(": (")[2] for line in lines if "stablehlo.dot_general" in line]
    return [
        [x.partition("tensor<")[2].partition(">")[0].rpartition("x")[2] for x in t.split(", ")] for t in types
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_codes(scheme):
    """Every product of the program, with an error that is that of two roundings instead of one."""
    model, codes = ql.quantize(mlp(), scheme, activations=scheme), {"int8": "i8", "fp8": "f8E4M3FN"}[scheme]
    with ql.on_materialise("error"):
        found = run(model, X)
        assert products(lambda x: run(model, x), X) == [[codes, codes]] * 3
    one, two = relative(run(ql.quantize(mlp(), scheme), X), run(mlp(), X)), relative(found, run(mlp(), X))
    assert one < two < 3 * one
    assert two < {"int8": 0.02, "fp8": 0.08}[scheme]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_pass_through_the_rounding(scheme):
    """Those of one layer are those with inputs as they are, for inputs and for an adapter."""
    layer = eqx.nn.Linear(64, 32, key=jax.random.key(0))
    adapted = [
        ql.loraify(ql.quantize(layer, scheme, **options), rank=4, init="gaussian", key=jax.random.key(1))
        for options in ({"activations": scheme}, {})
    ]
    adapted = [eqx.tree_at(lambda m: m.weight.b, m, normal(32, 4, seed=2)) for m in adapted]

    def gradients(model):
        params, frozen = eqx.partition(model, ql.trainable(model))
        total = lambda params, x: jnp.sum(run(eqx.combine(params, frozen), x) * normal(6, 32, seed=3))
        return jax.grad(total, argnums=(0, 1))(params, X)

    with ql.on_materialise("error"):
        found, wanted = map(gradients, adapted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    # Adapters get the inputs as they are.
    alone = [eqx.tree_at(lambda m: m.weight.b, m, jnp.zeros((32, 4))) for m in adapted]
    np.testing.assert_allclose(
        run(adapted[0], X) - run(alone[0], X), run(adapted[1], X) - run(alone[1], X), atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_by_products_of_codes(scheme):
    """All products that lead back to the inputs; adapters have their own in full precision."""
    codes = {"int8": "i8", "fp8": "f8E4M3FN"}[scheme]
    rounded, exact = (
        ql.quantize(mlp(), scheme, activations=scheme, rounds_gradients=rounds) for rounds in (True, False)
    )
    gradient = lambda model: lambda x: jax.grad(lambda x: jnp.sum(run(model, x) ** 2))(x)
    with ql.on_materialise("error"):
        assert products(gradient(rounded), X) == [[codes, codes]] * 6
        found = gradient(rounded)(X)
    assert 0 < relative(found, gradient(exact)(X)) < {"int8": 0.02, "fp8": 0.08}[scheme]


@pytest.mark.slow
def test_gradients_of_adapters_by_products_of_codes():
    model = ql.quantize(mlp(), "int8", activations="int8", rounds_gradients=True)
    model = ql.loraify(model, rank=4, init="gaussian", key=jax.random.key(1))
    params, frozen = eqx.partition(model, ql.trainable(model))
    total = lambda params: jnp.mean((run(eqx.combine(params, frozen), X) - normal(6, 32, seed=4)) ** 2)
    with ql.on_materialise("error"):
        step = jax.jit(lambda p: jax.tree.map(lambda x, g: x - 0.1 * g, p, jax.grad(total)(p)))
        before = total(params)
        for _ in range(20):
            params = step(params)
    assert total(params) < 0.9 * before


#: Bounds of the relative error of logits: of rounded weights, with inputs rounded token by token, by a scale
#: from other texts, and token by token after smoothing.
ERRORS = {
    "llama_llama3": {"weights": 0.04, "token": 0.06, "calibrated": 0.1, "smoothed": 0.06},
    "gemma3": {"weights": 0.03, "token": 0.045, "calibrated": 0.08, "smoothed": 0.045},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_a_decoder(name):
    model = in_float32(name)
    texts, others = jax.random.randint(jax.random.key(0), (2, 4, 24), 0, len(model.embedding))
    logits = lambda model, texts: jax.vmap(lambda ids: model(ids, jnp.ones(24, bool)))(texts)
    moments, maxima = (f(logits)(model, others) for f in (ql.input_moments, ql.input_maxima))
    eight = {"scheme": "int8", "activations": "int8"}
    models = {
        "weights": ql.quantize(model, "int8"),
        "token": ql.quantize(model, **eight),
        "calibrated": ql.quantize(model, **eight, maxima=maxima),
        "smoothed": ql.quantize(ql.balance(model, moments, "int8", activations="int8"), **eight),
    }
    wanted = logits(model, texts)
    with ql.on_materialise("error"):
        found = {k: relative(jax.jit(ql.quaxify(logits))(m, texts), wanted) for k, m in models.items()}
    assert found["weights"] < found["token"] < found["calibrated"]
    for kind, most in ERRORS[name].items():
        assert 0.4 * most < found[kind] < most, found


@pytest.mark.quick("scheme1")
@pytest.mark.parametrize("scheme", ["int8", {".*": ("int8", {"activations": "int8"})}])
def test_convolutions_are_named_as_they_do_not_round(scheme):
    model = [eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.nn.Conv1d(2, 2, 3, key=jax.random.key(1))]
    options = {"where": ".*", "activations": "int8"} if scheme == "int8" else {}
    with pytest.warns(UserWarning, match=r"matrices. 1.weight are kernels of convolutions.* not rounded"):
        linear, convolution = ql.quantize(model, scheme, **options)
    assert linear.weight.activations == "int8"
    assert isinstance(convolution.weight, ql.Int8Array)
    assert convolution.weight.activations is None


@pytest.mark.parametrize("option", [{"maxima": {"weight": 1.0}}, {"rounds_gradients": True}])
def test_options_of_activations_alone(option):
    with pytest.raises(ValueError, match="for products with `activations` in 8 bits"):
        ql.quantize(eqx.nn.Linear(8, 8, key=jax.random.key(0)), "int8", **option)


def test_maxima_of_inputs():
    """Of all calls of a layer, and of those of a batch."""
    layer = drawn(eqx.nn.Linear, 8, 8, key=random_key())
    twice = lambda layer, x: jax.vmap(lambda x: layer(-5 * jnp.tanh(layer(x))))(x)
    x = normal(6, 8)
    inside = 5 * jnp.tanh(jax.vmap(layer)(x))
    (found,) = ql.input_maxima(twice)(layer, x).values()
    np.testing.assert_allclose(found, max(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(inside))), rtol=1e-6)
    with pytest.raises(ValueError, match=r"input_maxima measures linear layers"):
        ql.input_maxima(lambda m, x: m(x), where=".*")(eqx.nn.Conv1d(2, 2, 3, key=jax.random.key(0)), x[:2])


@pytest.mark.slow
def test_scales_that_are_trained():
    model = ql.train_scales(
        ql.quantize(eqx.nn.Linear(64, 32, key=jax.random.key(0)), "int8", activations="int8")
    )
    params, frozen = eqx.partition(model, ql.trainable(model))
    total = lambda params: jnp.sum(run(eqx.combine(params, frozen), X))
    dense = ql.materialise(eqx.tree_at(lambda m: m.weight.scale, model, jnp.ones((32, 1))).weight)
    wanted = jnp.sum(X @ dense.T, axis=0)
    np.testing.assert_allclose(jax.grad(total)(params).weight.scale[:, 0], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_loops_and_batches(scheme):
    layers = [
        ql.quantize(eqx.nn.Linear(64, 64, key=jax.random.key(i)), scheme, activations=scheme) for i in (0, 1)
    ]
    one_by_one = X
    for layer in layers:
        one_by_one = jnp.tanh(run(layer, one_by_one))
    stacked = ql.stack_layers(layers)

    def scanned(layers, x):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(jax.vmap(layer)(x)), None), x, layers)[0]

    with ql.on_materialise("error"):
        np.testing.assert_allclose(jax.jit(ql.quaxify(scanned))(stacked, X), one_by_one, atol=1e-5)
        each = jax.vmap(lambda layer, x: ql.quaxify(layer)(x), in_axes=(0, None))(stacked, X[0])
    np.testing.assert_allclose(each[1], run(layers[1], X)[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [jax.P("data", None), jax.P(None, "data")])
def test_on_several_devices(spec):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = ql.quantize(mlp(), "int8", activations="int8")
    with ql.on_materialise("error"):
        found = run(shard(model, mesh, {r"layers\.\d": spec}), X)
    np.testing.assert_allclose(found, run(model, X), atol=1e-5)


@pytest.mark.slow
def test_experts_and_weights_of_several_input_axes():
    experts = ql.BlockArray.quantize(normal(3, 16, 64, seed=5), codec="fp8", stacked=1)
    heads = {"out": {"kernel": normal(4, 16, 32, seed=6)}}
    model = ql.quantize(heads, "int8", activations="int8", layout={"out.kernel": "iio"})["out"]["kernel"]
    x = normal(5, 4, 16, seed=7)
    with ql.on_materialise("error"):
        y = ql.quaxify(lambda x, w: jnp.einsum("bhd,hdo->bo", x, w))(x, model)
    assert relative(y, jnp.einsum("bhd,hdo->bo", x, heads["out"]["kernel"])) < 0.03

    def routed(x, w):
        return jax.lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), jnp.array([2, 0, 4]))

    rounded = dataclasses.replace(experts, activations="fp8")
    with ql.on_materialise("error"):
        found, wanted = (ql.quaxify(routed)(X, w) for w in (rounded, experts))
    assert 1e-3 < relative(found, wanted) < 0.06


@pytest.mark.parametrize(
    ("scheme", "options", "match"),
    [
        (
            "nf4",
            {"activations": "int8"},
            r"layers\.0\.weight: Products with activations in int8 or fp8 take .* NF4Array",
        ),
        ("int8", {"activations": "fp8"}, "found activations 'fp8' and Int8Array of int8"),
        ("int8", {"activations": "int4"}, "found activations 'int4'"),
        ("int8", {"activations": "int8", "block_size": 32}, "no block_size; found blocks of 32"),
        ("fp8_block", {"activations": "fp8"}, "no block_size; found blocks of 128"),
        ("int8", {"maxima": {}}, "for products with `activations`"),
        ("int8", {"rounds_gradients": True}, "for products with `activations`"),
        ("int8", {"activations": "int8", "maxima": {"a": 1.0}}, r"no entry for layers\.0\.weight; .* for a"),
        (
            "int8",
            {"activations": "int8", "maxima": {f"layers.{i}.weight": 0.0 for i in range(3)}},
            r"layers\.0\.weight: input_limit must be a positive number; found 0\.0",
        ),
    ],
)
def test_what_cannot_be_multiplied(scheme, options, match):
    with pytest.raises(ValueError, match=match):
        ql.quantize(mlp(), scheme, **options)


def test_sparse_weights_are_refused():
    model = {"w": ql.BlockSparseArray.from_dense(normal(64, 64), block_size=32, density=0.5)}
    with pytest.raises(ValueError, match="w: products with `activations` are for dense weights"):
        ql.quantize(model, "int8", activations="int8")


@pytest.mark.slow
def test_balanced_layers_lose_less():
    """A few inputs are much larger than the others, as in large language models."""
    model = [eqx.nn.LayerNorm(64), eqx.nn.Linear(64, 64, key=jax.random.key(0))]
    scale = jnp.ones(64).at[jnp.array([3, 40])].set(40.0)
    model[0] = eqx.tree_at(lambda norm: norm.weight, model[0], scale)
    run = lambda model, x: jax.vmap(lambda x: model[1](model[0](x)))(x)
    moments = ql.input_moments(run)(model, X)
    models = [
        model,
        *(ql.balance(model, moments, "int8", activations=x, folds={"0": ["1"]}) for x in (None, "int8")),
    ]
    eight = [ql.quantize(m, "int8", activations="int8") for m in models]
    plain, balanced, smoothed = (relative(ql.quaxify(run)(m, X), run(model, X)) for m in eight)
    assert smoothed < balanced < 0.6 * plain


@pytest.mark.quick(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_with_rounded_weights_and_inputs(scheme):
    """The model computes what the quantised one does, with gradients as if nothing were rounded."""
    options = {"scheme": scheme, "activations": scheme}
    layer = eqx.nn.Linear(64, 32, key=jax.random.key(0))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(layer, x):
        y = jax.vmap(ql.quaxify(ql.fake_quantize(layer, **options)))(x)
        return jnp.mean((y - normal(6, 32, seed=4)) ** 2)

    with ql.on_materialise("error"):
        before, gradient = loss(layer, X)
        y = run(ql.quantize(layer, **options), X)
        np.testing.assert_allclose(before, jnp.mean((y - normal(6, 32, seed=4)) ** 2), rtol=1e-5)
        wanted = (2 / y.size) * (y - normal(6, 32, seed=4)).T @ X
        np.testing.assert_allclose(gradient.weight, wanted, rtol=1e-4, atol=1e-5)
        for _ in range(20):
            _, gradient = loss(layer, X)
            layer = eqx.apply_updates(layer, jax.tree.map(lambda g: -0.5 * g, gradient))
        after, _ = loss(layer, X)
    assert after < 0.5 * before
