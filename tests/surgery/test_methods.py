"""How adapters of published methods begin: they add nothing, and have PEFT's numbers of parameters."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import adapters
from quaxlike.adapters import METHODS, MethodArray
from quaxlike.adapters.lora import TOKENS
from quaxlike.files.tensors import open_tensors
from quaxlike.lm import peft
from tests.samples import drawn, normal, random_key, tree_equal, wrong_types


def _start(name, **options):
    return functools.partial(METHODS[name].start, **options)


KEY = random_key(0)
# For a weight of 6 outputs and 8 inputs: options, and how many numbers are trained.
STARTS = {
    "lora": ({"rank": 2}, 2 * (6 + 8)),
    "ia3": ({}, 6),
    "ia3, inputs": ({"of_inputs": True}, 8),
    "oft": ({"block_size": 4}, 2 * 6),
    "boft": ({"n_butterfly_factor": 2}, 2 * 2 * 16 + 6),
    "hra": ({"rank": 4}, 8 * 4),
    "loha": ({"rank": 2}, 2 * 2 * (6 + 8)),
    "lokr": ({"rank": 1}, 2 * 2 + 3 + 4),
    "lokr, full": ({"rank": 4}, 2 * 2 + 3 * 4),
    "hira": ({"rank": 2}, 2 * (6 + 8)),
    "shira": ({"rank": 2}, 2 * (6 + 8)),
    "c3a": ({"block_size": 2}, 6 * 8 // 2),
    "fourierft": ({"n_frequency": 5}, 5),
    "adalora": ({"rank": 3}, 3 * (6 + 8 + 1)),
    "delora": ({"rank": 3}, 3 * (6 + 8) + 1),
    "miss": ({"rank": 4}, 4 * 6),
    "gralora": ({"rank": 4}, 4 * (6 + 8)),
    "vera": ({"a": normal(3, 8), "b": normal(6, 3, seed=1)}, 3 + 6),
    "randlora": ({"a": normal(2, 1, 6), "b": normal(8, 3, 2, seed=1)}, 2 * 3 + 3 * 6),
}
NO_STACKS = ("shira",)
# Adapters that don't equal their base if all parts are zero.
NEVER_NOTHING = ("ia3", "ia3, inputs", "boft", "hra")


def _make(name):
    options, count = STARTS[name]
    return _start(name.partition(",")[0], **options), count


def test_all_methods_are_here():
    """And all can be named on a command line."""
    names = {name.partition(",")[0] for name in STARTS}
    types = [cls for cls in vars(adapters).values() if isinstance(cls, type) and issubclass(cls, MethodArray)]
    own = {cls.__name__.removesuffix("Array").lower() for cls in types if cls is not MethodArray}
    assert names == {*METHODS} == {"lora", *own}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", STARTS)
def test_they_add_nothing_and_are_trained(name):
    make, count = _make(name)
    half = normal(6, 8).astype(jnp.bfloat16)
    base = {"a.weight": normal(6, 8), "b.kernel": normal(8, 6), "c.weight": half, "d.kernel": normal(2, 8, 6)}
    if name in NO_STACKS:
        del base["d.kernel"]
    layout = {path: "io" for path in base if path == "d.kernel"}
    model = ql.adapt(base, make, key=KEY, where=[path[0] for path in base], layout=layout)
    found = {row.path: row.trainable for row in ql.summary(model).rows}
    assert found == {path: count * (2 if path == "d.kernel" else 1) for path in base}
    for path, w in base.items():
        whole = ql.materialise(model[path])
        assert (whole.shape, whole.dtype) == (w.shape, w.dtype)
        rounded = 1e-2 if w.dtype == jnp.bfloat16 else 0
        np.testing.assert_allclose(whole.astype(float), w.astype(float), rtol=rounded, atol=1e-5)
        assert model[path].w is w
        parts = jax.tree.leaves([getattr(model[path], part) for part in model[path].trained()])
        floating = [part.dtype for part in parts if jnp.issubdtype(part.dtype, jnp.floating)]
        assert {*floating} == {jnp.dtype("float32")}
    x = normal(8, seed=3)
    loss = lambda w: jnp.sum(jnp.sin(ql.quaxify(jnp.matmul)(w, x)))
    grads = jax.grad(loss, allow_int=True)(model["a.weight"])
    parts = jax.tree.leaves([getattr(grads, part) for part in model["a.weight"].trained()])
    assert any(np.any(np.asarray(part)) for part in parts if part.dtype != jax.dtypes.float0)


@pytest.mark.quick("start0")
@pytest.mark.parametrize("start", [_start("vera"), _start("randlora", rank=2)])
def test_layers_share_their_random_matrices(start, tmp_path):
    """Those of PEFT for its seed, so that files need not hold them; stacked layers keep them once."""
    sizes = [(8, 6), (8, 6), (4, 12)]
    layers = [drawn(eqx.nn.Linear, *size, key=KEY) for size in sizes]
    model = ql.adapt(layers, start, key=KEY)
    first, second, other = (layer.weight for layer in model)
    assert first.a is second.a is other.a
    assert first.b is second.b is other.b
    assert (first.a.shape[-1], len(first.b)) == (8, 12)
    own = [sum(getattr(layer.weight, name).nbytes for name in layer.weight.trained()) for layer in model]
    stored = [row.stored_bytes - row.logical_bytes for row in ql.summary(model).rows[::2]]
    assert stored == [own[0] + first.a.nbytes + first.b.nbytes, *own[1:]]
    again = ql.adapt(layers, start, key=random_key(1))[0].weight
    assert again.seed != first.seed
    assert not np.array_equal(again.a, first.a)
    np.testing.assert_array_equal(ql.adapt(layers, start, key=KEY)[0].weight.b, first.b)

    peft.save_adapter(tmp_path, model)
    assert not any(key.endswith("_A") for key in open_tensors(tmp_path / "adapter_model.safetensors"))
    assert tree_equal(peft.load_adapter(tmp_path, layers), model)

    trained = zip(layers, _trained(model), strict=True)
    model = [eqx.tree_at(lambda x: x.weight, layer, x) for layer, x in trained]
    stacked = ql.stack_layers(model[:2])
    assert stacked.weight.a is model[0].weight.a
    for row, layer in zip(ql.unstack_layers(stacked), model, strict=False):
        assert tree_equal(row, layer)

    @ql.quaxify
    def run(stacked, x):
        return jax.lax.scan(lambda x, layer: (jnp.pad(layer(x), (0, 2)), None), x, stacked)[0]

    x = normal(8, seed=5)
    with ql.on_materialise("error"):
        found = jax.jit(run)(stacked, x)
    for layer in map(ql.merge, model[:2]):
        x = np.pad(np.asarray(layer.weight) @ x + np.asarray(layer.bias), (0, 2))
    np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-5)


def test_factors_of_layers_with_a_bias(tmp_path):
    """Of their inputs, which leave the bias alone, so that PEFT's files hold them."""
    conv = eqx.nn.Conv2d
    layers = {
        "a": drawn(eqx.nn.Linear, 8, 6, key=KEY), "b": drawn(eqx.nn.Linear, 8, 6, use_bias=False, key=KEY),
        "conv": drawn(conv, 2, 4, 3, key=KEY),
    }  # fmt: skip
    model = ql.adapt(layers, _start("ia3"), where=[*layers])
    factors = {name: [*model[name].weight.trained()] for name in layers}
    assert factors == {"a": ["inputs"], "b": ["outputs"], "conv": ["channels"]}
    peft.save_adapter(tmp_path, model)
    assert tree_equal(peft.load_adapter(tmp_path, layers), model)
    grouped = {"conv": drawn(conv, 2, 4, 3, groups=2, key=KEY)}
    with pytest.raises(ValueError, match="does not tell how many channels"):
        ql.adapt(grouped, _start("ia3"), where=["conv"])
    outputs = ql.adapt(layers, _start("ia3", of_inputs=False), where=["a"])
    assert outputs["a"].weight.trained() == ["outputs"]


