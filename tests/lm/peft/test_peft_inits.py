"""Adapters whose initialisation took a part of the base: the files say what, or there are none."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError, safetensors
from quaxlike.lm import peft
from quaxlike.surgery.trees import named_arrays, replace
from tests.samples import array, drawn, random_key, tree_equal

KEY = random_key(0)
RANK, ALPHA = 3, 12


class Net(eqx.Module):
    embed: eqx.nn.Embedding
    conv: eqx.nn.Conv2d
    lin: list[eqx.nn.Linear]

    def __init__(self, key=KEY):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(9, 8, key=keys[0])
        self.conv = eqx.nn.Conv2d(3, 4, 2, key=keys[1])
        self.lin = [eqx.nn.Linear(8, 6, key=keys[2]), eqx.nn.Linear(6, 8, key=keys[3])]


NET = drawn(Net)
CONV1D = {"lin": [{"weight": NET.lin[0].weight}]}  # as GPT-2 has it
LINEAR = ["lin.0", "lin.1"]


def adapted(init, where=LINEAR, base=NET, **options):
    """A model whose adapters have moved away from where they started."""
    options = {"rank": RANK, "alpha": ALPHA, "where": where, "key": KEY, "init": init} | options
    model = ql.loraify(base, **options)
    loras = {name: x for name, x in named_arrays(model).items() if isinstance(x, ql.LoraArray)}
    return replace(model, {name: x.replace(a=x.a + 0.3, b=0.9 * x.b) for name, x in loras.items()})


def config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def edit(folder, **entries):
    (folder / "adapter_config.json").write_text(json.dumps(config(folder) | entries))


def assert_same(found, expected, rtol=4e-6):
    found, expected = ql.materialise((found, expected))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(1, np.abs(y).max()))


OPTIONS = {
    "plain": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "ranks": {"rank_pattern": {"lin.1": 5}, "alpha_pattern": {"lin.0": 2}},
    "head": {"modules_to_save": ["conv"]},
    "bfloat16": {"base": jax.tree.map(lambda x: array(x, jnp.bfloat16), NET)},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_round_trip_is_the_identity(init, options, tmp_path):
    keywords = OPTIONS[options]
    base = keywords.get("base", NET)
    model = adapted(init, **keywords)
    peft.save_adapter(tmp_path / "1", model)
    assert config(tmp_path / "1")["init_lora_weights"] == init
    once = peft.load_adapter(tmp_path / "1", base)
    peft.save_adapter(tmp_path / "2", once)
    twice = peft.load_adapter(tmp_path / "2", base)
    for again in (once, twice):
        assert jax.tree.structure(again) == jax.tree.structure(model)
        assert_same(again, model, 2e-2 if options == "bfloat16" else 4e-6)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_is_loaded_is_what_the_definition_gives(init, tmp_path):
    """The base without what the initialisation takes, and the factors of the file, in float64."""
    peft.save_adapter(tmp_path, adapted(init))
    tensors = {
        k: np.float64(v) for k, v in ql.lm.open_checkpoint(tmp_path / "adapter_model.safetensors").items()
    }
    for i, lora in enumerate(x.weight for x in peft.load_adapter(tmp_path, NET).lin):
        w = np.float64(NET.lin[i].weight)
        if init == "pissa":
            u, s, vt = np.linalg.svd(w, full_matrices=False)
            taken = (u[:, :RANK] * s[:RANK]) @ vt[:RANK]
        else:
            q, r = np.linalg.qr(w)
            taken = ALPHA / RANK * q[:, :RANK] @ r[:RANK]
        stem = f"base_model.model.lin.{i}.lora_"
        delta = ALPHA / RANK * tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]
        np.testing.assert_allclose(lora.materialise(), w - taken + delta, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_2", "olora", lambda name, x, key: x.replace(w=x.w * 0)]
)
def test_conversion_to_an_adapter_of_the_base_as_it_was(init, tmp_path):
    where = [*LINEAR, "embed", "conv"] if not callable(init) else ["lin.0"]
    for number, options in enumerate([{"rslora": True}, {"dora": True}, {"rank": 6, "where": ["lin.0"]}]):
        if callable(init) and number < 2:
            continue  # it takes out more than these ranks hold
        model, folder = adapted(init, **{"where": where} | options), tmp_path / str(number)
        peft.save_adapter(folder, model, base=NET)
        assert config(folder)["init_lora_weights"] is True
        assert config(folder)["r"] == 2 * options.get("rank", RANK)
        again = peft.load_adapter(folder, NET)
        assert again.lin[0].weight.w is NET.lin[0].weight
        assert_same(again, model)


@pytest.mark.slow
def test_a_base_that_is_saved_as_well(tmp_path):
    for number, init in enumerate(["pissa", "pissa_niter_2", ql.loftq("int8")]):
        model = adapted(init)
        peft.save_adapter(tmp_path / str(number), model, base=model)
        bases = {name: getattr(x, "w", x) for name, x in named_arrays(model).items()}
        safetensors.save(tmp_path / "base.safetensors", replace(model, bases))
        base = safetensors.load(tmp_path / "base.safetensors", like=NET)
        again = peft.load_adapter(tmp_path / str(number), base)
        assert_same(again, model)


@pytest.mark.slow
def test_the_record_is_in_native_files(tmp_path):
    model = adapted("pissa")
    safetensors.save(tmp_path / "model.safetensors", model)
    again = safetensors.load(tmp_path / "model.safetensors", like=NET)
    assert tree_equal(again, model)
    peft.save_adapter(tmp_path, again)
    assert config(tmp_path)["init_lora_weights"] == "pissa"


@pytest.mark.quick("<lambda>7", "<lambda>10")
@pytest.mark.parametrize(
    "model",
    [
        lambda: adapted("pissa_niter_2"),
        lambda: adapted(ql.loftq("int8")),
        lambda: adapted(lambda name, lora, key: lora.replace(w=lora.w * 2)),
        lambda: adapted("pissa", where=["lin.0", "embed"]),
        lambda: adapted("pissa", where=["lin.0", "conv"]),
        lambda: adapted("pissa", where=["lin.0"], lora_bias=True),
        lambda: adapted("olora", ["lin.0"], CONV1D, fan_in_fan_out=True),
        lambda: adapted("olora", where=["lin.1"], base=adapted("pissa", where=["lin.0"])),
        lambda: adapted("kaiming", where=["lin.1"], base=adapted("pissa", where=["lin.0"])),
        lambda: ql.combine_adapters([adapted("pissa"), adapted("pissa")], [0.5, 0.5]),
        lambda: ql.combine_adapters([adapted("pissa"), adapted("pissa")], [0.5, 0.5], method="svd"),
    ],
)
def test_what_a_file_cannot_tell_is_not_saved(model, tmp_path):
    with pytest.raises(
        ValueError, match=r"changed the base, and a file .* cannot tell how for .*Pass `base`"
    ):
        peft.save_adapter(tmp_path / "adapter", model())
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_a_base_that_does_not_fit_the_adapter(tmp_path):
    model = adapted("pissa")
    for base, message in [
        (Net(jax.random.key(5)), r"differ in lin\.0\.weight by more than an initialisation of rank 3"),
        (
            ql.quantize(NET, "int8", where=LINEAR),
            r"`base` has float32 Int8Array .*Quantise the model after",
        ),
        ({"lin": NET.lin[:1]}, r"`base` has no lin\.1\.weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            peft.save_adapter(tmp_path / "adapter", model, base=base)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["mica", "orthogonal", "Gaussian", "eva", True, False])
def test_initialisations_that_leave_the_base_alone(init, tmp_path):
    peft.save_adapter(tmp_path, model := adapted("gaussian"))
    edit(tmp_path, init_lora_weights=init)
    assert tree_equal(peft.load_adapter(tmp_path, NET), model)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"init_lora_weights": "pissa_niter_16"}, "depends on random numbers, which is not in the file"),
        ({"init_lora_weights": "corda"}, "depends on the inputs of its layers, which is not in the file"),
        ({"init_lora_weights": "lora_ga"}, "depends on gradients, which is not in the file"),
        ({"init_lora_weights": "loftq"}, "rounding error of a base that PEFT quantised, which is not in the"),
        ({"init_lora_weights": "x" * 10**6}, "expected one of True, False, 'gaussian'"),
        ({"init_lora_weights": ["pissa"]}, r"expected one of .*; found \['pissa'\]"),
        ({"init_lora_weights": "olora", "fan_in_fan_out": True}, "PEFT has no olora for lin"),
    ],
)
def test_initialisations_that_cannot_be_read(entries, message, tmp_path):
    peft.save_adapter(tmp_path, adapted("gaussian"))
    edit(tmp_path, **entries)
    with pytest.raises(CheckpointError, match=message) as error:
        peft.load_adapter(tmp_path, NET)
    assert len(str(error.value)) < 1_000


@pytest.mark.slow
def test_a_base_that_pissa_cannot_be_taken_from(tmp_path):
    peft.save_adapter(tmp_path, adapted("pissa"))
    with pytest.raises(CheckpointError, match=r"lora_A\.weight.*is of type Int8Array. Adapt the model first"):
        peft.load_adapter(tmp_path, ql.quantize(NET, "int8", where=LINEAR))
    peft.save_adapter(tmp_path, adapted("gaussian", where=["lin.0", "embed"], rank=7))
    edit(tmp_path, init_lora_weights="pissa")
    with pytest.raises(CheckpointError, match=r"needs a rank of at most .* 6 for lin\.0; found 7"):
        peft.load_adapter(tmp_path, NET)


@pytest.mark.slow
def test_embeddings_are_left_alone(tmp_path):
    """As PEFT does, whatever the initialisation."""
    peft.save_adapter(tmp_path, model := adapted("gaussian", where=["embed"]))
    edit(tmp_path, init_lora_weights="pissa")
    assert tree_equal(peft.load_adapter(tmp_path, NET), model)
