"""Zeros, constants and the identity matrix.

Operations on these are simplified when tracing (x + 0 is x, x · 0 is 0, I @ x is x), so that the jaxpr
doesn't contain any arithmetic for them.
"""

from .constants import Full, Identity, Zero

__all__ = ["Full", "Identity", "Zero"]
