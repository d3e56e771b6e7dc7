"""Whole jobs, compiled for machines that are not at hand: `python -m benchmarks.jobs`.

A QLoRA step of `quaxlike.lm.finetune`, and a step of generation, of Llamas with 8 and 70 billion parameters
on several GPUs or TPUs. Only shapes are made: there are no weights, and nothing is run. `pip install
'.[kernels-check]'` installs the compilers. The figures are the memory of a device, the bytes that devices
exchange, dense copies of weights, and the kernels that are called. The last recorded ones are in
`benchmarks/jobs.json` and in the documentation; `--check` compares with them, and fails if they drift.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import provenance
from .targets import TARGETS, V5P, Target

RECORD = pathlib.Path(__file__).with_name("jobs.json")
PAGE = RECORD.parent.parent / "docs" / "jobs.md"

SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
}
_HEADS = {"8B": 32, "70B": 64}
# By name: the target, its topology and how many devices it has.
MACHINES: dict[str, tuple[Target, str, int]] = {
    "8 × H100": (TARGETS["h100"], "1x1x8", 8),
    "v5e-8": (TARGETS["v5e"], "v5e:2x4", 8),
    "v5p-8": (V5P, "v5p:2x2x1", 4),
}
TOKENS = {"QLoRA": 2048, "decode": 4000}  # caches of 4,096 would be as large as a weight
ROWS = 8

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """A program: a model's size, `"QLoRA"` (a step of training) or `"decode"` (a token), and a machine."""

    size: str
    work: str
    machine: str

    @property
    def name(self) -> str:
        return f"{self.size} {self.work}, {self.machine}"


JOBS = tuple(Job(size, work, machine) for machine in MACHINES for work in TOKENS for size in SIZES)


def compile_job(job: Job) -> Figures:
    """The figures of a job's program."""
    target, topology, _ = MACHINES[job.machine]
    devices = target.devices(topology)
    begin = time.perf_counter()
    lowered, weights = {"QLoRA": _qlora, "decode": _decode}[job.work](job.size, devices)
    program = lowered.compile()
    memory, text = program.memory_analysis(), program.as_text()
    arguments, kept = memory.argument_size_in_bytes, memory.alias_size_in_bytes
    return {
        "arguments": arguments,
        "temporaries": memory.temp_size_in_bytes,
        "peak": arguments + memory.temp_size_in_bytes + memory.output_size_in_bytes - kept,
        "exchanged": exchanged(text),
        "dense_copies": dense_copies(text, weights),
        "custom_calls": custom_calls(text),
        "seconds": round(time.perf_counter() - begin),
    }


# Programs -----------------------------------------------------------------------------------------


