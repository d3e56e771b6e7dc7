"""`loraify`, `merge`, `unmerge`, `trainable`, `select` and `summary` on whole models."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.quantized import CODECS
from tests.samples import drawn, normal, random_key, tree_equal, wrong_types


@pytest.fixture
def mlp():
    return drawn(eqx.nn.MLP, 5, 3, 16, depth=2, key=random_key())


X = np.linspace(-1, 1, 5, dtype=np.float32)
KEY = random_key(1)
WEIGHTS = ["layers.0.weight", "layers.1.weight", "layers.2.weight"]

OPTIONS = {
    "kaiming": {},
    "gaussian": {"init": "gaussian"},
    "pissa": {"init": "pissa"},
    "pissa, randomised": {"init": "pissa_niter_4"},
    "olora": {"init": "olora"},
    "dora": {"dora": True},
    "rslora": {"rslora": True, "init": "pissa"},
    "dora, olora": {"dora": True, "init": "olora"},
    "biases": {"bias": "all"},
    "adapter bias": {"lora_bias": True},
    "saved": {"modules_to_save": ["layers.2"], "bias": "lora_only", "lora_bias": True},
}


def perturbed(model):
    """The model after some training: what is trained is no longer what it was at first."""
    params, rest = eqx.partition(model, ql.trainable(model))
    seeds = itertools.count()
    params = jax.tree.map(lambda p: p + 0.1 * normal(*p.shape, seed=next(seeds), dtype=p.dtype), params)
    return eqx.combine(params, rest)


def same(x, y, tolerance=1e-6):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for p, q in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        if eqx.is_array(p):
            np.testing.assert_allclose(p, q, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_adapted_model(mlp, name):
    """Same function at first; after training merge computes the same; unmerge gives the parts back."""
    adapted = ql.loraify(mlp, rank=3, alpha=6, key=KEY, **OPTIONS[name])
    with ql.on_materialise("error"):
        np.testing.assert_allclose(ql.quaxify(adapted)(X), mlp(X), atol=1e-6)
        trained = perturbed(adapted)
        y = eqx.filter_jit(ql.quaxify(trained))(X)
    assert np.abs(y - mlp(X)).max() > 5e-3
    merged = ql.merge(trained)
    assert jax.tree.structure(merged) == jax.tree.structure(mlp)
    np.testing.assert_allclose(merged(X), y, atol=2e-6)
    same(ql.unmerge(merged, trained), trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_of_what_is_trained(mlp, name):
    model = perturbed(ql.loraify(mlp, rank=3, key=KEY, **OPTIONS[name]))
    params, rest = eqx.partition(model, ql.trainable(model))
    loss = lambda params: jnp.sum(jnp.sin(ql.quaxify(eqx.combine(params, rest))(X)))
    grads = eqx.filter_grad(loss)(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads))
    # The bases of the adapters are constants.
    floats = eqx.filter(model, eqx.is_inexact_array)
    whole = eqx.filter_grad(lambda m: jnp.sum(jnp.sin(ql.quaxify(m)(X))))(model)
    adapters = jax.tree.leaves(eqx.filter(whole, ql.trainable(model)))
    assert jax.tree.structure(whole) == jax.tree.structure(floats)
    same(jax.tree.leaves(grads), adapters)
    loras = [x for x in ql.select(whole, lambda *_: True).values() if isinstance(x, ql.LoraArray)]
    assert loras
    assert not any(jnp.any(x.w != 0) for x in loras)


@pytest.mark.slow
def test_options_reach_the_layers(mlp):
    model = ql.loraify(
        mlp, rank=4, alpha=8, key=KEY, rank_pattern={"layers.0": 2, r"layers\.\d": 3},
        alpha_pattern={"1": 5.0}, exclude=["2"], dropout=0.25,
    )  # fmt: skip
    first, second, third = (model.layers[i].weight for i in range(3))
    assert (first.rank, first.alpha, first.scaling) == (2, 8, 4)
    assert (second.rank, second.alpha, second.dropout) == (3, 5, 0.25)
    assert third is mlp.layers[2].weight


@pytest.mark.slow
def test_stacked_layers_get_an_adapter_each():
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(jax.random.split(KEY, 3))
    model = perturbed(ql.loraify(layers, rank=2, key=KEY))
    assert model.weight.a.shape == (3, 2, 4)
    x = jnp.ones(4)

    def run(layers):
        params, static = eqx.partition(layers, eqx.is_array)
        return jax.lax.scan(lambda x, p: (jnp.tanh(eqx.combine(p, static)(x)), None), x, params)[0]

    with ql.on_materialise("error"):
        y = jax.jit(ql.quaxify(run))(model)
    np.testing.assert_allclose(y, run(ql.merge(model)), atol=1e-6)


@pytest.mark.slow
def test_tied_weights_stay_tied():
    table = jax.random.normal(KEY, (7, 4))
    model = {"wte.weight": table, "out.weight": table, "mlp.weight": jnp.ones((4, 4))}
    adapted = ql.loraify(model, rank=2, where=["wte", "out", "mlp"], key=KEY)
    assert adapted["wte.weight"] is adapted["out.weight"]
    merged = ql.merge(adapted)
    assert merged["wte.weight"] is merged["out.weight"]


@pytest.mark.slow
def test_shared_layers_stay_tied():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            layers = (eqx.nn.Embedding(7, 4, key=KEY), eqx.nn.Linear(4, 7, key=KEY))
            self.shared = eqx.nn.Shared(layers, lambda x: x[1].weight, lambda x: x[0].weight)

        def __call__(self, i):
            embed, out = self.shared()
            return out(embed(i))

    model = Tied()
    adapted = perturbed(ql.loraify(model, rank=2, where=[r"0"], key=KEY))
    with ql.on_materialise("error"):
        y = eqx.filter_jit(ql.quaxify(adapted))(jnp.array(2))
    np.testing.assert_allclose(y, ql.merge(adapted)(jnp.array(2)), atol=1e-5)


# -------------------------------------------------------------------------------------------------
# select
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("all-linear", WEIGHTS),
        (r"layers\.[01]", WEIGHTS[:2]),
        (r".*bias", ["layers.0.bias", "layers.1.bias", "layers.2.bias"]),
        (["1", "layers.2.weight"], WEIGHTS[1:]),
        (lambda name, w: w.shape == (3, 16), WEIGHTS[2:]),
    ],
)
def test_select(mlp, where, names):
    assert list(ql.select(mlp, where)) == names


def test_select_in_a_state_dict():
    z = jnp.zeros
    state = {
        "wte.weight": z((9, 4)), "h.0.attn.q.weight": z((4, 4)), "h.0.attn.q.bias": z(4),
        "h.0.ln.weight": z(4), "lm_head.weight": z((9, 4)), "embeddings.word_embeddings.weight": z((9, 4)),
        "step": z((), jnp.int32),
    }  # fmt: skip
    assert list(ql.select(state)) == ["h.0.attn.q.weight"]
    assert list(ql.select({"model": {"h": [state]}}, ["q"])) == ["model.h.0.h.0.attn.q.weight"]


def test_a_model_without_adapters_trains_nothing_and_says_so(mlp):
    with pytest.warns(UserWarning, match="has no adapters, so nothing in it is trained.*loraify"):
        assert not any(jax.tree.leaves(ql.trainable(mlp)))


@pytest.mark.parametrize("where", ["layer.0", ["layers.0", "kayers.1"], r"layrs\.0\.(weight|bias)"])
def test_a_pattern_that_matches_nothing_names_near_misses(mlp, where):
    with pytest.raises(ValueError, match=r"matches none of the arrays.*Did you mean .*layers\.[01]"):
        ql.loraify(mlp, rank=2, where=where, key=KEY)


_FUSED = {
    "h.0.q_proj.weight": (4, 8), "h.0.mlp.gate_up_proj.weight": (16, 8), "h.0.mlp.down_proj.weight": (8, 8),
    "h.1.experts.gate_up_proj": (3, 16, 8), "h.1.experts.down_proj": (3, 8, 8),
    "h.1.shared.gate_proj.weight": (8, 8), "h.1.shared.up_proj.weight": (8, 8),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [["gate_proj", "up_proj", "down_proj"], r".*\.(gate|up|down)_proj", ["up_proj", "gate_up_proj"]]
)
def test_names_of_fused_layers_stand_for_the_whole(where):
    """As in the configuration of an adapter for a checkpoint that stores them apart."""
    model = {name: normal(*shape) for name, shape in _FUSED.items()}
    chosen = {*ql.select(model, where)}
    assert {"h.0.mlp.gate_up_proj.weight", "h.1.experts.gate_up_proj", "h.1.shared.up_proj.weight"} <= chosen
    assert "h.0.q_proj.weight" not in chosen
    stacks = {"h.1.experts.gate_up_proj": "oi", "h.1.experts.down_proj": "oi"}
    adapted = ql.loraify(model, rank=2, where=where, layout=stacks, key=KEY)
    assert {name for name, x in adapted.items() if isinstance(x, ql.LoraArray)} == chosen


def test_a_part_of_a_fused_layer_is_told():
    model = {name: normal(*shape) for name, shape in _FUSED.items()}
    with pytest.warns(
        UserWarning,
        match=r"h\.0\.mlp\.gate_up_proj\.weight is gate_proj and up_proj in one array: name gate_up_proj, or "
        "all of gate_proj, up_proj. It is not selected, nor are 1 others",
    ):
        assert {*ql.select(model, ["up_proj"])} == {"h.1.shared.up_proj.weight"}
    del model["h.1.shared.up_proj.weight"]
    with pytest.raises(ValueError, match=r"'up_proj' matches none .*gate_up_proj\.weight is gate_proj and"):
        ql.select(model, ["up_proj", "down_proj"])


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_pattern": {"layer.0": 1}}, r"'layer\.0' in rank_pattern matches none.*layers\.0"),
        ({"alpha_pattern": {"q": 1}}, r"'q' in alpha_pattern matches none"),
        ({"rank_pattern": {"(": 1}}, r"'\(' in rank_pattern: not a regular expression: missing \)"),
        ({"where": "layers.("}, r"'layers\.\(' is not a regular expression: missing \)"),
        ({"exclude": ["layers.3"]}, r"'layers\.3' matches none"),
        ({"modules_to_save": ["classifier"]}, r"'classifier' in modules_to_save is not in the model"),
        (
            {"where": ["layers"]},
            r"'layers' matches none.*is a part of the model, with the arrays layers\.0\.weight",
        ),
        (
            {"exclude": r"layers\.\d", "where": WEIGHTS},
            r"leaves nothing of what `where` selects, which is layers\.0\.weight \(16, 5\).*Exclude fewer",
        ),
        ({"where": "weight"}, r"'weight' matches none.* for whole names; for their ends, pass \['weight'\]"),
        ({"where": r".*bias"}, r"no weight of two or more axes.*layers\.0\.bias \(16,\)"),
        ({"init": "kaimin"}, "init must be one of 'kaiming'"),
        ({"init": "pissa", "rank": 4}, r"rank of at most min\(out, in\) = 3 for layers\.2\.weight; found 4"),
        ({"rank": 0}, "rank of at least 1"),
        ({"rank_pattern": {"layers.0": -1}}, r"rank_pattern\['layers\.0'\] of at least 1; found -1"),
        ({"alpha": -1}, "finite alpha above 0; found -1"),
        ({"alpha_pattern": {"layers.0": float("nan")}}, r"finite alpha_pattern\['layers\.0'\] above 0"),
    ],
)
def test_errors(mlp, options, message):
    with pytest.raises(ValueError, match=message):
        ql.loraify(mlp, key=KEY, **{"rank": 2} | options)


def test_what_all_linear_leaves_out_is_told_where_nothing_is_left():
    layers = {"fc": eqx.nn.Linear(4, 4, key=KEY), "conv": eqx.nn.Conv2d(2, 4, 3, key=KEY)}
    with pytest.raises(
        ValueError, match=r"which is fc\.weight.*takes no convolutions.*: conv\.weight \(4, 2"
    ):
        ql.loraify(layers, rank=1, exclude=["fc"], key=KEY)


@pytest.mark.slow
def test_a_rank_above_both_sizes_of_a_weight_is_told(mlp):
    with pytest.warns(UserWarning, match=r"rank is above both sizes of layers\.0\.weight \(8, 5\): such"):
        ql.loraify(eqx.nn.MLP(5, 16, 8, depth=1, key=KEY), rank=9, key=KEY)
    ql.loraify(mlp, rank=16, key=KEY)
    stack = {"w": normal(40, 8, 8)}
    with pytest.warns(UserWarning, match=r"above both sizes of w \(40, 8, 8\)"):
        ql.loraify(stack, rank=2, rank_pattern={"w": 9}, layout="oi", where=["w"], key=KEY)


def test_a_model_without_adapters_to_merge_is_told(mlp):
    with pytest.warns(UserWarning, match="merge found no adapters.*loraify"):
        assert tree_equal(ql.merge(mlp), mlp)


@wrong_types
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": "non"}, "one of 'none', 'all', 'lora_only' as bias; found 'non'"),
        ({"rank": "8"}, "a whole number as rank; found '8'"),
        ({"rank": 2.5}, r"a whole number as rank; found 2\.5"),
        ({"alpha": "16"}, "a number as alpha; found '16'"),
        ({"rslora": "no"}, "True or False as rslora; found 'no'"),
    ],
)
def test_options_of_other_types(mlp, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ql.loraify(mlp, key=KEY, **{"rank": 2} | options)


@pytest.mark.parametrize("options", [{"modules_to_save": ["layers.1"]}, {"train_base": True}])
def test_quantised_weights_are_not_trained_by_mistake(mlp, options):
    """Their codes can't be trained, and their scales have no gradients unless somebody asks for them."""
    quantised = ql.quantize(mlp, "nf4")
    options = {"rank": 2, "where": ["layers.0"], "key": KEY} | options
    with pytest.raises(ValueError, match=r"layers\.[01]\.weight cannot be trained, .*NF4Array.*`exclude`"):
        ql.loraify(quantised, **options)
    model = ql.loraify(ql.train_scales(quantised), **options)
    trained = 1 if "modules_to_save" in options else 0
    weight = ql.trainable(model).layers[trained].weight
    assert jax.tree.leaves(weight.w) == [False, True]  # the codes and the scales


