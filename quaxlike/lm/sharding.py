"""Tensor parallelism and expert parallelism for decoders.

In each block, the first and the last projections must be sharded over the same features. A device's outputs
of the first ones are then exactly its inputs to the last one, so a block only needs a single all-reduce.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray
from ..arrays.layout import Layout
from ..core.values import is_value
from ..sharding.fsdp import check_axis, fsdp
from ..sharding.meshes import EXPERT_AXES, MODEL_AXES, expert_axis
from ..sharding.placing import NamedRule, leaf_specs_of, spread
from ..surgery.records import layouts
from ..surgery.trees import layer_of, leaves_with_path, named_arrays, owner_of, path_of
from .families import names_of

# How to shard layers, by the last components of their names in transformers, Equinox and Flax. (Decoders in
# the table of architectures can have other names.) "out" layers are sharded along their outputs, and "in"
# layers along their inputs. "whole" layers are replicated: they are too small for sharding to be worth it.
_KINDS = {
    "out": (
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "query", "key", "value"),
        *("query_proj", "key_proj", "value_proj", "query_key_value", "Wqkv", "gate_proj", "up_proj"),
        *("gate_up_proj", "fc1", "fc_in", "wi", "wi_0", "wi_1", "dense_h_to_4h"),
        "intermediate.dense",
    ),
    "in": (
        *("o_proj", "out_proj", "output_proj", "down_proj", "fc2", "fc_out", "wo"),
        *("dense_4h_to_h", "output.dense", "attention.dense", "attention.out"),
    ),
    "vocabulary": (
        *("lm_head", "embed_out", "embed_tokens", "embed_tokens_per_layer", "word_embeddings", "embed_in"),
    ),
    "whole": ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"),
}
# Stacks of matrices and biases with one entry per expert. The layers themselves can be stacked too.
_EXPERTS = re.compile(r"(.*\.)?experts\.\w+")


@checked
def tensor_parallel(model: PyTree, mesh: Any, *, axis: str | None = None) -> NamedRule:
    """Creates a rule for tensor parallelism, as in Megatron-LM.

    In each attention or feed-forward block, the first projections (queries, keys and values; or gate and up)
    are sharded along their outputs, and the last projection along its inputs. A single all-reduce then
    combines the results. Embeddings and the output head are sharded along the vocabulary, and any other
    linear layers along their outputs, or replicated if their sizes don't allow it. Biases are sharded in the
    same way as outputs, and norms are replicated.

    Experts are distributed, as in [`expert_parallel`][quaxlike.lm.expert_parallel], rather than split. This
    uses a separate axis if the mesh has one.

    Layers are recognised by their class (in Equinox) or by their name (in transformers).

    **Arguments:**

    - `model`: the model, which can be quantised and can have adapters. Its arrays can be
        `jax.ShapeDtypeStruct`s.
    - `mesh`: the mesh, which can be abstract.
    - `axis`: the axis of the mesh to shard over. Default: an axis called "model", "tensor" or "tp" if the
        mesh has one, and otherwise its last axis.

    **Returns:** a rule for [`shard`][quaxlike.sharding.shard] and
    [`specs_for`][quaxlike.sharding.specs_for]. It works for this model, for its parts after `eqx.partition`,
    and for any tree with the same names and shapes, such as an optimiser state.

    **Raises:** `ValueError` if the mesh doesn't have this axis, or if the projections in a block can't be
    divided evenly. In the latter case the message suggests how many devices to use.

    !!! example

        ```python
        import equinox as eqx, jax, optax, quaxlike as ql
        from quaxlike.lm import tensor_parallel
        from quaxlike.sharding import shard

        mesh = jax.make_mesh((len(jax.devices()),), ("model",))
        model = ql.quantize(
            eqx.nn.MLP(64, 64, 1024, depth=1, key=jax.random.key(0)), "nf4"
        )
        model = ql.loraify(model, rank=4, key=jax.random.key(1))
        params, _ = eqx.partition(model, ql.trainable(model))
        rule = tensor_parallel(model, mesh)
        model, state = (
            shard(model, mesh, rule),
            shard(optax.adam(1e-3).init(params), mesh, rule),
        )
        ```

    Source: Shoeybi et al., Megatron-LM, <https://arxiv.org/abs/1909.08053>.
    """
    usual = next((name for name in MODEL_AXES if name in mesh.shape), tuple(mesh.shape)[-1])
    chosen = usual if axis is None else axis
    check_axis(mesh, chosen)
    return _by_kinds(model, mesh, chosen)


def expert_parallel(model: PyTree, mesh: Any) -> NamedRule:
    """Creates a rule for expert parallelism, i.e. for distributing experts over devices.

    Each device applies its own experts to all tokens in its group, followed by a single all-reduce over the
    group. Everything else is replicated. To shard that as well, use `fsdp(mesh, over=expert_parallel(model,
    mesh))` with [`fsdp`][quaxlike.sharding.fsdp]. [`quaxlike.lm.models.Decoder`][] finds the mesh in the
    types of its arrays, so you don't need to pass it.

    **Arguments:**

    - `model`: the model, which can be quantised and can have adapters. Its arrays can be
        `jax.ShapeDtypeStruct`s. Its experts are the stacks of matrices below `experts`.
    - `mesh`: the mesh, which can be abstract. It must have an axis called "expert" or "ep", or failing that
        "model", "tensor" or "tp".

    **Returns:** a rule, as for [`tensor_parallel`][quaxlike.lm.tensor_parallel].

    **Raises:** `ValueError` if the mesh has none of these axes, or if experts can't be divided evenly.

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike.lm.models import Decoder, DecoderConfig
        from quaxlike.lm import expert_parallel
        from quaxlike.sharding import shard

        mesh = jax.make_mesh((1, len(jax.devices())), ("data", "expert"))
        config = DecoderConfig.from_json(
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "hidden_size": 32,
                "moe_intermediate_size": 32,
                "head_dim": 8,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "vocab_size": 50,
            }
        )
        model = Decoder(config, key=jax.random.key(0))
        model = shard(model, mesh, expert_parallel(model, mesh))
        ```

    Source: Lepikhin et al., GShard, <https://arxiv.org/abs/2006.16668>, but without the all-to-all of tokens.
    """
    if not {*EXPERT_AXES, *MODEL_AXES} & {*mesh.shape}:
        raise ValueError(
            f"Experts are distributed along a mesh axis called {' or '.join(EXPERT_AXES)}; "
            f"it has {', '.join(mesh.shape)}."
        )
    return _by_kinds(model, mesh, None)


def divides_layers(mesh: Any) -> Callable[[PyTree, Any], NamedRule] | None:
    """Chooses a rule based on a mesh's axis names. Returns None if no axis is for layers or experts."""
    if set(MODEL_AXES) & set(mesh.shape):
        return tensor_parallel
    return expert_parallel if set(EXPERT_AXES) & set(mesh.shape) else None


def usual_rule(mesh: Any, model: PyTree = None, *, fully: bool = True) -> NamedRule:
    """Creates the default rule for a mesh.

    This combines `tensor_parallel` over an axis named "model", "tensor" or "tp", `expert_parallel` over an
    axis named "expert" or "ep", and (if `fully` is set) `fsdp` over all other axes.

    Layers are recognised by their classes in `model`. Without a model, or if a weight has another format
    there, this can only go by the name.
    """
    by_layers: NamedRule | None = None
    if rule_for := divides_layers(mesh):
        like = {} if model is None else named_arrays(model)
        whole: Any = None if model is None else rule_for(model, mesh)

        def by_layer(name: str, leaf: Any) -> Any:
            known = name in like and jtu.tree_structure(leaf) == jtu.tree_structure(like[name])
            return (whole if known else rule_for({name: leaf}, mesh))(name, leaf)

        by_layers = by_layer
    return fsdp(mesh, over=by_layers) if fully else by_layers or (lambda name, leaf: None)


def _by_kinds(model: PyTree, mesh: Any, axis: str | None) -> NamedRule:
    """Creates a rule for distributing experts and (if there is an axis) sharding all other layers."""
    of_experts = expert_axis(mesh)
    specs: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kinds = {name: kind for kind, roles in _KINDS.items() for role in roles for name in names_of(role)}
    by_layer = {layer_of(name): layout for name, layout in layouts(model).items() if layout is not None}
    for path, leaf in leaves_with_path(model):
        name = path_of(path, model)
        own, needed = jax.P(), False
        if _EXPERTS.fullmatch(name):
            stack = len(leaf.shape) - (2 if name.endswith("bias") else 3)
            own, needed = jax.P(*[None] * stack, of_experts), axis is None
        elif axis is not None:
            kind, needed = _kind(model, path, name, kinds)
            layout = by_layer.get(re.sub(r"\.(bias|b)$", "", layer_of(name)))
            own = _layout(name, leaf, kind, axis, layout)
        found = leaf_specs_of(name, leaf, None)
        if any(entry is not None for entry in own):
            found = _if_it_fits(name, leaf, own, mesh, needed, found)
        specs |= dict(_with_parts(name, found))
        shapes |= {below: tuple(x.shape) for below, x in _with_parts(name, leaf)}

    def rule(name: str, leaf: Any) -> Any:
        while name not in specs:  # in e.g. the state of an optimiser, names have a prefix
            _, dot, name = name.partition(".")
            if not dot:
                return None
        return specs[name] if shapes.get(name) == tuple(leaf.shape) else None

    return rule


def _with_parts(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yields an array or Value, followed recursively by the Value's parts.

    After `eqx.partition` some parts are missing, and others appear by themselves.
    """
    yield name, x
    if is_value(x):
        for below, part in jtu.tree_leaves_with_path(x, is_leaf=lambda y: y is not x and is_value(y)):
            yield from _with_parts(f"{name}.{path_of(below)}", part)


def _if_it_fits(name: str, leaf: Any, spec: jax.P, mesh: Any, needed: bool, otherwise: Any) -> Any:
    try:
        return spread(name, eqx.filter_eval_shape(lambda x: x, leaf), spec, mesh)[1]
    except ValueError:
        if needed:
            raise
        return otherwise


def _kind(model: PyTree, path: Sequence[Any], name: str, kinds: Mapping[str, str]) -> tuple[str | None, bool]:
    """Returns how to shard a layer (a key of `_KINDS` or None), and whether this is required."""
    owner, around = owner_of(model, path), owner_of(model, path[:-2])
    if isinstance(around, eqx.nn.MLP):
        index = path[-2].idx
        alone = index % 2 == 0 and index == len(around.layers) - 1
        return ("out", False) if alone else (("out", "in")[index % 2], True)
    layer, _, field = name.rpartition(".")
    last = layer.rsplit(".", 2)[-2:]
    kind = next((kinds[x] for x in (last[-1], ".".join(last)) if x in kinds), None)
    if kind is not None and field in ("weight", "kernel", "bias"):
        return kind, kind != "vocabulary"
    if isinstance(owner, eqx.nn.Embedding):
        return None, False
    return ("out" if isinstance(owner, eqx.nn.Linear) else None), False


def _layout(name: str, leaf: Any, kind: str | None, axis: str, layout: Layout | None) -> jax.P:
    """Returns the spec for an array, given the kind and layout of its layer."""
    ndim, cut = len(leaf.shape), None
    known = None if layout is None or not layout.is_known else layout
    if name.endswith(("bias", ".b")):
        if kind == "out":
            cut = -1 if known is None else -len(known.out_axes)
    elif kind in (None, "whole") or ndim < 2:
        pass
    elif kind == "vocabulary":
        cut = -2
    elif isinstance(leaf, AdaptedArray) and leaf.part_axes:
        (cut, *_) = leaf.out_axes if kind == "out" else leaf.in_axes
    elif known is not None:
        (cut, *_) = known.out_axes if kind == "out" else known.in_axes
    return jax.P() if cut is None else jax.P(*[axis if i == ndim + cut else None for i in range(ndim)])
