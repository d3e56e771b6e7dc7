"""Adapters that PEFT wrote, ours that it could have written, and files that nobody should have."""

import json
import math
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import peft
from quaxlike.surgery.trees import layer_of
from tests.samples import normal, tree_equal

from ...fixtures import fixture

ADAPTERS = [
    ("llama", "qv"),
    ("llama", "all_rslora_patterns"),
    ("llama", "embed_and_head"),
    ("llama", "dora"),
    ("bert", "qv_seqcls"),
    ("bert", "dense_biasall"),
    ("gpt2", "c_attn_fanin"),
]


@pytest.fixture(scope="module")
def bases():
    return {kind: lm.load(fixture(f"peft_{kind}") / "base")[0] for kind in ("llama", "bert", "gpt2")}


def logits(model, io):
    ids, seen = jnp.asarray(io["input_ids"].astype(np.int32)), jnp.asarray(io["attention_mask"] > 0)
    run = eqx.filter_jit(lambda model, ids, seen: ql.quaxify(jax.vmap(model))(ids, seen))
    with ql.on_materialise("error"):
        return run(model, ids, seen)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ADAPTERS)
def test_computes_what_peft_computes(kind, name, bases, tmp_path):
    io = np.load(fixture(f"peft_{kind}") / "io.npz")
    folder = fixture(f"peft_{kind}") / "adapters" / name
    model = peft.load_adapter(folder, bases[kind])
    np.testing.assert_allclose(logits(model, io), io[f"{name}/logits"], rtol=0, atol=2e-5)

    merged = ql.merge(model)
    assert jax.tree.structure(merged) == jax.tree.structure(bases[kind])
    np.testing.assert_allclose(logits(merged, io), io[f"{name}/logits_merged"], rtol=0, atol=2e-5)
    for key in io:
        if key.startswith(f"{name}/merged_weight::"):
            weight = ql.select(merged, [key.partition("::")[2]])
            np.testing.assert_allclose(*weight.values(), io[key], rtol=0, atol=1e-6)

    # Written again it is the same file, and a configuration that means the same.
    peft.save_adapter(tmp_path / "again", model, base_model="base")
    ours, theirs = tmp_path / "again" / "adapter_model.safetensors", folder / "adapter_model.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()
    again = peft.load_adapter(tmp_path / "again", bases[kind])
    assert jax.tree.structure(again) == jax.tree.structure(model)
    np.testing.assert_array_equal(logits(again, io), logits(model, io))
    ours, theirs = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "again", folder))
    for option in ("r", "lora_alpha", "use_dora", "use_rslora", "fan_in_fan_out", "bias", "lora_dropout"):
        assert ours[option] == theirs[option]
    assert set(ours["modules_to_save"] or ()) <= set(theirs["modules_to_save"] or ())


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["single", "double"])
def test_on_a_base_in_4_bits(scales):
    folder = fixture(f"qlora_llama_{scales}")
    io, (model, _) = np.load(folder / "io.npz"), lm.load(folder / "base4bit")
    np.testing.assert_allclose(logits(model, io), io["logits_base4bit"], rtol=0, atol=2e-5)
    model = peft.load_adapter(fixture("peft_llama") / "adapters" / "qv", model)
    np.testing.assert_allclose(logits(model, io), io["qv/logits"], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_adapters_of_several_files_on_one_base(bases):
    """Other ranks, scalings and layers in each; one of them for each sample."""
    names = ["qv", "all_rslora_patterns", "embed_and_head"]
    folder = fixture("peft_llama")
    io = np.load(folder / "io.npz")
    stacked = ql.stack_adapters([peft.load_adapter(folder / "adapters" / n, bases["llama"]) for n in names])
    ids, seen = jnp.asarray(io["input_ids"].astype(np.int32)), jnp.asarray(io["attention_mask"] > 0)

    @eqx.filter_jit
    def run(model, indices):
        one = lambda i, ids, seen: ql.quaxify(ql.choose_adapter(model, i))(ids, seen)
        return jax.vmap(one)(indices, ids, seen)

    for shift in range(3):
        indices = (np.arange(len(ids)) + shift) % 3
        with ql.on_materialise("error"):
            y = run(stacked, indices)
        for i, row, sample in zip(indices, y, range(len(ids)), strict=True):
            np.testing.assert_allclose(row, io[f"{names[i]}/logits"][sample], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_on_a_state_dict_under_other_names(bases):
    """A model that is a dict, and names that are others than PEFT's."""
    folder = fixture("peft_llama") / "adapters" / "qv"
    expected = ql.select(peft.load_adapter(folder, bases["llama"]), lambda *_: True)
    arrays = ql.select(bases["llama"], r".*")
    state = {name.replace("self_attn", "attention"): x for name, x in arrays.items()}
    model = peft.load_adapter(folder, state, rename=lambda name: name.replace("attention", "self_attn"))
    for name, x in expected.items():
        assert tree_equal(model[name.replace("self_attn", "attention")], x)


@pytest.mark.slow
def test_rename_by_beginnings(tmp_path):
    mlp = eqx.nn.MLP(3, 2, 4, depth=1, key=jax.random.key(0))
    model = ql.loraify(mlp, rank=2, key=jax.random.key(1))
    rename = {"layers.0": "lin0", "layers.1.weight": "head.out.weight"}
    peft.save_adapter(tmp_path, model, rename=rename)
    keys = set(open_tensors(tmp_path / "adapter_model.safetensors"))
    layers = ["lin0", "head.out"]
    assert keys == {f"base_model.model.{layer}.lora_{x}.weight" for layer in layers for x in "AB"}
    assert tree_equal(peft.load_adapter(tmp_path, mlp, rename=rename), model)


class Net(eqx.Module):
    """One layer of each kind."""

    embed: eqx.nn.Embedding
    conv: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    lin: list[eqx.nn.Linear]

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(7, 5, key=keys[0])
        self.conv = eqx.nn.Conv2d(2, 3, (3, 2), key=keys[1])
        self.norm = eqx.nn.LayerNorm(5)
        self.lin = [eqx.nn.Linear(5, 4, key=keys[2]), eqx.nn.Linear(4, 3, key=keys[3])]


EVERYTHING = ["embed", "conv", "lin.0", "lin.1"]

ROUND_TRIPS = {
    "all kinds of layers": {"where": EVERYTHING},
    "dora": {"where": EVERYTHING, "dora": True},
    "rslora, dropout": {"where": EVERYTHING, "rslora": True, "dropout": 0.1},
    "adapter biases": {"where": ["lin.0", "conv"], "lora_bias": True},
    "adapter and trained biases": {"lora_bias": True, "bias": "lora_only"},
    "all biases": {"where": ["lin.0"], "bias": "all"},
    "a module": {"where": ["lin.0"], "modules_to_save": ["norm", "lin.1"]},
    "patterns": {
        "where": EVERYTHING,
        "rank_pattern": {"lin.0": 1, "conv": 4},
        "alpha_pattern": {"embed": 1.5},
    },
    "bfloat16": {"dtype": jnp.bfloat16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("adapter_name", ["default", "other"])
def test_round_trip(name, adapter_name, tmp_path):
    net = Net(jax.random.key(0))
    model = ql.loraify(net, rank=2, alpha=6, key=jax.random.key(1), **ROUND_TRIPS[name])
    peft.save_adapter(tmp_path, model, adapter_name=adapter_name)
    if name == "bfloat16":  # which PEFT, too, computes in float32 on a base of float32
        model = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, model)
    assert (tmp_path / ("adapter_config.json" if adapter_name == "default" else "other")).exists()
    if adapter_name != "default":
        with pytest.raises(FileNotFoundError, match=r"These of its folders hold adapters: other\."):
            peft.load_adapter(tmp_path, net)
    again = peft.load_adapter(tmp_path, net, adapter_name=adapter_name)
    assert tree_equal(again, model)
    image = normal(2, 4, 4)
    assert tree_equal(ql.quaxify(again.conv)(image), ql.quaxify(model.conv)(image))
    # An adapter takes the place of another.
    assert tree_equal(peft.load_adapter(tmp_path, again, adapter_name=adapter_name), model)


@pytest.mark.slow
def test_grouped_convolutions_are_refused(tmp_path):
    """PEFT's second factor is grouped there: no product of matrices."""
    net = Net(jax.random.key(0))
    model = ql.loraify(net, rank=2, where=["conv"], key=jax.random.key(1))
    peft.save_adapter(tmp_path / "plain", model)
    grouped = eqx.tree_at(lambda n: n.conv, net, eqx.nn.Conv2d(2, 4, 3, groups=2, key=jax.random.key(2)))
    with pytest.raises(CheckpointError, match=r"conv\.lora_A\.weight': the model's conv is a grouped"):
        peft.load_adapter(tmp_path / "plain", grouped)
    adapted = ql.loraify(grouped, rank=2, where=["conv"], key=jax.random.key(1))
    with pytest.raises(ValueError, match="conv is a grouped or transposed convolution"):
        peft.save_adapter(tmp_path / "grouped", adapted)
    assert not (tmp_path / "grouped").exists()


def test_an_adapter_bias_for_a_convolution_without_a_bias(tmp_path):
    """The layer would not read it."""
    conv = eqx.nn.Conv2d(2, 3, 2, key=jax.random.key(0))
    model = ql.loraify({"conv": conv}, rank=2, where=["conv"], lora_bias=True, key=jax.random.key(1))
    peft.save_adapter(tmp_path, model)
    bare = {"conv": eqx.nn.Conv2d(2, 3, 2, use_bias=False, key=jax.random.key(0))}
    with pytest.raises(ValueError, match=r"lora_B\.bias.*conv is a convolution without a bias"):
        peft.load_adapter(tmp_path, bare)


@pytest.mark.slow
def test_all_biases_of_a_recurrent_cell(tmp_path):
    net = {"cell": eqx.nn.GRUCell(5, 4, key=jax.random.key(0))}
    model = ql.loraify(net, rank=2, bias="all", key=jax.random.key(1))
    peft.save_adapter(tmp_path, model)
    assert "base_model.model.cell.bias_n" in open_tensors(tmp_path / "adapter_model.safetensors")
    assert tree_equal(peft.load_adapter(tmp_path, net), model)


@pytest.mark.slow
def test_quantised_modules_to_save_are_refused(tmp_path):
    mlp = ql.train_scales(ql.quantize(eqx.nn.MLP(4, 2, 64, depth=1, key=jax.random.key(0)), "nf4"))
    model = ql.loraify(mlp, rank=2, where=["layers.0"], modules_to_save=["layers.1"], key=jax.random.key(1))
    with pytest.raises(ValueError, match=r"layers\.1\.weight is trained in full .* found NF4Array"):
        peft.save_adapter(tmp_path / "adapter", model)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_pissa_base_is_that_of_the_initialisation(tmp_path):
    """PEFT, too, takes the principal part out of the base when it loads such an adapter."""
    net = Net(jax.random.key(0))
    model = ql.loraify(net, rank=2, alpha=6, where=["lin.0"], key=jax.random.key(1), init="pissa")
    peft.save_adapter(tmp_path, model)
    edit_config(tmp_path, init_lora_weights="pissa")
    np.testing.assert_allclose(
        peft.load_adapter(tmp_path, net).lin[0].weight.materialise(), net.lin[0].weight, atol=1e-6
    )


@pytest.mark.slow
def test_recurrent_cells_are_saved_as_parameters(tmp_path):
    """Their matrices are parameters of the cell: PEFT names them so, and wraps one in the other."""
    cell = eqx.nn.GRUCell(5, 4, key=jax.random.key(0))
    net = {"cell": cell, "out": eqx.nn.Linear(4, 2, key=jax.random.key(1))}
    model = ql.loraify(
        net, rank=2, where=["weight_ih", "weight_hh", "out"], init="gaussian", key=jax.random.key(2)
    )
    model = jax.tree.map(
        lambda x: x.replace(b=x.b + 1) if isinstance(x, ql.LoraArray) else x, model, is_leaf=ql.is_value
    )
    peft.save_adapter(tmp_path, model)
    stored = open_tensors(tmp_path / "adapter_model.safetensors")
    shapes = {"cell.base_layer": ((2, 5), (12, 2)), "cell": ((2, 4), (12, 2)), "out": ((2, 4), (2, 2))}
    assert {name: x.shape for name, x in stored.items()} == {
        f"base_model.model.{layer}.lora_{part}.weight": shape
        for layer, own in shapes.items()
        for part, shape in zip("AB", own, strict=True)
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["out"]
    assert config["target_parameters"] == ["cell.weight_hh", "cell.weight_ih"]
    again = peft.load_adapter(tmp_path, net)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


# -------------------------------------------------------------------------------------------------
# What cannot be saved
# -------------------------------------------------------------------------------------------------


@pytest.mark.quick(
    "<lambda>-one use_rslora for all layers",
    "<lambda>-no place for gru\\\\.w_h, of shape \\\\(4, 12\\\\): it is stored as \\\\(in, out\\\\)",
)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda net: net, "no adapter to save"),
        (
            lambda net: eqx.tree_at(lambda n: n.lin[0].weight, net, ql.LoraArray(
                net.lin[0].weight, jnp.ones((3, 2, 5)), jnp.ones((3, 4, 2)))),
            "one adapter per layer",
        ),
        (
            lambda net: eqx.tree_at(lambda n: n.lin[0].weight, net, ql.LoraArray(
                net.lin[0].weight, jnp.ones((2, 5)), jnp.ones((4, 2)), rslora=True)),
            "one use_rslora for all layers",
        ),
        (
            lambda net: eqx.tree_at(lambda n: n.lin[0].bias, net, ql.TrainableArray(net.lin[0].bias)),
            r"biases of all layers, of the adapted ones or of none.*lin\.0\.bias",
        ),
        (
            lambda net: eqx.tree_at(lambda n: n.norm.weight, net, ql.TrainableArray(net.norm.weight)),
            r"whole modules; norm\.bias is not trained",
        ),
        (
            lambda net: {"lin": net.lin, "gru": {"w_h": ql.LoraArray(
                jnp.ones((4, 12)), jnp.ones((2, 4)), jnp.ones((12, 2)), out_axes=(-1,), in_axes=(-2,))}},
            r"no place for gru\.w_h, of shape \(4, 12\): it is stored as \(in, out\)",
        ),
    ],
)  # fmt: skip
def test_what_the_format_has_no_place_for(model, message, tmp_path):
    net = Net(jax.random.key(0))
    changed = model(net)
    if changed is not net:
        changed = ql.loraify(changed, rank=2, where=["lin.1"], key=jax.random.key(1))
    with pytest.raises(ValueError, match=message):
        peft.save_adapter(tmp_path / "new", changed)
    assert not (tmp_path / "new").exists()


# -------------------------------------------------------------------------------------------------
# Damaged files
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path):
    """A copy of an adapter, to be damaged."""
    shutil.copytree(fixture("peft_bert") / "adapters" / "qv_seqcls", tmp_path / "adapter")
    return tmp_path / "adapter"