def _trained(layers):
    """The weights, with other numbers for those that are trained."""
    for i, layer in enumerate(layers):
        x = layer.weight
        yield x.replace(**{name: normal(*getattr(x, name).shape, seed=i) for name in x.trained()})


def test_matrices_that_nobody_draws():
    with pytest.raises(ValueError, match="VeRA needs both matrices, `a` and `b`, which all layers share"):
        _start("vera")(normal(6, 8), key=KEY, layout=ql.Layout.parse("oi"))
    with pytest.raises(ValueError, match="needs both matrices"):
        ql.adapt({"a.weight": normal(6, 8)}, _start("vera", a=normal(2, 8)))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_start("oft", block_size=3), "a block_size that divides 8; found 3"),
        (_start("hra", rank=3), "pairs of reflections; found a rank of 3"),
        (_start("c3a", block_size=4), "a block_size that divides 6 and 8; found 4"),
        (_start("gralora", rank=3), "a k that divides 3 and 6 and 8; found 2"),
        (
            _start("shira", rank=4),
            r"trains 56 elements of one matrix; .* shape \(6, 8\)",
        ),
        pytest.param(
            _start("randlora", rank=2, sparsity="none"),
            "'very_sparse'; found 'none'",
            marks=wrong_types,
        ),
        (_start("fourierft", n_frequency=0), "n_frequency from 1 to 48; found 0"),
    ],
)
def test_sizes_that_there_are_not(make, message):
    with pytest.raises(ValueError, match=message):
        ql.adapt({"a.weight": normal(6, 8)}, make, key=KEY)


