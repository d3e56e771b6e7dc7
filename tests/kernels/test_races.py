"""Kernels under Pallas' interpreters with race detection, over drawn shapes.

Points of a grid that a kernel calls parallel run on two cores, in random order. Memory begins as NaN, and a
read out of bounds is an error. Programs that `lanes` emits, as for stored weights on GPUs, are not for these
interpreters: `simt.run` executes them, with checks of its own.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike.kernels.block_matmul import tpu as stored_tpu
from quaxlike.kernels.block_sparse_matmul import hopper
from quaxlike.kernels.block_sparse_matmul import tpu as sparse_tpu
from tests.samples import covering, normal

from .weights import block_sparse, relative_error, stored

pytestmark = pytest.mark.slow

for_hopper = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="Mosaic GPU of this JAX has no public interpreter."
)
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


def _interpreter(cls, **options):
    """A race is told, and the kernel goes on: JAX before 0.12 always does so, and has no option for it."""
    options |= {"detect_races": True, "uninitialized_memory": "nan", "out_of_bounds_reads": "raise"}
    if "on_race" in {field.name for field in dataclasses.fields(cls)}:
        options["on_race"] = "warn"
    return cls(**options)


def _on_tpu(seed=0):
    return _interpreter(pltpu.InterpretParams, num_cores_or_threads=2, random_seed=seed)


def _on_gpu():
    return _interpreter(plgpu.InterpretGPUParams)


@pytest.fixture
def race_found(capsys, caplog):
    """Whether an interpreter has found a race; it logs it, and before JAX 0.12 it prints it."""
    yield lambda: "RACE DETECTED" in capsys.readouterr().out + caplog.text
    pltpu.reset_tpu_interpret_mode_state()


STORED = covering(
    ["nf4", "nested", "mxfp4", "q4_1", "q8_0", "uint4_block", "fp8"],
    ["x @ W.T", "x @ W", "adapters"],
    [(384, 768), (256, 1280), (640, 256)],
    [1, 35, 300],
    ["float32", "bfloat16"],
)


@pytest.mark.parametrize(("codec", "form", "shape", "m", "dtype"), STORED[::2], ids=str)
def test_stored_weights_on_tpus(race_found, codec, form, shape, m, dtype):
    w, transpose = stored(codec, *shape), form == "x @ W"
    x = normal(m, shape[not transpose], dtype=dtype, seed=1)
    expected = np.float64(x) @ (w.dense if transpose else w.dense.T)
    low_rank = ()
    if form == "adapters":
        low_rank = normal(m, 2, 8, dtype=dtype), normal(2, shape[0], 8, dtype=dtype)
        expected += np.einsum("mar,anr->mn", *map(np.float64, low_rank))
    product = w.decode.stored(w.product(transpose, dtype), decoded=True)
    *operands, zeros = w.decode.operands(w.leaves, decoded=True)
    params = {"product": product, "zeros": zeros, "interpret": _on_tpu(m)}
    assert relative_error(stored_tpu.matmul(x, *operands, *low_rank, **params), expected) < TOLERANCE[dtype]
    assert not race_found()


def _sparse(seed, block_sizes, dtypes):
    """A drawn weight, with NaN in slots without a block; its dense value, and how many rows of x it meets."""
    rng = np.random.default_rng(seed)
    mask = rng.random(rng.integers(1, 5, 2)) < rng.choice([0.3, 0.7])
    mask[0, 0] = True
    dtype = str(rng.choice(dtypes))
    w = block_sparse(mask, int(rng.choice(block_sizes)), dtype, seed)
    is_stored = jnp.asarray(w.col_idx < mask.shape[1])[..., None, None]
    return (
        w._replace(blocks=jnp.where(is_stored, w.blocks, jnp.nan)),
        w.dense,
        8 * int(rng.integers(1, 80)),
        dtype,
    )


def _multiplied(kernel, seed, transpose, interpret, **drawn):
    w, dense, m, dtype = _sparse(seed, **drawn)
    x = normal(m, dense.shape[not transpose], dtype=dtype, seed=1)
    y = kernel.matmul(
        x, *map(jnp.asarray, w), transpose=transpose, out_dtype=jnp.dtype(dtype), interpret=interpret
    )
    assert relative_error(y, np.float64(x) @ (dense if transpose else dense.T)) < TOLERANCE[dtype]


def _sampled(kernel, seed, interpret, **drawn):
    w, dense, m, dtype = _sparse(seed, **drawn)
    rows, b, columns = len(w.blocks), w.blocks.shape[-1], len(w.transposed_idx)
    y, x = (normal(m, size, dtype=dtype, seed=i) for i, size in enumerate(dense.shape))
    found = kernel.sampled(
        y, x, *map(jnp.asarray, w[1:]), block_size=b, out_dtype=jnp.dtype(dtype), interpret=interpret
    )
    blocks = (np.float64(y).T @ np.float64(x)).reshape(rows, b, columns, b).transpose(0, 2, 1, 3)
    blocks = np.concatenate([blocks, np.zeros((rows, 1, b, b))], axis=1)  # of slots without a block
    assert relative_error(found, blocks[np.arange(rows)[:, None], w.col_idx]) < TOLERANCE[dtype]


TPU = {"block_sizes": [128], "dtypes": ["float32", "bfloat16"]}
HOPPER = {"block_sizes": [64, 128], "dtypes": ["bfloat16"]}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("transpose", [False, True])
def test_sparse_weights_on_tpus(race_found, seed, transpose):
    _multiplied(sparse_tpu, seed, transpose, _on_tpu(seed), **TPU)
    assert not race_found()


@pytest.mark.parametrize("seed", range(3))
def test_sampled_products_on_tpus(race_found, seed):
    _sampled(sparse_tpu, seed, _on_tpu(seed), **TPU)
    assert not race_found()


@for_hopper
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("transpose", [False, True])
def test_sparse_weights_on_hopper(race_found, seed, transpose):
    _multiplied(hopper, seed, transpose, _on_gpu(), **HOPPER)
    assert not race_found()


@for_hopper
@pytest.mark.parametrize("seed", range(3))
def test_sampled_products_on_hopper(race_found, seed):
    _sampled(hopper, seed, _on_gpu(), **HOPPER)
    assert not race_found()


# Faults that are planted are found.


def _planted(kernel, place=lambda i: (i, 0), **options):
    semantics = pltpu.CompilerParams(dimension_semantics=("parallel",))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32),
        grid=(4,),
        out_specs=pl.BlockSpec((8, 128), place),
        compiler_params=semantics,
        interpret=_on_tpu(),
        **options,
    )()


def test_a_planted_race_on_tpus(race_found):
    def kernel(out):
        out[...] = jnp.full_like(out, pl.program_id(0))

    jax.block_until_ready(_planted(kernel))
    assert not race_found()
    jax.block_until_ready(_planted(kernel, lambda i: (0, 0)))  # two cores write to the same place
    assert race_found()


def test_memory_that_nothing_was_written_to(race_found):
    def kernel(out, scratch):
        out[...] = scratch[...]

    assert jnp.isnan(_planted(kernel, scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)])).all()


def test_a_read_out_of_bounds(race_found):
    def kernel(out, scratch):
        scratch[...] = jnp.zeros_like(scratch)
        out[...] = scratch[pl.ds(8 * pl.program_id(0), 8)]

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Oo]ut-of-bounds read"):
        jax.block_until_ready(_planted(kernel, scratch_shapes=[pltpu.VMEM((16, 128), jnp.float32)]))


@for_hopper
@pytest.mark.parametrize("apart", [True, False])
def test_a_planted_race_on_gpus(race_found, apart):
    def kernel(out):
        thread = jax.lax.axis_index("thread")
        out[thread if apart else 0] = jnp.full((128,), thread, jnp.float32)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, 128), jnp.float32),
        num_threads=2,
        thread_name="thread",
        interpret=_on_gpu(),
    )
    jax.block_until_ready(run())
    assert race_found() is not apart
