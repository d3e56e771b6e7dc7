"""Several adapters on one base, dropout, and merging into quantised weights."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from tests.samples import drawn, normal, random_key, tree_equal

from ..primitives.jaxprs import equations

KEY = random_key(0)
MLP = drawn(eqx.nn.MLP, 6, 3, 16, depth=2, key=KEY)
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def adapted(seed, base=MLP, **options):
    """A model with an adapter that does something."""
    model = ql.loraify(base, **{"rank": 2, "key": jax.random.key(seed), "init": "gaussian"} | options)
    params, rest = eqx.partition(model, ql.trainable(model))
    leaves, treedef = jax.tree.flatten(params)
    leaves = [p + 0.3 * normal(*p.shape, seed=100 * seed + i) for i, p in enumerate(leaves)]
    return eqx.combine(jax.tree.unflatten(treedef, leaves), rest)


@functools.cache
def mixed():
    return [
        adapted(1),
        adapted(2, rank=4, alpha=7, rslora=True),
        adapted(3, where=["layers.0", "layers.2"]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [mixed, lambda: [adapted(i, dora=True) for i in range(3)]], ids=["of several kinds", "dora"]
)
def test_one_adapter_for_each_sample(make):
    """Equal to a call with each of them; the base is multiplied with all samples at once."""
    models = make()
    stacked = ql.stack_adapters(models)
    assert all(w is v for w, v in zip(bases(stacked), bases(models[0]), strict=True))
    indices = np.array([0, 2, 1, 1, 0, 2, 2, 0])

    @eqx.filter_jit
    def run(stacked, indices, x):
        return jax.vmap(lambda i, x: ql.quaxify(ql.choose_adapter(stacked, i))(x))(indices, x)

    with ql.on_materialise("error"):
        y = run(stacked, indices, X)
    expected = [ql.quaxify(models[i])(x) for i, x in zip(indices, X, strict=True)]
    np.testing.assert_allclose(y, np.stack(expected), rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_the_same_alpha_is_stored_once():
    alpha = lambda *alphas: ql.stack_adapters([adapted(i, alpha=x) for i, x in enumerate(alphas)])
    np.testing.assert_array_equal(alpha(3, 3).layers[0].weight.alpha, 3)
    np.testing.assert_array_equal(alpha(3, 7).layers[0].weight.alpha, [3, 7])


@pytest.mark.slow
def test_vmap_over_adapters():
    """What is trained is what the adapters differ in."""
    models = [adapted(i) for i in range(3)]
    stacked = ql.stack_adapters(models)
    axes = jax.tree.map(lambda trained: 0 if trained else None, ql.trainable(stacked))
    with ql.on_materialise("error"):
        y = eqx.filter_vmap(lambda model, x: ql.quaxify(model)(x), in_axes=(axes, 0))(stacked, X[:3])
    expected = [ql.quaxify(model)(x) for model, x in zip(models, X[:3], strict=True)]
    np.testing.assert_allclose(y, np.stack(expected), rtol=2e-6, atol=2e-6)

    lora = stacked.layers[0].weight  # and the array alone, by the axes of its parts
    run = jax.vmap(ql.quaxify(jnp.matmul), in_axes=(lora.replace(w=None, a=0, b=0), None))
    expected = [ql.quaxify(jnp.matmul)(model.layers[0].weight, X[0]) for model in models]
    np.testing.assert_allclose(run(lora, X[0]), np.stack(expected), rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_one_adapter_for_each_sample_over_4_bits():
    """QLoRA for several users: no weight becomes dense, and none is made for each of them."""
    base = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=1, key=KEY), "nf4")
    models = [adapted(i, base) for i in range(5)]
    stacked, x = ql.stack_adapters(models), np.random.default_rng(2).normal(size=(5, 64)).astype(np.float32)
    run = lambda i, x: jax.vmap(lambda i, x: ql.quaxify(ql.choose_adapter(stacked, i))(x))(i, x)
    with ql.on_materialise("error"):
        y = jax.jit(run)(np.array([4, 2, 2, 0, 1]), x)
        expected = [ql.quaxify(models[i])(row) for i, row in zip([4, 2, 2, 0, 1], x, strict=True)]
    np.testing.assert_allclose(y, np.stack(expected), atol=2e-5)
    shapes = {
        v.aval.shape for eqn in equations(jax.make_jaxpr(run)(np.arange(5), x).jaxpr) for v in eqn.outvars
    }
    assert (5, 64, 64) not in shapes


def bases(model):
    return [x.w for x in ql.select(model).values() if isinstance(x, ql.LoraArray)]


@pytest.mark.slow
def test_thirty_two_adapters_compile_once():
    models = [adapted(i) for i in range(32)]
    stacked = ql.stack_adapters(models)
    traces = []

    @eqx.filter_jit
    def run(stacked, indices, x):
        traces.append(None)
        return jax.vmap(lambda i, x: ql.quaxify(ql.choose_adapter(stacked, i))(x))(indices, x)

    x = np.random.default_rng(1).normal(size=(32, 6)).astype(np.float32)
    for seed in range(3):
        indices = np.random.default_rng(seed).permutation(32)
        y = run(stacked, indices, x)
        expected = [ql.quaxify(models[i])(row) for i, row in zip(indices, x, strict=True)]
        np.testing.assert_allclose(y, np.stack(expected), rtol=2e-6, atol=2e-6)
        # Other adapters, too, run the same program.
        models = [adapted(100 * seed + i) for i in range(32)]
        stacked = ql.stack_adapters(models)
    assert len(traces) == 1

    # No sample has a weight of its own: nothing of the size of 32 weights is computed.
    jaxpr = jax.make_jaxpr(
        lambda i, x: jax.vmap(lambda i, x: ql.quaxify(ql.choose_adapter(stacked, i))(x))(i, x)
    )
    shapes = {v.aval.shape for eqn in equations(jaxpr(indices, x).jaxpr) for v in eqn.outvars}
    assert not any(len(shape) == 3 and shape[-2:] in ((16, 6), (16, 16), (3, 16)) for shape in shapes)


@pytest.mark.slow
def test_a_single_adapter_is_a_stack_of_one():
    model = adapted(0)
    alone = ql.choose_adapter(ql.stack_adapters([model]), 0)
    run = eqx.filter_jit(lambda models: [ql.quaxify(model)(X[0]) for model in models])
    np.testing.assert_allclose(*run([alone, model]), atol=1e-6)


@pytest.mark.slow
def test_an_adapter_chosen_by_number():
    stacked = ql.stack_adapters(mixed())
    for i, model in enumerate(mixed()):
        np.testing.assert_allclose(
            ql.quaxify(ql.choose_adapter(stacked, i))(X[0]), ql.quaxify(model)(X[0]), atol=1e-6
        )
        np.testing.assert_allclose(
            ql.merge(ql.choose_adapter(stacked, i))(X[0]), ql.merge(model)(X[0]), atol=1e-6
        )
    with pytest.raises(ValueError, match=r"there are several of them\. Pick one"):
        ql.merge(stacked)


@pytest.mark.slow
def test_training_several_adapters_at_once():
    """Each gets the gradient that it would get alone."""
    models = [adapted(i) for i in range(3)]
    stacked = ql.stack_adapters(models)

    def loss(params, rest, x):
        run = lambda i, x: ql.quaxify(ql.choose_adapter(eqx.combine(params, rest), i))(x)
        return jnp.sum(jnp.sin(jax.vmap(run)(jnp.arange(3), x)))

    grads = jax.grad(loss)(*eqx.partition(stacked, ql.trainable(stacked)), X[:3])
    for i, model in enumerate(models):
        params, rest = eqx.partition(model, ql.trainable(model))
        alone = jax.grad(lambda p, rest=rest, i=i: jnp.sum(jnp.sin(ql.quaxify(eqx.combine(p, rest))(X[i]))))(
            params
        )
        for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(g[i], e, atol=1e-5)


@pytest.mark.quick(
    "<lambda>-at least one model",
    "<lambda>-have no adapters",
    "<lambda>-different names",
    "<lambda>-adapters on layers\\\\.0\\\\.weight do not fit1",
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [], "at least one model"),
        (lambda: [MLP, MLP], "have no adapters"),
        (lambda: [adapted(0), {"w": jnp.ones((2, 2))}], "different names"),
        (lambda: [adapted(0), adapted(1, modules_to_save=["layers.1"])], r"layers\.1\.weight is trained too"),
        (lambda: [adapted(0), adapted(1, dora=True)], r"adapters on layers\.0\.weight do not fit"),
        (lambda: [adapted(0), adapted(1, dropout=0.5)], r"adapters on layers\.0\.weight do not fit"),
    ],
)
def test_models_that_do_not_stack(make, message):
    models = make()
    with pytest.raises(ValueError, match=message):
        ql.stack_adapters(models)


@pytest.mark.slow
def test_choices_that_there_are_not():
    stacked = ql.stack_adapters(mixed())
    with pytest.raises(IndexError, match="adapter_index 3 is out of range for 3 adapters"):
        ql.choose_adapter(stacked, 3)
    with pytest.raises(ValueError, match=r"one integer.*Use jax\.vmap"):
        ql.choose_adapter(stacked, np.array([0, 1]))
    with pytest.raises(ValueError, match="no stacked adapters"):
        ql.choose_adapter(mixed()[0], 0)


def test_an_adapter_cannot_be_chosen_where_values_pass_for_arrays():
    stacked = {"w": ql.LoraArray(jnp.ones((3, 4)), jnp.ones((2, 1, 4)), jnp.ones((2, 3, 1)))}
    with pytest.raises(ValueError, match=r"within a function that `quaxlike.quaxify` runs.*Choose .* first"):
        ql.quaxify(lambda m: ql.choose_adapter(m, 0))(stacked)


# -------------------------------------------------------------------------------------------------
# Combinations
# -------------------------------------------------------------------------------------------------


def deltas(model):
    """What a model's adapters add to each weight."""
    return {
        name: np.asarray(x.delta()) if isinstance(x, ql.LoraArray) else 0 * np.asarray(x)
        for name, x in ql.select(model).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.3, -1.2, 2)])
