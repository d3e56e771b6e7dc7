"""Right calls of what authors use: kernels, the ImplicitArray style, learners, primitives, helpers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quaxlike import implicit, kernels, online_learning, primitives, utils

Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


class Rounded(implicit.ImplicitArray):
    codes: jax.Array

    def materialize(self) -> jax.Array:
        return jnp.round(self.codes)


def _of_kernels() -> Calls:
    x, w = jnp.ones((3, 64)), jnp.ones((2, 64))
    packed, absmax = np.zeros((2, 32), np.uint8), np.ones((2, 1), np.float32)
    nf4 = {
        "packed": packed,
        "absmax": absmax,
        "codebook": jnp.arange(16.0),
        "shape": (2, 64),
        "block_size": 64,
    }
    a, b = jnp.ones((2, 64)), jnp.ones((2, 2))
    rows, columns = np.array([0, 1]), np.array([1, 0])
    index = kernels.csr_index(rows, columns, (2, 2))
    blocks = {"blocks": jnp.ones((1, 1, 2, 2)), "col_idx": np.zeros((1, 1), np.int32)}
    turned = kernels.transposed_index(blocks["col_idx"], 1)
    (equation,) = [
        e
        for e in jax.make_jaxpr(lambda x: kernels.nf4_matmul(x, **nf4))(x).eqns
        if e.primitive is kernels.nf4_matmul_p
    ]
    return {
        "nf4_matmul": (kernels.nf4_matmul, {"x": x} | nf4),
        "lora_matmul": (kernels.lora_matmul, {"x": x, "a": a, "b": b} | nf4),
        "int8_matmul": (
            kernels.int8_matmul,
            {"x": x, "codes": w.astype(jnp.int8), "scale": jnp.ones((2, 1))},
        ),
        "csr_index": (kernels.csr_index, {"rows": rows, "columns": columns, "shape": (2, 2)}),
        "csr_matmul": (kernels.csr_matmul, {"x": jnp.ones((3, 2)), "data": jnp.ones(2), "index": index}),
        "csr_sampled_matmul": (kernels.csr_sampled_matmul, {"by_rows": b, "by_columns": b, "index": index}),
        "block_sparse_matmul": (
            kernels.block_sparse_matmul,
            {"x": jnp.ones((3, 2)), "transposed_idx": turned} | blocks,
        ),
        "transposed_index": (kernels.transposed_index, {"col_idx": blocks["col_idx"], "columns": 1}),
        "chosen_backend": (
            lambda primitive, platform: kernels.chosen_backend(
                primitive, *(v.aval for v in equation.invars), platform=platform, **equation.params
            ),
            {"primitive": kernels.nf4_matmul_p, "platform": "cpu"},
        ),
        "backend": (lambda name: kernels.backend(name).__enter__(), {"name": "reference"}),
    }


def _of_styles() -> Calls:
    value = Rounded(jnp.ones((2, 3)))
    return {
        "flatten_one_implicit_layer": (implicit.flatten_one_implicit_layer, {"tree": value}),
        "implicit_depth": (implicit.implicit_depth, {"tree": value}),
        "materialize_nested": (implicit.materialize_nested, {"x": value, "full": True}),
        "combine_leaf_predicate": (
            implicit.combine_leaf_predicate,
            {"base_fn": jax.tree.leaves, "is_leaf": lambda x: False},
        ),
        "default_handler": (
            lambda primitive: implicit.default_handler(primitive, value.codes, accuracy=None),
            {"primitive": jax.lax.sin_p},
        ),
        "materialize_handler": (
            lambda primitive, params: implicit.materialize_handler(primitive, value, params=params),
            {"primitive": jax.lax.neg_p, "params": {}},
        ),
        "implicit": (implicit.implicit, {"fn": jnp.sin}),
        "ste": (implicit.ste, {"fn": jnp.round}),
        "implicit.register": (implicit.register, {"primitive": "sin"}),
        "aux_field": (implicit.aux_field, {}),
        "declared shape": (
            lambda shape, dtype: Rounded(jnp.ones(2), shape=shape, dtype=dtype).shape,
            {"shape": (2,), "dtype": jnp.float32},
        ),
    }


def _of_learners() -> Calls:
    def step(params: Any, state: Any, x: Any) -> Any:
        state = jnp.tanh(online_learning.matmul(jnp.concatenate([x, state], -1), params))
        return state, state

    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    pattern = {"rows": [0, 1], "columns": [1, 0], "shape": (2, 2)}
    primitive = online_learning.etp_mm_p
    return {
        "DRTRL": (online_learning.DRTRL, {"step": step, "trainable": True, "untraced": "warn"}),
        "PPProp": (online_learning.PPProp, {"step": step, "decay": 0.5}),
        "SparsePattern": (online_learning.SparsePattern, pattern),
        "matmul": (online_learning.matmul, {"x": x, "w": w, "bias": jnp.ones(4)}),
        "conv": (
            online_learning.conv,
            {"x": jnp.ones((1, 5, 2)), "kernel": jnp.ones((3, 2, 4)), "bias": jnp.ones(4), "padding": "SAME"},
        ),
        "elementwise": (online_learning.elementwise, {"w": w}),
        "embedding": (online_learning.embedding, {"indices": jnp.array([0, 1]), "table": w}),
        "online lora_matmul": (
            online_learning.lora_matmul,
            {"x": x, "b": jnp.ones((3, 1)), "a": jnp.ones((1, 4)), "scale": 1.0},
        ),
        "sparse_matmul": (
            online_learning.sparse_matmul,
            {"x": jnp.ones((3, 2)), "data": jnp.ones(2), "pattern": online_learning.SparsePattern(**pattern)},
        ),
        "register_primitive": (
            online_learning.register_primitive,
            {"name": "fuzzed_etp", "impl_fn": jnp.matmul, "replace": True},
        ),
        "get_trainable_invars": (online_learning.get_trainable_invars, {"primitive": primitive}),
        "get_x_invar_index": (online_learning.get_x_invar_index, {"primitive": primitive}),
        "get_y_outvar_index": (online_learning.get_y_outvar_index, {"primitive": primitive}),
    }


def _of_primitives() -> Calls:
    return {
        "define_primitive": (
            primitives.define_primitive,
            {"name": "fuzzed", "impl": jnp.sin, "replace": True},
        ),
        "Partitioning": (primitives.Partitioning, {"rule": "m k, n k -> m n", "sums": ("k",)}),
        "Slot": (primitives.Slot, {"primitive_name": "fuzzed", "name": "slot"}),
    }


def _of_helpers() -> Calls:
    tree, key = {"a": jnp.ones((2, 3))}, jax.random.key(0)
    return {
        "isin": (utils.isin, {"a": np.array([1, 2]), "b": np.array([2]), "max_item": 3}),
        "key_chain": (lambda rng, shape: next(utils.key_chain(rng, shape)), {"rng": key, "shape": (2,)}),
        "tree_map": (utils.tree_map, {"fn": lambda x: x, "tree": tree}),
        "tree_structure": (utils.tree_structure, {"x": tree}),
        "tree_zeros_like": (utils.tree_zeros_like, {"tree": tree}),
        "tree_where_broadcast_last": (
            utils.tree_where_broadcast_last,
            {"accept": jnp.ones(2, bool), "tree1": tree, "tree2": tree},
        ),
        "tree_scatter_set": (
            utils.tree_scatter_set,
            {"item": tree, "value": {"a": jnp.zeros(3)}, "idxs": jnp.array(0), "args": {}},
        ),
        "linearize": (lambda fn: utils.linearize(fn, jnp.ones(2)), {"fn": jnp.sin}),
        "jit": (lambda fn: utils.jit(fn), {"fn": jnp.sin}),  # what options may be, JAX tells
        "vectorize": (utils.vectorize, {"pyfunc": jnp.sin, "signature": "()->()"}),
        "shard_map": (lambda f: utils.shard_map(f, out_specs=jax.P()), {"f": jnp.sin}),
        "sequential_vmap_with_vjp": (utils.sequential_vmap_with_vjp, {"func": jnp.sin}),
        "non_differentiable": (utils.non_differentiable, {"x": tree}),
        "no_jax_tracing": (utils.no_jax_tracing, {"fn": np.sin}),
        "is_traced": (utils.is_traced, {"x": tree}),
        "skip_post_init_if_disabled": (utils.skip_post_init_if_disabled, {"f": lambda self: None}),
        "dataclass": (utils.dataclass, {"cls": type("Point", (), {"__annotations__": {"x": int}})}),
        "field": (utils.field, {"static": True}),
        "lens_field": (utils.lens_field, {"static": True}),
    }


def parts() -> Calls:
    """A name, a function and the arguments of a right call by name."""
    return _of_kernels() | _of_styles() | _of_learners() | _of_primitives() | _of_helpers()
