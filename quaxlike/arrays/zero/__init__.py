"""Zeros, constants and the identity matrix.

Operations on these are simplified when tracing (x + 0 is x, x · 0 is 0, I @ x is x), leaving no arithmetic
for them in the jaxpr.
"""

from .constants import Full, Identity, Zero

__all__ = ["Full", "Identity", "Zero"]
