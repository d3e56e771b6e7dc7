"""`python -m tests.matrix`: the tests on every pair of Python and JAX that is supported, in one table."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
# Python, and what pip is asked for. JAX 0.10.2 is the last release for Python 3.11.
PAIRS = [
    ("3.11", "jax==0.10.2"),
    ("3.12", "jax==0.10.2"),
    ("3.12", "jax==0.11.*"),
    ("3.12", "jax==0.12.*"),
    ("3.13", "jax==0.10.2"),
    ("3.13", "jax==0.11.*"),
    ("3.13", "jax==0.12.*"),
    ("3.14", "jax==0.12.*"),
]


def find_python(version: str) -> str | None:
    """The newest interpreter of a minor version, from pyenv or the PATH."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [str(path) for path in sorted(root.glob(f"{version}.*/bin/python"), reverse=True)]
    code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    for python in [*found, f"python{version}"]:
        try:
            if subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
                return python
        except FileNotFoundError:
            continue
    return None


def lowest() -> list[str]:
    """The lower bounds of pyproject.toml, as pins."""
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.partition("\ndependencies = [")[2].partition("]")[0]
    return [f"{name}=={bound}" for name, bound in re.findall(r'"([\w-]+)>=([\d.]+)"', block)]


def run_pair(python: str, pins: list[str], pre: bool, tests: list[str]) -> tuple[str, str]:
    """The versions of Python and JAX, and what became of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        own = str(Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "venv", folder], check=True)
        install = [
            own,
            "-m",
            "pip",
            "install",
            "--quiet",
            *(["--pre"] if pre else []),
            "-e",
            ".[test]",
            *pins,
        ]
        installed = subprocess.run(install, cwd=_ROOT, capture_output=True, text=True)
        if installed.returncode:
            return "", f"not installed: {installed.stderr.strip().splitlines()[-1][:60]}"
        code = "import jax, equinox; print(f'JAX {jax.__version__}, Equinox {equinox.__version__}')"
        versions = subprocess.run([own, "-c", code], capture_output=True, text=True).stdout.strip()
        ran = subprocess.run([own, "-m", "pytest", "-q", *tests], cwd=_ROOT, capture_output=True, text=True)
        print(ran.stdout if ran.returncode else "", end="", flush=True)
        return versions, ran.stdout.strip().splitlines()[-1].strip("= ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--python", nargs="+", help="these versions alone, such as 3.11")
    parser.add_argument("--lowest", action="store_true", help="the lower bounds of pyproject.toml alone")
    parser.add_argument("--pre", action="store_true", help="the newest pre-release of JAX alone")
    parser.add_argument("tests", nargs="*", help="what pytest is given; default: all quick tests")
    arguments = parser.parse_args()
    pairs = [(version, [pin]) for version, pin in PAIRS]
    if arguments.lowest:
        pairs = [("3.11", lowest())]
    if arguments.pre:
        pairs = [("3.13", ["jax", "jaxlib"])]
    rows, failed = [], False
    for version, pins in pairs:
        if arguments.python and version not in arguments.python:
            continue
        start, python = time.monotonic(), find_python(version)
        if python is None:
            rows.append((version, " ".join(pins), "", "no such Python here", 0.0))
            continue
        versions, told = run_pair(python, pins, arguments.pre, arguments.tests)
        failed |= not versions or "failed" in told or "error" in told or "passed" not in told
        rows.append((version, " ".join(pins), versions, told, time.monotonic() - start))
    for version, pins, versions, told, seconds in rows:
        print(f"{version:5} {pins[:40]:40} {versions:32} {seconds:6.0f} s  {told}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
