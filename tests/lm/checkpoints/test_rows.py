"""Weights of checkpoints read in part, and onto a mesh: bit for bit what they are when read as a whole."""

import itertools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files.open_file import OpenFile
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import bitsandbytes, load
from quaxlike.lm.gguf.container import GgufFile
from quaxlike.sharding import fsdp
from tests.fixtures import fixture
from tests.lm.models.fixtures import folder
from tests.samples import normal

MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
QUICK = ("deepseek_block_f32", "modelopt_nvfp4")
FORMATS = [
    pytest.param(f"{family}/{case.name}", marks=() if case.name in QUICK else pytest.mark.slow)
    for family in ("fp8", "mxfp4", "mlx", "bnb_int8")
    for case in sorted(fixture(f"formats/{family}").iterdir())
    if case.is_dir()
]


def _same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def _cut(value, start, stop, count):
    """Rows of each part."""
    part = lambda x: np.asarray(x)[start * x.shape[0] // count : stop * x.shape[0] // count]
    return jax.tree.map(part, value)


def _check_rows(path):
    checkpoint = lm.open_checkpoint(path)
    in_part = 0
    for name in checkpoint:
        rows, whole = checkpoint.rows(name), checkpoint[name]
        like = rows.like()
        if like is None:
            _same(rows.whole(), whole)
            continue
        shapes = lambda value: [(x.shape, x.dtype) for x in jax.tree.leaves(value)]
        assert shapes(like) == shapes(whole)
        cuts = [*range(0, rows.count, max(rows.step, rows.count // 3 // rows.step * rows.step)), rows.count]
        for start, stop in itertools.pairwise(cuts):
            _same(rows.part(start, stop), _cut(whole, start, stop, rows.count))
        in_part += len(cuts) > 2
    return in_part


@pytest.mark.quick("fp8/deepseek_block_f32", "fp8/modelopt_nvfp4")
@pytest.mark.parametrize("case", FORMATS)
def test_rows_of_formats(case):
    _check_rows(fixture(f"formats/{case}"))


@pytest.mark.slow
def test_rows_of_4_bits(tmp_path):
    """In whole blocks; nested scales, and blocks that cross rows, are read as a whole."""
    weights = {
        "rows": ql.NF4Array.quantize(normal(6, 128)),
        "nested": ql.NF4Array.quantize(normal(6, 128), double_quant=True),
        "crossed": ql.FP4Array.from_flat(
            jnp.arange(96, dtype=jnp.uint8), jnp.ones(3), shape=(4, 48), block_size=64
        ),
        "dense": normal(6, 128).astype(jnp.bfloat16),
    }
    for storage in (None, jnp.bfloat16):
        bitsandbytes.save(tmp_path / "x.safetensors", weights, quant_storage=storage)
        assert _check_rows(tmp_path / "x.safetensors") == 2


def test_whether_there_is_a_weight_is_known_without_reading_it(tmp_path, monkeypatch):
    tensors, gguf = tmp_path / "x.safetensors", tmp_path / "x.gguf"
    for path in (tensors, gguf):
        lm.write(path, {"x.weight": normal(4, 32)}, format=path.suffix[1:])
    opened = [lm.open_checkpoint(tensors), bitsandbytes.open_checkpoint(tensors), open_tensors(tensors)]
    opened += [lm.open_checkpoint(gguf), GgufFile(gguf)]
    monkeypatch.delattr(OpenFile, "read")
    for checkpoint in opened:
        assert "x.weight" in checkpoint
        assert "y.weight" not in checkpoint


def test_tiles_that_do_not_divide_the_rows(tmp_path):
    """200 rows in two tiles of 128 are no tiles of 100."""
    float8 = normal(200, 128).astype(jnp.float8_e4m3fn)
    tensors = {"x.weight": np.asarray(float8), "x.weight_scale_inv": np.float32([[2.0], [3.0]])}
    write_tensors(tmp_path / "model.safetensors", tensors, {})
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = lm.open_checkpoint(tmp_path).rows("x.weight")
    assert (rows.count, rows.step) == (200, 128)
    assert _check_rows(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gptq", "awq", "compressed_tensors", "hqq", "torchao", "mlx"])
def test_any_format_onto_a_mesh(case):
    # Not all that these files hold can be cut along columns; rows that cannot be shared stay whole.
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    for path in sorted(p for p in fixture(f"formats/{case}").iterdir() if p.is_dir())[:2]:
        expected = lm.read(path)
        found = lm.read(path, mesh=mesh)
        assert list(found) == list(expected)
        for name, value in found.items():
            np.testing.assert_array_equal(ql.materialise(value), ql.materialise(expected[name]))
            assert all(x.sharding.mesh.shape == mesh.shape for x in jax.tree.leaves(value))


def test_patterns_for_names(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"w": np.eye(8, dtype=np.float32)}, {})
    found = lm.read(tmp_path / "x.safetensors", mesh=MESH, sharding={"w": jax.P("model")})["w"]
    assert found.sharding.spec == jax.P("model")
    np.testing.assert_array_equal(found, np.eye(8))
    with pytest.raises(ValueError, match=r"'v' matches none"):
        lm.read(tmp_path / "x.safetensors", mesh=MESH, sharding={"v": jax.P("model")})
    with pytest.raises(ValueError, match="pass `mesh`"):
        lm.read(tmp_path / "x.safetensors", sharding={"w": jax.P("model")})


@pytest.mark.slow
def test_a_model_quantised_onto_a_mesh():
    options = {"scheme": "int8"}
    expected, _ = load(folder("llama_llama3"), quantize=options)
    for sharding in (None, fsdp(MESH)):
        model, _ = load(folder("llama_llama3"), quantize=options, mesh=MESH, sharding=sharding)
        _same(eqx.filter(model, eqx.is_array), eqx.filter(expected, eqx.is_array))
        codes = model.model.layers[0].self_attn.q_proj.weight.codes
        assert codes.addressable_shards[0].data.nbytes * 4 == codes.nbytes
