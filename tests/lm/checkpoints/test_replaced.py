"""Checkpoints that are replaced, or written to, while they are open: what was opened, or an error."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import bitsandbytes, peft
from quaxlike.lm.folders import file_pair
from tests.fixtures import fixture
from tests.samples import tree_equal


def _numbered(n):
    return {"a": np.full((4, 32), n, "f4"), "b": np.full((4, 32), -n, "f4")}


def _with_another(n):
    return {"a0": np.full((4, 32), 9, "f4"), **_numbered(n)}


def _write_shards(folder, tensors):
    for name, x in tensors.items():
        write_tensors(folder / f"{name}.safetensors", {name: x}, {})
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


_WRITERS = {
    "safetensors": lambda folder, x: lm.write(folder / "model.safetensors", x),
    "bitsandbytes": lambda folder, x: lm.write(folder, x, "bitsandbytes"),
    "gguf": lambda folder, x: lm.write(folder / "model.gguf", x, "gguf"),
    "shards": _write_shards,
}


@pytest.mark.parametrize("newer", [_numbered, _with_another])
@pytest.mark.parametrize("format", _WRITERS)
def test_a_file_that_is_replaced_is_read_on(format, newer, tmp_path):
    _WRITERS[format](tmp_path, _numbered(1))
    checkpoint = lm.open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint["a"], _numbered(1)["a"])
    for n in (2, 3):  # a second one may get the inode of the first
        _WRITERS[format](tmp_path, newer(n))
        np.testing.assert_array_equal(checkpoint["a"], _numbered(1)["a"])
        np.testing.assert_array_equal(checkpoint["b"], _numbered(1)["b"])
        np.testing.assert_array_equal(checkpoint.rows("b").whole(), _numbered(1)["b"])
    np.testing.assert_array_equal(lm.read(tmp_path)["b"], newer(3)["b"])


@pytest.mark.parametrize("format", ["safetensors", "gguf", "shards"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_file_that_is_written_to_is_noticed(format, cut, tmp_path):
    """At once after it was opened, too, by a version of the same size."""
    folders = tmp_path / "old", tmp_path / "new"
    for n, folder in enumerate(folders, start=1):
        folder.mkdir()
        _WRITERS[format](folder, _numbered(n))
    checkpoint = lm.open_checkpoint(folders[0])
    for path in folders[0].iterdir():
        raw = (folders[1] / path.name).read_bytes()
        path.write_bytes(raw[:-4] if cut else raw)
    for name in ("a", "b"):
        with pytest.raises(
            CheckpointError, match=f"'{name}': .* {'cut short' if cut else 'written to'} since"
        ):
            checkpoint[name]
    if format != "gguf":
        with pytest.raises(CheckpointError, match="since its header was read; open the checkpoint again"):
            checkpoint.rows("a").part(0, 2)


@pytest.mark.parametrize("format", ["plain", "nf4"])
def test_tensors_and_configuration_are_of_one_state(format, tmp_path, monkeypatch):
    """Though they are replaced between the one and the other."""
    versions = {"plain": {"w.weight": jnp.ones((4, 64))}}
    versions["nf4"] = {"w.weight": ql.NF4Array.quantize(2 * versions["plain"]["w.weight"])}
    other = "nf4" if format == "plain" else "plain"
    lm.write(tmp_path, versions[format], "bitsandbytes", config={"version": format})
    path_of, left = file_pair.Pair.config_path, [1]

    def replaced(pair):
        if left:
            left.pop()
            lm.write(tmp_path, versions[other], "bitsandbytes", config={"version": other})
        return path_of(pair)

    monkeypatch.setattr(file_pair.Pair, "config_path", replaced)
    checkpoint = lm.open_checkpoint(tmp_path)
    assert checkpoint.config["version"] == other
    assert ("quantization_config" in checkpoint.config) == (other == "nf4")
    np.testing.assert_array_equal(*(ql.materialise(x["w.weight"]) for x in (checkpoint, versions[other])))


def test_a_checkpoint_that_is_replaced_all_the_time(tmp_path, monkeypatch):
    lm.write(tmp_path, _numbered(1), "bitsandbytes")
    path_of = file_pair.Pair.config_path

    def replaced(pair):
        lm.write(tmp_path, _numbered(2), "bitsandbytes")
        return path_of(pair)

    monkeypatch.setattr(file_pair.Pair, "config_path", replaced)
    with pytest.raises(CheckpointError, match="is replaced again and again while it is read"):
        lm.open_checkpoint(tmp_path)


@pytest.mark.slow
def test_adapters_are_of_one_state(tmp_path, monkeypatch):
    base, _ = ql.lm.load(fixture("peft_llama/base"))
    names = sorted(path.name for path in fixture("peft_llama/adapters").iterdir())[:2]
    for path in fixture(f"peft_llama/adapters/{names[0]}").iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    path_of, calls = file_pair.Pair.config_path, []

    def replaced(pair):
        calls.append(pair)
        if len(calls) == 2:  # the first one looks whether there is an adapter
            for path in fixture(f"peft_llama/adapters/{names[1]}").iterdir():
                shutil.copyfile(path, tmp_path / "new")
                os.replace(tmp_path / "new", tmp_path / path.name)
        return path_of(pair)

    monkeypatch.setattr(file_pair.Pair, "config_path", replaced)
    found = peft.load_adapter(tmp_path, base)
    monkeypatch.undo()
    assert tree_equal(found, peft.load_adapter(fixture(f"peft_llama/adapters/{names[1]}"), base))


def test_open_files_are_closed(tmp_path):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the system does not list open files")
    lm.write(tmp_path / "model.safetensors", _numbered(1))
    before = open_files()
    checkpoint = lm.open_checkpoint(tmp_path)
    weights = bitsandbytes.load(tmp_path / "model.safetensors")
    assert open_files() == before + 1
    del checkpoint
    assert open_files() == before
    assert len(weights) == 2


def test_rows_are_read_while_others_are(tmp_path):
    """Threads, each with its own place in the file."""
    tensors = {str(n): np.full((64, 64), n, "f4") for n in range(32)}
    write_tensors(tmp_path / "x.safetensors", tensors, {})
    found = open_tensors(tmp_path / "x.safetensors")
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda name: np.array_equal(found[name], tensors[name]), [*tensors] * 10))
