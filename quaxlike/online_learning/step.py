"""A recurrent network's traced step, and the different ways to evaluate it for online learning."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Literal
from jaxtyping import PyTree

from ..core import compat
from ..core.quaxify import quaxify
from ..primitives.forms import symbolic_tangents
from .common import merge_common, source_of
from .graph import (
    Fixed,
    Group,
    Op,
    Relation,
    bind,
    in_any_derivative,
    inline,
    refuse_hidden_ops,
    value_at,
    widest,
    with_items,
)
from .mixing import Mixed, Positions, own_place
from .primitive import ETPPrimitive, get_trainable_invars

OnOp = Callable[[Op, Sequence[Any]], list[Any]]


class Step:
    """A traced step, mapping leaves for the parameters, state and inputs to leaves for the next state and
    output.

    This inlines all calls into one flat list of equations, and merges equal equations. So every intermediate
    value corresponds to a single variable, and the step can be cut at any op.
    """

    def __init__(
        self, jaxpr: Any, num_params: int, num_state: int, num_held: int, state_names: Sequence[str]
    ) -> None:
        self.avals = [v.aval for v in compat.open_jaxpr(jaxpr).invars]
        self.closed = jax.make_jaxpr(lambda *args: inline(jaxpr, args))(*self.avals)
        self.jaxpr = compat.open_jaxpr(self.closed)
        self.num_params, self.num_state = num_params, num_state
        self.state_names = state_names
        self.eqns, self.results = merge_common(self.closed)
        self.next_vars = [source_of(var, self.eqns) for var in self.results[:num_state]]
        self.param_avals, self.state_avals, self.input_avals = self.parted(self.avals)
        self.ops = self._find_ops(num_held)
        self.ops_at = {op.index: op for op in self.ops}
        self.groups = self._find_groups()
        self.relations = self._find_relations()
        self.traced = {relation.op for relation in self.relations}

    def parted(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Splits leaves into the parameters, the state and the inputs."""
        n, m = self.num_params, self.num_params + self.num_state
        return leaves[:n], leaves[n:m], leaves[m:]

    def no_shifts(self) -> list[Any]:
        """Returns a shift of zeros for the y of each op."""
        return [jnp.zeros(op.y_var.aval.shape, op.y_var.aval.dtype) for op in self.ops]

    def evaluate(
        self, params: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any], on_op: OnOp
    ) -> tuple[list[Any], list[Any]]:
        """Runs the step, but with op outputs computed by `on_op`. Returns the next state and the output."""
        values = self.values(params, state, inputs, on_op)
        results = [value_at(values, atom) for atom in self.results]
        return results[: self.num_state], results[self.num_state :]

    def with_shifts(
        self,
        params: Sequence[Any],
        state: Sequence[Any],
        inputs: Sequence[Any],
        shifts: Mapping[int, Any],
        last: Mapping[int, Any] = {},
        fixed: Fixed = in_any_derivative,
    ) -> tuple[list[Any], list[Any]]:
        """Returns the next state and the output, with derivatives excluding the traces' contributions.

        - The derivative with respect to a shift in a next state is its effect on the output, either directly
            or through ops. It excludes the effect on other states: the traces already include this.
        - The derivative with respect to a shift in `last`, which shifts the last states of one group, is
            similar. It also excludes any recurrence through ops (i.e. effects on next states that in turn
            affect the group).
        - The derivative with respect to parameters includes everything, apart from the effect of traced
            weights on the state through their own op.
        """
        # Evaluate the step twice in parallel, with equal values but different derivatives. `seen` computes
        # the output and the inputs of ops, with states shifted and weights differentiated. `inner` computes
        # the next states, with states unshifted, and ops acting on the operands from `seen` with traced
        # weights held fixed.
        shifted = [x + last[i] if i in last else x for i, x in enumerate(state)]
        read_seen, seen = self._environment(params, shifted, inputs)
        read_inner, inner = self._environment(params, state, inputs)
        next_state: dict[int, Any] = {}
        coupled = self._coupled(last)
        for i, eqn in enumerate(self.eqns):
            from_seen, from_inner = (list(map(read, eqn.invars)) for read in (read_seen, read_inner))
            seen |= zip(eqn.outvars, bind(eqn, from_seen), strict=True)
            op = self.ops_at.get(i)
            if op is not None and not op.primitive.gradient_enabled:
                from_inner = from_seen
            if op is not None and self.ops.index(op) in self.traced:
                results = op.bind_with_fixed_weights(from_inner, fixed)
            else:
                results = bind(eqn, from_inner)
            inner |= zip(eqn.outvars, results, strict=True)
            for j, var in enumerate(self.next_vars):
                if any(var is v for v in eqn.outvars):
                    own = fixed(var, inner[var]) if j in coupled else inner[var]
                    next_state[j] = own + shifts[j] if j in shifts else own
                    seen[var] = next_state[j]
        results = list(map(read_seen, self.results))
        return results[: self.num_state], results[self.num_state :]

    def _coupled(self, states: Collection[int]) -> set[int]:
        """Returns all states both affecting and affected by these states, now or at some later step."""
        if not states:
            return set()
        acts_on = [self._acts_on(i) for i in range(self.num_state)]
        for _ in range(self.num_state):
            acts_on = [on.union(*(acts_on[j] for j in on)) for on in acts_on]
        return {
            j
            for j in range(self.num_state)
            if any(i == j or (j in acts_on[i] and i in acts_on[j]) for i in states)
        }

    def _acts_on(self, i: int) -> set[int]:
        """Returns the next states depending on a given state, or on its next value."""
        own = (self.jaxpr.invars[self.num_params + i], self.next_vars[i])
        reached = {var for var in own if not isinstance(var, Literal)}
        for eqn in self.eqns:
            if any(not isinstance(a, Literal) and a in reached for a in eqn.invars):
                reached.update(eqn.outvars)
        return {j for j, var in enumerate(self.next_vars) if not isinstance(var, Literal) and var in reached}

    def way_past_traces(self, param: int) -> tuple[str, str]:
        """Explains how a parameter affects the state without a trace, and how the user can fix this."""

        def acts_with(live: Op | None, *, through_y: bool = True) -> bool:
            def on_op(op: Op, operands: Sequence[Any]) -> list[Any]:
                if op is not live:
                    return bind(op.eqn, op.with_fixed_weights(operands, in_any_derivative))
                if through_y:
                    return bind(op.eqn, operands)
                return op.bind_with_fixed_weights(operands, in_any_derivative)

            def next_state(*leaves: Any) -> list[Any]:
                return self.evaluate(*self.parted(leaves), on_op)[0]

            return any(reached(next_state, self.avals, param))

        is_direct = acts_with(None)
        beside = None if is_direct else next((op for op in self.ops if acts_with(op, through_y=False)), None)
        if beside is not None:
            return (
                f"through a result of its ETP primitive {beside.told} other than y, which has no trace",
                "Let its weights act on the state through y alone, with one primitive for each such result",
            )
        untraced = [op for k, op in enumerate(self.ops) if k not in self.traced]
        own = None if is_direct else next(filter(acts_with, untraced), None)
        if own is None:
            return (
                "other than through an ETP primitive of its own",
                "Use it through one (such as online_learning.matmul or online_learning.elementwise)",
            )
        then = next(op for op in self.ops if own in self._before(op))
        return (
            f"through its ETP primitive {own.told} and then through another, {then.told}, which traces do "
            "not follow",
            "Let it act on the result of the other, `gate * matmul(h, w)` in place of `matmul(gate * h, w)`",
        )

    def _before(self, op: Op) -> list[Op]:
        """Returns the ops on which the operands of `op` depend."""
        needed = {a for a in op.eqn.invars if not isinstance(a, Literal)}
        found = []
        for i in reversed(range(op.index)):
            if not needed.isdisjoint(self.eqns[i].outvars):
                needed.update(a for a in self.eqns[i].invars if not isinstance(a, Literal))
                found += [self.ops_at[i]] if i in self.ops_at else []
        return found

    def _environment(
        self, params: Sequence[Any], state: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[Callable[[Any], Any], dict[Any, Any]]:
        env = dict(zip(self.jaxpr.constvars, getattr(self.closed, "consts", ()), strict=True))
        env |= dict(zip(self.jaxpr.invars, (*params, *state, *inputs), strict=True))
        return lambda atom: value_at(env, atom), env

    def values(
        self,
        params: Sequence[Any],
        state: Sequence[Any],
        inputs: Sequence[Any],
        on_op: OnOp = Op.bind,
    ) -> dict[Any, Any]:
        """Runs the step, and returns the values of all its variables."""
        read, env = self._environment(params, state, inputs)
        for i, eqn in enumerate(self.eqns):
            operands = list(map(read, eqn.invars))
            results = on_op(self.ops_at[i], operands) if i in self.ops_at else bind(eqn, operands)
            env |= zip(eqn.outvars, results, strict=True)
        return env

    def operands(self, values: Mapping[Any, Any]) -> dict[int, tuple[Any, dict[str, Any]]]:
        """Selects the input and the weights of each traced op."""

        def of_op(op: Op) -> tuple[Any, dict[str, Any]]:
            return op.operands([value_at(values, atom) for atom in op.eqn.invars])

        return {k: of_op(op) for k, op in enumerate(self.ops) if k in self.traced}

    def isolated(
        self,
        params: Sequence[Any],
        inputs: Sequence[Any],
        state: Sequence[Any],
        shifts: Sequence[Any],
        fixed: Fixed = in_any_derivative,
    ) -> list[Any]:
        """Returns the next state as a function of the last state and a shift for each y.

        The outputs of ops are fixed, unless they are gradient-enabled.
        """

        def on_op(op: Op, operands: Sequence[Any]) -> list[Any]:
            results = bind(op.eqn, operands)
            if not op.primitive.gradient_enabled:
                results = list(map(fixed, op.eqn.outvars, results))
            i = op.primitive.y_outvar_index
            results[i] = results[i] + shifts[self.ops.index(op)]
            return results

        return self.evaluate(params, state, inputs, on_op)[0]

    # ----------------------------------------------------------------------------------------------
    # Analysis
    # ----------------------------------------------------------------------------------------------

    def _find_ops(self, num_held: int) -> list[Op]:
        """Finds the equations with trained weights. The model has `num_held` untrained arrays."""
        found = []
        n, m = self.num_params, self.num_params + self.num_state
        data = [*self.jaxpr.invars[n:m], *self.jaxpr.invars[m + num_held :]]
        depends_on_data = dict.fromkeys(data, True)
        trained = dict.fromkeys(self.jaxpr.invars[:n], True)
        for i, eqn in enumerate(self.eqns):
            atoms = [a for a in eqn.invars if not isinstance(a, Literal)]
            for var in eqn.outvars:
                depends_on_data[var] = any(depends_on_data.get(a, False) for a in atoms)
                trained[var] = any(trained.get(a, False) for a in atoms)
            primitive = eqn.primitive
            if not isinstance(primitive, ETPPrimitive):
                refuse_hidden_ops(eqn)
                continue
            weights = get_trainable_invars(primitive, primitive.plain_params(eqn.params))
            if not any(trained.get(eqn.invars[j], False) for j in weights.values()):
                continue
            for key, j in weights.items():
                if depends_on_data.get(eqn.invars[j], False):
                    raise ValueError(
                        f"the {key!r} of ETP primitive {primitive.name!r} depends on the state or the input "
                        "of the step; traces are kept for weights, which may depend on parameters alone"
                    )
            found.append(Op(i, eqn, weights))
        return found

    def _find_groups(self) -> list[Group]:
        """Groups together all states depending on each other from one step to the next."""
        parent = list(range(self.num_state))

        def root(i: int) -> int:
            return i if parent[i] == i else root(parent[i])

        for j in range(self.num_state):
            for i, reached in enumerate(self._reached_by(j)):
                if not reached or i == j:
                    continue
                shapes = [self.state_avals[k].shape for k in (j, i)]
                if shapes[0] != shapes[1]:
                    raise ValueError(
                        f"state {self.state_names[i]!r} of shape {shapes[1]} depends on state "
                        f"{self.state_names[j]!r} of shape {shapes[0]} other than through an ETP primitive: "
                        "states may act on each other only elementwise"
                    )
                parent[root(i)] = root(j)
        members: dict[int, list[int]] = {}
        for i, aval in enumerate(self.state_avals):
            if jnp.issubdtype(aval.dtype, jnp.inexact):
                members.setdefault(root(i), []).append(i)

        return [self._group(states) for states in members.values()]

    def _group(self, states: Sequence[int]) -> Group:
        avals = [self.state_avals[i] for i in states]
        components: list[tuple[int, bool]] = []
        for i, aval in zip(states, avals, strict=True):
            components += [(i, False), (i, True)] if jnp.iscomplexobj(aval) else [(i, False)]
        dtype = widest(*(np.empty(0, aval.dtype).real.dtype for aval in avals))
        return Group(tuple(states), avals[0].shape, tuple(components), dtype)

    def _find_relations(self) -> list[Relation]:
        relations = []
        for k, op in enumerate(self.ops):
            reached = self._reached_by(self.num_state + k)
            for g, group in enumerate(self.groups):
                if not any(reached[i] for i in group.states):
                    continue
                y = op.y_var.aval.shape
                lead = len(group.shape) - len(y)
                if lead < 0 or group.shape[lead:] != y:
                    names = ", ".join(repr(self.state_names[i]) for i in group.states)
                    raise ValueError(
                        f"the y of ETP primitive {op.primitive.name!r} has shape {y}, and acts on state "
                        f"{names} of shape {group.shape}; each element of y must act on its own position. "
                        "If y holds several gates, use one ETP primitive for each"
                    )
                relations.append(Relation(k, g, lead))
        return relations

    def mixing(self) -> str | None:
        """Explains how the step mixes positions. Returns None if it doesn't."""
        moving = sorted(i for group in self.groups for i in group.states)
        ops = sorted(self.traced)

        def push(params: Any, inputs: Any, state: Any, moved: Any, pushes: Any, *tangents: Any) -> list[Any]:
            def next_state(moved: Any, pushes: Any) -> list[Any]:
                last, shifts = with_items(state, moving, moved), with_items(self.no_shifts(), ops, pushes)
                result = self.isolated(params, inputs, last, shifts)
                return [result[i] for i in moving]

            return jax.jvp(next_state, (moved, pushes), tangents)[1]

        sources = [self.state_avals[i] for i in moving], [self.ops[k].y_var.aval for k in ops]
        jaxpr = jax.make_jaxpr(push)(self.param_avals, self.input_avals, self.state_avals, *sources, *sources)
        names = [f"state {self.state_names[i]!r}" for i in moving]
        names += [f"the y of ETP primitive {self.ops[k].primitive.name!r}" for k in ops]
        own = [own_place(aval.shape) for group in sources for aval in group]
        primals = len(compat.open_jaxpr(jaxpr).invars) - len(own)
        found = Positions()
        try:
            results = found.run(jaxpr, [*[{}] * primals, *({k: place} for k, place in enumerate(own))])
            for i, places in zip(moving, results, strict=True):
                for k, place in places.items():
                    shape = self.state_avals[i].shape
                    if place != own_place(shape, len(shape) - len(own[k])):
                        raise found.mixed(compat.open_jaxpr(jaxpr).eqns[-1], k, place)
        except Mixed as mixed:
            return f"{names[mixed.argument]} acts on the state through {mixed}"
        return None

    def _reached_by(self, number: int) -> list[bool]:
        """Returns, for each next state, whether it has a derivative with respect to a given state or a shift
        in some y.
        """
        shifts = [op.y_var.aval for op in self.ops]
        avals = [*self.param_avals, *self.input_avals, *self.state_avals, *shifts]
        n, m = len(self.param_avals), len(self.param_avals) + len(self.input_avals)

        def fn(*leaves: Any) -> list[Any]:
            state, shifts = leaves[m : m + self.num_state], leaves[m + self.num_state :]
            return self.isolated(leaves[:n], leaves[n:m], state, shifts)

        return reached(fn, avals, m + number)


def reached(fn: Callable[..., list[Any]], avals: Sequence[Any], number: int) -> list[bool]:
    """Returns, for each output of `fn`, whether it has a derivative with respect to a given argument."""

    def tangents(primals: Sequence[Any], tangent: Any) -> list[Any]:
        return symbolic_tangents(fn, [i == number for i in range(len(avals))], primals, [tangent])

    tangent = avals[number].to_tangent_aval()
    if tangent.dtype == jax.dtypes.float0:
        return [False] * len(jax.eval_shape(fn, *avals))
    return [t is not None for t in jax.eval_shape(tangents, list(avals), tangent)]


class TracedStep:
    """A step function `step(model, state, *inputs) -> (state, output)`, traced for some particular arguments.

    Here `params` are the trained leaves of the model. `inputs` are all other arrays in the model, followed by
    those in the actual inputs.
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
        # Just as with `eqx.filter_jit`, Python numbers are static: the step may branch on them.
        others, static = eqx.partition((held, list(inputs)), eqx.is_array)
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
