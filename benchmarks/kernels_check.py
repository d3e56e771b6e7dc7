"""Statistics of the compiled kernels, for machines not at hand: `python -m benchmarks.kernels_check`.

`pip install '.[kernels-check]'` installs the compilers: XLA's and NVIDIA's for GPUs of compute capability
8.0, 9.0, 10.0 and 12.0, libtpu for TPU v5e and v6e. Each product is compiled as it would be on the device.
The statistics are registers, spills, shared memory, how many blocks a multiprocessor holds, the instructions
of the main loop, temporaries and, on TPUs, the bundles of a grid step. A row says so if this release of JAX
cannot compile it. The last recorded run is in `benchmarks/compiled.json`; `--check` compares with it, and
fails if a kernel got worse, or if nothing is known about it.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import compiled_rows, gpu_record, provenance, sass
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
    figures |= {"decodes": True} if "decoded_rows" in text else {}
    compiled: Any = lowered.compile()
    if row.of_codes:
        figures["multiplies"] = multiplied(compiled.as_text())
    memory = compiled.memory_analysis()
    traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
    figures["temporaries"] = memory.temp_size_in_bytes
    figures["of_the_weight"] = round(memory.temp_size_in_bytes / row.weight_bytes, 3)
    figures["least_us"] = round(1e6 * traffic / target.bytes_per_second, 1)
    if not row.of_codes:  # which units for 8 bits multiply, if there are any
        figures["flops_us"] = round(1e6 * row.m * row.weight_bytes / target.flops_per_second, 1)
    if target.platform == "tpu":
        return figures | _bundles(dump, target)
    return figures | _ptxas(dump, target) | (_issued(dump, row, target, traffic) if figures["fused"] else {})


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


def _ptxas(dump: pathlib.Path, target: Target) -> Figures:
    """What NVIDIA's assembler says about the kernels written by Mosaic; the most of each figure."""
    text = "".join(file.read_text() for file in dump.glob("*.ptxas"))
    if not text:
        return {}
    resources = "".join(file.read_text() for file in dump.glob("*.resources.txt"))
    most = lambda pattern, text: max(map(int, re.findall(pattern, text)), default=0)
    threads = most(r"\.maxntid (\d+)", "".join(file.read_text() for file in dump.glob("*.ptx")))
    registers, shared = most(r"Used (\d+) registers", text), most(r"smem_scratch_bytes=(\d+)", resources)
    loop = _main_loop(dump)
    return {
        "registers": registers,
        "spills": most(r"(\d+) bytes spill stores", text) + most(r"(\d+) bytes spill loads", text),
        "shared": shared,
        "blocks": max(map(_blocks, dump.glob("*.mlir-passes.log")), default=0),
        "threads": threads,
        "resident": sass.resident(registers, threads, shared, target.limits),
        "loop": len(loop),
        "mix": sass.kinds(loop),
        # A line for each kernel in which products of warpgroups wait for each other.
        "serialized": len(re.findall("wgmma.mma_async instructions are serialized", text)),
    }


def _main_loop(dump: pathlib.Path) -> list[sass.Instruction]:
    """Of the kernel that multiplies the most, if there are several."""
    codes = [code for file in dump.glob("*.sass_ctrl") for code in sass.read(file.read_text())]
    return max(map(sass.main_loop, codes), key=lambda loop: (sass.macs(loop), len(loop)), default=[])


def _blocks(log: pathlib.Path) -> int:
    """Of the grid, as the first version of a kernel's program launches it."""
    constants: dict[str, int] = {}
    with log.open() as lines:
        for line in lines:
            if constant := re.search(r"(%\w+) = arith.constant (\d+) : index", line):
                constants[constant[1]] = int(constant[2])
            elif found := re.search(r"gpu\.launch .*?blocks\(.*?\) in \((.*?)\)", line):
                sizes = re.findall(r"= (%\w+)", found[1])
                return math.prod(constants.get(size, 1) for size in sizes)
    return 0


def _issued(dump: pathlib.Path, row: compiled_rows.Row, target: Target, traffic: int) -> Figures:
    """The time that issuing the instructions of the main loop takes, one a cycle for each of the four parts
    of the multiprocessors that have blocks; and how many instructions of threads there are for a byte."""
    loop, blocks = _main_loop(dump), max(map(_blocks, dump.glob("*.mlir-passes.log")), default=0)
    if not sass.macs(loop):
        return {}
    issued = len(loop) * row.macs / sass.macs(loop)
    busy = min(blocks or math.inf, target.limits["core_count"])
    return {
        "issue_us": round(1e6 * issued / (4 * busy * target.clock), 1),
        "a_byte": round(32 * issued / traffic, 1),
    }


