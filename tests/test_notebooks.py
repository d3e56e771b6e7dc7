"""Every code cell of the notebooks runs, and notebooks are kept without what they printed."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.samples import use_cache

_FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
_NOTEBOOKS = sorted(_FOLDER.glob("*.ipynb"))


def _cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def _code(cell: dict[str, Any]) -> str:
    """The Python of a cell, without commands of IPython, which install packages."""
    return "".join(line for line in cell["source"] if not line.startswith(("%", "!")))


def test_there_are_notebooks():
    assert {path.stem for path in _NOTEBOOKS} == {"own-type", "lora-nf4", "fine-tune", "kernels"}


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert re.match(r"# .+\n\nAfter this notebook, you can ", "".join(notebook["cells"][0]["source"]))
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile(_code(cell), str(path), "exec")
            assert max(map(len, _code(cell).splitlines()), default=0) <= 84


@pytest.mark.slow
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUAXLIKE_NATIVE", raising=False)
    use_cache(monkeypatch, tmp_path / "cache")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    # As for readers, who have JAX's defaults.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, cell in enumerate(_cells(path)):
            if cell["cell_type"] == "code":
                exec(compile(_code(cell), f"{path.name}, cell {number}", "exec"), namespace)
