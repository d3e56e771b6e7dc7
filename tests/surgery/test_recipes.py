"""Recipes of `quantize`: a scheme for each kind of weight."""

import equinox as eqx
import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import safetensors
from tests.samples import drawn, normal, random_key, tree_equal, wrong_types

MIXED = {r"layers\.0\..*": "q6_k", ("layers.2",): None, "all-linear": ("nf4", {"double_quant": True})}


@pytest.fixture
def mlp():
    return drawn(eqx.nn.MLP, 64, 32, 64, depth=3, key=random_key())


@pytest.mark.slow
def test_each_weight_follows_the_first_rule_that_selects_it(mlp):
    model = ql.quantize(mlp, MIXED)
    assert tree_equal(model.layers[0].weight, ql.BlockArray.quantize(mlp.layers[0].weight, codec="q6_k"))
    assert model.layers[2].weight is mlp.layers[2].weight
    for i in (1, 3):
        expected = ql.NF4Array.quantize(mlp.layers[i].weight, double_quant=True)
        assert tree_equal(model.layers[i].weight, expected)
    x = normal(64)
    expected = ql.materialise(model)(x)
    np.testing.assert_allclose(ql.quaxify(model)(x), expected, rtol=1e-4, atol=1e-5)


@wrong_types
def test_names_of_another_type(mlp):
    with pytest.raises(TypeError, match="takes a sequence of names as where; found 3"):
        ql.quantize(mlp, {3: "nf4"})
    with pytest.raises(TypeError, match="of the caller's own"):
        ql.quantize(mlp, {_fails: "nf4"})


def _fails(name, leaf):
    raise TypeError("of the caller's own")


@pytest.mark.slow
def test_callables_select_as_well(mlp):
    model = ql.quantize(mlp, {lambda name, leaf: leaf.shape == (32, 64): "int8"})
    kinds = [type(layer.weight) is ql.Int8Array for layer in model.layers]
    assert kinds == [False, False, False, True]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            {"all-linear": "nf4", r"layers\.0\..*": "q4_k"},
            "has no effect: all that it selects follows 'all",
        ),
        ({"layerz.*": "nf4"}, r"'layerz.\*' matches none of the arrays of the model. Did you mean 'layers"),
        (
            {"all-linear": "q4_kk"},
            "The rule 'all-linear': quantize has no scheme 'q4_kk'. Did you",
        ),
        ({"all-linear": "q4_k_m"}, "The rule 'all-linear': 'q4_k_m' is a recipe itself"),
        ({r".*\.bias": "nf4"}, r"The rule '\.\*\\\\.bias': `where` selects no weight"),
        (
            {"all-linear": ("nf4", {"doublequant": True})},
            "The rule 'all-linear': The scheme 'nf4' has no option 'doublequant'. Did you mean 'doub",
        ),
        ({"all-linear": ("nf4", {"block_size": 7})}, r"layers.0.weight: block_size must be a power of two"),
        pytest.param(
            {"all-linear": 4}, "takes a scheme, such as 'q4_k', a pair .* found 4", marks=wrong_types
        ),
        pytest.param(
            {"all-linear": ("nf4", 64)}, r"takes a scheme, .* found \('nf4', 64\)", marks=wrong_types
        ),
        ({}, "at least one rule; found none"),
    ],
)
def test_rules_that_say_nothing(mlp, recipe, message):
    with pytest.raises(ValueError, match=message):
        ql.quantize(mlp, recipe)


@pytest.mark.parametrize("options", [{"where": ["layers.0"]}, {"head": True}, {"block_size": 32}])
def test_a_recipe_says_itself_what_options_say(mlp, options):
    with pytest.raises(ValueError, match=f"found '{next(iter(options))}' beside it. Write a rule for it"):
        ql.quantize(mlp, MIXED, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["nf4_qlora", {("layers.0",): ("q8_0", {"compute": None}), "all-linear": "q4_0"}]
)
def test_rounded_inputs_go_with_recipes(mlp, recipe):
    """As they aren't about how weights are stored; and they are among what a model says of itself."""
    model = ql.quantize(mlp, recipe, compute="int8")
    wanted = [None if isinstance(recipe, dict) else "int8", "int8", "int8", "int8"]
    assert [layer.weight.compute for layer in model.layers] == wanted
    assert [row.options["compute"] for row in ql.quantize.plan(mlp, recipe, compute="int8").rows] == wanted
    assert tree_equal(ql.quantize(mlp, ql.summary(model).recipe), model)


