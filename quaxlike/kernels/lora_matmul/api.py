"""The primitive for matmuls with 4-bit weights and low-rank adapters, which picks its backend."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, Int, UInt8

from ..._checked import checked
from ...primitives import Partitioning
from ..backends import Backend, Choice, bind, first_choice, kernel_primitive
from ..multilinear import accumulator_dtype, dot_general, map_rows, nonzero, precision_for
from ..nf4_matmul import gpu, tpu
from ..nf4_matmul.api import check_weight, check_x, dimensions, local_shape, nf4_matmul_p
from ..nf4_matmul.scales import NestedScales
from ..product import Product
from .reference import lora_matmul_reference, low_rank


@checked
def lora_matmul(
    x: Float[Array, "*batch features"],
    packed: UInt8[Array, " bytes"] | UInt8[Array, "n bytes"],
    absmax: Float32[Array, " blocks"] | Float32[Array, "n blocks"] | NestedScales,
    codebook: ArrayLike,
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    block_size: int,
    scaling: float | Float[Array, ""] = 1.0,
    adapter_index: Int[Array, "..."] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*batch out"]:
    """Computes `x @ W.T + scaling · (x @ a.T) @ b.T` for a 4-bit weight `W` and adapters `a`, `b`.

    The low-rank term is added to the float32 accumulator of the product with `W`: it costs as much as a few
    more columns of `W`, without a pass over the result. Differentiable in everything but the codes.

    With several adapters, each row of `x` uses the one that `adapter_index` selects; all rows are
    computed together, whatever the mixture.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        from quaxlike.kernels import lora_matmul
        from quaxlike.kernels.blockwise import NF4, quantize_codebook

        w = jax.random.normal(jax.random.key(0), (32, 128))
        packed, absmax = quantize_codebook(w, NF4, block_size=64)
        a, b = jnp.ones((3, 8, 128)), jnp.zeros((3, 32, 8))  # three adapters of rank 8
        y = lora_matmul(
            jnp.ones((4, 128)),
            packed,
            absmax,
            NF4,
            a,
            b,
            shape=w.shape,
            block_size=64,
            scaling=2.0,
            adapter_index=jnp.array([0, 2, 2, 1]),
        )
        ```

    **Arguments:**

    - `x`: `(..., in)`.
    - `packed`, `absmax`, `codebook`, `shape`, `block_size`: the weight, of shape `(out, in)`, as in
        [`nf4_matmul`][quaxlike.kernels.nf4_matmul.api.nf4_matmul].
    - `a`: `(rank, in)`, or `(adapters, rank, in)` with `adapter_index`. Converted to the dtype of `x`,
        like `b`.
    - `b`: `(out, rank)`, or `(adapters, out, rank)`.
    - `scaling`: the factor of the low-rank term.
    - `adapter_index`: the adapter of each row, of the leading shape of `x`; rows with a negative index
        use none.
    - `out_dtype`: the dtype of the result; that of `x` if None.

    **Returns:** `(..., out)`.

    **Raises:** `ValueError` if the shapes of the operands are inconsistent.
    """
    codebook = jnp.asarray(codebook, jnp.float32)
    check_weight("lora_matmul", packed, absmax, codebook, shape, block_size)
    check_x("lora_matmul", x, shape, transpose=False)
    _check_adapters(x, a, b, shape, adapter_index)
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    if adapter_index is None:
        a, b = a[None], b[None]
    t = _to_ranks(x, a, adapter_index)
    return bind(
        lora_matmul_p,
        x,
        packed,
        absmax,
        codebook,
        t * jnp.asarray(scaling, x.dtype),
        b,
        product=Product(
            (shape[0], shape[1]), block_size, out_dtype=np.dtype(x.dtype if out_dtype is None else out_dtype)
        ),
    )


def _to_ranks(x: Array, a: Array, index: Array | None) -> Array:
    """`x @ a.T` for each adapter, zero for adapters that a row does not use: (..., adapters, rank)."""
    params = {"precision": precision_for(x.dtype), "preferred_element_type": x.dtype}
    t = dot_general(x, a, (((x.ndim - 1,), (2,)), ((), ())), **params)
    if index is None:
        return t
    return t * jax.nn.one_hot(index, a.shape[0], dtype=x.dtype)[..., None]


def _check_adapters(x: Any, a: Any, b: Any, shape: tuple[int, int], index: Any) -> None:
    n, k = shape
    ndim = 2 if index is None else 3
    if a.ndim != ndim or b.ndim != ndim:
        raise ValueError(
            f"lora_matmul: a and b must have {ndim} axes "
            f"{'without' if index is None else 'with'} adapter_index, got shapes {a.shape}, "
            f"{b.shape}"
        )
    expected = (*a.shape[:-2], n, a.shape[-2])
    if a.shape[-1] != k or b.shape != expected:
        raise ValueError(
            f"lora_matmul: for a weight of shape {shape}, a must be (..., rank, {k}) and b "
            f"(..., {n}, rank), got shapes {a.shape}, {b.shape}"
        )
    if index is not None and index.shape != x.shape[:-1]:
        raise ValueError(
            f"lora_matmul: adapter_index must have the leading shape {x.shape[:-1]} of x, got {index.shape}"
        )


def _choose(
    platform: str,
    x: Any,
    *operands: Any,
    backend: Backend | None = None,
    partitioned: bool = False,
    **params: Any,
) -> Choice:
    # The kernels for the weight itself take the low-rank term as two more operands.
    kernels = {"gpu": functools.partial(gpu.choose, low_rank=operands[-1]), "tpu": tpu.choose}
    return first_choice(
        platform, backend, lora_matmul_reference, kernels, x, partitioned=partitioned, **params
    )


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], **params: Any) -> Any:
    out_dtype = params["product"].out_dtype
    _, packed, absmax, codebook, t, b = primals
    x_dot, _, absmax_dot, codebook_dot, t_dot, b_dot = tangents
    if nonzero(absmax_dot) or codebook_dot is not None:
        return NotImplemented
    terms = []
    if x_dot is not None and t_dot is not None:
        terms.append(lora_matmul_p(x_dot, packed, absmax, codebook, t_dot, b, **params))
    elif x_dot is not None:
        terms.append(nf4_matmul_p(x_dot, packed, absmax, codebook, **params))
    elif t_dot is not None:
        terms.append(low_rank(t_dot, b, out_dtype))
    if b_dot is not None:
        terms.append(low_rank(t, b_dot, out_dtype))
    return sum(terms[1:], start=terms[0]) if terms else None


def _transpose(
    ct: Any,
    x: Any,
    packed: Any,
    absmax: Any,
    codebook: Any,
    t: Any,
    b: Any,
    *,
    product: Product,
    **params: Any,
) -> Any:
    # Linear in x and t together; for products with a tangent of b, the library is used.
    if any(map(ad.is_undefined_primal, (absmax, codebook, b))) or not ad.is_undefined_primal(x):
        return NotImplemented
    to_t = (((ct.ndim - 1,), (1,)), ((), ()))
    precision = precision_for(b.dtype)
    ct_t = lax.dot_general(
        ct.astype(b.dtype), b, to_t, precision=precision, preferred_element_type=t.aval.dtype
    )
    product = product.transposed(np.dtype(x.aval.dtype))
    ct_x = nf4_matmul_p(ct, packed, absmax, codebook, product=product, **params)
    return ct_x, None, None, None, ct_t, None


def _batching(size: int, operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> Any:
    x, *weight, t, b = operands
    x_dim, *weight_dims, t_dim, b_dim = dims
    if b_dim is None or jax.tree.leaves(weight_dims):
        return map_rows(lora_matmul_p, size, operands, dims, params, rows=(0, 4))
    # A batch of adapters on one weight, which is still read only once, for all rows together.
    product, dtype = params.pop("product"), accumulator_dtype(x.dtype)
    multiply = functools.partial(nf4_matmul_p, product=product.of_dtype(dtype), **params)
    y = multiply(x, *weight)[None] if x_dim is None else multiply(jnp.moveaxis(x, x_dim, 0), *weight)
    low = jax.vmap(lambda t, b: low_rank(t, b, dtype), (t_dim, b_dim))(t, b)
    return (y + low).astype(product.out_dtype), 0


def _partitioning(x: Any, packed: Any, absmax: Any, codebook: Any, t: Any, b: Any, **params: Any) -> Any:
    rows, operands, result = dimensions(x, packed, absmax, transpose=False)
    operands = f"{operands}, {' '.join(rows)} adapters rank, adapters n rank"
    sums = () if packed.ndim == 1 else ("k",)
    num_weight = len(jax.tree.leaves((packed, absmax, codebook)))
    return Partitioning(f"{operands} -> {result}", sums, first=(*rows, "n", "k"), shared=(1 + num_weight,))


lora_matmul_p = kernel_primitive(
    "lora_matmul",
    _choose,
    lora_matmul_reference,
    partitioning=_partitioning,
    local=local_shape,
    jvp=_jvp,
    transpose=_transpose,
    batching=_batching,
)
