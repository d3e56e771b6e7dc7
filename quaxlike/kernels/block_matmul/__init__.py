"""Computes `x @ W.T` and `x @ W` for weights in any block format, with the decoder as a parameter."""

from .api import int8_matmul as int8_matmul
from .api import lora_matmul as lora_matmul
from .api import nf4_matmul as nf4_matmul
from .codecs import CODECS as CODECS
from .codecs import Codec as Codec
from .cpu import rounds as rounds
from .nested_scales import NestedScales as NestedScales
from .nested_scales import dense_scales as dense_scales
from .primitive import block_matmul as block_matmul
from .primitive import block_matmul_p as block_matmul_p
from .primitive import int8_matmul_p as int8_matmul_p
from .primitive import lora_matmul_p as lora_matmul_p
from .primitive import nf4_matmul_p as nf4_matmul_p
from .product import INTEGERS as INTEGERS
from .product import NIBBLES as NIBBLES
from .product import Decode as Decode
from .product import Rows as Rows
from .product import join as join
from .reference import to_ranks as to_ranks