def test_rows_that_are_trained_start_as_they_are():
    base = {"embed.weight": normal(9, 4)}
    start = functools.partial(TOKENS.start, tokens=(1, 7))
    model = ql.adapt(base, start, where=["embed"], layout={"embed.weight": "vo"})
    np.testing.assert_array_equal(model["embed.weight"].rows, base["embed.weight"][jnp.array([1, 7])])
    np.testing.assert_array_equal(ql.materialise(model["embed.weight"]), base["embed.weight"])


def _moved(model, seed):
    params, rest = eqx.partition(model, ql.trainable(model))
    leaves, treedef = jax.tree.flatten(params)
    leaves = [x + 0.1 * normal(*x.shape, seed=10 * seed + i, dtype=x.dtype) for i, x in enumerate(leaves)]
    return eqx.combine(jax.tree.unflatten(treedef, leaves), rest)


@pytest.mark.quick("vera", "shira")
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
@pytest.mark.parametrize("name", STARTS)
def test_several_on_one_base(name):
    """On the same layers, or on different ones if there is an adapter that adds nothing."""
    make, _ = _make(name)
    base, x = {"a.weight": normal(6, 8), "b.weight": normal(6, 8, seed=1)}, normal(8, seed=2)
    run = lambda model: [ql.quaxify(jnp.matmul)(w, x) for w in model.values()]
    for where in (["a", "a"], ["a", "b"]):
        models = [_moved(ql.adapt(base, make, key=KEY, where=[on]), i) for i, on in enumerate(where)]
        if name in NEVER_NOTHING and where == ["a", "b"]:
            with pytest.raises(ValueError, match=r"Model 1 has no adapter on a\.weight.*the same layers"):
                ql.stack_adapters(models)
            continue
        stacked = ql.stack_adapters(models)
        assert type(stacked["a.weight"]) is type(models[0]["a.weight"])
        found = jax.vmap(lambda i, stacked=stacked: run(ql.choose_adapter(stacked, i)))(jnp.arange(2))
        for i, model in enumerate(models):
            for y, expected in zip(found, run(model), strict=True):
                np.testing.assert_allclose(y[i], expected, rtol=1e-4, atol=1e-4)
        if name == "shira":
            assert isinstance(stacked["a.weight"].delta, ql.SparseArray)
