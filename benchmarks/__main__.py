"""`python -m benchmarks [--quick] [--json FILE] [--only TEXT]`: the dispatch and tracing table."""

import argparse
import json
import pathlib

import jax
from rich.console import Console
from rich.table import Table

from . import dispatch, transformer
from .harness import Case, Measured, measure

RATIOS = ("quax", "by hand", "plain", "equinox", "few rules")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and no growth to 10,000")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    console = Console(width=150)
    if dispatch.quax is None:
        console.print(r"quax is not installed (pip install '.\[benchmark]'): its column is left out.")
    measured = [
        measure(case, repeats=7 if args.quick else 25)
        for case in _cases(args.quick)
        if args.only in case.name
    ]
    console.print(_table(measured))
    if args.json is not None:
        args.json.write_text(json.dumps([m.as_json() for m in measured], indent=2))


def _cases(quick: bool) -> list[Case]:
    return [
        *dispatch.chains(),
        *dispatch.calls(),
        *dispatch.control_flow(),
        *dispatch.many_jits(),
        *dispatch.many_rules(),
        *dispatch.growth(quick),
        *transformer.cases(),
        *dispatch.imports(),
    ]


def _table(measured: list[Measured]) -> Table:
    table = Table(title=f"µs per operation, medians; JAX {jax.__version__}, {jax.default_backend()}")
    table.add_column("case")
    ways = ("plain", "by hand", "equinox", "few rules", "quax", "quaxlike")
    used = [way for way in ways if any(way in m.median for m in measured)]
    for way in used:
        table.add_column(way, justify="right")
    table.add_column("quaxlike ÷", justify="right")
    for m in measured:
        cells = [f"{1e6 * m.median[way]:,.1f}" if way in m.median else "" for way in used]
        ratios = [(way, m.ratio("quaxlike", way)) for way in RATIOS]
        table.add_row(m.case.name, *cells, "  ".join(f"{way} {r:.2f}" for way, r in ratios if r is not None))
    return table


if __name__ == "__main__":
    main()
