"""Levels of `quaxify` inside of each other, with functions that have derivatives of their own: under every
transform, around them and between them, the program is the same on Values as on their arrays."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import Unitful, dimensionless
from tests.samples import array, covering
from tests.users import Bare, Passing, Rescaled

# The types ----------------------------------------------------------------------------------------


class Units(ql.ArrayValue):
    """Has no dense array: for functions that are made of products and sums."""

    linear = True
    array: Any
    power: int = eqx.field(static=True, default=1)

    def aval(self):
        return jax.typeof(self.array)

    def materialise(self):
        raise ValueError("Refusing to materialise Units")


@ql.register("mul")
def _(x: Units, y: Units):
    return Units(x.array * y.array, x.power + y.power)


@ql.register("mul")
def _(x: Units, y: Array):
    return Units(x.array * y, x.power)


@ql.register("mul")
def _(x: Array, y: Units):
    return Units(x * y.array, y.power)


@ql.register("add")
def _(x: Units, y: Units):
    assert x.power == y.power
    return Units(x.array + y.array, x.power)


@ql.register("cumsum")
def _(x: Units, **params):
    return lax.cumsum_p.bind(x.array, **params)


@ql.register(
    [
        "reduce_sum",
        "broadcast_in_dim",
        "squeeze",
        "reshape",
        "split",
        "transpose",
        "convert_element_type",
        "unstack",
    ]
)
def _(primitive: Primitive, x: Units, **params):
    out = primitive.bind(x.array, **params)
    return [Units(row, x.power) for row in out] if primitive.multiple_results else Units(out, x.power)


X = array([[-1.0, 0.5], [2.0, -0.25]])
Y = array([[0.5, 1.5], [-1.0, 2.0]])

TYPES = {
    "Rescaled": lambda x: Rescaled(0.5 * x),
    "Bare": lambda x: Bare(2.0 * x, jnp.full_like(x, 0.5)),
    "Passing": Passing,
    "LoraArray": lambda x: ql.LoraArray(x - 0.5, 0.5 * jnp.ones((1, 2)), jnp.ones((2, 1))),
    "Unitful": lambda x: Unitful(x, dimensionless),
    "NamedArray of LoraArray": lambda x: NamedArray(TYPES["LoraArray"](x), ("a", "b")),
    "Units": Units,
}


def _dense(x: Any) -> Array:
    """The array, or if the type has none, that of its leaf."""
    x = ql.value_of(x)
    return x.array if isinstance(x, Units) else ql.materialise(x)


# The functions ------------------------------------------------------------------------------------


def _square(x):
    return x * x


by_jvp = jax.custom_jvp(_square)
by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), 3.0 * primals[0] * tangents[0]))

by_vjp = jax.custom_vjp(_square)
by_vjp.defvjp(lambda x: (x * x, x), lambda x, ct: (3.0 * x * ct,))

by_vmap = custom_vmap(_square)
by_vmap.def_vmap(lambda size, batched, x: (-1.0 * (x * x), batched[0]))

FUNCTIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
    "custom_vmap": by_vmap,
}
OF_UNITS = ("custom_jvp", "custom_vjp", "custom_vmap")

# The transforms: each makes another function of `(x, y)` from one. --------------------------------

Function = Any


def _read(g: Function) -> Function:
    """Numbers, also of a type that has no dense array: it may be returned outside of all levels."""

    def read(x: Any, y: Array) -> Any:
        out = g(x, y)
        return _dense(ql.quaxify(lax.cumsum)(out)) if ql.is_value(out) else lax.cumsum(out)

    return read


def _total(g: Function) -> Function:
    return lambda x, y: jnp.sum(_read(g)(x, y))


def _rows(g: Function) -> Function:
    return jax.vmap(g, (None, 0), 0)


def _stack(y: Array) -> Array:
    return jnp.stack([y, 0.5 * y])


def _along(g: Function, x: Any, y: Array) -> Any:
    return jax.jvp(functools.partial(_read(g), x), (y,), (jnp.cos(y),))


def _scan(g: Function) -> Function:
    step = lambda c, row, x: (c + _total(g)(x, row * c), g(x, row))
    return lambda x, y: lax.scan(lambda c, row: step(c, row, x), jnp.ones(()), _stack(y))


def _while(g: Function) -> Function:
    return lambda x, y: lax.fori_loop(0, 2, lambda _, y: 0.5 * y + 0.1 * _read(g)(x, y), y)


def _shape(g: Function) -> Function:
    return lambda x, y: y * jnp.ones(jax.eval_shape(_read(g), x, y).shape)


def _grad(g: Function) -> Function:
    return jax.grad(_total(g), 1)


def _by_value(g: Function) -> Function:
    """The gradient by a number that the Value is multiplied with, wherever it is dispatched on."""

    def at(x: Any, y: Array) -> Any:
        times = ql.quaxify(jnp.multiply) if ql.is_value(x) else jnp.multiply
        return jax.grad(lambda s: _total(g)(times(x, s), y))(jnp.array(1.5))

    return at


def _hessian(g: Function) -> Function:
    return jax.hessian(_total(g), 1)


TRANSFORMS = {
    "eager": lambda g: g,
    "jit": jax.jit,
    "eval_shape": _shape,
    "vmap": lambda g: lambda x, y: _rows(g)(x, _stack(y)),
    "grad": _grad,
    "grad by value": _by_value,
    "jvp": lambda g: lambda x, y: _along(g, x, y),
    "scan": _scan,
    "while": _while,
    "cond": lambda g: lambda x, y: lax.cond(y[0, 0] > 0, g, lambda x, y: g(x, 2.0 * y), x, y),
    "checkpoint": jax.checkpoint,
    "hessian": _hessian,
    "jit of grad": lambda g: jax.jit(_grad(g)),
    "grad of jit": lambda g: _grad(jax.jit(g)),
    "vmap of grad": lambda g: lambda x, y: _rows(_grad(g))(x, _stack(y)),
    "grad of scan": lambda g: _grad(lambda x, y: _scan(_read(g))(x, y)[1]),
    "grad of checkpoint": lambda g: _grad(jax.checkpoint(g)),
    "grad of jit of vmap": lambda g: _grad(jax.jit(lambda x, y: _rows(g)(x, _stack(y)))),
    "jit of vmap": lambda g: jax.jit(lambda x, y: _rows(g)(x, _stack(y))),
    "jvp of grad": lambda g: lambda x, y: _along(_grad(g), x, y),
}

# The levels: their filters, from the innermost on, and where the transform stands: inside of so many. ------

LEVELS = {
    f"{len(filters)} levels{note}, {at} inside": (filters, at)
    for filters, note in [
        ((True,), ""),
        ((True, True), ""),
        ((True, False), ", the inner one dispatches"),
        ((False, True), ", the outer one dispatches"),
        ((True, True, True), ""),
        ((True, False, False), ", the innermost dispatches"),
        ((False, True, False), ", the middle one dispatches"),
    ]
    for at in range(len(filters) + 1)
}


def _program(f: Any, transform: Any, levels: Any, quaxify: Any) -> Function:
    filters, at = levels
    g = lambda x, y: f(x * y)
    for i, spec in enumerate((*filters, None)):
        if i == at:
            g = transform(g)
        if spec is not None:
            g = quaxify(g, spec)
    return g


@functools.cache
def _expected(function: str, transform: str) -> Any:
    return jax.jit(_program(FUNCTIONS[function], TRANSFORMS[transform], ((), 0), None))(X, Y)


# What JAX refuses of arrays as well.
REFUSED = {
    ("custom_vjp", "jvp"),
    ("custom_vjp", "jvp of grad"),
    ("custom_vjp", "hessian"),
    *(("custom_vmap", name) for name in TRANSFORMS if "grad" in name or name == "hessian"),
}


def _functions(type_name: str, transform: str) -> list[str]:
    names = OF_UNITS if type_name == "Units" else FUNCTIONS
    return [name for name in names if (name, transform) not in REFUSED]


@pytest.mark.quick(
    "Rescaled-eager-1 levels, 0 inside", "Passing-grad-3 levels, the middle one dispatches, 0 inside"
)
@pytest.mark.parametrize(("type_name", "transform", "levels"), covering(TYPES, TRANSFORMS, LEVELS))
def test_programs_on_values_are_those_on_arrays(type_name, transform, levels):
    for name in _functions(type_name, transform):
        program = _program(FUNCTIONS[name], TRANSFORMS[transform], LEVELS[levels], ql.quaxify)
        with ql.on_materialise("allow"):
            found = jtu.tree_map(_dense, program(TYPES[type_name](X), Y), is_leaf=ql.is_value)
        same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5, err_msg=name)
        jtu.tree_map(same, found, _expected(name, transform))


@pytest.mark.quick("custom_jvp-<lambda>")
@pytest.mark.parametrize(
    "stage", [jax.jit, jax.checkpoint, lambda f: lambda x: jnp.full(2, jax.eval_shape(f, x).size)]
)
@pytest.mark.parametrize("function", ["relu", "custom_jvp"])
def test_a_function_with_a_derivative_is_staged_in_levels(function, stage):
    """The derivative is tried at each level, and may leave nothing behind at the others."""
    x, f = NamedArray(X[0], ("x",)), FUNCTIONS[function]
    one = ql.quaxify(f)
    two = ql.quaxify(lambda x: one(2.0 * x))
    three = ql.quaxify(lambda x: jax.jit(two)(x) + jax.vmap(two)(x))
    for program in (one, two, three):
        found = stage(program)(x)
        np.testing.assert_allclose(ql.materialise(found), stage(program)(X[0]), rtol=1e-6)


def test_what_one_level_makes_dense_is_a_value_of_another():
    """The array that an inner Value holds is a Value of the outer level, and stays one."""
    inner = ql.quaxify(lambda x: x * x, lambda x: isinstance(x, Rescaled))
    outer = ql.quaxify(lambda x: inner(Rescaled(1.0 * x)), lambda x: not isinstance(x, Rescaled))
    for program in (outer, jax.jit(outer)):
        with ql.on_materialise("allow"):
            out = program(Units(X))
        assert isinstance(out, Units)
        assert out.power == 2
        np.testing.assert_array_equal(out.array, 4.0 * X**2)


class Tripled(ql.ArrayOperators, ql.ArrayValue):
    array: Array

    def materialise(self):
        return 3.0 * self.array


@pytest.mark.quick("custom_vjp-scan", "custom_jvp-jit")
@pytest.mark.parametrize("stage", ["jit", "checkpoint", "scan"])
@pytest.mark.parametrize("function", ["relu", "custom_jvp", "custom_vjp"])
def test_what_a_level_makes_dense_belongs_to_no_level_within(function, stage):
    """The inner level does not dispatch on the part of a Value that the outer one makes dense, although its
    type is among those that the inner one takes."""
    f = FUNCTIONS[function]
    inner = ql.quaxify(f, lambda x: isinstance(x, Tripled))
    outer = ql.quaxify(inner, lambda x: isinstance(x, Rescaled))
    staged = {
        "jit": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
        "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x).sum())),
        "scan": lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (c + f(x).sum(), None), 0.0, None, 2)[0]),
    }[stage]
    with ql.on_materialise("allow"):
        found = staged(outer)(Rescaled(Tripled(X[0])))
    assert isinstance(found, Rescaled)
    assert isinstance(found.array, Tripled)
    expected = 6.0 * staged(f)(6.0 * X[0])
    np.testing.assert_allclose(found.array.array, expected, rtol=1e-5)
