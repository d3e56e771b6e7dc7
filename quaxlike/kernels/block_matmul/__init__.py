"""`x @ W.T` and `x @ W` for stored weights of any block format, with the decoder of rows as a parameter."""

from .api import block_matmul as block_matmul
from .api import int8_matmul as int8_matmul
from .api import lora_matmul as lora_matmul
from .api import nf4_matmul as nf4_matmul
from .api import to_ranks as to_ranks
from .codecs import CODECS as CODECS
from .codecs import Codec as Codec
from .formats import INTEGERS as INTEGERS
from .formats import NIBBLES as NIBBLES
from .formats import Decode as Decode
from .formats import Rows as Rows
from .formats import join as join
from .primitive import block_matmul_p as block_matmul_p
from .primitive import int8_matmul_p as int8_matmul_p
from .primitive import lora_matmul_p as lora_matmul_p
from .primitive import nf4_matmul_p as nf4_matmul_p
