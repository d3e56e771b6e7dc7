"""`python -m benchmarks.adapters [--record] [--only TEXT …]`: ways to adapt a model, at equal trained bytes.

A vision transformer like that of `python -m quaxlike.demo` is trained on upright digits, then adapted to
digits that are turned by a right angle. Each way gets the size (rank, block, …) whose number of trained
parameters is nearest to that of LoRA of rank 4, and the best of four learning rates on a part of the training
set. `--record` writes what was measured to `benchmarks/adapters.json`, and the page of the documentation.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import quaxlike as ql
from quaxlike import adapters
from quaxlike.demo import experiment
from quaxlike.demo.experiment import ADAPTED, Digits
from quaxlike.demo.model import VisionTransformer
from quaxlike.surgery.trees import replace

RECORD = pathlib.Path(__file__).with_name("adapters.json")
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "comparing-adapters.md"
SIZES = range(1, 33)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
RANK, STEPS, BATCH, SEEDS = 4, 100, 32, 3
WIDTH, DEPTH = 64, 2

# (the model, size, key) -> the model with adapters; an error for a size that there is not
Make = Callable[[Any, int, Any], Any]


def _lora(**options: Any) -> Make:
    return lambda model, size, key: ql.loraify(
        model, rank=size, alpha=2 * size, where=ADAPTED, key=key, **options
    )


def _in_full(model: Any, size: int, key: Any) -> Any:
    """The weights themselves, whatever the size."""
    return replace(model, {name: ql.TrainableArray(x) for name, x in ql.select(model, ADAPTED).items()})


def _method(start: Callable[..., Any], option: str | None = None, unit: int = 1) -> Make:
    """A method of `quaxlike.adapters.METHODS`, whose size is `unit` of this option."""

    def make(model: Any, size: int, key: Any) -> Any:
        options = {} if option is None else {option: unit * size}
        return ql.adapt(model, functools.partial(start, **options), where=ADAPTED, key=key)

    return make


def _vera(model: Any, size: int, key: Any) -> Any:
    """With random matrices that reach over the largest weight."""
    a, b = _normal(key, (32 * size, 2 * WIDTH), (2 * WIDTH, 32 * size))
    start = functools.partial(_start("vera"), a=a / WIDTH**0.5, b=b / (32 * size) ** 0.5)
    return ql.adapt(model, start, where=ADAPTED, key=key)


def _randlora(model: Any, size: int, key: Any) -> Any:
    a, b = _normal(key, (size, 1, WIDTH), (2 * WIDTH, -(-WIDTH // size), size))
    return ql.adapt(model, functools.partial(_start("randlora"), a=a, b=b), where=ADAPTED, key=key)


def _normal(key: Any, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def _start(name: str) -> Any:
    return adapters.METHODS[name].start


METHODS: dict[str, Make] = {
    "LoRA": _lora(),
    "rsLoRA": _lora(rslora=True),
    "DoRA": _lora(dora=True),
    "PiSSA": _lora(init="pissa"),
    "LoRA over NF4": lambda model, size, key: _lora()(ql.quantize(model, "nf4", where=ADAPTED), size, key),
    "(IA)³": _method(functools.partial(_start("ia3"), of_inputs=False)),
    "OFT": _method(_start("oft"), "block_size"),
    "BOFT": _method(_start("boft"), "block_size"),
    "HRA": _method(_start("hra"), "rank"),
    "VeRA": _vera,
    "RandLoRA": _randlora,
    "AdaLoRA": _method(_start("adalora"), "rank"),
    "DeLoRA": _method(_start("delora"), "rank"),
    "MiSS": _method(_start("miss"), "rank"),
    "GraLoRA": _method(_start("gralora"), "rank"),
    "LoHa": _method(_start("loha"), "rank"),
    "LoKr": _method(_start("lokr"), "rank"),
    "HiRA": _method(_start("hira"), "rank"),
    "SHiRA": _method(_start("shira"), "rank"),
    "C³A": _method(_start("c3a"), "block_size"),
    "FourierFT": _method(_start("fourierft"), "n_frequency", 32),
    "all of these weights": _in_full,
}


class Figures(NamedTuple):
    """What was measured of one way."""

    name: str
    size: int
    trained: int
    rate: float
    accuracy: float
    """On held-out digits; the mean over seeds of adapters and batches."""
    spread: float
    """The standard deviation over these."""
    milliseconds: float
    """Of one step; the median."""
    temporaries: int
    """The bytes of temporary arrays of a step, as XLA plans them."""


def chosen_size(make: Make, model: Any, wanted: int, sizes: Iterable[int] = SIZES) -> tuple[int, int]:
    """The size whose number of trained parameters is nearest, and that number."""
    found: dict[int, int] = {}
    for size in sizes:
        try:
            found[size] = _trained(make, model, size)
        except ValueError:  # blocks of this size do not fit
            continue
    size = min(found, key=lambda size: (abs(found[size] - wanted), size))
    return size, found[size]


def _trained(make: Make, model: Any, size: int) -> int:
    """The number of trained parameters, if possible without computing them."""
    count = 0

    def counted(model: Any) -> None:
        nonlocal count
        count = ql.summary(make(model, size, jax.random.key(0))).trainable

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The rank is above both sizes")  # of sizes that are only counted
        try:
            eqx.filter_eval_shape(counted, model)
        except ValueError:  # of a size, or since places of sparse elements must be known
            counted(model)
    return count


class Trainer:
    """The training of one adapted model, compiled once for all learning rates."""

    def __init__(self, model: Any) -> None:
        params, rest = eqx.partition(model, ql.trainable(model))
        frozen, static = eqx.partition(rest, eqx.is_array)
        self.optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())

        def step(params: Any, state: Any, frozen: Any, images: Any, labels: Any, rate: Any) -> Any:
            def loss(params: Any) -> Any:
                return ql.quaxify(experiment.loss)(eqx.combine(params, frozen, static), images, labels)

            updates, state = self.optimiser.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates)), state

        examples = jnp.zeros((BATCH, 8, 8)), jnp.zeros(BATCH, jnp.int32)
        arguments = (params, self.optimiser.init(params), frozen, *examples, jnp.float32(0))
        self.step = jax.jit(step).lower(*arguments).compile()

    @property
    def temporaries(self) -> int:
        analysis: Any = self.step.memory_analysis()
        return analysis.temp_size_in_bytes

    def run(self, model: Any, digits: Digits, rate: float, seed: int, steps: int) -> tuple[Any, float]:
        """The trained model, and the median time of a step. The rate rises for a tenth of the steps."""
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
        params, rest = eqx.partition(model, ql.trainable(model))
        frozen, _ = eqx.partition(rest, eqx.is_array)
        state, seconds = self.optimiser.init(params), []
        for i, (images, labels) in enumerate(_batches(digits, seed, steps)):
            now = jnp.float32(schedule(i))
            start = time.perf_counter()
            params, state = jax.block_until_ready(self.step(params, state, frozen, images, labels, now))
            seconds.append(time.perf_counter() - start)
        return eqx.combine(params, rest), statistics.median(seconds)


def _batches(digits: Digits, seed: int, steps: int) -> Iterator[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.choice(len(digits.labels), BATCH, replace=False)
        yield jnp.asarray(digits.images[chosen]), jnp.asarray(digits.labels[chosen])


def accuracy(model: Any, digits: Digits) -> float:
    return float(np.mean(experiment.predictions(model, digits.images) == digits.labels))


def measure(
    name: str, base: Any, train: Digits, test: Digits, wanted: int, steps: int = STEPS, seeds: int = SEEDS
) -> Figures:
    """Everything about one way; raises if a weight would be materialised."""
    make = METHODS[name]
    size, trained = chosen_size(make, base, wanted)
    validation = len(train.labels) // 5
    of_rates, chosen_by = (
        Digits(*(x[part] for x in train)) for part in (slice(validation, None), slice(validation))
    )
    with ql.on_materialise("error"):
        models = [make(base, size, jax.random.key(seed)) for seed in range(seeds)]
        trainer = Trainer(models[0])
        by_rate = {
            rate: accuracy(trainer.run(models[0], of_rates, rate, 0, steps // 2)[0], chosen_by)
            for rate in RATES
        }
        rate = max(by_rate, key=lambda rate: by_rate[rate])
        runs = [trainer.run(model, train, rate, seed, steps) for seed, model in enumerate(models)]
        reached = [accuracy(model, test) for model, _ in runs]
    return Figures(
        name, size, trained, rate, statistics.mean(reached), statistics.pstdev(reached),
        1e3 * statistics.median(seconds for _, seconds in runs), trainer.temporaries,
    )  # fmt: skip


def base_and_task(steps: int = 300) -> tuple[Any, Digits, Digits]:
    """The model that knows upright digits, and the turned ones: for training, and held out."""
    upright, turned = experiment.load_tasks(0)
    model = VisionTransformer(width=WIDTH, depth=DEPTH, key=jax.random.key(0))
    fit = experiment.fit(
        model, jax.tree.map(eqx.is_inexact_array, model), upright.train,
        steps=steps, learning_rate=1e-3, seed=0, on_step=lambda loss: None,
    )  # fmt: skip
    return fit.model, turned.train, turned.test


HEADERS = ("", "size", "trained", "learning rate", "accuracy", "ms a step", "temporaries, KiB")


def cells(x: Figures) -> list[str]:
    return [
        x.name, str(x.size), f"{x.trained:,}", f"{x.rate:g}", f"{x.accuracy:.1%} ± {x.spread:.1%}",
        f"{x.milliseconds:.1f}", f"{x.temporaries / 2**10:,.0f}",
    ]  # fmt: skip


def page(figures: Sequence[Figures], without: float, versions: str) -> str:
    """The page of the documentation."""
    rows = [HEADERS, ["---"] * len(HEADERS), *map(cells, figures)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return (
        f"{_INTRODUCTION}\n" + "\n".join(lines) + "\n\n" + _NOTES.format(without=without, versions=versions)
    )


_INTRODUCTION = f"""\
# Ways to adapt, compared

