"""Checks that a linear jaxpr acts on each position independently.

Learners assume that the Jacobian of the next state is diagonal, with respect to both the last state and each
y. Otherwise they return incorrect gradients. To check this assumption, this module tracks positions through
the jaxpr. For each variable and each argument, it tracks the (single) position in the argument on which each
element of the variable depends. If an element depends on several positions, its equation is reported as
mixing them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from ..core import compat
from ..core.high_level import as_call
from ..core.source_lines import lines_of
from ..primitives import DefinedPrimitive
from .graph import INLINED


class Digit(NamedTuple):
    """An axis of a variable (or a factor of one) corresponding to an axis in the argument.

    The position along this axis is `argument index // stride % size`, plus `start`.
    """

    axis: int
    stride: int
    start: int
    size: int


Place = tuple[tuple[Digit, ...] | None, ...]
"""The digits for each axis of a variable. This is None for any axis that doesn't correspond to an axis of the
argument.
"""
Places = dict[int, Place]
"""Maps the index of each argument to its place."""


class Mixed(Exception):
    """Raised if an equation mixes an argument's positions."""

    def __init__(self, eqn: JaxprEqn, argument: int) -> None:
        self.eqn, self.argument = eqn, argument
        self.around = [eqn]
        """The equation, followed by the calls and loops that contain it. We need these because not every
        equation has a line number.
        """

    def __str__(self) -> str:
        line = next((line for eqn in self.around for line in lines_of(eqn)), None)
        return f"`{self.eqn.primitive.name}`" + ("" if line is None else f" at {line}")


def own_place(shape: Sequence[int], lead: int = 0) -> Place:
    """Returns the argument's own place, but with `lead` additional leading axes."""
    return tuple((Digit(i - lead, 1, 0, n),) if i >= lead and n != 1 else None for i, n in enumerate(shape))


# Elementwise in each operand that can have a tangent.
_ELEMENTWISE = frozenset(
    """add add_any sub mul div neg select_n convert_element_type reduce_precision real imag complex conj copy
    copy_p device_put optimization_barrier sharding_constraint mesh_cast reshard pvary name
    nextafter""".split()  # noqa: SIM905
)
_CALLS = {
    **INLINED,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    **dict.fromkeys(("custom_dce_call", "sequential_call"), "jaxpr"),
}


def _needed(jaxpr: Any) -> list[JaxprEqn]:
    out: list[JaxprEqn] = []
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
            out.append(eqn)
    return out[::-1]


class Positions:
    """Propagates the positions of the arguments through a jaxpr."""

    def __init__(self) -> None:
        self._moves: dict[tuple[int, Place], JaxprEqn] = {}

    def run(self, jaxpr: Any, arguments: Sequence[Places]) -> list[Places]:
        """Returns the places for the outputs, given those for the arguments. May raise `Mixed`."""
        opened = compat.open_jaxpr(jaxpr)
        env: dict[Any, Places] = dict(zip(opened.invars, arguments, strict=True))
        for eqn in _needed(opened):
            operands = [{} if isinstance(a, Literal) else env.get(a, {}) for a in eqn.invars]
            if any(operands):
                try:
                    env |= zip(eqn.outvars, self._results(eqn, operands), strict=True)
                except Mixed as mixed:
                    mixed.around.append(eqn)
                    raise
        return [{} if isinstance(a, Literal) else env.get(a, {}) for a in opened.outvars]

    def mixed(self, eqn: JaxprEqn, argument: int, *places: Place) -> Mixed:
        """Creates the error for an equation, or for an earlier equation if that moved the positions."""
        return Mixed(
            next((self._moves[argument, p] for p in places if (argument, p) in self._moves), eqn), argument
        )

    def _results(self, eqn: Any, operands: list[Places]) -> list[Places]:
        name, params = as_call(eqn.primitive, eqn.params)
        if name == "stop_gradient":
            return [{} for _ in eqn.outvars]
        if name == "optimization_barrier":
            return operands
        if name in _ELEMENTWISE:
            ndim = eqn.outvars[0].aval.ndim
            spread = [{k: place or (None,) * ndim for k, place in each.items()} for each in operands]
            return [self._joined(eqn, spread)]
        if name in _CALLS:
            return self.run(params[_CALLS[name]], operands)
        if name == "cond":
            branches = [self.run(branch, operands[1:]) for branch in params["branches"]]
            return [self._joined(eqn, results) for results in zip(*branches, strict=True)]
        if name == "while":
            n, m = params["cond_nconsts"], params["body_nconsts"]
            consts, carry = operands[n : n + m], operands[n + m :]
            return self._carried(eqn, lambda carry: self.run(params["body_jaxpr"], [*consts, *carry]), carry)
        if name == "scan":
            return self._scanned(eqn, operands)
        if name in _MOVES:
            return self._moved(eqn, operands)
        if isinstance(eqn.primitive, DefinedPrimitive):
            return self.run(eqn.primitive.jaxpr([v.aval for v in eqn.invars], params), operands)
        raise Mixed(eqn, min(k for each in operands for k in each))

    def _moved(self, eqn: Any, operands: list[Places]) -> list[Places]:
        results: list[Places] = [{} for _ in eqn.outvars]
        for k in sorted({k for each in operands for k in each}):
            places = _MOVES[eqn.primitive.name](eqn, [each.get(k) for each in operands])
            for own, place in zip(results, places, strict=True):
                if place is None:
                    raise self.mixed(eqn, k)
                own[k] = place
                self._moves[k, place] = eqn
        return results

    def _joined(self, eqn: JaxprEqn, several: Sequence[Places]) -> Places:
        out: Places = {}
        for places in several:
            for k, place in places.items():
                if out.setdefault(k, place) != place:
                    raise self.mixed(eqn, k, place, out[k])
        return out

    def _carried(self, eqn: JaxprEqn, body: Any, carry: list[Places]) -> list[Places]:
        """Computes the places for a loop's carry, iterating to a fixed point."""
        while True:
            new = [self._joined(eqn, both) for both in zip(carry, body(carry), strict=True)]
            if new == carry:
                return new
            carry = new

    def _scanned(self, eqn: Any, operands: list[Places]) -> list[Places]:
        n, num_carry = compat.scan_arity(eqn.params)
        m = n + num_carry
        consts, carry, xs = operands[:n], operands[n:m], operands[m:]
        for k, place in (item for places in xs for item in places.items()):
            if place[0] is not None:
                raise self.mixed(eqn, k)
        rows = [{k: place[1:] for k, place in places.items()} for places in xs]

        def body(carry: Any) -> Any:
            return self.run(eqn.params["jaxpr"], [*consts, *carry, *rows])

        carry = self._carried(eqn, lambda carry: body(carry)[: m - n], carry)
        return [*carry, *({k: (None, *p) for k, p in places.items()} for places in body(carry)[m - n :])]


