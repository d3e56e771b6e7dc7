"""`quantize` on whole models."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.implicit import ste
from tests.samples import drawn, normal, random_key, tree_equal

SCHEMES = {"nf4": ql.NF4Array, "fp4": ql.FP4Array, "int8": ql.Int8Array, "int4": ql.Int4Array}
KEY = random_key(1)
X = np.linspace(-1, 1, 64, dtype=np.float32)


@pytest.fixture
def mlp():
    return drawn(eqx.nn.MLP, 64, 32, 64, depth=2, key=random_key())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(mlp, scheme):
    """Weights have the type's own rounding, the rest stays, and nothing turns dense in the call."""
    model = ql.quantize(mlp, scheme)
    dense = mlp
    for i, layer in enumerate(mlp.layers):
        assert type(model.layers[i].weight) is SCHEMES[scheme]
        assert model.layers[i].bias is layer.bias
        rounded = SCHEMES[scheme].quantize(layer.weight).materialise()
        assert np.any(rounded != layer.weight)
        dense = eqx.tree_at(lambda m, i=i: m.layers[i].weight, dense, rounded)
    with ql.on_materialise("error"):
        y = eqx.filter_jit(ql.quaxify(model))(X)
    np.testing.assert_allclose(y, dense(X), atol=1e-5)


@pytest.mark.slow
def test_stored_bytes(mlp):
    rows = ql.summary(ql.quantize(mlp, "nf4", block_size=64)).rows
    weights = [row for row in rows if row.path.endswith("weight")]
    assert all(row.stored_bytes == row.size // 2 + 4 * row.size // 64 for row in weights)


@pytest.mark.slow
def test_options_and_where(mlp):
    model = ql.quantize(mlp, "nf4", where=["layers.0"], double_quant=True, block_size=32)
    want = ql.NF4Array.quantize(mlp.layers[0].weight, double_quant=True, block_size=32)
    assert tree_equal(model.layers[0].weight, want)
    assert model.layers[1].weight is mlp.layers[1].weight


def test_exclude(mlp):
    model = ql.quantize(mlp, "int8", exclude=r"layers\.[12]")
    assert [ql.is_value(layer.weight) for layer in model.layers] == [True, False, False]


@pytest.mark.slow
def test_before_or_after_adapting(mlp):
    """The base of an adapter is quantised: the same model, whichever comes first."""
    before = ql.loraify(ql.quantize(mlp), rank=4, key=KEY)
    after = ql.quantize(ql.loraify(mlp, rank=4, key=KEY))
    assert tree_equal(before, after)
    assert isinstance(after.layers[0].weight.w, ql.NF4Array)


@pytest.mark.slow
def test_tied_weights_stay_tied():
    w = jnp.ones((64, 64))
    model = ql.quantize({"encoder": {"weight": w}, "decoder": {"weight": w}})
    assert model["encoder"]["weight"] is model["decoder"]["weight"]


def test_the_output_layer_is_quantised_when_asked():
    layer = lambda: {"weight": jnp.ones((64, 64))}
    untied = {"embed_tokens": layer(), "q_proj": layer(), "lm_head": layer()}
    quantised = lambda model, **options: {
        name for name in model if ql.is_value(ql.quantize(model, **options)[name]["weight"])
    }
    assert quantised(untied) == {"q_proj"}
    assert quantised(untied, head=True) == {"q_proj", "lm_head"}
    assert quantised(untied, head=True, exclude=["lm_head"]) == {"q_proj"}
    tied = {"embed_tokens": layer(), "q_proj": layer()}
    assert quantised(tied, head=True) == {"q_proj", "embed_tokens"}
    with pytest.raises(ValueError, match=r"`head` is for models with an output layer \(lm_head.*`where`"):
        ql.quantize({"q_proj": layer()}, head=True)


@pytest.mark.slow
def test_stacked_layers():
    """A quantised stack of layers scans, and each layer is as if quantised alone."""
    keys = jax.random.split(KEY, 3)
    make = lambda k: eqx.nn.Linear(64, 64, key=k)
    stack = ql.quantize(eqx.filter_vmap(make)(keys), "nf4")

    @ql.quaxify
    def run(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x), None), x, arrays)[0]

    want = X
    for k in keys:
        layer = make(k)
        dense = ql.NF4Array.quantize(layer.weight).materialise()
        want = dense @ want + layer.bias
    with ql.on_materialise("error"):
        np.testing.assert_allclose(run(stack, X), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nf4", "int4", "int8"])
def test_layers_of_a_stack_share_no_scales(scheme):
    """Not even if their sizes are no multiple of the block size."""
    stack = {"weight": normal(3, 5, 7).at[1].multiply(1e4)}
    found = ql.quantize(stack, scheme, layout={"weight": "oi"})["weight"]
    each = [ql.quantize({"weight": w}, scheme)["weight"] for w in stack["weight"]]
    expected = jnp.stack([x.materialise() for x in each])
    np.testing.assert_allclose(found.materialise(), expected, rtol=1e-6)
    y = jax.vmap(ql.quaxify(jnp.matmul), in_axes=(0, None))(found, X[:7])
    np.testing.assert_allclose(y, found.materialise() @ X[:7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: ql.quantize(m, "nf3"), "no scheme 'nf3'. Did you mean 'nf4'"),
        (lambda m: ql.quantize(m, where="layer.0"), "'layer.0' matches none .* 'layers.0'"),
        (lambda m: ql.quantize(m, where=r".*bias"), "no weight of two or more axes"),
        (lambda m: ql.quantize(m, exclude=r"layers\..*"), "`exclude` leaves nothing"),
        (lambda m: ql.quantize(ql.quantize(m)), "layers.0.weight is of type NF4Array already"),
        (
            lambda m: ql.quantize(ql.loraify(m, rank=2, key=KEY, modules_to_save=["layers.1"])),
            "layers.1.weight is of type TrainableArray; .* `exclude`",
        ),
    ],
)
def test_refused(mlp, call, message):
    with pytest.raises(ValueError, match=message):
        call(mlp)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantisation_aware_training(mlp, scheme):
    """The loss sees rounded weights; its gradient at them goes to the weights behind."""
    loss = lambda model: jnp.sum(jax.nn.softplus(model(X)))
    actual, gradient = eqx.filter_value_and_grad(lambda model: loss(ql.fake_quantize(model, scheme)))(mlp)
    rounded = ql.materialise(ql.quantize(mlp, scheme))
    expected, expected_gradient = eqx.filter_value_and_grad(loss)(rounded)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected_gradient)


