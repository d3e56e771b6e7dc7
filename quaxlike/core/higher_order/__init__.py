"""What the interpreter does with primitives that carry code, one file each; importing registers them."""

from . import cond as cond
from . import custom_derivatives as custom_derivatives
from . import jit as jit
from . import scan as scan
from . import structural as structural
from . import while_loop as while_loop
