"""Held-out losses of models whose optimisers keep moments in few bits: part of `benchmarks.quality`."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import quaxlike as ql
from benchmarks import merging
from quaxlike.demo import experiment
from quaxlike.demo.model import VisionTransformer
from quaxlike.lm.models.pooling import mean_pooled

SEEDS, MIN_SIZE = 5, 256
OPTIMISERS: dict[str, str | None] = {"float32": None, "8 bits": "q8_0", "4 bits": "q4_0"}


class Moments(NamedTuple):
    """What was measured of an optimiser."""

    model: str
    name: str
    bytes: float
    """Of the state, as a share of that in float32."""
    losses: list[float]
    """Held-out losses, by seed."""


class Training(NamedTuple):
    """A model that AdamW trains, all of it."""

    start: Callable[[Any], Any]
    """The model, by a key."""
    loss: Callable[[Any, Any], Any]
    """Of the model and a batch."""
    train: Any
    test: Any
    steps: int
    batch: int
    rate: float


def digits() -> Training:
    """A vision transformer that classifies digits, from random weights."""
    task, _ = experiment.load_tasks(0)

    def loss(model: Any, batch: Any) -> Any:
        images, labels = batch
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels))

    start = lambda key: VisionTransformer(width=64, depth=2, key=key)
    train, test = (tuple(map(jnp.asarray, part)) for part in task)
    return Training(start, loss, train, test, steps=300, batch=64, rate=1e-3)


def halves() -> Training:
    """MiniLM, which learns to find the second half of a piece of text by the first, among those of the batch.
    Raises `ModuleNotFoundError` without its package."""
    task = merging.minilm()

    def loss(model: Any, ids: Any) -> Any:
        first, second = jnp.split(ids[:, 1:-1], 2, axis=1)
        ends = lambda half: jnp.concatenate([ids[:, :1], half, ids[:, -1:]], axis=1)
        seen = jnp.ones(2 + first.shape[1], bool)
        embed = jax.vmap(lambda ids: mean_pooled(model(ids, seen), seen))
        scores = 20 * embed(ends(first)) @ embed(ends(second)).T
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(ids))))

    return Training(
        lambda _: task.model, loss, task.trained_by, task.measured_on, steps=60, batch=16, rate=2e-5
    )


TRAININGS: dict[str, Callable[[], Training]] = {"digits": digits, "MiniLM": halves}


def of_moments(
    scheme: str | None, training: Training, seeds: int = SEEDS, steps: int | None = None
) -> tuple[int, list[float]]:
    """The bytes of the optimiser's state, and the losses on held-out examples."""
    optimiser = optax.adamw(training.rate)
    if scheme is not None:
        optimiser = ql.optim.quantize_state(optimiser, scheme, min_size=MIN_SIZE)

    def trained(key: Any) -> tuple[Any, Any]:
        first, batches = jax.random.split(key)
        params, static = eqx.partition(training.start(first), eqx.is_inexact_array)
        size = len(jax.tree.leaves(training.train)[0])

        def step(carry: Any, key: Any) -> Any:
            params, state = carry
            rows = jax.random.randint(key, (training.batch,), 0, size)
            batch = jax.tree.map(lambda x: x[rows], training.train)
            of_batch = lambda params: training.loss(eqx.combine(params, static), batch)
            updates, state = optimiser.update(jax.grad(of_batch)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        start = params, optimiser.init(params)
        keys = jax.random.split(batches, training.steps if steps is None else steps)
        (params, state), _ = jax.lax.scan(step, start, keys)
        return training.loss(eqx.combine(params, static), training.test), state

    run = jax.jit(trained)
    losses = []
    for seed in range(seeds):
        loss, state = run(jax.random.key(seed))
        losses.append(float(loss))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), losses


def table(moments: Sequence[Moments]) -> tuple[Sequence[str], list[list[str]]]:
    """The head and the rows."""
    losses = "held-out loss of five seeds"
    head = ("model", "moments of AdamW", "bytes, of float32", losses, "mean ± deviation")
    return head, [
        [x.model, x.name, f"{x.bytes:.2f}", ", ".join(f"{loss:.3f}" for loss in x.losses),
         f"{statistics.mean(x.losses):.3f} ± {statistics.pstdev(x.losses):.3f}"]
        for x in moments
    ]  # fmt: skip
