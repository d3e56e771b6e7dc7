"""Reports as tables: plain text, or self-contained HTML pages.

File names and messages can contain arbitrary text, so everything from the user's program is escaped.
"""

import html
import pathlib
from collections.abc import Sequence
from typing import Any

from ..._files import replacing

_STYLE = """
.quaxlike { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
.quaxlike pre { font: 13px/1.5 ui-monospace, monospace; padding: .8em 1em; border-radius: 6px;
  background: light-dark(#f4f4f5, #27272a); overflow-x: auto; }
.quaxlike .scroll { overflow-x: auto; }
.quaxlike table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.quaxlike th { position: sticky; top: 0; text-align: left; background: light-dark(#fff, #18181b); }
.quaxlike th, .quaxlike td { padding: .35em .7em; vertical-align: top; text-align: left;
  border-bottom: 1px solid light-dark(#e4e4e7, #3f3f46); }
.quaxlike td { font-family: ui-monospace, monospace; font-size: 12.5px; overflow-wrap: anywhere; }
.quaxlike td.number { text-align: right; overflow-wrap: normal; }
.quaxlike tr.materialised td { background: light-dark(#fef2f2, #450a0a); }
.quaxlike tr.materialised td:nth-child(3) { font-weight: 600; color: light-dark(#b91c1c, #fca5a5); }
.quaxlike label { display: inline-block; margin: .4em 0; }
.quaxlike:has(.only:checked) tbody tr:not(.materialised) { display: none; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ margin: 2em auto; max-width: 110em; padding: 0 1.5em; color-scheme: light dark; }}</style>
</head>
<body>
<h1 style="font: 600 1.5em system-ui, sans-serif">{title}</h1>
{fragment}
</body>
</html>
"""


def plain_table(table: Sequence[Sequence[str]]) -> str:
    """Formats a table as text, with each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def fragment(rows: Sequence[Any], table: Sequence[Sequence[str]], summary: str) -> str:
    """Returns the summary and the table with their style, as shown in a notebook.

    **Arguments:**

    - `rows`: the report's rows, used for anything omitted from the cells.
    - `table`: the column headings, and the cells of each row.
    """
    columns, *lines = table
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join(_row(columns, row, line) for row, line in zip(rows, lines, strict=True))
    return (
        f'<div class="quaxlike"><style>{_STYLE}</style>\n'
        f"<pre>{html.escape(summary)}</pre>\n"
        '<label><input type="checkbox" class="only"> only materialised rows</label>\n'
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div></div>"
    )


def _row(columns: Sequence[str], row: Any, line: Sequence[str]) -> str:
    # Cells only have space for shortened paths, so show the full paths on hover.
    titles = {"outcome": row.rule or row.hint, "line": row.source, "notes": row.through}
    cells = []
    for column, cell in zip(columns, line, strict=True):
        title = f' title="{html.escape(titles[column])}"' if titles.get(column) else ""
        number = ' class="number"' if column in ("count", "bytes") else ""
        cells.append(f"<td{number}{title}>{html.escape(cell)}</td>")
    return f'<tr class="{row.outcome}">{"".join(cells)}</tr>'


def write(
    path: str | pathlib.Path, rows: Sequence[Any], table: Sequence[Sequence[str]], summary: str
) -> None:
    """Writes the page atomically: the file only appears once it is complete."""
    page = _PAGE.format(title="quaxlike: what was dispatched", fragment=fragment(rows, table, summary))
    with replacing(path) as file:
        file.write(page.encode())
