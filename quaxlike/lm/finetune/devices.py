"""The devices of a run: either a single one, or a mesh over one or many processes.

All processes run the same program, and a collective waits until every process has reached it. Be careful with
anything affecting control flow, such as whether to stop or resume: processes deadlock if they don't all
decide the same way.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from ...sharding import constrain, fsdp, shard
from ...sharding.meshes import MODEL_AXES, SEQUENCE_AXES, mesh_from_text
from .._interrupts import interrupt_requested
from ..sharding import divides_layers, usual_rule
from .data import LEAST_LENGTH
from .settings import FinetuneError, RunSettings

_Tree = TypeVar("_Tree")


def join(settings: RunSettings) -> None:
    """Connects this process to all others. Call this before using JAX in any way.

    If any process doesn't respond for 20 seconds, or exits more than a minute before the others, then JAX
    terminates them all. (They couldn't continue without its devices.)

    **Raises:** `FinetuneError` if the coordinator can't be reached.
    """
    if settings.coordinator is None:
        return
    try:
        jax.config.update("jax_enable_preemption_service", False)  # or else JAX handles SIGTERM itself
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            settings.coordinator, settings.num_processes, settings.process_id,
            initialization_timeout=120, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=60,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise FinetuneError(
            f"Process {settings.process_id} of {settings.num_processes} could not join the others at "
            f"{settings.coordinator} within two minutes: {error} Start all of them; the one with "
            "--process-id 0 must be reachable there."
        ) from error


def is_main_process() -> bool:
    """Returns whether this process prints and writes results on behalf of all others."""
    return jax.process_index() == 0


class Follower:
    """A stand-in for the run directory and the metrics, for processes that don't write anything."""

    def restore(self, state: PyTree) -> tuple[int, PyTree]:
        return 0, state

    def entries(self) -> list[dict[str, Any]]:
        return []

    def save(self, step: int, state: PyTree) -> None: ...

    def note(self, step: int, **entry: Any) -> None: ...

    def amend(self, step: int, **entry: Any) -> None: ...

    def close(self) -> None: ...


class Gathered(eqx.Module):
    """Wraps a fully sharded layer, so that its arrays are only gathered once it's called."""

    layer: Any
    mesh: jax.sharding.Mesh = eqx.field(static=True)

    def __call__(self, *arguments: Any) -> Any:
        whole = jax.NamedSharding(self.mesh, jax.P())
        gathered = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), self.layer)
        return gathered(*arguments)


