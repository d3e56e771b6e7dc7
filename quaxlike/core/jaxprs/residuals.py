"""Reduces a scan's residuals, i.e. what is stored for computing its gradient.

For each iteration, JAX stores everything required for differentiating the body, even if it's just an input,
or computed twice. This would include another copy of each layer's frozen weights. So we turn any input only
passed to `stop_gradient` into a constant with respect to differentiation, and compute repeated conversions
only once. This doesn't change what the body computes.
"""

from typing import Any

import jax.extend.core as jexc

from .. import compat


def _with_few_residuals(
    jaxpr: compat.ClosedJaxpr, carried: range
) -> tuple[compat.ClosedJaxpr, frozenset[int]]:
    opened = compat.open_jaxpr(jaxpr)
    # This only works for inputs used by nothing but `stop_gradient`: any other use may require a gradient.
    stops = [eqn.primitive.name == "stop_gradient" for eqn in opened.eqns]
    read = {x for eqn, stop in zip(opened.eqns, stops, strict=True) if not stop for x in _vars(eqn.invars)}
    read.update(_vars(opened.outvars))
    positions = {v: i for i, v in enumerate(opened.invars) if i not in carried and v not in read}
    constants: set[int] = set()
    equal: dict[Any, Any] = {}
    conversions: dict[Any, Any] = {}
    eqns = []
    for eqn, stop in zip(opened.eqns, stops, strict=True):
        eqn = eqn.replace(invars=_renamed(eqn.invars, equal))
        (x, *_), (out, *_) = [*eqn.invars, None], [*eqn.outvars, None]
        of_one = isinstance(x, jexc.Var) and not isinstance(out, jexc.DropVar)
        # The input will be a constant, so drop the `stop_gradient`.
        if stop and of_one and x in positions:
            constants.add(positions[x])
            equal[out] = x
        elif of_one and eqn.primitive.name == "convert_element_type":
            # The context must match as well: the results may differ, e.g. under a different mesh.
            equal[out] = conversions.setdefault((x, out.aval, str(eqn.ctx)), out)
            eqns += [eqn] if equal[out] is out else []
        else:
            eqns.append(eqn)
    # JAX caches jaxprs by identity. If nothing has changed, return the original one, to avoid recompiling.
    if len(eqns) == len(opened.eqns):
        return jaxpr, frozenset()
    lean = opened.replace(eqns=eqns, outvars=_renamed(opened.outvars, equal))
    return (lean if opened is jaxpr else jaxpr.replace(jaxpr=lean)), frozenset(constants)


def _vars(atoms: Any) -> list[Any]:
    return [x for x in atoms if isinstance(x, jexc.Var)]


def _renamed(atoms: Any, equal: dict[Any, Any]) -> list[Any]:
    return [equal.get(x, x) if isinstance(x, jexc.Var) else x for x in atoms]


with_few_residuals = compat.weakly_cached(_with_few_residuals)
"""`with_few_residuals(jaxpr, carried)`: an equivalent body, and which of its inputs to treat as constants.

Inputs in `carried` are never treated as constants, because they are different in every iteration.
"""
