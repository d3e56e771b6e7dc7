"""C++ implementations of products with block formats on CPUs, compiled on the user's machine."""

from .library import NativeError, build, prepare

__all__ = ["NativeError", "build", "prepare"]