class Devices:
    """The devices of a run, and how to shard arrays over them.

    Mesh axes named model, tensor or tp are used for tensor parallelism, and seq, context or cp for context
    parallelism. All others are used for data parallelism, with expert or ep also for expert parallelism.

    Defaults to all available devices. Raises `FinetuneError` if the mesh doesn't match them.
    """

    def __init__(self, settings: RunSettings, devices: Sequence[Any] | None = None) -> None:
        try:
            self.mesh = None if settings.mesh is None else mesh_from_text(settings.mesh, devices)
        except ValueError as error:
            raise FinetuneError(str(error)) from None
        self.attention, self._fsdp = settings.attention, settings.fsdp
        self._by_layers: Callable[[str, Any], Any] | None = None
        if self.mesh is None:
            if settings.fsdp:
                raise FinetuneError(
                    "--fsdp stores parts of weights on the devices of a --mesh; pass --mesh too."
                )
            if jax.process_count() > 1:
                raise FinetuneError("Several processes train together on a --mesh of all their devices.")
            return
        self._axes = tuple(name for name in self.mesh.shape if name not in (*MODEL_AXES, *SEQUENCE_AXES))
        self._tokens = next((name for name in SEQUENCE_AXES if name in self.mesh.shape), None)

    def check_batch(self, size: int, max_length: int) -> None:
        """Raises `FinetuneError` if there is no way to shard a batch evenly."""
        if self.mesh is None:
            return
        if self._tokens is not None:
            count = self.mesh.shape[self._tokens]
            if LEAST_LENGTH % count or max_length % count:  # lengths are powers of two, or `max_length`
                raise FinetuneError(
                    f"Texts of {max_length} tokens cannot be shared evenly along {self._tokens} of the mesh, "
                    f"which has {count} devices: it must have 2, 4, 8 or {LEAST_LENGTH}, and --max-length "
                    "must be a multiple of that."
                )
        shares = math.prod(self.mesh.shape[name] for name in self._axes)
        if size % shares:
            raise FinetuneError(
                f"A batch of {size} examples cannot be shared evenly along {', '.join(self._axes)} of the "
                f"mesh: use a --batch-size that is a multiple of {shares}."
            )

    def rule(self, name: str, leaf: Any) -> Any:
        """Returns the partition spec for a weight, for use whilst reading the checkpoint."""
        assert self.mesh is not None
        return usual_rule(self.mesh, fully=self._fsdp)(name, leaf)

    def place(self, model: _Tree) -> _Tree:
        """Places a model on the mesh. Call this first: it determines how anything else is sharded."""
        if self.mesh is None:
            return model
        if rule_for := divides_layers(self.mesh):
            self._by_layers = rule_for(model, self.mesh)
        return self.place_along(model)

    def place_along(self, tree: _Tree) -> _Tree:
        """Places a tree with the same names as the model, such as an optimiser state."""
        return tree if self.mesh is None else shard(tree, self.mesh, self._rule(self._by_layers))

    def batch(self, batch: _Tree) -> _Tree:
        """Places a batch on the mesh. Each process only places the rows for its own devices.

        With context parallelism, arrays with a token axis are sharded along this axis as well.
        """
        if self.mesh is None:
            return batch
        specs = {3: jax.P(self._axes, None, self._tokens)}
        return jax.tree.map(lambda x: self._put(x, specs.get(x.ndim, jax.P(self._axes))), batch)

    def replicate(self, tree: _Tree) -> _Tree:
        """Replicates arrays over all devices. Use this for small arrays."""
        return self._put(tree, jax.P()) if self.mesh is not None else tree

    def gather_weights(self, model: Any) -> Any:
        """Gathers a model's weights, for use inside a training step.

        Quantised weights are gathered before unpacking them: this needs far less communication. Scanned
        layers are gathered one at a time.
        """
        if self.mesh is None or not self._fsdp:
            return model
        layers = operator.attrgetter("layers")
        stacked = model.layers
        if self._by_layers is not None or isinstance(stacked, list):
            return constrain(model, self.mesh, self._by_layers)
        rest = constrain(eqx.tree_at(layers, model, None), self.mesh, None)
        return eqx.tree_at(layers, rest, Gathered(stacked, self.mesh), is_leaf=lambda x: x is None)

    def reshard_state(self, state: _Tree) -> _Tree:
        """Reapplies the state's sharding, for use inside a training step."""
        return state if self.mesh is None else constrain(state, self.mesh, self._rule(self._by_layers))

    def replicate_outputs(self, outputs: _Tree) -> _Tree:
        """Replicates outputs so that every process can read them. Call this inside a training step."""
        return outputs if self.mesh is None else constrain(outputs, self.mesh, None)

    def on_host(self, tree: _Tree) -> _Tree:
        """Copies a tree to host memory in every process. All processes must call this together."""
        if self.mesh is None:
            return tree
        # No single process can read an array sharded over several of them.
        gather = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(self.mesh, jax.P()))
        return jax.tree.map(
            lambda x: x if not isinstance(x, jax.Array) else jnp.asarray(np.asarray(gather(x))), tree
        )

    def broadcast_from_main(self, tree: _Tree) -> _Tree:
        """Broadcasts the value in the main process, bit for bit. All processes must call this together."""
        if jax.process_count() == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        kinds = [type(leaf) for leaf in leaves]
        arrays = [np.asarray(leaf) for leaf in leaves]
        # JAX implements broadcasting as a sum, turning e.g. -0.0 into 0.0. So send raw bytes.
        raw = [np.frombuffer(x.tobytes(), np.uint8) for x in arrays]
        sent = jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(raw))
        out = [
            np.frombuffer(bytes_.tobytes(), x.dtype).reshape(x.shape)
            for bytes_, x in zip(sent, arrays, strict=True)
        ]
        out = [kind(x) if kind in (bool, int) else jnp.asarray(x) for kind, x in zip(kinds, out, strict=True)]
        return jax.tree.unflatten(structure, out)

    def take_interrupt(self) -> None:
        """Raises `KeyboardInterrupt` in every process if any one of them was interrupted.

        All processes must call this together. If only one stopped, then all the others would wait for it
        forever and not save anything.
        """
        number = interrupt_requested()
        if jax.process_count() > 1:
            number = int(np.max(multihost_utils.process_allgather(np.int32(number))))
        if number:
            raise KeyboardInterrupt(number)

    def _rule(self, by_layers: Callable[[str, Any], Any] | None) -> Callable[[str, Any], Any]:
        if self._fsdp:
            return fsdp(self.mesh, over=by_layers)
        return by_layers or (lambda name, leaf: None)

    def _put(self, tree: _Tree, spec: jax.P) -> _Tree:
        assert self.mesh is not None
        sharding = jax.NamedSharding(self.mesh, spec)

        def put(x: Any) -> Any:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            local = np.asarray(x)
            return jax.make_array_from_callback(local.shape, sharding, lambda index: local[index])

        return jax.tree.map(put, tree)
