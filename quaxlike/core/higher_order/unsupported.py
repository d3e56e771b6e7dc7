"""Errors for primitives that need plain arrays."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax.extend.core as jexc

from .. import compat
from ..trace import QuaxTrace, builtin
from ..values import is_value


@builtin("pallas_call")
def _pallas_call(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> NoReturn:
    name = params.get("name") or compat.debug_info_of(params["jaxpr"]).func_name
    raise _takes_arrays(f"The Pallas kernel {name!r}", operands)


@builtin("new_ref", "ref", "mutable_array")
def _new_ref(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> NoReturn:
    raise _takes_arrays("`jax.new_ref`", operands)


def _takes_arrays(what: str, operands: Sequence[Any]) -> NotImplementedError:
    names = ", ".join(type(x).__name__ for x in operands if is_value(x))
    return NotImplementedError(
        f"{what} takes arrays; found {names}. Apply `quaxlike.materialise` to it first, pass its array "
        "fields one by one, or register a rule for the primitive."
    )