# -------------------------------------------------------------------------------------------------
# Primitives moving positions. Each rule returns the places of the outputs, or None for any output with
# elements depending on several positions.
# -------------------------------------------------------------------------------------------------


def _broadcast_in_dim(eqn: Any, place: Place) -> Place | None:
    shape = eqn.params["shape"]
    out: list[Any] = [None] * len(shape)
    for axis, digits in zip(eqn.params["broadcast_dimensions"], place, strict=True):
        if digits is not None and math.prod(d.size for d in digits) != shape[axis]:
            return None
        out[axis] = digits
    return tuple(out)


def _without(place: Place, axes: Sequence[int]) -> Place | None:
    if any(place[i] is not None for i in axes):
        return None
    return tuple(digits for i, digits in enumerate(place) if i not in axes)


def _expand_dims(eqn: Any, place: Place) -> Place:
    left = iter(place)
    return tuple(
        None if i in eqn.params["dimensions"] else next(left) for i in range(eqn.outvars[0].aval.ndim)
    )


def _reshape(eqn: Any, place: Place) -> Place | None:
    """Splits each axis into factors and then merges these factors into the new axes."""
    if eqn.params.get("dimensions") is not None:
        return None
    factors: list[Any] = []  # each item is a digit, or the size of an axis not in the argument
    for digits, size in zip(place, eqn.invars[0].aval.shape, strict=True):
        factors += [size] if digits is None else digits
    out: list[Any] = []
    for size in eqn.outvars[0].aval.shape:
        own: list[Any] = []
        while size != 1 and size != 0:
            while factors and factors[0] == 1:
                factors.pop(0)
            head = factors.pop(0)
            length = head if isinstance(head, int) else head.size
            if size % length == 0:
                own.append(head)
                size //= length
            elif length % size == 0 and isinstance(head, int):
                own.append(size)
                factors.insert(0, length // size)
                size = 1
            elif length % size == 0 and isinstance(head, Digit) and head.start == 0:
                inner = length // size
                own.append(Digit(head.axis, head.stride * inner, 0, size))
                factors.insert(0, Digit(head.axis, head.stride, 0, inner))
                size = 1
            else:
                return None
        if all(isinstance(x, int) for x in own):
            out.append(None)
        elif any(isinstance(x, int) for x in own):
            return None
        else:
            out.append(_merged(own))
    return None if any(not isinstance(x, int) for x in factors) else tuple(out)


def _merged(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    out: list[Digit] = []
    for d in digits:
        last = out[-1] if out else None
        if last and last.axis == d.axis and last.stride == d.stride * d.size and last.start == d.start == 0:
            out[-1] = Digit(d.axis, d.stride, 0, last.size * d.size)
        else:
            out.append(d)
    return tuple(out)


def _cut(digits: Any, low: Any, high: Any, size: int) -> Any:
    """Slices an axis's digits to `low:high`, possibly out of bounds. Returns `...` if this isn't possible."""
    if digits is None or (low, high) == (0, size):
        return digits
    if len(digits) != 1:
        return ...
    return (digits[0]._replace(start=digits[0].start + low, size=high - low),)


def _slice(eqn: Any, place: Place) -> Place | None:
    p, shape = eqn.params, eqn.invars[0].aval.shape
    strides = p["strides"] or (1,) * len(shape)
    cuts = zip(place, p["start_indices"], p["limit_indices"], strides, shape, strict=True)
    out: list[Any] = [
        ... if digits and stride != 1 else _cut(digits, a, b, n) for digits, a, b, stride, n in cuts
    ]
    return None if ... in out else tuple(out)


def _pad(eqn: Any, place: Place) -> Place | None:
    configs = zip(place, eqn.params["padding_config"], eqn.invars[0].aval.shape, strict=True)
    out: list[Any] = [
        ... if digits and inner else _cut(digits, -low, n + high, n)
        for digits, (low, high, inner), n in configs
    ]
    return None if ... in out else tuple(out)


def _concatenate(eqn: Any, places: list[Place | None]) -> Place | None:
    axis, size = eqn.params["dimension"], eqn.outvars[0].aval.shape[eqn.params["dimension"]]
    position, found = 0, set()
    for var, place in zip(eqn.invars, places, strict=True):
        n = var.aval.shape[axis]
        if place is not None:
            digits = _cut(place[axis], -position, size - position, n)
            found.add(None if digits is ... else (*place[:axis], digits, *place[axis + 1 :]))
        position += n
    return found.pop() if len(found) == 1 else None


def _dot_general(eqn: Any, places: list[Place | None]) -> Place | None:
    contract, batch = eqn.params["dimension_numbers"]
    kept: list[list[Any]] = []
    for place, summed, own in zip(places, contract, batch, strict=True):
        ndim = eqn.invars[len(kept)].aval.ndim
        if place is not None and any(place[i] is not None for i in summed):
            return None
        free = [i for i in range(ndim) if i not in summed and i not in own]
        kept.append([None if place is None else place[i] for i in (*own, *free)])
    n = len(batch[0])
    both = all(place is not None for place in places)
    if both and (kept[0][:n] != kept[1][:n] or any(x is not None for side in kept for x in side[n:])):
        return None
    shared = kept[0][:n] if places[0] is not None else kept[1][:n]
    return (*shared, *kept[0][n:], *kept[1][n:])


def _split(eqn: Any, places: list[Place | None]) -> list[Place | None]:
    place, axis, position, out = places[0], eqn.params["axis"], 0, []
    assert place is not None
    for size in eqn.params["sizes"]:
        digits = _cut(place[axis], position, position + size, eqn.invars[0].aval.shape[axis])
        out.append(None if digits is ... else (*place[:axis], digits, *place[axis + 1 :]))
        position += size
    return out


def _stack(eqn: Any, places: list[Place | None]) -> Place | None:
    axis, found = eqn.params["axis"], {p for p in places if p is not None}
    place = found.pop()
    return None if found else (*place[:axis], None, *place[axis:])


def _dynamic_slice(eqn: Any, place: Place) -> Place | None:
    """The start index isn't known here, so the slice must span every axis in the argument."""
    whole = zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"], strict=True)
    cut = [i for i, (size, part) in enumerate(whole) if size != part]
    return None if any(place[i] is not None for i in cut) else place


def _of_first(rule: Any) -> Any:
    """Creates a rule from one for the first operand's place. The other operands must not have places."""

    def of_places(eqn: Any, places: list[Place | None]) -> list[Place | None]:
        place, *others = places
        return [None if place is None or any(x is not None for x in others) else rule(eqn, place)]

    return of_places


def _one(rule: Any) -> Any:
    return lambda eqn, places: [rule(eqn, places)]


_MOVES: dict[str, Any] = {
    "reduce_sum": _of_first(lambda eqn, place: _without(place, eqn.params["axes"])),
    "squeeze": _of_first(lambda eqn, place: _without(place, eqn.params["dimensions"])),
    "transpose": _of_first(lambda eqn, place: tuple(place[i] for i in eqn.params["permutation"])),
    "unstack": lambda eqn, places: [_without(places[0], [eqn.params["axis"]])] * len(eqn.outvars),
    "broadcast_in_dim": _of_first(_broadcast_in_dim),
    "concatenate": _one(_concatenate),
    "dot_general": _one(_dot_general),
    "dynamic_slice": _of_first(_dynamic_slice),
    # What is written must not depend on the argument.
    "dynamic_update_slice": _of_first(lambda eqn, place: place),
    "expand_dims": _of_first(_expand_dims),
    "pad": _of_first(_pad),
    "reshape": _of_first(_reshape),
    "scatter": _of_first(lambda eqn, place: place),
    "scatter-add": _of_first(lambda eqn, place: place),
    "slice": _of_first(_slice),
    "split": _split,
    "stack": _one(_stack),
}
