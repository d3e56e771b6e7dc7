"""Statistics of the compiled kernels, for machines not at hand: `python -m benchmarks.kernels_check`.

`pip install '.[kernels-check]'` installs the compilers: XLA's and NVIDIA's for an H100 and an A100, libtpu
for TPU v5e and v6e. Each product is compiled as it would be on the device. The statistics are registers,
spills, shared memory, temporaries and, on TPUs, the bundles of a grid step. A row says so if this release of
JAX cannot compile it. The last recorded run is in `benchmarks/compiled.json`; `--check` compares with it, and
fails if a kernel got worse.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from . import compiled_rows
from .targets import TARGETS, Target

RECORD = pathlib.Path(__file__).with_name("compiled.json")
PAGE = pathlib.Path(__file__).with_name("compiled.md")

# What the library's product may take: 128 MiB of a decoded weight, and as much again in all.
_LIBRARY_BYTES = 2**28

Figures = dict[str, Any]


def compile_row(row: compiled_rows.Row, target: Target, device: Any, dump: pathlib.Path) -> Figures:
    """Compiles a row for a target's device; `dump` is where the compilers were told to write."""
    import jax

    for file in dump.iterdir():
        file.unlink()
    sharding = jax.sharding.SingleDeviceSharding(device)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    with target.at_hand() if row.for_a_device else contextlib.nullcontext():
        traced = jax.jit(row.fn).trace(*jax.tree.map(place, row.operands))
        lowered = traced.lower(lowering_platforms=(target.platform,))
    kernels = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[target.platform]
    text = lowered.as_text()
    figures: Figures = {"fused": kernels in text and "decoded_rows" not in text}
    compiled: Any = lowered.compile()
    if row.of_codes:
        figures["multiplies"] = multiplied(compiled.as_text())
    memory = compiled.memory_analysis()
    traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
    figures["temporaries"] = memory.temp_size_in_bytes
    figures["of_the_weight"] = round(memory.temp_size_in_bytes / row.weight_bytes, 3)
    figures["least_us"] = round(1e6 * traffic / target.bytes_per_second, 1)
    figures |= _ptxas(dump) if target.platform == "cuda" else _bundles(dump)
    return figures


def multiplied(text: str) -> str:
    """The dtypes that the products of a program multiply, as XLA names them: its dots, perhaps in kernels of
    Triton, and its calls of cuBLAS."""
    found = set[str]()
    for computation in text.split("\n\n"):
        dtypes = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", computation))
        for line in computation.splitlines():
            product = re.search(r" dot\((.*?)\)", line)
            if product is None and "__cublas" in line:
                product = re.search(r" custom-call\((.*?)\)", line)
            if product is not None:
                operands = re.findall(r"%([\w.-]+)", product[1])[:2]
                found.add(" × ".join(dtypes.get(name, "?") for name in operands))
    return ", ".join(sorted(found))


def _ptxas(dump: pathlib.Path) -> Figures:
    """What NVIDIA's assembler says about the kernels written by Mosaic; the most of each figure."""
    text = "".join(file.read_text() for file in dump.glob("*.ptxas"))
    resources = "".join(file.read_text() for file in dump.glob("*.resources.txt"))
    most = lambda pattern, text: max(map(int, re.findall(pattern, text)), default=0)
    if not text:
        return {}
    return {
        "registers": most(r"Used (\d+) registers", text),
        "spills": most(r"(\d+) bytes spill stores", text) + most(r"(\d+) bytes spill loads", text),
        "shared": most(r"smem_scratch_bytes=(\d+)", resources),
        "loop": max(map(_loop, dump.glob("*.sass_ctrl")), default=0),
        # A line for each kernel in which products of warpgroups wait for each other.
        "serialized": len(re.findall("wgmma.mma_async instructions are serialized", text)),
    }


