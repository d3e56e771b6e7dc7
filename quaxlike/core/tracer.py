"""The tracer that stands for a Value inside a quaxified function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
from jax import lax

from . import compat, recording
from .policy import dense
from .values import Value, aval_of


class ValueTracer(jax.core.Tracer):  # pyright: ignore[reportMissingTypeArgument]
    """Stands for a Value inside a quaxified function. Plain arrays are never wrapped."""

    __slots__ = ("aval", "quax_tag", "quax_value")
    __jax_array__ = None  # pyright: ignore  # it is an operand already; JAX asks several times a call

    def __init__(self, trace: Any, value: Value) -> None:
        self._trace = trace
        self.quax_tag = trace.tag
        self.quax_value = value

    def __getattr__(self, name: str) -> Any:
        if name == "aval":  # its slot is empty; many intermediates are never asked
            self.aval = aval = aval_of(self.quax_value)
            return aval
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.quax_value, name)

    def full_lower(self) -> Any:
        # JAX asks for results of a derivative that have no tangents; and for what it evaluates on concrete
        # arrays, which no tracer of a level under way is.
        if not self._trace.ended:
            return self
        raise jax.errors.UnexpectedTracerError(
            f"A {type(self.quax_value).__name__} got out of the quaxified function that it belongs to, "
            f"through a closure, a global or an attribute: {self!r} is used at "
            f"{recording.user_source()[0]}. Return it from the function instead; `quaxify` gives the Value "
            "itself."
        )

    def _short_repr(self) -> str:
        return f"ValueTracer<{type(self.quax_value).__name__}[{self.aval}]>"

    # Python asks for a concrete value: the Value's, if its arrays are concrete. (Not through
    # `to_concrete_value`: JAX calls that of its own accord, and it would materialise.)

    def __bool__(self) -> bool:
        return bool(self._concrete("bool"))

    def __int__(self) -> int:
        return int(self._concrete("int"))

    def __float__(self) -> float:
        return float(self._concrete("float"))

    def __complex__(self) -> complex:
        return complex(self._concrete("complex"))

    def __index__(self) -> int:
        return self._concrete("index").__index__()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._concrete("array").__array__(*args, **kwargs)

    def item(self, *args: Any) -> Any:
        return self._concrete("item").item(*args)

    def tolist(self) -> Any:
        return self._concrete("tolist").tolist()

    def _concrete(self, what: str) -> Any:
        with jexc.set_current_trace(self._trace.parent_trace):
            return dense(self.quax_value, what, hint="Python asks for its elements.")


def _operator(method: str, op: Callable[..., Any], only_inexact: bool) -> Callable[[Any, Any], Any]:
    """`method` of a tracer, past jax.numpy where that would only come to the primitive: for two Values of
    the same aval, which need no promotion. Everything else takes JAX's way."""
    forward = getattr(jax.core.Tracer, method)
    dtypes = jnp.inexact if only_inexact else jnp.number

    @functools.cache
    def applies_to(dtype: Any) -> bool:
        return jnp.issubdtype(dtype, dtypes)

    @functools.cache
    def equation() -> jexc.JaxprEqn:
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.make_jaxpr(op)(scalar, scalar).eqns[0]

    def operator(self: ValueTracer, other: Any) -> Any:
        if type(other) is ValueTracer and other.quax_tag is self.quax_tag:
            aval: Any = self.aval
            same = aval is other.aval or aval == other.aval
            level: Any = compat.current_trace()
            if same and getattr(level, "tag", None) is self.quax_tag and applies_to(aval.dtype):
                eqn = equation()
                return level.process_primitive(eqn.primitive, (self, other), eqn.params)
        return forward(self, other)

    operator.__name__ = method
    return operator


for _method, _op in {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "truediv": lax.div}.items():
    _name = f"__{_method}__"
    setattr(ValueTracer, _name, _operator(_name, _op, only_inexact=_method == "truediv"))
