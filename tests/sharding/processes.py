"""Programs on several processes, or on other numbers of devices, than those of the tests."""

import os
import socket
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def free_address() -> str:
    """An address on this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def start(*arguments: str, devices: int) -> subprocess.Popen:
    """A process of Python with so many devices."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false "
        "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(_ROOT),
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(*started: subprocess.Popen, timeout: float = 900) -> list[str]:
    """What they printed, once all of them have ended well."""
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, printed, strict=True):
        assert process.returncode == 0, text
    return printed


def run(code: str, *arguments: str, processes: int = 1, devices: int) -> list[str]:
    """Runs a program; of several processes each is a part of one with `jax.distributed`."""
    address = free_address()
    begin = (
        "import jax; jax.config.update('jax_cpu_collectives_implementation', 'gloo'); "
        "jax.distributed.initialize({!r}, {}, {})\n"
    )
    return outputs(
        *(
            start(
                "-c",
                (begin.format(address, processes, i) if processes > 1 else "") + code,
                *arguments,
                devices=devices,
            )
            for i in range(processes)
        )
    )
