"""D-RTRL, i.e. real-time recurrent learning with the state's Jacobian assumed to be diagonal."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .graph import Op, Relation, widest
from .learner import Learner, Linearised, Weights, over_lead
from .step import Step


class DRTRL(Learner):
    """The D-RTRL algorithm. This keeps a trace for each weight and each example in the batch.

    Let D = ∂hᵗ/∂hᵗ⁻¹ be the elementwise derivative of the state with all weight outputs held fixed, and let x
    be the input to a weight. Then the trace is updated by ε ← D·ε + ∂h/∂y ⊗ x, and the gradient is Σₜ ∂Lᵗ/∂hᵗ
    ∘ εᵗ. This is exact if the state only depends on its past elementwise; in particular recurrence through
    weights is neglected. The memory usage is O(batch · in · out). If this is too much, then consider
    [`PPProp`][quaxlike.online_learning.PPProp] instead.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from quaxlike.online_learning import DRTRL, matmul

        def step(model, h, x):
            h = jnp.tanh(0.5 * h + matmul(x, model["in"]))
            return h, h @ model["out"]

        def loss(output, target):
            return jnp.mean((output - target) ** 2)

        model = {"in": jnp.ones((2, 3)), "out": jnp.ones((3, 1))}
        learner = DRTRL(step)
        h, x, y = jnp.zeros((4, 3)), jnp.ones((4, 2)), jnp.ones((4, 1))
        traces = learner.init(model, h, x)
        learn = jax.jit(lambda *args: learner.value_and_grad(loss, *args, targets=(y,)))
        loss_value, grads, h, traces, output = learn(model, h, traces, x)
        ```

    **Arguments:**

    - `step`: a function `step(model, state, *inputs) -> (state, output)`, where the state is a pytree of
        arrays. Anything in the model or the inputs that is neither trained nor an array (for example, a
        Python number) is passed on as it is.
    - `trainable`: a filter spec for the trainable part of the model, as for `equinox.partition`.
    - `untraced`: what to do about parameters affecting the state without a trace. (These only receive the
        gradient from within a step.) One of `"warn"`, `"allow"` or `"error"`.
    - `mixing`: what to do about steps mixing different positions of the state. One of `"error"`, `"warn"` or
        `"allow"`.

    **Raises:** `ValueError` for any other `untraced` or `mixing`.

    Wang et al., "Model-agnostic linear-memory online learning in spiking neural networks" (Nature
    Communications, 2026).
    """

    def _first_traces(self, step: Step) -> PyTree:
        traces = []
        for relation in step.relations:
            op, group = step.ops[relation.op], step.groups[relation.group]
            num = len(group.components)
            first = op.plain_rule("init_drtrl")(op.x_var, op.y_var, op.weight_vars, num)
            if not (isinstance(first, Mapping) and all(jnp.shape(t)[-1:] == (num,) for t in first.values())):
                raise op.wrong_result(
                    "init_drtrl", f"a dict of arrays whose last axis is of size {num}", first
                )
            lead = group.shape[: relation.lead]
            dtypes = {key: widest(t.dtype, group.dtype) for key, t in first.items()}
            traces.append({key: jnp.zeros((*lead, *t.shape), dtypes[key]) for key, t in first.items()})
        return traces

    def _advance(self, here: Linearised, traces: PyTree) -> PyTree:
        step = here.step
        by_state = [here.by_state(g) for g in range(len(step.groups))]
        return [
            self._advance_one(here, relation, by_state[relation.group], trace)
            for relation, trace in zip(step.relations, traces, strict=True)
        ]

    def _advance_one(
        self, here: Linearised, relation: Relation, by_state: Array, trace: dict[str, Any]
    ) -> dict[str, Any]:
        op = here.step.ops[relation.op]
        x, weights = here.operands[relation.op]
        by_output = here.by_output(relation)
        scale = over_lead(lambda g, t: op.run("yw_to_w", g, t, like=t), relation.lead, True, True)
        num_batch = _num_batch(trace, weights) - relation.lead
        own = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape[relation.lead : -1], t.dtype), trace)
        instant = over_lead(lambda g: _instant(op, num_batch, own)(x, g, weights), relation.lead, True)

        by_state = by_state.astype(_dtype_of(trace))

        def to_state(i: int) -> dict[str, Any]:
            total = jax.tree.map(lambda x, t: x.astype(t.dtype), instant(by_output[..., i]), trace)
            for j in range(by_output.shape[-1]):
                carried = scale(by_state[..., i, j], jax.tree.map(lambda t: t[..., j], trace))
                total = jax.tree.map(jnp.add, total, carried)
            return total

        states = [to_state(i) for i in range(by_output.shape[-1])]
        return jax.tree.map(lambda *ts: jnp.stack(ts, axis=-1), *states)

    def _solve(
        self, here: Linearised, traces: PyTree, number: int, relation: Relation, signal: Array
    ) -> Weights:
        op = here.step.ops[relation.op]
        _, weights = here.operands[relation.op]
        dtype = _dtype_of(traces[number])
        weights = {key: w.astype(widest(w.dtype, dtype)) for key, w in weights.items()}
        solve = over_lead(lambda g, trace: _solve(op)(g, trace, weights), relation.lead, True, True)
        signal = signal.astype(dtype)
        total = None
        for i in range(signal.shape[-1]):
            found = solve(signal[..., i], jax.tree.map(lambda t: t[..., i], traces[number]))
            found = jax.tree.map(lambda t: t.sum(range(relation.lead)), found)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        assert total is not None
        return total


def _dtype_of(trace: dict[str, Any]) -> Any:
    return widest(*(t.dtype for t in trace.values()))


def _num_batch(trace: dict[str, Any], weights: Weights) -> int:
    """Returns a trace's number of batch axes."""
    return next((trace[key].ndim - 1 - w.ndim for key, w in weights.items() if key in trace), 0)


def _instant(op: Op, num_batch: int, like: Any) -> Callable[..., Any]:
    if op.has_rule("instant"):
        return lambda *args: op.run("instant", *args, like=like)

    def xy_to_dw(x: Any, g: Any, weights: Any) -> Any:
        return op.run("xy_to_dw", x, g, weights, like=weights)

    if not num_batch:
        return xy_to_dw

    # Map over the examples, so that the rule doesn't sum over the batch. Each of them is a batch of size one.
    def fn(x: Any, g: Any, weights: Any) -> Any:
        return xy_to_dw(x[None], g[None], weights)

    for _ in range(num_batch):
        fn = jax.vmap(fn, in_axes=(0, 0, None))
    return fn


def _solve(op: Op) -> Callable[..., Any]:
    if op.has_rule("solve"):
        return lambda g, trace, weights: op.run("solve", g, trace, weights, like=weights)

    def summed(g: Any, trace: dict[str, Any], weights: Weights) -> Weights:
        scaled = op.run("yw_to_w", g, trace, like=trace)
        return {key: t.sum(range(t.ndim - weights[key].ndim)) for key, t in scaled.items()}

    return summed
