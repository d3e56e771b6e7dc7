"""The training loop and its compiled step, with mixed precision, rematerialisation and memory use."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from ...arrays.adapted import AdaptedArray
from ...core.quaxify import quaxify
from ...core.values import is_value
from ...kernels import dots_with_no_batch_dims_saveable
from ...optim import lora_plus, quantize_state
from ...surgery.adapters import activate, with_dropout_key
from ...surgery.trainable import trainable
from ..models import attention_backend
from .data import Batch, Example, chosen_for, collate
from .devices import Devices
from .settings import FinetuneError, TrainSettings
from .tasks import AbstractTask

#: The policies for `--remat`, determining what each layer saves for the backward pass.
POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": dots_with_no_batch_dims_saveable,
}

#: How to quantise the moments of the optimiser, by the number of bits.
SCHEMES = {8: "q8_0", 4: "q4_0"}


class State(NamedTuple):
    params: PyTree
    optimiser: PyTree


class MemoryUse(NamedTuple):
    """A step's peak memory use on each device, in bytes."""

    weights: int
    adapters: int
    optimiser: int
    activations: int | None
    """The size of all temporaries, or None if the backend doesn't report this."""

    def __str__(self) -> str:
        parts = [
            f"{name} {size / 2**20:,.1f} MiB" for name, size in self._asdict().items() if size is not None
        ]
        return ", ".join(parts)


class TrainingProgram:
    """A training step, updating the state using a single batch. It is compiled once per batch shape."""

    def __init__(
        self,
        task: AbstractTask,
        optimiser: optax.GradientTransformationExtraArgs,
        settings: TrainSettings,
        devices: Devices,
    ) -> None:
        def update(
            frozen: PyTree, state: State, batch: Batch, terms: Any, keys: Any, teacher: PyTree = None
        ) -> tuple[State, Any]:
            teacher = computed(teacher, settings, devices)

            def loss(params: PyTree) -> Any:
                model = computed(eqx.combine(params, frozen), settings, devices)
                with attention_backend(devices.attention):
                    outputs = outputs_of(task, model, batch, keys, teacher)
                return task.total(outputs, batch) / terms

            value, grads = jax.value_and_grad(loss)(state.params)
            updates, optimiser_state = optimiser.update(grads, state.optimiser, state.params)
            new = State(optax.apply_updates(state.params, updates), optimiser_state)
            return devices.reshard_state(new), devices.replicate_outputs(value)

        self._jitted = jax.jit(update, donate_argnames="state")
        self._compiled: dict[Any, Any] = {}
        self.seconds = 0.0
        """The total time spent compiling."""

    def __call__(self, *arguments: Any) -> tuple[State, Any]:
        return self.compiled(*arguments)(*arguments)

    def lowered(self, *arguments: Any) -> jax.stages.Lowered:
        """Lowers the program. You can use `jax.ShapeDtypeStruct`s here, even for nonexistent devices."""
        return self._jitted.lower(*arguments)

    def compiled(self, *arguments: Any) -> Any:
        """Returns the program for the shape of this batch. You can use `jax.ShapeDtypeStruct`s here."""
        shape = arguments[2].ids.shape
        if shape not in self._compiled:
            start = time.perf_counter()
            self._compiled[shape] = self.lowered(*arguments).compile()
            self.seconds += time.perf_counter() - start
        return self._compiled[shape]

    def memory(self, *arguments: Any) -> MemoryUse:
        (frozen, state), teacher = arguments[:2], arguments[5:]
        analysis = self.compiled(*arguments).memory_analysis()
        activations = getattr(analysis, "temp_size_in_bytes", None)
        return MemoryUse(
            _bytes((frozen, teacher)), _bytes(state.params), _bytes(state.optimiser), activations
        )