def edit_config(folder, **options):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = dict(open_tensors(path))
    change(tensors)
    write_tensors(path, tensors, {"format": "pt"})


@pytest.mark.quick("qv_seqcls-gpt2", "dense_biasall-llama", "dense_biasall-gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["qv_seqcls", "dense_biasall"])
def test_the_adapter_of_another_model(kind, name, bases):
    folder = fixture("peft_bert") / "adapters" / name
    with pytest.raises(
        CheckpointError, match=r"the model has no layer 'bert\..*(There are .* \(\d+, \d+\)|Did you mean)"
    ):
        peft.load_adapter(folder, bases[kind])


@pytest.mark.parametrize("rank", [10**7, 10**12])
def test_ranks_are_compared_with_the_tensors_first(rank, damaged, bases, monkeypatch):
    edit_config(damaged, r=rank)
    monkeypatch.setattr(ql.LoraArray, "__init__", None)  # which would make arrays of this rank
    with pytest.raises(CheckpointError, match=rf"the configuration gives rank {rank}; found 4"):
        peft.load_adapter(damaged, bases["bert"])


QUERY = "base_model.model.bert.encoder.layer.0.attention.self.query"
DAMAGES = {
    "A is missing": (lambda t: t.pop(f"{QUERY}.lora_A.weight"), rf"{QUERY}\.lora_A\.weight'.*is missing"),
    "A and B are missing": (
        lambda t: [t.pop(f"{QUERY}.lora_{x}.weight") for x in "AB"],
        rf"{QUERY}\.lora_A\.weight'.*is missing: target_modules",
    ),
    "a saved module is missing": (
        lambda t: t.pop("base_model.model.classifier.bias"),
        r"classifier\.bias'.*missing",
    ),
    "another rank": (
        lambda t: t.update({f"{QUERY}.lora_A.weight": np.zeros((3, 32), np.float32)}),
        r"gives rank 4; found 3",
    ),
    "another shape": (
        lambda t: t.update({f"{QUERY}.lora_B.weight": np.zeros((31, 4), np.float32)}),
        rf"{QUERY}\.lora_B\.weight'.*expected shape \(32, 4\); found \(31, 4\)",
    ),
    "integers": (
        lambda t: t.update({f"{QUERY}.lora_A.weight": np.zeros((4, 32), np.int8)}),
        r"expected float32, bfloat16 or float16; found int8",
    ),
    "float64": (
        lambda t: t.update({f"{QUERY}.lora_A.weight": np.zeros((4, 32))}),
        r"expected float32, bfloat16 or float16; found float64",
    ),
    "a layer that the model lacks": (
        lambda t: t.update({f"{QUERY}s.lora_A.weight": np.zeros((4, 32), np.float32)}),
        r"the model has no layer '.*querys'. Did you mean .*query'",
    ),
    "a layer that is no target": (
        lambda t: t.update({QUERY.replace("query", "key") + ".lora_A.weight": np.zeros((4, 32), np.float32)}),
        r"key\.lora_A\.weight'.*target_modules does not name",
    ),
    "a magnitude without DoRA": (
        lambda t: t.update({f"{QUERY}.lora_magnitude_vector": np.zeros(32, np.float32)}),
        r"lora_magnitude_vector'.*is not expected with this configuration",
    ),
    "a stray array": (
        lambda t: t.update({"base_model.model.bert.pooler.dense.bias": np.zeros(32, np.float32)}),
        r"pooler\.dense\.bias'.*is not expected",
    ),
    "no prefix": (lambda t: t.update({"x": np.zeros(1)}), r"'x'.*starts with 'base_model\.model\.'"),
}


@pytest.mark.quick("a saved module is missing", "integers", "a stray array")
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors(name, damaged, bases):
    change, message = DAMAGES[name]
    before = jax.tree.map(lambda x: x, bases["bert"])
    edit_tensors(damaged, change)
    with pytest.raises(CheckpointError, match=f"(?s)adapter_model.safetensors: .*{message}"):
        peft.load_adapter(damaged, bases["bert"])
    assert tree_equal(bases["bert"], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LILY"}, "'LILY' is not supported: what it adds to a layer depends on all tokens"),
        ({"peft_type": "BONE"}, "'peft_type': expected one of 'LORA', .*; found 'BONE'"),
        ({"use_qalora": True}, "'use_qalora': True is not supported"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication'"),
        (
            {"trainable_token_indices": [1, 2]},
            r"word_embeddings\.token_adapter.*is missing: trainable_token_indices",
        ),
        (
            {"trainable_token_indices": {"word_embeddings": [1]}},
            r"word_embeddings\.token_adapter.*is missing",
        ),
        ({"some_new_option": "yes"}, "'some_new_option': 'yes' is not supported"),
        ({"init_lora_weights": "kordial"}, "'init_lora_weights': expected one of .*found 'kordial'"),
        ({"r": 0}, "'r': expected a positive integer; found 0"),
        ({"lora_alpha": math.nan}, "'lora_alpha': expected a number; found nan"),
        ({"lora_alpha": math.inf}, "'lora_alpha': expected a number; found inf"),
        ({"lora_alpha": 10**400}, "'lora_alpha': expected a number; found 1000"),
        ({"alpha_pattern": {"query": math.nan}}, "'alpha_pattern': expected numbers by pattern; found"),
        (
            {"target_modules": "(query"},
            r"'target_modules': expected a regular expression or .*found '\(query'",
        ),
        ({"rank_pattern": {"[": 4}}, "'rank_pattern': expected positive integers by pattern"),
        ({"modules_to_save": [1]}, "'modules_to_save': expected a list of names"),
        ({"modules_to_save": ["*"]}, r"classifier\.bias.* modules_to_save and bias do not name it"),
        ({"r": "8"}, "'r': expected a positive integer; found '8'"),
        (
            {"bias": "some"},
            "'bias': expected 'none', 'all' or the name of .*; found 'some'",
        ),
        ({"use_dora": True}, "lora_magnitude_vector': is missing"),
        ({"lora_bias": True}, r"lora_B\.bias': is missing"),
        ({"bias": "lora_only"}, r"query\.bias': is missing"),
        ({"layers_to_transform": [0]}, r"layer\.1\..*target_modules does not name this layer"),
        ({"exclude_modules": ["value"]}, r"value\.lora_A\.weight': is not expected"),
        ({"rank_pattern": {"query": 2}}, "gives rank 2; found 4"),
    ],
)
def test_options_that_do_not_fit(options, message, damaged, bases):
    edit_config(damaged, **options)
    with pytest.raises(CheckpointError, match=message):
        peft.load_adapter(damaged, bases["bert"])


def test_missing_and_truncated_files(damaged, bases):
    tensors = damaged / "adapter_model.safetensors"
    data = tensors.read_bytes()
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        tensors.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
            peft.load_adapter(damaged, bases["bert"])
    tensors.unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        peft.load_adapter(damaged, bases["bert"])
    (damaged / "adapter_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin is a pickle, .* load it with PEFT"):
        peft.load_adapter(damaged, bases["bert"])
    (damaged / "adapter_model.bin").unlink()
    (damaged / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: the configuration is not JSON"):
        peft.load_adapter(damaged, bases["bert"])
    (damaged / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        peft.load_adapter(damaged, bases["bert"])


def test_layers_to_transform_is_honoured(damaged, bases):
    edit_config(damaged, layers_to_transform=[0])
    edit_tensors(damaged, lambda t: [t.pop(key) for key in list(t) if ".layer.1." in key])
    model = peft.load_adapter(damaged, bases["bert"])
    adapted = [name for name, x in ql.select(model, lambda *_: True).items() if isinstance(x, ql.LoraArray)]
    assert len(adapted) == 2
    assert all(".layer.0." in name for name in adapted)


def test_layers_to_transform_that_restrict_nothing(damaged, bases):
    """PEFT takes an empty list for none, and names in full beside the numbers."""
    wanted = peft.load_adapter(damaged, bases["bert"])
    names = [name for name, x in ql.select(wanted, lambda *_: True).items() if isinstance(x, ql.LoraArray)]
    full = [layer_of(name) for name in names if ".layer.1." in name]
    short = json.loads((damaged / "adapter_config.json").read_text())["target_modules"]
    for options in (
        {"layers_to_transform": []},
        {"layers_to_transform": [0], "target_modules": [*short, *full]},
    ):
        edit_config(damaged, **options)
        assert tree_equal(peft.load_adapter(damaged, bases["bert"]), wanted)


def test_velora_is_lora(damaged, bases):
    """Only its training differs, for which the file holds vectors."""
    wanted = peft.load_adapter(damaged, bases["bert"])
    ends = (".lora_A.weight", ".lora_velora_embed")

    def add_vectors(tensors):
        keys = [key for key in tensors if key.endswith(ends[0])]
        tensors |= {key.replace(*ends): np.ones(8, np.float32) for key in keys}

    edit_tensors(damaged, add_vectors)
    edit_config(damaged, velora_config={"num_groups": 4, "init_type": "batch_average", "scale": 1.0})
    assert tree_equal(peft.load_adapter(damaged, bases["bert"]), wanted)


@pytest.mark.slow
def test_scaling_is_the_configurations(bases):
    model = peft.load_adapter(fixture("peft_llama") / "adapters" / "all_rslora_patterns", bases["llama"])
    scalings = {name: x.scaling for name, x in ql.select(model).items()}
    assert scalings["model.layers.0.mlp.down_proj.weight"] == pytest.approx(6 / math.sqrt(2))
    assert scalings["model.layers.1.self_attn.q_proj.weight"] == pytest.approx(6 / math.sqrt(6))
    assert scalings["model.layers.1.self_attn.k_proj.weight"] == pytest.approx(3 / math.sqrt(4))


@pytest.mark.slow
def test_tied_output_layer_is_saved_as_the_linear_layer_it_is(tmp_path):
    """One adapter for an embedding and the output layer tied to it: PEFT has it twice."""

    class Tied(eqx.Module):
        embed: eqx.nn.Embedding
        out: eqx.nn.Linear

    table = jax.random.normal(jax.random.key(0), (7, 4))
    out = eqx.tree_at(lambda x: x.weight, eqx.nn.Linear(4, 7, use_bias=False, key=jax.random.key(1)), table)
    net = Tied(eqx.nn.Embedding(weight=table), out)
    model = ql.loraify(net, rank=2, where=["embed", "out"], key=jax.random.key(2), init="gaussian")
    assert model.out.weight is model.embed.weight
    peft.save_adapter(tmp_path, model)
    again = peft.load_adapter(tmp_path, net)
    assert again.embed.weight.out_axes == (-1,)
    assert again.out.weight.out_axes == (-2,)
    np.testing.assert_array_equal(again.out.weight.materialise(), model.out.weight.materialise())


@pytest.mark.slow
def test_heads_of_classifiers_are_saved_for_peft(tmp_path, bases):
    model = ql.loraify(bases["bert"], rank=2, where=["query"], key=jax.random.key(0))
    peft.save_adapter(tmp_path, model, task_type="SEQ_CLS")
    again = peft.load_adapter(tmp_path, bases["bert"])
    assert isinstance(again.classifier.weight, ql.TrainableArray)
    assert isinstance(again.classifier.bias, ql.TrainableArray)
