import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given
from hypothesis import strategies as st

from quaxlike.utils import (
    HasLensFields,
    Lens,
    LensField,
    dataclass,
    field,
    lens_field,
    no_post_init,
    skip_post_init_if_disabled,
)

from . import lenses_with_string_annotations as strings

T = TypeVar("T")


@dataclass
class Point(HasLensFields):
    x: LensField[Any]
    y: LensField[Any] = lens_field(default=0.0)
    name: LensField[str] = lens_field(default="p", static=True)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Outer(HasLensFields):
    inner: LensField[Point]
    parts: LensField[Any] = lens_field(default=())


class Module(HasLensFields, eqx.Module):
    w: LensField[Any]
    point: LensField[Point] = lens_field(default=Point(1.0))
    size: LensField[int] = lens_field(default=3, static=True)


# Fields and their lenses


def test_a_lens_on_the_class_and_a_value_on_the_instance():
    p = Point(1.0)
    assert isinstance(Point.x, Lens)
    assert (p.x, p.y, p.name) == (1.0, 0.0, "p")
    assert Point.x.get(p) == 1.0
    assert Point.x.set(p, 5.0) == Point(5.0)
    assert Point.x.update(p, lambda x: x + 1) == Point(2.0)
    assert p == Point(1.0)
    assert repr(Point.x) == "Lens(Point.x)"


def test_of_static_fields():
    p = Point.name.set(Point(1.0), "q")
    assert p.name == "q"
    assert jax.tree.leaves(p) == [1.0, 0.0]
    with pytest.raises(TypeError, match="static field 'name' of Point must not hold an array"):
        Point.name.set(p, jnp.ones(1))  # pyright: ignore[reportArgumentType]


def test_lens_field_options():
    @dataclass
    class WithOptions:
        a: LensField[list[int]] = lens_field(default_factory=list)
        b: LensField[int] = lens_field(default=1, kw_only=True, repr=False, metadata={"unit": "m"})

    o = WithOptions([1], b=2)
    assert repr(o) == f"{WithOptions.__qualname__}(a=[1])"
    assert WithOptions().a == []
    assert dataclasses.fields(WithOptions)[1].metadata == {"unit": "m", "static": False}
    assert WithOptions.b.get(o) == 2


@pytest.mark.parametrize("make", [lambda: field(default=1), lambda: dataclasses.field(default=1), lambda: 1])
def test_defaults_of_any_kind(make):
    @dataclass
    class Mixed(HasLensFields):
        x: LensField[Any] = make()

    assert Mixed().x == 1
    assert Mixed.x.set(Mixed(), 2) == Mixed(2)


def test_a_required_field_stays_required():
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        Point()  # pyright: ignore[reportCallIssue]


def test_without_the_base():
    @dataclass
    class Bare:
        x: LensField[int]

    assert Bare.x.set(Bare(1), 2) == Bare(2)


def test_of_a_standard_dataclass():
    @dataclasses.dataclass
    class Standard(HasLensFields):
        x: LensField[int]
        y: LensField[int] = 2  # pyright: ignore[reportAssignmentType]

    assert Standard.x.set(Standard(1), 5) == Standard(5)
    assert Standard.y.get(Standard(1)) == 2