def model_of(size: str, adapters: bool) -> tuple[Any, Any]:
    """The shapes of a Llama in NF4, doubly quantised, with embedding and output layer in bfloat16; and what
    of it is trained."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import quaxlike as ql

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256,
        "num_attention_heads": _HEADS[size], "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "max_position_embeddings": 8192, **SIZES[size],
    }  # fmt: skip

    def make() -> tuple[Any, Any]:
        key = jax.random.key(0)
        model = ql.lm.models.Decoder(ql.lm.models.DecoderConfig.from_json(config), key=key)
        model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
        model = ql.quantize(model, "nf4", double_quant=True)
        model = ql.loraify(model, rank=16, alpha=32, where="all-linear", key=key) if adapters else model
        model = model.stacked()
        return model, ql.trainable(model) if adapters else None

    return eqx.filter_eval_shape(make)


def _qlora(size: str, devices: Any) -> tuple[Any, list[tuple[int, int, int]]]:
    """A step on a text of 2,048 tokens on each device, each of which stores a part of all weights."""
    import equinox as eqx
    import jax.numpy as jnp

    from quaxlike.lm.finetune.data import Batch
    from quaxlike.lm.finetune.devices import Devices
    from quaxlike.lm.finetune.settings import DataSettings, RunSettings, TrainSettings
    from quaxlike.lm.finetune.tasks import task_for
    from quaxlike.lm.finetune.train import State, TrainingProgram, optimiser_for
    from quaxlike.sharding import abstract, fsdp

    nowhere = pathlib.Path()
    settings = TrainSettings(nowhere, batch_size=len(devices), remat="nothing")
    run = RunSettings(nowhere, mesh=f"data={len(devices)}", fsdp=True)
    of_run = Devices(run, devices)
    (model, trained), rule = model_of(size, adapters=True), fsdp(of_run.mesh)
    params, frozen = eqx.partition(model, trained)
    optimiser, _ = optimiser_for(settings, 100)
    program = TrainingProgram(task_for(model, settings, DataSettings(nowhere)), optimiser, settings, of_run)
    place = lambda tree: abstract(tree, of_run.mesh, rule)
    state = State(place(params), place(eqx.filter_eval_shape(optimiser.init, params)))
    tokens = _shape((len(devices), 1, TOKENS["QLoRA"]), jnp.int32, of_run.mesh, "data")
    seen = _shape(tokens.shape, bool, of_run.mesh, "data")
    batch = Batch(tokens, tokens, seen, _shape((len(devices), 0), jnp.int32, of_run.mesh, "data"))
    terms = _shape((), jnp.float32, of_run.mesh)
    return program.lowered(place(frozen), state, batch, terms, None), _weights(size)


def _decode(size: str, devices: Any) -> tuple[Any, list[tuple[int, int, int]]]:
    """A token of each of eight texts with room for 4,000, layers divided between the devices."""
    import jax
    import jax.numpy as jnp

    import quaxlike as ql
    from quaxlike.lm import tensor_parallel
    from quaxlike.sharding import abstract
    from quaxlike.sharding.meshes import mesh_from_text

    mesh = mesh_from_text(f"model={len(devices)}", devices)
    (model, _), room = model_of(size, adapters=False), TOKENS["decode"]
    model = abstract(model, mesh, tensor_parallel(model, mesh))
    caches = jax.eval_shape(lambda model: model.memory(room), model)

    def of_heads(x: Any) -> Any:
        spec = [None] + ["model" if n == model.config.num_key_value_heads else None for n in x.shape]
        return _shape((ROWS, *x.shape), x.dtype, mesh, *spec)

    def step(model: Any, ids: Any, caches: Any, start: Any) -> Any:
        def one(ids: Any, memory: Any) -> Any:
            seen = jnp.arange(room) <= start
            hidden, memory = model.body(ids, seen, memory, start, start + 1)
            return model.logits(hidden)[0], memory

        logits, caches = jax.vmap(one)(ids, caches)
        return jnp.argmax(logits, -1), caches

    ids, start = _shape((ROWS, 1), jnp.int32, mesh), _shape((), jnp.int32, mesh)
    program = jax.jit(ql.quaxify(step), donate_argnums=2)
    lowered = program.lower(model, ids, jax.tree.map(of_heads, caches), start)
    return lowered, _weights(size, len(devices))


def _shape(shape: tuple[int, ...], dtype: Any, mesh: Any, *spec: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))


def _weights(size: str, divided: int = 1) -> list[tuple[int, int, int]]:
    """The layers, rows and columns of dense weights of all layers, as one device has them."""
    sizes = SIZES[size]
    hidden, wide, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    keys = 8 * hidden // _HEADS[size]
    shapes = [
        (layers, n, k) for n in (hidden, keys, wide) for k in (hidden, keys, wide) if n != k or n == hidden
    ]
    parts = [(layers, n // a, k // b) for layers, n, k in shapes for a, b in ((divided, 1), (1, divided))]
    return sorted({*shapes, *parts})


# Their text ---------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_CALLED = re.compile(r"(?:body|to_apply|calls|condition)=%?([\w.-]+)")


def repetitions(text: str) -> dict[str, int]:
    """How often each computation of a program runs. A loop over layers runs as often as the compiler says, or
    as the constant to which its condition compares."""
    inside, entry = "", ""
    limits: dict[str, int] = {}
    lines: dict[str, list[str]] = collections.defaultdict(list)
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            inside = found[2]
            entry = inside if found[1] else entry
        elif constant := re.search(r"= s32\[\]\S* constant\((\d+)\)", line):
            limits[inside] = int(constant[1])
        lines[inside].append(line)
    counts: dict[str, int] = collections.Counter()

    def count(name: str, times: int) -> None:
        counts[name] += times
        for line in lines[name]:
            often = 1
            if condition := re.search(r" while\(.*condition=%?([\w.-]+)", line):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                often = int(known[1]) if known else limits.get(condition[1], 1)
            for other in _CALLED.findall(line):
                count(other, times * often)

    count(entry, 1)
    return dict(counts)


def exchanged(text: str) -> dict[str, int]:
    """The bytes that each device is given by collectives of each kind, in loops each time."""
    from quaxlike.core.inspect.exchange import exchanges

    counts, found, inside = repetitions(text), collections.Counter[str](), ""
    for line in text.splitlines():
        if name := _COMPUTATION.match(line):
            inside = name[2]
        for each in exchanges(line):
            found[each.kind] += each.bytes * counts.get(inside, 0)
    return dict(sorted(found.items()))


def dense_copies(text: str, weights: Sequence[tuple[int, int, int]]) -> int:
    """How many results of a program are in floating point and of the shape of a weight of all layers, whose
    rows and columns may be several axes each."""

    def is_weight(shape: list[int]) -> bool:
        splits = ((math.prod(shape[1:i]), math.prod(shape[i:])) for i in range(2, len(shape)))
        return any((shape[0], *split) in weights for split in splits)

    arrays = re.findall(r"= (?:bf16|f16|f32)\[([\d,]+)\]", text)
    return sum(is_weight(list(map(int, sizes.split(",")))) for sizes in arrays)


_OF_XLA = re.compile(r"AllocateBuffer|AssumeGather|ConcatBitcast|GatherScatter|Sharding|SPMD|TODO")


def custom_calls(text: str) -> dict[str, int]:
    """How many places of a program call each kernel or library, without buffers and hints of XLA's own."""
    names = re.findall(r'custom_call_target="([^"]+)"', text)
    return dict(sorted(collections.Counter(name for name in names if not _OF_XLA.match(name)).items()))