def _bundles(dump: pathlib.Path, target: Target) -> Figures:
    """Bundles of instructions that a step of a kernel's grid is scheduled in, and the steps; of the kernel
    that takes the longest."""
    found: list[tuple[int, int | None]] = []
    for file in dump.glob("*schedule-analysis_final_bundles.txt"):
        text = file.read_text()
        bundles = re.search(r"total scheduled bundles:\s+(\d+)", text)
        if "tpu_custom_call" in text and bundles:
            program = next(dump.glob(file.name.partition("-00-")[0] + "-*-final_bundles.txt"), None)
            ends = re.findall(r", (\d+) /\* loop exit test \*/", program.read_text() if program else "")
            # Operands are fetched a step before they are read, and results written a step later.
            found.append((int(bundles[1]), int(ends[-1]) - 2 if ends else None))
    if not found:
        return {}
    bundles, steps = max(found, key=lambda each: each[0])
    if steps is None:
        return {"bundles": bundles}
    return {"bundles": bundles, "steps": steps, "issue_us": round(1e6 * bundles * steps / target.clock, 1)}


def worker(name: str, only: str, skip: int) -> None:
    """Compiles rows one after the other, and prints what it found of each as a line of JSON."""
    target, dump = TARGETS[name], pathlib.Path(os.environ["KERNELS_CHECK_DUMP"])
    device = target.device()
    for i, row in enumerate(_selected(name, only)[skip:]):
        try:
            figures = compile_row(row, target, device, dump)
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        if i and _lacks_figures(figures):
            return  # the same kernel was compiled before: only another process compiles it again
        print("\n" + json.dumps({"row": row.name} | figures), flush=True)


def run(target: str, only: str = "") -> Iterator[Figures]:
    """Compiles rows for a target in other processes: a compiler that aborts costs its row alone."""
    names = [row.name for row in _selected(target, only)]
    done = 0
    while done < len(names):
        begun = done
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
        if done < len(names) and (process.returncode or done == begun):
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


def _lacks_figures(figures: Figures) -> bool:
    """Whether a kernel of ours runs, and the compiler told nothing about it."""
    ours = figures.get("fused") or figures.get("decodes")
    return bool(ours) and "registers" not in figures and "bundles" not in figures


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
    if _lacks_figures(figures):
        out.append("nothing is known about the kernel")
    limits = {"registers": (1.0, 8), "shared": (1.0, 0), "bundles": (1.05, 0), "loop": (1.05, 0)}
    limits |= {"temporaries": (1.05, 2**20)}
    for name, (factor, slack) in limits.items():
        was, now = (recorded or {}).get(name), figures.get(name)
        if was is not None and now is None:
            out.append(f"{name} unknown, recorded were {was}")
        elif was is not None and now > was * factor + slack:
            out.append(f"{name} {now}, recorded were {was}")
    if (was := (recorded or {}).get("resident", 0)) > figures.get("resident", was):
        out.append(f"a multiprocessor holds {figures['resident']} blocks, recorded were {was}")
    if (was := (recorded or {}).get("multiplies")) is not None and figures["multiplies"] != was:
        out.append(f"multiplies {figures['multiplies']}, recorded was {was}")
    if (recorded or {}).get("fused") and not figures["fused"]:
        out.append("no kernel of ours runs, as one did when it was recorded")
    return [f"{target}, {figures['row']}: {text}" for text in out]


def bound(figures: Figures, faster: float = 1.0) -> tuple[float, str]:
    """The least time in µs, and by which of the three bounds; with a memory that is `faster` than the
    target's."""
    least = {"least_us": figures["least_us"] / faster}
    least |= {name: figures[name] for name in ("issue_us", "flops_us") if name in figures}
    return max((time, name) for name, time in least.items())