def test_exact_combinations(weights):
    expected = [deltas(m) for m in mixed()]
    for options in ({}, {"method": "svd", "rank": 8}):
        combined = ql.combine_adapters(mixed(), weights, **options)
        for name, delta in deltas(combined).items():
            np.testing.assert_allclose(
                delta, sum(w * d[name] for w, d in zip(weights, expected, strict=True)), atol=1e-5
            )


@pytest.mark.slow
def test_svd_combination_is_the_best_of_its_rank():
    combined = ql.combine_adapters(mixed(), [1, 1, 1], method="svd", rank=2)
    exact = deltas(ql.combine_adapters(mixed(), [1, 1, 1]))
    for name, delta in deltas(combined).items():
        u, s, vt = np.linalg.svd(np.asarray(exact[name], np.float64), full_matrices=False)
        np.testing.assert_allclose(delta, (u[:, :2] * s[:2]) @ vt[:2], atol=1e-5)


@pytest.mark.slow
def test_linear_combination():
    """Factors are added up: PEFT's way, which is exact for one adapter."""
    x, y = adapted(1, alpha=6), adapted(2, alpha=6)
    one = ql.combine_adapters([x, y], [-0.5, 0], method="linear")
    for name, delta in deltas(one).items():
        np.testing.assert_allclose(delta, -0.5 * deltas(x)[name], atol=1e-6)
    two = ql.select(ql.combine_adapters([x, y], [2, 0.5], method="linear"))
    for name, lora in two.items():
        p, q = ql.select(x)[name], ql.select(y)[name]
        a, b = (
            np.sqrt(6) * np.asarray(u) + np.sqrt(1.5) * np.asarray(v) for u, v in ((p.a, q.a), (p.b, q.b))
        )
        np.testing.assert_allclose(lora.delta(), b @ a, atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1, 1], {}, "one weight a model; found 2 for 3"),
        ([1, 1, 1], {"method": "linear"}, "adapters of the same rank"),
    ],
)
def test_combinations_that_there_are_not(weights, options, message):
    with pytest.raises(ValueError, match=message):
        ql.combine_adapters(mixed(), weights, **options)


