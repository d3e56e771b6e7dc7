"""What is in a jaxpr, at any depth."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from quaxlike.core.high_level import as_call


def equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(as_call(eqn.primitive, eqn.params)[1]):
            yield from equations(inner)


def primitives(fn: Callable[..., Any], *args: Any) -> set[Any]:
    return {eqn.primitive for eqn in equations(jax.make_jaxpr(fn)(*args))}


def names(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(*args))]
