"""The base class for learners, computing a recurrent network's gradients one step at a time."""

import abc
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._checked import check_option
from .graph import Group, Relation, at_values, with_items
from .step import Step, TracedStep, reached

Weights = dict[str, Any]
_OnFinding = Literal["warn", "allow", "error"]


class UntracedParameterWarning(UserWarning):
    """Issued if a parameter affects the state without a trace."""


class MixingWarning(UserWarning):
    """Issued if a step mixes different positions in the state, assumed by learners to be independent."""


class Learned(NamedTuple):
    """The result of `Learner.value_and_grad`.

    - `loss`: the loss for this step.
    - `grads`: the loss gradient. It has the same structure as the model, with None for untrained leaves.
    - `state`: the next state.
    - `traces`: the next traces.
    - `output`: the step's output.
    """

    loss: Array
    grads: PyTree
    state: PyTree
    traces: PyTree
    output: PyTree


class Learner(abc.ABC):
    """Base class for algorithms training a recurrent network forwards in time.

    Backpropagation through time must store the whole history and then traverse it in reverse. In contrast a
    learner carries *traces*, i.e. derivatives of the state with respect to the weights, and returns a
    gradient for the loss at each individual step. This means memory usage is independent of the sequence
    length, and you can update the weights after every step.

    Traces are kept for weights used through ETP primitives, such as
    [`matmul`][quaxlike.online_learning.matmul]. All other parameters only receive the gradient from within
    each step.
    """

    def __init__(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        *,
        trainable: PyTree = eqx.is_inexact_array,
        untraced: _OnFinding = "warn",
        mixing: _OnFinding = "error",
    ) -> None:
        for option, given in (("untraced", untraced), ("mixing", mixing)):
            check_option(type(self).__name__, option, given, _OnFinding)
        self.step = step
        self.trainable = trainable
        self.untraced = untraced
        self.mixing = mixing

    def init(self, model: PyTree, state: PyTree, *inputs: PyTree) -> PyTree:
        """Initialises the traces prior to the first step.

        **Arguments:** as for the step. Only their shapes and dtypes are used.

        **Returns:** the traces, all zero.

        **Raises:** `ValueError` if this learner doesn't support the step. The error message gives the reason.
        """
        step = self._traced(model, state, inputs).step
        return self._first_traces(step)

    def value_and_grad(
        self,
        loss: Callable[..., Array],
        model: PyTree,
        state: PyTree,
        traces: PyTree,
        *inputs: PyTree,
        targets: Sequence[PyTree] = (),
    ) -> Learned:
        """Runs a single step and differentiates its loss. This is typically called inside `jax.jit`.

        To get the gradient for a whole sequence, just sum the gradients from each step. Note that the step is
        evaluated several times: the compiler merges any duplicate computations, but side effects such as
        printing happen more than once.

        The results can themselves be differentiated, e.g. for meta-learning.

        **Arguments:**

        - `loss`: a function `loss(output, *targets)` returning a scalar.
        - `model`, `state`, `inputs`: as for the step.
        - `traces`: the output from `init`, or the traces from the previous step.
        - `targets`: a tuple of additional arguments for the loss.

        **Returns:** a [`Learned`][quaxlike.online_learning.Learned].

        **Raises:** `TypeError` if `targets` isn't a tuple or another sequence, or if the traces are from
        another learner or have other shapes.
        """
        if isinstance(targets, str) or not isinstance(targets, Sequence):
            raise TypeError(
                f"{type(self).__name__}.value_and_grad takes a tuple of further arguments of the loss as "
                f"`targets`; found {type(targets).__name__}. Write `targets=(y,)`."
            )
        traced = self._traced(model, state, inputs)
        step, params = traced.step, traced.params
        self._check_traces(step, traces)
        here = Linearised(step, params, traced.state, traced.inputs)

        def of_output(params: Sequence[Any], shifts: dict[int, Any]) -> Any:
            next_state, output = step.with_shifts(
                params, traced.state, traced.inputs, shifts, fixed=here.fixed
            )
            output = traced.output_of(output)
            return loss(output, *targets), (next_state, output)

        shifts = [jnp.zeros(aval.shape, aval.dtype) for aval in step.state_avals]
        shifts = {i: shifts[i] for group in step.groups for i in group.states}
        differentiate = jax.value_and_grad(of_output, argnums=(0, 1), has_aux=True)
        (value, (next_state, output)), (grads, signals) = differentiate(params, shifts)

        last_signals = self._of_last_states(traced, here, lambda output: loss(output, *targets))
        last_traces, traces = traces, self._advance(here, traces)
        weights = {k: weights for k, (_, weights) in here.operands.items()}
        if weights:
            cotangents = {k: jax.tree.map(jnp.zeros_like, w) for k, w in weights.items()}
            for r, relation in enumerate(step.relations):
                group = step.groups[relation.group]
                for of, by in ((traces, signals), (last_traces, last_signals)):
                    if group.states[0] in by:
                        found = self._solve(here, of, r, relation, _components(group, _conjugated(by)))

                        def add(total: Any, x: Any) -> Any:
                            return total + _of_dtype(x, total.dtype)

                        cotangents[relation.op] = jax.tree.map(add, cotangents[relation.op], found)

            def weights_of(params: Sequence[Any]) -> Any:
                values = step.values(params, traced.state, traced.inputs)
                return {k: weights for k, (_, weights) in step.operands(values).items()}

            by_params = jax.vjp(weights_of, params)[1]
            grads = [g + h for g, h in zip(grads, by_params(cotangents)[0], strict=True)]
        return Learned(value, traced.grads_of(grads), traced.state_of(next_state), traces, output)

    def _of_last_states(
        self, traced: TracedStep, here: "Linearised", loss: Callable[..., Array]
    ) -> dict[int, Array]:
        """Differentiates the loss with respect to the last states, but not through the next states.

        For example, this is nonzero if the output or the input to an op uses the last states directly.
        """
        step, signals = traced.step, {}
        for group in step.groups:

            def output(*last: Any, states: Sequence[int] = group.states, **fixed: Any) -> list[Any]:
                shifts = dict(zip(states, last, strict=True))
                return step.with_shifts(traced.params, traced.state, traced.inputs, {}, shifts, **fixed)[1]

            avals = [step.state_avals[i] for i in group.states]
            if any(any(reached(output, avals, k)) for k in range(len(avals))):

                def of_output(last: Any, output: Any = output) -> Any:
                    return loss(traced.output_of(output(*last, fixed=here.fixed)))

                found = jax.grad(of_output)([jnp.zeros(aval.shape, aval.dtype) for aval in avals])
                signals |= zip(group.states, found, strict=True)
        return signals

    def _traced(self, model: PyTree, state: PyTree, inputs: Sequence[PyTree]) -> TracedStep:
        traced = TracedStep(self.step, self.trainable, model, state, inputs)
        if self.untraced != "allow":
            self._check_parameters(traced)
        if self.mixing != "allow" and (found := traced.step.mixing()) is not None:
            message = (
                f"{found}, which mixes positions: the learner takes each element to act on its own position "
                "alone, and its gradient would be wrong. Apply what mixes to the output or to the input of "
                'an ETP primitive; or set mixing="allow" if it does not mix, or if the error does not matter'
            )
            if self.mixing == "error":
                raise ValueError(message)
            warnings.warn(message, MixingWarning, stacklevel=4)
        return traced

    def _check_traces(self, step: Step, traces: PyTree) -> None:
        own = jax.eval_shape(lambda: self._first_traces(step))
        found, expected = (jax.tree.map(np.shape, tree) for tree in (traces, own))
        if found != expected:
            name = type(self).__name__
            raise TypeError(
                f"{name}.value_and_grad takes traces from {name}.init or from its own last step, which have "
                f"shapes {expected}; found {found}. The traces of DRTRL and PPProp have different forms."
            )

    def _check_parameters(self, traced: TracedStep) -> None:
        step = traced.step

        def next_state(*leaves: Any) -> list[Any]:
            return step.with_shifts(*step.parted(leaves), {})[0]

        for i, name in enumerate(traced.param_names):
            if any(reached(next_state, step.avals, i)):
                how, use = step.way_past_traces(i)
                message = (
                    f"parameter model{name} acts on the state {how}, so its gradient does not reach back in "
                    f'time. {use}, leave it out of `trainable`, or set untraced="allow"'
                )
                if self.untraced == "error":
                    raise ValueError(message)
                warnings.warn(message, UntracedParameterWarning, stacklevel=4)

    @abc.abstractmethod
    def _first_traces(self, step: Step) -> PyTree: ...

    @abc.abstractmethod
    def _advance(self, here: "Linearised", traces: PyTree) -> PyTree: ...

    @abc.abstractmethod
    def _solve(
        self, here: "Linearised", traces: PyTree, number: int, relation: Relation, signal: Array
    ) -> Weights:
        """Returns cotangents for a relation's weights, given state cotangents of shape `(*states, S)`."""


