"""One training step as a compiled program: its dtypes, rematerialisation and memory."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

import quaxlike as ql
from quaxlike import LoraBias, TrainableArray, TrainableRows

from .data import Batch
from .devices import Devices
from .settings import Settings
from .tasks import AbstractTask

#: What `--remat` keeps of each layer for the gradient.
POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class State(NamedTuple):
    """The state that changes from step to step."""

    params: PyTree
    optimiser: PyTree


class Memory(NamedTuple):
    """The bytes that a step needs at its peak on each device, by use."""

    weights: int
    adapters: int
    optimiser: int
    activations: int | None
    """Temporary arrays of a step; None if the backend does not report them."""

    def __str__(self) -> str:
        parts = [
            f"{name} {size / 2**20:,.1f} MiB" for name, size in self._asdict().items() if size is not None
        ]
        return ", ".join(parts)


class Program:
    """The update of the state by one batch, compiled for each shape of batches."""

    def __init__(
        self, task: AbstractTask, optimiser: optax.MultiSteps, settings: Settings, devices: Devices
    ) -> None:
        def update(frozen: PyTree, state: State, batch: Batch, terms: Any, keys: Any) -> tuple[State, Any]:
            def loss(params: PyTree) -> Any:
                model = prepared(
                    devices.gather_weights(eqx.combine(params, frozen), task.layers), task, settings
                )
                return task.total(outputs_of(task, model, batch, keys), batch) / terms

            value, grads = jax.value_and_grad(loss)(state.params)
            updates, optimiser_state = optimiser.update(grads, state.optimiser, state.params)
            new = State(optax.apply_updates(state.params, updates), optimiser_state)
            return devices.reshard_state(new), devices.replicate_outputs(value)

        self._jitted = jax.jit(update, donate_argnames="state")
        self._compiled: dict[Any, Any] = {}
        self.seconds = 0.0
        """The total compile time."""

    def __call__(self, *arguments: Any) -> tuple[State, Any]:
        return self.compiled(*arguments)(*arguments)

    def compiled(self, *arguments: Any) -> Any:
        """The program for a batch of this shape; arrays may be given as `jax.ShapeDtypeStruct`."""
        shape = arguments[2].ids.shape
        if shape not in self._compiled:
            start = time.perf_counter()
            self._compiled[shape] = self._jitted.lower(*arguments).compile()
            self.seconds += time.perf_counter() - start
        return self._compiled[shape]

    def memory(self, *arguments: Any) -> Memory:
        """The memory that a step takes with these arguments."""
        frozen, state = arguments[:2]
        analysis = self.compiled(*arguments).memory_analysis()
        activations = getattr(analysis, "temp_size_in_bytes", None)
        return Memory(_bytes(frozen), _bytes(state.params), _bytes(state.optimiser), activations)


def stored_for(model: PyTree, dtype: str | None) -> PyTree:
    """The model for computing in a dtype: frozen arrays are stored in it, trained ones are unchanged."""
    converted = _converted(model, dtype)
    trained, _ = eqx.partition(model, ql.trainable(model))
    places, frozen = eqx.partition(converted, ql.trainable(converted))
    trained = jax.tree.unflatten(jax.tree.structure(places), jax.tree.leaves(trained))
    return eqx.combine(trained, frozen)


def prepared(model: PyTree, task: AbstractTask, settings: Settings) -> PyTree:
    """The model that a step computes with: in the dtype of the settings, with layers rematerialised."""
    model = _converted(model, settings.compute_dtype)
    if settings.remat is None:
        return model
    policy, layers = POLICIES[settings.remat], task.layers(model)
    again = [Again(x, policy) for x in layers] if isinstance(layers, list) else Again(layers, policy)
    return eqx.tree_at(task.layers, model, again)


class Again(eqx.Module):
    """A layer whose results are recomputed for the gradient, except for those that the policy saves."""

    layer: Any
    policy: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *arguments: Any) -> Any:
        run = lambda layer, *arguments: layer(*arguments)
        return jax.checkpoint(run, policy=self.policy)(self.layer, *arguments)


def outputs_of(task: AbstractTask, model: PyTree, batch: Batch, keys: Any) -> PyTree:
    """The outputs for each example of a batch; `keys` are for dropout, None to switch it off."""

    def one(example: Batch, key: Any) -> Any:
        return ql.quaxify(task.output)(ql.with_dropout_key(model, key), example)

    batch = jax.tree.map(jnp.asarray, batch)
    return jax.vmap(one, in_axes=(0, None if keys is None else 0))(batch, keys)


def _converted(model: PyTree, dtype: str | None) -> PyTree:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, TrainableArray | TrainableRows | LoraBias):  # convert their parts, not these
            return jax.tree.map(convert, leaf, is_leaf=lambda x: x is not leaf and ql.is_value(x))
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return ql.quaxify(lambda x: x.astype(dtype))(leaf)

    return model if dtype is None else jax.tree.map(convert, model, is_leaf=ql.is_value)


def _bytes(tree: PyTree) -> int:
    part = lambda leaf: leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape
    return sum(math.prod(part(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
