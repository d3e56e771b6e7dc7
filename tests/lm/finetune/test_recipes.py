"""Recipes of quantisation in fine-tuning."""

import json

import pytest

import quaxlike as ql
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.run import _quantisation, trained_in_full
from quaxlike.lm.finetune.settings import TrainSettings
from tests.lm.finetune.test_finetune import LINES, checkpoint, write
from tests.lm.finetune.test_train import decoder

pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on a checkpoint; its status and what it told."""

    def run(*options, output="out"):
        if not (tmp_path / "model").exists():
            checkpoint(tmp_path / "model", "llama", eos_token_id=3)
        data = write(tmp_path / "data.jsonl", LINES["text"])
        files = [f"--model={tmp_path / 'model'}", f"--data={data}", f"--output={tmp_path / output}"]
        status = main([*files, "--batch-size=8", "--held-out=0.2", "--rank=2", "--steps=1", *options])
        told = capsys.readouterr()
        return status, " ".join((told.out + told.err).split())

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quantize=nf5"], "--quantize: quantize has no scheme 'nf5'. Did you mean 'nf4'"),
        (["--quantize=none.toml"], "--quantize: There is no file none.toml: it must hold a recipe."),
        (
            ["--merge", "--format=gguf", "--outtype=q4_k_n"],
            "--outtype: GGUF has no type 'q4_k_n'. Did you mean 'q4_k_m'",
        ),
    ],
)
def test_schemes_and_recipes_that_there_are_not(options, message, capsys):
    assert main(["--model=m", "--data=d", "--output=o", *options]) == 2
    assert message in capsys.readouterr().err


def test_recipes(run, tmp_path):
    """What each rule says is trained over, and what the file says is part of the run's settings."""
    file = tmp_path / "recipe.json"
    file.write_text('{".*down_proj.*": "int8", "all-linear": ["nf4", {"block_size": 32}]}')
    assert run(f"--quantize={file}", "--held-out=0")[0] == 0
    settings = json.loads((tmp_path / "out" / "run.json").read_text())
    assert settings["quantize"] == str(file)
    assert "sha256 of quantize" in settings
    file.write_text('{"all-linear": "nf4"}')
    assert "a run with sha256 of quantize" in run(f"--quantize={file}", "--held-out=0")[1]
    status, told = run(f"--quantize={file}", "--block-size=32", output="other")
    assert status == 2
    assert "--block-size cannot be used with the recipe" in told


@pytest.mark.slow
def test_a_run_is_quantised_by_its_recipe(tmp_path):
    """Options of a single scheme do not reach it."""
    model = decoder()
    for quantize, wanted in {"nf4_qlora": {"double_quant": True}, "q8_0": {}}.items():
        train = TrainSettings(model=tmp_path, quantize=quantize)
        options = _quantisation(train, trained_in_full(model))
        found = {str(dict(row.options)) for row in ql.quantize.plan(model, **options).rows}
        assert found == {str(wanted)}
