"""How the package is built: what is read in a sitting, and that no module comes back to itself."""

import ast
import collections
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lines_of_code import lines_of_code

_ROOT = Path(__file__).resolve().parents[1]
_CORE = _ROOT / "quaxlike" / "core"


def test_the_spine_is_read_in_a_sitting():
    spine = [
        *(_CORE / "rules").glob("*.py"),
        *(_CORE / f"{x}.py" for x in ("compat", "values", "trace", "quaxify")),
    ]
    assert sum(map(lines_of_code, spine)) <= 2010


def test_files_fit_in_the_head():
    files = [*(_ROOT / "quaxlike").rglob("*.py"), *(_ROOT / "tests").rglob("*.py")]
    long = {str(f.relative_to(_ROOT)): n for f in files if (n := f.read_text("utf-8").count("\n")) > 650}
    assert not long


def _package_arrows() -> dict[str, set[str]]:
    """For each module of the package, those that it imports anywhere in it."""
    package = _ROOT / "quaxlike"
    files = {
        tuple(p for p in ("quaxlike", *f.relative_to(package).with_suffix("").parts) if p != "__init__"): f
        for f in package.rglob("*.py")
    }
    arrows: dict[str, set[str]] = {}
    for name, file in files.items():
        here = name if file.name == "__init__.py" else name[:-1]
        out = arrows[".".join(name)] = set[str]()
        for node in ast.walk(_without_types(ast.parse(file.read_text(encoding="utf-8")))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = here[: len(here) - node.level + 1] + tuple(
                    (node.module or "").split(".") if node.module else ()
                )
                out |= {
                    ".".join(full if (full := (*base, alias.name)) in files else base) for alias in node.names
                }
        out.discard(".".join(name))
    return arrows


def _without_types(tree: ast.Module) -> ast.Module:
    """What runs: not what stands under `if TYPE_CHECKING`."""
    tree.body = [
        x for x in tree.body if not (isinstance(x, ast.If) and "TYPE_CHECKING" in ast.unparse(x.test))
    ]
    return tree


@pytest.mark.slow
def test_no_module_comes_back_to_itself():
    """However deep an import stands in a function."""
    sorter = graphlib.TopologicalSorter(_package_arrows())
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


#: Classes of two houses that each have the name of their field.
_SHARED_NAMES = {
    "Checkpoint",  # of any format, and of bitsandbytes: both are public
}


def test_the_name_of_a_class_has_one_meaning():
    defined = re.compile(r"^ *class (\w+)[(:\[]", re.MULTILINE)
    named = {file: defined.findall(file.read_text("utf-8")) for file in (_ROOT / "quaxlike").rglob("*.py")}
    counts = collections.Counter(name for names in named.values() for name in names)
    # Examples in docstrings are told from classes only where it matters: to parse takes long.
    unsure = [file for file, names in named.items() if any(counts[name] > 1 for name in names)]
    classes = [
        node.name
        for file in unsure
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in classes if classes.count(name) > 1} <= _SHARED_NAMES


def test_nothing_is_compiled_while_tests_are_collected(compiled_while_collected: dict[str, int]):
    """Every worker collects all tests, whichever it runs. Arrays are made by `tests.samples.array`, and what
    JAX has to make by `once` or in a table that is `Lazy`."""
    assert compiled_while_collected == {}


_VISITED = """
for _ in range(2):
    files = set()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    ql.quaxify(jnp.matmul)(w, x)
    sys.setprofile(None)
    print(*sorted(file for file in files if file.startswith(ql.__path__[0])), sep=",")
"""
_OWN_TYPE = """
import sys, jax, jax.numpy as jnp, quaxlike as ql

class Scaled(ql.ArrayValue):
    array: jax.Array
    scale: jax.Array

    def materialise(self):
        return self.array * self.scale

@ql.register("dot_general")
def dot(x: Scaled, y: jax.Array, **params):
    return jax.lax.dot_general(x.array, y, **params) * x.scale

w, x = Scaled(jnp.ones((3, 4)), jnp.array(2.0)), jnp.ones((4, 5))
"""
_LORA_OVER_NF4 = """
import sys, jax, jax.numpy as jnp, quaxlike as ql
w = ql.NF4Array.quantize(jax.random.normal(jax.random.key(0), (256, 256)))
w, x = ql.LoraArray(w, a=jnp.ones((8, 256)), b=jnp.ones((256, 8))), jnp.ones((256, 4))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "first", "repeated"), [(_OWN_TYPE, 20, 10), (_LORA_OVER_NF4, 40, 12)], ids=["own", "LoRA of NF4"]
)
def test_a_product_visits_few_files(tmp_path, made, first, repeated):
    """The first product in a process, and a repeated one, without native products."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "QUAXLIKE_NATIVE": ""}
    command = [sys.executable, "-c", made + _VISITED]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    visited = [line.split(",") for line in run.stdout.splitlines()]
    for files, limit in zip(visited, (first, repeated), strict=True):
        assert len(files) <= limit, files
