"""Recurrent networks learned forward in time: ETP primitives, D-RTRL and pp_prop."""

from . import values as _values  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from .d_rtrl import DRTRL as DRTRL
from .learner import Learned as Learned
from .learner import Learner as Learner
from .learner import UntracedParameterWarning as UntracedParameterWarning
from .ops.conv import conv as conv
from .ops.conv import etp_conv_p as etp_conv_p
from .ops.dense import etp_mm_p as etp_mm_p
from .ops.dense import etp_mv_p as etp_mv_p
from .ops.dense import matmul as matmul
from .ops.elementwise import elementwise as elementwise
from .ops.elementwise import etp_elemwise_p as etp_elemwise_p
from .ops.embedding import embedding as embedding
from .ops.embedding import etp_emb_p as etp_emb_p
from .ops.lora import etp_lora_mm_p as etp_lora_mm_p
from .ops.lora import etp_lora_mv_p as etp_lora_mv_p
from .ops.lora import lora_matmul as lora_matmul
from .ops.sparse import SparsePattern as SparsePattern
from .ops.sparse import etp_sp_mm_p as etp_sp_mm_p
from .ops.sparse import etp_sp_mv_p as etp_sp_mv_p
from .ops.sparse import sparse_matmul as sparse_matmul
from .pp_prop import PPProp as PPProp
from .primitive import ETPPrimitive as ETPPrimitive
from .primitive import get_trainable_invars as get_trainable_invars
from .primitive import get_x_invar_index as get_x_invar_index
from .primitive import get_y_outvar_index as get_y_outvar_index
from .primitive import is_batched_primitive as is_batched_primitive
from .primitive import is_etp_enable_gradient_primitive as is_etp_enable_gradient_primitive
from .primitive import is_etp_primitive as is_etp_primitive
from .primitive import register_primitive as register_primitive
