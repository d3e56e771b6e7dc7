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


@pytest.mark.slow
def test_the_module_is_the_command():
    command = [sys.executable, "-m", "quaxlike", "--help"]
    assert "finetune" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_converting_a_checkpoint(tmp_path, capsys):
    source = fixture("models/qwen2/base")
    assert main(["convert", str(source), str(tmp_path / "out"), "--quantize", "int8"]) == 0
    assert f"Written: {tmp_path / 'out'}" in capsys.readouterr().out
    (found, *_), (before, *_) = lm.load(tmp_path / "out"), lm.load(source)
    ids, mask = jnp.arange(8), jnp.ones(8, bool)
    expected = ql.quaxify(ql.quantize(before, "int8"))(ids, mask)
    np.testing.assert_allclose(ql.quaxify(found)(ids, mask), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_converting_by_a_recipe(tmp_path, capsys):
    """Ours holds several schemes, as no other format does, and says how the model is quantised."""
    source, out = fixture("models/qwen2/base"), tmp_path / "out"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('".*down_proj.*" = "q8_0"\nall-linear = "nf4"')
    assert main(["convert", str(source), str(out), "--quantize", str(recipe)]) == 0
    assert f"Written: {out} in quaxlike's own format" in capsys.readouterr().out
    (found, _), (before, _) = lm.load(out), lm.load(source)
    expected = ql.quantize(before, ql.quantize.from_file(recipe))
    ids, mask = jnp.arange(8), jnp.ones(8, bool)
    np.testing.assert_allclose(ql.quaxify(found)(ids, mask), ql.quaxify(expected)(ids, mask), atol=1e-5)
    kept = ql.quantize.from_file(out / "model.safetensors")
    assert kept == ql.summary(found).recipe
    assert {row.path: row.scheme for row in ql.quantize.plan(before, kept).rows} == {
        row.path: row.scheme for row in ql.quantize.plan(before, ql.quantize.from_file(recipe)).rows
    }
    # What is quantised already is rounded from its numbers.
    assert main(["convert", str(out), str(tmp_path / "again"), "--quantize", "int4"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out.gguf", "--quantize=q4_k_n"], "GGUF has no type 'q4_k_n'. Did you mean 'q4_k_m'"),
        (["out", "--quantize=q4_k_n"], "quantize has no scheme 'q4_k_n'. Did you mean 'q4_k"),
        (["out", "--quantize=none.json"], "There is no file none.json: it must hold a recipe"),
    ],
)
def test_schemes_that_cannot_be_converted_to(arguments, message, tmp_path, capsys):
    assert (
        main(["convert", str(fixture("models/qwen2/base")), str(tmp_path / arguments[0]), *arguments[1:]])
        == 2
    )
    assert message in capsys.readouterr().err


def test_an_adapter_alone_is_for_llama_cpp(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "a", "b", "--adapter-only"])
    assert "--adapter-only must be used with --adapter and a file OUT.gguf" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_converted(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out.gguf")]) == 2
    assert "quaxlike convert: error: " in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune", "--modle=m", "--data=d"], "there is no option --modle. Did you mean --model?"),
        (
            ["generate", "--model", "m", "--promt", "one"],
            "there is no option --promt. Did you mean --prompt?",
        ),
        (["generate", "-model", "m"], "there is no option -model. Did you mean --model?"),
        (["convert", "a", "b", "--quantise=nf4"], "there is no option --quantise. Did you mean --quantize?"),
        (["demo", "--xyz"], "there is no option --xyz."),
        (["finetune", "--rank=0"], "argument --rank: expected a whole number of at least 1, found '0'"),
    ],
)
def test_errors_are_not_buried_by_the_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    name = f"quaxlike {arguments[0]}"
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{name}: error: {message}\n`{name} --help` lists the options.\n"


def test_texts_that_look_like_options(capsys):
    """Texts of several words are none, and beginnings of options stand for them."""
    assert main(["generate", "--mod", "nowhere", "--prompt", "-- one two"]) == 2
    assert "There is no nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "finetune", "convert"])
def test_an_adapter_in_place_of_a_model(command, tmp_path, capsys):
    adapter, data, out = tmp_path / "a", tmp_path / "data.jsonl", tmp_path / "out"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "base/llama"}')
    data.write_text('{"text": "one"}')
    arguments = {
        "generate": [f"--model={adapter}", "--prompt", "one"],
        "finetune": [f"--model={adapter}", f"--data={data}", f"--output={out}"],
        "convert": [f"{adapter}", f"{out}"],
    }[command]  # fmt: skip
    assert main([command, *arguments]) == 2
    told = capsys.readouterr().err
    assert "The folder holds an adapter, which is put on 'base/llama': the model is that one's folder" in told
