"""Files that this and earlier releases wrote are read."""

import contextlib
import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.arrays.gradients import GradientsArray
from quaxlike.files import CheckpointError, safetensors
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import peft
from quaxlike.lm.finetune.options import options, settings_of
from quaxlike.lm.finetune.settings import FinetuneError
from quaxlike.lm.finetune.state import RunDirectory
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights", "corners"])
def test_arrays_of_every_type(folder, name):
    expected = np.load(folder / f"{name}.npz")
    found = lm.read(folder / f"{name}.safetensors")
    assert set(found) == set(expected)
    for key, x in found.items():
        _equal(x, expected[key])


def test_what_is_trained(folder):
    found = {**lm.read(folder / "weights.safetensors"), **lm.read(folder / "corners.safetensors")}
    trained = {"LoraArray, trained base", "NF4Array, trained scales", "Int8Array, trained scales"}
    marked = {key: x.gradients for key, x in found.items() if isinstance(x, GradientsArray)}
    own = {key for key, x in found.items() if isinstance(x, ql.TrainableArray)}
    assert {key for key, mark in marked.items() if mark == "train"} == trained | own
    assert "pass" not in marked.values()


@pytest.mark.slow
def test_pickled_types(folder):
    expected = np.load(folder / "weights.npz")
    found = pickle.loads((folder / "weights.pickle").read_bytes())
    dense = jax.jit(lambda found: jax.tree.map(ql.materialise, found, is_leaf=ql.is_value))(found)
    for key, x in dense.items():
        _equal(x, expected[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", written.FORMATS)
def test_published_formats(folder, name):
    (x,) = lm.read(folder / name / written.FORMATS[name][0]).values()
    np.testing.assert_array_equal(x.materialise(), np.load(folder / name / "x.npy"))


@pytest.mark.slow
def test_adapters(folder):
    model = written.linear()
    base = {name: w.w for name, w in model.items()}
    for again in (safetensors.load_adapters(folder / "adapters.safetensors", base),
                  peft.load_adapter(folder / "peft", base)):  # fmt: skip
        for name, w in model.items():
            np.testing.assert_allclose(again[name].materialise(), w.materialise(), rtol=1e-6)


def _same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimiser", "quantised-optimiser"])
def test_states_of_optimisers(name, folder):
    state = written.quantised_state() if name.startswith("quantised") else written.optimiser_state()
    _same(safetensors.load(folder / f"{name}.safetensors", state), state)


@pytest.fixture
def run_of(folder, tmp_path):
    """A copy of the run, on the paths that its model and data have here; and its settings, whatever the
    defaults are today."""
    about = json.loads((folder / "run" / "run.json").read_text())
    names = {option.name for option in options()}
    given = {k: tuple(x) if isinstance(x, list) else x for k, x in about.items() if k in names}
    file, output = folder / "mxfp4" / "config.json", tmp_path / "run"
    shutil.copytree(folder / "run", output)

    def change(options=(), **more):
        about = output / "run.json"
        paths = {"model": str(file.resolve()), "data": str(file.resolve())}
        about.write_text(json.dumps(json.loads(about.read_text()) | paths | more))
        return settings_of(**({**given, "model": file, "data": file, "output": output} | dict(options)))

    return change


def _zeros(x):
    """With what the settings of a run determine."""
    out = jax.tree.map(jnp.zeros_like, x)
    return out.replace(alpha=x.alpha) if isinstance(x, ql.LoraArray) else out


@pytest.mark.slow
def test_runs_are_resumed(run_of):
    state = {"adapters": written.linear(), "optimiser": written.quantised_state()}
    with contextlib.closing(RunDirectory(run_of())) as run:
        step, found = run.restore(jax.tree.map(_zeros, state, is_leaf=ql.is_value))
        assert (step, [entry["loss"] for entry in run.entries()]) == (2, [1.5, 1.25])
    _same(found, state)


def test_the_settings_of_a_run_keep_their_order(folder, run_of):
    written_then = list(json.loads((folder / "run" / "run.json").read_text()))
    names = {*written_then, "model", "data"}
    written_now = ["quaxlike", *(name for name in run_of().fingerprint() if name in names)]
    assert written_now == ["quaxlike", "model", "data", *written_then[1:]]


def test_runs_of_other_versions(run_of):
    settings = run_of()
    about = settings.run.output / "run.json"
    older = {name: x for name, x in json.loads(about.read_text()).items() if name not in ("pack", "quaxlike")}
    about.write_text(json.dumps(older))
    RunDirectory(settings).close()  # the setting has its default in both
    with pytest.raises(FinetuneError, match=r"is from a run with pack False \(now True\)"):
        RunDirectory(run_of({"pack": True}))
    run_of(quaxlike="7.1.0", curvature=3)
    with pytest.raises(
        FinetuneError, match=r"of quaxlike 7\.1\.0, with settings .* curvature\. Install quaxlike>=7\.1"
    ):
        RunDirectory(settings)


@pytest.mark.slow
def test_orbax(folder):
    ocp = pytest.importorskip("orbax.checkpoint")
    state = written.for_orbax()
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.StandardCheckpointer() as checkpointer:
        _same(checkpointer.restore((folder / "orbax").resolve(), like), state)


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
        lm.read(tmp_path / "later.safetensors")["LoraArray"]
