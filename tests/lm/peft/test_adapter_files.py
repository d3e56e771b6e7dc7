"""Files of adapters of any type, without the weights that they are on."""

import equinox as eqx
import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError, safetensors
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.surgery.trees import named_arrays
from tests.samples import drawn, normal, random_key, tree_equal

KEY = random_key(0)
MLP = drawn(eqx.nn.MLP, 64, 32, 32, depth=1, key=KEY)


class Scaled(ql.AdaptedArray):
    scale: jax.Array
    power: int = eqx.field(static=True, default=2)

    def materialise(self):
        return ql.materialise(self.base) * self.scale[:, None] ** self.power


def _make(w, *, key, layout):
    return Scaled(w, jax.random.normal(key, layout.out_shape(tuple(w.shape))), 3)


def _base(**options):
    names = {"embed.weight": (9, 6), "a.weight": (6, 6), "a.bias": (6,), "b.weight": (4, 6)}
    return {name: normal(*shape, seed=i, **options) for i, (name, shape) in enumerate(names.items())}


def test_a_type_of_ones_own(tmp_path):
    model = ql.adapt(MLP, _make, key=KEY)
    file = tmp_path / "adapters.safetensors"
    safetensors.save_adapters(file, model, types=[Scaled])
    assert set(open_tensors(file)) == {"layers.0.weight.scale", "layers.1.weight.scale"}
    again = safetensors.load_adapters(file, MLP, types=[Scaled])
    assert tree_equal(again.layers[0].weight, model.layers[0].weight)
    assert again.layers[1].weight.w is MLP.layers[1].weight
    quantised = safetensors.load_adapters(file, ql.quantize(MLP, "nf4"), types=[Scaled])
    assert tree_equal(named_arrays(quantised), named_arrays(ql.quantize(model, "nf4")))
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight.*unknown type 'Scaled'"):
        safetensors.load_adapters(file, MLP)
    with pytest.raises(CheckpointError, match="is not a type that the file can name; pass it in `types`"):
        safetensors.save_adapters(file, model)


@pytest.mark.slow
def test_everything_that_is_trained(tmp_path):
    model = ql.loraify(
        _base(), rank=2, key=KEY, where=["a"], init="gaussian", dora=True, bias="all", lora_bias=True,
        modules_to_save=["b"], trainable_token_indices={"embed": [1, 3]},
    )  # fmt: skip
    safetensors.save_adapters(tmp_path / "a.safetensors", model)
    again = safetensors.load_adapters(tmp_path / "a.safetensors", _base())
    assert {*map(type, again.values())} == {ql.LoraArray, ql.LoraBias, ql.TrainableArray, ql.TrainableRows}
    assert tree_equal(again, model)


@pytest.mark.slow
def test_biases_that_the_model_does_not_have(tmp_path):
    bare = eqx.nn.Linear(4, 4, use_bias=False, key=KEY)
    model = ql.loraify(bare, rank=2, key=KEY, lora_bias=True)
    safetensors.save_adapters(tmp_path / "a.safetensors", model)
    assert tree_equal(safetensors.load_adapters(tmp_path / "a.safetensors", bare), model)


@pytest.mark.slow
def test_a_base_that_is_trained_is_in_the_file(tmp_path):
    file = tmp_path / "a.safetensors"
    model = ql.loraify(MLP, rank=2, key=KEY, train_base=True)
    safetensors.save_adapters(file, model)
    other = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, MLP)
    again = safetensors.load_adapters(file, other)
    assert tree_equal(again.layers[0].weight, model.layers[0].weight)
    np.testing.assert_array_equal(again.layers[0].bias, other.layers[0].bias)
    scales = ql.train_scales(ql.quantize(ql.adapt(MLP, _make, key=KEY), "nf4"))
    safetensors.save_adapters(file, scales, types=[Scaled])
    again = safetensors.load_adapters(file, ql.quantize(other, "nf4"), types=[Scaled])
    assert tree_equal(again.layers[0].weight, scales.layers[0].weight)


@pytest.mark.slow
def test_several_on_one_base(tmp_path):
    model = ql.stack_adapters([ql.loraify(MLP, rank=2, key=jax.random.key(i)) for i in range(3)])
    safetensors.save_adapters(tmp_path / "a.safetensors", model)
    again = safetensors.load_adapters(tmp_path / "a.safetensors", MLP)
    assert tree_equal(again.layers[0].weight, model.layers[0].weight)


@pytest.mark.slow
def test_models_that_they_do_not_fit(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.save_adapters(file, ql.loraify(MLP, rank=2, key=KEY))
    with pytest.raises(CheckpointError, match=r"'layers\.1\.weight': .*no such array\. Did you mean"):
        safetensors.load_adapters(file, eqx.nn.MLP(64, 32, 32, depth=0, key=KEY))
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight.: cannot be rebuilt: LoraArray takes"):
        safetensors.load_adapters(file, eqx.nn.MLP(32, 32, 32, depth=1, key=KEY))
    with pytest.raises(ValueError, match=r"layers\.0\.weight is of type LoraArray already"):
        safetensors.load_adapters(file, ql.loraify(MLP, rank=2, key=KEY))
    with pytest.raises(CheckpointError, match=r"adapters without their bases; read it with `load_adapters`"):
        safetensors.load(file, MLP, strict=False)
    broad = ql.adapt(MLP, _make, key=KEY)
    safetensors.save_adapters(file, broad, types=[Scaled])
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight.: (is an adapter|cannot be rebuilt)"):
        safetensors.load_adapters(file, eqx.nn.MLP(64, 32, 1, depth=1, key=KEY), types=[Scaled])


@pytest.mark.slow
def test_files_that_hold_something_else(tmp_path):
    file = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="has no adapters to save"):
        safetensors.save_adapters(file, MLP)
    with pytest.raises(ValueError, match=r"on layers\.0\.weight took a part of the weight"):
        safetensors.save_adapters(file, ql.loraify(MLP, rank=2, key=KEY, init="pissa"))
    safetensors.save(file, MLP)
    with pytest.raises(CheckpointError, match=r"is no part of an adapter; `load` reads"):
        safetensors.load_adapters(file, MLP)
    safetensors.save(file, ql.quantize(MLP, "nf4"))
    with pytest.raises(CheckpointError, match=r"expected an adapter; found NF4Array"):
        safetensors.load_adapters(file, MLP)
    safetensors.save_adapters(file, ql.loraify(MLP, rank=2, key=KEY))
    tensors = open_tensors(file)
    kept = {name: tensors[name] for name in tensors if name != "layers.0.weight.a"}
    write_tensors(file, kept, tensors.metadata)
    with pytest.raises(CheckpointError, match=r"its tensor 'layers\.0\.weight\.a' is missing"):
        safetensors.load_adapters(file, MLP)
