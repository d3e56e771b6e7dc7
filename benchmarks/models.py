"""`python -m benchmarks.models [--small] [--json FILE] [--only TEXT]`: a decoder of a billion weights.

A Llama with random bfloat16 weights is written to a temporary folder. Separate processes then measure: the
peak memory while the checkpoint is loaded, quantised and adapted; the time until the first training step is
compiled, with scanned layers, at one depth and at four times that depth; and tokens per second in NF4, and in
bfloat16, which is plain JAX. CPU seconds show the cost of compiling even if other programs run too.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from .sharded_loading import write_llama

#: GiB that a process takes with JAX in it, before there are weights.
FLOOR = 0.6
LIMITS = {
    "peak ÷ allowed": ("at most", 1.0),
    "16 layers, s of the processor": ("at most", 40.0),
    "64 ÷ 16 layers": ("at most", 1.2),
    "NF4 ÷ bfloat16": ("at least", 1.0),
}


def loading(directory: pathlib.Path) -> dict[str, float]:
    import jax

    import quaxlike as ql

    start = time.perf_counter()
    model, _ = ql.lm.load(directory, quantize={"scheme": "nf4", "double_quant": True})
    model = ql.loraify(model, rank=8, key=jax.random.key(0))
    jax.block_until_ready(jax.tree.leaves(model))
    seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    table = ql.summary(model)
    layer = sum(row.logical_bytes for row in table.rows if ".layers.0." in row.path) / 2**30
    stored = table.stored_bytes / 2**30
    allowed = stored + layer + FLOOR
    return {
        "weights, billions": table.size / 1e9, "seconds": seconds, "stored, GiB": stored, "layer, GiB": layer,
        "peak, GiB": peak, "peak ÷ allowed": peak / allowed,
    }  # fmt: skip


def compiling(directory: pathlib.Path) -> dict[str, float]:
    """From shapes alone: no weight is needed to compile."""
    figures: dict[str, float] = {}
    for depth in (16, 64):
        wall, processor = time.perf_counter(), time.process_time()
        program, arguments = _first_step(directory, depth)
        figures[f"{depth} layers, s to make shapes"] = time.perf_counter() - wall
        wall, processor = time.perf_counter(), time.process_time()
        program.compiled(*arguments)
        figures[f"{depth} layers, s"] = time.perf_counter() - wall
        figures[f"{depth} layers, s of the processor"] = time.process_time() - processor
    figures["64 ÷ 16 layers"] = (
        figures["64 layers, s of the processor"] / figures["16 layers, s of the processor"]
    )
    return figures


def _first_step(directory: pathlib.Path, depth: int) -> tuple[Any, tuple[Any, ...]]:
    """A program of `quaxlike.lm.finetune` for a model of this depth, and what it takes, as shapes."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import quaxlike as ql
    from quaxlike.lm.finetune.data import Example, collate
    from quaxlike.lm.finetune.devices import Devices
    from quaxlike.lm.finetune.settings import DataSettings, RunSettings, TrainSettings
    from quaxlike.lm.finetune.tasks import task_for
    from quaxlike.lm.finetune.train import State, TrainingProgram, optimiser_for

    settings = TrainSettings(directory, batch_size=1, remat="nothing", scan_layers=True)
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": depth}

    def make() -> Any:
        model = ql.lm.models.Decoder(ql.lm.models.DecoderConfig.from_json(config), key=jax.random.key(0))
        model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
        model = eqx.tree_at(lambda model: model.layers, model, model.layers[:1])
        return ql.loraify(ql.quantize(model, "nf4"), rank=8, key=jax.random.key(1)).stacked()

    deeper = lambda x: jax.ShapeDtypeStruct((depth, *x.shape[1:]), x.dtype)
    model = eqx.filter_eval_shape(make)
    model = eqx.tree_at(lambda model: model.layers, model, jax.tree.map(deeper, model.layers))
    params, frozen = eqx.partition(model, jax.tree.map(bool, ql.trainable(model)))
    optimiser, _ = optimiser_for(settings, 10)
    task = task_for(model, settings, DataSettings(directory))
    program = TrainingProgram(task, optimiser, settings, Devices(RunSettings(directory)))
    state = State(params, jax.eval_shape(optimiser.init, params))
    batch = collate([Example((list(range(128)),), [True] * 128)], 128)
    return program, (frozen, state, batch, jnp.float32(1), None)


def decoding(directory: pathlib.Path, new: int = 16, repeats: int = 5) -> dict[str, float]:
    """Both in turn, so that each sees the machine as the other does."""
    import numpy as np

    import quaxlike as ql

    models = {"NF4": ql.lm.load(directory, quantize="nf4")[0], "bfloat16": ql.lm.load(directory)[0]}
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name, model in models.items():
            times: list[float] = []
            note = lambda token, times=times: times.append(time.perf_counter())
            ql.lm.generate(model, np.arange(1, 9)[None], max_new_tokens=new, on_token=note)
            if repeat:  # the first one compiles
                speeds[name].append((new - 1) / (times[-1] - times[0]))
    ratios = [a / b for a, b in zip(speeds["NF4"], speeds["bfloat16"], strict=True)]
    figures = {f"{name}, tokens/s": statistics.median(found) for name, found in speeds.items()}
    return {**figures, "NF4 ÷ bfloat16": statistics.median(ratios)}


MEASURES = {"loading": loading, "compiling": compiling, "decoding": decoding}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number, and the limit that it is held to, if any."""

    measure: str
    name: str
    value: float

    @property
    def limit(self) -> str:
        side, limit = LIMITS.get(self.name, ("", 0.0))
        if not side:
            return ""
        met = self.value <= limit if side == "at most" else self.value >= limit
        return f"{side} {limit:g}: {'met' if met else 'missed'}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few million weights: a trial of the program")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--only", default="", help="measures whose name contains this")
    parser.add_argument("--directory", type=pathlib.Path, help="where the checkpoint is, or goes")
    parser.add_argument("--within", choices=list(MEASURES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.within:
        print(json.dumps(MEASURES[args.within](args.directory)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.directory or pathlib.Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "config.json").exists():
            sizes = {"hidden": 256, "wide": 768, "vocabulary": 4096} if args.small else {}
            write_llama(directory, 2**23 if args.small else 2**31, **sizes)
        figures = []
        for measure in [name for name in MEASURES if args.only in name]:
            command = [
                sys.executable,
                "-m",
                "benchmarks.models",
                "--within",
                measure,
                "--directory",
                directory,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            figures += [Figure(measure, name, value) for name, value in found.items()]
    table = Table("measure", "figure", "value", "limit")
    for figure in figures:
        table.add_row(figure.measure, figure.name, f"{figure.value:,.2f}", figure.limit)
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=2))


if __name__ == "__main__":
    main()
