"""Zeros, constants and the identity matrix.

Operations on them are simplified while tracing: x + 0 is x, x · 0 is 0, I @ x is x, and no arithmetic is
left in the jaxpr.
"""

from .constants import Full, Identity, Zero

__all__ = ["Full", "Identity", "Zero"]
