"""Parts of Values: metadata that has no leaves, and parts that are missing."""

import collections
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.testing import check_type
from tests.samples import array


class Frame(eqx.Module):
    name: str = eqx.field(static=True)


class System(eqx.Module):
    frames: tuple[Frame, ...]
    options: dict[str, Any]


class Unset(eqx.Module):
    """It allows None for one of its parts."""

    origin: jax.Array | None
    weights: Any = None


class Required(eqx.Module):
    origin: Any


class Pair(NamedTuple):
    first: Any
    second: Any = None


class Refusing(ql.ArrayValue):
    """Refuses to materialise, and has a part that is metadata."""

    array: jax.Array
    part: Any

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self):
        raise RuntimeError("Refusing is no array")


class Dense(Refusing):
    def materialise(self):
        return self.array


class Named(ql.AnnotatedArray):
    """Its metadata is a part without leaves."""

    part: Any


class OnlyStatic(ql.Value):
    name: str = eqx.field(static=True)

    def aval(self):
        return jax.core.ShapedArray((), jnp.float32)

    def materialise(self):
        raise RuntimeError("OnlyStatic is no array")


@ql.register("mul")
def _(x: Refusing, y: jax.Array):
    return type(x)(x.array * y, x.part)


@ql.register("add")
def _(x: Refusing, y: Refusing):
    return type(x)(x.array + y.array, x.part)


METADATA = {
    "module": Frame("earth"),
    "nested modules": System((Frame("a"), Frame("b")), {"deep": [(), {}]}),
    "()": (),
    "{}": {},
    "[]": [],
    "nested containers": {"a": (), "b": [{}, (Frame("c"),)]},
    "OrderedDict": collections.OrderedDict(),
    "named tuple": Pair(()),
    "Value without leaves": OnlyStatic("x"),
    "optional part": Unset(None),
}


def _in_loop(f):
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0]


MODES = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "scan": _in_loop,
    "cond": lambda f: lambda x: lax.cond(jnp.array(True), f, f, x),
    "while": lambda f: lambda x: lax.fori_loop(0, 1, lambda i, x: f(x), x),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.quick(11)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", METADATA.values(), ids=METADATA)
def test_metadata_has_no_leaves(part, mode):
    x = Refusing(jnp.arange(3.0), part)
    assert ql.is_value(x)
    out = ql.quaxify(MODES[mode](lambda x: x * 2.0))(x)
    assert type(out) is Refusing
    assert eqx.tree_equal(out.part, part)
    np.testing.assert_array_equal(out.array, x.array * 2)


@pytest.mark.parametrize("part", [Frame("earth"), {"a": ()}])
class TestOfMetadata:
    def test_closed_over(self, part):
        x = Refusing(jnp.arange(3.0), part)
        for f in (lambda y: lax.mul(x, y), jax.jit(lambda y: lax.mul(x, y))):
            assert type(ql.quaxify(f)(jnp.ones(3))) is Refusing

    def test_vmap(self, part):
        x = Refusing(jnp.ones((2, 3)), part)
        for f in (lambda f: jax.vmap(ql.quaxify(f)), lambda f: ql.quaxify(jax.vmap(f))):
            out = f(lambda x: x * 2.0)(x)
            assert type(out) is Refusing
            np.testing.assert_array_equal(out.array, 2 * np.ones((2, 3)))

    def test_gradient(self, part):
        x = Refusing(jnp.arange(3.0), part)
        found = jax.grad(lambda x: jnp.sum(ql.quaxify(lambda x: x * 2.0)(x).array ** 2))(x)
        assert eqx.tree_equal(found.part, part)
        np.testing.assert_array_equal(found.array, 8 * x.array)

    def test_in_other_values(self, part):
        w = Refusing(jnp.ones((2, 3)), part)
        assert ql.is_value(ql.LoraArray(w, jnp.ones((1, 3)), jnp.ones((2, 1))))
        out = ql.quaxify(jnp.transpose)(Named(jnp.ones((2, 3)), part))
        assert eqx.tree_equal(out, Named(jnp.ones((3, 2)), part))

    @pytest.mark.slow
    def test_check_type(self, part):
        programs = {"double": lambda x: x * 2.0, "scan": _in_loop(lambda x: x * 2.0)}
        assert not check_type(Dense(jnp.arange(3.0), part), programs=programs).failures


class Tuples(Refusing):
    part: tuple[jax.Array | None, ...]


class TestMissing:
    @pytest.mark.parametrize(
        "part",
        [
            None,
            (None,),
            [array(np.ones(2)), None],
            {"a": None},
            {"a": array(np.ones(2)), "b": [None]},
            Pair(None, 1.0),
        ],
        ids=str,
    )
    def test_none(self, part):
        x = Refusing(jnp.ones(3), part)
        assert not ql.is_value(x)
        with pytest.raises(
            ValueError, match=r"Parts of Refusing are missing.*`part` may be None, annotate it"
        ):
            ql.quaxify(lambda: lax.mul(x, 2.0))()

    def test_what_optax_masks(self):
        assert not ql.is_value(Refusing(jnp.ones(3), optax.MaskedNode()))
        assert not ql.is_value(Refusing(jnp.ones(3), {"a": optax.MaskedNode()}))

    def test_none_in_a_module(self):
        assert not ql.is_value(Refusing(jnp.ones(3), Required(None)))
        assert not ql.is_value(Refusing(jnp.ones(3), {"a": Required((None,))}))
        assert ql.is_value(Refusing(jnp.ones(3), Required(())))

    def test_fields_that_allow_none(self):
        assert ql.is_value(Refusing(jnp.ones(3), Unset(jnp.ones(2))))
        assert ql.is_value(Refusing(jnp.ones(3), Pair(jnp.ones(2))))
        assert ql.is_value(Tuples(jnp.ones(3), (None, jnp.ones(2))))

    def test_what_materialises_without_it(self):
        assert ql.is_value(Dense(jnp.ones(3), None))

    @pytest.mark.parametrize(
        "part", [Frame("a"), {"a": array(np.ones(2)), "b": ()}, System((), {"a": array(np.ones(2))})]
    )
    def test_halves(self, part):
        x = Refusing(jnp.ones(3), part)
        spec = jax.tree.map(lambda leaf: leaf.shape == (2,), x)
        for half in eqx.partition(x, spec):
            assert ql.is_value(half) == (not jax.tree.leaves(part) and half.array is not None)
        assert ql.is_value(eqx.combine(*eqx.partition(x, spec)))
