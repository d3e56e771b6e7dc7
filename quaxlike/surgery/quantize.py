"""`quantize`: weights of a model as codes with block scales."""

from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from ..arrays.lora import LoraArray
from ..arrays.quantized import AbstractQuantizedArray, FP4Array, Int4Array, Int8Array, NestedScales, NF4Array
from ..arrays.sparse import BlockSparseArray
from ..core.values import is_value
from ..implicit import ste
from .select import Where, replace, select_matrices

_SCHEMES: dict[str, type[FP4Array | Int4Array | Int8Array | NF4Array]] = {
    "nf4": NF4Array,
    "fp4": FP4Array,
    "int8": Int8Array,
    "int4": Int4Array,
}


def quantize(
    model: PyTree,
    scheme: str = "nf4",
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    **scheme_options: Any,
) -> PyTree:
    """Quantises weights of a model; all else about the model stays as it is.

    Call the result through [`quaxlike.quaxify`][]. Of a weight with an adapter the base is quantised, so
    that a model may be adapted first, by an init that needs dense weights, and quantised then; of a
    block-sparse weight the blocks.
    A weight that stands at several places of the model (the same array object) is quantised once.

    **Arguments:**

    - `model`: any pytree.
    - `scheme`: `"nf4"`, `"fp4"`, `"int8"` or `"int4"`. Default: `"nf4"`.
    - `where`: which weights, as [`quaxlike.select`][] takes it; what is no matrix is passed over.
        Default: those of all linear layers.
    - `exclude`: layers to leave out: a regular expression for the whole name, or a sequence of names or
        their last components.
    - `scheme_options`: for the type's `quantize`: `block_size`, `double_quant`, `axis`, `stacked`,
        `train_scales`.

    **Returns:**

    The model, with a [`quaxlike.NF4Array`][] or another quantised array in place of each weight.

    **Raises:**

    `ValueError` for a scheme that there is not, if a pattern matches nothing, with near misses, or if a
    weight is neither a dense array nor an adapter over one.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        model = ql.quantize(mlp, "nf4", exclude=["layers.2"], double_quant=True)
        ql.quaxify(model)(jnp.ones(64))
        ```

    Schemes and their names follow bitsandbytes.
    """
    done: dict[int, Any] = {}  # by the identity of the weight, which the model keeps alive
    quantized: dict[str, Any] = {}
    for name, w in select_matrices(model, where, exclude).items():
        if id(w) not in done:
            done[id(w)] = quantize_array(name, w, scheme, **scheme_options)
        quantized[name] = done[id(w)]
    return replace(model, quantized)


def fake_quantize(
    model: PyTree,
    scheme: str = "nf4",
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    **scheme_options: Any,
) -> PyTree:
    """Rounds weights of a model as `quantize` would, but keeps them dense and trainable.

    Quantisation-aware training: call it in the loss, and train the weights that go in. The gradient passes
    as if nothing had been rounded (the straight-through estimator).

    **Arguments:** as of [`quaxlike.quantize`][].

    **Returns:**

    The model, with the rounded weights in place of those selected.

    **Raises:**

    As [`quaxlike.quantize`][].

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        def loss(model, x):
            return jnp.sum(ql.fake_quantize(model, "int4")(x) ** 2)

        mlp = eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        eqx.filter_grad(loss)(mlp, jnp.ones(64))
        ```

    Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (2013).
    """
    quantized = quantize(model, scheme, where=where, exclude=exclude, **scheme_options)
    rounded: dict[int, Any] = {}  # tied weights stay tied

    def estimate(q: Any, w: Any) -> Any:
        if isinstance(q, LoraArray):
            return q.replace(w=estimate(q.w, w.w))
        if not isinstance(q, AbstractQuantizedArray):
            return q
        if id(w) not in rounded:
            rounded[id(w)] = ste(lambda w: q.materialise())(w)
        return rounded[id(w)]

    return jtu.tree_map(estimate, quantized, model, is_leaf=is_value)


def quantize_array(name: str, w: Any, scheme: str, **options: Any) -> Any:
    """The weight of this name, or the base of its adapter or its blocks, quantised."""
    if scheme not in _SCHEMES:
        raise ValueError(f"quantize takes one of the schemes {', '.join(_SCHEMES)}; found {scheme!r}.")
    if isinstance(w, LoraArray):
        return w.replace(w=quantize_array(name, w.w, scheme, **options))
    if isinstance(w, BlockSparseArray):
        # Nested scales belong to a whole array: each block has its own, so that rows of blocks can be cut.
        stacked = {"stacked": w.num_batch + 2} if options.get("double_quant") else {}
        return w.replace(blocks=quantize_array(name, w.stored_blocks, scheme, **options | stacked))
    if isinstance(w, AbstractQuantizedArray):
        raise ValueError(
            f"{name} is a {type(w).__name__} already. Leave it out with `exclude`, or make it dense with "
            "`quaxlike.materialise` before it is quantised anew."
        )
    if is_value(w):
        raise ValueError(
            f"{name} is a {type(w).__name__}; quantize takes dense arrays and adapters over them. Leave it "
            "out with `exclude`."
        )
    return _SCHEMES[scheme].quantize(w, **options)


def requantize_array(dense: Any, like: AbstractQuantizedArray) -> Any:
    """A dense array, quantised as `like` is."""
    stored = dense.transpose([like.permutation.index(i) for i in range(dense.ndim)])
    cls: Any = type(like)
    new = cls.quantize(
        stored,
        block_size=like.block_size,
        double_quant=isinstance(like.scale, NestedScales),
        stacked=like.num_lead,
        train_scales=like.train_scales,
    )
    return new.with_axes(like.permutation)