def test_a_base_that_stops_gradients_is_not_marked(mlp):
    """Otherwise weight decay would shrink it."""
    model = ql.quantize(ql.loraify(mlp, rank=2, key=KEY, train_base=True), "nf4")
    weight = ql.trainable(model).layers[0].weight
    assert jax.tree.leaves(weight.w) == [False, False]
    assert (weight.a, weight.b) == (True, True)


CONV = lambda **options: drawn(eqx.nn.Conv2d, 2, 3, 2, key=random_key(), **options)
NO_BIAS = "lora_bias=True adds to the bias of each adapted layer; {} .* has none .* `exclude`"


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_adapter_biases_of_a_convolution(merged):
    """Its bias has axes of size 1, which that of the adapter must have as well."""
    model = ql.loraify({"conv": CONV()}, rank=2, key=KEY, where=["conv"], lora_bias=True)
    model = eqx.tree_at(lambda m: m["conv"].bias.b, model, normal(3, 1, 1))
    expected = CONV()(x := normal(2, 4, 4)) + normal(3, 1, 1)
    found = ql.merge(model)["conv"](x) if merged else ql.quaxify(model["conv"])(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_bias", [True, False])
def test_adapter_bias_of_a_layer_on_its_own(use_bias):
    layer = drawn(eqx.nn.Linear, 4, 3, use_bias=use_bias, key=KEY)
    model = ql.loraify(layer, rank=2, key=KEY, lora_bias=True)
    assert isinstance(model.bias, ql.LoraBias)
    assert model.bias.w is layer.bias
    assert model.bias.b.shape == (3,)


@pytest.mark.parametrize(
    ("model", "where", "name"),
    [
        (lambda: {"conv": CONV(use_bias=False)}, ["conv"], r"conv\.weight"),
        (lambda: {"cell": drawn(eqx.nn.GRUCell, 4, 3, key=KEY)}, "all-linear", r"cell\.weight_ih"),
        (
            lambda: {"cell": drawn(eqx.nn.LSTMCell, 4, 3, use_bias=False, key=KEY)},
            "all-linear",
            r"cell\.weight_ih",
        ),
        (lambda: {"q.weight": normal(4, 3)}, "all-linear", r"q\.weight"),
        (lambda: {"embed": drawn(eqx.nn.Embedding, 5, 4, key=KEY)}, ["embed"], r"embed\.weight"),
    ],
)
def test_layers_that_would_not_read_an_adapter_bias(model, where, name):
    with pytest.raises(ValueError, match=NO_BIAS.format(name)):
        ql.loraify(model(), rank=2, key=KEY, where=where, lora_bias=True)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_which_biases_are_trained(bias):
    """All those of a layer on its own or of a recurrent cell; a mask named `b` is no bias."""
    layer, cell = drawn(eqx.nn.Linear, 4, 3, key=KEY), drawn(eqx.nn.GRUCell, 4, 3, key=KEY)
    options = {"rank": 2, "key": KEY, "bias": bias}
    assert isinstance(ql.loraify(layer, **options).bias, ql.TrainableArray)
    model = {"cell": cell, "mask": {"w": normal(3, 3), "b": jnp.ones(3, bool)}}
    model = ql.loraify(model, where=["cell.weight_hh", "mask"], layout={"mask": "oi"}, **options)
    assert isinstance(model["cell"].bias, ql.TrainableArray)
    assert isinstance(model["cell"].bias_n, ql.TrainableArray)
    assert isinstance(model["mask"]["b"], jax.Array)
    bare = drawn(eqx.nn.Linear, 4, 3, use_bias=False, key=KEY)
    with pytest.raises(ValueError, match=rf"bias='{bias}' trains biases, and there are none in the .*weight"):
        ql.loraify(bare, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [ql.quantize, ql.summary, lambda model: ql.loraify(model, rank=2, key=random_key())]
)
def test_two_arrays_of_one_name_are_an_error(change):
    model = {"a.weight": normal(8, 64), "a": {"weight": normal(8, 64, seed=1)}}
    both = r"'a.weight': those at \['a'\]\['weight'\] and \['a.weight'\]"
    with pytest.raises(ValueError, match=f"Two arrays of the model are named {both}"):
        change(model)


def test_adapting_twice_is_an_error(mlp):
    with pytest.raises(ValueError, match=r"layers\.0\.weight is of type LoraArray already. Merge"):
        ql.loraify(ql.loraify(mlp, rank=2, key=KEY), rank=2, key=KEY)


def test_summary_counts(mlp):
    model = ql.loraify(mlp, rank=2, key=KEY, exclude=["0"], bias="lora_only")
    table = ql.summary(model)
    base = sum(x.size for x in jax.tree.leaves(eqx.filter(mlp, eqx.is_array)))
    adapters = 2 * (16 + 16) + 2 * (16 + 3)
    assert table.size == base
    assert table.trainable == adapters + 16 + 3
    assert table.trainable_share == pytest.approx((adapters + 19) / (base + adapters))
    assert table.logical_bytes == 4 * base
    assert table.stored_bytes == 4 * (base + adapters)
    assert [row.path for row in table.rows] == list(ql.select(model, lambda name, x: True))
    assert f"{table.trainable:,}" in str(table).splitlines()[-1]
    assert repr(table) == str(table)
    rule = next(line for line in str(table).splitlines() if line.startswith("-"))
    assert rule == "-" * max(map(len, str(table).splitlines()))
    assert "LoraArray[r=2]" in str(table)


@pytest.mark.slow
def test_summary_names_the_codec_of_blocks(mlp):
    adapted = ql.loraify(ql.quantize(mlp, "q8_0"), rank=2, key=KEY)
    assert {row.type for row in ql.summary(adapted).rows} == {"LoraArray[r=2] of BlockArray[q8_0]", "array"}
    own = dataclasses.replace(CODECS["int4_block"], dtype="bfloat16")
    (row,) = ql.summary(ql.BlockArray.quantize(jnp.ones((4, 32)), codec=own)).rows
    assert row.type == "BlockArray[4-bit]"
    blocks = ql.BlockSparseArray.from_dense(jnp.ones((128, 128)), block_size=64)
    (row,) = ql.summary(ql.quantize({"w": blocks}, "nf4", where=["w"])).rows
    assert row.type == "BlockSparseArray of NF4Array"


@pytest.mark.slow
def test_an_array_is_a_model():
    """Its name is empty, which is no other weight's."""
    w, x = normal(16, 8), normal(3, 8)
    adapted = perturbed(ql.loraify(ql.quantize(w, "int8"), rank=2, key=KEY))
    assert isinstance(adapted, ql.LoraArray)
    assert isinstance(adapted.base, ql.Int8Array)
    np.testing.assert_allclose(ql.quaxify(jnp.matmul)(x, adapted.T), x @ ql.materialise(adapted).T, atol=1e-5)
    assert ql.trainable(adapted).a is True
    assert list(ql.select(adapted, ".*")) == [""]
    with pytest.raises(
        ValueError, match=r"'head' in modules_to_save is not in the model\. There are '' \(16, 8\)"
    ):
        ql.loraify(w, rank=2, key=KEY, modules_to_save=["head"])


def test_a_model_without_linear_layers():
    """What could be named instead is told, if there is anything."""
    with pytest.raises(ValueError, match=r"e\.g\. where=\['weight'\]\. The model has weight \(8, 3, 3, 3\)"):
        ql.loraify(drawn(eqx.nn.Conv2d, 3, 8, 3, key=random_key()), rank=2, key=KEY)
    with pytest.raises(ValueError, match="nor any other weight of two or more axes and floating-point dtype"):
        ql.loraify({"bias": normal(3), "codes": np.ones((4, 4), int)}, rank=2, key=KEY)
