"""Every Python block of the README, of the documentation and of the docstrings runs."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import jax
import pytest

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_MODULES = sorted((_ROOT / "quaxlike").rglob("*.py"))
# An indented fence is a block inside a list, a tab or an admonition.
_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)


def _blocks(text: str) -> list[tuple[int, str]]:
    """The blocks of a text, each with the number of lines in front of its code."""
    return [
        (text.count("\n", 0, match.start("code")), textwrap.dedent(match["code"]))
        for match in _BLOCK.finditer(text)
    ]


def _examples(module: Path) -> list[tuple[int, str]]:
    """The blocks in the docstrings of a module, likewise."""
    examples: list[tuple[int, str]] = []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstring = node.body[0]
            assert isinstance(docstring, ast.Expr)
            text = ast.literal_eval(docstring.value)
            examples += [(docstring.lineno - 1 + line, code) for line, code in _blocks(text)]
    return examples


def _run(path: Path, line: int, code: str, namespace: dict[str, object]) -> None:
    # Readers run these under JAX's defaults.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # Blank lines in front make a traceback point into the file.
        exec(compile("\n" * line + code, str(path), "exec"), namespace)


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    for package in re.findall(r"<!-- needs: (\w+) -->", text):
        pytest.importorskip(package, reason=f"the page runs with the package {package} alone")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in _blocks(text):
        _run(page, line, code, namespace)


@pytest.mark.slow
@pytest.mark.parametrize("module", [m for m in _MODULES if _examples(m)], ids=_name)
def test_docstrings(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An example sees the globals of its module, as doctest has it."""
    monkeypatch.chdir(tmp_path)
    dotted = ".".join(module.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
    for line, code in _examples(module):
        _run(module, line, code, dict(vars(importlib.import_module(dotted))))


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_every_fence_is_closed(page: Path):
    fences = re.findall(r"^[ ]*```", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