After this page, you know what each [way to adapt](types/adapters.md) a model costs and learns on a small
task.

`python -m benchmarks.adapters --record` wrote it. A small vision transformer (width {WIDTH}, {DEPTH} layers)
was trained on upright digits. Each way adapts it to digits turned by a right angle.

- **Size** (rank, block, …) is chosen so that the number of trained parameters is nearest to that of LoRA with
  rank {RANK}.
- **Learning rate** is the best of {len(RATES)} on part of the training set.
- **Accuracy** is on held-out digits after {STEPS} steps with batches of {BATCH}: mean and standard
  deviation of {SEEDS} runs.
- **Temporaries** are what XLA plans for one step, besides weights, adapters and the optimiser's state.
"""
_NOTES = """\
Without adaptation, {without:.1%} are right. This task is too small to tell which way is best for a
language model. Where the largest learning rate was the best, a larger one may be better. C³A divides its
parameters by the number of inputs, and learns slowly.

Times are medians
({versions}).
The rows were measured one after the other, so only large differences mean something.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="ways whose names contain one of these")
    parser.add_argument("--record", action="store_true", help="write adapters.json and the page of the docs")
    arguments = parser.parse_args()
    base, train, test = base_and_task()
    _, wanted = chosen_size(METHODS["LoRA"], base, 0, sizes=[RANK])
    recorded = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    figures = {row["name"]: Figures(**row) for row in recorded}
    table = Table(*HEADERS)
    for name in METHODS:
        if any(text in name for text in arguments.only):
            figures[name] = measure(name, base, train, test, wanted)
            print(*cells(figures[name]), flush=True)
            table.add_row(*cells(figures[name]))
    Console(width=110).print(table)
    if arguments.record:
        rows = [figures[name] for name in METHODS if name in figures]
        without, versions = accuracy(base, test), f"JAX {jax.__version__}, {jax.default_backend()}"
        record = {"without": without, "versions": versions, "rows": [row._asdict() for row in rows]}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(rows, without, versions))


if __name__ == "__main__":
    main()
