"""Models on meshes of devices, with arrays of any type."""

from .placing import abstract, constrain, shard
from .rules import expert_parallel, fsdp, tensor_parallel
from .specs import specs_for

__all__ = ["abstract", "constrain", "expert_parallel", "fsdp", "shard", "specs_for", "tensor_parallel"]
