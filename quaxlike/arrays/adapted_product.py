"""`dot_general` with an adapted array, on labelled axes."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from .adapted import AdaptedArray, labels_of
from .dot_axes import Labels, arrange, contract, dot_axes, in_order, weight_product


class AdaptedProduct:
    """The product of an adapted array `w` with `x`, on either side.

    Axes are tracked by integer labels (a bit like `einsum` indices), because the parts of `w` can have their
    axes in different orders. The axes of `w` have the labels 0, 1, ... Each axis of `x` shares its label with
    the axis it's contracted or batched with. If there is none, it has a new label, starting from `w.ndim`.
    """

    def __init__(
        self, w: AdaptedArray, x: Any, on_left: bool, *, dimension_numbers: Any, **params: Any
    ) -> None:
        of_w, of_x = dot_axes(w, x, dimension_numbers, on_left=on_left)
        labels = list(range(w.ndim, w.ndim + jnp.ndim(x)))
        for own, others in zip(of_w[:2], of_x[:2], strict=True):
            for label, axis in zip(own, others, strict=True):
                labels[axis] = label
        self.w: Any = w
        self.x, self.on_left, self.params = x, on_left, params
        self.dimension_numbers, self.x_labels, self.own = dimension_numbers, labels, labels_of(w)
        self.contracting = of_w.contracting
        #: The labels of the axes of the result.
        self.out = [*of_w.batch, *in_order(on_left, of_w.free, [i for i in labels if i >= w.ndim])]

    def times(
        self, part: Any, own: Labels, x: Any, labels: Labels, keep: Collection[int], **params: Any
    ) -> tuple[Any, Labels]:
        """Multiplies a part of `w`, with labels `own`, with `x`. Also returns the result's labels."""
        if self.on_left:
            return contract(part, own, x, labels, keep, **params)
        return contract(x, labels, part, own, keep, **params)

    def with_base(self, w: Any, x: Any, labels: Labels, own: Labels | None = None) -> Any:
        """Multiplies the base, with labels `own` (default: those of `w`), with `x`."""
        own = self.own["w"] if own is None else own
        # `dimension_numbers` only apply if the base and x have the same axes as in the original product.
        if len(own) < self.w.ndim or labels != self.x_labels:
            return arrange(*self.times(w, own, x, labels, self.out, **self.params), self.out)
        return weight_product(*((w, x) if self.on_left else (x, w)), self.dimension_numbers, **self.params)
