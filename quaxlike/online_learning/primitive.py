"""ETP primitives: these mark where trainable weights are used, with rules for online learning."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._checked import checked
from ..primitives import DefinedPrimitive, define_primitive

_F = TypeVar("_F", bound=Callable[..., Any])

_DEFAULT_TRAINABLES = {"weight": 1}

RULES = {
    "yw_to_w": "yw_to_w(g, trace, **params) -> trace, where a trace is a dict of arrays by trainable",
    "xy_to_dw": "xy_to_dw(x, g, weights, **params) -> dict, where `weights` is a dict of arrays by trainable",
    "init_drtrl": "init_drtrl(x_var, y_var, weight_vars, num_states) -> dict of arrays by trainable",
    "init_pp": "init_pp(x_var, y_var, weight_vars, num_states) -> array",
    "instant": "instant(x, g, weights, **params) -> trace, where a trace is a dict of arrays by trainable",
    "solve": "solve(g, trace, weights, **params) -> dict of arrays by trainable",
    "pp_input": "pp_input(x, weights, **params) -> array",
}
"""The signature of each rule, which we use in error messages."""


class ETPPrimitive(DefinedPrimitive):
    """A primitive marking where trainable weights are used. ETP stands for eligibility trace propagation.

    Create one using [`register_primitive`][quaxlike.online_learning.register_primitive]. Each primitive
    computes an output y from an input x and some weights. A learner looks for these primitives in a recurrent
    network's step, and uses their rules to propagate traces and compute gradients. Each rule is stored in a
    slot with the same name.
    """

    batched: bool = False
    gradient_enabled: bool = False
    trainable_invars_fn: Callable[[Mapping[str, Any]], dict[str, int]] | None = None
    x_invar_index: int | None = 0
    y_outvar_index: int = 0

    def register_yw_to_w(self, rule: _F) -> _F:
        """Registers the rule multiplying a trace by a factor for each element in y.

        **Arguments:**

        - `rule`: a function `rule(g, trace, **params) -> trace`. `g` has the same shape as y, and `trace` is
            a dict with one entry per trainable. For example if y = x @ w, then `trace["weight"]` has shape
            `(..., in, out)`, and the rule should return `{"weight": trace["weight"] * g[..., None, :]}`.

        **Returns:** the rule.
        """
        return self.slot("yw_to_w").register(rule)

    def register_xy_to_dw(self, rule: _F) -> _F:
        """Registers the rule computing the weights' cotangents.

        **Arguments:**

        - `rule`: a function `rule(x, g, weights, **params) -> dict`, where `g` is the cotangent of y. It
            should return a cotangent for each trainable in the dict `weights`, summed over the batch.

        **Returns:** the rule.
        """
        return self.slot("xy_to_dw").register(rule)

    def register_init_drtrl(self, rule: _F) -> _F:
        """Registers the rule initialising D-RTRL's traces.

        **Arguments:**

        - `rule`: a function `rule(x_var, y_var, weight_vars, num_states) -> dict`. It should return zeros of
            shape `(batch..., *weight, num_states)` for each trainable. Each variable has an `aval`.
            `weight_vars` is a dict with one variable per trainable, and `x_var` is None if the primitive
            doesn't have an input.

        **Returns:** the rule.
        """
        return self.slot("init_drtrl").register(rule)

    def register_init_pp(self, rule: _F) -> _F:
        """Registers the rule initialising pp_prop's output trace.

        **Arguments:**

        - `rule`: a function `rule(x_var, y_var, weight_vars, num_states)`. It should return zeros of shape
            `(*y, num_states)`.

        **Returns:** the rule.
        """
        return self.slot("init_pp").register(rule)

    def register_etp_rules(
        self,
        *,
        yw_to_w: Callable[..., Any] | None = None,
        xy_to_dw: Callable[..., Any] | None = None,
        init_drtrl: Callable[..., Any] | None = None,
        init_pp: Callable[..., Any] | None = None,
        instant: Callable[..., Any] | None = None,
        solve: Callable[..., Any] | None = None,
        pp_input: Callable[..., Any] | None = None,
    ) -> None:
        """Registers several rules at the same time. For None, the existing rule is left unchanged.

        **Arguments:**

        - `yw_to_w`, `xy_to_dw`, `init_drtrl`, `init_pp`: see the corresponding methods.
        - `instant`: a function `instant(x, g, weights, **params)`. It should return the contribution of a
            single step to D-RTRL's traces, scaled by `g`. This is only needed if the trace and the weight
            have different shapes. Defaults to applying `xy_to_dw` to each example.
        - `solve`: a function `solve(g, trace, weights, **params)`. It should return the weights' cotangents,
            given their traces and the cotangent `g` of y. Defaults to `yw_to_w`, followed by a sum over the
            batch.
        - `pp_input`: a function `pp_input(x, weights, **params)`. This computes the quantity traced by
            pp_prop, in which y must be linear. Defaults to returning x.
        """
        rules = {
            "yw_to_w": yw_to_w,
            "xy_to_dw": xy_to_dw,
            "init_drtrl": init_drtrl,
            "init_pp": init_pp,
            "instant": instant,
            "solve": solve,
            "pp_input": pp_input,
        }
        for slot, rule in rules.items():
            if rule is not None:
                self.slot(slot).register(rule)


@checked
def register_primitive(
    name: str,
    impl_fn: Callable[..., Any],
    *,
    batched: bool = False,
    gradient_enabled: bool = False,
    trainable_invars_fn: Callable[[Mapping[str, Any]], dict[str, int]] | None = None,
    x_invar_index: int | None = 0,
    y_outvar_index: int = 0,
    multiple_results: bool = False,
    batching: Callable[..., Any] | None = None,
    replace: bool = False,
) -> ETPPrimitive:
    """Creates an ETP primitive from a function. The rules needed by JAX are derived automatically.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike import online_learning

        scaled_p = online_learning.register_primitive(
            "scaled_product", lambda x, w, *, scale: scale * (x @ w), batched=True
        )
        scaled_p.register_yw_to_w(
            lambda g, trace, **_: {"weight": trace["weight"] * g[..., None, :]}
        )
        scaled_p(jnp.ones((4, 3)), jnp.ones((3, 2)), scale=0.5)
        ```

    **Arguments:**

    - `name`: an identifier, unique amongst all primitives.
    - `impl_fn`: a function computing y. It should accept arrays as positional arguments and static parameters
        as keyword arguments.
    - `batched`: whether x and y have leading batch axes.
    - `gradient_enabled`: whether gradients (from another y, or from the last state) can flow through y to the
        state. This should be True for elementwise operations. For all other ETP primitives these gradients
        are stopped.
    - `trainable_invars_fn`: a function returning a dict from each trainable operand's name to its index,
        given the parameters. Defaults to `{"weight": 1}`.
    - `x_invar_index`: the index of the input, or None if there isn't an input.
    - `y_outvar_index`: the index of y amongst the equation's outputs. Traces are kept for y alone. If weights
        affect the state through another output, then learners treat this like a parameter without a trace.
    - `multiple_results`, `batching`, `replace`: see
        [`define_primitive`][quaxlike.primitives.define_primitive].

    **Returns:** the primitive.

    **Raises:** `ValueError` if the name is already in use.
    """
    flags: dict[str, Any] = {"batched": batched, "gradient_enabled": gradient_enabled}
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"register_primitive takes True or False as `{key}`; found {flag!r}.")
    positions: dict[str, Any] = {"x_invar_index": x_invar_index, "y_outvar_index": y_outvar_index}
    for key, position in positions.items():
        is_none = position is None and key == "x_invar_index"
        if not is_none and (isinstance(position, bool) or not isinstance(position, int) or position < 0):
            raise TypeError(
                f"register_primitive takes the position of an array as `{key}`; found {position!r}."
            )
    if trainable_invars_fn is not None and not callable(trainable_invars_fn):
        raise TypeError(
            f"register_primitive takes a function as `trainable_invars_fn`; found {trainable_invars_fn!r}."
        )
    primitive = define_primitive(
        name,
        impl_fn,
        multiple_results=multiple_results,
        batching=batching,
        cls=ETPPrimitive,
        replace=replace,
    )
    primitive.batched = batched
    primitive.gradient_enabled = gradient_enabled
    primitive.trainable_invars_fn = trainable_invars_fn
    primitive.x_invar_index = x_invar_index
    primitive.y_outvar_index = y_outvar_index
    return primitive


def is_etp_primitive(primitive: Any) -> bool:
    """Returns whether a primitive is an ETP primitive."""
    return isinstance(primitive, ETPPrimitive)


def is_batched_primitive(primitive: Any) -> bool:
    """Returns whether a primitive is an ETP primitive with leading batch axes."""
    return is_etp_primitive(primitive) and primitive.batched


def is_etp_enable_gradient_primitive(primitive: Any) -> bool:
    """Returns whether a primitive is an ETP primitive letting gradients flow through it to the state."""
    return is_etp_primitive(primitive) and primitive.gradient_enabled


@checked
def get_trainable_invars(primitive: ETPPrimitive, params: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Returns a dict from each trainable operand's name to its index, given these parameters."""
    if primitive.trainable_invars_fn is None:
        return dict(_DEFAULT_TRAINABLES)
    found: Any = primitive.trainable_invars_fn({} if params is None else params)
    if not isinstance(found, Mapping) or not all(isinstance(i, int) for i in found.values()):
        raise TypeError(
            f"trainable_invars_fn of ETP primitive {primitive.name!r} must return a dict of the positions of "
            f"trainable operands by name; found {found!r}"
        )
    return dict(found)


@checked
def get_x_invar_index(primitive: ETPPrimitive) -> int | None:
    """Returns the index of the input amongst the operands, or None if there isn't an input."""
    return primitive.x_invar_index


@checked
def get_y_outvar_index(primitive: ETPPrimitive) -> int:
    """Returns the index of y amongst the outputs."""
    return primitive.y_outvar_index


# Rules used by several primitives -----------------------------------------------------------------


def zeros_like_weights(batch: int | Callable[[Any], int]) -> Callable[..., dict[str, Any]]:
    """Creates an `init_drtrl` rule returning zeros of shape `(batch..., *weight, num_states)`.

    `batch` is the number of batch axes of x, or a function computing it from the aval of x.
    """

    def init(x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_states: int) -> dict[str, Any]:
        num_batch = batch(x_var.aval) if callable(batch) else batch
        leading = x_var.aval.shape[:num_batch] if num_batch else ()
        return {
            key: jnp.zeros((*leading, *var.aval.shape, num_states), y_var.aval.dtype)
            for key, var in weight_vars.items()
        }

    return init


def zeros_like_output(x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_states: int) -> Any:
    """An `init_pp` rule returning zeros of shape `(*y, num_states)`."""
    return jnp.zeros((*y_var.aval.shape, num_states), y_var.aval.dtype)


def vjp_of(fn: Callable[..., Any], keys: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """Creates an `xy_to_dw` rule from the VJP of `fn(x, *weights, **params)`, where `keys` are the weight
    names.
    """

    def xy_to_dw(x: Any, g: Any, weights: Mapping[str, Any], **params: Any) -> dict[str, Any]:
        present = [key for key in keys if key in weights]
        pullback = jax.vjp(lambda *w: fn(x, *w, **params), *[weights[key] for key in present])[1]
        return dict(zip(present, pullback(g), strict=True))

    return xy_to_dw
