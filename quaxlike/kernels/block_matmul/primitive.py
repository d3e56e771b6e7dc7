"""Primitives for multiplying by a stored weight, with derivatives and several backends.

Their derivatives are themselves products with the same bytes (see `Product.transposed`), so the backward pass
does not need a dense weight.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ...primitives import DefinedPrimitive, Partitioning
from ..backends import Backend, Choice, bind, first_choice, kernel_primitive
from ..multilinear import accumulator_dtype, check_x, map_rows, nonzero, precision_for, sum_tangents
from ..native.library import library_on
from . import cpu, gpu, tpu
from .nested_scales import NestedScales
from .product import Decode, Nibbles, Product
from .reference import in_eight_bits, tiled, times_adapters, whole

# With at most this many rows of activations, XLA may fuse decoding into the matrix multiplication.
_ROWS_FOR_XLA = 64


def _parted(operands: Sequence[Any], adapters: bool) -> tuple[Sequence[Any], Sequence[Any]]:
    """Splits a primitive's operands into the weight's leaves, and `t` and `b` for the adapters (if any)."""
    return (operands[:-2], operands[-2:]) if adapters else (operands, ())


def _on_operands(product_of: Callable[..., Array], adapters: bool) -> Callable[..., Array]:
    """Converts a function of `x`, leaves, `t` and `b` to one of the primitive's operands."""

    def run(x: Array, *operands: Any, **params: Any) -> Array:
        leaves, low_rank = _parted(operands, adapters)
        return product_of(x, leaves, *low_rank, **params)

    return run


def _reference(x: Array, leaves: Sequence[Any], *low_rank: Array, decode: Decode, product: Product) -> Array:
    if product.compute is not None:
        x = in_eight_bits(x) if product.compute == "int8" else x.astype(jnp.bfloat16)
    return (whole if decode.fuses else tiled)(x, leaves, *low_rank, decode=decode, product=product)


def _choose(
    platform: str,
    x: Any,
    *operands: Any,
    decode: Decode,
    product: Product,
    adapters: bool,
    backend: Backend | None = None,
    partitioned: bool = False,
    **params: Any,
) -> Choice:
    run = functools.partial(_on_operands, adapters=adapters)
    if product.compute == "bfloat16":
        options: Any = {"adapters": adapters, "backend": backend, "partitioned": partitioned, **params}
        return _choose_in_bfloat16(platform, x, *operands, decode=decode, product=product, **options)
    if product.compute is not None:
        return _choose_rounded(platform, x, run, decode, product, backend, partitioned)

    def kernel(name: Backend, platform: str, x: Any, **params: Any) -> Choice | str:
        stored = decode.stored(product, decoded=name == "tpu")
        low_rank = operands[-1] if adapters else None
        choice: Choice | str = "the kernel does not take codes of this format"
        if stored is not None:
            choose = {"gpu": functools.partial(gpu.choose, low_rank=low_rank), "tpu": tpu.choose}[name]
            choice = choose(platform, x, product=stored, partitioned=partitioned)
        nibbles = name == "gpu" and isinstance(decode, Nibbles)
        if isinstance(choice, str) and nibbles and gpu.is_reduced(x, product):
            choice = Choice("gpu", "one fused reduction over the rows of W", gpu.reduced)
        if isinstance(choice, Choice):
            return choice._replace(run=run(functools.partial(_kernel, choice.run, name == "tpu")))
        many = math.prod(x.shape[:-1]) > _ROWS_FOR_XLA and not partitioned
        if name == "gpu" and (many or not decode.fuses):
            decodes = stored is not None and gpu.decodes(platform, x, stored, partitioned=partitioned)
            chunked = functools.partial(gpu.chunked, kernel=decodes)
            return Choice(name, f"decoded for the library's product: {choice}", run(chunked))
        if not decode.fuses:
            return choice
        return Choice(name, f"decoded in the expression of the library's product: {choice}", run(whole))

    kernels: dict[str, Any] = {name: functools.partial(kernel, name) for name in ("gpu", "tpu")}
    kernels["native"] = functools.partial(_native, cpu.choose, run, decode, product)
    reference = tiled if backend or platform == "cpu" or not decode.fuses else whole
    return first_choice(platform, backend, run(reference), kernels, x, partitioned=partitioned)


def _native(
    choose: Any, run: Any, decode: Decode, product: Product, platform: str, x: Any, *, partitioned: bool
) -> Choice | str:
    """Returns the product selected from the native library by `choose`, or why it has none."""
    library = library_on(platform)
    if isinstance(library, str):
        return library
    choice = choose(library, x, decode=decode, product=product, partitioned=partitioned)
    return choice if isinstance(choice, str) else choice._replace(run=run(choice.run))


