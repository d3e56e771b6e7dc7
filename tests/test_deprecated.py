"""Names that move work for a release, and say what the new ones are."""

import importlib.util
import subprocess
import sys

import pytest

from quaxlike import _deprecated
from quaxlike._lazy import OlderPaths


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which has imported nothing under the new names."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )


@pytest.mark.slow
def test_modules_that_moved_are_the_new_ones():
    run = _run(
        "from quaxlike.interop.peft import load_adapter\n"
        "import quaxlike.finetune.settings, quaxlike as ql\n"
        "from quaxlike.models import Decoder, load\n"
        "from quaxlike.interop import safetensors, save\n"
        "assert load_adapter is ql.lm.peft.load_adapter and ql.interop.load is ql.lm.read\n"
        "import quaxlike.lm.finetune.settings as settings\n"
        "assert quaxlike.finetune.settings is settings and save is ql.lm.write\n"
        "assert ql.arrays.adapters is ql.adapters and Decoder is ql.lm.models.Decoder\n"
        "assert safetensors.save is ql.files.save and ql.models.generate is ql.lm.generate\n"
        "from quaxlike.sharding import tensor_parallel\n"
        "assert tensor_parallel is ql.lm.tensor_parallel\n"
    )
    for line, new in {
        1: "quaxlike.interop.peft is quaxlike.lm.peft",
        2: "quaxlike.finetune.settings is quaxlike.lm.finetune.settings",
        3: "quaxlike.models.load is quaxlike.lm.load",
        4: "quaxlike.interop.save is quaxlike.lm.write",
        10: "quaxlike.sharding.tensor_parallel is quaxlike.lm.tensor_parallel",
    }.items():
        assert f"<string>:{line}: DeprecationWarning: {new} now; quaxlike 0.3" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [("finetune", "lm.finetune"), ("generate", "lm.generate")])
def test_commands_under_their_old_names(old, new):
    command = [sys.executable, "-m", f"quaxlike.{old}", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"`python -m quaxlike.{old}` is `quaxlike {old}` now, or `python -m quaxlike.{new}`." in run.stderr
    assert "usage: " in run.stdout


def test_every_module_that_moved_is_looked_for():
    """The face names the paths, so that the table is loaded only for one of them."""
    (finder,) = (x for x in sys.meta_path if isinstance(x, OlderPaths))
    inside = ("interop.files.file_pair", "interop.peft.methods.low_rank", "models.decoder", "finetune.run")
    for old in (*_deprecated._MODULES, *_deprecated._PACKAGES, *inside):  # pyright: ignore[reportPrivateUsage]
        spec = finder.find_spec(f"quaxlike.{old}")
        assert spec is not None, old
        if old not in _deprecated._PACKAGES:  # pyright: ignore[reportPrivateUsage]
            assert importlib.util.find_spec(spec.loader.new) is not None, old
    assert finder.find_spec("quaxlike.arrays") is None
