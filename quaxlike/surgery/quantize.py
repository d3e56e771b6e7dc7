"""`quantize`: replace a model's weights by quantised arrays."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import ArrayLike, PyTree

from .._checked import checked, did_you_mean
from ..arrays.adapted import AdaptedArray, innermost, on_innermost
from ..arrays.layout import Layout
from ..arrays.quantized import (
    CODECS,
    AbstractQuantizedArray,
    BlockArray,
    FP4Array,
    Int4Array,
    Int8Array,
    NF4Array,
)
from ..arrays.sparse import BlockSparseArray
from ..core.values import is_value
from ..implicit import ste
from .calibrate import fit
from .recipes import RECIPE_FILES, RECIPES, Recipe, SchemeOfWeight, choices, from_file, told_scheme
from .records import Layouts, records_of, require_layout
from .select import Where, select_matrices
from .trees import map_arrays, named_arrays, replace
from .weight_axes import MATRIX

_TYPES: dict[str, Callable[..., Any]] = {
    "nf4": NF4Array.quantize,
    "fp4": FP4Array.quantize,
    "int8": Int8Array.quantize,
    "int4": Int4Array.quantize,
}
_SCHEMES = {name: functools.partial(BlockArray.quantize, codec=name) for name in CODECS} | _TYPES


@checked
def quantize(
    model: PyTree,
    scheme: str | Recipe = "nf4",
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    layout: Layouts = None,
    calibrate: Mapping[str, ArrayLike] | None = None,
    activations: str | None = None,
    maxima: Mapping[str, ArrayLike] | None = None,
    rounds_gradients: bool = False,
    head: bool = False,
    **scheme_options: Any,
) -> PyTree:
    """Quantises a model's weights, and leaves everything else unchanged.

    Call the result through [`quaxlike.quaxify`][]. If a weight has an adapter, then its base is quantised.
    Hence a model can be adapted first, with an init that needs dense weights, and quantised afterwards. If a
    weight is block-sparse, then its blocks are quantised. A weight that appears several times in the model
    (the same array object) is quantised once.

    **Arguments:**

    - `model`: any pytree.
    - `scheme`: `"nf4"`, `"fp4"`, `"int8"` or `"int4"`; or a codec for [`quaxlike.BlockArray`][]: `"mxfp4"`,
        `"nvfp4"`, `"fp8"`, `"q4_k"`, `"uint4_block"` … Default: `"nf4"`. This may also be a recipe: a mapping
        from anything that `where` accepts to a scheme, to a pair of a scheme and its options, or to None for
        weights that stay unchanged. A weight follows the first rule that selects it. Recipes with a name are
        `"q4_k_m"`, `"q5_k_m"` and `"mxfp4_moe"`, which follow llama.cpp's presets but leave out embeddings,
        and `"nf4_qlora"`, which is NF4 with nested scales. `quantize.plan` shows the effect of a recipe
        without computing anything; `quantize.from_file` reads one.
    - `where`: which weights, as for [`quaxlike.select`][]. Biases and norms are skipped. Recipes do not need
        this. Default: the weights of all linear layers.
    - `exclude`: layers to leave out: a regular expression for the whole name, or a sequence of names or their
        last components.
    - `layout`: layouts that neither a layer nor a name implies, as for [`quaxlike.layouts`][]. Default: none.
    - `calibrate`: for each weight, the sum of `x xᵀ` over its layer's inputs, from
        [`quaxlike.input_moments`][]. GPTQ then chooses the codes that change the layer's outputs least. For
        llama.cpp's schemes, you may pass the diagonal of this sum instead, as weights for errors in the
        search for scales (llama.cpp's importance matrix). Default: the nearest codes.
    - `activations`: `"int8"` for the scheme `"int8"`, or `"fp8"` for `"fp8"`. A layer then rounds its inputs
        to 8 bits too, with a scale per token, and multiplies codes with codes, for which GPUs have special
        units. Gradients and adapters use the unrounded inputs. Default: inputs are not rounded.
    - `maxima`: with `activations`, the largest magnitude of each layer's inputs, from
        [`quaxlike.input_maxima`][]. All tokens then share one static scale, and larger inputs are clipped.
        Default: one dynamic scale per token.
    - `rounds_gradients`: with `activations`, whether gradients with respect to the inputs use products of
        codes too. Cotangents are then rounded token by token. This supports only reverse mode. Default:
        False.
    - `head`: whether to quantise the output layer (`lm_head`) too, which `"all-linear"` leaves out. If it is
        tied to an embedding, then the embedding is quantised. Default: False.
    - `scheme_options`: passed on to the type's `quantize`: `block_size`, `double_quant`, `axis`, `stacked`,
        `train_scales`, `compute`. Without `axis`, blocks run along the inputs.

    **Returns:**

    The model with each weight replaced by a quantised array, such as [`quaxlike.NF4Array`][].

    **Raises:**

    `ValueError` for an unknown scheme; if a pattern matches nothing (the message lists near misses); if a
    rule of a recipe has no effect; if a weight is neither a dense array nor an adapter over one; if `maxima`
    lacks a layer, or is 0 for a layer; if a weight's layout is unknown; or if `head` is True and the
    model has no output layer.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(64, 2, 64, depth=2, key=jax.random.key(0))
        model = ql.quantize(mlp, "nf4", exclude=["layers.2"], double_quant=True)
        ql.quaxify(model)(jnp.ones(64))
        ```

    The schemes and their names follow bitsandbytes.
    """
    options = {"where": where, "exclude": exclude, "layout": layout, "head": head, **scheme_options}
    chosen = quantizers(model, scheme, **options)

    def quantized(name: str, w: Any) -> Any:
        q = chosen[name](w)
        q = on_innermost(lambda q: _with_activations(name, q, activations, maxima, rounds_gradients), q)
        return q if calibrate is None else _calibrated(name, w, q, calibrate)

    arrays = named_arrays(model)
    return replace(model, map_arrays(quantized, {name: arrays[name] for name in chosen}))


def quantizers(
    model: PyTree, scheme: str | Recipe = "nf4", **options: Any
) -> dict[str, Callable[[Any], Any]]:
    """Returns a function per weight that quantises it as `quantize` would. `model` may contain shapes."""
    return {name: _quantizer(name, choice) for name, choice in choices_of(model, scheme, **options).items()}


def _quantizer(name: str, choice: SchemeOfWeight) -> Callable[[Any], Any]:
    layout = require_layout(name, choice.record)
    return lambda w: quantize_array(name, w, choice.scheme, layout, **choice.options)


def choices_of(
    model: PyTree,
    scheme: str | Recipe,
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    layout: Layouts = None,
    head: bool = False,
    **scheme_options: Any,
) -> dict[str, SchemeOfWeight]:
    """Returns the scheme of each weight that `quantize` would choose."""
    records = records_of(model, layout)
    if isinstance(scheme, str) and not is_recipe(scheme):
        chosen = select_matrices(model, records, where, exclude, head)
        rule = where if isinstance(where, str) else "where"
        return {name: SchemeOfWeight(rule, record, scheme, scheme_options) for name, record in chosen.items()}
    given = {"where": where != "all-linear", "head": head, **dict.fromkeys(scheme_options, True)}
    if others := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"A recipe says itself which weights take which scheme, with which options; found {others[0]!r} "
            "beside it. Write a rule for it."
        )
    if isinstance(scheme, str):
        return choices(model, records, RECIPES[scheme](records), exclude, is_general=True)
    return choices(model, records, scheme, exclude)


@dataclasses.dataclass(frozen=True)
class PlannedRow:
    """One weight in a plan of `quantize`."""

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
    """A preview of `quantize`. Prints as text."""

    rows: Sequence[PlannedRow]

    def __str__(self) -> str:
        lines, by_rule = list[str](), dict[tuple[str, str], list[PlannedRow]]()
        for row in self.rows:
            by_rule.setdefault((row.rule, row.scheme), []).append(row)
        for (rule, scheme), rows in by_rule.items():
            told = told_scheme((scheme, rows[0].options))
            lines += [f"{rule}: {told}: {_bytes(rows)}", *(f"  {row.path}" for row in rows)]
        return "\n".join([*lines, f"total: {_bytes(self.rows)}"])

    __repr__ = __str__


def _bytes(rows: Sequence[PlannedRow]) -> str:
    dense, stored = (sum(getattr(row, name) for row in rows) for name in ("dense_bytes", "stored_bytes"))
    return f"{len(rows)} arrays, {dense:,} bytes to {stored:,}"


def plan(model: PyTree, scheme: str | Recipe = "nf4", **options: Any) -> Plan:
    r"""Shows what [`quaxlike.quantize`][] would do: each rule's weights, and sizes before and after.

    No arrays are computed.

    **Arguments:** as for [`quaxlike.quantize`][], without `calibrate`, `activations`, `maxima` and
    `rounds_gradients`, as these do not change the size. `model` may contain `jax.ShapeDtypeStruct`s.

    **Returns:**

    A table with `rows`, each with `path`, `rule`, `scheme`, `options`, `shape`, `dense_bytes` and
    `stored_bytes`. Print this.

    **Raises:**

    As for [`quaxlike.quantize`][].

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


# Users find these as attributes of `quantize`.
quantize.plan = plan  # pyright: ignore[reportFunctionMemberAccess]
quantize.from_file = from_file  # pyright: ignore[reportFunctionMemberAccess]


def _with_activations(
    name: str, q: Any, activations: str | None, maxima: Mapping[str, ArrayLike] | None, rounds: bool
) -> Any:
    if activations is None:
        if maxima is not None or rounds:
            raise ValueError("`maxima` and `rounds_gradients` are for products with `activations` in 8 bits.")
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


def _calibrated(name: str, w: Any, q: Any, moments: Mapping[str, ArrayLike]) -> Any:
    if name not in moments:
        raise ValueError(f"calibrate has no moments for {name}; it has those for {', '.join(moments)}.")
    return on_innermost(lambda q: fit(name, innermost(w), q, moments[name]), q)


@checked
def fake_quantize(
    model: PyTree,
    scheme: str = "nf4",
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] = (),
    layout: Layouts = None,
    activations: str | None = None,
    maxima: Mapping[str, ArrayLike] | None = None,
    rounds_gradients: bool = False,
    **scheme_options: Any,
) -> PyTree:
    """Rounds weights of a model as `quantize` would, but keeps them dense and trainable.

    This is for quantisation-aware training: call it in the loss function, and train the weights you pass
    in. Gradients ignore the rounding (the straight-through estimator).

    **Arguments:** as for [`quaxlike.quantize`][]. With `activations`, inputs are rounded too, with the same
    estimator.

    **Returns:**

    The model with rounded weights. With `activations` they are Values, so call the model through
    [`quaxlike.quaxify`][].

    **Raises:**

    As for [`quaxlike.quantize`][].

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
    rounded: dict[int, Any] = {}  # tied weights stay tied

    def estimate(q: Any, w: Any) -> Any:
        if id(w) not in rounded:
            rounded[id(w)] = ste(lambda w: q.materialise() if activations is None else q)(w)
        return rounded[id(w)]

    dense = named_arrays(model)
    return replace(model, {
        name: on_innermost(lambda base, w=dense[name]: estimate(base, innermost(w)), q)
        for name, q in named_arrays(quantized).items()
        if isinstance(innermost(q), AbstractQuantizedArray)
    })  # fmt: skip


def is_quantised(model: PyTree) -> bool:
    """Returns whether any weight, or the base of any adapter, is quantised."""

    def is_one(x: Any) -> Any:
        return isinstance(x, AbstractQuantizedArray)

    return any(map(is_one, jtu.tree_leaves(model, is_leaf=is_one)))


def scheme_of(text: str | Path) -> str | Recipe:
    """Parses a scheme or recipe as commands take it: a name, or the path of a file with a recipe.

    **Raises:** `ValueError` for an unknown name, with similar names, or a damaged file.
    """
    return from_file(text) if is_recipe_file(text) else require_scheme(str(text))


def is_recipe(scheme: Any) -> bool:
    """Returns whether this is a recipe, which chooses weights itself."""
    return not isinstance(scheme, str) or scheme in RECIPES


def is_recipe_file(text: str | Path) -> bool:
    """Returns whether a command's option is the path of a recipe file, and not a name."""
    return Path(text).suffix in RECIPE_FILES


def require_scheme(name: str, *, recipes: bool = True) -> str:
    """Returns the name if there is such a scheme or recipe.

    **Raises:** `ValueError` otherwise, with similar names.
    """
    if name in _SCHEMES or (recipes and name in RECIPES):
        return name
    hint = did_you_mean(name.lower().replace("-", ""), [*_SCHEMES, *RECIPES], cutoff=0.5)
    schemes = ", ".join([*_TYPES, *(codec for codec in CODECS if codec not in _TYPES)])
    raise ValueError(
        f"quantize has no scheme {name!r}.{hint} The schemes are {schemes}; the recipes are "
        f"{', '.join(RECIPES)}."
    )


def quantize_array(name: str, w: Any, scheme: str, layout: Layout, **options: Any) -> Any:
    """Quantises a weight along its inputs. For an adapter this quantises its base, and for a sparse array its
    blocks."""
    require_scheme(scheme, recipes=False)
    if _has_parts(w):
        return w.with_base(quantize_array(name, w.w, scheme, layout, **options))
    if isinstance(w, BlockSparseArray):
        # Nested scales would span the whole array. With separate ones per block, rows of blocks can be
        # sliced.
        stacked = {"stacked": w.num_batch + 2} if options.get("double_quant") else {}
        return w.replace(blocks=quantize_array(name, w.elements, scheme, MATRIX, **options | stacked))
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
    quantized, order = _SCHEMES[scheme], _stored_order(layout, len(w.shape))
    stacked = len(layout.batch_shape(tuple(w.shape)))
    if stacked and options.get("double_quant"):  # nested scales must not span a stack
        options = {"stacked": stacked} | options
    if "axis" in options or order == list(range(len(order))):
        return quantized(w, **options)
    stored = quantized(jnp.transpose(w, order), **options)
    return stored.with_axes([order.index(i) for i in range(len(order))])


def _has_parts(w: Any) -> bool:
    """Returns whether a leaf is an adapter, and not a weight trained directly."""
    return isinstance(w, AdaptedArray) and bool(jtu.tree_leaves(w.with_base(None)))


def _stored_order(layout: Layout, n: int) -> list[int]:
    """Returns the order of axes with inputs last, so blocks run along them.

    Embeddings are stored by row, because lookups read rows. A convolution's window precedes its
    channels, so the window can be reversed without splitting blocks.
    """
    if layout.kind == "embedding":
        return list(range(n))
    n_in = 1 if layout.is_conv else len(layout.in_axes)
    matrix = [n + axis for axis in (*layout.in_axes[n_in:], *layout.out_axes, *layout.in_axes[:n_in])]
    return [*(i for i in range(n) if i not in matrix), *matrix]
