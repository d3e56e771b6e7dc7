"""Types that refuse to materialise, with rules for linear primitives: what loses them raises.

`Strict` has one array leaf, `StrictPair` two (and stands for their sum). `Product` has two as well and is
not linear in them: it stands for their product, and it may be materialised, but only by derivatives.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array

import quaxlike as ql
from quaxlike.testing import refuses


class Linear(ql.ArrayValue):
    """Linear in its leaves, all of the logical shape."""

    linear: ClassVar[bool] = True

    def aval(self) -> jax.core.ShapedArray:
        leaf = jtu.tree_leaves(self)[0]
        return jax.core.ShapedArray(leaf.shape, leaf.dtype)

    def materialise(self) -> Array:
        return self.dense()

    def dense(self) -> Any:
        return sum(jtu.tree_leaves(self)[1:], start=jtu.tree_leaves(self)[0])

    def leading_axis(self):
        return [0] * len(jtu.tree_leaves(self))

    @classmethod
    def promote(cls, array, like):
        first, *rest = [array, *(jnp.zeros_like(array) for _ in jtu.tree_leaves(like)[1:])]
        return jtu.tree_unflatten(jtu.tree_structure(like), [first, *rest])


@refuses
class Strict(Linear):
    array: Any
    tag: str = eqx.field(static=True, default="")


@refuses
class StrictPair(Linear):
    big: Any
    small: Any


def strict(x: Array) -> Strict:
    return Strict(x)


def strict_pair(x: Array) -> StrictPair:
    return StrictPair(0.75 * x, 0.25 * x)


@ql.register(
    [
        "neg",
        "reduce_sum",
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "slice",
        "convert_element_type",
        "cumsum",
        "rev",
        "real",
        "psum",
        "psum_invariant",
        "all_gather",
    ]
)
def _unary(primitive: jexc.Primitive, x: Linear, **params):
    def one(leaf):
        out = primitive.bind(leaf, **params)
        return out[0] if primitive.multiple_results else out

    out = jtu.tree_map(one, x)
    return [out] if primitive.multiple_results else out


@ql.register(["add", "sub", "add_any"])
def _sum(primitive: jexc.Primitive, x: Linear, y: Linear, **params):
    return jtu.tree_map(lambda a, b: primitive.bind(a, b, **params), x, y)


@ql.register(["add", "sub", "add_any"])
def _sum_plain(primitive: jexc.Primitive, x: Linear, y: Array, **params):
    leaves, treedef = jtu.tree_flatten(x)
    return jtu.tree_unflatten(treedef, [primitive.bind(leaves[0], y, **params), *leaves[1:]])


@ql.register(["add", "add_any"])
def _plain_sum(primitive: jexc.Primitive, x: Array, y: Linear, **params):
    return _sum_plain(primitive, y, x, **params)


@ql.register("sub")
def _plain_difference(x: Array, y: Linear, **params):
    return _sum_plain(jax.lax.add_p, jtu.tree_map(jnp.negative, y), x)


@ql.register(["mul", "div"])
def _scale(primitive: jexc.Primitive, x: Linear, y: Array, **params):
    return jtu.tree_map(lambda leaf: primitive.bind(leaf, y, **params), x)


@ql.register("mul")
def _scale_left(primitive: jexc.Primitive, x: Array, y: Linear, **params):
    return jtu.tree_map(lambda leaf: primitive.bind(x, leaf, **params), y)


@ql.register(["gather", "dynamic_slice", "pad"])
def _select(primitive: jexc.Primitive, x: Linear, *rest: Array, **params):
    return jtu.tree_map(lambda leaf: primitive.bind(leaf, *rest, **params), x)


@ql.register("dot_general")
def _contract(primitive: jexc.Primitive, x: Linear, y: Array, **params):
    return jtu.tree_map(lambda leaf: primitive.bind(leaf, y, **params), x)


@ql.register("dot_general")
def _contract_left(primitive: jexc.Primitive, x: Array, y: Linear, **params):
    return jtu.tree_map(lambda leaf: primitive.bind(x, leaf, **params), y)


@ql.register("concatenate")
def _concatenate(primitive: jexc.Primitive, x: Linear, *rest: Linear, **params):
    return jtu.tree_map(lambda *leaves: primitive.bind(*leaves, **params), x, *rest)


@ql.register("select_n")
def _select_n(primitive: jexc.Primitive, which: Array, x: Linear, y: Linear, **params):
    return jtu.tree_map(lambda *leaves: primitive.bind(which, *leaves, **params), x, y)


@ql.register("dynamic_update_slice")
def _update(primitive: jexc.Primitive, x: Linear, y: Linear, *starts: Array, **params):
    return jtu.tree_map(lambda a, b: primitive.bind(a, b, *starts, **params), x, y)


class Product(ql.ArrayValue):
    """The product of its leaves: not linear in them."""

    x: Any
    y: Any

    def materialise(self) -> Array:
        return self.x * self.y

    def dense(self) -> Any:
        return self.x * self.y

    def leading_axis(self):
        return [0, 0]

    @classmethod
    def promote(cls, array, like):
        return cls(array, jnp.ones_like(array))


def product(x: Array) -> Product:
    return Product(2.0 * x, jnp.full_like(x, 0.5))


@ql.register(["broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "rev", "convert_element_type"])
def _move_product(primitive: jexc.Primitive, x: Product, **params):
    return jtu.tree_map(lambda leaf: primitive.bind(leaf, **params), x)


@ql.register(["gather", "dynamic_slice"])
def _select_product(primitive: jexc.Primitive, x: Product, *rest: Array, **params):
    return jtu.tree_map(lambda leaf: primitive.bind(leaf, *rest, **params), x)


@ql.register("neg")
def _neg_product(x: Product, **params):
    return Product(-x.x, x.y)


@ql.register("mul")
def _scale_product(x: Product, y: Array, **params):
    return Product(x.x * y, x.y)


@ql.register("mul")
def _scale_product_left(x: Array, y: Product, **params):
    return Product(y.x * x, y.y)


@ql.register(["add", "sub", "add_any"])
def _add_products(primitive: jexc.Primitive, x: Product, y: Product, **params):
    return Product(primitive.bind(x.x * x.y, y.x * y.y, **params), jnp.ones_like(x.y))


@ql.register("reduce_sum")
def _sum_product(x: Product, **params):
    total = jax.lax.reduce_sum_p.bind(x.x * x.y, **params)
    return Product(total, jnp.ones_like(total))


@ql.register(["add", "sub"])
def _add_to_product(primitive: jexc.Primitive, x: Array, y: Product, **params):
    return Product(primitive.bind(x, y.x * y.y, **params), jnp.ones_like(y.y))


@ql.register(["concatenate"])
def _concatenate_products(primitive: jexc.Primitive, x: Product, *rest: Product, **params):
    return jtu.tree_map(lambda *leaves: primitive.bind(*leaves, **params), x, *rest)


@ql.register("pad")
def _pad_product(x: Product, fill: Array, **params):
    padded = jax.lax.pad_p.bind(x.x * x.y, fill, **params)
    return Product(padded, jnp.ones_like(padded))


@ql.register("dynamic_update_slice")
def _update_product(x: Product, y: Product, *starts: Array, **params):
    out = jax.lax.dynamic_update_slice_p.bind(x.x * x.y, y.x * y.y, *starts, **params)
    return Product(out, jnp.ones_like(out))


@refuses
class Through(ql.ArrayValue):
    """Passes every primitive through to its array by `default`; refuses to materialise."""

    linear: ClassVar[bool] = True
    array: Any

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self) -> Array:
        return self.array

    def leading_axis(self):
        return [0]

    @classmethod
    def promote(cls, array, like):
        return cls(array)

    @staticmethod
    def default(primitive, values, params):
        arrays = [x.array if isinstance(x, Through) else x for x in values]
        cls = next(type(x) for x in values if isinstance(x, Through))
        out = primitive.bind(*arrays, **primitive.get_bind_params(params))
        wrap = lambda x: cls(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return [wrap(x) for x in out] if primitive.multiple_results else wrap(out)
