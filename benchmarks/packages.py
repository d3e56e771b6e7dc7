"""`python -m benchmarks.packages [--record] [--only TEXT …]`: which functions of other packages take Values.

`quaxlike.testing.check_program` is called on public functions of each package. `--record` writes what it
found to `benchmarks/packages.json`, and the page of the documentation. Packages that are not installed are
left out (`pip install '.[test,frameworks]'` installs them all); what was recorded of them before is kept.
"""

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

# Each program is small and runs once: it does not repay that its machine code is optimised.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
from rich.console import Console

from quaxlike.testing import ProgramReport, check_program
from quaxlike.testing.zoo import ZOO

from .package_functions import PACKAGES

RECORD = pathlib.Path(__file__).with_name("packages.json")
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "what-runs.md"


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of one function."""

    name: str
    checks: int  # kinds of Values times arguments
    passed: int
    where: str = ""  # the line, for a function that fails
    why: str = ""

    @property
    def runs(self) -> bool:
        return self.passed == self.checks


def measured(name: str, fn: Callable[..., Any], *args: Any, which: Sequence[str] = tuple(ZOO)) -> Row:
    """Calls `check_program` on a function."""
    # Solvers that do not converge in half precision say so.
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check_program(fn, *args, which=which)
    passed = len(report.checks) - len(report.failures)
    return Row(name, len(report.checks), passed, *_first_failure(report))


def _first_failure(report: ProgramReport) -> tuple[str, str]:
    """The line of the package, and the reason, with the kinds of Values and the transforms that fail."""
    if not report.failures:
        return "", ""
    first = report.failures[0]
    kinds = dict.fromkeys(check.name.partition(",")[0] for check in report.failures)
    failing = (t for check in report.failures for t, result in check.results.items() if result == "failed")
    text = " ".join(first.message.partition("\n")[0].partition(": ")[2].split())
    text = re.sub(r"0x[0-9a-f]+|/\S*/", "", text)
    lines = first.culprit.split(", which calls ")
    where = next((line for line in reversed(lines) if "-packages" in line), "")
    where = where.rpartition("-packages" + os.sep)[2].partition(":")[0]
    return where, f"{', '.join(kinds)}; {', '.join(dict.fromkeys(failing))}: {text[:160]}"


def rows_of(package: str, only: Sequence[str] = ()) -> Iterator[Row]:
    for name, (fn, *args) in PACKAGES[package].functions().items():
        if not only or any(text in f"{package}.{name}" for text in only):
            yield measured(name, fn, *args, which=PACKAGES[package].which)


def installed() -> list[str]:
    return [name for name, package in PACKAGES.items() if importlib.util.find_spec(package.needs)]


def page(record: dict[str, Any]) -> str:
    """The page of the documentation."""
    found = {name: [Row(**row) for row in rows] for name, rows in record["rows"].items()}
    counts = "\n".join(
        f"| {name} {record['versions'][name]} | {len(rows)} | {sum(row.runs for row in rows)} |"
        f" {sum(row.checks for row in rows)} | {sum(row.passed for row in rows)} |"
        for name, rows in found.items()
    )
    reasons = "\n".join(
        f"| {name} | `{row.name}` | {row.checks - row.passed} of {row.checks} | "
        f"{f'`{row.where}`' if row.where else ''} | {_cell(row.why)} |"
        for name, rows in found.items()
        for row in rows
        if not row.runs
    )
    running = "\n\n".join(
        f"**{name}**: {', '.join(f'`{row.name}`' for row in rows if row.runs)}."
        for name, rows in found.items()
    )
    return TEXT.format(counts=counts, reasons=reasons, running=running, jax=record["versions"]["jax.numpy"])


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


TEXT = """\
# What runs under quaxify

After this page, you know which functions of other packages take any kind of array, and why some do not.

`python -m benchmarks.packages --record` wrote it. It calls
[`check_program`](testing.md#does-my-function-take-any-array) on public functions, with its
[six kinds][quaxlike.testing.check_program] of Values in place of arrays. The results must be those of the
same arrays (JAX {jax}):

- eagerly, and under `jit`, `vmap`, `jvp` and `grad`;
- with `quaxify` around a `jit`, within one, and within another `quaxify`.

A check is one kind of Values in one argument, or in all, under all these transforms that arrays support.
Layers are functions of weights and inputs. Optimisers are functions of parameters and gradients, for two
steps. Solvers run on three kinds.

| package | functions | run | checks | pass |
| --- | --- | --- | --- | --- |
{counts}

## Functions that fail, and why

| package | function | checks that fail | at | kinds of Values; transforms: the first reason |
| --- | --- | --- | --- | --- |
{reasons}

## Functions that pass

{running}
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write packages.json and the page of the docs")
    parser.add_argument("--only", nargs="+", default=[], help="functions whose names contain one of these")
    args = parser.parse_args()
    console = Console(width=200)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": {}, "rows": {}}
    for package in installed():
        found = []
        for row in rows_of(package, args.only):
            console.print(
                f"{package}.{row.name}: {row.passed} of {row.checks}  {row.where}  {row.why}", markup=False
            )
            found.append(row)
        jax.clear_caches()
        if found:
            _merge(record, package, found)
        if args.record:
            RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
            PAGE.write_text(page(record))


def _merge(record: dict[str, Any], package: str, found: Sequence[Row]) -> None:
    """Puts rows into the record, in the order of the table of functions."""
    new = {row["name"]: row for row in record["rows"].get(package, ())}
    new |= {row.name: dataclasses.asdict(row) for row in found}
    record["rows"][package] = [new[name] for name in PACKAGES[package].functions() if name in new]
    record["rows"] = {name: record["rows"][name] for name in PACKAGES if name in record["rows"]}
    record["versions"][package] = version(PACKAGES[package].needs)


if __name__ == "__main__":
    main()
