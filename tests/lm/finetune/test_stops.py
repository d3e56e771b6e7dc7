"""Runs of `python -m quaxlike.lm.finetune` that are stopped at moments of all kinds, and resumed.

`tests/kills` stops processes at random moments.
"""

import itertools
import signal
import sys

import pytest

from quaxlike.files.tensors import open_tensors
from quaxlike.lm.finetune import run as finetune_run
from quaxlike.lm.finetune.state import RunDirectory, Saved
from quaxlike.lm.finetune.train import Training
from tests.lm.finetune.test_finetune import log_of, run  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.usefixtures("default_promotion"),
    pytest.mark.skipif(sys.platform == "win32", reason="Processes cannot be interrupted so there."),
]

OPTIONS = [
    "bert", "label", "--steps=9", "--quantize=none", "--checkpoint-every=4", "--eval-every=3",
    "--dropout=0.1", "--target", "query", "--batch-size=4",
]  # fmt: skip


@pytest.fixture
def stopped(run, monkeypatch):  # noqa: F811
    """Runs the command with a signal before the nth call of a function; its status and what it told."""

    def stopped(owner, name, nth, number=signal.SIGINT):
        calls, called = itertools.count(1), getattr(owner, name)

        def interrupting(*arguments, **options):
            if next(calls) == nth:
                signal.raise_signal(number)
            return called(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupting)
            return run(*OPTIONS)

    return stopped


@pytest.mark.slow
def test_a_stopped_run_is_saved_after_its_step(stopped, run, tmp_path):  # noqa: F811
    """Whatever it was doing. Checkpoints are counted from there; the resumed run is the uninterrupted one."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert run(*OPTIONS, output="whole")[0] == 0
    for owner, name in [(finetune_run, "task_for"), (Training, "memory")]:  # before the first step is done
        status, told = stopped(owner, name, 1)
        assert status == 130
        assert "Stopped. Nothing was saved yet: the same command begins with the first step." in told
        assert not (out / "checkpoint.safetensors").exists()
    moments = [
        (Training, "_placed", 2, signal.SIGTERM, 1),  # in the first step
        (Training, "measure", 1, signal.SIGINT, 3),  # in the evaluation after the third
        (RunDirectory, "save", 1, signal.SIGTERM, 8),  # in the checkpoint four steps later
        (Training, "measure", 1, signal.SIGINT, 9),  # in the last evaluation
    ]
    for owner, name, nth, number, step in moments:
        status, told = stopped(owner, name, nth, number)
        file = out / "checkpoint.safetensors"
        assert status == 128 + number
        assert (
            f"Stopped. The same command resumes from the last checkpoint, after step {step}: {file}" in told
        )
        assert int(open_tensors(file)["step"]) == log_of(out)[-1]["step"] == step
    status, told = run(*OPTIONS)
    assert status == 0
    assert "All 9 steps are done." in told
    for name in ("log.jsonl", "adapter_model.safetensors", "adapter_config.json", "checkpoint.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_what_was_saved_before_is_told_before_the_run_is_resumed(stopped, tmp_path):
    """It may be that of other settings, so nothing is promised."""
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "checkpoint.safetensors"
    file.write_bytes(b"")
    status, told = stopped(finetune_run, "task_for", 1)
    assert status == 130
    assert f"Stopped before the run began; {file} is as it was." in told


def test_another_process_saves(tmp_path):
    assert str(Saved(tmp_path, here=False)) == "Stopped."
