"""The container: what it holds is read exactly, what is wrong with it is named, nothing else is raised."""

import contextlib
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import bitsandbytes
from tests.fixtures import fixture


def _file(tmp_path, header, data=b"", length=None):
    """A file whose header is told to be of this length: by default its own, with -1 not at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    start = b"" if length == -1 else (len(text) if length is None else length).to_bytes(8, "little")
    path.write_bytes(start + text + data)
    return path


def _entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.quick(21)
@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({}, b"", 10**18, r"is not a safetensors file: it begins with b'\\x00\\x00d"),
        ({}, b"", 3, r"is cut off: its header takes 3 bytes, and 2 are there"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", b"", -1, r"is a pointer of Git LFS"),
        (
            b"a text, which is no such file",
            b"",
            -1,
            r"is not a safetensors file: it begins with b'a text, wh",
        ),
        (b"{]", b"", None, r"the header is not JSON"),
        (b"\xff\xfe", b"", None, r"the header is not JSON"),
        (b"[" * 100_000, b"", None, r"the header is not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", b"", None, r"the header is not JSON: Exceeds the limit"),
        ([], b"", None, r"the header is not JSON: it must begin with '{'"),
        (b' {"a": 3}', b"", None, r"the header is not JSON: it must begin with '{'"),
        (b'{"\\ud800": 3}', b"", None, r"the header is not JSON.*surrogates"),
        (b'{"__metadata__": {"a": "\\ud800"}}', b"", None, r"the header is not JSON.*surrogates"),
        (b'{"a": [' + b"[]," * 5_000 + b"[]]}", b"", None, r"'a': expected dtype, shape and data_offsets"),
        (b'{"a": {"shape": [' + b"[]," * 5_000 + b"[]]}}", b"", None, r"'a': expected dtype, shape and data"),
        (b'{"a": [' + b"[]," * 50_000 + b"[]]}", b"", None, r"50,003 lists and objects are too many for"),
        (b"{} 1", b"", None, r"the header is not JSON: Extra data"),
        (b'{"a": {}, "a": {}}', b"", None, r"the header is not JSON: a name appears twice"),
        ({"__metadata__": {"a": 1}}, b"", None, r"'__metadata__': must map names to text"),
        ({"a": 3}, b"", None, r"'a': expected dtype, shape and data_offsets, found 3"),
        ({"a": _entry("F31")}, b"abcd", None, r"'a': unknown dtype 'F31'"),
        ({"a": _entry(shape=[-4])}, b"abcd", None, r"'a': the shape must be a list of sizes"),
        ({"a": _entry(shape=[True])}, b"abcd", None, r"'a': the shape must be a list of sizes"),
        ({"a": _entry(shape=[2**62, 2**62])}, b"abcd", None, r"'a': the shape must be a list of sizes"),
        ({"a": _entry(shape=[0, 2**62, 2**62])}, b"", None, r"'a': the shape must be a list of sizes"),
        ({"a": _entry(shape=[1] * 65)}, b"abcd", None, r"'a': the shape must be a list of sizes"),
        ({"a": _entry(shape=[2**40] * 40_000)}, b"abcd", None, r"'a': the shape must be a list of sizes"),
        ({"a": _entry(shape=[5])}, b"abcd", None, r"'a': U8 of shape \[5\] takes 5 bytes, found 4"),
        (
            {"a": _entry()},
            b"abc",
            None,
            r"'a': the file is cut off: this ends at byte 72, and 71 bytes are there",
        ),
        ({"a": _entry(offsets=[4, 0])}, b"abcd", None, r"'a': data_offsets must be a first and a last byte"),
        ({"a": _entry()}, b"abcde", None, r"1 bytes after the last tensor belong to none"),
        ({"a": _entry(), "b": _entry(offsets=[2, 6])}, b"abcdef", None, r"'b': begins at byte"),
        ({"a": _entry(offsets=[1, 5])}, b"abcde", None, r"'a': begins at byte"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, header, data, length, message):
    path = _file(tmp_path, header, data, length)
    with pytest.raises(CheckpointError, match=message) as error:
        open_tensors(path)
    assert str(path) in str(error.value)


def test_empty_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a safetensors file: it begins with b''"):
        open_tensors(path)


_DTYPES = ["bool", "int8", "uint16", "int32", "uint64", "float16", "float64", "complex64"]


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text("ab.ü日", min_size=1, max_size=5),
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_written_as_the_reference_implementation_does(tmp_path, about):
    tensors = {name: np.ones(shape, dtype) for name, (dtype, shape) in about.items()}
    write_tensors(tmp_path / "ours.safetensors", tensors, {"format": "pt"})
    safetensors.numpy.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    ours = (tmp_path / "ours.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()
    read = open_tensors(tmp_path / "ours.safetensors")
    for name, array in tensors.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)


def test_low_precision_dtypes(tmp_path):
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        write_tensors(tmp_path / "x.safetensors", {"x": np.ones(3, dtype)}, {})
        assert open_tensors(tmp_path / "x.safetensors")["x"].dtype == dtype


def test_a_name_that_the_format_keeps(tmp_path):
    with pytest.raises(CheckpointError, match="'__metadata__': the format keeps this name for itself"):
        write_tensors(tmp_path / "x.safetensors", {"__metadata__": np.ones(3)}, {})
    assert not any(tmp_path.iterdir())


def test_saving_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": np.ones(3)}, {})
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(path, {"x": np.zeros(3)}, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


_SOURCES = ["nested_bias", "rowcross_40x24", "fp4_not_nf4", "storage_bf16", "odd_33x7"]


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(_SOURCES), st.data())
def test_mutated_checkpoints_raise_our_errors_alone(tmp_path, source, data):
    """Bytes of real files are changed, cut out, doubled, or replaced by parts that often matter."""
    content = bytearray(fixture(f"linear4bit/{source}.safetensors").read_bytes())
    header = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        # Mostly in the header and in the JSON at the end: elsewhere any bytes are codes or scales.
        at = data.draw(
            st.one_of(
                st.integers(0, min(header + 8, len(content) - 1)),
                st.integers(max(0, len(content) - 180), len(content) - 1),
            )
        )
        match data.draw(st.sampled_from(["flip", "digit", "cut", "insert", "truncate", "swap"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "digit":
                content[at] = data.draw(st.sampled_from(b'0123456789-.eE"{}[]:,ntf \\'))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 20))]
            case "insert":
                token = data.draw(st.sampled_from([b"null", b"-1", b"1e999", b"[[", b'"', b"\x00", b"NaN"]))
                content[at:at] = token
            case "truncate":
                del content[at:]
            case "swap":
                old, new = data.draw(
                    st.sampled_from(
                        [
                            (b"F32", b"I64"),
                            (b"U8", b"I8"),
                            (b"64", b"65"),
                            (b"weight", b"height"),
                            (b"nf4", b"fp4"),
                            (b"absmax", b"absmin"),
                            (b'"shape"', b'"dtype"'),
                            (b"float32", b"float64"),
                        ]
                    )
                )
                content = bytearray(bytes(content).replace(old, new))
        if not content:
            break
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(bytes(content))
    with contextlib.suppress(CheckpointError):
        bitsandbytes.save(tmp_path / "copy.safetensors", bitsandbytes.load(path))


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=8), x),
    )
)
def test_any_json_as_an_index_raises_our_errors_alone(tmp_path, content):
    shutil.copy(fixture("linear4bit/odd_33x7.safetensors"), tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for tree in (content, {"weight_map": content}, {"weight_map": {"weight": content}}):
        index.write_text(json.dumps(tree))
        with pytest.raises(CheckpointError):
            bitsandbytes.load(index)


@pytest.mark.parametrize("name", ["x" * 5000, "ü" * 200, "\ud800"])
def test_names_of_shards_that_no_file_has(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    problem = "'w': the file must be a plain name beside the index, found .{,90}$"
    with pytest.raises(CheckpointError, match=problem):
        open_tensors(index)
