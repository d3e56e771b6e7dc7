"""The public face: what `import quaxlike as ql` gives."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quaxlike as ql
from tests import public_uses as uses
from tests.lines_of_code import lines_of_code

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_HAS_HIJAX = importlib.util.find_spec("jax.experimental.hijax") and hasattr(
    importlib.import_module("jax.experimental.hijax"), "HiPrim"
)
_NO_ROOMS = ("core", "demo", "__main__", *([] if _HAS_HIJAX else ["hijax"]))
_ROOMS = sorted(m.name for m in pkgutil.iter_modules(ql.__path__) if m.name not in _NO_ROOMS)
_PUBLIC = ["", *(f".{room}" for room in _ROOMS if not room.startswith("_"))]
_PUBLIC += [f".arrays.{m.name}" for m in pkgutil.iter_modules(ql.arrays.__path__) if m.ispkg]
_PUBLIC += [f".lm.{name}" for name in ("bitsandbytes", "chat", "models", "peft")]
_PUBLIC = [name for name in _PUBLIC if name not in (".numpy", ".surgery")]  # dynamic; modules alone


@pytest.mark.slow
def test_rooms_come_with_the_package():
    """In a process of its own, where nothing else has imported them."""
    rooms = [room for room in _ROOMS if not room.startswith("_")]
    nested = ["arrays.unitful.Unitful", "lm.peft.save_adapter", "files.save", "numpy.sin", "sharding.shard"]
    code = "import quaxlike as ql\n" + "\n".join(f"ql.{name}" for name in [*rooms, *nested])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert set(rooms) <= set(dir(ql))


def test_american_spellings_are_the_same_objects():
    for name in ("materialise", "on_materialise", "MaterialisationError", "MaterialisationWarning"):
        assert getattr(ql, name.replace("alis", "aliz")) is getattr(ql, name)


def test_every_module_is_imported():
    """The older names of modules, too."""
    modules = [m.name for m in pkgutil.walk_packages(ql.__path__, "quaxlike.")]
    for name in modules:
        if not name.endswith("__main__") and (_HAS_HIJAX or name != "quaxlike.hijax"):
            importlib.import_module(name)


def test_names_that_are_imported_on_first_use_are_those_that_type_checkers_see():
    tree = ast.parse(Path(ql.__file__).read_text(encoding="utf-8"))
    (typed,) = [x for x in tree.body if isinstance(x, ast.If)]
    seen = {
        x.module: [y.name for y in x.names] for x in typed.body if isinstance(x, ast.ImportFrom) and x.module
    }
    assert {module: list(names) for module, names in ql._NAMES.items()} == seen  # pyright: ignore[reportPrivateUsage]


_LOADED = """
import sys, quaxlike
loaded = [m.__file__ for m in sys.modules.values() if m.__name__.startswith("quaxlike") and m.__file__]
print(*loaded, sep="\\n", end="\\n\\n")
print(*sys.modules, sep="\\n")
"""


@pytest.mark.slow
def test_importing_the_package_loads_the_framework_alone():
    run = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    files, modules = (part.splitlines() for part in run.stdout.split("\n\n"))
    assert sum(lines_of_code(Path(file)) for file in files) <= 6_500
    rooms = {name.split(".")[1] for name in modules if name.startswith("quaxlike.")}
    assert {room for room in rooms if not room.startswith("_")} == {"core"}


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'quaxlike' has no attribute 'lora_array'"):
        _ = ql.lora_array  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", _PUBLIC)
def test_star_imports_give_what_is_public(name):
    module = importlib.import_module(f"quaxlike{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    given: dict[str, object] = {}
    exec(f"from quaxlike{name} import *", given)
    del given["__builtins__"]
    assert set(given) == set(module.__all__)
    assert not (set(given) & sys.stdlib_module_names) - {"select"}  # `quaxlike.select`, of models


@pytest.mark.quick("types_and_rules")
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize(
    "use",
    [
        uses.types_and_rules,
        uses.quaxified_functions_keep_their_types,
        uses.functions_and_types_are_tested,
        uses.functions_of_arrays_take_values,
        uses.gradients,
        uses.arrays,
        uses.primitives_and_meshes,
    ],
)
def test_uses_as_type_checkers_see_them(use):
    use()


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("use", [uses.models, uses.files])
def test_uses_of_files_as_type_checkers_see_them(use, tmp_path):
    use(tmp_path)


def test_documentation_names_no_private_path():
    private = re.compile(r"quaxlike\.core\b|quaxlike\.\S*\._|from quaxlike\.\S* import _")
    found = [
        (page.name, line)
        for page in _DOCS.rglob("*.md")
        if page.name != "architecture.md"
        for line in page.read_text(encoding="utf-8").splitlines()
        if private.search(line)
    ]
    assert not found
