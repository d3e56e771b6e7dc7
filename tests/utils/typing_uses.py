"""Uses of `quaxlike.utils` as type checkers see them.

Checked by basedpyright, and run by `test_typing`. The right uses state their types by
`assert_type`; each wrong use carries the rule that flags it, and one that is not flagged is an error
(`reportUnnecessaryTypeIgnoreComment`).
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=error
# Functions of jax.numpy are partly untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, assert_type, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from quaxlike.utils import (
    HasLensFields,
    HasScatterArgs,
    Lens,
    LensField,
    PyTreeDef,
    ScatterArgs,
    SupportsTreeMatch,
    dataclass,
    enable_post_init,
    field,
    is_traced,
    isin,
    jit,
    kahan_summation,
    key_chain,
    lens_field,
    linearize,
    no_jax_tracing,
    no_post_init,
    non_differentiable,
    sequential_vmap_with_vjp,
    shard_map,
    skip_post_init_if_disabled,
    tree_concat,
    tree_map,
    tree_scatter_set,
    tree_stack,
    tree_structure,
    tree_where_broadcast_last,
    tree_zeros_like,
    vectorize,
)

T = TypeVar("T")


@dataclass
class Point(HasLensFields):
    x: LensField[float]
    y: LensField[Array] = lens_field(default_factory=lambda: jnp.zeros(3))
    name: LensField[str] = lens_field(default="p", static=True)


@dataclass
class Outer(HasLensFields):
    inner: LensField[Point]
    many: LensField[list[Point]] = lens_field(default_factory=list[Point])


@dataclass
class Plain:
    a: Array
    n: int = field(default=1, static=True)
    tags: tuple[str, ...] = field(default=(), kw_only=True, static=True)

    @skip_post_init_if_disabled
    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n must not be negative.")

    @jit(static_argnames="k")
    def times(self, k: int) -> Array:
        return self.a * k


@dataclass(frozen=False, slots=True)
class Mutable(Generic[T]):
    content: T


class Module(HasLensFields, eqx.Module):
    w: LensField[Array]
    size: LensField[int] = lens_field(default=3, static=True)


@dataclass
class Buffer:
    rows: Array

    @property
    def scatter_args(self) -> ScatterArgs:
        return {"mode": "drop"}

    def __tree_match__(self, *others: "Buffer") -> "tuple[Buffer, ...]":
        return (self, *others)


def dataclasses_and_lenses() -> None:
    p = Point(1.0)
    assert_type(p.x, float)
    assert_type(p.y, Array)
    assert_type(Point.x, Lens[Point, float])
    assert_type(Point.x.get(p), float)
    assert_type(Point.x.set(p, 2.0), Point)
    assert_type(Point.x.update(p, lambda x: 2 * x), Point)
    assert_type(Outer.inner.focus(Point.x), Lens[Outer, float])
    assert_type(Outer.inner.focus(lambda inner: inner.name), Lens[Outer, str])
    assert_type(Outer.many.focus(lambda many: many[0].y).get(Outer(p, [p])), Array)
    assert_type(Outer.inner.x.set(Outer(p), 3.0), Outer)
    assert_type(Module.w.get(Module(jnp.ones(2))), Array)
    assert_type(Module.size.set(Module(jnp.ones(2)), 4), Module)

    plain = Plain(jnp.ones(2), 2, tags=("a",))
    assert_type(plain.n, int)
    assert_type(plain.times(3), Array)
    box = Mutable(1)
    assert_type(box, Mutable[int])
    box.content = 2
    with no_post_init(), enable_post_init():
        Plain(jnp.ones(2))


def wrong_dataclasses_and_lenses(p: Point, plain: Plain) -> None:
    Point("1.0")  # pyright: ignore[reportArgumentType]
    Point()  # pyright: ignore[reportCallIssue]
    Point(1.0, z=2)  # pyright: ignore[reportCallIssue]
    p.x = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    plain.n = 2  # pyright: ignore[reportAttributeAccessIssue]
    Plain(jnp.ones(2), 1, ("a",))  # pyright: ignore[reportCallIssue]
    Mutable(1).content = "text"  # pyright: ignore[reportAttributeAccessIssue]
    Point.x.set(p, "2.0")  # pyright: ignore[reportArgumentType]
    Point.x.get(plain)  # pyright: ignore[reportArgumentType]
    Point.x.update(p, lambda x: "text")  # pyright: ignore[reportArgumentType]
    Outer.inner.focus(Module.w)  # pyright: ignore[reportArgumentType]
    Outer.inner.focus(lambda inner: inner.z)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownLambdaType]
    dataclass(frozen="yes")  # pyright: ignore[reportArgumentType]

    @dataclass
    class _Wrong:
        a: int = field(default="text")  # pyright: ignore[reportAssignmentType]
        b: LensField[int] = lens_field(default="text")  # pyright: ignore[reportAssignmentType]

    skip_post_init_if_disabled(lambda: None)  # pyright: ignore[reportArgumentType]


def transforms() -> None:
    @jit
    def double(x: Array) -> Array:
        return 2 * x

    @jit(static_argnames="n", donate_argnums=None)
    def power(x: Array, n: int = 2) -> Array:
        return x**n

    @vectorize(signature="(n)->()", excluded={1})
    def norm(x: Array, order: int = 2) -> Array:
        return jnp.sum(x**order)

    @jit
    def same(x: T) -> T:
        return x

    x = jnp.ones((2, 3))
    assert_type(double(x), Array)
    assert_type(power(x, n=3), Array)
    assert_type(norm(x, order=1), Array)
    assert_type(same({"a": x}), dict[str, Array])
    assert_type(vectorize(double)(x), Array)
    lowered = cast(jax.stages.Wrapped, double).lower(x)
    assert_type(lowered, jax.stages.Lowered)

    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = shard_map(double, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    assert_type(sharded(x), Array)

    def product(a: Array, b: Plain) -> Array:
        return a * b.a

    def with_aux(a: Array) -> tuple[Array, str]:
        return a, "aux"

    out, jvp = linearize(product, x[0], Plain(x[0]))
    assert_type(out, Array)
    assert_type(jvp(x[0], Plain(x[0])), Array)
    assert_type(linearize(with_aux, x, has_aux=True)[2], str)

    sequential = sequential_vmap_with_vjp(product)
    assert_type(sequential(x[0], Plain(x[0])), Array)


def wrong_transforms(x: Array, f: Callable[[Array], Array]) -> None:
    jit(f)("text")  # pyright: ignore[reportArgumentType]
    jit(f)(x, x)  # pyright: ignore[reportCallIssue]
    jit(f, static=True)  # pyright: ignore[reportCallIssue]
    jit(3)  # pyright: ignore[reportArgumentType, reportCallIssue]
    vectorize(f)(1)  # pyright: ignore[reportArgumentType]
    vectorize(f, excluded=1)  # pyright: ignore[reportArgumentType, reportCallIssue]
    shard_map(f)  # pyright: ignore[reportCallIssue]
    shard_map(f, out_specs=None)("text")  # pyright: ignore[reportArgumentType]
    linearize(f, "text")  # pyright: ignore[reportArgumentType]
    linearize(f, x)[1](x, x)  # pyright: ignore[reportCallIssue]
    sequential_vmap_with_vjp(f)("text")  # pyright: ignore[reportArgumentType]
    Plain(x).times("three")  # pyright: ignore[reportArgumentType]


def trees() -> None:
    tree = {"a": jnp.ones(2)}
    assert_type(tree_structure(tree), PyTreeDef[dict[str, Array]])
    assert_type(tree_structure(tree).unflatten([1]), dict[str, Array])
    assert_type(tree_structure(tree).num_leaves, int)
    assert_type(tree_map(jnp.add, tree, tree), dict[str, Array])
    assert_type(tree_stack(tree, tree), dict[str, Array])
    assert_type(tree_concat(Plain(jnp.ones(2)), Plain(jnp.ones(2))), Plain)
    assert_type(tree_zeros_like(tree), dict[str, Array])
    assert_type(tree_where_broadcast_last(jnp.array([True, False]), tree, tree), dict[str, Array])
    args: ScatterArgs = {"mode": "clip", "unique_indices": True}
    assert_type(tree_scatter_set(tree, tree, jnp.array([0, 1]), args), dict[str, Array])
    buffer = Buffer(jnp.ones(2))
    matching: SupportsTreeMatch = buffer
    options: HasScatterArgs = buffer
    assert_type(options.scatter_args, ScatterArgs)
    assert isinstance(matching, Buffer)


def wrong_trees(tree: dict[str, Array], plain: Plain) -> None:
    tree_structure(tree).unflatten(3)  # pyright: ignore[reportArgumentType]
    tree_structure(tree).flatten_up_to([1])  # pyright: ignore[reportArgumentType]
    print(tree_structure(tree).leaves)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType]
    tree_map(tree, jnp.add)  # pyright: ignore[reportArgumentType]
    tree_scatter_set(tree, tree, jnp.array([0]), {"mode": "wrap"})  # pyright: ignore[reportArgumentType]
    tree_scatter_set(tree, tree, jnp.array([0]), {"modes": "drop"})  # pyright: ignore[reportArgumentType]
    _matching: SupportsTreeMatch = plain  # pyright: ignore[reportAssignmentType]
    _options: HasScatterArgs = plain  # pyright: ignore[reportAssignmentType]


def numbers_keys_and_checks() -> None:
    assert_type(isin(jnp.arange(3), [1, 2], 5), Array)
    assert_type(kahan_summation({"a": jnp.ones(2)}), tuple[dict[str, Array], dict[str, Array]])
    assert_type(key_chain(jax.random.key(0), 3), Iterator[Array])
    assert_type(next(key_chain(jax.random.key(0))), Array)
    assert_type(non_differentiable([1.0]), list[float])
    assert_type(is_traced(3), bool)

    @no_jax_tracing
    def save(path: str, *, x: Array) -> int:
        return len(path)

    assert_type(save("a", x=jnp.ones(2)), int)


def wrong_numbers_keys_and_checks(x: Array, guarded: Callable[[int], int]) -> None:
    isin(x, x)  # pyright: ignore[reportCallIssue]
    isin(x, x, 2.5)  # pyright: ignore[reportArgumentType]
    key_chain(x, (2.5,))  # pyright: ignore[reportArgumentType]
    key_chain(3)  # pyright: ignore[reportArgumentType]
    kahan_summation(x, compensation=x)  # pyright: ignore[reportCallIssue]
    no_jax_tracing(guarded)("text")  # pyright: ignore[reportArgumentType]


RIGHT_USES: list[Callable[[], Any]] = [dataclasses_and_lenses, transforms, trees, numbers_keys_and_checks]