@pytest.mark.slow
def test_fake_quantisation_follows_recipes(mlp):
    expected = ql.materialise(ql.quantize(mlp, MIXED))
    assert tree_equal(ql.fake_quantize(mlp, MIXED), expected)


def test_options_are_checked_without_recipes(mlp):
    with pytest.raises(TypeError, match=r"'nf4' has no option 'blocksize'. Did you mean 'block_size'"):
        ql.quantize(mlp, "nf4", blocksize=32)
    with pytest.raises(TypeError, match="True or False as double_quant; found 'no'"):
        ql.quantize(mlp, "nf4", double_quant="no")
    trained = ql.quantize(mlp, "nf4", train_scales=True)
    assert tree_equal(ql.quantize(mlp, ql.summary(trained).recipe), trained)


def _decoder(layers, **more):
    """The weights of a decoder, by their names."""
    names = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    weights = {f"model.layers.{i}.{name}.weight": normal(8, 64) for i in range(layers) for name in names}
    return {"model.embed_tokens.weight": normal(16, 64), **weights, **more}


def _schemes(model, recipe):
    return {row.path: row.scheme for row in ql.quantize.plan(model, recipe).rows}


@pytest.mark.slow
def test_llama_cpps_mixtures():
    """Of 16 layers those in 6 bits are the first and the last two, and each third between."""
    model = _decoder(16, **{"lm_head.weight": normal(16, 64)})
    found = _schemes(model, "q4_k_m")
    more = [i for i in range(16) if found[f"model.layers.{i}.self_attn.v_proj.weight"] == "q6_k"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [i for i in range(16) if found[f"model.layers.{i}.mlp.down_proj.weight"] == "q6_k"] == more
    assert {found[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(16)} == {"q4_k"}
    assert found["lm_head.weight"] == "q6_k"
    assert "model.embed_tokens.weight" not in found
    assert {*_schemes(model, "q5_k_m").values()} == {"q5_k", "q6_k"}
    assert _schemes(_decoder(1), "q4_k_m")["model.embed_tokens.weight"] == "q6_k"  # which the head is tied to


@pytest.mark.parametrize(
    ("names", "schemes"),
    [
        (
            ["attention.self.query", "attention.self.value", "attention.output.dense", "output.dense"],
            ["q4_k", "q6_k", "q4_k", "q6_k"],
        ),
        (["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"], ["q6_k", "q4_k", "q4_k", "q6_k"]),
        (["attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"], ["q6_k", "q4_k", "q4_k", "q6_k"]),
    ],
    ids=["BERT", "GPT-2", "ModernBERT"],
)
def test_llama_cpps_mixtures_by_other_names(names, schemes):
    model = {f"layers.0.{name}.weight": normal(8, 64) for name in names}
    assert _schemes(model, "q4_k_m") == dict(zip(model, schemes, strict=True))


def test_experts_in_four_bits():
    model = _decoder(1, **{"model.layers.0.mlp.experts.0.up_proj.weight": normal(8, 64)})
    found = _schemes(model, "mxfp4_moe")
    assert found.pop("model.layers.0.mlp.experts.0.up_proj.weight") == "mxfp4"
    assert {*found.values()} == {"q8_0"}
    assert {row.options["double_quant"] for row in ql.quantize.plan(model, "nf4_qlora").rows} == {True}


def test_a_plan_computes_nothing_and_tells_the_bytes(mlp):
    shapes = eqx.filter_eval_shape(lambda: mlp)
    plan = ql.quantize.plan(shapes, MIXED)
    weights = {row.path: row for row in ql.summary(ql.quantize(mlp, MIXED)).rows}
    assert [row.path for row in plan.rows] == [f"layers.{i}.weight" for i in (0, 1, 3)]
    for row in plan.rows:
        of_model = weights[row.path]
        assert (row.dense_bytes, row.stored_bytes) == (of_model.logical_bytes, of_model.stored_bytes)
    text = str(plan)
    assert "all-linear: nf4, double_quant=True: 2 arrays, " in text
    assert "\n  layers.3.weight" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "r.json",
            '{"layers.0.*": "q6_k", "layers.2.*": null, "all-linear": ["nf4", {"double_quant": true}]}',
        ),
        ("r.toml", '"layers.0.*" = "q6_k"\nall-linear = ["nf4", {double_quant = true}]'),
    ],
)
def test_files(tmp_path, mlp, name, text):
    (tmp_path / name).write_text(text)
    recipe = ql.quantize.from_file(tmp_path / name)
    assert recipe["all-linear"] == ("nf4", {"double_quant": True})
    assert len(ql.quantize.plan(mlp, recipe).rows) == (3 if name == "r.json" else 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.yaml", "", "ends in .json, .toml, .safetensors"),
        ("r.safetensors", "", "r.safetensors: Expecting"),
        ("r.json", "[1]", "a recipe is a table of patterns and schemes; found list"),
        ("r.json", "{", "r.json: Expecting"),
        ("r.json", '{"a": "nf4", "a": "q4_k"}', "r.json: it has 'a' twice"),
        ("r.toml", 'layers.0 = "nf4"', "A name with dots is put in quotes in TOML"),
        ("r.toml", "all-linear = 3", "r.toml: The rule 'all-linear' takes a scheme"),
    ],
)
def test_files_that_hold_no_recipe(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        ql.quantize.from_file(tmp_path / name)


def test_a_model_says_how_it_is_quantised(mlp, tmp_path):
    """In its table, and in the file that it is saved to; also under adapters."""
    model = ql.loraify(ql.quantize(mlp, MIXED), rank=2, key=jax.random.key(0))
    recipe = ql.summary(model).recipe
    options = {"double_quant": True}
    assert recipe == {r"layers\.0\.weight": "q6_k", r"layers\.(1|3)\.weight": ("nf4", options)}
    assert r"layers\.(1|3)\.weight: nf4, double_quant=True" in str(ql.summary(model))
    safetensors.save(tmp_path / "m.safetensors", model)
    assert ql.quantize.from_file(tmp_path / "m.safetensors") == recipe
    assert tree_equal(ql.quantize(mlp, recipe), ql.quantize(mlp, MIXED))
    small = ql.quantize(mlp, "int4", block_size=32)
    assert ql.summary(small).recipe == {r"layers\.[0-9]+\.weight": ("int4", {"block_size": 32})}


@pytest.mark.parametrize(
    "options", [{"axis": 0}, {"activations": "int8"}, {"activations": "int8", "rounds_gradients": True}]
)
def test_the_recipe_of_a_model_makes_the_same_arrays(mlp, tmp_path, options):
    model = ql.quantize(mlp, "int8", **options)
    recipe = ql.summary(model).recipe
    assert tree_equal(ql.quantize(mlp, recipe), model)
    assert not tree_equal(ql.quantize(mlp, "int8"), model)
    safetensors.save(tmp_path / "m.safetensors", model)
    assert ql.quantize.from_file(tmp_path / "m.safetensors") == recipe


@pytest.mark.parametrize(("name", "shape"), [("kernel", (6, 8)), ("weight", (8, 6))])
def test_a_recipe_names_the_axis_of_blocks_where_these_are_not_the_inputs(name, shape):
    model = {"layer": {name: normal(*shape)}}
    pattern = rf"layer\.{name}"
    outputs = -1 if name == "kernel" else -2
    assert ql.summary(ql.quantize(model, "int8")).recipe == {pattern: "int8"}
    other = ql.quantize(model, "int8", axis=outputs)
    assert ql.summary(other).recipe == {pattern: ("int8", {"axis": outputs})}


def test_a_model_that_is_not_quantised_says_nothing(mlp, tmp_path):
    assert ql.summary(mlp).recipe == {}
    assert "recipe" not in str(ql.summary(mlp))
    safetensors.save(tmp_path / "m.safetensors", mlp)
    with pytest.raises(ValueError, match="nothing in it says how its model is quantised"):
        ql.quantize.from_file(tmp_path / "m.safetensors")


def test_a_rule_may_be_excluded(mlp):
    """Other than a rule without an effect."""
    model = ql.quantize(mlp, {r"layers\.0\..*": "q6_k", "all-linear": "nf4"}, exclude=["layers.0"])
    assert model.layers[0].weight is mlp.layers[0].weight
    assert type(model.layers[1].weight) is ql.NF4Array


def test_llama_cpps_mixtures_of_fused_layers_and_experts():
    layer = "model.layers.0."
    fused = {
        f"{layer}self_attn.qkv_proj.weight": normal(8, 64),
        f"{layer}mlp.down_proj.weight": normal(8, 64),
    }
    assert {*_schemes(fused, "q4_k_m").values()} == {*_schemes(fused, "q5_k_m").values()} == {"q6_k"}
    names = ["self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight"]
    eight = {f"{layer}{name}": normal(8, 64) for name in names}
    eight |= {f"{layer}mlp.experts.{i}.down_proj.weight": normal(8, 64) for i in range(8)}
    found = {name: scheme for name, scheme in _schemes(eight, "q4_k_m").items() if "experts" not in name}
    assert [*found.values()] == ["q8_0", "q8_0", "q5_k"]
