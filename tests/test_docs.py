"""Every Python block of the README and of the documentation runs, page by page."""

import re
from pathlib import Path

import jax
import pytest

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
# An indented fence is a block inside a list, a tab or an admonition.
_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)


def _blocks(page: Path) -> list[tuple[int, str]]:
    """The blocks of a page, each with the number of lines in front of its code."""
    text = page.read_text(encoding="utf-8")
    blocks: list[tuple[int, str]] = []
    for match in _BLOCK.finditer(text):
        indent = match["indent"]
        code = "\n".join(line.removeprefix(indent) for line in match["code"].splitlines())
        blocks.append((text.count("\n", 0, match.start("code")), code))
    return blocks


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    # Readers run these under JAX's defaults.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for line, code in _blocks(page):
            # Blank lines in front make a traceback point into the page.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_every_fence_is_closed(page: Path):
    fences = re.findall(r"^[ ]*```", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