def stored_for(model: PyTree, dtype: str | None) -> PyTree:
    """Casts a model's frozen arrays to the compute dtype. Trainable arrays are left as they are."""
    converted = _converted(model, dtype)
    trained, _ = eqx.partition(model, trainable(model))
    # Casting can change static fields of a Value. The leaves then have to go into another structure.
    places, frozen = eqx.partition(converted, trainable(converted))
    trained = jax.tree.unflatten(jax.tree.structure(places), jax.tree.leaves(trained))
    return eqx.combine(trained, frozen)


def prepared(model: PyTree, settings: TrainSettings) -> PyTree:
    """Prepares a model for a training step by casting it and rematerialising its layers."""
    model = _converted(model, settings.compute_dtype)
    if settings.remat is None:
        return model
    policy, layers = POLICIES[settings.remat], model.layers
    again = [Again(x, policy) for x in layers] if isinstance(layers, list) else Again(layers, policy)
    return eqx.tree_at(lambda model: model.layers, model, again)


def computed(model: PyTree, settings: TrainSettings, devices: Devices) -> PyTree:
    """Gathers the weights of the model or the teacher, and then prepares it for a training step."""
    return None if model is None else prepared(devices.gather_weights(model), settings)


class Again(eqx.Module):
    """Wraps a layer, so that the backward pass recomputes anything not saved by the policy."""

    layer: Any
    policy: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *arguments: Any) -> Any:
        def run(layer: Any, *arguments: Any) -> Any:
            return layer(*arguments)

        return jax.checkpoint(run, policy=self.policy)(self.layer, *arguments)


def outputs_of(task: AbstractTask, model: PyTree, batch: Batch, keys: Any, teacher: PyTree = None) -> PyTree:
    """Computes the task's output for each example in a batch.

    `keys` are for dropout; pass None to disable this. Only some tasks need the `teacher`.
    """

    def one(example: Batch, key: Any) -> Any:
        own = with_dropout_key(model, key)
        if task.invokes:
            own = activate(own, example.ids[0], example.segments[0])
        return quaxify(task.output)(task.compared(own, teacher), example)

    batch = jax.tree.map(jnp.asarray, batch)
    return jax.vmap(one, in_axes=(0, None if keys is None else 0))(batch, keys)


def _converted(model: PyTree, dtype: str | None) -> PyTree:
    done: dict[int, Any] = {}  # keyed by identity, so that shared arrays are still shared

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, AdaptedArray):  # each of its parts can be cast
            return jax.tree.map(convert, leaf, is_leaf=lambda x: x is not leaf and is_value(x))
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if id(leaf) not in done:
            done[id(leaf)] = quaxify(lambda x: x.astype(dtype))(leaf)
        return done[id(leaf)]

    return model if dtype is None else jax.tree.map(convert, model, is_leaf=is_value)


def _bytes(tree: PyTree) -> int:
    def part(leaf: Any) -> Any:
        return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape

    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()  # don't count shared arrays twice
    return sum(math.prod(part(leaf)) * leaf.dtype.itemsize for leaf in leaves)


class TrainingStep(NamedTuple):
    number: int
    loss: float
    learning_rate: float
    tokens: int
    seconds: float
    state: State


def optimiser_for(
    settings: TrainSettings, steps: int
) -> tuple[optax.GradientTransformationExtraArgs, Callable[[Any], Any]]:
    """Creates AdamW, with gradients clipped by their global norm. Also returns the learning rate schedule."""
    warmup, peak = round(settings.warmup * steps), settings.learning_rate
    rest = max(1, steps - warmup)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # Begin the warm-up above zero: otherwise the first step doesn't do anything.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    schedule = optax.join_schedules([rise, decay], [warmup]) if warmup else decay
    chain = optax.chain(
        optax.clip_by_global_norm(settings.clip) if settings.clip else optax.identity(),
        optax.adamw(schedule, weight_decay=settings.weight_decay),
        lora_plus(settings.lora_plus) if settings.lora_plus is not None else optax.identity(),
    )
    if settings.optimizer_bits is not None:
        chain = quantize_state(chain, SCHEMES[settings.optimizer_bits])
    if settings.accumulate > 1:
        chain = optax.MultiSteps(chain, settings.accumulate).gradient_transformation()
    return optax.with_extra_args_support(chain), schedule


