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


def run_pair(python: str, pins: list[str], pre: bool, tests: list[str], minutes: float) -> tuple[str, str]:
    """The versions of Python and JAX, and what became of the tests. Environments share the cache of pip."""
    with tempfile.TemporaryDirectory() as folder:
        own = str(Path(folder, "bin", "python"))
        _output([python, "-m", "venv", folder], minutes)
        pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _output([*pip, *(["--pre"] if pre else []), "-e", ".[test]", *pins], minutes)
        code = "import jax, equinox; print(f'JAX {jax.__version__}, Equinox {equinox.__version__}')"
        versions = _output([own, "-c", code], minutes).strip()
        ran = _run([own, "-m", "pytest", "-q", *tests], minutes)
        print(ran.stdout + ran.stderr if ran.returncode else "", end="", flush=True)
        told = (ran.stdout.strip() or ran.stderr.strip() or "nothing was told").splitlines()[-1].strip("= ")
        return versions, told if ran.returncode == 0 else f"FAILED ({ran.returncode}): {told}"


def _run(command: list[str], minutes: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60 * minutes)


def _output(command: list[str], minutes: float) -> str:
    """What a command prints.

    **Raises:** `CalledProcessError` if it fails.
    """
    ran = _run(command, minutes)
    if ran.returncode:
        raise subprocess.CalledProcessError(ran.returncode, command[1:4], ran.stdout, ran.stderr)
    return ran.stdout


def _row(
    version: str, pins: list[str], pre: bool, tests: list[str], minutes: float
) -> tuple[str, str, str, str, float]:
    """A row of the table; a row that fails is told, and the next one comes."""
    start, python, versions = time.monotonic(), find_python(version), ""
    if python is None:
        told = "no such Python here"
    else:
        try:
            versions, told = run_pair(python, pins, pre, tests, minutes)
        except subprocess.TimeoutExpired:
            told = f"FAILED: took more than {minutes:g} minutes"
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip() or error.stdout.strip() or "nothing was told").splitlines()[-1]
            told = f"FAILED: {' '.join(error.cmd)}: {last[:100]}"
        except OSError as error:
            told = f"FAILED: {error}"
    return version, " ".join(pins), versions, told, time.monotonic() - start


def _line(version: str, pins: str, versions: str, told: str, seconds: float) -> str:
    return f"{version:5} {pins[:40]:40} {versions:32} {seconds:6.0f} s  {told}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--python", nargs="+", help="these versions alone, such as 3.11")
    parser.add_argument("--jax", nargs="+", help="these releases alone, such as 0.11")
    parser.add_argument("--lowest", action="store_true", help="the lower bounds of pyproject.toml alone")
    parser.add_argument("--pre", action="store_true", help="the newest pre-release of JAX alone")
    parser.add_argument("--minutes", type=float, default=120.0, help="that a row may take (default: 120)")
    parser.add_argument("tests", nargs="*", help="what pytest is given, after --; default: all quick tests")
    arguments = parser.parse_args()
    pairs = [(version, [pin]) for version, pin in PAIRS]
    if arguments.lowest:
        pairs = [("3.11", lowest())]
    if arguments.pre:
        pairs = [("3.13", ["jax", "jaxlib"])]
    rows = []
    try:
        for version, pins in pairs:
            if arguments.python and version not in arguments.python:
                continue
            if arguments.jax and not any(pins[0].startswith(f"jax=={release}") for release in arguments.jax):
                continue
            rows.append(_row(version, pins, arguments.pre, arguments.tests, arguments.minutes))
            print(_line(*rows[-1]), flush=True)
    finally:  # also when it is interrupted
        print("\n", *(_line(*row) for row in rows), sep="\n", flush=True)
    return int(any(told.startswith("FAILED") for _, _, _, told, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
