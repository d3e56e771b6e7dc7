"""Models on meshes of devices, with arrays of any type."""

from .placing import abstract, constrain, shard, specs_for
from .rules import expert_parallel, fsdp, tensor_parallel

__all__ = ["abstract", "constrain", "expert_parallel", "fsdp", "shard", "specs_for", "tensor_parallel"]
