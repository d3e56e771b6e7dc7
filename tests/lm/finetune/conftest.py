"""What several tests of the command share."""

import pytest

from quaxlike.lm import load
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.options import settings_of
from tests.lm.finetune.test_finetune import checkpoint, write


@pytest.fixture
def run_command(tmp_path, capsys):
    """Runs the command on one of the checkpoints; its status and what it told."""

    def run(kind, lines, *options, output="out", **changes):
        if not (tmp_path / kind).exists():
            checkpoint(tmp_path / kind, kind, **{"eos_token_id": 3} | changes)
        data = write(tmp_path / "data.jsonl", lines)
        status = main([
            f"--model={tmp_path / kind}", f"--data={data}", f"--output={tmp_path / output}", "--batch-size=8",
            "--learning-rate=0.02", "--held-out=0.2", *options,
        ])  # fmt: skip
        told = capsys.readouterr()
        return status, " ".join((told.out + told.err).split())

    return run


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("labels") / "llama", "llama", eos_token_id=3, pad_token_id=0)


@pytest.fixture(scope="module")
def base(llama):
    return load(llama)


@pytest.fixture
def classify_settings(llama, tmp_path):
    """Settings of a run that learns the labels in these rows."""

    def make(lines, task="classify", **options):
        data = write(tmp_path / "data.jsonl", lines)
        return settings_of(model=llama, data=data, output=tmp_path / "out", task=task, **options)

    return make
