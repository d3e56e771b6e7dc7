import copy
import dataclasses
import inspect
import pickle
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quaxlike.utils import dataclass, field, lens_field, no_post_init, skip_post_init_if_disabled
from tests.samples import array


@dataclass
class Point:
    x: Any
    y: Any


@dataclass
class Named:
    value: Any
    name: str = field(default="n", static=True)


T = TypeVar("T")


# The standard dataclass


def test_is_a_frozen_dataclass():
    assert dataclasses.is_dataclass(Point)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1, 2).x = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_mutable_on_request():
    @dataclass(frozen=False)
    class Mutable:
        x: Any

    m = Mutable(1.0)
    m.x = 2.0
    assert jax.tree.leaves(m) == [2.0]


def test_options_reach_the_standard_decorator():
    @dataclass(repr=False, match_args=False, kw_only=True, order=True)
    class Options:
        x: int

    assert "Options object" in repr(Options(x=1))
    assert not hasattr(Options, "__match_args__")
    assert Options(x=1) < Options(x=2)
    with pytest.raises(TypeError, match="positional argument"):
        Options(1)  # pyright: ignore[reportCallIssue]


def test_signature_and_doc_are_kept():
    assert str(inspect.signature(Point)) == "(x: Any, y: Any) -> None"


def test_options_are_those_of_the_standard_library():
    """As an editor shows them: by name, with their defaults."""
    ours, stdlib = (inspect.signature(d).parameters for d in (dataclass, dataclasses.dataclass))
    differing = {name for name, p in ours.items() if stdlib[name].default != p.default}
    assert ours.keys() == stdlib.keys()
    assert differing == {"frozen"}
    of_field = inspect.signature(dataclasses.field).parameters
    for made in (field, lens_field):
        found = inspect.signature(made).parameters
        assert found.keys() == of_field.keys() - {"doc"} | {"static"}
        assert all(found[name].default == of_field[name].default for name in found.keys() - {"static"})


def test_repr_and_replace():
    assert repr(Point(1, 2)) == f"{Point.__qualname__}(x=1, y=2)"
    assert dataclasses.replace(Named(1, "a"), value=2) == Named(2, "a")


def test_decorating_twice_changes_nothing():
    before = Point.__init__
    assert dataclass(Point) is Point
    assert dataclass(frozen=False)(Point) is Point
    assert Point.__init__ is before


def test_generic_class():
    @dataclass
    class Box(Generic[T]):
        content: T

    assert jax.tree.map(lambda x: x + 1, Box[int](1)) == Box(2)


def test_an_equinox_module_is_refused():
    with pytest.raises(TypeError, match=r"Layer is an eqx.Module, which is a pytree dataclass already"):

        @dataclass
        class Layer(eqx.Module):
            w: jax.Array


# Pytrees


def test_leaves_paths_and_structure():
    paths = jax.tree_util.tree_leaves_with_path({"p": Point(1, [2, 3])})
    assert [(jax.tree_util.keystr(p), leaf) for p, leaf in paths] == [
        ("['p'].x", 1),
        ("['p'].y[0]", 2),
        ("['p'].y[1]", 3),
    ]
    assert jax.tree.structure(Named(1, "a")) != jax.tree.structure(Named(1, "b"))
    assert jax.tree.structure(Named(1, "a")) == jax.tree.structure(Named(2, "a"))


@pytest.mark.parametrize("obj", [Point(1, None), Named([1, 2]), Point(Named(1), {"a": Point(2, 3)})])
def test_round_trip(obj):
    leaves, structure = jax.tree.flatten(obj)
    assert jax.tree.unflatten(structure, leaves) == obj
    assert hash(structure) == hash(jax.tree.structure(obj))


def test_no_fields():
    @dataclass
    class Empty:
        pass

    assert jax.tree.leaves(Empty()) == []
    assert jax.tree.map(lambda x: x, Empty()) == Empty()


def test_static_only_is_compiled_once_for_each_value():
    traced: list[str] = []

    @jax.jit
    def f(named: Named):
        traced.append(named.name)
        return named.value * 2

    for name in ("a", "b", "a"):
        f(Named(jnp.ones(2), name))
    assert traced == ["a", "b"]


