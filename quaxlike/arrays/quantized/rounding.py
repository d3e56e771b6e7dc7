"""Checks the options for products that round their other operand: `activations` and `compute`.

`activations` uses a single scale for each row, whereas `compute="int8"` has one for every 32 numbers, like
llama.cpp, and only works on CPUs. `compute="bfloat16"` has no scales, and works on every platform. An array
can't have both options.
"""

from typing import Any

from ...kernels.block_matmul import NestedScales, rounds
from ...kernels.code_matmul import ACTIVATIONS


def check_rounding(w: Any) -> None:
    """Raises a `ValueError` if a quantised array's format doesn't support its `activations` or `compute`, or
    if it has both."""
    _check_activations(w)
    if w.compute is None:
        return
    if w.compute not in ("int8", "bfloat16"):
        raise ValueError(f"compute must be 'int8', 'bfloat16' or None; found {w.compute!r}.")
    if w.activations is not None:
        raise ValueError(
            "`activations` and `compute` each say how the other operand is rounded: leave one of them out."
        )
    if w.compute == "int8" and not rounds(w.codec):
        raise ValueError(
            f"compute='int8' takes codes that bytes can hold: integers, or tables of at most 16 values; "
            f"found {type(w).__name__} of {w.codec.name}."
        )


def _check_activations(w: Any) -> None:
    if w.activations is None:
        if w.input_limit is not None or w.rounds_gradients:
            raise ValueError(
                "input_limit and rounds_gradients are of products with `activations` in 8 bits, which "
                "this array does not have."
            )
        return
    if w.input_limit is not None and not 0 < w.input_limit < float("inf"):
        raise ValueError(f"input_limit must be a positive number; found {w.input_limit}.")
    codes = {"int8": "signed", "fp8": "e4m3"}.get(w.activations)
    codec, plain = w.codec, not isinstance(w.scale, NestedScales) and w.order is None
    if codec.codes != codes or codec.scales != "float" or codec.zeros or not plain:
        raise ValueError(
            f"Products with activations in {' or '.join(ACTIVATIONS)} take a weight of the same codes, "
            f"of the scheme 'int8' or 'fp8'; found activations {w.activations!r} and "
            f"{type(w).__name__} of {codec.name}."
        )
    if w.block_size is not None:
        raise ValueError(
            f"Products with activations in 8 bits take one scale for each output and no block_size; "
            f"found blocks of {w.block_size}."
        )
