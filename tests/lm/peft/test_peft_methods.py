"""PEFT's adapter methods beside LoRA: its logits, merged weights and gradients, and files that are the
same."""

import functools
import json
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import adapters
from quaxlike.adapters.ia3 import ScaledBias
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft
from quaxlike.lm.peft.config import BY_TYPE as METHODS
from quaxlike.surgery.trees import layer_of, named_arrays, replace
from tests.samples import drawn, random_key, tree_equal

from ...fixtures import fixture, has_fixture
from ...samples import normal


class Convolutions(eqx.Module):
    """The network of the fixtures with convolutions."""

    a: eqx.nn.Conv2d
    g: eqx.nn.Conv2d
    b: eqx.nn.Conv2d
    c: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, sizes: dict[str, int]) -> None:
        key, conv = jax.random.key(0), eqx.nn.Conv2d
        a, b, c = (sizes[f"channels_{name}"] for name in "abc")
        self.a = conv(sizes["in_channels"], a, 3, padding=1, key=key)
        self.g = conv(a, a, 3, padding=1, groups=sizes["groups_g"], key=key)
        self.b = conv(a, b, 3, 2, padding=1, key=key)
        self.c = conv(b, c, 1, use_bias=False, key=key)
        self.head = eqx.nn.Linear(c, sizes["classes"], key=key)

    def __call__(self, x: Any) -> Any:
        for layer in (self.a, self.g, self.b, self.c):
            x = jnp.tanh(layer(x))
        return self.head(jnp.mean(x, (1, 2)))


@functools.cache
def _base(kind):
    folder = fixture(f"peft_methods/{kind}/base")
    if kind != "conv":
        return load(folder)[0]
    model = Convolutions(json.loads((folder / "config.json").read_text()))
    stored = open_tensors(folder / "model.safetensors")
    arrays = {name: jnp.asarray(stored[name]).reshape(x.shape) for name, x in named_arrays(model).items()}
    return replace(model, arrays)


def _logits(model, kind):
    io = np.load(fixture(f"peft_methods/{kind}/io.npz"))
    if kind == "conv":
        return jax.vmap(ql.quaxify(model))(jnp.asarray(io["x"]))
    ids, seen = jnp.asarray(io["input_ids"].astype(np.int32)), jnp.asarray(io["attention_mask"] > 0)
    return jax.vmap(ql.quaxify(model))(ids, seen)


def _mean(logits, kind):
    """PEFT's loss: the mean over all positions that are not padding."""
    if kind == "conv":
        return jnp.mean(logits)
    seen = np.load(fixture(f"peft_methods/{kind}/io.npz"))["attention_mask"] > 0
    return jnp.sum(jnp.where(seen[..., None], logits, 0)) / float(seen.sum() * logits.shape[-1])


# The cases of each method but `conv/oft`, which has a test of its own.
CASES = {
    "IA3": ["llama/ia3", "gpt2/ia3", "conv/ia3", "llama/ia3_regex"],
    "OFT": [
        "llama/oft_cayley", "llama/oft_adjusted_block", "llama/oft_block_share", "llama/oft_coft",
        "llama/oft_embedding", "llama/oft_neumann5", "llama/oft_neumann_terms", "llama/oft_r",
    ],
    "HRA": ["llama/hra", "llama/hra_gs", "conv/hra"],
    "VERA": ["llama/vera", "llama/vera_unsaved", "gpt2/vera"],
    "LOHA": ["llama/loha", "conv/loha", "conv/loha_effective"],
    "LOKR": [
        "llama/lokr", "llama/lokr_decompose_both", "llama/lokr_factor", "llama/lokr_full", "conv/lokr",
        "conv/lokr_effective",
    ],
    "SHIRA": ["llama/shira"],
    "HIRA": ["llama/hira_embedding", "llama/hira", "gpt2/hira", "conv/hira"],
    "MISS": ["llama/miss_padded", "llama/miss", "llama/miss_bat", "llama/miss_mini"],
    "C3A": ["llama/c3a_pattern", "llama/c3a"],
    "DELORA": ["llama/delora"],
    "ADALORA": ["llama/adalora_pruned", "llama/adalora", "gpt2/adalora", "conv/adalora"],
    "GRALORA": ["llama/gralora_hybrid", "llama/gralora", "gpt2/gralora"],
    "RANDLORA": [
        "llama/randlora", "gpt2/randlora", "llama/randlora_unsaved", "llama/randlora_sparse",
        "llama/randlora_very_sparse",
    ],
    "BOFT": [
        "llama/boft_butterfly3", "llama/boft_butterfly2", "llama/boft_block_num", "llama/boft_block_size",
        "conv/boft",
    ],
    "FOURIERFT": ["llama/fourierft", "gpt2/fourierft"],
}  # fmt: skip


