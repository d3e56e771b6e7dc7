"""Whole models in a file: every shipped type comes back as it was, and what does not fit is named."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import quaxlike as ql
from quaxlike import lm
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.arrays.unitful import Unitful
from quaxlike.arrays.zero import Full, Identity, Zero
from quaxlike.files import CheckpointError
from quaxlike.files import safetensors as st
from quaxlike.files.tensors import open_tensors, write_tensors
from tests.fuzz import tensors as files
from tests.samples import normal, random_key, tree_equal

_KEY = random_key(0)


def _mlp():
    return eqx.nn.MLP(64, 4, 64, depth=2, key=_KEY)


_MODELS = {
    "plain": _mlp,
    "nf4": lambda: ql.quantize(_mlp(), "nf4"),
    "double": lambda: ql.quantize(_mlp(), "fp4", double_quant=True, block_size=128),
    "int8": lambda: ql.quantize(_mlp(), "int8"),
    "int4": lambda: ql.quantize(_mlp(), "int4", axis=0),
    "lora": lambda: ql.loraify(_mlp(), rank=2, key=_KEY),
    "qlora": lambda: ql.loraify(ql.quantize(_mlp(), "nf4"), rank=2, dropout=0.1, rslora=True, key=_KEY),
    "values": lambda: {
        "zero": Zero((3, 4), jnp.bfloat16),
        "one": OneHotVector(jnp.int32(2), jnp.float32(5), 4),
        "layers": [Identity(3), ql.NF4Array.quantize(jnp.ones((7, 9), jnp.float16))],
    },
    "annotated": lambda: {
        "speed": Unitful(jnp.ones((2, 3)), "m s^-1"),
        "root": Unitful(ql.NF4Array.quantize(jnp.ones((2, 64))), {"kg": "1/2"}),
        "none": Unitful(2.0, ""),
        "named": NamedArray(jnp.ones((2, 3)), ("batch", None)),
    },
    "others": lambda: {
        "key": jax.random.key(3),
        "bf16": jnp.ones((2, 0), jnp.bfloat16),
        "numpy": np.arange(3, dtype=np.int64),
        "bool": jnp.array(True),
        "name": "text",
        "function": jnp.tanh,
        "none": None,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_round_trip(name, tmp_path):
    model = _MODELS[name]()
    path = tmp_path / "model.safetensors"
    st.save(path, model)
    loaded = st.load(path, model)
    equal = lambda tree: jax.tree.map(
        lambda x: jax.random.key_data(x) if isinstance(x, jax.Array) and x.dtype == _KEY.dtype else x, tree
    )
    assert tree_equal(equal(loaded), equal(model), typematch=True)
    st.save(tmp_path / "again.safetensors", loaded)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.safetensors", "model.safetensors"]


@pytest.mark.slow
def test_a_quantised_file_loads_into_the_shapes_of_the_plain_model(tmp_path):
    model = ql.quantize(_mlp(), "nf4")
    st.save(tmp_path / "model.safetensors", model)
    loaded = st.load(tmp_path, eqx.filter_eval_shape(_mlp))
    assert tree_equal(eqx.filter(loaded, eqx.is_array), eqx.filter(model, eqx.is_array))
    x = jnp.ones(64)
    np.testing.assert_array_equal(ql.quaxify(loaded)(x), ql.quaxify(model)(x))


def test_numpy_arrays_of_64_bits_round_trip(tmp_path):
    """`eqx.filter_eval_shape` says of them what they would be in JAX."""
    make = lambda: {"betas": np.linspace(0, 1, 5), "steps": np.arange(3)}
    st.save(tmp_path / "model.safetensors", make())
    for like in (make(), eqx.filter_eval_shape(make)):
        loaded = st.load(tmp_path, like)
        assert tree_equal(loaded, make(), typematch=True)
    with pytest.raises(CheckpointError, match=r"the model has float32 of shape \(5,\), the file float64"):
        st.load(tmp_path, {"betas": np.zeros(5, np.float32), "steps": np.arange(3)})


@pytest.mark.parametrize("number", [1 + 2j, complex(np.nan, 1), np.nan, -np.inf])
def test_numbers_that_json_lacks(tmp_path, number):
    model = [Full(number, (3,))]
    st.save(tmp_path / "model.safetensors", model)
    found = st.load(tmp_path, [jax.ShapeDtypeStruct((3,), model[0].dtype)])
    assert jax.tree.structure(found) == jax.tree.structure(model)


@pytest.mark.slow
def test_plain_arrays_are_found_by_other_readers_and_theirs_by_us(tmp_path):
    path = tmp_path / "model.safetensors"
    st.save(path, _mlp())
    stored = safetensors.numpy.load_file(path)
    assert stored["layers.0.weight"].shape == (64, 64)
    safetensors.numpy.save_file({name: x + 1 for name, x in stored.items()}, path)
    loaded = st.load(path, _mlp())
    np.testing.assert_array_equal(loaded.layers[0].weight, _mlp().layers[0].weight + 1)


class _Mine(ql.ArrayValue):
    array: jax.Array
    offset: float = eqx.field(static=True)

    def materialise(self):
        return self.array + self.offset


def test_types_of_your_own_are_named(tmp_path):
    path, model = tmp_path / "model.safetensors", {"w": _Mine(jnp.ones(3), float("inf"))}
    with pytest.raises(CheckpointError, match=r"'w': _Mine is not a type that the file can name"):
        st.save(path, model)
    assert not path.exists()
    st.save(path, model, types=[_Mine])
    with pytest.raises(CheckpointError, match=r"'w': cannot be rebuilt: unknown type '_Mine'; known are"):
        st.load(path, model)
    assert tree_equal(st.load(path, model, types=[_Mine]), model)


def test_what_does_not_fit_the_model_is_named(tmp_path):
    path, model = tmp_path / "model.safetensors", {"aa": jnp.ones(3), "bb": jnp.ones(2)}
    st.save(path, model)
    for like, message in [
        ({"aa": jnp.ones(4), "bb": jnp.ones(2)}, r"'aa': the model has float32 of shape \(4,\), the file fl"),
        ({"aa": jnp.ones(3, jnp.int8), "bb": jnp.ones(2)}, r"'aa': the model has int8 of shape"),
        ({"aa": jnp.ones(3), "bbb": jnp.ones(2)}, r"'bbb': is missing. Did you mean 'bb'\?"),
        ({"aa": jnp.ones(3)}, r"the model has no place for 'bb'; pass strict=False"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            st.load(path, like)
    assert list(st.load(path, {"aa": jnp.ones(3)}, strict=False)) == ["aa"]
    with pytest.raises(CheckpointError, match="two arrays of the model have this name"):
        st.save(path, {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)})


def _edited(tmp_path, edit):
    """The file of a quantised array with another manifest."""
    path, model = tmp_path / "model.safetensors", {"w": ql.NF4Array.quantize(jnp.ones((8, 64)))}
    st.save(path, model)
    tensors = open_tensors(path)
    manifest = json.loads(tensors.metadata["quaxlike"])
    edit(manifest)
    write_tensors(path, {k: np.array(tensors[k]) for k in tensors}, {"quaxlike": json.dumps(manifest)})
    return path, model


def _field(name, node):
    return lambda manifest: manifest["values"]["w"]["fields"].update({name: node})


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(version=2), r"'version': the manifest is of version 2, of quaxlike"),
        (lambda m: m.pop("version"), r"'version': the manifest is of version None"),
        (lambda m: m.update(values=[]), r"'values': the manifest must hold an object"),
        (lambda m: m["values"].update(w=3), r"'w': cannot be rebuilt: expected an object, found int"),
        (lambda m: m["values"]["w"].update(type="Nf5Array"), r"'w': .* unknown type 'Nf5Array'; known are"),
        (lambda m: m["values"]["w"].update(type="Int8Array"), r"'w': .* Int8Array with inner axes"),
        (
            lambda m: m["values"]["w"].update(surprise=1),
            r"'w': .* the entries .*'surprise'.* do not form a known",
        ),
        (_field("surprise", {"value": 1}), r"'w': .* NF4Array: missing or unknown fields: surprise"),
        (_field("codes", {"array": "elsewhere"}), r"'w': .* its tensor 'elsewhere' is missing"),
        (_field("block_size", {"value": 32}), r"'w': .* in blocks of 32 takes scale of shape"),
        (_field("block_size", {"value": "64"}), r"'w': cannot be rebuilt"),
        (_field("axes", {"tuple": [{"value": 3}]}), r"'w': .* axes \(3,\) do not permute"),
        (
            _field("logical_dtype", {"dtype": "int8"}),
            r"'w': the model has float32 of shape \(8, 64\), the fil",
        ),
        (_field("logical_dtype", {"dtype": "float31"}), r"'w': cannot be rebuilt"),
        (_field("axes", {"unit": {"m": "1/0"}}), r"'w': .* a fraction as exponent of 'm', not '1/0'"),
        (_field("axes", {"unit": {"parsec": "1"}}), r"'w': .* 'parsec' is not a unit of the SI"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path, edit, message):
    path, model = _edited(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        st.load(path, model)


_OTHER_DTYPES = {"F32": ("I32", "U32"), "U8": ("I8", "F8_E4M3"), "I8": ("U8",), "F16": ("I16", "BF16")}


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
def test_parts_of_another_dtype_are_refused(tmp_path, recorded):
    """Those of the same size, which only the header tells apart; without the manifest's word, what no type
    computes with."""
    w = jnp.asarray(normal(4, 256))
    values = {
        **{x: ql.BlockArray.quantize(w, codec=x) for x in ("q4_1", "q2_k", "mxfp4", "uint4_block")},
        "nf4": ql.NF4Array.quantize(w),
        "double": ql.NF4Array.quantize(w, double_quant=True),
        "int8": ql.Int8Array.quantize(w),
    }
    path = tmp_path / "x.safetensors"
    st.save(path, values)
    stored = files.read(path)
    if not recorded:
        metadata = json.loads(stored.metadata)
        metadata["quaxlike"] = json.dumps({**json.loads(metadata["quaxlike"]), "dtypes": {}})
        stored = stored._replace(metadata=json.dumps(metadata).encode())
    files.write(path, stored)
    st.load(path, like=values)
    for name, entry in stored.tensors.items():
        for kind in _OTHER_DTYPES[entry.kind] if recorded else ():
            files.write(path, stored._replace(tensors={**stored.tensors, name: entry._replace(kind=kind)}))
            with pytest.raises(CheckpointError, match=f"'{name}': is of .* in the manifest"):
                st.load(path, like=values)
            with pytest.raises(CheckpointError, match=f"'{name}': is of .* in the manifest"):
                lm.read(path)
    integers = {"int8.scale": "I32", "double.scale.codes": "I8", "double.scale.absmax": "U32"}
    for name, kind in () if recorded else {**integers, "q2_k.scale.outer": "I16"}.items():
        entry = stored.tensors[name]._replace(kind=kind)
        files.write(path, stored._replace(tensors={**stored.tensors, name: entry}))
        with pytest.raises(CheckpointError, match=f"'{name.partition('.')[0]}': cannot be rebuilt: .* takes"):
            st.load(path, like=values)
