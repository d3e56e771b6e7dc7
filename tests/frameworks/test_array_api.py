"""The consortium's suite of the array API: with each array a Value, no test does worse than with `jax.numpy`.

It is not on PyPI: the test clones it, or takes the checkout with its submodule that `ARRAY_API_TESTS` names.
`pip install -e '.[test,array-api]' && pytest -m frameworks tests/frameworks/test_array_api.py`
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(
        not all(map(find_spec, ("pytest_jsonreport", "ndindex"))),
        reason="its plugins are not installed: pip install '.[array-api]'",
    ),
]

_HERE = Path(__file__).parent
_REPOSITORY = "https://github.com/data-apis/array-api-tests"
_EXAMPLES = 5

# The tests that may do worse than with `jax.numpy`, by a pattern of names, and why.
_OF_ELEMENTS = (
    "the shape depends on the elements, which a Value shows to no function: under jit, nor does an array"
)
WORSE = {
    r"::test_(nonzero|unique_\w+|getitem_masking)$": _OF_ELEMENTS,
    r"::test_repeat$": f"if the counts are an array, {_OF_ELEMENTS}",
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    given = os.environ.get("ARRAY_API_TESTS")
    if given is not None:
        return Path(given)
    folder = tmp_path_factory.mktemp("array-api-tests")
    command = ["git", "clone", "--quiet", "--depth=1", "--recurse-submodules", "--shallow-submodules"]
    clone = subprocess.run(
        [*command, _REPOSITORY, str(folder)], capture_output=True, text=True, check=False, timeout=600
    )
    if clone.returncode:
        pytest.skip(
            f"{_REPOSITORY} cannot be cloned; name a checkout in ARRAY_API_TESTS: {clone.stderr[-300:]}"
        )
    return folder


def _failures(suite: Path, module: str, tests: Iterable[str] = ("array_api_tests",)) -> set[str]:
    options = ["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    options += [f"--max-examples={_EXAMPLES}", "--derandomize", "--disable-deadline", "-W", "ignore"]
    path = os.pathsep.join([str(_HERE), str(_HERE.parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "ARRAY_API_TESTS_MODULE": module, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    run = subprocess.run(
        command, cwd=suite, env=environment | {"COLUMNS": "400"}, capture_output=True, text=True, check=False
    )
    passed = re.search(r"(\d+) (passed|failed)", run.stdout)
    assert passed, run.stdout[-2000:] + run.stderr[-2000:]
    failed = set(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE))
    print(f"{module}: {run.stdout.splitlines()[-1]}")
    return failed


@pytest.mark.timeout(4 * 3600)
def test_no_test_is_worse_than_with_jax_numpy(suite):
    worse = _failures(suite, "passing_through")
    worse = {name for name in worse if not any(re.search(pattern, name) for pattern in WORSE)}
    for _ in range(8):  # special cases are drawn anew in each run: `jax.numpy` may fail at other ones
        if worse:
            worse -= _failures(suite, "jax.numpy", worse)
    assert not worse