FAST = ("gpt2/ia3",)


def _cases():
    for method, cases in CASES.items():
        for case in cases:
            yield pytest.param(method, case, id=case, marks=() if case in FAST else pytest.mark.slow)


@pytest.mark.quick("llama/lokr")
@pytest.mark.parametrize("case", [cases[0] for cases in CASES.values()])
def test_layers_compute_what_those_of_peft_compute(case):
    folder = fixture(f"peft_methods/{case}")
    ref, model = np.load(folder / "ref.npz"), peft.load_adapter(folder, _base(case.partition("/")[0]))
    arrays = named_arrays(model)
    name = next(key.split("::")[1] for key in ref if key.startswith("layer::") and key.endswith("_proj::x"))
    with ql.on_materialise("error"):
        y = ql.quaxify(lambda w, x: x @ w.T)(arrays[f"{name}.weight"], jnp.asarray(ref[f"layer::{name}::x"]))
    expected = ref[f"layer::{name}::y"]
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def _narrow(x, dtype):
    return x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x


@pytest.mark.quick("llama/randlora-bfloat16-bfloat16", "llama/hra-float16-float32")
@pytest.mark.parametrize("base", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", ["llama/fourierft", "llama/randlora", "llama/hra", "llama/vera"])
def test_adapters_of_16_bits(case, dtype, base, tmp_path):
    """PEFT computes them in float32. On a base of the same dtype, they keep it."""
    folder = fixture(f"peft_methods/{case}")
    stored = dict(open_tensors(folder / "adapter_model.safetensors"))
    halves = {key: _narrow(np.asarray(x), dtype) for key, x in stored.items()}
    wide = halves if base == dtype else {k: x.astype(stored[k].dtype) for k, x in halves.items()}
    loaded = []
    for name, tensors in (("halves", halves), ("wide", wide)):
        shutil.copytree(folder, tmp_path / name)
        write_tensors(tmp_path / name / "adapter_model.safetensors", tensors, {"format": "pt"})
        model = jax.tree.map(lambda x: x.astype(base), _base("llama"))
        loaded.append(peft.load_adapter(tmp_path / name, model))
    assert tree_equal(*loaded)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "case"), list(_cases()))
