"""With JAX's next custom derivatives and checkpoint, which are high-level primitives."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

_ROOT = Path(__file__).resolve().parents[2]
_FLAGS = ["custom_vjp3", "custom_jvp3", "remat3"]
pytestmark = pytest.mark.skipif(
    f"jax_{_FLAGS[1]}" not in jax.config.values, reason="the flags are of JAX 0.11"
)
_TESTS = ["core/test_custom_derivatives.py", "core/test_late_values.py", "core/test_inline.py"]
_TESTS += ["core/test_vprim.py", "arrays/test_placeholders.py", "online_learning/test_paths.py"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [*([flag] for flag in _FLAGS), _FLAGS], ids="-".join)
def test_with_flags(flags):
    """In a process of its own: JAX reads the flags when modules are imported."""
    on = {f"JAX_{flag.upper()}": "1" for flag in flags}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in _TESTS)], cwd=_ROOT, env=os.environ | on,
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
