"""`python -m benchmarks.rivals [--only TEXT …] [--cores N …] [--quick] [--record]`: whole jobs beside rivals.

Both sides load the same weights, random ones of a Llama, and read the same tokens, on a CPU. Each is a
process of its own; the two are kept alive and take turns, so that they see the machine in the same state.
Rows about the same model follow one another, in the same processes. A ratio is ours ÷ theirs of neighbouring
runs: below 1, quaxlike takes less time. `--record` writes `benchmarks/rivals.json`, and the page and the
picture of the documentation, which keep what other processors took. `--quick` takes a small model: it shows
that the rows run, not how long they take.

Needs `pip install 'quaxlike[rivals]'`; rows whose rival is missing are told.
"""

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypedDict

from .. import provenance
from . import files
from .rows import ROWS, Row, by_model

RECORD = pathlib.Path(__file__).parent.with_name("rivals.json")
DOCS = RECORD.parent.parent / "docs"
PAGE, PICTURE = DOCS / "rivals.md", DOCS / "assets" / "rivals.png"
_PACKAGES = ("jax", "torch", "transformers", "bitsandbytes", "peft", "llama-cpp-python", "scipy")


class Record(TypedDict):
    """What was measured on a processor."""

    date: str
    """Of the newest row."""
    versions: str
    rows: list[dict[str, Any]]
    """Each with the `commit` that it was measured at, if that is known."""


class Missing(Exception):
    """A side that cannot be run, for the reason in the message."""


class Side:
    """A process of `worker.py`."""

    def __init__(self, cores: int) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        settings = dict.fromkeys(names, str(cores)) | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rivals.worker", str(cores)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._told, text=True,
            env=os.environ | settings,
        )  # fmt: skip

    def prepare(self, job: dict[str, Any]) -> None:
        """Waits until everything is ready to run."""
        self._ask(job)

    def run(self) -> float:
        return self._ask(None)["seconds"]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._told.close()

    def _ask(self, job: dict[str, Any] | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._told.seek(0)
            lines = self._told.read().decode(errors="replace").split("\n")
            raise Missing(next((line.strip() for line in reversed(lines) if line.strip()), "it ended"))
        message = json.loads(line)
        if "missing" in message:
            raise Missing(message["missing"])
        return message


class Sides:
    """The two processes. Rows that read the same model, one after the other, have the same process."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Side]] = {}

    def prepared(self, place: str, job: dict[str, Any], cores: int, model: Any) -> Side:
        """The process at a `place`, with the job ready: the one that was there, if it has the `model`."""
        known, side = self._kept.get(place, (None, None))
        if side is None or model is None or known != (model, cores):
            self.close(place)
            side = Side(cores)
            self._kept[place] = (model, cores), side
        side.prepare(job)
        return side

    def close(self, *places: str) -> None:
        for place in places or [*self._kept]:
            if place in self._kept:
                self._kept.pop(place)[1].close()


def measure(
    row: Row, cores: int, folder: pathlib.Path, size: files.Size, repeats: int, sides: Sides | None = None
) -> dict[str, Any]:
    """What was measured of a row, or `missing`: why its rival could not be run. Raises `Missing` if ours
    cannot. The processes that `sides` holds are used, and left there."""
    if sides is None:
        with contextlib.closing(Sides()) as sides:
            return measure(row, cores, folder, size, repeats, sides)
    job = {"folder": str(folder), "size": size}
    of_ours = job | {"side": "ours", "function": row.ours, "options": {**row.options, **row.of_ours}}
    side, _, function = row.theirs.rpartition(".")
    of_theirs = job | {"side": side or "theirs", "function": function}
    of_theirs |= {"options": {**row.options, **row.of_theirs}}
    found: dict[str, Any] = {"row": row.name, "rival": row.rival, "cores": cores, "at most": row.limit}
    found["commit"] = _commit()
    load = os.getloadavg()[0]

    def runs(place: str, job: dict[str, Any], model: Any) -> Iterator[float]:
        """The seconds of one run after the other; the first is not to be counted."""
        if not row.starts:
            prepared = sides.prepared(place, job, cores, model)
            while True:
                yield prepared.run()
        while True:
            begin = time.perf_counter()
            sides.prepared(place, job, cores, None).run()
            seconds = time.perf_counter() - begin
            sides.close(place)
            yield seconds

    of_model, of_rivals_model = row.models
    try:
        theirs = runs("theirs", of_theirs, of_rivals_model)
        next(theirs)
    except Missing as error:
        sides.close("theirs")
        return found | {"missing": str(error)}
    ours = runs("ours", of_ours, of_model)
    next(ours)
    pairs = [(next(ours), next(theirs)) for _ in range(repeats)]
    ratios = sorted(a / b for a, b in pairs)
    return found | {
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "seconds": [float(f"{statistics.median(of_side):.3g}") for of_side in zip(*pairs, strict=True)],
        "repeats": repeats,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


#: When the first row is measured: files that a run has recorded since then do not make the checkout dirty.
_commit = functools.cache(provenance.commit)


def processor() -> str:
    """The processor of this machine, and how many cores it has."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next(
        (x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine()
    )
    flags = next((x for x in lines if x.startswith("flags")), "")
    known = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("amx_bf16", "AMX"))
    has = [label for flag, label in known if f" {flag}" in flags]
    return f"{name} ({', '.join(has) or platform.machine()}), {os.cpu_count()} cores"


