"""New kinds of arrays for any JAX program."""

from ._version import __version__ as __version__
