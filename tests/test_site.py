"""The built site: every link and every anchor leads somewhere, every public name is in the reference."""

import html
import html.parser
import pkgutil
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

import quaxlike as ql

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = "\n".join(page.read_text(encoding="utf-8") for page in (_ROOT / "docs").rglob("*.md"))
_ROOMS = [m.name for m in pkgutil.iter_modules(ql.__path__) if m.name not in ("core", "demo", "numpy")]
_MODULES = ["quaxlike", *(f"quaxlike.{room}" for room in _ROOMS if not room.startswith("_"))]
_MODULES += [f"quaxlike.arrays.{m.name}" for m in pkgutil.iter_modules(ql.arrays.__path__) if m.ispkg]


@pytest.mark.parametrize("module", _MODULES)
def test_every_public_name_is_in_the_reference(module):
    """By a directive of its own, or named in a page."""
    described = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", _PAGES, re.MULTILINE)}
    named = set(re.findall(r"`(?:[\w.]+\.)?(\w+)`", _PAGES))
    imported = pytest.importorskip(module, exc_type=ImportError)  # `test_public` imports every module
    public = set(getattr(imported, "__all__", ()))
    assert not public - described - named - {"__version__"}


@pytest.mark.parametrize(
    "word",
    [
        *("orbax", "pickle", "Flax", "GRUCell", "pip install", "PIDController", "gradient checkpoint"),
        *("hf download", "BibTeX", "fp8"),
    ],
)
def test_words_that_people_search_for(word):
    assert word in _PAGES


_DOCS = _ROOT / "docs"
#: Pages of names, and those that are no guides.
_LISTS = {"index.md", "changelog.md", "online-learning.md", "primitives.md"}
_GUIDES = [
    path.relative_to(_DOCS).as_posix()
    for path in sorted(_DOCS.rglob("*.md"))
    if path.parent.name != "api" and path.relative_to(_DOCS).as_posix() not in _LISTS
]


def test_guides_begin_with_what_one_can_do_after_them():
    beginning = re.compile(r"\s*# .+\n\s*After this page, you ")
    in_front = re.compile(r"<!--.*?-->|^!!!.*\n(\n|    .*\n)*", re.MULTILINE)
    texts = {page: in_front.sub("", (_DOCS / page).read_text(encoding="utf-8")) for page in _GUIDES}
    assert not [page for page, text in texts.items() if not beginning.match(text)]


def test_the_documentation_stays_short():
    """Whoever adds a page shortens another one."""
    prose = re.sub(r"^[ ]*```.*?^[ ]*```[ ]*$", "", _PAGES, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 45_000


class _Page(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.mark.slow
def test_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("mkdocs_autorefs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stderr
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("*.html")}
    assert len(pages) > 40
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of the host
            continue
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = urllib.parse.unquote(parts.fragment)
            there = target.is_file() and (
                not anchor or target not in pages or anchor in pages[target].anchors
            )
            if not there:
                dead.append((str(path.relative_to(tmp_path)), link))
    assert not dead
    for path in pages:  # a list that Markdown takes for the end of a paragraph
        text = re.sub(r"<(pre|script)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r"[^\n]{0,80}\n- <code>", text), path
    signatures = [line for path in pages for line in _signatures(path.read_text(encoding="utf-8"))]
    assert len(signatures) > 200
    assert max(map(len, signatures)) <= 84  # what a page shows of a line


def _signatures(text: str) -> list[str]:
    """The lines of the signatures in a page of the reference."""
    blocks = re.findall(r'<div class="doc-signature highlight">(.*?)</div>', text, re.DOTALL)
    return [line for block in blocks for line in html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines()]
