"""Axes cut into several, or joined: the heads of attention that share a weight."""

import math
from collections.abc import Sequence
from typing import Any

from ...core.quaxify import quaxify
from ...core.rules import register
from .array import RANK, LoraArray, labels, matrix_labels
from .layout import has_all_axes


@register("reshape")
def _reshape(x: LoraArray, *, new_sizes: Sequence[int], **params: Any):
    """`out` and `in` may be of several axes each; what would mix them makes the array dense."""
    groups = _groups(x.shape, new_sizes)
    if groups is None or any(value is not None for value in params.values()) or not has_all_axes(x):
        return NotImplemented
    n, m, own = x.ndim, len(new_sizes), labels(x)
    out, into = ([n + axis for axis in axes] for axes in (x.out_axes, x.in_axes))
    batch = [i for i in range(n) if i not in matrix_labels(x)]
    for old, _ in groups:
        kind = next(kind for kind in (out, into, batch) if old[0] in kind)
        start = kind.index(old[0])
        if kind[start : start + len(old)] != list(old) or (kind is batch and x.key is not None):
            return NotImplemented
    new = {old[0]: axes for old, axes in groups}

    def reshaped(part: Any, own: Sequence[int]) -> Any:
        size_of = lambda i: [x.rank] if i == RANK else [new_sizes[j] for j in new.get(i, ())]
        sizes = [size for i in own for size in size_of(i)]
        return quaxify(lambda part: part.reshape(sizes))(part)

    return x.replace(
        w=reshaped(x.w, own[0]),
        a=reshaped(x.a, own[1]),
        b=reshaped(x.b, own[2]),
        magnitude=None if x.magnitude is None else reshaped(x.magnitude, own[2][:-1]),
        out_axes=tuple(j - m for i in out for j in new.get(i, ())),
        in_axes=tuple(j - m for i in into for j in new.get(i, ())),
    )


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]] | None:
    """The smallest runs of old axes that become runs of new ones; None for arrays without elements."""
    if math.prod(new) == 0 or not old or not new:
        return None
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        start, left, right = (i, j), old[i], new[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((range(start[0], i), range(start[1], j)))
    last_old, last_new = groups[-1]  # with what is left, axes of size one
    groups[-1] = (range(last_old.start, len(old)), range(last_new.start, len(new)))
    return groups