HEADERS = ("work", "beside", "cores", "ours ÷ theirs", "range", "at most", "ms, ours and theirs", "load")


def cells(found: dict[str, Any]) -> list[str]:
    first = [found["row"], found["rival"], str(found["cores"])]
    if "missing" in found:
        return [*first, f"not run: {found['missing']}", "", f"{found['at most']:g}", "", ""]
    least, most = found["range"]
    return [
        *first, f"{found['ratio']:.2f}", f"{least:.2f}–{most:.2f}", f"{found['at most']:g}", _times(found),
        "–".join(f"{load:g}" for load in found["load"]),
    ]  # fmt: skip


def _times(found: dict[str, Any]) -> str:
    return ", ".join(f"{1e3 * seconds:.3g}" for seconds in found["seconds"])


def page(records: Mapping[str, Record]) -> str:
    """The page of the documentation: a row for each work."""
    size = files.FULL
    parts = [_INTRODUCTION.format(size=size, millions=size.parameters / 1e6), _PICTURE]
    parts.append(_lines(_table(records, apart=False)))
    if len(of_gguf := list(_of_gguf(records))) > 2:
        parts += [_GGUF, _lines(of_gguf)]
    parts += list(_origins(records))
    if above := list(_above(records)):
        parts.append("\n".join(["Why rows are above their targets:", "", *above]))
    if len(apart := list(_table(records, apart=True))) > 2:
        parts += [_APART, _lines(apart)]
    return "\n\n".join(parts) + "\n"