# -------------------------------------------------------------------------------------------------
# Dropout
# -------------------------------------------------------------------------------------------------


@pytest.mark.quick("linear")
@pytest.mark.parametrize("method", ["cat", "linear", "svd"])
def test_a_single_adapter_is_combined(method):
    found = deltas(ql.combine_adapters(mixed()[:1], [0.5], method=method))
    for name, delta in deltas(mixed()[0]).items():
        np.testing.assert_allclose(found[name], 0.5 * delta, atol=1e-5)


@pytest.mark.slow
def test_dropout_is_off_without_a_key():
    model = adapted(0, dropout=0.5)
    np.testing.assert_array_equal(ql.quaxify(model)(X[0]), ql.quaxify(adapted(0))(X[0]))
    switched = ql.with_dropout_key(ql.with_dropout_key(model, KEY), None)
    assert jax.tree.structure(switched) == jax.tree.structure(model)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_dropout_is_unbiased_and_depends_on_the_key(dora):
    layer = adapted(0, eqx.nn.Linear(6, 4, key=KEY), dropout=0.25, dora=dora)
    run = eqx.filter_jit(lambda key, x: ql.quaxify(ql.with_dropout_key(layer, key))(x))
    with ql.on_materialise("error"):
        outs = jax.vmap(run, in_axes=(0, None))(jax.random.split(KEY, 20_000), X[0])
    np.testing.assert_array_equal(run(KEY, X[0]), run(KEY, X[0]))
    np.testing.assert_allclose(
        outs.mean(0), ql.quaxify(layer)(X[0]), atol=5 * float(outs.std()) / 20_000**0.5
    )
    # Each result is that of one of the 64 masks; the base sees all of its input.
    w, lora = np.asarray(layer.weight.w), layer.weight
    masks = np.array(np.meshgrid(*[[0, 1]] * 6)).reshape(6, -1).T / 0.75
    delta, g = np.asarray(lora.delta()), 1.0
    if dora:
        g = np.asarray(lora.magnitude) / np.linalg.norm(w + delta, axis=1)
    seen = masks * X[0]
    possible = (w @ X[0] + np.asarray(layer.bias))[None] + (g - 1) * (seen @ w.T) + g * (seen @ delta.T)
    for out in outs[:50]:
        assert np.abs(possible - np.asarray(out)).max(axis=1).min() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_dropout_before_a_convolution(dora):
    x = normal(6, 5, 5)
    layer = adapted(0, eqx.nn.Conv2d(6, 4, 3, key=KEY), where="weight", dropout=0.25, dora=dora)
    run = jax.jit(jax.vmap(lambda key: ql.quaxify(ql.with_dropout_key(layer, key))(x)))
    outs = run(jax.random.split(KEY, 2000))
    noise = outs.std(0)
    assert noise.min() > 0
    np.testing.assert_array_less(np.abs(outs.mean(0) - ql.quaxify(layer)(x)), 6 * noise / 2000**0.5)


