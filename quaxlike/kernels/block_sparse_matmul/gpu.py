"""The choice of a block-sparse matmul kernel on GPUs: Hopper's if it applies, else the general one."""

from typing import Any

from ..backends import Choice
from . import hopper, mma


def choose(platform: str, *operands: Any, **params: Any) -> Choice | str:
    """How the product runs on a GPU, or why it does not."""
    choice = hopper.choose(platform, *operands, **params)
    # The other kernel may take what this one refuses, and gives the reason if it does not.
    return choice if isinstance(choice, Choice) else mma.choose(platform, *operands, **params)


def choose_sampled(platform: str, *operands: Any, **params: Any) -> Choice | str:
    """How the sampled product runs on a GPU, or why it does not."""
    choice = hopper.choose_sampled(platform, *operands, **params)
    return choice if isinstance(choice, Choice) else mma.choose_sampled(platform, *operands, **params)
