"""The suites of quax and of packages written for it: no test does worse with quaxlike in the place of quax.

They are fetched as sdists. One command runs them, and takes long:
`pip install -e '.[test,quax-suites]' && pytest -m frameworks tests/frameworks/test_suites_for_quax.py`
"""

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks

_HERE = Path(__file__).parent

# For each package the folders of tests, and what may do worse than with quax: a pattern of names, and why.
_PRIVATE = "it is about the modules of quax"
_COMPARED = "`==` and `!=` between Values never compare pytrees"
_COPY_KEEPS = "jnp.copy keeps the type"
SUITES: dict[str, tuple[list[str], dict[str, str]]] = {
    "quax": (
        ["tests/usage", "tests/unit"],
        {
            r"/test_(fast_module|jit_quax_cache|cache_gc|version_guards|stage_value)\.py": _PRIVATE,
            r"/test_core\.py::test_(quax_tracer_aval_cached|default_process_rejects)": _PRIVATE,
            r"/test_examples_imports\.py::": _PRIVATE,
            r"/test_named\.py::test_(add|existing_function)$": _COMPARED,
            r"/test_prng\.py::test_where$": _COMPARED,
        },
    ),
    "quax-blocks": (
        ["tests"],
        {r"::test_copy_returns_an_array_not_the_wrapper$": _COPY_KEEPS},
    ),
    "quaxed": (["tests/unit"], {}),
    "unxt": (["tests/unit", "tests/integration"], {}),
    "unxts.linalg": (["tests"], {}),
    "unxts.parametric": (["tests"], {}),
    "unxts.interop.matplotlib": (["tests"], {}),
    "unxts.interop.xarray": (["tests"], {}),
    "coordinax": (["tests"], {}),
}
# The examples in the documentation of a package, which its conftest collects.
_WRAPS_A_LIST = "its rule for device_put returns a Quantity of the list of results, not such a list"
DOCTESTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "unxt": (
        ["README.md", "docs", "src"],
        {r"/register_primitives\.py::line:18(15|19),": _WRAPS_A_LIST},
    ),
    "quax-blocks": (["src"], {r"/copy\.py::line:(41|68),": _COPY_KEEPS}),
    "quaxed": (["src"], {}),
    "coordinax": (["README.md", "docs", "src"], {}),
}

# A rule that would take a primitive over for every type is an error here.
_UNANNOTATED = ("def cond_p(index, consts)", "def cond_p(index: MyArray, consts)")


def _sdist(package: str, folder: Path) -> Path:
    """The unpacked sdist of the release that is installed."""
    try:
        release = f"{package}=={version(package)}"
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install '.[quax-suites]'")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), release]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options], capture_output=True, text=True, check=False
    )
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"the registry cannot be reached, or has no sdist of {release}: {run.stderr[-300:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    (root,) = (x for x in folder.iterdir() if x.is_dir())
    for file in root.rglob("myarray.py"):
        file.write_text(file.read_text("utf-8").replace(*_UNANNOTATED), "utf-8")
    return root


def _run(root: Path, tests: list[str], plugins: list[str]) -> tuple[int, set[str]]:
    """How many tests pass, and the names of those, or of files, that fail."""
    options = ["-q", "-n0", "--tb=no", "-rfE", "--continue-on-collection-errors"]
    options += ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "xfail_strict=false"]
    path = os.pathsep.join([str(_HERE), str(_HERE.parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "400"}
    command = [sys.executable, "-m", "pytest", *options, *plugins, *tests]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed or "in_place_of_quax" not in plugins, run.stdout[-2000:] + run.stderr[-2000:]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return int(passed[1]) if passed else 0, set(failed)


def _compare(root: Path, tests: list[str], known: dict[str, str], plugins: list[str]) -> None:
    passed, failed = _run(root, tests, ["-p", "in_place_of_quax", *plugins])
    print(f"{root.name} {tests}: {passed} pass, {len(failed)} fail")
    unknown = {name for name in failed if not any(re.search(pattern, name) for pattern in known)}
    if unknown:
        files = sorted(
            {name.partition("::")[0] for name in unknown}
        )  # whole, as examples build on those before
        _, with_quax = _run(root, files, plugins)
        assert unknown <= with_quax, sorted(unknown - with_quax)


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("package", SUITES)
def test_no_test_is_worse_than_with_quax(package, tmp_path):
    tests, known = SUITES[package]
    _compare(_sdist(package, tmp_path), tests, known, [])


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("package", DOCTESTS)
def test_no_example_is_worse_than_with_quax(package, tmp_path):
    examples, known = DOCTESTS[package]
    _compare(_sdist(package, tmp_path), examples, known, ["-p", "no:doctest"])
