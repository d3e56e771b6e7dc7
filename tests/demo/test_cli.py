"""The demonstration through its command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quaxlike.demo.__main__ import main


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("steps", ["-5", "0", "3.5", "many", ""])
def test_steps_must_be_positive(steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    message = _refused(capsys, f"--steps={steps}", f"--output={tmp_path / 'new'}")
    assert f"argument --steps: expected a whole number of at least 1, found {steps!r}" in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("seed", ["-1", "4294967296", "abc"])
def test_seed_must_fit(seed: str, capsys: pytest.CaptureFixture[str]):
    message = _refused(capsys, f"--seed={seed}")
    assert "argument --seed: expected a whole number from 0 to 4294967295" in message
    assert repr(seed) in message


def test_output_under_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    message = _refused(capsys, f"--output={tmp_path / 'file' / 'inside'}")
    assert "cannot write to" in message
    assert "Not a directory" in message


def test_output_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert "File exists" in _refused(capsys, f"--output={tmp_path / 'file'}")


def test_output_read_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Permissions do not bind a superuser, so the refusal is played.
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert "Permission denied" in _refused(capsys, f"--output={tmp_path}")


def test_unknown_argument(capsys: pytest.CaptureFixture[str]):
    assert "there is no option --stepz. Did you mean --steps?" in _refused(capsys, "--stepz=3")


def test_missing_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "quaxlike.demo.show", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    message = _refused(capsys, f"--output={tmp_path}")
    assert "rich is not installed: pip install 'quaxlike[demo]'" in message


@pytest.mark.slow
def test_help_through_the_module():
    shown = subprocess.run(
        [sys.executable, "-m", "quaxlike.demo", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    for option in ("--steps", "--seed", "--output"):
        assert re.search(rf"^\s+{option}", shown.stdout, re.MULTILINE)
