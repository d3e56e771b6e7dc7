"""The types of keys in GGUF files, which llama.cpp insists on, by an independent reading of the bytes."""

import struct

import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike import lm
from quaxlike.files import CheckpointError
from tests.fixtures import fixture
from tests.samples import array

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = 4, 5, 6, 7, 8, 9, 10, 11, 12


def keys_of(path):
    """The bytes of each key's value, which begin with its type."""
    raw = path.read_bytes()
    at = 24
    out = {}

    def number(form):
        nonlocal at
        at += struct.calcsize(form)
        return struct.unpack(form, raw[at - struct.calcsize(form) : at])[0]

    def text():
        nonlocal at
        length = number("<Q")
        at += length
        return raw[at - length : at]

    def value(kind):
        nonlocal at
        if kind == STRING:
            text()
        elif kind == ARRAY:
            inner, count = number("<I"), number("<Q")
            for _ in range(count):
                value(inner)
        else:
            at += _SIZES[kind]

    for _ in range(struct.unpack("<Q", raw[16:24])[0]):
        key = text().decode()
        start = at
        value(number("<I"))
        out[key] = raw[start:at]
    return out


def types_of(path):
    """The type of each key's value, and of the elements of an array."""
    kinds = {key: struct.unpack("<II", (raw + bytes(4))[:8]) for key, raw in keys_of(path).items()}
    return {key: (kind, inner) if kind == ARRAY else kind for key, (kind, inner) in kinds.items()}


def _save(path, metadata):
    lm.write(path, {"a": jnp.ones(32)}, format="gguf", metadata=metadata)
    return types_of(path)


@pytest.mark.parametrize(
    "name",
    ["gguf_tensors/floats.gguf", "gguf_whole/qwen2_q4_0.gguf", "gguf_whole/llama31_ropefreqs_f16.gguf"],
)
def test_metadata_is_written_as_it_was_read(name, tmp_path):
    """To the byte: integers of all sizes, signed or not, doubles, and arrays of them."""
    source = fixture(f"formats/{name}")
    before = keys_of(source)
    metadata = lm.open_checkpoint(source).metadata
    lm.write(tmp_path / "m.gguf", {"a": jnp.ones(32)}, format="gguf", metadata=metadata)
    after = keys_of(tmp_path / "m.gguf")
    ours = ("general.alignment", "general.file_type")
    kept = {key: raw for key, raw in before.items() if key not in ours and not key.startswith("split.")}
    assert {key: after[key] for key in kept} == kept


def test_known_keys_have_the_types_of_the_format(tmp_path):
    """Whatever the numbers of Python or NumPy are."""
    metadata = {
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [1, 6],
        "tokenizer.ggml.scores": [0, -1.5],
        "tokenizer.ggml.bos_token_id": np.int64(1),
        "tokenizer.ggml.add_bos_token": np.bool_(True),
        "llama.block_count": np.int64(2),
        "llama.attention.layer_norm_rms_epsilon": np.float64(1e-5),
        "llama.rope.freq_base": 10000,
        "gemma2.final_logit_softcapping": 30,
        "llama.rope.scaling.factor": 8,
    }
    types = _save(tmp_path / "m.gguf", metadata)
    assert types["tokenizer.ggml.tokens"] == (ARRAY, STRING)
    assert types["tokenizer.ggml.token_type"] == (ARRAY, I32)
    assert types["tokenizer.ggml.scores"] == (ARRAY, F32)
    assert types["tokenizer.ggml.bos_token_id"] == types["llama.block_count"] == U32
    assert types["tokenizer.ggml.add_bos_token"] == BOOL
    for key in ("llama.rope.freq_base", "gemma2.final_logit_softcapping", "llama.rope.scaling.factor"):
        assert types[key] == F32
    assert types["llama.attention.layer_norm_rms_epsilon"] == F32
    found = lm.open_checkpoint(tmp_path / "m.gguf").metadata
    assert found["tokenizer.ggml.token_type"] == [1, 6]
    assert found["llama.rope.freq_base"] == 10000.0


@pytest.mark.parametrize(
    "kinds", [[1, 6], (1, 6), np.array([1, 6]), np.array([1, 6], np.uint8), array([1, 6])]
)
def test_kinds_of_tokens_are_int32(kinds, tmp_path):
    key = "tokenizer.ggml.token_type"
    assert _save(tmp_path / "m.gguf", {key: kinds})[key] == (ARRAY, I32)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, U32), (-1, I32), (2**40, I64), (2**63, U64), (1.5, F32), (True, BOOL), ("a", STRING),
        (np.uint8(1), 0), (np.int16(-3), 3), (np.float64(0.1), F64), (np.uint64(1), U64), (np.True_, BOOL),
        ([1, 2], (ARRAY, I32)), ([1, 2**40], (ARRAY, I64)), ([1, 0.5], (ARRAY, F32)), ([True], (ARRAY, BOOL)),
        (np.arange(3, dtype=np.uint16), (ARRAY, 2)), (np.array([], np.float64), (ARRAY, F64)),
        (np.array(["a", "b"]), (ARRAY, STRING)), ([[1], [2, 3]], (ARRAY, ARRAY)),
        (np.ones((2, 3)), (ARRAY, ARRAY)), ([np.uint8(1), np.uint8(2)], (ARRAY, 0)),
    ],
)  # fmt: skip
def test_values_of_other_keys(value, kind, tmp_path):
    path = tmp_path / "m.gguf"
    assert _save(path, {"own.key": value})["own.key"] == kind
    before = keys_of(path)["own.key"]
    _save(path, {"own.key": lm.open_checkpoint(path).metadata["own.key"]})
    assert keys_of(path)["own.key"] == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 2.5, "uint32 has no place for 2.5"),
        ("llama.block_count", -1, "uint32 has no place for -1"),
        ("llama.rope.freq_base", 1e300, "float32 has no place for 1e"),
        ("tokenizer.ggml.token_type", [1, 2**40], r"int32 has no place for \[1, 1099511627776\]"),
        ("own.key", [1, "a"], "must be of one type; found int, str"),
        ("own.key", [], "must be of one type; found none"),
        ("own.key", np.float16(1), "GGUF has no type for float16"),
        ("own.key", 2**70, "cannot be written"),
    ],
)
def test_values_that_do_not_fit_are_refused(key, value, message, tmp_path):
    with pytest.raises(CheckpointError, match=f"'{key}': cannot be written: .*{message}|{message}"):
        _save(tmp_path / "m.gguf", {key: value})
    assert not list(tmp_path.iterdir())


def test_the_gguf_package_reads_the_same(tmp_path):
    gguf = pytest.importorskip("gguf")
    metadata = {
        "tokenizer.ggml.tokens": ["a", "é"],
        "tokenizer.ggml.token_type": [1, 6],
        "own.key": np.int8(-2),
    }
    _save(tmp_path / "m.gguf", metadata)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert {key: fields[key] for key in metadata} == metadata
    kinds = reader.fields["tokenizer.ggml.token_type"].types
    assert [kind.name for kind in kinds] == ["ARRAY", "INT32"]
