"""Native implementations for products on CPUs: which products are supported, and how to call the library.

The library operates on raw bytes, so everything it assumes about shapes and dtypes must be checked here (in
`_why_not`). A missing check results in out-of-bounds reads.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..backends import PARTITIONED, Choice
from ..native.library import Library
from .codecs import Codec
from .nested_scales import NestedScales
from .product import Decode, Leaves, Nibbles, Product
from .reference import contract_columns, contract_rows, with_low_rank

# With at most this many rows of `x`, codes are multiplied as they are unpacked. Beyond that it pays to decode
# a dense tile first.
_MOST_ROWS = 16
# The size in bytes up to which a weight is decoded in one go. Larger ones are tiled, using a compiled loop.
_AT_ONCE = 2**22
_DTYPES = ("float32", "bfloat16")
# The dtypes supported by the library, and its enumerations for the storage of scales and zero points.
_NUMBERS = ("float32", "bfloat16", "float16", "uint8", "int8")
_SCALES = {"float": 0, "integer": 0, "e4m3": 1, "e8m0": 2, "e8m0_half": 3, "nibbles": 4, "nested": 5}
_ZEROS = {None: 0, "points": 1, "plus": 2, "minus": 3}
_LANES = 16


def choose(library: Library, x: Any, *, decode: Decode, product: Product, partitioned: bool) -> Choice | str:
    """Returns a product's native implementation, or why it is not supported."""
    if partitioned:
        return PARTITIONED
    for what, dtype in (("x", x.dtype), ("the result", product.out_dtype)):
        if str(dtype) not in _DTYPES:
            return f"native products take {what} in float32 or bfloat16, not {dtype}"
    if reason := _why_not(decode, product):
        return reason
    few = not product.transpose and math.prod(x.shape[:-1]) <= _MOST_ROWS
    how = "multiplied as they are unpacked" if few else "decoded in tiles for the library's product"
    run = _multiply if few else _decode_and_multiply
    return Choice("native", f"codes are {how}, by {library.instructions}", run)


def choose_rounded(
    library: Library, x: Any, *, decode: Decode, product: Product, partitioned: bool
) -> Choice | str:
    """Returns the native product rounding its inputs to 8 bits, or why it can't be used."""
    choice = choose(library, x, decode=decode, product=product, partitioned=partitioned)
    if isinstance(choice, str):
        return choice
    if not isinstance(decode, Nibbles) and not rounds(decode.codec):
        return f"the values of {decode.codec.name} don't fit into bytes"
    how = "inputs are rounded to 8 bits in blocks of 32, and multiplied by codes as bytes, by"
    return Choice("native", f"{how} {library.rounding}", _multiply_rounded)


def rounds(codec: Codec) -> bool:
    """Returns whether native products can multiply codes of this format by inputs in 8 bits.

    The values themselves must be bytes. Those from a table are looked up in a register, with room for just 16
    of them.
    """
    return codec.bits <= 4 or (codec.bits != 7 and codec.codes in ("integer", "signed"))


def _why_not(decode: Decode, product: Product) -> str | None:
    """Returns why the library cannot decode a format, or `None` if it can."""
    (n, k), block = product.shape, product.block_size
    if not n * k:
        return "the weight has no elements"
    if not isinstance(decode, Nibbles):
        codec = decode.codec
        if codec.bits == 7 or (codec.bits in (5, 6) and codec.codes != "integer"):
            return f"native products take codes of 2 to 6 and 8 bits, not {codec.name}"
        if codec.scales not in _SCALES or len(codec.all_values) != 2**codec.bits:
            return f"native products do not read the scales or the table of {codec.name}"
    elif k % 2:
        return f"rows of {k} codes of 4 bits begin within bytes"
    # If blocks can cross rows: the longest run of codes in a row always sharing a scale.
    run = math.gcd(k, block) if isinstance(decode, Nibbles) else block
    if run < k and run % _LANES:
        return f"native products take blocks of multiples of {_LANES} codes within rows, not of {run}"
    return None


def _call(name: str, out: Any, *first: Any, leaves: Leaves, decode: Decode, product: Product) -> Array:
    """Calls a function from the library with a weight's leaves, and describes their format to it."""
    empty = jnp.zeros(0, jnp.float32)
    form: dict[str, Any] = {"rows": product.shape[0], "block": product.block_size}
    flags = dict.fromkeys(("is_signed", "lookup", "over"), False)
    if isinstance(decode, Nibbles):
        codes, scale, table = leaves
        parts = [codes, table, scale, empty, empty, empty, empty]
        form |= {"bits": 4, "bias": 0, "scales": _SCALES["float"], "group": -1, "zeros": _ZEROS[None]}
        flags |= {"high_first": True, "flat": True}
        if isinstance(scale, NestedScales):
            form |= {"scales": _SCALES["nested"], "group": 256}
            *nested, quant_map = scale.operands()
            parts = [codes, table, *nested, empty, quant_map]
    else:
        codec = decode.codec
        codes, *scales = decode.parts(leaves)
        lookup = codec.codes not in ("integer", "signed")
        table = jnp.asarray(codec.all_values) if lookup or codec.bits <= 4 else empty
        parts = [codes, table, *(empty if scale is None else scale for scale in scales), empty]
        form |= {"bits": codec.bits, "bias": codec.bias, "scales": _SCALES[codec.scales]}
        form |= {"group": -1 if codec.group is None else codec.group, "zeros": _ZEROS[codec.zeros]}
        flags |= {"is_signed": codec.codes == "signed", "lookup": lookup and codec.bits == 8}
        flags |= {"over": codec.over, "high_first": codec.high_first, "flat": False}
    # Cast all other dtypes, rather than support them in the library.
    parts = [part if str(part.dtype) in _NUMBERS else part.astype(jnp.float32) for part in parts]
    form = {key: np.int64(value) for key, value in form.items()}
    return jax.ffi.ffi_call(f"quaxlike_{name}", out)(*first, *parts, **form, **flags)


def _product_by(name: str) -> Callable[..., Array]:
    """Returns the product computed from the codes by a function from the library."""

    @with_low_rank
    def product_of(
        x: Float[Array, "*batch contracted"], leaves: Leaves, *, decode: Decode, product: Product
    ) -> Float[Array, "*batch free"]:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        out = jax.ShapeDtypeStruct((len(rows), product.free), product.out_dtype)
        y = _call(name, out, rows, leaves=leaves, decode=decode, product=product)
        return y.reshape(*x.shape[:-1], product.free)

    return product_of


_multiply, _multiply_rounded = map(_product_by, ("multiply", "multiply_rounded"))


@with_low_rank
def _decode_and_multiply(
    x: Float[Array, "*batch contracted"], leaves: Leaves, *, decode: Decode, product: Product
) -> Float[Array, "*batch free"]:
    n, k = product.shape
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def tile(start: Array | int, count: int) -> list[Array]:
        # Passing `rows` makes decoding depend on `x`, so that XLA cannot decode weights long in advance.
        out = jax.ShapeDtypeStruct((count, k), x.dtype)
        first = rows, jnp.asarray(start, jnp.int32)
        return [_call("decode", out, *first, leaves=leaves, decode=decode, product=product)]

    contract = contract_rows if product.transpose else contract_columns
    y = contract(rows, tile, n, k, stride=1, at_once=_AT_ONCE // x.dtype.itemsize)
    return y.reshape(*x.shape[:-1], product.free).astype(product.out_dtype)
