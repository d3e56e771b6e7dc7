"""Sharding models, including any Values in them, over a mesh of devices."""

from typing import Any

from .._deprecated import moved_name
from .fsdp import fsdp
from .placing import abstract, constrain, shard, specs_for

__all__ = ["abstract", "constrain", "fsdp", "shard", "specs_for"]


_MOVED = ("expert_parallel", "tensor_parallel")


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        return moved_name(f"sharding.{name}", f"lm.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