def test_under_transforms():
    p = Point(jnp.arange(3.0), jnp.ones(3))
    loss = lambda p: jnp.sum(p.x**2 * p.y)
    grad = jax.jit(jax.grad(loss))(p)
    assert isinstance(grad, Point)
    np.testing.assert_allclose(grad.x, [0, 2, 4])
    np.testing.assert_allclose(grad.y, [0, 1, 4])
    mapped = jax.vmap(lambda p: Point(p.y, p.x))(p)
    assert mapped == Point(p.y, p.x)
    carried, _ = jax.lax.scan(lambda p, _: (Point(p.x + 1.0, p.y), None), p, None, length=3)
    assert carried == Point(p.x + 3.0, p.y)


def test_inheritance():
    @dataclass
    class Base:
        a: Any
        tag: str = field(static=True)

    @dataclass
    class Child(Base):
        b: Any = 0
        depth: int = field(default=1, static=True)

    child = Child(1, "t", 2, depth=3)
    leaves, structure = jax.tree.flatten(child)
    assert leaves == [1, 2]
    assert jax.tree.unflatten(structure, [5, 6]) == Child(5, "t", 6, depth=3)
    assert jax.tree.leaves(Base(1, "t")) == [1]
    assert Base(1, "t") != Child(1, "t")


def test_slots():
    @dataclass(slots=True)
    class Slotted:
        x: Any
        name: str = field(default="s", static=True)

    s = Slotted(1)
    assert not hasattr(s, "__dict__")
    assert jax.tree.map(lambda x: x + 1, s) == Slotted(2)


def test_unflatten_takes_any_leaves():
    structure = jax.tree.structure(Point(1, 2))
    sentinel = object()
    assert jax.tree.unflatten(structure, [sentinel, None]).x is sentinel


def test_copy_and_pickle():
    p = Point(np.arange(3), Named(1.0, "a"))
    for other in (copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert other == p


# init=False, and __post_init__


@dataclass
class Derived:
    x: Any
    double: Any = field(init=False)
    kind: str = field(init=False, static=True)
    constant: Any = field(default=7, init=False)

    def __post_init__(self):
        object.__setattr__(self, "double", self.x * 2)
        object.__setattr__(self, "kind", type(self.x).__name__)


def test_fields_without_init_are_kept():
    d = Derived(3)
    leaves, structure = jax.tree.flatten(d)
    assert leaves == [3, 6, 7]
    changed = jax.tree.unflatten(structure, [3, 60, 8])
    assert (changed.x, changed.double, changed.constant, changed.kind) == (3, 60, 8, "int")


@pytest.mark.slow
def test_fields_without_init_under_jit_and_grad():
    out = jax.jit(lambda d: jax.tree.map(lambda x: x + 1, d))(Derived(jnp.array(3)))
    assert (int(out.x), int(out.double), int(out.constant)) == (4, 7, 8)
    grad = jax.grad(lambda d: d.double * d.x, allow_int=True)(Derived(jnp.array(3.0)))
    assert (float(grad.x), float(grad.double)) == (6.0, 3.0)


def test_post_init_is_not_run_again():
    runs: list[int] = []

    @dataclass
    class Counted:
        x: Any

        def __post_init__(self):
            runs.append(1)

    c = Counted(jnp.ones(2))
    jax.tree.map(lambda x: x, c)
    copy.copy(jax.tree.unflatten(jax.tree.structure(c), [0]))
    jax.jit(lambda c: c)(c)
    assert runs == [1]


def test_a_field_not_set_is_left_out():
    @dataclass
    class Late:
        x: Any
        y: Any = field(init=False)
        kind: str = field(init=False, static=True)

        @skip_post_init_if_disabled
        def __post_init__(self):
            object.__setattr__(self, "y", self.x)
            object.__setattr__(self, "kind", "late")

    with no_post_init():
        late = Late(1)
    again = jax.tree.map(lambda x: x + 1, late)
    assert again.x == 2
    assert not hasattr(again, "y")
    assert not hasattr(again, "kind")
    assert jax.tree.leaves(Late(1)) == [1, 1]


def test_custom_init():
    @dataclass
    class Custom:
        x: Any
        name: Any = field(static=True)

        def __init__(self, n: int, name: Any = "c"):
            object.__setattr__(self, "x", jnp.arange(n))
            object.__setattr__(self, "name", name)

    assert jax.tree.map(lambda x: x, Custom(3)) == Custom(3)
    assert list(inspect.signature(Custom).parameters) == ["n", "name"]
    with pytest.raises(TypeError, match="static field 'name' of Custom must not hold an array"):
        Custom(3, name=[np.ones(2)])


# Static fields


@pytest.mark.slow
@pytest.mark.parametrize("value", [{"mode": "drop"}, ["a", {"b": {1}}], ({"a": []}, 2)])
def test_static_fields_need_not_be_hashable(value):
    """JAX compares structures by them, no more."""
    named, other = Named(jnp.ones(2), value), Named(jnp.ones(2), copy.deepcopy(value))
    traced = []
    double = jax.jit(lambda x: traced.append(None) or jax.tree.map(lambda leaf: 2 * leaf, x))
    assert double(named) == double(other) == Named(2 * jnp.ones(2), value)
    assert len(traced) == 1
    assert double(Named(jnp.ones(2), "other")).name == "other"
    assert len(traced) == 2
    assert jax.lax.scan(lambda c, _: (c, None), named, length=2)[0] == other
    assert jax.vmap(lambda x: x)(named).name == value
    assert jax.grad(lambda x: x.value.sum())(named).name == value
    with pytest.raises(ValueError, match=r"structure|mismatch"):
        jax.tree.map(jnp.add, named, Named(jnp.ones(2), {"mode": "clip"}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(named)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.ones(2), "an array"),
        (([np.ones(2)],), "tuple with an array in it"),
        ({"a": array(np.ones(1))}, "dict with an array in it"),
    ],
)
def test_arrays_are_no_static_fields(value, found):
    message = rf"static field 'name' of Named must not hold an array.*found {found}.*`static=True`"
    with pytest.raises(TypeError, match=message):
        Named(1, value)
    with pytest.raises(TypeError, match=r"static field 'name' of Named must not hold an array"):
        jax.jit(lambda x: Named(1, x))(1.0)


