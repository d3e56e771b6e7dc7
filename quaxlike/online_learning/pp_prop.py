"""pp_prop, an approximation to D-RTRL with separate traces for inputs and outputs."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._checked import checked
from .graph import Op, Relation, widest
from .learner import Learner, Linearised, Weights
from .step import Step


class PPProp(Learner):
    """The pp_prop algorithm (also known as ES-D-RTRL). For each weight this keeps one trace of its input and
    another of its effect on the state, taking much less memory than D-RTRL.

    D-RTRL's trace is approximated by the product of two traces, ε_x ← α ε_x + x and ε_f ← α D ε_f + (1 − α)
    ∂h/∂y. The gradient is the weight's VJP at input ε_x, for the cotangent Σ ε_f ∘ ∂L/∂h / (1 − αᵗ⁺¹) of y.
    The memory usage is O(batch · (in + out)).

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from quaxlike.online_learning import PPProp, matmul

        def step(w, h, x):
            h = jnp.tanh(0.5 * h + matmul(x, w))
            return h, h

        learner = PPProp(step, decay=0.9)
        w, h, x = jnp.ones((2, 3)), jnp.zeros((4, 3)), jnp.ones((4, 2))
        traces = learner.init(w, h, x)
        learner.value_and_grad(jnp.sum, w, h, traces, x).grads
        ```

    **Arguments:**

    - `step`, `trainable`, `untraced`, `mixing`: see [`DRTRL`][quaxlike.online_learning.DRTRL].
    - `decay`: the decay α. This is either a float in [0, 1), or an integer rank r ≥ 1, corresponding to α =
        (r − 1) / (r + 1).

    **Raises:** `ValueError` for any other `decay`, `untraced` or `mixing`.

    Wang et al., "Model-agnostic linear-memory online learning in spiking neural networks" (Nature
    Communications, 2026).
    """

    @checked
    def __init__(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        *,
        decay: float | int | np.integer,
        **options: Any,
    ) -> None:
        super().__init__(step, **options)
        is_rank = isinstance(decay, int | np.integer) and not isinstance(decay, bool)
        if (is_rank and decay < 1) or (not is_rank and not 0 <= decay < 1):
            raise ValueError(
                f"decay must be a float in [0, 1) or an integer rank of at least 1, got {decay!r}"
            )
        self.decay = (int(decay) - 1) / (int(decay) + 1) if is_rank else float(decay)

    def _first_traces(self, step: Step) -> PyTree:
        x, f = {}, []
        for k in sorted(step.traced):
            op = step.ops[k]
            if op.x_var is not None:
                zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in (op.x_var, *op.weight_vars.values())]
                x[k] = _pp_input(op, zeros[0], dict(zip(op.weight_vars, zeros[1:], strict=True)))
                x[k] = jnp.zeros(x[k].shape, _precise(x[k].dtype))
        for relation in step.relations:
            op, group = step.ops[relation.op], step.groups[relation.group]
            num = len(group.components)
            first = op.plain_rule("init_pp")(op.x_var, op.y_var, op.weight_vars, num)
            if isinstance(first, Mapping) or jnp.shape(first) != (*op.y_var.aval.shape, num):
                raise op.wrong_result("init_pp", f"an array of shape {(*op.y_var.aval.shape, num)}", first)
            dtype = _precise(widest(first.dtype, group.dtype))
            f.append(jnp.zeros((*group.shape[: relation.lead], *first.shape), dtype))
        return {"x": x, "f": f, "steps": jnp.zeros((), jnp.int32)}

    def _advance(self, here: Linearised, traces: PyTree) -> PyTree:
        step, decay = here.step, self.decay
        inputs = {k: _pp_input(step.ops[k], *here.operands[k]) for k in traces["x"]}
        x = {k: decay * trace + inputs[k].astype(trace.dtype) for k, trace in traces["x"].items()}
        by_state = [here.by_state(g) for g in range(len(step.groups))]
        f = []
        for relation, trace in zip(step.relations, traces["f"], strict=True):
            carried = jnp.einsum("...ij,...j->...i", by_state[relation.group].astype(trace.dtype), trace)
            f.append(decay * carried + (1 - decay) * here.by_output(relation).astype(trace.dtype))
        return {"x": x, "f": f, "steps": traces["steps"] + 1}

    def _solve(
        self, here: Linearised, traces: PyTree, number: int, relation: Relation, signal: Array
    ) -> Weights:
        op = here.step.ops[relation.op]
        _, weights = here.operands[relation.op]
        # The moving average was initialised to zero, so correct for its bias, as in Adam.
        f, x = traces["f"][number], traces["x"].get(relation.op)
        steps = jnp.maximum(traces["steps"], 1).astype(f.real.dtype)
        bias = (1 - self.decay**steps).astype(f.dtype)
        g = jnp.sum(f * signal.astype(f.dtype), axis=-1) / bias
        g = g.sum(range(relation.lead)).astype(op.y_var.aval.dtype)
        if x is not None:
            like = jax.eval_shape(functools.partial(_pp_input, op), *here.operands[relation.op])
            # The rule expects x to have the same dtype as in the step, unless x is an integer: its trace is a
            # float.
            x = x.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else x
        return op.run("xy_to_dw", x, g, weights, like=weights)


def _precise(dtype: Any) -> Any:
    """Promotes to at least float32. (In bfloat16, α may round to 1, and the trace never decays.)"""
    return widest(dtype, np.float32) if jnp.issubdtype(dtype, jnp.inexact) else np.dtype(np.float32)


def _pp_input(op: Op, x: Any, weights: Weights) -> Array:
    return op.rule("pp_input")(x, weights) if op.has_rule("pp_input") else x
