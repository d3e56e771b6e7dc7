"""Old names work for a release, and say what the new ones are."""

import importlib
import warnings

import pytest

import quaxlike.models
from quaxlike._deprecated import deprecated

from .samples import wrong_types


@wrong_types  # and before the line that asks
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("quaxlike.demo.models.load_model", "quaxlike.models.load"),
        ("quaxlike.demo.models.llama.Llama", "quaxlike.models.Decoder"),
        ("quaxlike.demo.models.Bert", "quaxlike.models.Bert"),
        ("quaxlike.demo.finetune.settings.Settings", "quaxlike.finetune.settings.Settings"),
    ],
)
def test_names_that_moved(old, new):
    find = lambda path: getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])
    with pytest.warns(DeprecationWarning, match=f"^{old} is {new} now; quaxlike 0.2 will not have") as record:
        found = find(old)
    assert found is find(new)
    assert record[0].filename == __file__


def test_importing_everything():
    namespace: dict[str, object] = {}
    with pytest.warns(
        DeprecationWarning, match=r"quaxlike\.demo\.models\.Bert is quaxlike\.models\.Bert now"
    ):
        exec("from quaxlike.demo.models import *", namespace)
    assert {*quaxlike.models.__all__, "load_model", "GPT2Config"} <= namespace.keys()


def test_names_that_never_were():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        demo = importlib.import_module("quaxlike.demo.models")
        assert "load_model" in dir(demo)
        with pytest.raises(AttributeError, match=r"module 'quaxlike\.demo\.models' has no attribute 'Mamba'"):
            _ = demo.Mamba
    getattr_, dir_ = deprecated("old", {"a": ("new.b", 3)}, removed_in="9.0")
    with pytest.warns(DeprecationWarning, match=r"^old\.a is new\.b now; quaxlike 9\.0"):
        assert getattr_("a") == 3
    assert dir_() == ["a"]


def test_the_old_command(capsys):
    main = importlib.import_module("quaxlike.demo.finetune.__main__").main
    with (
        pytest.warns(DeprecationWarning, match="python -m quaxlike.finetune is the name of"),
        pytest.raises(SystemExit),
    ):
        main(["--help"])
    assert "python -m quaxlike.demo.finetune" in capsys.readouterr().out