def _loop(sass: pathlib.Path) -> int:
    """The instructions of the longest loop in which tensor cores multiply."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    most = 0
    for line in sass.read_text().splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            instructions.append(found[1])
            jump = re.search(r"\bBRA\b.*(\.L_\w+)", found[1])
            body = instructions[labels.get(jump[1], len(instructions)) :] if jump else []
            if any(re.search(r"\bH?G?MMA\b", one.split(".")[0]) for one in body):
                most = max(most, len(body))
    return most


def _bundles(dump: pathlib.Path) -> Figures:
    """Bundles of instructions that the step of a kernel's grid is scheduled in; of the longest kernel."""
    most = 0
    for file in dump.glob("*schedule-analysis_final_bundles.txt"):
        text = file.read_text()
        if "tpu_custom_call" in text and (found := re.search(r"total scheduled bundles:\s+(\d+)", text)):
            most = max(most, int(found[1]))
    return {"bundles": most} if most else {}


def worker(name: str, only: str, skip: int) -> None:
    """Compiles rows one after the other, and prints what it found of each as a line of JSON."""
    target, dump = TARGETS[name], pathlib.Path(os.environ["KERNELS_CHECK_DUMP"])
    device = target.device()
    for row in _selected(name, only)[skip:]:
        try:
            figures = compile_row(row, target, device, dump)
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print("\n" + json.dumps({"row": row.name} | figures), flush=True)


def run(target: str, only: str = "") -> Iterator[Figures]:
    """Compiles rows for a target in other processes: a compiler that aborts costs its row alone."""
    names = [row.name for row in _selected(target, only)]
    done = 0
    while done < len(names):
        with tempfile.TemporaryDirectory() as dump:
            command = [sys.executable, "-m", "benchmarks.kernels_check", "--worker", target]
            command += ["--only", only, "--skip", str(done)]
            environment = os.environ | _environment(dump)
            with tempfile.TemporaryFile("w+") as said:
                with subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
                ) as process:
                    for line in process.stdout or ():
                        if line.startswith('{"row"'):
                            yield json.loads(line)
                            done += 1
                said.seek(0)
                words = _last_words(said.read())
        if done < len(names):
            yield {"row": names[done], "error": words}
            done += 1


def _environment(dump: str) -> dict[str, str]:
    libtpu = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
    return {
        # A compiler alone: another process may hold the TPU, or have left its lock.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "KERNELS_CHECK_DUMP": dump,
        "LIBTPU_INIT_ARGS": libtpu + "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
        "MOSAIC_GPU_DUMP_TO": dump,
        "TPU_SKIP_MDS_QUERY": "1",
    }


def _last_words(said: str) -> str:
    words = [line for line in said.splitlines() if "ERROR" in line or "Error" in line]
    return (words or said.splitlines() or ["the compiler gave up without a message"])[-1][:200]


def _selected(target: str, only: str) -> list[compiled_rows.Row]:
    return [row for row in compiled_rows.rows(TARGETS[target].platform) if only in row.name]


def problems(target: str, figures: Figures, recorded: Figures | None) -> list[str]:
    """In which ways a row is worse than it must be, or than it was."""
    if "error" in figures:
        known = recorded is not None and "error" in recorded
        return [] if known else [f"{target}, {figures['row']}: {figures['error']}"]
    spilled, temporaries = figures.get("spills", 0), figures.get("temporaries", 0)
    out = [f"spills {spilled} bytes"] if spilled > (recorded or {}).get("spills", 0) else []
    if figures.get("serialized"):
        out.append("products of warpgroups are not asynchronous: the assembler serializes them")
    dense = {row.name: row.dense_bytes for row in _selected(target, figures["row"])}.get(figures["row"])
    most = dense if figures["fused"] else _LIBRARY_BYTES
    if most is not None and temporaries >= most:
        out.append(f"temporaries {temporaries}, allowed are less than {most}")
    limits = {"registers": (1.0, 8), "shared": (1.0, 0), "bundles": (1.05, 0), "loop": (1.05, 0)}
    limits |= {"temporaries": (1.05, 2**20)}
    for name, (factor, slack) in limits.items():
        was = (recorded or {}).get(name)
        if was is not None and figures.get(name, 0) > was * factor + slack:
            out.append(f"{name} {figures[name]}, recorded were {was}")
    if (was := (recorded or {}).get("multiplies")) is not None and figures["multiplies"] != was:
        out.append(f"multiplies {figures['multiplies']}, recorded was {was}")
    if (recorded or {}).get("fused") and not figures["fused"]:
        out.append("no kernel of ours runs, as one did when it was recorded")
    return [f"{target}, {figures['row']}: {text}" for text in out]


