"""Primitives that carry code. Importing this package registers them."""

from . import calls as calls
from . import control_flow as control_flow
from . import custom_derivatives as custom_derivatives
from . import inline as inline
from . import linear as linear
from . import structural as structural
from . import value as value
