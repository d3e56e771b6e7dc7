"""The block-sparse matmul on GPUs: the kernel for Hopper where that will do, and the one for all others."""

from typing import Any

from ..backends import Choice
from . import hopper, mma


def choose(platform: str, *operands: Any, **params: Any) -> Choice | str:
    """How the product runs on a GPU, or why it does not."""
    choice = hopper.choose(platform, *operands, **params)
    # What it refuses for another reason than the device, the other one refuses, too, or takes.
    return choice if isinstance(choice, Choice) else mma.choose(platform, *operands, **params)


def choose_sampled(platform: str, *operands: Any, **params: Any) -> Choice | str:
    """How the sampled product runs on a GPU, or why it does not."""
    choice = hopper.choose_sampled(platform, *operands, **params)
    return choice if isinstance(choice, Choice) else mma.choose_sampled(platform, *operands, **params)
