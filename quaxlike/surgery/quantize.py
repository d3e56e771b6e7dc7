"""`quantize`: replaces a model's weights by quantised arrays."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import ArrayLike, PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray, innermost, on_innermost
from ..arrays.layout import Layout
from ..arrays.quantized import AbstractQuantizedArray
from ..arrays.sparse import BlockSparseArray
from ..core.values import is_value
from ..implicit import ste
from .calibrate import fit
from .recipes import (
    RECIPE_FILES,
    RECIPES,
    ROUNDING,
    SCHEMES,
    Recipe,
    SchemeOfWeight,
    choices,
    from_file,
    require_options,
    require_scheme,
    scheme_text,
)
from .records import Layouts, records_of, require_layout
from .select import Where, select_matrices
from .trees import map_arrays, named_arrays, replace
from .weight_axes import MATRIX, stored_order


@checked
def quantize(
    model: PyTree,
    scheme: str | Recipe = "nf4",
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    layout: Layouts = None,
    calibrate: Mapping[str, ArrayLike | None] | None = None,
    activations: str | None = None,
    maxima: Mapping[str, ArrayLike] | None = None,
    rounds_gradients: bool = False,
    head: bool = False,
    **scheme_options: Any,
) -> PyTree:
    """Quantises a model's weights, leaving everything else unchanged.

    Call the result through [`quaxlike.quaxify`][]. If a weight has an adapter, then its base is quantised: to
    initialise adapters from dense weights, adapt the model first and quantise it afterwards. If a weight is
    block-sparse, then its blocks are quantised. Tied weights (the same array object) are only quantised once.

    **Arguments:**

    - `model`: any pytree.
    - `scheme`: either `"nf4"`, `"fp4"`, `"int8"` or `"int4"`; or any [`quaxlike.BlockArray`][] codec, such as
        `"mxfp4"`, `"nvfp4"`, `"fp8"`, `"q4_k"` or `"uint4_block"`. Default: `"nf4"`.

        Alternatively, a recipe: a mapping from anything accepted by `where` to a scheme, a pair of a scheme
        and its options, or `None` to leave the weights unchanged. The first rule to select a weight is used.
        Predefined recipes are `"q4_k_m"`, `"q5_k_m"` and `"mxfp4_moe"`, following llama.cpp's presets except
        for embeddings; and `"nf4_qlora"`, i.e. NF4 with nested scales. `quantize.plan` previews a recipe
        without computing anything, and `quantize.from_file` reads one from disk.

    - `where`: which weights to quantise, as in [`quaxlike.select`][]. Biases and norms are skipped. This
        isn't supported for recipes, because their rules select the weights. Default: every linear layer.
    - `exclude`: layers to leave out. Either a regular expression for the whole name, or a sequence of names
        or of their last components.
    - `layout`: layouts that can't be inferred from the layer or the name, as in [`quaxlike.layouts`][].
        Default: none.
    - `calibrate`: for each weight, the sum of `x xᵀ` over its layer's inputs, from
        [`quaxlike.input_moments`][]. GPTQ then chooses codes that minimise the change in the layer's outputs.
        For llama.cpp's schemes, just the diagonal of this sum also works: it weights errors in the search for
        scales. (This is llama.cpp's importance matrix.) A weight with the entry `None` is rounded. Default:
        round to the nearest codes.
    - `activations`: `"int8"` for the `"int8"` scheme, or `"fp8"` for `"fp8"`. Each layer's inputs are then
        also rounded to 8 bits, with one scale per token, and matrices are multiplied in 8 bits. GPUs have
        specialised units for this, so it is typically faster. Gradients and adapters still use the unrounded
        inputs, as do convolutions, with a warning. Default: inputs are not rounded.
    - `maxima`: the largest magnitude of each layer's inputs, from [`quaxlike.input_maxima`][], for use with
        `activations`. All tokens then share a single static scale, and inputs above the maximum are clipped.
        Default: one dynamic scale per token.
    - `rounds_gradients`: whether to also compute gradients with respect to the inputs in 8 bits, for use with
        `activations`. Cotangents are rounded for each token separately. Only supports reverse mode. Default:
        False.
    - `head`: whether to also quantise the output layer (`lm_head`, excluded by `"all-linear"`), or else the
        embedding it is tied to. Default: False.
    - `scheme_options`: passed on to the type's `quantize` method: `block_size`, `double_quant`, `axis`,
        `stacked`, `train_scales`, `compute`. By default, blocks run along the input axes. Recipes contain
        their own options: only `compute`, `activations` and `rounds_gradients` can be passed beside one, for
        rules without their own.

    **Returns:**

    The model with each selected weight replaced by a quantised array, such as [`quaxlike.NF4Array`][].

    **Raises:**

    `TypeError` if the scheme lacks an option. `ValueError` if the scheme is unknown, if a pattern matches
    nothing (the message includes close matches), if a rule in a recipe has no effect or an option its scheme
    lacks, if a weight is neither a dense array nor an adapter over one, if a layer is missing from `maxima`
    or its maximum is 0, if a weight has NaN or infinite elements, if its layout is unknown, or if `head=True`
    but the model has no output layer.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        model = ql.quantize(mlp, "nf4", exclude=["layers.2"], double_quant=True)
        ql.quaxify(model)(jnp.ones(64))
        ```

    Schemes and their names are the same as in bitsandbytes.
    """
    options: Any = {
        "where": where, "exclude": exclude, "layout": layout, "head": head,
        "activations": activations, "rounds_gradients": rounds_gradients,
    }  # fmt: skip
    chosen = choices_of(model, scheme, **options, **scheme_options)
    if maxima is not None and all(choice.options.get("activations") is None for choice in chosen.values()):
        raise ValueError(f"`maxima` are {_OF_ACTIVATIONS}")

    def quantized(name: str, w: Any) -> Any:
        q = _quantizer(name, chosen[name], maxima)(w)
        return q if calibrate is None else _calibrated(name, w, q, calibrate)

    arrays = named_arrays(model)
    return replace(model, map_arrays(quantized, {name: arrays[name] for name in chosen}))


_OF_ACTIVATIONS = "for products with `activations` in 8 bits."


def quantizers(
    model: PyTree, scheme: str | Recipe = "nf4", **options: Any
) -> dict[str, Callable[[Any], Any]]:
    """Returns a function for each weight, quantising it like `quantize`.

    This is useful for quantising weights one by one, e.g. whilst loading them. `model` can contain
    `jax.ShapeDtypeStruct`s instead of arrays.
    """
    return {name: _quantizer(name, choice) for name, choice in choices_of(model, scheme, **options).items()}


def _quantizer(
    name: str, choice: SchemeOfWeight, maxima: Mapping[str, ArrayLike] | None = None
) -> Callable[[Any], Any]:
    layout, options = require_layout(name, choice.record), dict(choice.options)
    activations, rounds = (options.pop(option, None) for option in ROUNDING)

    def quantized(w: Any) -> Any:
        q = quantize_array(name, w, choice.scheme, layout, **options)
        return on_innermost(lambda q: _with_activations(name, q, activations, maxima, bool(rounds)), q)

    return quantized


def choices_of(
    model: PyTree,
    scheme: str | Recipe,
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    layout: Layouts = None,
    head: bool = False,
    compute: str | None = None,
    activations: str | None = None,
    rounds_gradients: bool = False,
    **scheme_options: Any,
) -> dict[str, SchemeOfWeight]:
    """Returns the scheme chosen by `quantize` for each weight."""
    records = records_of(model, layout)
    # These don't change how weights are stored, so they go with any recipe. Rules can override them.
    of_products = {"compute": compute, "activations": activations, "rounds_gradients": rounds_gradients}
    of_products = {name: value for name, value in of_products.items() if value not in (None, False)}
    if isinstance(scheme, str) and not is_recipe(scheme):
        scheme_options |= of_products
        require_options(require_scheme(scheme), scheme_options)
        chosen = select_matrices(model, records, where, exclude, head)
        rule = where if isinstance(where, str) else "where"
        found = {
            name: SchemeOfWeight(rule, record, scheme, scheme_options) for name, record in chosen.items()
        }
        return _without_rounding_in_convolutions(found)
    given = {"where": where != "all-linear", "head": head, **dict.fromkeys(scheme_options, True)}
    if others := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"A recipe says itself which weights take which scheme, with which options; found {others[0]!r} "
            "beside it. Write a rule for it."
        )
    if isinstance(scheme, str):
        found = choices(model, records, RECIPES[scheme](records), exclude, is_general=True)
    else:
        found = choices(model, records, scheme, exclude)
    return _without_rounding_in_convolutions({
        name: dataclasses.replace(choice, options={**of_products, **choice.options})
        for name, choice in found.items()
    })  # fmt: skip


def _without_rounding_in_convolutions(found: dict[str, SchemeOfWeight]) -> dict[str, SchemeOfWeight]:
    """Leaves `activations` out for convolutions: these always decode their kernel."""
    out = dict[str, SchemeOfWeight]()
    for name, choice in found.items():
        kept = {option: value for option, value in choice.options.items() if option not in ROUNDING}
        layout = choice.record.layout
        is_conv = layout is not None and layout.is_conv and choice.options.get("activations") is not None
        out[name] = dataclasses.replace(choice, options=kept) if is_conv else choice
    if convs := [name for name, choice in out.items() if choice is not found[name]]:
        others = f" and {len(convs) - 3} more" if len(convs) > 3 else ""
        warnings.warn(
            f"`activations` rounds the inputs of products with matrices. {', '.join(convs[:3])}{others} are "
            "kernels of convolutions: they are quantised, but their inputs are not rounded.",
            stacklevel=5,
        )
    return out


@dataclasses.dataclass(frozen=True)
class PlannedRow:
    """A row of a `Plan`: what happens to a single weight."""

    path: str
    rule: str
    """The recipe's rule for this weight."""
    scheme: str
    options: Mapping[str, Any]
    shape: tuple[int, ...]
    dense_bytes: int
    stored_bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A printable preview of `quantize`."""

    rows: Sequence[PlannedRow]

    def __str__(self) -> str:
        lines, by_rule = list[str](), dict[tuple[str, str], list[PlannedRow]]()
        for row in self.rows:
            by_rule.setdefault((row.rule, row.scheme), []).append(row)
        for (rule, scheme), rows in by_rule.items():
            text = scheme_text((scheme, rows[0].options))
            lines += [f"{rule}: {text}: {_bytes(rows)}", *(f"  {row.path}" for row in rows)]
        return "\n".join([*lines, f"total: {_bytes(self.rows)}"])

    __repr__ = __str__


def _bytes(rows: Sequence[PlannedRow]) -> str:
    dense, stored = (sum(getattr(row, name) for row in rows) for name in ("dense_bytes", "stored_bytes"))
    return f"{len(rows)} arrays, {dense:,} bytes to {stored:,}"


def plan(model: PyTree, scheme: str | Recipe = "nf4", **options: Any) -> Plan:
    r"""Previews the effect of [`quaxlike.quantize`][], without computing any arrays.

    This lists the weights selected by each rule, with their sizes before and after, to check whether a recipe
    does what you intended.

    **Arguments:** as [`quaxlike.quantize`][], except for `calibrate` and `maxima`: these don't affect the
    size. `model` can contain `jax.ShapeDtypeStruct`s instead of arrays.

    **Returns:**

    A printable table with attribute `rows`. Each row has a `path`, `rule`, `scheme`, `options`, `shape`,
    `dense_bytes` and `stored_bytes`.

    **Raises:**

    As [`quaxlike.quantize`][].

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(256, 2, 256, depth=2, key=jax.random.key(0))
        options = {"double_quant": True}
        recipe = {r"layers\.0\..*": "q6_k", "all-linear": ("nf4", options)}
        print(ql.quantize.plan(mlp, recipe))
        ```
    """

    def row(name: str, choice: SchemeOfWeight) -> PlannedRow:
        w = eqx.filter_eval_shape(lambda w: w, choice.record.array)
        sizes = [
            sum(leaf.size * leaf.dtype.itemsize for leaf in jtu.tree_leaves(x))
            for x in (w, eqx.filter_eval_shape(_quantizer(name, choice), w))
        ]
        return PlannedRow(name, choice.rule, choice.scheme, choice.options, tuple(w.shape), *sizes)

    return Plan([row(name, choice) for name, choice in choices_of(model, scheme, **options).items()])


# Public as attributes of `quantize`, rather than as top-level functions.
quantize.plan = plan  # pyright: ignore[reportFunctionMemberAccess]
quantize.from_file = from_file  # pyright: ignore[reportFunctionMemberAccess]


def _with_activations(
    name: str, q: Any, activations: str | None, maxima: Mapping[str, ArrayLike] | None, rounds: bool
) -> Any:
    if activations is None:
        if rounds:
            raise ValueError(f"{name}: `rounds_gradients` is {_OF_ACTIVATIONS}")
        return q
    if maxima is not None and name not in maxima:
        raise ValueError(f"maxima has no entry for {name}; it has those for {', '.join(maxima)}.")
    if not isinstance(q, AbstractQuantizedArray):
        raise ValueError(
            f"{name}: products with `activations` are for dense weights; found {type(q).__name__}."
        )
    try:
        limit = None if maxima is None else float(jnp.max(jnp.asarray(maxima[name])))
        return dataclasses.replace(q, activations=activations, input_limit=limit, rounds_gradients=rounds)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _calibrated(name: str, w: Any, q: Any, moments: Mapping[str, ArrayLike | None]) -> Any:
    if name not in moments:
        raise ValueError(
            f"calibrate has no moments for {name}; it has those for {', '.join(moments)}. Pass None for it "
            "to round it to the nearest codes."
        )
    if moments[name] is None:
        return q
    return on_innermost(lambda q: fit(name, innermost(w), q, moments[name]), q)


@checked
def fake_quantize(
    model: PyTree,
    scheme: str | Recipe = "nf4",
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    layout: Layouts = None,
    activations: str | None = None,
    maxima: Mapping[str, ArrayLike] | None = None,
    rounds_gradients: bool = False,
    **scheme_options: Any,
) -> PyTree:
    """Rounds a model's weights like `quantize`, but keeps them dense and trainable.

    This is for quantisation-aware training: call it inside the loss function, and train the weights passed
    in. Gradients ignore the rounding (the straight-through estimator). Otherwise they would be zero almost
    everywhere.

    **Arguments:** as [`quaxlike.quantize`][]. If `activations` is set then inputs are rounded as well, using
    the same estimator.

    **Returns:**

    The model with rounded weights. If `activations` is set then these are Values, so the model must be called
    through [`quaxlike.quaxify`][].

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
    options: Any = {
        "where": where, "exclude": exclude, "layout": layout, "activations": activations,
        "maxima": maxima, "rounds_gradients": rounds_gradients,
    }  # fmt: skip
    quantized = quantize(model, scheme, **options, **scheme_options)
    rounded: dict[int, Any] = {}  # Keyed by `id`, so that tied weights stay tied.

    def estimate(q: Any, w: Any) -> Any:
        if id(w) not in rounded:
            rounded[id(w)] = ste(lambda w: q.materialise() if q.activations is None else q)(w)
        return rounded[id(w)]

    dense = named_arrays(model)
    return replace(model, {
        name: on_innermost(lambda base, w=dense[name]: estimate(base, innermost(w)), q)
        for name, q in named_arrays(quantized).items()
        if isinstance(innermost(q), AbstractQuantizedArray)
    })  # fmt: skip


def is_quantised(model: PyTree) -> bool:
    """Returns whether any weight is quantised, including the bases of adapters."""

    def is_one(x: Any) -> Any:
        return isinstance(x, AbstractQuantizedArray)

    return any(map(is_one, jtu.tree_leaves(model, is_leaf=is_one)))


def scheme_of(text: str | Path) -> str | Recipe:
    """Parses a command-line scheme or recipe: either a name or the path of a recipe file.

    **Raises:** `ValueError` if the name is unknown (the message includes close matches), or if the file is
    invalid.
    """
    return from_file(text) if is_recipe_file(text) else require_scheme(str(text))


def is_recipe(scheme: Any) -> bool:
    """Returns whether this is a recipe rather than a single scheme."""
    return not isinstance(scheme, str) or scheme in RECIPES


def is_recipe_file(text: str | Path) -> bool:
    """Returns whether a command-line option is the path of a recipe file, rather than a name."""
    return Path(text).suffix in RECIPE_FILES


def quantize_array(name: str, w: Any, scheme: str, layout: Layout, **options: Any) -> Any:
    """Quantises a weight in blocks along its inputs.

    For an adapter, this quantises its base; for a block-sparse array, its blocks.
    """
    require_scheme(scheme, recipes=False)
    if _has_parts(w):
        return w.with_base(quantize_array(name, w.w, scheme, layout, **options))
    if isinstance(w, BlockSparseArray):
        # Treat the blocks as a stack of matrices: with shared scales, rows of blocks could not be sliced.
        return w.replace(blocks=quantize_array(name, w.elements, scheme, MATRIX, **options))
    if isinstance(w, AbstractQuantizedArray):
        raise ValueError(
            f"{name} is of type {type(w).__name__} already. Leave it out with `exclude`, or make it dense "
            "with `quaxlike.materialise` before you quantise it again."
        )
    if is_value(w):
        raise ValueError(
            f"{name} is of type {type(w).__name__}; quantize takes dense arrays and adapters over them. "
            "Leave it out with `exclude`."
        )
    _require_finite(name, w)
    order = stored_order(layout, len(w.shape))

    def quantized(w: Any, **options: Any) -> Any:
        try:
            return SCHEMES[scheme](w, **options)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    # The layers of a stack don't share scales. Otherwise large elements in one layer would spoil the others,
    # and neither `vmap` nor scans over them would work.
    options = {"stacked": len(layout.batch_shape(tuple(w.shape)))} | options
    if "axis" in options or order == list(range(len(order))):
        return quantized(w, **options)
    stored = quantized(jnp.transpose(w, order), **options)
    return stored.with_axes([order.index(i) for i in range(len(order))])


def _require_finite(name: str, w: Any) -> None:
    """Raises `ValueError` for non-finite elements: each would spoil the scale of its whole block."""
    if not isinstance(w, Tracer) and (bad := int(jnp.sum(~jnp.isfinite(w)))):
        raise ValueError(
            f"{name} has {bad} of {w.size} elements that are NaN or infinite, which cannot be quantised: all "
            "elements that share a scale with one would be lost. Leave this weight out with `exclude`."
        )


def _has_parts(w: Any) -> bool:
    """Returns whether a leaf is an adapter with parameters besides its base, unlike e.g. `TrainableArray`."""
    return isinstance(w, AdaptedArray) and bool(jtu.tree_leaves(w.with_base(None)))
