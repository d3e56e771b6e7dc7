"""Forward-in-time learning of recurrent networks: ETP primitives, D-RTRL and pp_prop."""

from . import values as _values  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from .d_rtrl import DRTRL
from .learner import Learned, Learner, MixingWarning, UntracedParameterWarning
from .ops.conv import conv, etp_conv_p
from .ops.dense import etp_mm_p, etp_mv_p, matmul
from .ops.elementwise import elementwise, etp_elemwise_p
from .ops.embedding import embedding, etp_emb_p
from .ops.lora import etp_lora_mm_p, etp_lora_mv_p, lora_matmul
from .ops.sparse import SparsePattern, etp_sp_mm_p, etp_sp_mv_p, sparse_matmul
from .pp_prop import PPProp
from .primitive import (
    ETPPrimitive,
    get_trainable_invars,
    get_x_invar_index,
    get_y_outvar_index,
    is_batched_primitive,
    is_etp_enable_gradient_primitive,
    is_etp_primitive,
    register_primitive,
)

__all__ = [
    "DRTRL",
    "ETPPrimitive",
    "Learned",
    "Learner",
    "MixingWarning",
    "PPProp",
    "SparsePattern",
    "UntracedParameterWarning",
    "conv",
    "elementwise",
    "embedding",
    "etp_conv_p",
    "etp_elemwise_p",
    "etp_emb_p",
    "etp_lora_mm_p",
    "etp_lora_mv_p",
    "etp_mm_p",
    "etp_mv_p",
    "etp_sp_mm_p",
    "etp_sp_mv_p",
    "get_trainable_invars",
    "get_x_invar_index",
    "get_y_outvar_index",
    "is_batched_primitive",
    "is_etp_enable_gradient_primitive",
    "is_etp_primitive",
    "lora_matmul",
    "matmul",
    "register_primitive",
    "sparse_matmul",
]