def test_fake_quantisation_keeps_ties_and_adapters(mlp):
    tied = eqx.tree_at(lambda m: m.layers[1].weight, mlp, mlp.layers[0].weight)
    model = ql.fake_quantize(tied)
    assert model.layers[0].weight is model.layers[1].weight
    adapted = ql.fake_quantize(ql.loraify(mlp, rank=2, key=KEY))
    rounded = ql.quantize(mlp).layers[0].weight.materialise()
    np.testing.assert_array_equal(adapted.layers[0].weight.w, rounded)


@pytest.mark.slow
@pytest.mark.parametrize("double_quant", [False, True])
def test_a_training_step_holds_no_dense_copy_of_a_frozen_weight(double_quant):
    """QLoRA: what the step needs beside its arguments are a tile of 4 MiB, the scales of one weight and
    activations, where each of the dense weights would take 64 MiB."""
    width = 4096

    def make():
        mlp = eqx.nn.MLP(width, width, width, depth=3, key=KEY)
        model = ql.loraify(ql.quantize(mlp, double_quant=double_quant), rank=4, key=KEY)
        trained, frozen = eqx.partition(model, ql.trainable(model))
        return trained, *eqx.partition(frozen, eqx.is_array)

    trained, arrays, rest = eqx.filter_eval_shape(make)
    assert sum(x.size for x in jax.tree.leaves(trained)) == 4 * 2 * 4 * width

    @jax.jit
    def step(trained, arrays, x):
        def loss(trained):
            model = eqx.combine(trained, arrays, rest)
            return jnp.mean(ql.quaxify(jax.vmap(model))(x) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, trained, jax.grad(loss)(trained))

    with ql.on_materialise("error"):
        compiled = step.lower(trained, arrays, jnp.ones((8, width))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * 2**20, compiled.memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ql.NF4Array, ql.Int8Array])
def test_straight_through_over_products_with_codes(cls):
    w, x = jax.random.normal(KEY, (16, 64)), jnp.asarray(X)
    loss = lambda w: jnp.sum(jnp.sin(w @ x))
    with ql.on_materialise("error"):
        actual = jax.grad(lambda w: ql.quaxify(lambda w: loss(ste(cls.quantize)(w)))(w))(w)
    np.testing.assert_allclose(actual, jax.grad(loss)(cls.quantize(w).materialise()), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"double_quant": True}])