def test_static_fields_set_after_init_are_checked():
    @dataclass
    class Late:
        x: Any
        tags: Any = field(init=False, static=True)

        def __post_init__(self):
            object.__setattr__(self, "tags", [np.asarray(self.x)])

    with pytest.raises(TypeError, match="static field 'tags' of Late must not hold an array"):
        Late(1)


def test_unhashable_defaults_are_refused_with_the_class():
    with pytest.raises(ValueError, match=r"mutable default .* for field tags is not allowed"):

        @dataclass
        class _:
            tags: Any = field(default=[], static=True)


def test_inherited_static_fields_are_checked_with_the_name_of_the_subclass():
    @dataclass
    class Child(Named):
        more: int = 0

    with pytest.raises(TypeError, match="static field 'name' of Child must not hold an array"):
        Child(1, [jnp.ones(1)])  # pyright: ignore[reportArgumentType]


def test_an_init_that_calls_its_base():
    @dataclass
    class Child(Named):
        tag: Any = field(default=(), static=True)

        def __init__(self):
            super().__init__(1, "n")
            object.__setattr__(self, "tag", ("t",))

    assert Child().tag == ("t",)


def test_metadata_is_kept():
    @dataclass
    class WithMetadata:
        x: int = field(default=1, metadata={"unit": "m"})
        y: int = dataclasses.field(default=1, metadata={"static": True})
        z: int = eqx.field(default=2, static=True)

    assert dataclasses.fields(WithMetadata)[0].metadata == {"unit": "m", "static": False}
    assert jax.tree.leaves(WithMetadata()) == [1]


def test_field_options():
    @dataclass
    class WithOptions:
        a: list[int] = field(default_factory=list)
        b: int = field(default=1, repr=False, compare=False)
        c: int = field(default=2, kw_only=True)

    assert repr(WithOptions([1], 5)) == f"{WithOptions.__qualname__}(a=[1], c=2)"
    assert WithOptions([1], 5) == WithOptions([1], 6)
    assert WithOptions([1], c=1) != WithOptions([1], c=2)


# Equality and hash


def test_equality_with_arrays():
    a = Point(jnp.arange(3), np.ones(2))
    assert a == Point(jnp.arange(3), np.ones(2))
    assert (a == Point(jnp.arange(3), np.ones(2))) is True
    assert a != Point(jnp.arange(3), np.zeros(2))
    assert a != Point(jnp.arange(3), np.ones(3))
    assert a != Point(jnp.arange(3.0), np.ones(2))
    assert a != Point(jnp.arange(3), 1.0)
    assert a != Point([0, 1, 2], np.ones(2))
    assert a != object()


def test_arrays_of_jax_and_numpy_are_equal():
    assert Point(jnp.arange(3, dtype=jnp.int32), 0) == Point(np.arange(3, dtype=np.int32), 0)
    assert Point(np.float32(1), 0) == Point(jnp.float32(1), 0)
    assert hash(Point(np.float32(1), 0)) == hash(Point(jnp.float32(1), 0))