def table(figures: Iterable[Figures]) -> str:
    """The rows for a target, in markdown."""
    columns = {
        "row": "product",
        "fused": "one kernel",
        "multiplies": "multiplies",
        "registers": "registers",
        "spills": "spilled bytes",
        "shared": "shared memory, KiB",
        "loop": "instructions of the loop",
        "bundles": "bundles a step",
        "temporaries": "temporaries, MiB",
        "of_the_weight": "÷ bfloat16 weight",
        "least_us": "least time, µs",
    }
    rows = list(figures)
    used = [name for name in columns if name in ("row", "fused") or any(name in row for row in rows)]
    lines = ["| " + " | ".join(columns[name] for name in used) + " |", "| --- " * len(used) + "|"]
    for row in rows:
        cells = [_cell(name, row.get(name)) for name in used]
        if "error" in row:
            cells[1] = f"not compiled: {row['error']}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "fused":
        return "yes" if value else "library"
    if name in ("temporaries", "shared"):
        return f"{value / 2 ** (20 if name == 'temporaries' else 10):.3g}"
    return f"{value:,}" if name == "bundles" else str(value)


def page(record: dict[str, Any]) -> str:
    """The tables of all targets."""
    parts = [_INTRODUCTION]
    for target, of_target in record.items():
        parts.append(f"## {target.upper() if target[-1] == '0' else target}\n\n{of_target['versions']}.\n")
        parts.append(table(of_target["rows"]) + "\n")
    return "\n".join(parts)


_INTRODUCTION = """\
# Compiled kernels

`python -m benchmarks.kernels_check --record` wrote this page. It compiles the kernels for machines that
need not be at hand (`pip install '.[kernels-check]'` brings the compilers), and reads back what the
compilers say. Nothing here was measured on a device. "One kernel" tells whether a kernel of this library
runs; "library" is XLA's own code. The least time is that of reading the operands and writing the result at
the full rate of the memory.

Temporaries are divided by the bytes of the weight in bfloat16, and 1 is as much as a dense copy. For
block-sparse weights the divisor is the stored blocks alone, 10 % or 50 % of the dense weight: there 10 and 2
are as much as a dense copy. The command fails where one kernel needs that much or spills more than is
recorded, and where the library needs 256 MiB.

With many rows of `x`, the library multiplies by weights that another kernel decodes, 128 MiB of them at a
time: here that is the whole weight. Where blocks of threads share what is contracted, terms of the result
are in float32. Those of int8, x @ W are a part of `x` times the scales, and the rows of the result that it
gives. Those of block-sparse weights in float32, for which there is no kernel on GPUs, are as many columns of
the operands and the result as a block has.

"Multiplies" are the dtypes of the operands in the compiled program, of products whose operands are both
rounded to 8 bits: `quantize(..., activations=...)`, with `rounds_gradients=True`.
"""


def _versions(packages: Sequence[str]) -> str:
    from importlib import metadata

    found = []
    for name in packages:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels_check", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=["h100", "a100", "v5e", "v6e"])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--record", action="store_true", help="write compiled.json and compiled.md")
    parser.add_argument("--check", action="store_true", help="fail where a kernel is worse than recorded")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.only, arguments.skip)
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found: list[str] = []
    for name in arguments.targets:
        if missing := TARGETS[name].missing():
            print(f"{name}: left out, {', '.join(missing)} missing (pip install '.[kernels-check]')")
            continue
        recorded = {row["row"]: row for row in record.get(name, {"rows": []})["rows"]}
        rows = []
        for figures in run(name, arguments.only):
            print(name, json.dumps(figures), flush=True)
            rows.append(figures)
            found += problems(name, figures, recorded.get(figures["row"]) if arguments.check else None)
        packages = ("jax", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "libtpu")
        used = [p for p in packages if p == "jax" or ("libtpu" in p) == (TARGETS[name].platform == "tpu")]
        merged = recorded | {row["row"]: row for row in rows}
        order = [row.name for row in _selected(name, "") if row.name in merged]
        record[name] = {"versions": _versions(used), "rows": [merged[row] for row in order]}
        print(table(rows))
        if arguments.record:
            RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
            PAGE.write_text(page(record))
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