@pytest.mark.slow
def test_each_sample_and_each_layer_of_a_stack_has_its_own_mask():
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(6, 6, key=key))(jax.random.split(KEY, 3))
    model = ql.with_dropout_key(adapted(0, layers, dropout=0.5), KEY)
    assert model.weight.key.shape == (3,)

    def run(layers, x):
        params, static = eqx.partition(layers, eqx.is_array)
        return jax.lax.scan(lambda x, p: (eqx.combine(p, static)(x), None), x, params)[0]

    with ql.on_materialise("error"):
        y = jax.jit(ql.quaxify(run))(model, X[0])
    x = X[0]
    for i in range(3):
        x = ql.quaxify(jax.tree.map(lambda leaf, i=i: leaf[i], model))(x)
    np.testing.assert_allclose(y, x, atol=1e-5)
    both = ql.quaxify(lambda m, x: jax.vmap(m)(x))(
        ql.with_dropout_key(adapted(0, dropout=0.5), KEY), np.stack([X[0], X[0]])
    )
    assert not np.allclose(both[0], both[1])


# -------------------------------------------------------------------------------------------------
# Merging into quantised weights
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("nf4", {}),
        ("nf4", {"double_quant": True}),
        ("fp4", {"block_size": 32}),
        ("int8", {}),
        ("int4", {"axis": 0}),
    ],
)
def test_merging_into_a_quantised_base(scheme, options):
    linear = eqx.nn.Linear(64, 64, key=KEY)
    model = adapted(0, ql.quantize(linear, scheme, **options))
    with pytest.warns(UserWarning, match="merged into quantised weights, which rounds them: weight"):
        merged = ql.merge(model)
    exact = model.weight.merged()
    expected = ql.quantize(eqx.tree_at(lambda m: m.weight, linear, exact), scheme, **options)
    assert jax.tree.structure(merged) == jax.tree.structure(expected)
    np.testing.assert_array_equal(ql.materialise(merged.weight), ql.materialise(expected.weight))


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{}, {"double_quant": True}])
def test_merging_into_a_stack_of_quantised_weights(options):
    """Each keeps blocks of its own, that cross its rows."""
    w = np.random.default_rng(0).normal(size=(3, 6, 10)).astype(np.float32)
    model = adapted(0, {"w": ql.NF4Array.quantize(w, stacked=1, **options)}, where=["w"])
    with pytest.warns(UserWarning, match="rounds them: w"):
        merged = ql.merge(model)["w"]
    expected = ql.NF4Array.quantize(model["w"].merged(), stacked=1, **options)
    assert tree_equal(merged, expected)


