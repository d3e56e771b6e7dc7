import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from quaxlike import kernels
from quaxlike.kernels import nf4_matmul
from tests.primitives.jaxprs import equations

from .weights import quantised

W = quantised((48, 64))


def _matmul(x):
    return nf4_matmul(x, *W.operands, **W.params)


def _backends(fn, x):
    return [eqn.params["backend"] for eqn in equations(jax.make_jaxpr(fn)(x))]


def test_the_innermost_context_decides():
    x = jnp.ones((2, 64))
    assert _backends(_matmul, x) == [None]
    with kernels.backend("gpu"):
        assert _backends(_matmul, x) == ["gpu"]
        with kernels.backend("reference"):
            assert _backends(_matmul, x) == ["reference"]
        assert _backends(_matmul, x) == ["gpu"]
    assert _backends(_matmul, x) == [None]


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
        pytest.raises(ValueError, match=r"one of \('reference', 'gpu', 'tpu'\) or None, got 'xla'"),
        kernels.backend("xla"),
    ):
        pass


def test_a_backend_that_was_asked_for_in_vain_is_told(recwarn):
    with (
        kernels.backend("tpu"),
        pytest.warns(kernels.KernelFallbackWarning, match="nf4_matmul runs"),
    ):
        jax.jit(_matmul).lower(jnp.ones((2, 64), jnp.float16))


def test_importing_the_kernels_does_not_import_pallas():
    code = "import sys, quaxlike.kernels; print('jax.experimental.pallas' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
