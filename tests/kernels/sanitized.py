"""`python -m tests.kernels.sanitized --number 1000`: faults of memory and races in the native products.

Compiles them with sanitizers of addresses and undefined behaviour, then of threads, and runs each program in
a process of its own, on buffers of exactly their size. Drawn calls of the handlers are repeated while one
allocation after the other fails. First a planted fault shows that the sanitizer reports any.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from quaxlike.kernels.native import NativeError, library

SANITIZERS = {"address,undefined": "heap-buffer-overflow", "thread": "data race"}
FLAGS = ["-std=c++17", "-O1", "-w", "-Wno-psabi", "-pthread", "-ffp-contract=fast"]
FLAGS += ["-fno-sanitize-recover=undefined"]


def compiled(sanitizer: str, folder: Path) -> Path:
    """The harness, with the products and a sanitizer."""
    program, sources = folder / sanitizer, Path(library.__file__).parent
    command = [*library._compiler(), *FLAGS, f"-fsanitize={sanitizer}", f"-I{jax.ffi.include_dir()}"]
    command += [f'-DPRODUCT="{sources / "product.cc"}"', f'-DCSR="{sources / "csr.cc"}"']
    subprocess.run([*command, str(Path(__file__).with_name("native_harness.cc")), "-o", program], check=True)
    return program


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    # A data race ends the process, as a fault of memory does.
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.sanitized", description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="of drawn weights; default 1000")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for sanitizer, report in SANITIZERS.items():
            start = time.monotonic()
            try:
                program = compiled(sanitizer, Path(folder))
            except NativeError as error:
                print(error, file=sys.stderr)
                return 1
            fault = run(program, "fault")
            if fault.returncode == 0 or report not in fault.stderr:
                print(f"{sanitizer}: a planted fault was not reported:\n{fault.stderr}", file=sys.stderr)
                return 1
            # Threads are the same whatever instructions they run.
            tables = "all" if sanitizer != "thread" else "handlers"
            found = run(program, tables, arguments.number, arguments.seed)
            seconds = time.monotonic() - start
            print(f"{sanitizer}, {seconds:.0f} s: {found.stdout}{found.stderr}", end="", flush=True)
            if found.returncode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
