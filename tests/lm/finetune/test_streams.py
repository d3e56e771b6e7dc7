"""Texts from standard input and from pipes, which are read once."""

import io
import sys
from pathlib import Path

import pytest

from quaxlike.lm.finetune import data
from quaxlike.lm.finetune.settings import FinetuneError, forget_streams
from tests.lm.finetune.test_finetune import run  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("default_promotion")


def test_a_stream_is_read_again_until_the_run_ends(monkeypatch):
    """For the fingerprint of the run, say."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "one"}\n')))
    rows, source = [], Path("-")
    for _ in range(2):
        data.read_examples(source, rows.append)
    assert rows == [{"text": "one"}] * 2
    forget_streams()
    rows.clear()
    data.read_examples(source, rows.append)
    assert rows == []
    forget_streams()


def test_devices_are_streams():
    assert data.read_examples(Path("/dev/null"), lambda fields: None).examples == []
    forget_streams()


def test_an_error_of_json_has_one_line_number(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n{"text"}\n')
    with pytest.raises(FinetuneError, match=r"data\.jsonl:2: not JSON: .*, at column 8$"):
        data.read_examples(tmp_path / "data.jsonl", lambda fields: None)


@pytest.mark.slow
def test_a_run_from_a_pipe_is_resumed(run, tmp_path, monkeypatch):  # noqa: F811
    """By the same texts, through whichever pipe they come; others are refused."""
    assert run("llama", "text", "--steps=1", "--quantize=none")[0] == 0
    lines = (tmp_path / "data.jsonl").read_bytes()
    for output, text, expected in (("out2", lines, 0), ("out2", lines, 0), ("out2", lines[::-1], 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        options = ["--data=-", "--steps=1", "--quantize=none"]
        assert run("llama", "text", *options, output=output)[0] == expected
    file = "adapter_model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "out2" / file).read_bytes()
