"""One training loop for every method: a filter selects what to train, types determine how it is stored."""

import time
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

import quaxlike as ql

from .data import Digits
from .model import VisionTransformer


class Fit(NamedTuple):
    """A trained model, the loss before every step, and the wall time in seconds."""

    model: VisionTransformer
    losses: list[float]
    seconds: float


def loss(
    model: VisionTransformer, images: Float[Array, "n 8 8"], labels: Int[Array, " n"]
) -> Float[Array, ""]:
    """The mean cross-entropy, which `ql.quaxify` makes work on weights of any type."""
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
@ql.quaxify
def _predict(model: VisionTransformer, images: Float[Array, "n 8 8"]) -> Int[Array, " n"]:
    return jnp.argmax(jax.vmap(model)(images), axis=-1)


def predictions(model: VisionTransformer, images: Float[np.ndarray, "n 8 8"]) -> Int[np.ndarray, " n"]:
    """The digit that a model predicts for each image; its weights may be of any type."""
    return np.asarray(_predict(model, jnp.asarray(images)))


def fit(
    model: VisionTransformer,
    trainable: PyTree[bool],
    digits: Digits,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[float], None],
    batch_size: int = 64,
) -> Fit:
    """Trains the arrays that the filter selects, by AdamW with a warm-up and cosine schedule.

    Weights may be of any type. `on_step` is called with the loss of each step.
    """
    start = time.perf_counter()
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    params, frozen = eqx.partition(model, trainable)
    state = optimiser.init(params)

    @eqx.filter_jit
    def step(params: PyTree, frozen: PyTree, state: PyTree, images: Array, labels: Array):
        @eqx.filter_value_and_grad
        def value_and_grad(params: PyTree):
            return ql.quaxify(loss)(eqx.combine(params, frozen), images, labels)

        value, grads = value_and_grad(params)
        updates, state = optimiser.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    rng = np.random.default_rng(seed)
    losses: list[float] = []
    for _ in range(steps):
        batch = rng.choice(len(digits.labels), batch_size, replace=False)
        images, labels = jnp.asarray(digits.images[batch]), jnp.asarray(digits.labels[batch])
        params, state, value = step(params, frozen, state, images, labels)
        losses.append(float(value))
        on_step(losses[-1])
    return Fit(eqx.combine(params, frozen), losses, time.perf_counter() - start)
