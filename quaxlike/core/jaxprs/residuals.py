"""Reduces a scan's residuals, i.e. what is stored for computing its gradient.

For each iteration, JAX stores everything that is required for differentiating the body. It does so even if
it's just an input, or has been computed twice. In particular, we would end up with another copy of each
layer's frozen weights. To avoid this, we turn any input that is only passed to `stop_gradient` into a
constant with respect to differentiation, and compute repeated conversions only once. Note that this doesn't
change what the body computes.
"""

from typing import Any

import jax.extend.core as jexc

from .. import compat


def _with_few_residuals(
    jaxpr: compat.ClosedJaxpr, carried: range
) -> tuple[compat.ClosedJaxpr, frozenset[int]]:
    opened = compat.open_jaxpr(jaxpr)
    # This only works for inputs that aren't used by anything other than `stop_gradient`, because any other
    # use might require a gradient.
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
        # The input is going to be a constant, so it's safe to drop the `stop_gradient`.
        if stop and of_one and x in positions:
            constants.add(positions[x])
            equal[out] = x
        elif of_one and eqn.primitive.name == "convert_element_type":
            # Make sure that the context matches as well. Otherwise the results might differ, e.g. because of
            # a different mesh.
            equal[out] = conversions.setdefault((x, out.aval, str(eqn.ctx)), out)
            eqns += [eqn] if equal[out] is out else []
        else:
            eqns.append(eqn)
    # JAX caches jaxprs by identity. So if nothing has changed then return the original one, to avoid
    # recompiling.
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
