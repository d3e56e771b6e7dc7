"""Products with weights in block formats on CPUs, in C++ that is compiled on your machine."""

from .library import NativeError, build, prepare

__all__ = ["NativeError", "build", "prepare"]
