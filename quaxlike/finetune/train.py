"""The steps of training, and the outputs for held-out data."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

import quaxlike as ql

from .data import Batch, Example, chosen_for, collate
from .settings import FinetuneError, Settings
from .tasks import AbstractTask


class State(NamedTuple):
    """The state that changes from step to step."""

    params: PyTree
    optimiser: PyTree


class Step(NamedTuple):
    """The figures of one step."""

    number: int
    loss: float
    learning_rate: float
    tokens: int
    state: State


def optimiser_for(settings: Settings, steps: int) -> tuple[optax.MultiSteps, Callable[[Any], Any]]:
    """AdamW behind clipping by norm, and its learning rate by step."""
    warmup, peak = round(settings.warmup * steps), settings.learning_rate
    rest = max(1, steps - warmup)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # A warm-up begins above zero, so that no step is for nothing.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    schedule = optax.join_schedules([rise, decay], [warmup]) if warmup else decay
    chain = optax.chain(
        optax.clip_by_global_norm(settings.clip) if settings.clip else optax.identity(),
        optax.adamw(schedule, weight_decay=settings.weight_decay),
    )
    return optax.MultiSteps(chain, settings.accumulate), schedule


def steps_of(settings: Settings, n: int) -> int:
    """How many updates a run on `n` examples has."""
    if settings.steps is not None:
        return settings.steps
    return max(1, round(settings.epochs * (n // settings.batch_size) / settings.accumulate))


def train(
    task: AbstractTask,
    frozen: PyTree,
    state: State,
    examples: Sequence[Example],
    settings: Settings,
    *,
    first: int,
    steps: int,
    max_length: int,
) -> Iterator[Step]:
    """Trains from step `first` to step `steps`; the same from anywhere, given the state of that step."""
    optimiser, schedule = optimiser_for(settings, steps)
    key = jax.random.key(settings.seed)

    @eqx.filter_jit
    def update(frozen: PyTree, state: State, batch: Batch, terms: Any, keys: Any) -> tuple[State, Any]:
        def loss(params: PyTree) -> Any:
            outputs = _outputs(task, eqx.combine(params, frozen), batch, keys)
            return task.total(outputs, batch) / terms

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, optimiser_state = optimiser.update(grads, state.optimiser, state.params)
        return State(optax.apply_updates(state.params, updates), optimiser_state), value

    size, count = settings.batch_size, settings.accumulate
    for number in range(first + 1, steps + 1):
        of_step = range((number - 1) * count, number * count)
        chosen = [chosen_for(i, len(examples), size, settings.seed) for i in of_step]
        batches = [collate([examples[i] for i in indices], max_length) for indices in chosen]
        # The mean over all that is accumulated, however many tokens each part of it has.
        terms = sum(map(task.weight, batches)) / count
        values = []
        for i, batch in zip(of_step, batches, strict=True):
            keys = jax.random.split(jax.random.fold_in(key, i), size) if settings.dropout else None
            state, value = update(frozen, state, batch, jnp.float32(terms), keys)
            values.append(value)
        value = float(np.mean(values))
        if not np.isfinite(value):
            raise FinetuneError(f"The loss of step {number} is {value}. Try a lower --learning-rate.")
        tokens = sum(int(np.sum(batch.seen)) for batch in batches)
        yield Step(number, value, float(schedule(number - 1)), tokens, state)


def measure(
    task: AbstractTask, model: PyTree, examples: Sequence[Example], batch_size: int, max_length: int
) -> dict[str, float]:
    """The metrics of a model on examples, without dropout."""
    run = eqx.filter_jit(_outputs)
    whole = collate(examples, max_length)
    outputs = []
    for start in range(0, len(examples), batch_size):
        rows = np.arange(start, start + batch_size) % len(examples)  # the last batch is filled up
        outputs.append(run(task, model, Batch(*(part[rows] for part in whole)), None))
    joined = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(examples)], *outputs)
    return task.metrics(joined, whole)


def _outputs(task: AbstractTask, model: PyTree, batch: Batch, keys: Any) -> PyTree:
    def one(example: Batch, key: Any) -> Any:
        return ql.quaxify(task.output)(ql.with_dropout_key(model, key), example)

    batch = jax.tree.map(jnp.asarray, batch)
    return jax.vmap(one, in_axes=(0, None if keys is None else 0))(batch, keys)