def _lines(table: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def _origins(records: Mapping[str, Record]) -> Iterator[str]:
    """Where the figures come from. Versions are told once, if they are the same everywhere."""
    versions = {record["versions"] for record in records.values()}
    for on, record in records.items():
        of_its_own = f", with {record['versions']}" if len(versions) > 1 else ""
        yield f"**{on}**: {record['date']}, {_commits(record)}{of_its_own}."
    if len(versions) == 1:
        yield f"All with {versions.pop()}."


def _commits(record: Record) -> str:
    """The commits of the rows."""
    known = dict.fromkeys(commit for row in record["rows"] if (commit := row.get("commit")))
    return f"at commit {', '.join(known)}" if known else "at a commit that was not noted"


def _table(records: Mapping[str, Record], apart: bool) -> Iterator[list[str]]:
    """The ratios, a column for each processor and number of cores; or `apart`, those that tell how slow the
    rival is on a processor."""
    rows = {row.name: row for row in ROWS if row.gguf is None}
    shown = _columns(records, lambda on, found: found["row"] in rows and _is_apart(on, found, rows) == apart)
    header = ["work ÷ beside", "at most", *(f"{on}: on {cores}" for on, cores in shown)]
    yield header
    yield ["---"] * len(header)
    for row in rows.values():
        if any(row.name in found for found in shown.values()):
            cells = [_cell(found.get(row.name)) for found in shown.values()]
            yield [f"{row.name} ÷ {row.rival}", f"{row.limit:g}", *cells]


def _of_gguf(records: Mapping[str, Record]) -> Iterator[list[str]]:
    """The ratios of GGUF files: a row for each work, with all forms of it in a cell."""
    rows = {row.name: row for row in ROWS if row.gguf is not None}
    shown = _columns(records, lambda on, found: found["row"] in rows)
    yield ["work", *(f"{on}: on {cores}" for on, cores in shown)]
    yield ["---"] * (1 + len(shown))
    for work, forms in itertools.groupby(rows.values(), lambda row: row.gguf):
        of_work = [*forms]
        cells = [
            ", ".join(_cell(found.get(row.name)) or "–" for row in of_work)
            if any(row.name in found for row in of_work)
            else ""
            for found in shown.values()
        ]
        if any(cells):
            yield [str(work), *cells]


def _columns(
    records: Mapping[str, Record], chosen: Callable[[str, dict[str, Any]], bool]
) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """What was measured of the chosen rows, by name, for each processor and number of cores with any."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for on, record in records.items():
        for x in sorted(record["rows"], key=lambda x: x["cores"]):
            if chosen(on, x):
                found.setdefault((on, x["cores"]), {})[x["row"]] = x
    return found


def _is_apart(on: str, found: Mapping[str, Any], rows: Mapping[str, Row]) -> bool:
    return found["row"] in rows and rows[found["row"]].shows_the_rival(on)


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "missing" in found:
        return f"not run: {found['missing']}"
    return f"**{found['ratio']:.2f}**" if found["ratio"] > found["at most"] else f"{found['ratio']:.2f}"


def _above(records: Mapping[str, Record]) -> Iterator[str]:
    """The reasons why rows are above their limits."""
    rows = {
        x["row"]: None
        for record in records.values()
        for x in record["rows"]
        if x.get("ratio", 0) > x["at most"]
    }
    for why in dict.fromkeys(row.why for row in ROWS if row.why and row.name in rows):
        yield f"- {why}."


_PICTURE = "![Ratios on one core, with their ranges](assets/rivals.png){ .narrow }"
_INTRODUCTION = """\
# Whole jobs, compared with rivals

After this page, you know how long whole jobs take on a CPU with quaxlike, and with what you would pick
instead.

`python -m benchmarks.rivals --record` wrote it; `--only TEXT --cores N` measures single rows. Both sides read
the same weights, random ones of a Llama of {millions:.0f} million ({size.layers} layers of {size.width}), and
the same tokens. Each is a process of its own; they take turns.

- A number is the median of quaxlike's time ÷ the other's: below 1, quaxlike takes less time.
- “At most” is the project's target: numbers above it are bold. “On 1” is on one core.
- “Load and 32 tokens” times a whole process. It and “second start” are second runs, so the commands' cache
  has the compiled programs.

The seconds of both sides, and their ranges, are in `benchmarks/rivals.json`.\
"""
_GGUF = """\
GGUF files ÷ llama.cpp: by default, in bfloat16, and with inputs of products in 8 bits (`compute="int8"`), as
there. At most 0.9 for prompts, and 1.3, 1.3 and 1 for tokens.\
"""
_APART = """\
## Where the other is slow

With AVX2 alone, PyTorch's products in bfloat16, and those of bitsandbytes, take many times as long as with
AVX-512. These ratios show that, and little of quaxlike.\
"""


def draw(records: Mapping[str, Record], path: pathlib.Path) -> None:
    """The picture: points for each row on one core, but for GGUF's prompts, their ranges, and limits."""
    import matplotlib.pyplot as plt

    rows = {row.name: row for row in ROWS}
    drawn = {
        on: [
            x
            for x in record["rows"]
            if x["cores"] == 1
            and "ratio" in x
            and not (_is_apart(on, x, rows) or rows[x["row"]].theirs == "llama_prefill")
        ]
        for on, record in records.items()
    }
    shown, order = list(itertools.chain(*drawn.values())), list(rows)
    shown.sort(key=lambda found: order.index(found["row"]), reverse=True)
    names = list(dict.fromkeys(map(_name, shown)))
    # As wide as a phone can show, so names stand above their points.
    figure, axes = plt.subplots(figsize=(4.6, 1.4 + 0.36 * len(names) + 0.3 * len(records)))
    for place, (on, measured) in enumerate(drawn.items()):
        at = [names.index(_name(x)) + 0.15 * (place - (len(drawn) - 1) / 2) for x in measured]
        ratios = [x["ratio"] for x in measured]
        sides = [[abs(x["range"][i] - x["ratio"]) for x in measured] for i in (0, 1)]
        axes.errorbar(ratios, at, xerr=sides, fmt="o", color=f"C{place}", label=on, capsize=2, markersize=4)
    limits = [next(x["at most"] for x in shown if _name(x) == name) for name in names]
    axes.scatter(limits, range(len(names)), marker="|", s=60, color="black", label="at most")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(names))
    for i, name in enumerate(names):
        axes.text(0.01, i + 0.3, name, transform=axes.get_yaxis_transform(), fontsize=8)
    axes.set_xlabel("time of quaxlike ÷ time of the other")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _name(found: Mapping[str, Any]) -> str:
    return f"{found['row']} ÷ {found['rival']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names contain one of these")
    add("--cores", nargs="+", type=int, default=[1, 2], help="on how many cores (default: 1 2)")
    add("--repeats", type=int, default=7, help="runs of each side that are counted (default: 7)")
    add("--quick", action="store_true", help="a small model and two repeats")
    add("--record", action="store_true", help="write rivals.json, and the page and picture of the docs")
    arguments = parser.parse_args()
    if arguments.record and arguments.quick:
        parser.error("--record needs the whole model: leave --quick out")
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150)
    size, repeats = (files.QUICK, 2) if arguments.quick else (files.FULL, arguments.repeats)
    records: dict[str, Record] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept = records.get(processor())
    versions = provenance.versions(_PACKAGES)
    if kept is not None and kept["versions"] != versions:
        if arguments.record:
            console.print(f"Rows of other versions are dropped: {kept['versions']}", markup=False)
        kept = None
    measured = {(x["row"], x["cores"]): x for x in (kept["rows"] if kept else ())}
    table = Table(*HEADERS)
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work) / "model"
        subprocess.run([sys.executable, "-c", _MAKE, str(folder), json.dumps(size)], check=True)
        with contextlib.closing(Sides()) as sides:
            chosen = [row for row in by_model(ROWS) if any(text in row.name for text in arguments.only)]
            for cores, row in itertools.product(arguments.cores, chosen):
                found = measure(row, cores, folder, size, repeats, sides)
                measured[row.name, cores] = found
                print(*cells(found), sep="  ", flush=True)
                table.add_row(*cells(found))
                if arguments.record:
                    record(records, measured)
    console.print(table)


def record(records: dict[str, Record], measured: Mapping[tuple[str, int], dict[str, Any]]) -> None:
    """Writes what was measured of each row and number of cores on this processor, and the page and the
    picture, all of it with the versions of this environment."""
    order = [row.name for row in ROWS]
    rows = [found for (name, _), found in measured.items() if name in order]
    rows.sort(key=lambda found: (order.index(found["row"]), found["cores"]))
    records[processor()] = {
        "date": datetime.date.today().isoformat(), "versions": provenance.versions(_PACKAGES), "rows": rows
    }  # fmt: skip
    RECORD.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(records))
    draw(records, PICTURE)


# In a process of its own: the driver keeps no arrays.
_MAKE = (
    "import sys, json, pathlib; from benchmarks.rivals import files; "
    "files.make(pathlib.Path(sys.argv[1]), files.Size(*json.loads(sys.argv[2])))"
)

if __name__ == "__main__":
    main()
