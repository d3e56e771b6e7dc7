"""C++ implementations for products with block formats on CPUs, which are compiled on the user's machine."""

from .library import NativeError, build, prepare

__all__ = ["NativeError", "build", "prepare"]
