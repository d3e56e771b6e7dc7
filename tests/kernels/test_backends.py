import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike import kernels
from quaxlike.kernels import nf4_matmul
from tests.primitives.jaxprs import equations
from tests.samples import normal

from .weights import relative_error, stored


def _matmul(x):
    w = stored("nf4", 48, 64)
    return nf4_matmul(x, *w.leaves, **w.params)


def _backends(fn, x):
    return [eqn.params["backend"] for eqn in equations(jax.make_jaxpr(fn)(x))]


@pytest.mark.slow
def test_the_innermost_context_decides():
    x = jnp.ones((2, 64))
    assert _backends(_matmul, x) == [None]
    with kernels.backend("gpu"):
        assert _backends(_matmul, x) == ["gpu"]
        with kernels.backend("reference"):
            assert _backends(_matmul, x) == ["reference"]
        assert _backends(_matmul, x) == ["gpu"]
    assert _backends(_matmul, x) == [None]


@pytest.mark.slow
def test_what_was_compiled_for_one_backend_is_not_reused_for_another():
    traces = []

    @jax.jit
    def fn(x):
        traces.append(kernels.backends._forced.value)
        return _matmul(x)

    x = jnp.ones((2, 64))
    fn(x)
    with kernels.backend("gpu"):
        fn(x)
    fn(x)
    assert traces == [None, "gpu"]


def test_an_unknown_backend():
    with (
        pytest.raises(ValueError, match=r"one of \('reference', 'native', 'gpu', 'tpu'\) or None, got 'xla'"),
        kernels.backend("xla"),
    ):
        pass


@pytest.mark.slow
def test_a_backend_that_was_asked_for_in_vain_is_told():
    with (
        kernels.backend("tpu"),
        pytest.warns(kernels.KernelFallbackWarning, match="nf4_matmul runs"),
    ):
        jax.jit(_matmul).lower(jnp.ones((2, 64), jnp.float16))


@pytest.mark.slow
def test_importing_the_kernels_does_not_import_pallas():
    code = "import sys, quaxlike.kernels; print('jax.experimental.pallas' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def _sharded(x, mesh):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P("rows", None)))


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.slow
def test_a_program_that_xla_divides_runs_the_kernel_on_each_part(mesh):
    x = jnp.ones((128, 128))
    w = stored("nf4", 128, 256)
    fn = lambda x: nf4_matmul(x, *w.leaves, transpose=True, **w.params)
    with kernels.backend("tpu"):
        y = jax.jit(fn)(jax.device_put(x, _sharded(x, mesh).sharding))
    assert y.sharding.spec == jax.P("rows", None)
    assert relative_error(y, np.float64(x) @ w.dense) < 1e-6


@pytest.mark.slow
def test_the_reference_that_is_asked_for_is_plain_jax(mesh):
    """Which can be exported for many devices."""
    w = stored("nf4", 128, 256)
    fn = lambda x: nf4_matmul(x, *w.leaves, **w.params)
    with kernels.backend("reference"):
        exported = jax.export.export(jax.jit(fn))(_sharded(jnp.ones((8, 256)), mesh))
    assert exported.nr_devices == 4


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", ["reference", "gpu", "tpu"])
def test_within_shard_map_each_device_runs_the_kernel(mesh, backend, check_vma):
    x = normal(128, 256)
    w = stored("nf4", 128, 256)
    fn = lambda x: nf4_matmul(x, *w.leaves, **w.params)
    rows = jax.P("rows")
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma))
    with kernels.backend(backend):
        assert relative_error(mapped(x), np.float64(x) @ w.dense.T) < 1e-6
        gradient = jax.grad(lambda x: jnp.sum(mapped(x) ** 2))(x)
        assert relative_error(gradient, 2 * np.float64(x) @ w.dense.T @ w.dense) < 1e-6
