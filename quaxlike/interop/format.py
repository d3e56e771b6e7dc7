"""What a format of quantised weights in safetensors says of itself: its module states one `Format`."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .blocks import Weight
from .tensors import Tensors

Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """A format, and how its checkpoints are told from others, read and written.

    **Attributes:**

    - `methods`: the values of `quant_method` in a `config.json` that name it; it is written with the first.
    - `weights`: the weights of a checkpoint, by their names in the unquantised one, from its tensors and its
        settings. A weight that lacks a part is among them, and an error when it is read.
    - `codes`: endings of tensors that are of no use on their own: a checkpoint with one that belongs to no
        weight is damaged.
    - `by_rows`: whether the first axis of its tensors has the rows of the weight, tiles of rows, or neither,
        and `weights` reads a window of rows as if it were a file.
    - `is_in`: whether a checkpoint without settings has weights of the format.
    - `settings`: the settings of a checkpoint that states them elsewhere than in `quantization_config`; None
        if it does not. Called with `config.json` and the folder.
    - `written`: the tensors of weights by name, and their `quantization_config`. None if it is only read.
    - `takes`: whether a Value of a model is saved in this format.
    """

    methods: tuple[str, ...]
    weights: Callable[[Tensors, Settings], Mapping[str, Weight]]
    codes: tuple[str, ...] = ()
    by_rows: bool = False
    is_in: Callable[[Tensors], bool] = lambda tensors: False
    settings: Callable[[Settings, Path], Settings | None] = lambda config, folder: None
    written: Callable[[Path, Mapping[str, Any]], tuple[dict[str, np.ndarray], dict[str, Any]]] | None = None
    takes: Callable[[Any], bool] = lambda value: False

    @property
    def name(self) -> str:
        return self.methods[0]
