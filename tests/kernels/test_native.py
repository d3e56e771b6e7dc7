"""The native products of CPUs: values, derivatives and transforms; formats they take; how they are built."""

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike import _cache, kernels
from quaxlike.arrays.quantized import CODECS
from quaxlike.kernels import native, nf4_matmul
from quaxlike.kernels.dense_matmul import dense_matmul, stacked_matmul
from quaxlike.kernels.native import __main__ as command
from quaxlike.kernels.native import library
from tests.samples import normal, use_cache

from .weights import relative_error, stored

_TYPES = {"nf4": ql.NF4Array, "fp4": ql.FP4Array, "int4": ql.Int4Array, "int8": ql.Int8Array}


def _quantised(name, x):
    if name == "nested":
        return ql.NF4Array.quantize(x, double_quant=True)
    return _TYPES[name].quantize(x) if name in _TYPES else ql.BlockArray.quantize(x, codec=name)


def _times(w, transpose=False):
    return ql.quaxify(lambda x, w: x @ (w if transpose else w.T)), w


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """No library in this process, and an empty cache."""
    monkeypatch.delenv("QUAXLIKE_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    use_cache(monkeypatch, tmp_path)
    library.library.cache_clear()
    yield tmp_path / "quaxlike" / "native"
    library.library.cache_clear()


@pytest.fixture(scope="module")
def built():
    """The library, compiled in the user's cache if it is not there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("QUAXLIKE_NATIVE", raising=False)
        library.library.cache_clear()
        try:
            path = native.build().path
        except native.NativeError as error:
            pytest.skip(str(error).partition("\n")[0])
        yield path
    library.library.cache_clear()


@pytest.fixture
def use_native(built):
    with kernels.backend("native"):
        assert isinstance(library.library(), library.Library)
        yield


def _dense(w):
    return np.float64(ql.materialise(w).astype(jnp.float32))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(24, 256), (37, 288), (21, 320), (6, 100)])
@pytest.mark.parametrize("name", [*CODECS, "nested"])
def test_products_of_all_formats(use_native, name, shape):
    if shape == (6, 100) and name in ("nf4", "fp4", "int4", "nested"):
        shape = 6, 112  # blocks of 64 cross rows, in parts of 16 codes
    for dtype, limit in ((jnp.float32, 2e-6), (jnp.bfloat16, 6e-3)):
        w = _quantised(name, normal(*shape, dtype=dtype))
        for transpose in (False, True):
            fn, dense = jax.jit(_times(w, transpose)[0]), _dense(w)
            for rows in (1, 3, 17):
                x = normal(rows, shape[0] if transpose else shape[1], dtype=dtype, seed=rows)
                expected = np.float64(x) @ (dense if transpose else dense.T)
                assert relative_error(fn(x, w), expected) < limit


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "of_sum", "of_result"), [("float32", 2e-6, 0), ("bfloat16", 2e-5, 2**-8)])
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "int8", "uint4_block", "mxfp4", "nf4"])
def test_inputs_of_very_different_sizes(use_native, name, dtype, of_sum, of_result):
    """Of a row that is written in digits, an error is small beside the sum, not beside each input."""
    w = _quantised(name, normal(40, 512, dtype=dtype))
    times, unrounded = jax.jit(_times(w)[0]), ql.quaxify(lambda w: w.astype(jnp.float32))
    dense = _dense(unrounded(w))
    sizes = np.float32(10.0) ** np.random.default_rng(0).integers(-9, 9, 512)
    for x in (normal(512) * sizes, jnp.zeros(512), normal(512) * 1e-30, jnp.eye(512)[77], normal(512) * 1e20):
        x = x.astype(dtype)
        expected, summed = np.float64(x) @ dense.T, np.sum(np.abs(np.float64(x))) * np.abs(dense).max(1)
        errors = np.abs(np.float64(times(x, w)) - expected)
        assert np.all(errors <= of_sum * summed + of_result * np.abs(expected))
    for special in (jnp.nan, jnp.inf):
        x = normal(512, dtype=dtype).at[77].set(special)
        expected = jnp.asarray(dense, dtype) @ x
        np.testing.assert_array_equal(np.isfinite(times(x, w)), np.isfinite(expected))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 4, 5, 8, 16])
@pytest.mark.parametrize("name", ["nf4", "q4_0", "q6_k", "int8", "fp8"])
def test_some_rows_in_bfloat16(use_native, name, rows):
    for columns in (256, 96 if name in ("nf4", "q4_0", "int8") else 512):
        w = _quantised(name, normal(37, columns, dtype=jnp.bfloat16))
        x = normal(rows, columns, dtype=jnp.bfloat16, seed=1)
        with kernels.backend("reference"):
            expected = _times(w)[0](x, w)
        assert relative_error(jax.jit(_times(w)[0])(x, w), np.float64(expected)) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(), (3,), (40,)])
@pytest.mark.parametrize("name", ["nf4", "nested", "int8", "uint4_block", "q4_0", "q4_k", "q6_k", "nvfp4"])
def test_derivatives_and_transforms(use_native, name, rows):
    w, x = _quantised(name, normal(48, 256)), normal(*rows, 256, seed=1)
    dense, times = _dense(w), _times(w)[0]
    loss = lambda x: jnp.sum(times(x, w) ** 2)
    y, dx = np.float64(x) @ dense.T, 2 * np.float64(x) @ dense.T @ dense
    with ql.on_materialise("error"):
        assert relative_error(jax.jit(jax.grad(loss))(x), dx) < 1e-5
        assert relative_error(jax.jvp(lambda x: times(x, w), (x,), (x,))[1], y) < 1e-5
        checkpointed = jax.grad(jax.checkpoint(loss))
        assert relative_error(checkpointed(x), dx) < 1e-5
        batch = jnp.stack([x, -x])
        assert relative_error(jax.vmap(lambda x: times(x, w))(batch), [y, -y]) < 1e-5
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
        assert relative_error(jax.vmap(times, (None, 0))(x, stack), [y, y]) < 1e-5
        squared = lambda carry, w: (carry, times(carry, w))
        assert relative_error(jax.jit(lambda x: lax.scan(squared, x, stack)[1])(x), [y, y]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "int8", "q4_0", "uint4_block"])
def test_trained_scales_and_adapters(use_native, name):
    w, x = _quantised(name, normal(48, 256)), normal(3, 256, seed=1)
    w = ql.train_scales(ql.LoraArray(w, normal(4, 256, seed=2), normal(48, 4, seed=3), alpha=8))
    loss = lambda w: jnp.sum(ql.quaxify(lambda x, w: x @ w.T)(x, w) ** 2)
    gradient = jax.tree.leaves(jax.grad(loss, allow_int=True)(w))
    with kernels.backend("reference"):
        expected = jax.tree.leaves(jax.grad(loss, allow_int=True)(w))
    trained = jax.tree.leaves(ql.trainable(w))
    pairs = [(g, e) for g, e, flag in zip(gradient, expected, trained, strict=True) if flag]
    assert len(pairs) >= 3
    for g, e in pairs:
        assert float(jnp.linalg.norm(e)) > 0
        assert relative_error(g, e) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 128])
def test_each_device_runs_it(use_native, rows):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, w, x = jax.P("rows"), stored("nf4", 128, 256), normal(rows, 256)
    fn = lambda x: nf4_matmul(x, *w.leaves, **w.params)
    for times in (fn, jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)):
        y = jax.jit(times)(jax.device_put(x, jax.NamedSharding(mesh, spec)))
        assert y.sharding.spec[0] == "rows"
        assert relative_error(y, np.float64(x) @ w.dense.T) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(), (2, 3), (40,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_weights(use_native, rows, dtype):
    """Forward, backward and batched; more rows of `x` are left to Eigen."""
    dense = np.where(np.random.default_rng(0).random((37, 64)) < 0.1, normal(37, 64), 0)
    w = ql.SparseArray.from_dense(jnp.asarray(dense, dtype))
    x, times = normal(*rows, 64, seed=1, dtype=dtype), ql.quaxify(lambda w, x: x @ w.T)
    exact, limit = np.float64(ql.materialise(w).astype("float32")), 1e-6 if dtype == "float32" else 1e-2
    y, d_x = np.float64(x) @ exact.T, 2 * np.float64(x) @ exact.T @ exact
    loss = lambda data, x: jnp.sum(times(w.replace(data=data), x).astype("float32") ** 2)
    few = "quaxlike_csr_multiply" in jax.jit(times).lower(w, x).as_text()
    assert few == (rows != (40,))
    assert relative_error(jax.jit(times)(w, x), y) < limit
    data, found = jax.jit(jax.grad(loss, (0, 1)))(w.data, x)
    assert relative_error(found, d_x) < limit
    d_dense = 2 * y.reshape(-1, 37).T @ np.float64(x).reshape(-1, 64)
    assert relative_error(ql.materialise(w.replace(data=data)), np.where(dense, d_dense, 0)) < limit
    batch = jnp.stack([x, -x])
    assert relative_error(jax.vmap(times, (None, 0))(w, batch), [y, -y]) < limit


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(24, 256), (37, 100), (1, 7)])
@pytest.mark.parametrize("rows", [(), (2,), (2, 2), (7,), (16,), (40,)])
def test_dense_weights(use_native, rows, shape, dtype):
    """Forward, backward and batched; more rows of `x` are left to XLA."""
    w, x = normal(*shape, dtype=dtype), normal(*rows, shape[1], dtype=dtype, seed=1)
    w = jnp.abs(w) + 1  # no sum is the small difference of large ones
    x, exact, limit = jnp.abs(x), np.float64(w), 1e-6 if dtype == "float32" else 1e-2
    y, count = np.float64(x) @ exact.T, math.prod(rows)
    few = "quaxlike_multiply_dense" in jax.jit(dense_matmul).lower(x, w).as_text()
    assert few == (count <= (16 if dtype == "float32" else 8))
    assert relative_error(jax.jit(dense_matmul)(x, w), y) < limit
    batch = jnp.stack([x, 2 * x])
    assert relative_error(jax.vmap(dense_matmul, (0, None))(batch, w), [y, 2 * y]) < limit
    assert relative_error(lax.map(lambda x: dense_matmul(x, w), batch), [y, 2 * y]) < limit
    loss = lambda x, w: jnp.sum(dense_matmul(x, w).astype(jnp.float32))
    of_x, of_w = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert relative_error(of_x, np.broadcast_to(exact.sum(0), x.shape)) < limit
    assert relative_error(of_w, np.broadcast_to(np.float64(x).reshape(-1, shape[1]).sum(0), w.shape)) < limit


@pytest.mark.slow
def test_dense_weights_elsewhere(use_native):
    """A program that XLA divides between devices, or that is exported, calls no native product."""
    w, x = normal(128, 256), normal(8, 256, seed=1)
    calls = lambda program: "quaxlike_multiply_dense" in program
    assert calls(jax.jit(dense_matmul).lower(x, w).as_text())
    with kernels.backend("reference"):
        assert not calls(jax.jit(dense_matmul).lower(x, w).as_text())
    assert not calls(jax.export.export(jax.jit(dense_matmul))(x, w).mlir_module())
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(w, jax.NamedSharding(mesh, jax.P("rows")))
    whole = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
    divided = jax.jit(dense_matmul).lower(whole, spread).compile()
    assert not calls(divided.as_text())
    assert divided(whole, spread).sharding.spec[1] == "rows"
    specs = {"in_specs": (jax.P(), jax.P("rows")), "out_specs": jax.P(None, "rows")}
    lowered = jax.jit(jax.shard_map(dense_matmul, mesh=mesh, **specs)).lower(whole, spread)
    assert calls(lowered.as_text())
    for y in (divided(whole, spread), lowered.compile()(whole, spread)):
        assert relative_error(y, np.float64(x) @ np.float64(w).T) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 1, 64, 80), (12, 4, 80, 64), (1, 2, 7, 300), (2, 1, 0, 5)])
def test_stacked_products(use_native, shape, dtype):
    """Forward, backward and batched, as with the keys and values of heads."""
    stack, m, k, n = shape
    x, w = (
        jnp.abs(normal(stack, m, k, dtype=dtype)) + 1,
        jnp.abs(normal(stack, k, n, dtype=dtype, seed=1)) + 1,
    )
    exact = np.float64(x) @ np.float64(w)
    run = jax.jit(stacked_matmul)
    assert "quaxlike_multiply_stacked" in run.lower(x, w).as_text()
    assert run(x, w).dtype == jnp.float32
    assert relative_error(run(x, w), exact) < 1e-6
    limit = 1e-6 if dtype == "float32" else 1e-2
    both, times = jnp.stack([x, 2 * x]), jax.jit(jax.vmap(stacked_matmul, (0, None)))
    assert relative_error(times(both, w), [exact, 2 * exact]) < 1e-6
    times = jax.jit(jax.vmap(stacked_matmul, (1, 2)))
    found = times(jnp.moveaxis(both, 0, 1), jnp.stack([w, w], 2))
    assert relative_error(found, [exact, 2 * exact]) < 1e-6
    assert (
        "quaxlike_multiply_stacked" in times.lower(jnp.moveaxis(both, 0, 1), jnp.stack([w, w], 2)).as_text()
    )
    loss = lambda x, w: jnp.sum(stacked_matmul(x, w))
    of_x, of_w = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert relative_error(of_x, np.broadcast_to(np.float64(w).sum(2)[:, None], x.shape)) < limit
    assert relative_error(of_w, np.broadcast_to(np.float64(x).sum(1)[..., None], w.shape)) < limit
    with kernels.backend("reference"):
        assert "quaxlike_multiply_stacked" not in jax.jit(stacked_matmul).lower(x, w).as_text()
        assert relative_error(jax.jit(stacked_matmul)(x, w), exact) < 1e-6


def _choice(w, x):
    (note,) = [note for row in ql.explain(_times(w)[0])(x, w).rules for note in row.notes]
    return note


@pytest.mark.slow
def test_explain_names_it_and_why_not(built):
    x, many = normal(3, 256), normal(17, 256)
    note = _choice(_quantised("nf4", x), x)
    assert note.startswith("nf4_matmul on native: codes are multiplied as they are unpacked, by ")
    assert "on native: codes are decoded in tiles" in _choice(_quantised("q4_k", x), many)
    half = x.astype(jnp.float16)
    assert "take x in float32 or bfloat16, not float16" in _choice(_quantised("nf4", half), half)
    short = ql.BlockArray.quantize(x, codec="int4_block", block_size=24)
    assert "on reference: native products take blocks of multiples of 16" in _choice(short, x)
    odd = normal(4, 33)
    assert "rows of 33 codes of 4 bits begin within bytes" in _choice(_quantised("nf4", odd), odd)


@pytest.mark.slow
def test_it_is_used_unasked_but_not_exported(built):
    w, x = _quantised("nf4", normal(48, 256)), normal(3, 256)
    fn = jax.jit(lambda x: _times(w)[0](x, w))
    assert "quaxlike_multiply" in fn.lower(x).as_text()
    exported = jax.export.export(fn)(x)
    assert "quaxlike_multiply" not in exported.mlir_module()
    assert relative_error(exported.call(x), fn(x)) < 1e-6


def test_another_platform_has_none():
    operands = (jax.ShapeDtypeStruct((2, 64), jnp.float32), *stored("nf4", 48, 64).leaves)
    fn = lambda x: nf4_matmul(x, *operands[1:], **stored("nf4", 48, 64).params)
    with kernels.backend("native"), pytest.warns(kernels.KernelFallbackWarning, match="run on CPUs, not on"):
        jax.jit(fn).trace(operands[0]).lower(lowering_platforms=("cuda",))


def test_it_is_turned_off(monkeypatch, unloaded):
    monkeypatch.setenv("QUAXLIKE_NATIVE", "0")
    assert library.library() == "native products are turned off by QUAXLIKE_NATIVE=0"
    native.prepare(pytest.fail)


def test_a_user_without_a_home_folder(monkeypatch, unloaded):
    monkeypatch.setattr(_cache, "FOLDER", None)
    assert "could not be loaded: this user has no home folder; set XDG_CACHE_HOME" in library.library()
    with pytest.raises(native.NativeError, match="this user has no home folder; set XDG_CACHE_HOME"):
        native.build()


@pytest.mark.slow
def test_a_library_call_compiles_nothing(unloaded):
    w = _quantised("nf4", normal(4, 64))
    note = _choice(w, normal(2, 64))
    assert note.endswith("the native products are not compiled; `python -m quaxlike.kernels.native` does it")
    assert not unloaded.exists()


def test_without_a_compiler(monkeypatch, unloaded, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(native.NativeError, match=r"No C\+\+ compiler was found. Install one \(c\+\+, g\+\+"):
        native.build()
    told = []
    native.prepare(told.append)
    assert len(told) == 1
    assert told[0].startswith("Native products are not compiled, and others take longer: No C++")
    assert command.main([]) == 1
    assert "error: No C++ compiler was found" in capsys.readouterr().err
    x = normal(2, 64)
    w = _quantised("nf4", normal(4, 64))
    assert relative_error(_times(w)[0](x, w), np.float64(x) @ _dense(w).T) < 1e-6


def _compiler(folder: Path, program: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails(monkeypatch, unloaded, tmp_path):
    monkeypatch.setenv("CXX", _compiler(tmp_path, "echo no such thing >&2; exit 3"))
    with pytest.raises(native.NativeError, match=r"The compiler failed \(.*product.cc.*\):\nno such thing"):
        native.build()
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(native.NativeError, match="missing could not be run"):
        native.build()
    assert list(unloaded.iterdir()) == []


def test_a_library_that_cannot_be_loaded(monkeypatch, unloaded, tmp_path, capsys):
    monkeypatch.setenv("CXX", _compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo junk > "$2"'))
    assert command.main([]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith(f"Compiled by {tmp_path}/compiler in ")
    assert "error: the native products could not be loaded" in shown.err
    assert native.build().seconds is None
    assert native.build(again=True).seconds is not None
    assert list(unloaded.iterdir()) == [library.built_path()]


def test_a_folder_that_others_may_write_to_is_refused(monkeypatch, unloaded, tmp_path):
    monkeypatch.setenv("CXX", _compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo junk > "$2"'))
    unloaded.mkdir(parents=True)
    unloaded.chmod(0o777)
    with pytest.raises(native.NativeError, match=r"others may write to it .*mode 777.*make it yours alone"):
        native.build()
    unloaded.chmod(0o700)
    native.build().path.chmod(0o766)
    assert "others may write to it" in library.library()
    with pytest.raises(native.NativeError, match="others may write to it"):
        native.build()


def test_the_library_is_for_one_source_and_jaxlib(monkeypatch, unloaded):
    first = library.built_path()
    monkeypatch.setattr(library.jaxlib, "__version__", "0.0.1")
    assert library.built_path() != first


@pytest.mark.slow
def test_a_wheel_is_found_by_import(unloaded, tmp_path, capsys):
    """Installed apart, for a process whose cache is empty and which has no compiler."""
    assert command.main(["--wheel", str(tmp_path / "wheels")]) == 0
    (wheel,) = (tmp_path / "wheels").glob("quaxlike_cpu-*-py3-none-*.whl")
    assert str(wheel) in capsys.readouterr().out
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*install, str(site), str(wheel)], check=True)
    code = """
import jax.numpy as jnp, quaxlike as ql
from quaxlike.kernels import native
native.prepare(print)
w, x = ql.NF4Array.quantize(jnp.eye(64)), jnp.ones((1, 64))
print(ql.explain(ql.quaxify(lambda x, w: x @ w.T))(x, w), ql.quaxify(jnp.matmul)(x, w).sum())
"""
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert " on native: codes are multiplied" in run.stdout
    assert run.stdout.endswith(" 64.0\n")
    assert not unloaded.exists()
