"""The experiment: train on upright digits, then adapt to rotated ones in full, by LoRA and by QLoRA.

All of these methods share a single training loop. They only differ in the filter spec (which arrays to train)
and the types (how arrays are stored). The digits come with scikit-learn, so there is nothing to download.
"""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from sklearn.datasets import load_digits

import quaxlike as ql

from .model import VisionTransformer

#: The weights to adapt with LoRA and quantise to NF4, i.e. attention and MLPs but not embedding or head.
ADAPTED = r"blocks\.\d+\.(attention\.\w+_proj|up|down)\.weight"
RANK = 8


class Digits(NamedTuple):
    """Greyscale images with values in [0, 1], and the digit shown by each."""

    images: Float[np.ndarray, "n 8 8"]
    labels: Int[np.ndarray, " n"]


class Task(NamedTuple):
    """A training set, together with a held-out set to evaluate on."""

    train: Digits
    test: Digits


def load_tasks(seed: int) -> tuple[Task, Task]:
    """Loads two tasks: upright digits, and the same digits rotated by 90 degrees anticlockwise.

    The same 30% of the 1,797 images are held out in both.
    """
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(images))
    held_out = round(0.3 * len(images))

    def task(images: np.ndarray) -> Task:
        train, test = order[held_out:], order[:held_out]
        return Task(Digits(images[train], labels[train]), Digits(images[test], labels[test]))

    return task(images), task(np.rot90(images, axes=(1, 2)))


class Fit(NamedTuple):
    """A trained model, the loss of each step, and the training time in seconds."""

    model: VisionTransformer
    losses: list[float]
    seconds: float


def loss(
    model: VisionTransformer, images: Float[Array, "n 8 8"], labels: Int[Array, " n"]
) -> Float[Array, ""]:
    """Computes the mean cross-entropy. Always wrapped in `ql.quaxify`, so any type of weight works."""
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
@ql.quaxify
def _predict(model: VisionTransformer, images: Float[Array, "n 8 8"]) -> Int[Array, " n"]:
    return jnp.argmax(jax.vmap(model)(images), axis=-1)


def predictions(model: VisionTransformer, images: Float[np.ndarray, "n 8 8"]) -> Int[np.ndarray, " n"]:
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
    """Trains the selected arrays, using AdamW with a warm-up followed by a cosine schedule.

    After each step `on_step` is called with the loss.
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


class Adaptation(NamedTuple):
    """A method of adapting a model: how to change the types of weights, and which arrays to train."""

    name: str
    prepare: Callable[[VisionTransformer, PRNGKeyArray], VisionTransformer]
    trainable: Callable[[VisionTransformer], PyTree[bool]]
    learning_rate: float


class Result(NamedTuple):
    """The result of training. `before` and `after` are the predictions for the held-out digits."""

    name: str
    fit: Fit
    trainable_parameters: int
    trainable_bytes: int
    labels: Int[np.ndarray, " n"]
    before: Int[np.ndarray, " n"]
    after: Int[np.ndarray, " n"]

    @property
    def accuracy_before(self) -> float:
        """The accuracy on the held-out digits before training."""
        return float(np.mean(self.before == self.labels))

    @property
    def accuracy(self) -> float:
        """The accuracy on the held-out digits after training."""
        return float(np.mean(self.after == self.labels))

    @property
    def training_bytes(self) -> dict[str, int]:
        """The memory needed for training, without activations. (AdamW has two moments per parameter.)"""
        return {
            "weights": ql.summary(self.fit.model).stored_bytes,
            "gradients": self.trainable_bytes,
            "moments of AdamW": 2 * self.trainable_bytes,
        }


def _lora(model: VisionTransformer, key: PRNGKeyArray) -> VisionTransformer:
    return ql.loraify(model, rank=RANK, alpha=2 * RANK, where=ADAPTED, key=key)


_EVERY_ARRAY = functools.partial(jax.tree.map, eqx.is_inexact_array)
FULL = Adaptation("full fine-tuning", lambda model, key: model, _EVERY_ARRAY, 1e-3)
LORA = Adaptation("LoRA", _lora, ql.trainable, 4e-3)
QLORA = LORA._replace(
    name="QLoRA (NF4)", prepare=lambda model, key: _lora(ql.quantize(model, "nf4", where=ADAPTED), key)
)
PRETRAINING = FULL._replace(name="training, upright")


def run(
    method: Adaptation,
    model: VisionTransformer,
    task: Task,
    *,
    steps: int,
    seed: int,
    on_step: Callable[[float], None],
) -> Result:
    """Adapts a model to a task. Raises an error if this materialises any weights."""
    prepared = method.prepare(model, jax.random.key(seed))
    spec = method.trainable(prepared)
    with ql.on_materialise("error"):
        before = predictions(prepared, task.test.images)
        result = fit(
            prepared,
            spec,
            task.train,
            steps=steps,
            learning_rate=method.learning_rate,
            seed=seed,
            on_step=on_step,
        )
        after = predictions(result.model, task.test.images)
    trained = jax.tree.leaves(eqx.filter(prepared, spec))
    size, nbytes = sum(leaf.size for leaf in trained), sum(leaf.nbytes for leaf in trained)
    return Result(method.name, result, size, nbytes, task.test.labels, before, after)