# The record ---------------------------------------------------------------------------------------


def problems(name: str, figures: Figures, recorded: Figures | None) -> list[str]:
    """In which ways a job drifted from what was recorded, or is worse than it must be."""
    if "error" in figures:
        known = recorded is not None and "error" in recorded
        return [] if known else [f"{name}: {figures['error']}"]
    out = [f"{figures['dense_copies']} dense copies of weights"] if figures["dense_copies"] else []
    if recorded is not None and "error" not in recorded:
        sizes = [(key, figures[key], recorded[key]) for key in ("arguments", "temporaries", "peak")]
        kinds = sorted({*figures["exchanged"], *recorded["exchanged"]})
        sizes += [(k, figures["exchanged"].get(k, 0), recorded["exchanged"].get(k, 0)) for k in kinds]
        out += [
            f"{key}: {now:,} bytes, recorded were {was:,}"
            for key, now, was in sizes
            if abs(now - was) > 0.02 * was + 2**20
        ]
        if figures["custom_calls"] != recorded["custom_calls"]:
            out.append(f"calls {figures['custom_calls']}, recorded were {recorded['custom_calls']}")
    return [f"{name}: {text}" for text in out]


def page(record: Mapping[str, Figures]) -> str:
    """The page of the documentation."""
    header = (
        "| job | weights and state, GiB | temporaries, GiB | most at a time, GiB | exchanged, GiB "
        "| dense copies | calls |\n" + "| --- " * 7 + "|"
    )
    lines = [_line(job, figures) for job, figures in record.items() if "error" not in figures]
    return "\n".join([_INTRODUCTION, header, *lines]) + "\n"


def _line(job: str, figures: Figures) -> str:
    gib = lambda bytes_: f"{bytes_ / 2**30:.3g}"
    exchanged = ", ".join(f"{kind} {gib(bytes_)}" for kind, bytes_ in figures["exchanged"].items())
    calls = ", ".join(f"{count} `{name}`" for name, count in figures["custom_calls"].items())
    sizes = [gib(figures[name]) for name in ("arguments", "temporaries", "peak")]
    return "| " + " | ".join([job, *sizes, exchanged, str(figures["dense_copies"]), calls]) + " |"


_INTRODUCTION = """\
# Whole models, compiled

After this page, you know what memory a device needs for large models, and what devices send each other,
before you have these devices.

`python -m benchmarks.jobs --record` wrote this page (`pip install '.[kernels-check]'` brings the compilers).
XLA compiled the programs for machines that were not there. The bytes are what it planned; nothing was run or
timed. `python -m benchmarks.jobs --check` fails if they drift.

- **QLoRA** is a step of `quaxlike.lm.finetune --fsdp --remat` on a text of 2,048 tokens for each device.
  Adapters of rank 16 are on all linear layers. Weights are in NF4, doubly quantised; embedding and output
  layer are in bfloat16.
- **Decode** is a token of each of eight texts with room for 4,000. `tensor_parallel` divides the layers.

All figures are for one device. Exchanged bytes are results of collectives, in loops each time. A dense copy
is a floating-point array as large as a weight of all layers.

With TPUs at hand, JAX tells the compiler how to divide kernels between devices. Without them, libtpu refuses
this, so there are no figures for TPUs; `benchmarks/jobs.json` has its errors.
"""


def run(job: Job) -> Figures:
    """Compiles a job in a process of its own: a compiler that aborts costs its job alone."""
    command = [sys.executable, "-m", "benchmarks.jobs", "--worker", job.name]
    own = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    told = [line for line in said if re.match(r"[\w.]+(Error|Exception): ", line)]
    return {"error": (told or said or ["the compiler gave up without a message"])[-1][:200]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", description=__doc__)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--record", action="store_true", help="write jobs.json, and the page of the docs")
    parser.add_argument("--check", action="store_true", help="fail where a job drifted from its record")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        (job,) = (job for job in JOBS if job.name == arguments.worker)
        print("\n" + json.dumps(compile_job(job)), flush=True)
        return
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    found: list[str] = []
    for job in JOBS:
        target = MACHINES[job.machine][0]
        if arguments.only not in job.name:
            continue
        if missing := target.missing():
            print(f"{job.name}: left out, {', '.join(missing)} missing (pip install '.[kernels-check]')")
            continue
        figures = run(job)
        packages = ("jax", "libtpu" if target.platform == "tpu" else "jax-cuda13-plugin")
        figures["versions"] = provenance.versions(packages)
        print(job.name, json.dumps(figures), flush=True)
        found += problems(job.name, figures, record.get(job.name) if arguments.check else None)
        record[job.name] = figures
        if arguments.record:
            kept = {job.name: record[job.name] for job in JOBS if job.name in record}
            RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")
            PAGE.write_text(page(kept), "utf-8")
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
