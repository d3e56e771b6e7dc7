"""The training loop, and metrics of its results."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from .._interrupts import take_interrupt
from .data import Batch, Example, chosen_for, collate
from .devices import Devices
from .settings import FinetuneError, Settings
from .step import Memory, Program, State, outputs_of, prepared
from .tasks import AbstractTask


class Step(NamedTuple):
    """The figures of one step."""

    number: int
    loss: float
    learning_rate: float
    tokens: int
    seconds: float
    state: State


def optimiser_for(settings: Settings, steps: int) -> tuple[optax.MultiSteps, Callable[[Any], Any]]:
    """AdamW after clipping by norm, and its learning rate by step."""
    warmup, peak = round(settings.warmup * steps), settings.learning_rate
    rest = max(1, steps - warmup)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # Warm-up starts above zero, so that no step is wasted.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    schedule = optax.join_schedules([rise, decay], [warmup]) if warmup else decay
    chain = optax.chain(
        optax.clip_by_global_norm(settings.clip) if settings.clip else optax.identity(),
        optax.adamw(schedule, weight_decay=settings.weight_decay),
    )
    return optax.MultiSteps(chain, settings.accumulate), schedule


def steps_of(settings: Settings, n: int) -> int:
    """The number of updates in a run on `n` examples."""
    if settings.steps is not None:
        return settings.steps
    return max(1, round(settings.epochs * (n // settings.batch_size) / settings.accumulate))


class Training:
    """A run of `steps` steps on batches of these examples; `frozen` is the part of the model that is not
    trained."""

    def __init__(
        self, task: AbstractTask, frozen: PyTree, examples: Sequence[Example], settings: Settings, *,
        steps: int, max_length: int, devices: Devices,
    ) -> None:  # fmt: skip
        self.task, self.frozen, self.examples, self.settings = task, frozen, examples, settings
        self.steps, self.max_length, self._devices = steps, max_length, devices
        self.optimiser, self._schedule = optimiser_for(settings, steps)
        self.program = Program(task, self.optimiser, settings, devices)

        def evaluate(frozen: PyTree, params: PyTree, batch: Batch) -> PyTree:
            model = prepared(devices.gather_weights(eqx.combine(params, frozen), task.layers), task, settings)
            return devices.replicate_outputs(outputs_of(task, model, batch, None))

        self._evaluate = jax.jit(evaluate)

    def memory(self, state: State) -> Memory:
        """The memory of a step with the longest texts, whose program is compiled."""
        longest = max(self.examples, key=lambda example: max(map(len, example.texts)))
        batch = collate([longest] * self.settings.batch_size, self.max_length)
        return self.program.memory(self.frozen, state, *self._placed(batch, 1, 0))

    def run(self, state: State, first: int) -> Iterator[Step]:
        """Trains from step `first` on. A resumed run gives the same results.

        Each state is donated to the next step, so do not use it afterwards.
        """
        settings, size, count = self.settings, self.settings.batch_size, self.settings.accumulate
        for number in range(first + 1, self.steps + 1):
            take_interrupt()
            start, compiling = time.perf_counter(), self.program.seconds
            of_step = range((number - 1) * count, number * count)
            chosen = [chosen_for(i, len(self.examples), size, settings.seed) for i in of_step]
            batches = [collate([self.examples[i] for i in indices], self.max_length) for indices in chosen]
            # The mean is over all accumulated batches, whatever their numbers of tokens.
            terms = sum(map(self.task.weight, batches)) / count
            values = []
            for i, batch in zip(of_step, batches, strict=True):
                state, value = self.program(self.frozen, state, *self._placed(batch, terms, i))
                values.append(value)
            value = float(np.mean(jax.device_get(values)))
            if not np.isfinite(value):
                raise FinetuneError(f"The loss of step {number} is {value}. Try a lower --learning-rate.")
            seconds = time.perf_counter() - start - (self.program.seconds - compiling)
            tokens = sum(int(np.sum(batch.seen)) for batch in batches)
            yield Step(number, value, float(self._schedule(number - 1)), tokens, seconds, state)

    def measure(self, params: PyTree, examples: Sequence[Example]) -> dict[str, float]:
        """The metrics on examples, without dropout."""
        whole, size = collate(examples, self.max_length), self.settings.batch_size
        outputs = []
        for start in range(0, len(examples), size):
            take_interrupt()
            rows = np.arange(start, start + size) % len(examples)  # the last batch is filled up
            batch = Batch(*(part[rows] for part in whole))
            outputs.append(self._evaluate(self.frozen, params, self._devices.batch(batch)))
        joined = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(examples)], *jax.device_get(outputs))
        return self.task.metrics(joined, whole)

    def _placed(self, batch: Batch, terms: float | int, i: int) -> tuple[Batch, Any, Any]:
        """The arguments of step `i` besides model and state."""
        devices, keys = self._devices, self._keys(i)
        return devices.batch(batch), devices.replicate(jnp.float32(terms)), devices.batch(keys)

    def _keys(self, i: int) -> Any:
        """The keys of a batch; None without dropout."""
        if not self.settings.dropout:
            return None
        return jax.random.split(
            jax.random.fold_in(jax.random.key(self.settings.seed), i), self.settings.batch_size
        )
