"""The rows that `benchmarks.gpu` measured on each device, kept in `gpu.json`, and their page."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

RECORD = pathlib.Path(__file__).with_name("gpu.json")
PAGE = RECORD.parent.parent / "docs" / "gpu.md"
H200_BYTES_PER_SECOND = 4.8e12


class Record(TypedDict):
    """What was measured on a device; `None` stands for what was not noted."""

    date: str
    commit: str | None
    command: str | None
    versions: str
    driver: str | None
    clocks: str | None
    limits: dict[str, float] | None
    """Bytes and floating-point operations a second, as measured in the same run."""
    rows: list[dict[str, Any]]
    """Each has `case` and either `error`, or `baseline`, `seconds` and `baseline seconds` (medians, and half
    of the range between the quartiles), `ratio`, `must`, `goal`, `limit` and `errors`."""


def read(file: pathlib.Path = RECORD) -> dict[str, Record]:
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def write(records: Mapping[str, Record], file: pathlib.Path) -> None:
    """Writes records; those in `gpu.json` with the page of the documentation."""
    file.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if file.resolve() == RECORD:
        PAGE.write_text(page(records), "utf-8")


def times(device: str) -> dict[str, float]:
    """The seconds of our kernels on a device, by their cases."""
    rows = read()[device]["rows"] if device in read() else []
    return {row["case"]: row["seconds"][0] for row in rows if "seconds" in row}


def page(records: Mapping[str, Record]) -> str:
    return "\n\n".join([_INTRODUCTION, *(_section(*each) for each in records.items())]) + "\n"


def _section(device: str, record: Record) -> str:
    of = {"Commit": record["commit"], "Driver": record["driver"], "Clocks": record["clocks"]}
    known = [f"{name}: {value or 'not noted'}." for name, value in of.items()]
    by = f", by `{record['command']}`" if record["command"] else ""
    about = f"{record['date']}{by}, with {record['versions']}. {' '.join(known)}"
    if record["limits"] is not None:
        bytes_, flops = (record["limits"][name] for name in ("bytes_per_second", "flops_per_second"))
        about += f" Measured limits: {bytes_ / 1e9:.0f} GB/s, {flops / 1e12:.3g} TFLOP/s."
    return f"## {device}\n\n{about}\n\n" + "\n".join(_table(record["rows"]))


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| product | µs | beside | its µs | ratio | must, goal | error |"
    yield "| --- " * 7 + "|"
    for row in rows:
        cells = [row["case"], f"not measured: {row['error']}"] if "error" in row else _cells(row)
        yield "| " + " | ".join(cells + [""] * (7 - len(cells))) + " |"


def _cells(row: dict[str, Any]) -> list[str]:
    targets = ", ".join("—" if row[name] is None else f"{row[name]:g}" for name in ("must", "goal"))
    return [
        row["case"],
        _time(row["seconds"]),
        row["baseline"],
        _time(row["baseline seconds"]) if row["baseline seconds"] else "—",
        f"{row['ratio']:.2f}" if row["ratio"] else "—",
        targets if targets != "—, —" else "",
        f"{row['errors'][0]:.1e}" if row["errors"] else "",
    ]


def _time(seconds: tuple[float, float]) -> str:
    median, spread = (1e6 * x for x in seconds)
    return f"{median:.0f} ± {spread:.0f}" if median >= 100 else f"{median:.3g} ± {spread:.1f}"


_INTRODUCTION = """\
# Kernels on GPUs and TPUs

After this page, you know how long [products](kernels.md) take on the devices measured so far.
[Performance](performance.md#kernels-on-a-gpu) says what is known of other devices.

`python -m benchmarks.gpu --json` wrote it. On your GPU or TPU, run
`python -m benchmarks.gpu --json rows.json` in a checkout. This takes 8 minutes (`--minutes`) and writes the
rows to a file. `--add rows.json` puts them on this page. [A notebook](notebooks/kernels.ipynb) measures on
Colab.

Each product and its baseline (“beside”) take turns, on weights that are in no cache. Results are checked on
fresh random inputs. `M` counts the rows of `x`.

- Times are medians ± half the range between the quartiles.
- The ratio is the baseline's time divided by quaxlike's: above 1, quaxlike takes less time.
- “Must” and “goal” are the project's targets for the ratio.
- “XLA” is its product with the weight in bfloat16.
- The error is the relative distance from the float32 product."""
