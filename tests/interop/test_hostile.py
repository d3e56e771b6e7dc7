"""Files that are made to mislead: the library's own errors, soon, and no memory beyond the file."""

import contextlib
import json
import os
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import interop
from quaxlike.interop import CheckpointError, bitsandbytes, peft, safetensors
from quaxlike.interop.tensors import open_tensors, write_tensors
from tests.samples import wrong_types


@pytest.fixture
def adapter(tmp_path):
    """Writes an adapter with other entries in its configuration; gives its folder and the model."""
    mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
    peft.save_adapter(tmp_path, ql.loraify(mlp, rank=2, where=["layers.0"], key=jax.random.key(1)))
    path = tmp_path / "adapter_config.json"

    def with_entries(**entries):
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
        return tmp_path, {"a" * 60: mlp, "layers": mlp.layers}

    return with_entries


@pytest.mark.parametrize(
    "entries",
    [
        {"target_modules": "(.*)*!"},
        {"exclude_modules": "(.*)*!"},
        {"modules_to_save": ["(.*)*!"]},
        {"rank_pattern": {"(.*)*!": 3}, "alpha_pattern": {"(.*)*!": 3}},
        {"layers_pattern": "(.*)*!", "layers_to_transform": [0]},
    ],
)
def test_expressions_that_backtrack(entries, adapter):
    folder, model = adapter(**entries)
    start = time.perf_counter()
    with contextlib.suppress(CheckpointError):
        peft.load_adapter(folder, model)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("pattern", ["(", "a{999999999999}", r"(a)\1", "(a{99}){99}"])
@pytest.mark.parametrize("entry", ["target_modules", "exclude_modules", "layers_pattern"])
def test_expressions_that_are_none(entry, pattern, adapter):
    with pytest.raises(CheckpointError, match=rf"'{entry}': expected"):
        peft.load_adapter(*adapter(**{entry: pattern}))


def test_layers_pattern(adapter):
    folder, model = adapter(layers_pattern=["l(aye)rs"], layers_to_transform=[1], target_modules=["0"])
    with pytest.raises(CheckpointError, match="is not expected: target_modules does not name this layer"):
        peft.load_adapter(folder, model)


@pytest.mark.parametrize("read", [interop.load, bitsandbytes.load, open_tensors])
@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json"])
def test_a_pipe_is_no_file(read, name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="is no regular file"):
        read(tmp_path / name)


def test_a_configuration_of_empty_lists(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(b'{"r": [' + b"[]," * 100_000 + b"[]]}")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match="are too many for"):
        peft.load_adapter(tmp_path, {})


def test_many_tensors_take_linear_time(tmp_path):
    def calls(n):
        write_tensors(tmp_path / "x.safetensors", {f"t{i}": np.zeros(1, np.uint8) for i in range(n)}, {})
        count = 0

        def note(*_):
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            interop.open_checkpoint(tmp_path / "x.safetensors")
            bitsandbytes.open_checkpoint(tmp_path / "x.safetensors")
        finally:
            sys.setprofile(before)
        return count

    calls(1)  # what is done once
    assert calls(4_000) < 11 * calls(400)


def test_halves_of_pairs_of_surrogates(tmp_path):
    with pytest.raises(CheckpointError, match="is not Unicode"):
        safetensors.save(tmp_path / "x.safetensors", {"\ud800": jnp.ones(1)})
    assert not list(tmp_path.iterdir())


@wrong_types  # the check of annotations reads the tensors itself
def test_bools_of_other_bytes(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"a": np.ones(3, bool)}, {})
    raw = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(raw[:-1] + b"\2")
    with pytest.raises(CheckpointError, match="'a': has bytes other than 0 and 1"):
        interop.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("theta", [10**400, float("nan"), "10000", [], -1.0])
def test_rotations_of_other_numbers(theta):
    from quaxlike.models import DecoderConfig, UnsupportedConfigError

    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": theta,
    }  # fmt: skip
    with pytest.raises(UnsupportedConfigError, match="rope_theta"):
        DecoderConfig.from_json(config)
