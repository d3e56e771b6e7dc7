"""`--invocation`: adapters that act from certain tokens of a text on."""

import json
import re

import numpy as np
import pytest

from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.state import RunDirectory
from tests.lm.finetune.test_finetune import LINES, count

pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.fixture
def run(run_command):
    return lambda kind, lines, *options, **others: run_command(kind, lines, "--rank=4", *options, **others)


@pytest.mark.slow
def test_it_learns_what_follows_and_resumes(run, tmp_path, monkeypatch):
    """From texts that invoke it; PEFT's files have the tokens."""
    starts = np.random.default_rng(0).integers(0, 10, 40)
    texts = [f"{count(i, 2)} five six {count(i + 2, 3)}" for i in starts]
    lines = [{"text": text} for text in [*texts, "one two", "five", "six"]]
    options = ["--invocation=five six", "--quantize=nf4", "--checkpoint-every=4", "--remat", "--dropout=0.1"]
    status, told = run("llama", lines, "--steps=12", *options)
    assert status == 0, told
    assert "3 of 43 examples do not have the tokens of --invocation, and were left out." in told
    before, after = map(float, re.search(r"held-out loss: (\S+) before, (\S+) after", told).groups())
    assert after < 0.8 * before
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == [4 + 5, 4 + 6]
    note = RunDirectory.note

    def interrupted(self, **entry):
        note(self, **entry)
        if entry["step"] == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "note", interrupted)
        assert run("llama", lines, "--steps=12", *options, output="parts")[0] == 130
    assert run("llama", lines, "--steps=12", *options, output="parts")[0] == 0
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("out", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()

    status, told = run("llama", lines, "--steps=2", *options, "--pack", output="packed")
    assert status == 0, told
    assert re.search(r"32 training texts are packed into \d rows", told)

    for more, message in [
        (["--invocation=nine nine"], "no example has the tokens [13, 13] of --invocation"),
        (["--target", "lm_head"], "leave lm_head.weight out of --target"),
    ]:
        status, told = run("llama", lines, *options, *more, output="other")
        assert status == 2
        assert message in told
    status, told = run("bert", LINES["label"], "--invocation=five")
    assert status == 2
    assert "--invocation is for decoders that learn to continue texts" in told


@pytest.mark.parametrize("option", ["--dora", "--merge"])
def test_options_that_need_one_weight_for_all_tokens(option, capsys):
    with pytest.raises(SystemExit):
        main(["--model=m", "--data=d", "--output=o", "--invocation=five", option])
    assert f"{option} cannot be used with --invocation" in capsys.readouterr().err
