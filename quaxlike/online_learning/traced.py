"""A user's step function on trees as a `Step` on leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..core.quaxify import quaxify
from .step import Step


class TracedStep:
    """A step function `step(model, state, *inputs) -> (state, output)`, traced for given arguments.

    The arguments have these leaves: `params`, the trained arrays of the model; `state`; and `inputs`, the
    model's other arrays followed by those of the inputs.
    """

    def __init__(
        self,
        step: Callable[..., tuple[PyTree, PyTree]],
        trainable: PyTree,
        model: PyTree,
        state: PyTree,
        inputs: Sequence[PyTree],
    ) -> None:
        trained, held = eqx.partition(model, trainable)
        others, static = eqx.partition((held, list(inputs)), eqx.is_array_like)
        num_held = len(jtu.tree_leaves(others[0]))
        paths_and_params, self._trained_tree = jtu.tree_flatten_with_path(trained)
        self.param_names = [jtu.keystr(path) for path, _ in paths_and_params]
        self.params = [leaf for _, leaf in paths_and_params]
        paths_and_state, self._state_tree = jtu.tree_flatten_with_path(state)
        self.state = [leaf for _, leaf in paths_and_state]
        self.inputs, others_tree = jtu.tree_flatten(others)
        self._output_tree: Any = None
        self._output_static: Any = None

        def on_leaves(*leaves: Any) -> list[Any]:
            n, m = len(self.params), len(self.params) + len(self.state)
            trained = jtu.tree_unflatten(self._trained_tree, leaves[:n])
            others = jtu.tree_unflatten(others_tree, leaves[m:])
            held, inputs = eqx.combine(others, static)
            model = eqx.combine(trained, held)
            state = jtu.tree_unflatten(self._state_tree, leaves[n:m])
            result = quaxify(step)(model, state, *inputs)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"the step must return a pair (state, output), got {result!r}")
            next_state, output = result
            arrays, self._output_static = eqx.partition(output, eqx.is_array)
            outputs, self._output_tree = jtu.tree_flatten(arrays)
            return [*self._checked_state(next_state), *outputs]

        leaves = [*self.params, *self.state, *self.inputs]
        jaxpr = jax.make_jaxpr(on_leaves)(*leaves)
        state_names = [jtu.keystr(path) or "state" for path, _ in paths_and_state]
        self.step = Step(jaxpr, len(self.params), len(self.state), num_held, state_names)

    def _checked_state(self, next_state: PyTree) -> list[Any]:
        leaves, tree = jtu.tree_flatten(next_state)
        if tree != self._state_tree:
            raise TypeError(
                "the step must return a state of the same structure as its argument, "
                f"{self._state_tree}; found {tree}"
            )
        for leaf, last in zip(leaves, self.state, strict=True):
            found, expected = jax.typeof(leaf), jax.typeof(last)
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise TypeError(
                    f"the step must return a state of the types of its argument; found {found.str_short()} "
                    f"for {expected.str_short()}"
                )
        return leaves

    def state_of(self, leaves: Sequence[Any]) -> PyTree:
        return jtu.tree_unflatten(self._state_tree, leaves)

    def output_of(self, leaves: Sequence[Any]) -> PyTree:
        return eqx.combine(jtu.tree_unflatten(self._output_tree, leaves), self._output_static)

    def grads_of(self, leaves: Sequence[Any]) -> PyTree:
        return jtu.tree_unflatten(self._trained_tree, leaves)
