"""The experiment: training on upright digits, then adapting to rotated ones in full, by LoRA and by QLoRA."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray, PyTree

import quaxlike as ql

from .data import Task
from .model import VisionTransformer
from .train import Fit, fit, predictions

#: The weights that LoRA adapts and NF4 quantises: attention and perceptron, not embedding and head.
ADAPTED = r"blocks\.\d+\.(attention\.\w+_proj|up|down)\.weight"
RANK = 8


class Method(NamedTuple):
    """A way to adapt a model: new types for some of its weights, and which arrays then train."""

    name: str
    prepare: Callable[[VisionTransformer, PRNGKeyArray], VisionTransformer]
    trainable: Callable[[VisionTransformer], PyTree[bool]]
    learning_rate: float


class Result(NamedTuple):
    """The result of one training run; `before` and `after` are predictions for the held-out digits."""

    name: str
    fit: Fit
    trainable_parameters: int
    trainable_bytes: int
    labels: Int[np.ndarray, " n"]
    before: Int[np.ndarray, " n"]
    after: Int[np.ndarray, " n"]

    @property
    def accuracy_before(self) -> float:
        """The share of held-out digits classified correctly before training."""
        return float(np.mean(self.before == self.labels))

    @property
    def accuracy(self) -> float:
        """The share of held-out digits classified correctly after training."""
        return float(np.mean(self.after == self.labels))

    @property
    def training_bytes(self) -> dict[str, int]:
        """What is kept while training, activations apart: AdamW has two moments for what is trained."""
        return {
            "weights": ql.summary(self.fit.model).stored_bytes,
            "gradients": self.trainable_bytes,
            "moments of AdamW": 2 * self.trainable_bytes,
        }


def _lora(model: VisionTransformer, key: PRNGKeyArray) -> VisionTransformer:
    return ql.loraify(model, rank=RANK, alpha=2 * RANK, where=ADAPTED, key=key)


def _qlora(model: VisionTransformer, key: PRNGKeyArray) -> VisionTransformer:
    return _lora(ql.quantize(model, "nf4", where=ADAPTED), key)


def _every_array(model: VisionTransformer) -> PyTree[bool]:
    return jax.tree.map(eqx.is_inexact_array, model)


FULL = Method("full fine-tuning", lambda model, key: model, _every_array, 1e-3)
LORA = Method("LoRA", _lora, ql.trainable, 4e-3)
QLORA = Method("QLoRA (NF4)", _qlora, ql.trainable, 4e-3)
PRETRAINING = FULL._replace(name="training, upright")


def run(
    method: Method,
    model: VisionTransformer,
    task: Task,
    *,
    steps: int,
    seed: int,
    on_step: Callable[[float], None],
) -> Result:
    """Adapts a model to a task. Raises if a weight would be materialised."""
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
