"""Primitives carrying code, such as `jit` or `scan`. Importing this package registers their rules.

Each must be bound again with *all* its parameters (name, donation, shardings, unroll, policy and so on),
adapted to the leaf count. Dropping one would silently change how the user's program is compiled.
"""

from . import calls as calls
from . import control_flow as control_flow
from . import custom_derivatives as custom_derivatives
from . import inline as inline
from . import linear as linear
from . import structural as structural
from . import value as value