def test_merging_into_a_base_of_another_type():
    """The base stays of its type, without a warning, if a dense array can be made one."""
    w = normal(4, 6)
    model = adapted(0, {"w": NamedArray(w, ("out", "in"))}, where=["w"])
    merged = ql.merge(model)["w"]
    assert merged.names == ("out", "in")
    np.testing.assert_array_equal(merged.array, model["w"].merged())
    model = adapted(0, {"w": ql.SparseArray.from_dense(w)}, where=["w"])
    with pytest.raises(ValueError, match=r"w cannot be merged: its base is of type SparseArray"):
        ql.merge(model)


def test_tied_adapters_stay_tied():
    w, names = normal(16, 16), ["embed_tokens", "lm_head"]
    model = dict.fromkeys(names, w)
    adapted = [ql.loraify(model, rank=2, dropout=0.1, where=names, key=jax.random.key(i)) for i in range(2)]
    stacked = ql.stack_adapters(adapted)
    for found in (
        ql.unmerge(ql.merge(adapted[0]), adapted[0]),
        ql.with_dropout_key(adapted[0], jax.random.key(3)),
        ql.with_dropout_key(adapted[0], None),
        ql.train_scales(ql.quantize(model, "int8", where=names)),
        ql.combine_adapters(adapted, [0.5, 0.5]),
        stacked,
    ):
        assert found["embed_tokens"] is found["lm_head"]
