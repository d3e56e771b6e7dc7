"""Models on meshes of devices, with arrays of any type."""

from .layouts import expert_parallel as expert_parallel
from .layouts import fsdp as fsdp
from .layouts import tensor_parallel as tensor_parallel
from .placing import abstract as abstract
from .placing import constrain as constrain
from .placing import shard as shard
from .specs import specs_for as specs_for

__all__ = ["abstract", "constrain", "expert_parallel", "fsdp", "shard", "specs_for", "tensor_parallel"]
