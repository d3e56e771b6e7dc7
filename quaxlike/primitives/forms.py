"""A primitive's forms, derived from (and computed by) its parent.

A form is a static parameter of a derived primitive. It specifies how the derived primitive's operands and
results relate to its parent's, and evaluates the derived primitive using the parent's implementation.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
from jax.core import ShapedArray
from jax.extend.core import TraceTag, set_current_trace, take_current_trace
from jax.interpreters import ad

from ..core import compat

_T = TypeVar("_T")

Params = dict[str, Any]
Arrays = Sequence[Any]

Flat = Callable[..., list[Any]]
"""A function that accepts flat operands and returns a list of flat results."""


def merge(mask: Sequence[bool], chosen: Sequence[_T], others: Sequence[_T]) -> list[_T]:
    """The inverse of `split`. Each item is from `chosen` if the mask is true, and from `others` otherwise."""
    chosen_, others_ = iter(chosen), iter(others)
    return [next(chosen_) if m else next(others_) for m in mask]


def split(mask: Sequence[bool], items: Sequence[_T]) -> tuple[list[_T], list[_T]]:
    """Returns the items for which the mask is true, followed by the remaining items."""
    chosen = [x for m, x in zip(mask, items, strict=True) if m]
    others = [x for m, x in zip(mask, items, strict=True) if not m]
    return chosen, others


def of_chosen(
    fn: Flat, mask: Sequence[bool], operands: Sequence[Any], results: Sequence[bool]
) -> tuple[list[Any], Flat]:
    """Returns only the operands for which the mask is true, and a version of `fn` mapping just these to the
    chosen `results`.
    """
    chosen, held = split(mask, operands)
    return chosen, lambda *chosen: split(results, fn(*merge(mask, chosen, held)))[0]


@dataclasses.dataclass(frozen=True)
class Jvp:
    """The form of a primitive computing tangents for its parent.

    The operands are the parent's primals, then its results (if a handwritten rule requires
    them), and finally the tangents.
    """

    name: ClassVar[str] = "jvp"
    nonzero: tuple[bool, ...]
    """For each operand of the parent, whether we have a tangent for it."""
    outputs: tuple[bool, ...]
    """For each result of the parent, whether to compute its tangent."""
    with_results: bool = False
    """Whether the results of the parent are passed as operands, which is needed for some handwritten `vjp`
    rules.
    """

    def groups(self, operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """Splits a list of operands into primals, results and tangents."""
        n = len(self.nonzero)
        m = n + len(self.outputs) * self.with_results
        return list(operands[:n]), list(operands[n:m]), list(operands[m:])

    def evaluate(self, parent: Flat, *operands: Any) -> list[Any]:
        primals, _, tangents = self.groups(operands)
        live, of_live = of_chosen(parent, self.nonzero, primals, self.outputs)
        try:
            return jax.jvp(of_live, tuple(live), tuple(tangents))[1]
        except TypeError as error:
            if not compat.lacks_forward_mode(error):
                raise
            # The parent contains a `custom_vjp`. JAX can't map its tangents, but its cotangents.
            out, pull = jax.vjp(of_live, *live)
            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out]
            return list(jax.linear_transpose(lambda *cts: pull(list(cts)), *avals)(tuple(tangents)))


@dataclasses.dataclass(frozen=True)
class Vjp:
    """The form of a primitive computing cotangents for its parent's operands.

    The operands are the parent's primals, followed by the cotangents of its results.
    """

    name: ClassVar[str] = "vjp"
    nonzero: tuple[bool, ...]
    """For each operand of the parent, whether to compute its cotangent."""
    cotangents: tuple[bool, ...]
    """For each result of the parent, whether we have a cotangent for it."""

    def evaluate(self, parent: Flat, *operands: Any) -> list[Any]:
        primals, cotangents = operands[: len(self.nonzero)], operands[len(self.nonzero) :]
        live, of_live = of_chosen(parent, self.nonzero, primals, self.cotangents)
        return list(jax.vjp(of_live, *live)[1](list(cotangents)))


@dataclasses.dataclass(frozen=True)
class Transpose:
    """The form of a primitive transposing its parent with respect to its linear operands.

    The operands are the parent's other operands, followed by the cotangents of its results.
    """

    name: ClassVar[str] = "transpose"
    linear: tuple[ShapedArray | None, ...]
    """For each operand of the parent, its type if it is linear and we should compute its cotangent, otherwise
    None.
    """
    cotangents: tuple[bool, ...]
    """For each result of the parent, whether we have a cotangent for it."""

    @property
    def mask(self) -> tuple[bool, ...]:
        return tuple(aval is not None for aval in self.linear)

    def evaluate(self, parent: Flat, *operands: Any) -> list[Any]:
        num_held = self.mask.count(False)
        held, cotangents = operands[:num_held], operands[num_held:]

        def of_linear(*linear: Any) -> list[Any]:
            return split(self.cotangents, parent(*merge(self.mask, linear, held)))[0]

        avals = [aval for aval in self.linear if aval is not None]
        return list(jax.linear_transpose(of_linear, *avals)(list(cotangents)))


@dataclasses.dataclass(frozen=True)
class Batching:
    """The form of a primitive mapping its parent over an axis. Every result has this axis at the front."""

    name: ClassVar[str] = "batch"
    dims: tuple[int | None, ...]
    size: Any
    axis_name: Hashable = None
    spmd_axis_name: Hashable = None

    def vmap(self, fn: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
        # If this axis is sharded then `size` is its global size, but each device has only part of the axis.
        # So leave it to `vmap` to look up this part's size from the operands.
        mapped = any(dim is not None for dim in self.dims)
        return jax.vmap(
            fn,
            in_axes,
            axis_size=None if mapped else self.size,
            axis_name=self.axis_name,
            spmd_axis_name=self.spmd_axis_name,
        )

    def evaluate(self, parent: Flat, *operands: Any) -> list[Any]:
        return self.vmap(lambda operands: parent(*operands), [list(self.dims)])(list(operands))


Form = Jvp | Vjp | Transpose | Batching


def is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or jax.typeof(tangent).dtype == jax.dtypes.float0


def zero_tangent(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def symbolic_tangents(
    fn: Flat, nonzero: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """Returns the results' tangents, or None if a result doesn't depend on any operand."""
    with take_current_trace() as parent:
        trace = ad.JVPTrace(parent, TraceTag())
        live, held = split(nonzero, primals)
        live = [ad.JVPTracer(trace, x, t) for x, t in zip(live, tangents, strict=True)]
        with set_current_trace(trace):
            results = fn(*merge(nonzero, live, held))
        tangents_out = [trace.to_primal_tangent_pair(x)[1] for x in results]
    return [None if is_zero(t) else t for t in tangents_out]
