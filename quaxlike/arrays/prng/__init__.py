"""PRNG keys as Values, with plain arrays of words as leaves."""

from .keys import KeyArray, key
from .philox import philox4x32

__all__ = ["KeyArray", "key", "philox4x32"]