def steps_of(settings: TrainSettings, n: int) -> int:
    if settings.steps is not None:
        return settings.steps
    return max(1, round(settings.epochs * (n // settings.batch_size) / settings.accumulate))


class Training:
    """Runs `steps` training steps on a set of examples.

    `frozen` is the untrained part of the model. Some tasks also need a `teacher`.
    """

    def __init__(
        self, task: AbstractTask, frozen: PyTree, examples: Sequence[Example], settings: TrainSettings, *,
        steps: int, max_length: int, devices: Devices, teacher: PyTree = None,
    ) -> None:  # fmt: skip
        self.task, self.frozen, self.examples, self.settings = task, frozen, examples, settings
        self.steps, self.max_length, self.devices, self._teacher = steps, max_length, devices, teacher
        adapters = jax.tree.leaves(frozen, is_leaf=lambda x: isinstance(x, AdaptedArray))
        self._drops = any(getattr(x, "dropout", 0) > 0 for x in adapters)
        self.optimiser, self._schedule = optimiser_for(settings, steps)
        self.program = TrainingProgram(task, self.optimiser, settings, devices)

        def evaluate(frozen: PyTree, params: PyTree, batch: Batch, teacher: PyTree) -> PyTree:
            models = eqx.combine(params, frozen), teacher
            model, teacher = (computed(x, settings, devices) for x in models)
            with attention_backend(devices.attention):
                return devices.replicate_outputs(outputs_of(task, model, batch, None, teacher))

        self._evaluate = jax.jit(evaluate)

    def memory(self, state: State) -> MemoryUse:
        """Compiles a step for the longest possible batch, and returns its memory use."""
        longest = max(self.examples, key=lambda example: max(map(len, example.texts)))
        batch = collate([longest] * self.settings.batch_size, self.max_length)
        return self.program.memory(self.frozen, state, *self._placed(batch, 1, 0))

    def run(self, state: State, first: int) -> Iterator[TrainingStep]:
        """Trains, starting with the step after `first`. Resuming a run doesn't affect its results.

        Each state is donated to the next step, so don't use it once that has started.
        """
        settings, size, count = self.settings, self.settings.batch_size, self.settings.accumulate
        for number in range(first + 1, self.steps + 1):
            start, compiling = time.perf_counter(), self.program.seconds
            of_step = range((number - 1) * count, number * count)
            chosen = [chosen_for(i, len(self.examples), size, settings.seed) for i in of_step]
            batches = [collate([self.examples[i] for i in indices], self.max_length) for indices in chosen]
            # Average over the tokens of all accumulated batches, rather than over averages.
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
            yield TrainingStep(number, value, float(self._schedule(number - 1)), tokens, seconds, state)

    def measure(self, params: PyTree, examples: Sequence[Example]) -> dict[str, float]:
        """Computes metrics on a set of examples, without dropout. Returns `{}` if there are none."""
        if not examples:
            return {}
        whole, size = collate(examples, self.max_length), self.settings.batch_size
        outputs = []
        for start in range(0, len(examples), size):
            self.devices.take_interrupt()
            rows = np.arange(start, start + size) % len(examples)  # repeat some to fill the last batch
            batch = Batch(*(part[rows] for part in whole))
            outputs.append(self._evaluate(self.frozen, params, self.devices.batch(batch), self._teacher))
        joined = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(examples)], *jax.device_get(outputs))
        return self.task.metrics(joined, whole)

    def _placed(self, batch: Batch, terms: float | int, i: int) -> tuple[Batch, Any, Any, PyTree]:
        devices, settings, keys = self.devices, self.settings, None
        if self._drops:
            # Keys only depend on the index of the batch, so a resumed run has the same dropout.
            keys = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), i), settings.batch_size)
        placed = devices.batch(batch), devices.replicate(jnp.float32(terms)), devices.batch(keys)
        return *placed, self._teacher