def test_computes_what_peft_computes(method, case, tmp_path):
    kind = case.partition("/")[0]
    if not has_fixture(f"peft_methods/{case}"):
        pytest.skip(f"needs the reference data peft_methods/{case}")
    folder = fixture(f"peft_methods/{case}")
    ref = np.load(folder / "ref.npz")
    model = peft.load_adapter(folder, _base(kind))
    params, rest = eqx.partition(model, ql.trainable(model))

    @eqx.filter_jit
    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def run(params):
        logits = _logits(eqx.combine(params, rest), kind)
        return _mean(logits, kind), logits

    with ql.on_materialise("error"):
        (loss, logits), grads = run(params)
    np.testing.assert_allclose(logits, ref["logits"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(loss, ref["loss"], rtol=1e-4, atol=2e-5)

    merged = ql.merge(model)
    assert jax.tree.structure(merged) == jax.tree.structure(_base(kind))
    arrays = named_arrays(merged)
    for key in ref:
        if key.startswith("merged::"):
            found = np.asarray(arrays[key.removeprefix("merged::")]).reshape(ref[key].shape)
            np.testing.assert_allclose(found, ref[key], rtol=0, atol=2e-6 * np.abs(ref[key]).max())

    ours, theirs = _tensors(model, tmp_path / "again"), open_tensors(folder / "adapter_model.safetensors")
    again = peft.load_adapter(tmp_path / "again", _base(kind))
    if method == "ADALORA":  # written as LoRA
        np.testing.assert_allclose(_logits(again, kind), ref["logits"], rtol=0, atol=2e-5)
        found = {
            f"base_model.model.{layer_of(name)}{ending}": getattr(x, part).reshape(theirs.info[key].shape)
            for name, x in named_arrays(eqx.combine(grads, model)).items()
            for part, ending in METHODS[method].parts.items()
            if ql.is_value(x) and (key := f"base_model.model.{layer_of(name)}{ending}") in theirs
        }
    else:  # the same file, and a configuration that means the same
        assert {*ours} == {*theirs}
        for key in theirs:
            np.testing.assert_array_equal(ours[key], theirs[key])
        assert tree_equal(again, model)
        ours, theirs = (
            json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "again", folder)
        )
        for option in METHODS[method].options:
            if not option.endswith("_pattern") and option not in IN_OTHER_WORDS:
                assert ours[option] == theirs[option], option
        found = _tensors(_with_gradients(model, grads), tmp_path / "gradients")

    for key in (key.removeprefix("grad::") for key in ref if key.startswith("grad::")):
        expected = ref.get(f"grad_true::{key}", ref[f"grad::{key}"])
        assert np.linalg.norm(found[key] - expected) <= 1e-4 * np.linalg.norm(expected), key


def _activated(model):
    """The logits of the texts that invoke an aLoRA, and PEFT's loss."""
    io = np.load(fixture("peft_methods/llama/io.npz"))
    ids, seen = jnp.asarray(io["input_ids_alora"].astype(np.int32)), jnp.asarray(io["attention_mask"] > 0)
    with ql.on_materialise("error"):
        logits = jax.vmap(lambda ids, seen: ql.quaxify(ql.activate(model, ids))(ids, seen))(ids, seen)
    return _mean(logits, "llama"), logits


@pytest.mark.slow
def test_activated_lora(tmp_path):
    folder = fixture("peft_methods/llama/lora_alora")
    ref, model = np.load(folder / "ref.npz"), peft.load_adapter(folder, _base("llama"))
    params, rest = eqx.partition(model, ql.trainable(model))
    run = eqx.filter_value_and_grad(lambda params: _activated(eqx.combine(params, rest)), has_aux=True)
    (loss, logits), grads = eqx.filter_jit(run)(params)
    np.testing.assert_allclose(logits, ref["logits"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(loss, ref["loss"], rtol=1e-4, atol=2e-5)
    theirs = open_tensors(folder / "adapter_model.safetensors")
    ours, found = _tensors(model, tmp_path), _tensors(eqx.combine(grads, model), tmp_path / "gradients")
    assert {*ours} == {*theirs}
    for key in theirs:
        np.testing.assert_array_equal(ours[key], theirs[key])
        expected = ref[f"grad::{key}"]
        assert np.linalg.norm(found[key] - expected) <= 1e-4 * np.linalg.norm(expected), key
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == [5, 9]
    assert tree_equal(peft.load_adapter(tmp_path, _base("llama")), model)


@pytest.mark.slow
def test_rotated_convolutions_are_those_that_peft_merges(tmp_path):
    """Where a window is wider than one, PEFT's own forward pass is another."""
    folder = fixture("peft_methods/conv/oft")
    ref = np.load(folder / "ref.npz")
    with pytest.warns(UserWarning, match="PEFT computes a with OFT in another way than it merges it"):
        model = peft.load_adapter(folder, _base("conv"))
    with ql.on_materialise("error"):
        np.testing.assert_allclose(_logits(model, "conv"), ref["logits_merged"], rtol=0, atol=2e-5)
        y = jax.vmap(ql.quaxify(model.c))(jnp.asarray(ref["layer::c::x"]))
    np.testing.assert_allclose(y, ref["layer::c::y"], rtol=0, atol=2e-6 * np.abs(ref["layer::c::y"]).max())
    arrays = named_arrays(ql.merge(model))
    for name in ("a.weight", "c.weight"):
        wanted = ref[f"merged::{name}"]
        np.testing.assert_allclose(arrays[name], wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
    with pytest.warns(UserWarning, match="PEFT computes a with OFT"):
        ours = _tensors(model, tmp_path)
    theirs = open_tensors(folder / "adapter_model.safetensors")
    assert {*ours} == {*theirs}
    for key in theirs:
        np.testing.assert_array_equal(ours[key], theirs[key])


# Options that need not be the same: what they mean can be said in several ways, or is in the shapes of
# tensors.
IN_OTHER_WORDS = (
    "feedforward_modules",
    "r",
    "oft_block_size",
    "block_share",
    "eps",
    "num_cayley_neumann_terms",
    "projection_prng_key",
    "boft_block_size",
    "boft_block_num",
    "decompose_both",
)


def _tensors(model, folder):
    peft.save_adapter(folder, model)
    return open_tensors(folder / "adapter_model.safetensors")


def _with_gradients(model, grads):
    """The model with the gradients in place of what is trained."""
    model = eqx.combine(grads, model)
    arrays = named_arrays(model)
    new = {}
    for name, bias in arrays.items():
        if isinstance(bias, ScaledBias):  # whose factors are those of the weight in PEFT
            weight = arrays[name.replace(".bias", ".weight")]
            total = weight.outputs.reshape(bias.factor.shape) + bias.factor
            new[name] = bias.replace(factor=total)
            new[name.replace(".bias", ".weight")] = weight.replace(
                outputs=total.reshape(weight.outputs.shape)
            )
    return replace(model, new)


# What is refused ----------------------------------------------------------------------------------

MLP = drawn(eqx.nn.MLP, 8, 8, 8, depth=1, key=random_key(0))


def _adapted(make, model=MLP, **options):
    return ql.adapt(model, lambda w, **_: make(w), **options)


def _edited(folder, model, edit=None, **options):
    """The folder of a saved adapter, with other tensors or other entries of its configuration."""
    peft.save_adapter(folder, model)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    if edit is not None:
        tensors = dict(open_tensors(folder / "adapter_model.safetensors"))
        edit(tensors)
        write_tensors(folder / "adapter_model.safetensors", tensors, {})
    return folder


OFT = lambda w: adapters.OFTArray(w, jnp.ones((2, 6)))
VERA = lambda w: adapters.VeRAArray(w, A, A.T, jnp.ones(2), jnp.ones(8))
A = normal(2, 8)


IA3 = lambda w: adapters.IA3Array(w, inputs=jnp.ones(8))
MISS = lambda w: adapters.MiSSArray(w, jnp.ones((2, 8)))
C3A = lambda w: adapters.C3AArray(w, jnp.ones((2, 2, 4)))


def _without(key):
    return lambda tensors: tensors.pop(f"base_model.{key}")


def _with(key, *shape):
    return lambda tensors: tensors.update({f"base_model.{key}": np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("make", "edit", "options", "message"),
    [
        (OFT, None, {"odd": 3}, "'odd': 3 is not supported"),
        (OFT, None, {"oft_block_size": -1}, "'oft_block_size': expected an integer of at least 0; found -1"),
        (OFT, None, {"bias": "some"}, "'bias': expected 'none', 'all' or the name of the method"),
        (OFT, None, {"bias": "oft_only"}, r"layers\.0\.bias': is missing: modules_to_save or bias"),
        (IA3, None, {"bias": "all"}, "'bias': expected 'none', since PEFT's IA3 trains no biases"),
        (OFT, None, {"target_modules": ["0"]}, "layers.1.oft_R.weight': is not expected: target_modules"),
        (OFT, _without("model.layers.0.oft_R.weight"), {}, "layers.0.oft_R.weight': is missing"),
        (OFT, _with("model.layers.0.oft_R.weight", 3, 6), {}, r"with b dividing 8; found \(3, 6\)"),
        (VERA, _without("model.layers.0.vera_lambda_d"), {}, "layers.0.vera_lambda_d': is missing"),
        (VERA, _without("vera_A"), {}, "'base_model.vera_A': is missing: `save_projection`"),
        (VERA, _with("vera_A", 2, 4), {}, "do not reach over the layer, of 8 inputs and 8 outputs"),
        (VERA, None, {"r": 10**12}, "the configuration gives rank 1000000000000; found .2,"),
        (MISS, None, {"init_weights": "dog"}, "expected one of True"),
        (C3A, _with("model.layers.0.c3a_kernel", 2, 1, 4), {}, r"found \(2, 1, 4\)"),
    ],
)
def test_damaged_files(make, edit, options, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        peft.load_adapter(_edited(tmp_path, _adapted(make), edit, **options), MLP)


@pytest.mark.parametrize("bias", ["oft_only", "all"])
def test_biases_beside_other_methods(bias, tmp_path):
    model = _adapted(OFT, where=["layers.0"])
    trained = [0] if bias == "oft_only" else [0, 1]
    model = eqx.tree_at(
        lambda m: [m.layers[i].bias for i in trained], model, [ql.TrainableArray(A[i]) for i in trained]
    )
    peft.save_adapter(tmp_path, model)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["bias"] == bias
    assert "base_model.model.layers.0.base_layer.bias" in open_tensors(tmp_path / "adapter_model.safetensors")
    assert tree_equal(peft.load_adapter(tmp_path, MLP), model)


def test_inputs_and_outputs_of_layers_whose_names_end_alike(tmp_path):
    """PEFT's (IA)³ requires that `feedforward_modules` are some of `target_modules`."""
    w = jnp.ones((8, 8))
    base = {part: {x: {"weight": w} for x in ("fc", "proj")} for part in ("attn", "mlp")}
    outputs = lambda w: adapters.IA3Array(w, outputs=jnp.ones(8))
    entries = lambda: json.loads((tmp_path / "adapter_config.json").read_text())
    for where, inside, targets, feedforward in (
        (["fc", "mlp.proj"], ["proj"], ["attn.fc", "mlp.fc", "mlp.proj"], ["mlp.proj"]),
        (["fc", "proj"], ["proj"], ["fc", "proj"], ["proj"]),
        (["proj"], ["mlp.proj"], ["attn.proj", "mlp.proj"], ["mlp.proj"]),
    ):
        chosen = ql.select(base, where)
        inputs = [name for name in chosen if f".{layer_of(name)}".endswith(tuple(f".{x}" for x in inside))]
        others = [name for name in chosen if name not in inputs]
        model = _adapted(IA3, base, where=inputs)
        model = _adapted(outputs, model, where=others)
        peft.save_adapter(tmp_path, model)
        assert entries()["target_modules"] == targets
        assert entries()["feedforward_modules"] == feedforward
        assert tree_equal(peft.load_adapter(tmp_path, base), model)


def _frequencies(w, n):
    return METHODS["FOURIERFT"].start(w, key=None, layout=ql.Layout.parse("oi"), n_frequency=n)


def test_patterns_of_methods_that_match_no_anchor(tmp_path):
    """FourierFT and C³A take a whole name or its end, without brackets around the alternatives."""
    layers = {"a": {"fc": {"weight": jnp.ones((8, 8))}}, "b": {"fc": {"weight": jnp.ones((8, 8))}}}
    base = {"net": layers, "fc": {"weight": jnp.ones((8, 8))}}
    file = tmp_path / "adapter_config.json"

    def save(sizes):
        new = {f"{name}.weight": _frequencies(jnp.ones((8, 8)), n) for name, n in sizes.items()}
        peft.save_adapter(tmp_path, replace(base, new))

    save({"net.a.fc": 4, "net.b.fc": 8, "fc": 4})
    config = json.loads(file.read_text())
    assert config["n_frequency_pattern"] == {"net.b.fc": 8}
    found = named_arrays(peft.load_adapter(tmp_path, base))
    assert {x.spectrum.size for x in found.values()} == {4, 8}
    assert found["net.b.fc.weight"].spectrum.size == 8
    file.write_text(json.dumps(config | {"n_frequency_pattern": {"b.fc|a.fc": 8}}))
    assert named_arrays(peft.load_adapter(tmp_path, base))["net.b.fc.weight"].spectrum.size == 8
    with pytest.raises(ValueError, match=r"by the ends of names, and cannot tell net\.\w\.fc from"):
        save({"net.a.fc": 4, "net.b.fc": 4, "fc": 8})


def test_layers_that_a_method_does_not_adapt(tmp_path):
    conv = {"conv": eqx.nn.Conv2d(2, 4, 2, key=jax.random.key(0)), "lin": MLP.layers[0]}
    axes = {"in_axes": (-3, -2, -1), "out_axes": (-4,)}
    added = lambda w: adapters.DeLoRAArray(w, jnp.ones((1, 8)), jnp.ones((4, 1)), jnp.ones(()), A[0], **axes)
    with pytest.raises(ValueError, match=r"PEFT's DELORA is for linear, .* conv\.weight is of kind 'conv'"):
        peft.save_adapter(tmp_path, _adapted(added, conv, where=["conv"]))
    folder = _edited(tmp_path, _adapted(MISS, conv, where=["lin"]))
    renamed = {"conv": MLP.layers[0], "lin": conv["conv"]}
    with pytest.raises(CheckpointError, match=r"PEFT's MISS is for .*; the model's lin is of kind"):
        peft.load_adapter(folder, renamed)
    conv = {"conv": eqx.nn.Conv2d(2, 4, (2, 3), key=jax.random.key(0))}
    rotated = lambda w: adapters.OFTArray(w, jnp.ones((3, 6)), **axes)
    with pytest.raises(ValueError, match=r"with a square window; that of conv is \(2, 3\)"):
        peft.save_adapter(tmp_path, _adapted(rotated, conv, where=["conv"]))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: _adapted(OFT, _adapted(VERA, where=["layers.0"]), exclude=["layers.0"]),
         r"adapters of one method; the model has VERA \(layers.0.weight\), OFT \(layers.1.weight\)"),
        (lambda: eqx.tree_at(lambda m: [layer.bias for layer in m.layers], _adapted(IA3),
                             2 * [ql.TrainableArray(jnp.ones(8))]),
         "PEFT's files of IA3 do not hold biases that are trained"),
        (lambda: _adapted(lambda w: adapters.IA3Array(w, jnp.ones(8))),
         "the inputs of layers.0, or of its outputs and its bias; here are factors of outputs. .*`of_inputs"),
        (lambda: _adapted(lambda w: adapters.FourierFTArray(w, A[0], jnp.arange(8))),
         "no places of frequencies"),
        (lambda: _adapted(lambda w: VERA(w).replace(a=w[:2])), "one pair of random matrices for all layers"),
        (lambda: ql.stack_adapters([_adapted(OFT), _adapted(OFT)]),
         r"layers.0.weight is of shape \(2, 8, 8\)"),
    ],
)  # fmt: skip
def test_what_files_have_no_place_for(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        peft.save_adapter(tmp_path, model())


def test_factors_of_a_bias_that_were_trained_apart(tmp_path):
    linear = MLP.layers[0]
    model = eqx.tree_at(
        lambda x: (x.weight, x.bias), linear,
        (adapters.IA3Array(linear.weight, A[0]), ScaledBias(linear.bias, A[1])),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the same factors for the outputs and the bias"):
        peft.save_adapter(tmp_path, {"a": model})
    merged = ql.merge(model)
    np.testing.assert_allclose(merged(A[0]), ql.quaxify(model)(A[0]), atol=1e-6)
    assert ql.trainable(model).bias.factor


ALORA = functools.partial(ql.loraify, rank=2, where=["layers.0"], invocation_tokens=(3, 4), key=random_key(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alora_invocation_tokens": []}, "'alora_invocation_tokens': expected one or more tokens; found"),
        ({"alora_invocation_tokens": [-1]}, "expected one or more tokens; found"),
        ({"use_dora": True}, "'use_dora': True is not supported beside alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights': 'pissa' is not supported beside"),
    ],
)
def test_files_of_activated_lora(options, message, tmp_path):
    folder = _edited(tmp_path, ALORA(MLP))
    assert tree_equal(peft.load_adapter(folder, MLP), ALORA(MLP))
    with pytest.raises(CheckpointError, match=message):
        peft.load_adapter(_edited(folder, ALORA(MLP), **options), MLP)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: ql.loraify(ALORA(MLP), rank=2, where=["layers.1"], key=jax.random.key(0)),
         r"some act on those from \[3, 4\] on, those of layers.1.weight on all"),
        (lambda: ALORA(ALORA(MLP), where=["layers.1"], invocation_tokens=(7,)),
         r"some act on those from \[3, 4\] on, others on those from \[7\] on"),
        (lambda: ALORA({"conv": eqx.nn.Conv2d(2, 4, 2, key=jax.random.key(0))}, where=["conv"]),
         r"PEFT's aLoRA is for linear layers; conv.weight is of shape \(4, 2, 2, 2\)"),
    ],
)  # fmt: skip
def test_activated_lora_that_files_have_no_place_for(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        peft.save_adapter(tmp_path, model())


def test_activated_lora_of_other_layers(tmp_path):
    conv = {"conv": eqx.nn.Conv2d(2, 4, 2, key=jax.random.key(0))}
    folder = _edited(tmp_path, ql.loraify(conv, rank=2, where=["conv"], key=jax.random.key(0)),
                     alora_invocation_tokens=[1])  # fmt: skip
    with pytest.raises(CheckpointError, match="PEFT's aLoRA is for linear layers; conv is none"):
        peft.load_adapter(folder, conv)


def test_dropout_is_told_of(tmp_path):
    folder = _edited(tmp_path, _adapted(VERA), vera_dropout=0.1)
    with pytest.warns(UserWarning, match=r"vera_dropout is 0.1. Nothing is dropped"):
        peft.load_adapter(folder, MLP)
