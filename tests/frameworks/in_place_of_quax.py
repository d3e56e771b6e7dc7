"""A plugin of pytest: quaxlike in the place of quax, whose example types are those of quax."""

import importlib.util
import sys
import types
from pathlib import Path

import quaxlike


def pytest_configure(config):
    """Some suites treat warnings as errors."""
    config.addinivalue_line("filterwarnings", "ignore::quaxlike.RuleWarning")


_spec = importlib.util.find_spec("quax")
assert _spec is not None
assert _spec.origin is not None
_ROOT = Path(_spec.origin).parent


def _of_quax(name: str, file: str, **options) -> types.ModuleType:
    """A module of quax, from its file."""
    spec = importlib.util.spec_from_file_location(name, _ROOT / file, **options)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_quax = types.ModuleType("quax")
_quax.__path__ = []  # what is private in quax is not found
_quax.__getattr__ = lambda name: getattr(quaxlike, name)
sys.modules["quax"] = _quax
_quax._compat = _of_quax("quax._compat", "_compat.py")  # says which JAX it is
_quax.examples = _of_quax(
    "quax.examples", "examples/__init__.py", submodule_search_locations=[str(_ROOT / "examples")]
)
