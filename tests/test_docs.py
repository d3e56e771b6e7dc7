"""Every Python block of the README, the documentation and the docstrings runs, and prints what pages show.

A block ```` ```{.text .output} ```` behind one of Python is what that one prints.
`QUAXLIKE_WRITE_OUTPUTS=1 pytest -n0 -m slow tests/test_docs.py` writes them anew.
"""

import ast
import contextlib
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import jax
import pytest

from quaxlike.core.rules.registry import GLOBAL
from quaxlike.kernels.native.library import library
from quaxlike.lm.families import FAMILIES
from quaxlike.lm.models import MIXERS
from tests.samples import use_cache

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_MODULES = sorted((_ROOT / "quaxlike").rglob("*.py"))
# An indented fence is a block inside a list, a tab or an admonition.
_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$"
    r"(?:\n\n(?P=indent)```\{\.text \.output\}\n(?P<output>.*?)^(?P=indent)```[ ]*$)?",
    re.MULTILINE | re.DOTALL,
)
#: The columns of a terminal, and of a block of code on a page.
_WIDTH = 84
_WRITES = os.environ.get("QUAXLIKE_WRITE_OUTPUTS") == "1"


def _blocks(text: str) -> list[tuple[int, str]]:
    """The blocks of a text, each with the number of lines in front of its code."""
    return [
        (text.count("\n", 0, match.start("code")), textwrap.dedent(match["code"]))
        for match in _BLOCK.finditer(text)
    ]


def _examples(module: Path) -> list[tuple[int, str]]:
    """The blocks in the docstrings of a module, likewise."""
    examples: list[tuple[int, str]] = []
    source = module.read_text(encoding="utf-8")
    if "```python" not in source:
        return examples
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
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


class _Page:
    """A page that runs as if a reader had put all its blocks into `example.py`."""

    def __init__(self, path: Path) -> None:
        self.path, self.line = path, 0
        self.namespace: dict[str, object] = {"__name__": "__main__"}
        self.wrong: list[str] = []

    def run(self, block: re.Match[str]) -> str:
        """The text of the page for the block, whose output is what it printed if the page shows one."""
        code, shown = textwrap.dedent(block["code"]), block["output"]
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            try:
                _run(Path("example.py"), self.line, code, self.namespace)
            except BaseException as error:
                error.add_note(f"in {self.path}:{block.string.count(chr(10), 0, block.start('code')) + 1}")
                raise
        self.line += code.count("\n") + 1
        if shown is None:
            return block[0]
        output = re.sub(r"(?<= )/\S*/(?=\w+/\S*\.py:)", "", stdout.getvalue())  # no paths of this machine
        lines = [(block["indent"] + line).rstrip() for line in output.splitlines()]
        printed = "".join(f"{line}\n" for line in lines)
        if _comparable(printed) != _comparable(shown):
            self.wrong.append(f"shown:\n{shown}\nprinted:\n{printed}")
        start, end = (at - block.start() for at in block.span("output"))
        return block[0][:start] + printed + block[0][end:]


def _comparable(text: str) -> str:
    """What has to be as shown: not the lines of the package's sources, which move, nor the layout."""
    return re.sub(r"[\s─━]+", " ", re.sub(r"(\.py):\d+", r"\1", text)).strip()


def _forget_primitives() -> None:
    """Removes the primitives of a page that have rules, which other pages would list."""
    for primitive, rules in list(GLOBAL._rules.items()):
        if rules and all(rule.function.__module__ == "__main__" for rule in rules):
            del GLOBAL._rules[primitive]


@mock.patch.dict(FAMILIES)
@mock.patch.dict(MIXERS)
@pytest.mark.slow
@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(_WIDTH))
    # Readers have not compiled native products yet.
    monkeypatch.delenv("QUAXLIKE_NATIVE", raising=False)
    use_cache(monkeypatch, tmp_path / "cache")
    library.cache_clear()
    text = page.read_text(encoding="utf-8")
    for package in re.findall(r"<!-- needs: ([\w.]+) -->", text):
        pytest.importorskip(
            package, exc_type=ImportError, reason=f"the page runs with the package {package} alone"
        )
    running = _Page(page)
    written = _BLOCK.sub(running.run, text)
    library.cache_clear()
    _forget_primitives()
    if _WRITES:
        page.write_text(written, encoding="utf-8")
    else:
        assert not running.wrong, "\n".join(running.wrong)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_docstrings:  # to read every module takes half a second
        metafunc.parametrize("module", [m for m in _MODULES if _examples(m)], ids=_name)


@pytest.mark.slow
def test_docstrings(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An example sees the globals of its module, as doctest has it."""
    monkeypatch.chdir(tmp_path)
    dotted = ".".join(module.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
    imported = pytest.importorskip(dotted, exc_type=ImportError)  # `test_public` imports every module
    for line, code in _examples(module):
        _run(module, line, code, dict(vars(imported)))


def _fences(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """The blocks of any language in a page or in docstrings: the line, the language, the lines of code."""
    opening: tuple[int, str, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not (fence := re.match(r"^([ ]*)```(.*)$", line)):
            continue
        if opening is None:
            opening = number, fence[2].strip(), len(fence[1])
        else:
            start, language, indent = opening
            yield start, language, [code[indent:] for code in text.splitlines()[start : number - 1]]
            opening = None


_TABLES = re.compile(
    r"^print\((?:ql\.(?:summary|explain|compare_rules)\b|report\)|jax\.make_jaxpr\b)", re.MULTILINE
)


def _open_fences(path: Path, text: str) -> list[str]:
    count = len(re.findall(r"^[ ]*```", text, re.MULTILINE))
    return ["a fence is not closed"] if path.suffix == ".md" and count % 2 else []


def _wide_lines(path: Path, text: str) -> list[str]:
    """At 1280 pixels, a block of code on a page has room for 84 columns; one of the reference for 80."""
    most = _WIDTH if path.suffix == ".md" else 80
    return [
        f"line {start + i} has {len(line)} columns, more than {most}"
        for start, language, lines in _fences(text)
        for i, line in enumerate(lines, 1)
        if len(line) > most and not language.startswith("{")
    ]


def _tables_not_shown(path: Path, text: str) -> list[str]:
    """What a block prints as a table, a report or a jaxpr stands on the page."""
    blocks = _BLOCK.finditer(text) if path.suffix == ".md" else ()
    return [
        f"what this block prints is not shown:\n{block['code']}"
        for block in blocks
        if block["output"] is None and _TABLES.search(textwrap.dedent(block["code"]))
    ]


@pytest.mark.parametrize("check", [_open_fences, _wide_lines, _tables_not_shown])
def test_layout(check: Callable[[Path, str], list[str]]):
    """All offenders, of all pages and docstrings."""
    found = [
        f"{_name(path)}: {problem}"
        for path in (*_PAGES, *_MODULES)
        for problem in check(path, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
