"""A run from the checkpoint to the adapter."""

import dataclasses
import time
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import quaxlike as ql

from ..arrays.quantized import AbstractQuantizedArray
from ..interop import peft
from ..models import load
from .data import Example, Tokens, read_examples, split
from .settings import FinetuneError, Settings
from .state import RunDirectory
from .tasks import AbstractTask, task_for
from .train import State, measure, optimiser_for, steps_of, train


def finetune(settings: Settings, console: Console) -> dict[str, dict[str, float]]:
    """Loads, quantises, adapts, trains, and writes the adapter to `settings.output`.

    **Arguments:**

    - `settings`: of the run. If `settings.output` holds a stopped one with the same settings, it goes on.
    - `console`: what is told along the way.

    **Returns:**

    The metrics on held-out data, `"before"` and `"after"`.

    **Raises:**

    `FileNotFoundError`, `FinetuneError`, `CheckpointError`, `UnsupportedConfigError`: before anything is
    written, for all that the run cannot start with.
    """
    base, config = load(settings.model)
    task = task_for(base)
    limit = config.get("max_position_embeddings") or config.get("n_positions", 2048)
    max_length = settings.max_length or min(256, limit)
    if max_length > limit:
        raise FinetuneError(f"--max-length {max_length} is more than the model's {limit} positions.")
    training, held_out = _data(settings, task, Tokens(settings.model, config, max_length), console)
    if len(training) < settings.batch_size:
        console.print(f"{settings.data}: batches are of all {len(training)} examples to train on.")
        settings = dataclasses.replace(settings, batch_size=len(training))
    model = _adapted(base, task, settings)
    table = ql.summary(model)
    console.print(
        f"{type(model).__name__}: {table.size:,} parameters in {table.stored_bytes / 2**20:,.1f} MiB, "
        f"{table.trainable:,} trained ({table.trainable_share:.2%})"
    )

    directory = RunDirectory(settings)
    steps = steps_of(settings, len(training))
    params, frozen = eqx.partition(model, ql.trainable(model))
    optimiser, _ = optimiser_for(settings, steps)
    first, state = directory.restore(State(params, optimiser.init(params)))
    if first:
        console.print(f"Goes on after step {first} of {steps}.")

    def measured(params: PyTree) -> dict[str, float]:
        adapted = eqx.combine(params, frozen)
        return measure(task, adapted, held_out, settings.batch_size, max_length)

    with ql.on_materialise("error"):
        before = next((entry["held_out"] for entry in directory.entries() if "held_out" in entry), None)
        if before is None:
            before = measured(params)
            directory.note(step=0, held_out=before)
        for step in _shown(
            train(
                task, frozen, state, training, settings, first=first, steps=steps, max_length=max_length
            ),
            console, first, steps,
        ):  # fmt: skip
            state = step.state
            directory.note(step=step.number, loss=step.loss, learning_rate=step.learning_rate)
            if step.number % settings.checkpoint_every == 0 or step.number == steps:
                directory.save(step.number, state)
        after = measured(state.params)
    peft.save_adapter(
        settings.output,
        eqx.combine(state.params, frozen),
        base_model=str(settings.model),
        task_type=task.peft_type,
    )
    return {"before": before, "after": after}


def _data(
    settings: Settings, task: AbstractTask, tokens: Tokens, console: Console
) -> tuple[list[Example], list[Example]]:
    """The training set and the held-out set."""
    parts = []
    for path in [settings.data] if settings.eval_data is None else [settings.data, settings.eval_data]:
        examples, cut, empty = read_examples(path, lambda fields: task.encode(fields, tokens))
        if cut:
            left_out = f", {empty} of them left out, since nothing to learn was left" if empty else ""
            console.print(
                f"{path}: {cut} of {len(examples) + empty} examples are longer than {tokens.max_length} "
                f"tokens and were cut{left_out}."
            )
        parts.append(examples)
    training, held_out = parts if len(parts) == 2 else split(parts[0], settings.held_out, settings.seed)
    if min(len(training), settings.batch_size) < task.least_batch:
        raise FinetuneError(
            f"{settings.data} has {len(training)} examples to train on, and --batch-size is "
            f"{settings.batch_size}; a batch must have at least {task.least_batch}."
        )
    if not held_out:
        raise FinetuneError(
            f"Nothing of {settings.data} is held out. Give more examples, another --held-out, or --eval-data."
        )
    return training, held_out


def _adapted(model: PyTree, task: AbstractTask, settings: Settings) -> PyTree:
    """The model quantised, unless its file was, with adapters."""
    arrays = jax.tree.leaves(model, is_leaf=ql.is_value)
    if settings.quantize != "none" and not any(isinstance(x, AbstractQuantizedArray) for x in arrays):
        options: dict[str, Any] = {} if settings.quantize == "int8" else {"double_quant": True}
        model = ql.quantize(model, settings.quantize, exclude=task.trained_in_full, **options)
    try:
        return ql.loraify(
            model, rank=settings.rank, alpha=settings.alpha, where=list(settings.target) or "all-linear",
            exclude=() if settings.target else task.unused, dropout=settings.dropout,
            rslora=settings.rslora, dora=settings.dora, modules_to_save=task.trained_in_full,
            key=jax.random.key(settings.seed),
        )  # fmt: skip
    except ValueError as error:  # of names that match nothing
        raise FinetuneError(str(error)) from error


def _shown(run: Any, console: Console, first: int, steps: int) -> Any:
    """The steps of a run, with a bar that moves along."""
    progress = Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"), TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(), console=console,
    )  # fmt: skip
    with progress:
        bar = progress.add_task("", total=steps, completed=first, loss=float("nan"), speed=0.0)
        start = time.perf_counter()
        for step in run:
            yield step
            now = time.perf_counter()
            progress.update(bar, completed=step.number, loss=step.loss, speed=step.tokens / (now - start))
            start = now
