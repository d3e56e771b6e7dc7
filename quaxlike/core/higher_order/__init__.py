"""Primitives that carry code. Importing this package registers their rules.

We must bind such a primitive again with all of its parameters (name, donation, shardings, unroll, policy,
...), adapted to the number of leaves. Dropping one of them would silently change how the user's program is
compiled.
"""

from . import calls as calls
from . import control_flow as control_flow
from . import custom_derivatives as custom_derivatives
from . import inline as inline
from . import linear as linear
from . import structural as structural
from . import value as value