class Calibration:
    """Measured times ÷ bounds of the kernels that ran on an H200, which executes an H100's programs."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        measured = gpu_record.times("NVIDIA H200")
        faster = gpu_record.H200_BYTES_PER_SECOND / TARGETS["h100"].bytes_per_second
        self.factors: dict[str, float] = {}
        self._by_bound: dict[str, list[float]] = {}
        for row in record.get("h100", {"rows": []})["rows"]:
            if row.get("fused") and row["row"] in measured:
                least, by = bound(row, faster)
                self.factors[row["row"]] = factor = 1e6 * measured[row["row"]] / least
                self._by_bound.setdefault(by, []).append(factor)

    def predicted(self, figures: Figures) -> float | None:
        """The time in µs of a kernel on a GPU: its bound times its own factor, or the one in the middle of
        those that the same bound limits."""
        if not figures.get("fused") or "registers" not in figures or not self.factors:
            return None
        least, by = bound(figures)
        others = self._by_bound.get(by, self.factors.values())
        return least * self.factors.get(figures["row"], statistics.median(others))


_COLUMNS = {
    "row": "product",
    "fused": "one kernel",
    "multiplies": "multiplies",
    "registers": "registers",
    "spills": "spilled bytes",
    "shared": "shared memory, KiB",
    "blocks": "blocks",
    "resident": "on a multiprocessor",
    "loop": "instructions of the loop",
    "mix": "integer, float, memory, tensor",
    "a_byte": "instructions a byte",
    "bundles": "bundles a step",
    "steps": "steps",
    "temporaries": "temporaries, MiB",
    "of_the_weight": "÷ bfloat16 weight",
    "least_us": "bytes, µs",
    "issue_us": "instructions, µs",
    "flops_us": "products, µs",
    "predicted": "predicted, µs",
}


def table(figures: Iterable[Figures], calibration: Calibration | None = None) -> str:
    """The rows for a target, in markdown; with predictions if there is something to make them by."""
    rows = list(figures)
    if calibration is not None:
        rows = [row | {"predicted": calibration.predicted(row)} for row in rows]
    has = lambda name: any(row.get(name) is not None for row in rows)
    used = [name for name in _COLUMNS if name in ("row", "fused") or has(name)]
    lines = ["| " + " | ".join(_COLUMNS[name] for name in used) + " |", "| --- " * len(used) + "|"]
    for row in rows:
        cells = [_cell(name, row.get(name)) for name in used]
        if "error" in row:
            cells[1] = f"not compiled: {row['error']}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    match name:
        case "fused":
            return "yes" if value else "library"
        case "temporaries" | "shared":
            return f"{value / 2 ** (20 if name == 'temporaries' else 10):.3g}"
        case "mix":
            total = sum(value.values())
            kinds = ("integer", "float", "memory", "tensor")
            return ", ".join(f"{value[kind] / total:.0%}" for kind in kinds)
        case "predicted":
            return f"≈ {value:.3g}"
        case "bundles":
            return f"{value:,}"
    return str(value)


def page(record: dict[str, Any]) -> str:
    """The tables of all targets."""
    calibration = Calibration(record)
    factors = calibration.factors.values()
    parts = [
        _INTRODUCTION.format(count=len(factors), least=min(factors, default=0), most=max(factors, default=0))
    ]
    for name, of_target in record.items():
        target = TARGETS[name]
        of_gpu = f", compute capability {'.'.join(map(str, target.capability))}" * (target.platform == "cuda")
        parts.append(f"## {target.kind}{of_gpu}\n\n{of_target['versions']}.\n")
        parts.append(table(of_target["rows"], calibration if target.platform == "cuda" else None) + "\n")
    return "\n".join(parts)


_INTRODUCTION = """\
# Compiled kernels

`python -m benchmarks.kernels_check --record` wrote this page. It compiles the kernels for machines that
need not be at hand (`pip install '.[kernels-check]'` brings the compilers), and reads back what the
compilers say. Nothing here was measured on a device. "One kernel" tells whether a kernel of this library
runs; "library" is XLA's own code, which is all there is for GPUs of compute capability 12.

Three bounds are times that a product cannot undercut. "Bytes" is reading the operands and writing the result
at the full rate of the memory. "Instructions" is issuing those of the main loop, one a cycle in each of the
four parts of a multiprocessor that has a block; on TPUs, the bundles of all steps. "Products" is multiplying
at the full rate of the tensor cores. The loop is the innermost one that multiplies, or the whole kernel if it
has none. The last columns of a loop say which share of its instructions is of which kind, and how many
instructions of threads there are for a byte of operands and result.

**Predicted times are no measurements.** They are the largest bound times a factor: measured time ÷ bound on
an H200, which executes the programs of an H100. {count} kernels ran there (`benchmarks/gpu.json`), with
factors from {least:.1f} to {most:.1f}. Such a kernel has its own factor, any other the one in the middle of
those that the same bound limits. For other GPUs than the H100, the factors of an H200 are a guess.

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels_check", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
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
        record[name] = {"versions": provenance.versions(used), "rows": [merged[row] for row in order]}
        print(table(rows))
        if arguments.record:
            RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
            PAGE.write_text(page(record))
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
