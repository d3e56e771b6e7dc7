"""Primitives that carry code, one file each. Importing this package registers them."""

from . import callbacks as callbacks
from . import checkpoint as checkpoint
from . import cond as cond
from . import custom_dce as custom_dce
from . import custom_derivatives as custom_derivatives
from . import custom_vmap as custom_vmap
from . import defined as defined
from . import equinox as equinox
from . import inline as inline
from . import jit as jit
from . import linear_solve as linear_solve
from . import scan as scan
from . import sequential_call as sequential_call
from . import shard_map as shard_map
from . import structural as structural
from . import unsupported as unsupported
from . import value as value
from . import vprim as vprim
from . import while_loop as while_loop