def test_slots():
    @dataclass(slots=True)
    class Slotted(HasLensFields):
        x: LensField[int]
        y: LensField[int] = lens_field(default=2)

    s = Slotted(1)
    assert not hasattr(s, "__dict__")
    assert (s.x, s.y) == (1, 2)
    assert Slotted.x.set(s, 5) == Slotted(5)
    assert jax.tree.map(lambda x: x + 1, s) == Slotted(2, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.x = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_mutable_slots():
    @dataclass(slots=True, frozen=False)
    class Slotted(HasLensFields):
        x: LensField[int]

    s = Slotted(1)
    s.x = 2
    assert s.x == 2
    del s.x
    with pytest.raises(AttributeError, match="x"):
        _ = s.x


def test_generic_class():
    @dataclass
    class Box(HasLensFields, Generic[T]):
        content: LensField[T]

    assert Box[int].content.set(Box(1), 2) == Box(2)


def test_inheritance():
    @dataclass
    class Child(Point):
        z: LensField[Any] = lens_field(default=9)
        y: Any = 7

    assert repr(Child.x) == "Lens(Child.x)"
    assert Child.x.set(Child(1), 2) == Child(2)
    assert Child(1).y == 7
    assert Child.z.get(Child(1)) == 9


def test_a_subclass_that_annotates_a_lens_anew():
    @dataclass
    class Child(Point):
        x: Any
        y: LensField[Any]

    assert Child(1).y == 0.0, "the default is inherited, as in standard dataclasses"
    assert Child.y.set(Child(1), 2) == Child(1, 2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Child()  # pyright: ignore[reportCallIssue]


def test_a_field_that_is_not_set():
    @dataclass
    class Late(HasLensFields):
        x: LensField[int] = lens_field(init=False)

    with pytest.raises(AttributeError, match="field 'x' of this Late is not set"):
        _ = Late().x
    assert Late.x.set(Late(), 3).x == 3


def test_runtime_type_checkers_see_the_type_of_the_value():
    @beartype
    @dataclasses.dataclass
    class Checked(HasLensFields):
        x: LensField[int]

    assert Checked(1).x == 1
    with pytest.raises(Exception, match="violates type hint"):
        Checked("a")  # pyright: ignore[reportArgumentType]


def test_annotations_that_are_strings():
    p = strings.Point(1, 2, 3)
    for lens in (strings.Point.x, strings.Point.y, strings.Point.z):
        assert isinstance(lens, Lens)
        assert lens.get(lens.set(p, 9)) == 9
    assert strings.Point.plain == 0
    assert strings.Module.x.get(strings.Module(4)) == 4
    local = strings.local_point()
    assert local.x.get(local(5)) == 5


# Setting


def test_set_checks_and_derives_as_construction_does():
    @dataclass
    class Checked(HasLensFields):
        x: LensField[float]
        double: LensField[float] = lens_field(init=False)

        @skip_post_init_if_disabled
        def __post_init__(self):
            if self.x < 0:
                raise ValueError("x must be positive")
            object.__setattr__(self, "double", 2 * self.x)

    c = Checked(1.0)
    assert Checked.x.set(c, 4.0).double == 8.0
    with pytest.raises(ValueError, match="x must be positive"):
        Checked.x.set(c, -1.0)
    with no_post_init():
        assert Checked.x.set(c, -1.0).x == -1.0
    changed = Checked.double.set(c, 5.0)
    assert (changed.x, changed.double) == (1.0, 5.0)


@pytest.mark.parametrize("slots", [False, True])
def test_set_keeps_fields_that_init_does_not_take(slots):
    @dataclass(slots=slots)
    class Cached(HasLensFields):
        x: LensField[float]
        notes: LensField[list[Any]] = lens_field(init=False, default_factory=list)
        count: LensField[int] = lens_field(init=False, default=0)

    c = Cached(1.0)
    assert (c.count, c.notes) == (0, [])
    changed = Cached.x.set(Cached.notes.set(Cached.count.set(c, 5), ["a"]), 2.0)
    assert (changed.x, changed.notes, changed.count) == (2.0, ["a"], 5)


def test_set_keeps_fields_that_were_not_set_at_first():
    @dataclass
    class Cached(HasLensFields):
        x: LensField[float]
        cache: LensField[Any] = lens_field(init=False)

    assert not hasattr(Cached.x.set(Cached(1.0), 2.0), "cache")
    assert Cached.x.set(Cached.cache.set(Cached(1.0), 7), 2.0).cache == 7


def test_set_keeps_fields_of_modules_that_init_does_not_take():
    class Cached(HasLensFields, eqx.Module):
        x: LensField[float]
        cache: LensField[Any] = lens_field(init=False, default=None)

    c = Cached.cache.set(Cached(1.0), 7)
    assert (Cached(1.0).cache, Cached.x.set(c, 2.0).cache) == (None, 7)


def test_a_default_without_init():
    @dataclasses.dataclass
    class Counted(HasLensFields):
        x: LensField[float]
        count: LensField[int] = lens_field(init=False, default=0)  # noqa: RUF009

    c = Counted(1.0)
    assert c.count == 0
    c.count += 1
    assert (c.count, Counted.count.get(c), Counted(1.0).count) == (1, 1, 0)


def test_set_where_init_takes_what_instances_do_not_keep():
    @dataclass
    class Scaled(HasLensFields):
        x: LensField[float]
        by: dataclasses.InitVar[float]
        scaled: LensField[float] = lens_field(init=False)

        def __post_init__(self, by):
            object.__setattr__(self, "scaled", by * self.x)

    s = Scaled(1.0, 3.0)
    with pytest.raises(TypeError, match="cannot set 'x' of Scaled, whose `__init__` also takes 'by'"):
        Scaled.x.set(s, 2.0)
    assert dataclasses.replace(s, x=2.0, by=3.0).scaled == 6.0  # as the message says
    assert Scaled.scaled.set(s, 5.0).scaled == 5.0


def test_set_where_init_is_written_by_hand():
    @dataclass
    class Custom(HasLensFields):
        x: LensField[Any]
        y: LensField[Any]

        def __init__(self, both):
            object.__setattr__(self, "x", both)
            object.__setattr__(self, "y", both)

    c = Custom(1)
    changed = Custom.x.set(c, 2)
    assert (changed.x, changed.y, c.x) == (2, 1, 1)


# Composition


def test_attributes_compose():
    outer = Outer(Point(1.0))
    assert Outer.inner.x.get(outer) == 1.0
    assert Outer.inner.x.set(outer, 2.0) == Outer(Point(2.0))
    assert repr(Outer.inner.x) == "Lens(Outer.inner.x)"


@pytest.mark.parametrize(
    "lens", [Outer.inner.focus(Point.x), Outer.inner.focus(lambda p: p.x), Outer.inner.x], ids=str
)
def test_ways_to_compose_are_the_same(lens):
    assert lens == Outer.inner.x
    assert hash(lens) == hash(Outer.inner.x)
    assert lens.update(Outer(Point(1.0)), lambda x: x + 1) == Outer(Point(2.0))


def test_items_compose():
    outer = Outer(Point(0.0), [1, {"a": (2, Pair(3, 4))}])
    lens = Outer.parts[1]["a"][1].second
    assert lens.get(outer) == 4
    assert lens.set(outer, 5).parts == [1, {"a": (2, Pair(3, 5))}]
    assert Outer.parts[1]["a"][0].set(outer, 9).parts == [1, {"a": (9, Pair(3, 4))}]
    assert Outer.parts[1]["a"][1][0].set(outer, 9).parts == [1, {"a": (2, Pair(9, 4))}]
    assert outer.parts == [1, {"a": (2, Pair(3, 4))}], "the original is as it was"


def test_focus_on_everything():
    p = Point(1.0)
    assert Outer.inner.focus(lambda p: p).get(Outer(p)) is p


def test_focus_refuses_computations():
    with pytest.raises(TypeError, match="only follows attributes and items of its argument, found int"):
        Outer.inner.focus(lambda p: 3)
    with pytest.raises(TypeError, match=r"unsupported operand"):
        Outer.inner.focus(lambda p: p.x + 1)


def test_a_lens_is_no_sequence_and_no_array():
    with pytest.raises(TypeError, match="'Lens' object is not iterable"):
        list(Point.x)  # pyright: ignore[reportArgumentType]
    assert not hasattr(Point.x, "__array__")
    assert not hasattr(Point.x, "_repr_html_")


def test_what_a_lens_cannot_set():
    outer = Outer(Point(jnp.ones(3)))
    with pytest.raises(TypeError, match=r"'shape' of ArrayImpl is not one\. Set what contains it"):
        Outer.inner.x.shape.set(outer, (3,))
    with pytest.raises(TypeError, match=r"item 0 of a ArrayImpl\. For arrays: `lens.update"):
        Outer.inner.x[0].set(outer, 1.0)
    with pytest.raises(TypeError, match="'nothing' of Point is not one"):
        Outer.inner.nothing.set(outer, 1)
    with pytest.raises(AttributeError, match="'Point' object has no attribute 'nothing'"):
        Outer.inner.nothing.more.set(outer, 1)
    with pytest.raises(KeyError, match="b"):
        Outer.parts["b"].set(Outer(Point(1), {"a": 1}), 2)
    with pytest.raises(IndexError, match="index out of range"):
        Outer.parts[1].set(Outer(Point(1), (1,)), 2)


# Laws, with JAX and Equinox


@given(st.integers(), st.integers(), st.integers())
def test_lens_laws(x, v, w):
    o = Outer(Point(x))
    lens = Outer.inner.x
    assert lens.get(lens.set(o, v)) == v
    assert lens.set(o, lens.get(o)) == o
    assert lens.set(lens.set(o, v), w) == lens.set(o, w)


@pytest.mark.slow
def test_under_transforms():
    @jax.jit
    def step(p: Point) -> Point:
        return Point.x.update(p, lambda x: x - 0.5 * jax.grad(lambda x: jnp.sum(x**2))(x))

    np.testing.assert_allclose(step(Point(jnp.ones(2))).x, jnp.zeros(2))
    grad = jax.grad(lambda v, p: jnp.sum(Point.x.set(p, v * 3.0).x))(jnp.ones(2), Point(jnp.ones(2)))
    np.testing.assert_allclose(grad, [3, 3])


def test_of_equinox_modules():
    m = Module(jnp.ones(2))
    assert (m.point, m.size) == (Point(1.0), 3)
    changed = Module.w.update(m, lambda w: 2 * w)
    np.testing.assert_array_equal(changed.w, [2, 2])
    np.testing.assert_array_equal(m.w, [1, 1])
    assert Module.size.set(m, 4).size == 4
    assert Module.point.x.set(m, 7.0).point == Point(7.0)
    assert jax.tree.structure(changed) == jax.tree.structure(m)
    assert len(jax.tree.leaves(m)) == 3


@pytest.mark.slow
def test_of_equinox_modules_with_converters_checks_and_inits():
    class Checked(HasLensFields, eqx.Module):
        w: LensField[Any] = eqx.field(converter=jnp.asarray)

        def __check_init__(self):
            if self.w.ndim != 1:
                raise ValueError("w must be a vector")

    class Custom(HasLensFields, eqx.Module):
        w: LensField[Any]
        layers: LensField[list[eqx.nn.Linear]]

        def __init__(self, key):
            self.w = jnp.ones(2)
            self.layers = [eqx.nn.Linear(2, 2, key=key)]

    checked = Checked.w.set(Checked([1.0]), [2.0, 3.0])
    assert isinstance(checked.w, jax.Array)
    with pytest.raises(ValueError, match="w must be a vector"):
        Checked.w.set(checked, 1.0)

    model = Custom(jax.random.key(0))
    changed = Custom.layers[0].weight.set(model, jnp.zeros((2, 2)))
    expected = eqx.tree_at(lambda m: m.layers[0].weight, model, jnp.zeros((2, 2)))
    assert eqx.tree_equal(changed, expected)


def test_the_order_of_bases_does_not_matter():
    class Other(eqx.Module, HasLensFields):
        w: LensField[Any]

    assert Other.w.set(Other(1), 2).w == 2


def test_of_a_subclass_of_a_module():
    class Child(Module):
        extra: LensField[int] = lens_field(default=1)

    child = Child(jnp.ones(2))
    assert repr(Child.w) == "Lens(Child.w)"
    assert Child.extra.set(child, 5).extra == 5
    assert Child.size.get(child) == 3
