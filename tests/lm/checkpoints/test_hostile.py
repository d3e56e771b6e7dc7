"""Files that are made to mislead: the library's own errors, soon, and no memory beyond the file."""

import contextlib
import json
import os
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError, safetensors
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import UnsupportedConfigError, bitsandbytes, peft
from quaxlike.lm.folders.companions import named_ends
from quaxlike.lm.models import DecoderConfig
from quaxlike.lm.text import TextTokenizer
from tests.fixtures import fixture
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


@pytest.mark.slow
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
    """With exponentially many steps this would never end."""
    folder, model = adapter(**entries)
    with contextlib.suppress(CheckpointError):
        peft.load_adapter(folder, model)


@pytest.mark.parametrize("pattern", ["(", "a{999999999999}", r"(a)\1"])
@pytest.mark.parametrize("entry", ["target_modules", "exclude_modules", "layers_pattern"])
def test_expressions_that_are_none(entry, pattern, adapter):
    with pytest.raises(CheckpointError, match=rf"'{entry}': expected"):
        peft.load_adapter(*adapter(**{entry: pattern}))


def test_layers_pattern(adapter):
    folder, model = adapter(layers_pattern=["l(aye)rs"], layers_to_transform=[1], target_modules=["0"])
    with pytest.raises(CheckpointError, match="is not expected: target_modules does not name this layer"):
        peft.load_adapter(folder, model)


@pytest.mark.parametrize("read", [lm.read, bitsandbytes.load, open_tensors])
@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json"])
def test_a_pipe_is_no_file(read, name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="is not a regular file"):
        read(tmp_path / name)


def test_a_configuration_of_empty_lists(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(b'{"r": [' + b"[]," * 100_000 + b"[]]}")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match="are too many for"):
        peft.load_adapter(tmp_path, {})


@pytest.mark.slow
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
            lm.open_checkpoint(tmp_path / "x.safetensors")
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
        lm.read(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        *(("rope_theta", theta, "rope_theta") for theta in (10**400, float("nan"), "10000", [], -1.0)),
        ("rope_scaling", 0.5, "rope_parameters=0.5"),
        ("rope_scaling", {"full_attention": 5}, "an object for each kind of attention"),
        ("rope_scaling", {"rope_type": "linear"}, "no 'factor' among its rope settings"),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}, "cannot compute with"),
        (
            "rope_scaling",
            {"rope_type": "longrope", "short_factor": 5, "long_factor": 5},
            "4 factors|short_factor=5",
        ),
        ("partial_rotary_factor", 1e300, "a share above 0, and up to 1"),
        ("architectures", 5, "names no architecture of a decoder"),
        ("architectures", [[]], "names no architecture of a decoder"),
        ("layer_types", 5, "layer_types=5"),
        ("layer_types", [[]], "layer_types="),
        ("sliding_window_pattern", "2", "sliding_window_pattern='2'"),
    ],
)
def test_configurations_of_decoders(entry, value, message):
    config = {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "sliding_window": 4,
    }  # fmt: skip
    DecoderConfig.from_json(config)
    with pytest.raises(UnsupportedConfigError, match=message):
        DecoderConfig.from_json(config | {entry: value})


@pytest.mark.slow
def test_tokenisers_that_panic(tmp_path):
    """The package is written in Rust, and its panics are no Exceptions."""
    described = json.loads((fixture("models/chat/gemma") / "tokenizer.json").read_text())
    described["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: (the tokeniser is damaged|is not a tokeniser)"
    ):
        TextTokenizer(tmp_path).encode("hello")


@pytest.mark.parametrize("ends", ["2", [[2]], [True], -1])
def test_ends_that_are_no_tokens(ends, tmp_path):
    with pytest.raises(CheckpointError, match="expected the numbers of tokens"):
        named_ends(tmp_path, {"eos_token_id": ends})


@pytest.mark.parametrize("value", [1e300, "\ud800", object()])
def test_metadata_that_gguf_has_no_place_for(value, tmp_path):
    with pytest.raises(CheckpointError, match="'key': cannot be written"):
        lm.write(tmp_path / "x.gguf", {"a": jnp.ones(32)}, "gguf", metadata={"key": value})
    assert not list(tmp_path.iterdir())


def test_a_kind_of_tokeniser_that_is_no_text(tmp_path):
    keys = {"model": "gpt2", "pre": [1], "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    lm.write(tmp_path / "x.gguf", {"a": jnp.ones(32)}, "gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"'tokenizer.ggml.pre': .* can be read; found \[1\]"):
        lm.read_tokenizer(tmp_path / "x.gguf")