def _choose_in_bfloat16(
    platform: str, x: Any, *operands: Any, product: Product, adapters: bool, **params: Any
) -> Choice:
    """Chooses the product for inputs in bfloat16, and rounds `x` before it."""
    narrow = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    params["adapters"] = adapters
    choice = _choose(platform, narrow, *operands, product=product.unrounded(), **params)

    def run(x: Array, *operands: Any, product: Product, **params: Any) -> Array:
        leaves, low_rank = _parted(operands, adapters)
        if platform != "cpu":  # where kernels add the adapters' products to the same sums
            low_rank = [factor.astype(jnp.bfloat16) for factor in low_rank]
        x = x.astype(jnp.bfloat16)
        return choice.run(x, *leaves, *low_rank, product=product.unrounded(), **params)

    return choice._replace(reason=f"inputs are rounded to bfloat16; {choice.reason}", run=run)


def _choose_rounded(
    platform: str, x: Any, run: Any, decode: Decode, product: Product, backend: Any, partitioned: bool
) -> Choice:
    """Chooses the product for inputs in 8 bits.

    Only the native product rounds `x`. There is no fallback to the reference, which is slower than not
    rounding at all, but users can ask for it.
    """
    kernels: Any = {"native": functools.partial(_native, cpu.choose_rounded, run, decode, product)}
    choice = first_choice(platform, backend, run(_reference), kernels, x, partitioned=partitioned)
    if choice.backend == "native" or backend == "reference":
        return choice
    raise ValueError(
        f"{decode.name} cannot compute in {product.compute} on platform {platform!r}: {choice.reason}. Only "
        "native products on CPUs do. Leave `compute` out; or take the same values, slowly, within "
        '`kernels.backend("reference")`.'
    )


def _kernel(
    run: Any, decoded: bool, x: Array, leaves: Any, *low_rank: Array, decode: Decode, product: Product
) -> Array:
    """Converts codes and scales to what a kernel supports, and then runs it."""
    *operands, zeros = decode.operands(leaves, decoded=decoded)
    zero_points = {} if zeros is None else {"zeros": zeros}
    stored = decode.stored(product, decoded=decoded)
    return run(x, *operands, *low_rank, product=stored, **zero_points)


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, decode: Decode, **params: Any) -> Any:
    for primal, tangent in zip(primals[1:], tangents[1:], strict=True):
        if nonzero(tangent) and (not decode.linear or isinstance(primal, NestedScales)):
            # Products aren't linear in these scales, so their tangents are derived from the reference.
            return NotImplemented
    params["product"] = params["product"].unrounded()
    return sum_tangents(PRODUCTS[decode.name], primals, tangents, {"decode": decode, **params})


def _transpose(ct: Any, x: Any, *leaves: Any, decode: Decode, product: Product, **params: Any) -> Any:
    # Only the product with `x` is transposed here. Cotangents for scales need decoding, and are obtained from
    # the reference.
    if not ad.is_undefined_primal(x):
        return NotImplemented
    product = product.transposed(np.dtype(x.aval.dtype))
    ct_x = PRODUCTS[decode.name](ct, *leaves, decode=decode, product=product, **params)
    return ct_x, *[None] * len(leaves)


def _batching(
    size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], *, decode: Decode, **params: Any
) -> Any:
    return map_rows(PRODUCTS[decode.name], size, operands, dims, {"decode": decode, **params}, rows=(0,))


