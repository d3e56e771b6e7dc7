"""Files that this and earlier releases wrote are read."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.interop import CheckpointError, load, peft, safetensors
from quaxlike.interop.files.tensors import open_tensors, write_tensors
from tests import written
from tests.samples import normal

VERSIONS = sorted(path for path in written.FOLDER.iterdir() if path.is_dir())
pytestmark = [
    pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name),
    pytest.mark.usefixtures("default_promotion"),
]


def _equal(x, expected):
    np.testing.assert_allclose(np.asarray(ql.materialise(x)).astype(expected.dtype), expected, rtol=1e-5)


def test_this_version_is_kept(folder):
    assert ql.__version__ in {path.name for path in VERSIONS}, "run `python -m tests.written`"


@pytest.mark.parametrize("name", ["weights", pytest.param("corners", marks=pytest.mark.slow)])
def test_arrays_of_every_type(folder, name):
    expected = np.load(folder / f"{name}.npz")
    found = load(folder / f"{name}.safetensors")
    assert set(found) == set(expected)
    for key, x in found.items():
        _equal(x, expected[key])


def test_pickled_types(folder):
    expected = np.load(folder / "weights.npz")
    for key, x in pickle.loads((folder / "weights.pickle").read_bytes()).items():
        _equal(jax.tree.map(jnp.asarray, x), expected[key])


@pytest.mark.parametrize("name", written.FORMATS)
def test_published_formats(folder, name):
    (x,) = load(folder / name / written.FORMATS[name][0]).values()
    np.testing.assert_array_equal(x.materialise(), np.load(folder / name / "x.npy"))


def test_adapters(folder):
    model = written.linear()
    base = {name: w.w for name, w in model.items()}
    for again in (safetensors.load_adapters(folder / "adapters.safetensors", base),
                  peft.load_adapter(folder / "peft", base)):  # fmt: skip
        for name, w in model.items():
            np.testing.assert_allclose(again[name].materialise(), w.materialise(), rtol=1e-6)


@pytest.mark.slow
def test_states_of_optimisers(folder):
    state = written.optimiser_state()
    found = safetensors.load(folder / "optimiser.safetensors", state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_file_of_a_later_version(folder, tmp_path):
    _changed(folder, tmp_path / "later.safetensors", lambda manifest: manifest | {"version": 9})
    with pytest.raises(CheckpointError, match=r"version 9, of quaxlike 7\.1\.0; .*Install quaxlike>=7\.1\.0"):
        safetensors.load(tmp_path / "later.safetensors", {"x": normal(2)})


def _changed(folder, path, change):
    tensors = open_tensors(folder / "weights.safetensors")
    manifest = change(json.loads(tensors.metadata["quaxlike"]) | {"quaxlike": "7.1.0"})
    arrays = {name: np.asarray(tensors[name]) for name in tensors}
    write_tensors(path, arrays, {"quaxlike": json.dumps(manifest)})


@pytest.mark.parametrize("field", [False, True])
def test_a_type_or_field_of_a_later_version(field, folder, tmp_path):
    def change(manifest):
        node = manifest["values"]["LoraArray"]
        if field:
            node["fields"]["curvature"] = {"value": 3}
        else:
            node["type"] = "CurvedArray"
        return manifest

    _changed(folder, tmp_path / "later.safetensors", change)
    what = "LoraArray: missing or unknown fields: curvature" if field else "unknown type 'CurvedArray'"
    with pytest.raises(CheckpointError, match=rf"{what}.*install quaxlike>=7\.1\.0"):
        load(tmp_path / "later.safetensors")["LoraArray"]