def test_scales_are_trained_to_meet_other_outputs(mlp, options):
    """As after a merge: codes and bytes stay, and the distance to the outputs that are wanted falls."""
    start = ql.quantize(mlp, "nf4", **options)
    opened = ql.train_scales(start)
    scales, rest = eqx.partition(opened, ql.trainable(opened))
    xs = jax.random.normal(KEY, (64, 64))
    wanted = jax.vmap(mlp)(xs)

    @jax.jit
    @jax.value_and_grad
    def loss(scales):
        return jnp.mean((ql.quaxify(jax.vmap(eqx.combine(scales, rest)))(xs) - wanted) ** 2)

    first, gradients = loss(scales)
    norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))
    assert norm > 0
    moved = jax.tree.map(lambda scale, g: scale - 0.02 * first / norm * g, scales, gradients)
    assert loss(moved)[0] < 0.998 * first
    trained = eqx.combine(moved, rest)
    for before, after in zip(start.layers, trained.layers, strict=True):
        np.testing.assert_array_equal(before.weight.codes, after.weight.codes)
        avals = lambda w: [(x.shape, x.dtype) for x in jax.tree.leaves(w)]
        assert avals(before.weight) == avals(after.weight)


def test_scales_are_trained_where_it_is_asked(mlp):
    adapted = ql.loraify(ql.quantize(mlp, "nf4"), rank=2, key=KEY)
    trained = ql.trainable(ql.train_scales(adapted, ["layers.1"]))
    assert [layer.weight.w.scale for layer in trained.layers] == [False, True, False]
    assert all(layer.weight.a and layer.weight.b for layer in trained.layers)
    assert not any(layer.weight.w.codes for layer in trained.layers)


def test_scales_that_cannot_be_trained(mlp):
    with pytest.raises(ValueError, match=r"no quantised weights, only layers\.0\.weight \(64, 64\)"):
        ql.train_scales(mlp)
    with pytest.raises(
        ValueError, match=r"layers\.0\.weight is of type BlockArray, whose scales are 8-bit codes"
    ):
        ql.train_scales(ql.quantize(mlp, "mxfp4"))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad, mlp):
    """An infinite element would make a whole block NaN, or all its other elements 0."""
    model = eqx.tree_at(lambda m: m.layers[1].weight, mlp, replace_fn=lambda w: w.at[3, :2].set(bad))
    with pytest.raises(ValueError, match=r"^layers\.1\.weight has 2 of 4096 elements that are NaN"):
        ql.quantize(model, "nf4")
    left_out = ql.quantize(model, "nf4", exclude=["layers.1"])
    assert left_out.layers[1].weight is model.layers[1].weight
    assert eqx.filter_eval_shape(ql.quantize, model, "nf4").layers[1].weight.shape == (64, 64)


@pytest.mark.parametrize(("found", "meant"), [("fp8_e4m3", "'fp8'"), ("nf-4", "'nf4'"), ("Q8_0", "'q8_0'")])
def test_a_scheme_by_another_name(found, meant):
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    with pytest.raises(
        ValueError, match=rf"no scheme '{found}'\. Did you mean .*{meant}.*\? The schemes are nf4"
    ) as error:
        ql.quantize(linear, found)
    assert str(error.value).count(" nf4,") == 1


@pytest.mark.quick("q8_0")
@pytest.mark.parametrize("scheme", ["nf4", "int8", "q8_0", "fp8"])
def test_codes_that_were_cast_with_all_leaves_are_told(scheme):
    """With the name of the weight, and what to do."""
    model = {"net": ql.quantize(eqx.nn.MLP(64, 2, 64, 1, key=KEY), scheme)}
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    run = lambda model: ql.quaxify(lambda model, x: model["net"](x))(model, jnp.ones(64))
    message = (
        r"Array of shape \(64, 64\) has bytes as codes; found codes of bfloat16, .*is_leaf=quaxlike.is_value"
    )
    for call in (run, eqx.filter_jit(run)):
        with pytest.raises(ValueError, match=message) as error:
            call(cast)
        assert "It is 0.net.layers.0.weight of the arguments." in error.value.__notes__
    with pytest.raises(TypeError, match=message):
        ql.materialise(cast)
    whole = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if hasattr(x, "dtype") else x, model, is_leaf=ql.is_value
    )
    assert ql.materialise(whole["net"].layers[0].weight).dtype == jnp.bfloat16
