"""The handwritten digits that ship inside scikit-learn, upright and rotated."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from sklearn.datasets import load_digits


class Digits(NamedTuple):
    """Grey images in [0, 1] and the digit that each one shows."""

    images: Float[np.ndarray, "n 8 8"]
    labels: Int[np.ndarray, " n"]


class Task(NamedTuple):
    """The training set and the held-out set."""

    train: Digits
    test: Digits


def load_tasks(seed: int) -> tuple[Task, Task]:
    """The task of upright digits, and that of the same digits a quarter turn to the left. The same 30 % of
    the 1,797 images are held out from both."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(images))
    held_out = round(0.3 * len(images))

    def task(images: np.ndarray) -> Task:
        train, test = order[held_out:], order[:held_out]
        return Task(Digits(images[train], labels[train]), Digits(images[test], labels[test]))

    return task(images), task(np.rot90(images, axes=(1, 2)))
