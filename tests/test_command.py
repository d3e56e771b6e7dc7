"""`quaxlike COMMAND`: one command for the programs of the package."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.__main__ import COMMANDS, main
from tests.fixtures import fixture


def test_commands_are_listed(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_its_own_name(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: quaxlike {name} " in capsys.readouterr().out


def test_a_command_that_is_not_there(capsys):
    assert main(["finetun"]) == 2
    assert "there is no command 'finetun'. Did you mean finetune?" in capsys.readouterr().err


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "quaxlike", "--help"]
    assert "finetune" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("default_promotion")
def test_converting_a_checkpoint(tmp_path, capsys):
    source = fixture("models/qwen2/base")
    assert main(["convert", str(source), str(tmp_path / "out"), "--quantize", "int8"]) == 0
    assert f"Written: {tmp_path / 'out'}" in capsys.readouterr().out
    (found, *_), (before, *_) = lm.load(tmp_path / "out"), lm.load(source)
    ids, mask = jnp.arange(8), jnp.ones(8, bool)
    expected = ql.quaxify(ql.quantize(before, "int8"))(ids, mask)
    np.testing.assert_allclose(ql.quaxify(found)(ids, mask), expected, atol=1e-5)


def test_a_checkpoint_that_cannot_be_converted(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out.gguf")]) == 2
    assert "quaxlike convert: error: " in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