def test_equality_agrees_with_equinox():
    candidates = [jnp.ones(2), jnp.zeros(2), np.ones(2, np.float32), jnp.ones(2, int), 1.0, 1, "a", None]
    for x in candidates:
        for y in candidates:
            assert (Point(x, 0) == Point(y, 0)) == bool(eqx.tree_equal(x, y)), (x, y)


def test_nan_is_not_equal_to_itself():
    assert Point(jnp.array(jnp.nan), 0) != Point(jnp.array(jnp.nan), 0)


def test_equality_of_keys():
    key = jax.random.key(0)
    assert Point(key, 0) == Point(jax.random.key(0), 0)
    assert Point(key, 0) != Point(jax.random.key(1), 0)
    assert hash(Point(key, 0)) == hash(Point(jax.random.key(0), 0))
    jax.jit(lambda: Point(key, 0) == Point(key, 0))()


def test_nested_dataclasses_compare_by_their_own_equality():
    @dataclass
    class Cached:
        x: Any
        cache: Any = field(default=None, compare=False)

    assert Point(Cached(1, "a"), 0) == Point(Cached(1, "b"), 0)
    assert hash(Point(Cached(1, "a"), 0)) == hash(Point(Cached(1, "b"), 0))
    assert Point([Cached(1)], 0) != Point([Cached(2)], 0)


def test_static_fields_are_compared():
    assert Named(1, "a") != Named(1, "b")
    assert hash(Named(1, "a")) != hash(Named(1, "b"))


def test_equality_of_traced_arrays_is_traced():
    equal = jax.jit(lambda x, y: Point(x, 0) == Point(y, 0))
    assert bool(equal(jnp.ones(2), jnp.ones(2))) is True
    assert bool(equal(jnp.ones(2), jnp.zeros(2))) is False
    # What is known without values stays a Python bool.
    jax.jit(lambda x: x if (Point(x, 0) == Point(x, 1)) is False else None)(1.0)


def test_equality_of_nested_traced_ones():
    equal = jax.jit(lambda x, y: Point(Named(x), [Point(y, 0)]) == Point(Named(y), [Point(x, 0)]))
    assert bool(equal(jnp.ones(2), jnp.ones(2))) is True
    assert bool(equal(jnp.ones(2), jnp.zeros(2))) is False


def test_hash_of_traced_arrays_is_an_error():
    with pytest.raises(TypeError, match=r"holds a traced array .*float32"):
        jax.jit(lambda x: hash(Point(x, 0)))(1.0)


def test_as_static_argument_and_in_sets():
    p = Point(jnp.arange(3), "a")
    static = jax.jit(lambda p, x: p.x + x, static_argnums=0)
    np.testing.assert_array_equal(static(p, 1), [1, 2, 3])
    assert len({p, Point(jnp.arange(3), "a"), Point(jnp.arange(4), "a")}) == 2


@pytest.mark.slow
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, float("inf"), 1e-45]), min_size=1, max_size=3))
def test_equal_instances_have_equal_hashes(values):
    p = Point(jnp.array(values, jnp.float32), jnp.array(values, jnp.complex64))
    q = Point(jnp.array([-v if v == 0 else v for v in values], jnp.float32), jnp.array(values, jnp.complex64))
    assert p == q
    assert hash(p) == hash(q)


def test_hash_of_bfloat16_and_bool():
    assert hash(Point(jnp.array(-0.0, jnp.bfloat16), True)) == hash(Point(jnp.array(0.0, jnp.bfloat16), True))
    assert hash(Point(jnp.array([True, False]), 0)) != hash(Point(jnp.array([True, True]), 0))


def test_equality_off_and_by_hand():
    @dataclass(eq=False)
    class ByIdentity:
        x: Any

    @dataclass
    class ByHand:
        x: Any

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    assert ByIdentity(1) != ByIdentity(1)
    assert ByHand(1) == ByHand(2)
    assert hash(ByHand(1)) == 1


def test_mutable_ones_are_not_hashable_unless_told():
    @dataclass(frozen=False)
    class Mutable:
        x: Any

    @dataclass(frozen=False, unsafe_hash=True)
    class Hashable:
        x: Any

    assert Mutable(jnp.ones(2)) == Mutable(jnp.ones(2))
    with pytest.raises(TypeError, match="unhashable type: 'Mutable'"):
        hash(Mutable(1))
    assert hash(Hashable(jnp.ones(2))) == hash(Hashable(jnp.ones(2)))
