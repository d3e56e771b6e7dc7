"""The memory that commands keep between calls of a program."""

import platform
import subprocess
import sys

import pytest

from quaxlike.lm.finetune import __main__ as command

_CALLS = """
import resource
from quaxlike.lm._allocator import keep_memory

keep_memory()
import jax
import jax.numpy as jnp

program = jax.jit(lambda x: (x + 1) @ (x - 1).T).lower(jnp.ones((64, 2**18))).compile()
assert program.memory_analysis().temp_size_in_bytes > 2**26
x, faults = jnp.ones((64, 2**18)), []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_temporary_arrays_are_not_cleared_anew_for_each_call():
    ran = subprocess.run([sys.executable, "-c", _CALLS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 100  # pages, of more than 16,384


def test_fine_tuning_keeps_memory(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(command, "keep_memory", lambda: kept.append(True))
    paths = {"model": "none", "data": "none.jsonl", "output": "run"}
    assert (
        command.main([part for name, path in paths.items() for part in (f"--{name}", str(tmp_path / path))])
        == 2
    )
    assert kept
