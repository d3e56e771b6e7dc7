"""Names that move work for a release, and say what the new ones are."""

import sys
import types

import pytest

from quaxlike._deprecated import deprecated
from tests.samples import checks_annotations


@pytest.fixture
def old(monkeypatch):
    """A module whose only name has moved."""
    module = types.ModuleType("old")
    names = {"load_model": ("quaxlike.models.load", 3)}
    module.__getattr__, module.__dir__ = deprecated("old", names, removed_in="9.0")  # pyright: ignore
    monkeypatch.setitem(sys.modules, "old", module)
    return module


_MOVED = r"^old\.load_model is quaxlike\.models\.load now; quaxlike 9\.0 will not have the old name\.$"


def test_a_name_that_moved(old):
    with pytest.warns(DeprecationWarning, match=_MOVED) as record:
        assert old.load_model == 3
    if not checks_annotations:  # whose wrapper is the caller
        assert record[0].filename == __file__
    assert dir(old) == ["load_model"]


def test_importing_everything(old):
    namespace: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match=_MOVED):
        exec("from old import *", namespace)
    assert namespace["load_model"] == 3


def test_a_name_that_never_was(old):
    with pytest.raises(AttributeError, match="module 'old' has no attribute 'Mamba'"):
        _ = old.Mamba
