"""Keys of pseudo-random generators as Values, whose leaves are plain arrays of words."""

from .keys import KeyArray as KeyArray
from .keys import key as key
from .philox import philox4x32 as philox4x32
