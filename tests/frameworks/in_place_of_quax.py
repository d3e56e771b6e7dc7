"""A plugin of pytest: quaxlike in the place of quax, whose example types are those of quax."""

import importlib.util
import sys
import types
from pathlib import Path


def pytest_configure(config):
    """Some suites treat warnings as errors."""
    config.addinivalue_line("filterwarnings", "ignore::quaxlike.RuleWarning")


def pytest_load_initial_conftests():
    """Nothing imports JAX before this, since pytest-env sets what JAX reads when it is imported."""
    import quaxlike

    quax = types.ModuleType("quax")
    quax.__path__ = []  # what is private in quax is not found
    quax.__getattr__ = lambda name: getattr(quaxlike, name)
    spec = importlib.util.find_spec("quax")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    sys.modules["quax"] = quax
    examples = root / "examples"
    quax._compat = _of_quax("quax._compat", root / "_compat.py")  # says which JAX it is
    quax.examples = _of_quax(
        "quax.examples", examples / "__init__.py", submodule_search_locations=[str(examples)]
    )


def _of_quax(name: str, file: Path, **options) -> types.ModuleType:
    """A module of quax, from its file."""
    spec = importlib.util.spec_from_file_location(name, file, **options)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
