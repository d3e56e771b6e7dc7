"""Reduces the residuals of a scan, stored for its gradient.

JAX stacks everything that the derivative of a body needs, once per iteration, even if it equals an input or
was computed twice. For a frozen weight this would store a copy per layer. So an input that only passes
through `stop_gradient` becomes a constant of the differentiation, before the scan, and a repeated conversion
is computed once. The body still computes the same numbers.
"""

from typing import Any

import jax.extend.core as jexc

from .. import compat


def _with_few_residuals(
    jaxpr: compat.ClosedJaxpr, carried: range
) -> tuple[compat.ClosedJaxpr, frozenset[int]]:
    opened = compat.open_jaxpr(jaxpr)
    # An input qualifies if every equation that reads it is a `stop_gradient`. One other use may need its
    # gradient.
    stops = [eqn.primitive.name == "stop_gradient" for eqn in opened.eqns]
    read = {x for eqn, stop in zip(opened.eqns, stops, strict=True) if not stop for x in _vars(eqn.invars)}
    read.update(_vars(opened.outvars))
    places = {v: i for i, v in enumerate(opened.invars) if i not in carried and v not in read}
    constants: set[int] = set()
    equal: dict[Any, Any] = {}
    conversions: dict[Any, Any] = {}
    eqns = []
    for eqn, stop in zip(opened.eqns, stops, strict=True):
        eqn = eqn.replace(invars=_renamed(eqn.invars, equal))
        (x, *_), (out, *_) = [*eqn.invars, None], [*eqn.outvars, None]
        of_one = isinstance(x, jexc.Var) and not isinstance(out, jexc.DropVar)
        # The input becomes a constant, so dropping the `stop_gradient` does not let a gradient through.
        if stop and of_one and x in places:
            constants.add(places[x])
            equal[out] = x
        elif of_one and eqn.primitive.name == "convert_element_type":
            # The context counts as well: under another one, such as a different mesh, the results are not the
            # same.
            equal[out] = conversions.setdefault((x, out.aval, str(eqn.ctx)), out)
            eqns += [eqn] if equal[out] is out else []
        else:
            eqns.append(eqn)
    # JAX caches by identity, and would compile a new jaxpr again, even if it is equal.
    if len(eqns) == len(opened.eqns):
        return jaxpr, frozenset()
    lean = opened.replace(eqns=eqns, outvars=_renamed(opened.outvars, equal))
    return (lean if opened is jaxpr else jaxpr.replace(jaxpr=lean)), frozenset(constants)


def _vars(atoms: Any) -> list[Any]:
    return [x for x in atoms if isinstance(x, jexc.Var)]


def _renamed(atoms: Any, equal: dict[Any, Any]) -> list[Any]:
    return [equal.get(x, x) if isinstance(x, jexc.Var) else x for x in atoms]


with_few_residuals = compat.weakly_cached(_with_few_residuals)
"""`with_few_residuals(jaxpr, carried)`: an equivalent body, and the inputs to treat as constants.

Inputs in `carried` are never constants, since every iteration has its own.
"""