class Linearised:
    """A linearised step, i.e. the derivatives of the next state with respect to the last state and to
    each y.
    """

    def __init__(
        self, step: Step, params: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        self.step = step
        values = step.values(params, state, inputs)
        self.operands = step.operands(values)
        self.fixed = at_values(values)
        moving = sorted(i for group in step.groups for i in group.states)
        self._moving = moving

        def next_state(moved: Sequence[Any], shifts: Sequence[Any]) -> list[Any]:
            result = step.isolated(params, inputs, with_items(state, moving, moved), shifts, self.fixed)
            return [result[i] for i in moving]

        self._primals = [state[i] for i in moving]
        self._shifts = step.no_shifts()
        self._push = jax.linearize(next_state, self._primals, self._shifts)[1]

    def by_state(self, group: int) -> Array:
        """Returns the elementwise derivative ∂h/∂h for a group, with shape `(*states, S, S)`. The last axis
        corresponds to the last state.
        """
        group_ = self.step.groups[group]
        return jnp.stack([self._columns(group_, state=j) for j in group_.components], axis=-1)

    def by_output(self, relation: Relation) -> Array:
        """Returns the elementwise derivative ∂h/∂y for a relation. It has shape `(*states, S)` and the same
        dtype as y.

        If y is complex then these are cotangents, i.e. the derivative with respect to the real part, minus i
        times the derivative with respect to the imaginary part.
        """
        group, y = self.step.groups[relation.group], self.step.ops[relation.op].y_var.aval
        columns = self._columns(group, op=(relation.op, False))
        if jnp.iscomplexobj(y):
            columns = columns - 1j * self._columns(group, op=(relation.op, True))
        return columns.astype(y.dtype)

    def _columns(
        self, group: Group, state: tuple[int, bool] | None = None, op: tuple[int, bool] | None = None
    ) -> Array:
        """Returns a group's derivatives with respect to one component of a state or y."""
        primals = [_unit(x, i, state) for i, x in zip(self._moving, self._primals, strict=True)]
        shifts = [_unit(x, k, op) for k, x in enumerate(self._shifts)]
        return _components(group, dict(zip(self._moving, self._push(primals, shifts), strict=True)))


def _unit(like: Any, number: int, chosen: tuple[int, bool] | None) -> Array:
    """Returns a tangent of ones (or i, for an imaginary part) if `number` is chosen, and zeros otherwise."""
    if chosen is None or chosen[0] != number:
        return jnp.zeros_like(like)
    return jnp.full_like(like, 1j if chosen[1] else 1)


def _components(group: Group, by_state: Mapping[int, Array]) -> Array:
    """Stacks the real and imaginary parts of the states in a group along a new trailing axis."""
    parts = [by_state[i].imag if imaginary else by_state[i].real for i, imaginary in group.components]
    return jnp.stack([part.astype(group.dtype) for part in parts], axis=-1)


def _of_dtype(x: Array, dtype: Any) -> Array:
    """Casts a weight's cotangent to the weight's dtype."""
    is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return (x.real if is_real else x).astype(dtype)


def _conjugated(by_state: Mapping[int, Array]) -> dict[int, Array]:
    """Converts JAX's conjugated cotangents to derivatives with respect to the real and imaginary parts."""
    return {i: jnp.conj(x) if jnp.iscomplexobj(x) else x for i, x in by_state.items()}


def over_lead(fn: Callable[..., Any], lead: int, *mapped: bool) -> Callable[..., Any]:
    """Vectorises `fn` over the leading axes of the states. Only the `mapped` arguments have these axes."""
    for _ in range(lead):
        fn = jax.vmap(fn, in_axes=[0 if m else None for m in mapped])
    return fn
