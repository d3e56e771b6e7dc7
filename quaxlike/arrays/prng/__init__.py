"""PRNG keys as Values, whose leaves are plain arrays of words."""

from .keys import KeyArray, key
from .philox import philox4x32

__all__ = ["KeyArray", "key", "philox4x32"]