def _jvp_with_adapters(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
    x_dot, *leaves_dot, t_dot, b_dot = tangents
    _, *leaves, t, b = primals
    if nonzero(leaves_dot):
        return NotImplemented
    params["product"] = params["product"].unrounded()
    out_dtype, terms = params["product"].out_dtype, []
    # If both `x` and `t` are perturbed, use a single fused product, which only reads the weight once.
    if x_dot is not None and t_dot is not None:
        terms.append(lora_matmul_p(x_dot, *leaves, t_dot, b, **params))
    elif x_dot is not None:
        terms.append(PRODUCTS[params["decode"].name](x_dot, *leaves, **params))
    elif t_dot is not None:
        terms.append(times_adapters(t_dot, b, out_dtype))
    if b_dot is not None:
        terms.append(times_adapters(t, b_dot, out_dtype))
    return sum(terms[1:], start=terms[0]) if terms else None


def _transpose_with_adapters(ct: Any, x: Any, *operands: Any, **params: Any) -> Any:
    # The product is jointly linear in `x` and `t`. Terms for a perturbed `b` don't involve the weight, and
    # simply use `dot_general`.
    leaves, (t, b) = _parted(operands, True)
    if any(map(ad.is_undefined_primal, (*leaves, b))) or not ad.is_undefined_primal(x):
        return NotImplemented
    to_t = (((ct.ndim - 1,), (1,)), ((), ()))
    precision = precision_for(b.dtype)
    ct_t = lax.dot_general(
        ct.astype(b.dtype), b, to_t, precision=precision, preferred_element_type=t.aval.dtype
    )
    return *_transpose(ct, x, *leaves, **params), ct_t, None


def _batching_with_adapters(
    size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any
) -> Any:
    x, *leaves, t, b = operands
    x_dim, *leaf_dims, t_dim, b_dim = dims
    if b_dim is None or jax.tree.leaves(leaf_dims):
        return map_rows(lora_matmul_p, size, operands, dims, params, rows=(0, len(operands) - 2))
    # For a batch of adapters on a single weight, still read that weight only once for all rows.
    product, dtype = params.pop("product"), accumulator_dtype(x.dtype)
    product_of = functools.partial(PRODUCTS[params["decode"].name], product=product.of_dtype(dtype), **params)
    x = x[None] if x_dim is None else jnp.moveaxis(x, x_dim, 0)
    low = jax.vmap(lambda t, b: times_adapters(t, b, dtype), (t_dim, b_dim))(t, b)
    return (product_of(x, *leaves) + low).astype(product.out_dtype), 0


def _partitioning(
    x: Any, *operands: Any, decode: Decode, product: Product, adapters: bool, **params: Any
) -> Partitioning | None:
    leaves, low_rank = _parted(operands, adapters)
    if (found := decode.dimensions(leaves, product)) is None:
        return None
    weight, sums = found
    rows = [f"rows{i}" for i in range(x.ndim - 1)]
    contracted, free = ("n", "k") if product.transpose else ("k", "n")
    names, shared = f"{' '.join([*rows, contracted])}, {weight}", ()
    if low_rank:
        # Flat codes are the same on every device and give all of the outputs, so `b` then has to as well.
        outputs = free if free in re.split(r"[ ,]+", weight) else "outputs"
        names += f", {' '.join(rows)} adapters rank, adapters {outputs} rank"
        shared = (1 + len(jax.tree.leaves(leaves)),)
    # The rows of `x` take precedence. A weight sharded across the same devices is gathered whilst it still
    # consists of codes.
    rule = f"{names} -> {' '.join([*rows, free])}"
    return Partitioning(rule, sums, first=(*rows, "n", "k"), shared=shared)


def _local(x: Any, *leaves: Any, decode: Decode, product: Product, **params: Any) -> dict[str, Any]:
    """Returns the parameters for a device's weight shard."""
    return {"decode": decode, "product": decode.local(leaves, product), **params}


def _result(x: Any, *operands: Any, product: Product, **params: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-1], product.free), product.out_dtype)


def _primitive(name: str, *, adapters: bool = False, divided: bool = True) -> DefinedPrimitive:
    of = functools.partial
    return kernel_primitive(
        name,
        of(_choose, adapters=adapters),
        _on_operands(_reference, adapters),
        result=_result,
        partitioning=of(_partitioning, adapters=adapters) if divided else None,
        local=_local if divided else None,
        jvp=_jvp_with_adapters if adapters else _jvp,
        transpose=_transpose_with_adapters if adapters else _transpose,
        batching=_batching_with_adapters if adapters else _batching,
    )


PRODUCTS = {name: _primitive(name) for name in ("nf4_matmul", "int8_matmul")}
PRODUCTS["block_matmul"] = _primitive("block_matmul", divided=False)
nf4_matmul_p, int8_matmul_p, block_matmul_p = PRODUCTS.values()
lora_matmul_p = _primitive("lora_matmul", adapters=True)


def block_matmul(
    x: Float[Array, "*batch contracted"],
    leaves: Sequence[Any],
    decode: Decode,
    *,
    shape: tuple[int, int],
    block_size: int,
    transpose: bool = False,
    low_rank: Sequence[Array] = (),
    out_dtype: DTypeLike | None = None,
    compute: str | None = None,
) -> Float[Array, "*batch free"]:
    """Computes `x @ W.T`, or `x @ W` if `transpose`, for a weight in any format.

    On a CPU this never materialises `W`, whilst on a GPU it materialises at most 128 MiB at a time. The
    result is differentiable with respect to `x` and `low_rank`, and to all leaves in which `decode` is
    differentiable.

    **Arguments:**

    - `x`: has shape `(..., K)`, or `(..., N)` if `transpose`.
    - `leaves`: the arrays decoded by `decode`: codes, scales, minima.
    - `decode`: decodes the leaves to `W`, and describes their layout to the kernels.
    - `shape`: `W`'s shape `(N, K)`.
    - `block_size`: how many codes share a scale.
    - `transpose`: whether to contract over `N` rather than `K`.
    - `low_rank`: either empty, or (unless `transpose`) `t` from `to_ranks` together with `b`, of shape
        `(adapters, N, rank)`. Their product `t @ b.T` is added before rounding the result.
    - `out_dtype`: the result's dtype; `x.dtype` if None.
    - `compute`: as for `Product`. This must be None if `transpose` is set.

    **Returns:** an array of shape `(..., N)`, or `(..., K)` if `transpose`.

    **Raises:** `ValueError` if `x`'s last axis does not match the contracted axis in `W`.
    """
    primitive = lora_matmul_p if low_rank else PRODUCTS[decode.name]
    check_x(primitive.name, x, shape, transpose)
    leaves = [leaf.with_map() if isinstance(leaf, NestedScales) else leaf for leaf in leaves]
    out_dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
    product = Product((shape[0], shape[1]), block_size, transpose, out_dtype, compute=compute)
    return bind(primitive, x, *leaves, *low_rank, decode=decode, product=product)
