"""Values that were not passed in: closed over, built in the body, returned by a rule."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import Unitful
from quaxlike.core import compat
from tests.samples import array
from tests.strict import Linear, Strict, product, strict


def test_closed_over():
    x = strict(jnp.arange(3.0))
    for f in (lambda y: lax.add(x, y), lambda y: lax.add(y, x), lambda y: y + x, lambda y: lax.neg(x) + y):
        assert type(ql.quaxify(f)(jnp.ones(3))) is Strict


def test_closed_over_by_control_flow_and_jit():
    x = strict(jnp.arange(3.0))
    jitted = ql.quaxify(lambda y: jax.jit(lambda z: lax.mul(x, z))(y))
    scanned = ql.quaxify(
        lambda y: lax.scan(lambda c, _: (lax.add(c, lax.mul(x, y)), None), jnp.zeros(3), length=2)[0]
    )
    assert type(jitted(jnp.ones(3))) is Strict
    assert type(scanned(jnp.ones(3))) is Strict


_LATE = strict(array(np.arange(3.0)))


@pytest.mark.slow
def test_made_one_array_to_functions_that_take_trees():
    late = lambda: jnp.asarray(_LATE)
    functions = [
        lambda y: lax.associative_scan(lax.add, late()),
        lambda y: lax.cond(y[0] > 0, late, lambda: 1.0 * late()),
        lambda y: lax.fori_loop(0, 2, lambda i, c: c + y, late()),
    ]
    for f, expected in zip(functions, ([0.0, 1.0, 3.0], [0.0, 1.0, 2.0], [2.0, 3.0, 4.0]), strict=True):
        out = ql.quaxify(f)(jnp.ones(3))
        assert type(out) is Strict
        np.testing.assert_array_equal(out.array, np.array(expected))


def _made_outside():
    """Functions that close over a Value, and that JAX traces once."""
    mul = lambda y: _LATE * y
    jitted, checkpointed = jax.jit(mul), jax.checkpoint(mul)
    body = lambda c, _: (c + _LATE, None)
    return {
        "jit": lambda y: jitted(y),
        "jit in jit": jax.jit(lambda y: jitted(y)),
        "checkpoint": lambda y: checkpointed(y),
        "scan": lambda y: lax.scan(body, y, length=2)[0],
        "cond": lambda y: lax.cond(y[0] > 0, mul, jitted, y),
        "grad": lambda y: jax.grad(lambda y: lax.reduce_sum(checkpointed(y), (0,)))(y),
    }


@pytest.mark.quick("cond", "grad", "jit")
@pytest.mark.parametrize("name", _made_outside())
def test_closed_over_by_what_was_traced_at_another_level(name):
    fn, y = _made_outside()[name], jnp.ones(3)
    outs = [
        ql.quaxify(lambda y: fn(y))(y),
        ql.quaxify(lambda y: fn(y))(y),
        jax.jit(ql.quaxify(lambda y: fn(y)))(y),
        ql.quaxify(lambda y: ql.quaxify(lambda y: fn(y))(y))(y),
    ]
    for out in outs:
        assert type(out) is Strict
        np.testing.assert_array_equal(out.array, outs[0].array)


def test_closed_over_by_what_was_traced_within_and_is_called_outside():
    fn = jax.jit(lambda y: _LATE * y)
    ql.quaxify(lambda y: fn(y))(jnp.ones(3))
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"was closed over by a function .* remembers"):
        fn(jnp.ones(3))


def test_held_by_a_module():
    class Model(eqx.Module):
        weight: Any

        def __call__(self, y):
            return self.weight * y

    model = Model(strict(jnp.arange(3.0)))
    assert type(ql.quaxify(model)(jnp.ones(3))) is Strict
    assert type(ql.quaxify(lambda m, y: m(y))(model, jnp.ones(3))) is Strict


def test_built_in_the_body():
    def f(y):
        built = Strict(y)
        return lax.mul(built, y)

    found = ql.quaxify(f)(jnp.arange(3.0))
    np.testing.assert_array_equal(found.array, jnp.arange(3.0) ** 2)


def test_built_in_the_body_from_a_traced_value():
    class Wrapper(ql.ArrayValue):
        inner: Any

        def materialise(self) -> Array:
            raise RuntimeError("refuses")

        def aval(self):
            return jax.typeof(self.inner)

    @ql.register("neg")
    def _(x: Wrapper, **params):
        return Wrapper(ql.quaxify(lax.neg)(x.inner))

    found = ql.quaxify(lambda x: lax.neg(Wrapper(x)))(strict(jnp.arange(3.0)))
    assert type(found) is Wrapper
    assert type(found.inner) is Strict
    np.testing.assert_array_equal(found.inner.array, -jnp.arange(3.0))


def test_returned_without_being_used():
    built = ql.quaxify(lambda x: Strict(jnp.ones(2)))(strict(jnp.ones(2)))
    assert type(built) is Strict


def test_attributes_of_a_traced_operand():
    @ql.quaxify
    def f(x):
        return x.array + 1.0, x.tag, x.shape

    array, tag, shape = f(Strict(jnp.ones(3), "t"))
    np.testing.assert_array_equal(array, 2.0)
    assert (tag, shape) == ("t", (3,))


def test_value_of():
    seen = []
    ql.quaxify(lambda x, y: seen.extend([ql.value_of(x), ql.value_of(y)]))(strict(jnp.ones(2)), 1.0)
    assert type(seen[0]) is Strict
    assert seen[1] == 1.0


_INNER = {
    "jit": lambda f, y: jax.jit(f)(y),
    "jit in vmap": lambda f, y: jax.vmap(jax.jit(f))(jnp.stack([y, y]))[0],
    "vmap in jit": lambda f, y: jax.jit(jax.vmap(f))(jnp.stack([y, y]))[0],
    "scan": lambda f, y: lax.scan(lambda c, y: (c, f(y)), 0.0, jnp.stack([y, y]))[1][0],
    "cond": lambda f, y: lax.cond(y[1] > 0, f, f, y),
    "checkpoint": lambda f, y: jax.checkpoint(f)(y),
    "jvp": lambda f, y: jax.jvp(f, (y,), (y,))[0],
}


@pytest.mark.quick("<lambda>-cond", "mul-scan", "multiply-checkpoint")
@pytest.mark.parametrize("name", _INNER)
@pytest.mark.parametrize("multiply", [jnp.multiply, lax.mul, lambda x, y: x * y])
def test_built_inside_an_inner_transform(name, multiply):
    y = jnp.arange(3.0)
    run = lambda y: _INNER[name](lambda y: multiply(Strict(y), y), y)
    for fn in (run, jax.jit(run)):
        out = ql.quaxify(fn)(y)
        assert type(out) is Strict
        np.testing.assert_array_equal(out.array, y * y)


@pytest.mark.quick("<lambda>-m1-jvp", "<lambda>-m^2_0-checkpoint")
@pytest.mark.parametrize("name", _INNER)
@pytest.mark.parametrize(
    ("operate", "unit"),
    [
        (lambda x, y: x * y, "m^2"),
        (lambda x, y: y * x, "m^2"),
        (lambda x, y: y / x, ""),
        (lambda x, y: x + y, "m"),
        (lambda x, y: x.at[0].add(y[0]) + y, "m"),
    ],
)
def test_operators_of_what_is_built_inside_meet_values_from_outside(name, operate, unit):
    """In the inner transform the Value from outside is a tracer like any other."""
    y = jnp.array([1.0, 2.0, 4.0])
    run = lambda y: _INNER[name](lambda y: operate(Unitful(jnp.full(3, 2.0), "m"), y), y)
    for fn in (run, jax.jit(run)):
        out = ql.quaxify(fn)(Unitful(y, "m"))
        expected = operate(jnp.full(3, 2.0), y)
        np.testing.assert_array_equal(ql.materialise(out / Unitful(1.0, unit)), expected)


def test_an_explicit_quaxify_inside_is_a_level_of_its_own():
    """It dispatches first, as the tutorial orders rules; to it, Values of the outer one are arrays."""
    made, outer = Unitful(2.0, "m"), Unitful(3.0, "m")
    with pytest.raises(TypeError, match=r"\(m, dimensionless\)\. To a `quaxify` inside of another"):
        ql.quaxify(lambda y: ql.quaxify(jnp.add)(made, y))(outer)
    both = ql.quaxify(lambda y: ql.quaxify(jnp.multiply)(made, y))(outer)
    assert both.unit == made.unit
    assert both.array == Unitful(6.0, "m")


@pytest.mark.parametrize("name", _INNER)
def test_closed_over_and_passed_to_a_jitted_function_inside(name):
    x, y = strict(jnp.arange(3.0)), jnp.ones(3)
    for fn in (jnp.multiply, jax.jit(lambda x, y: lax.mul(x, y))):
        out = ql.quaxify(lambda y, fn=fn: _INNER[name](lambda y: fn(x, y), y))(y)
        assert type(out) is Strict
        np.testing.assert_array_equal(out.array, x.array)


def test_derivatives_of_what_is_built_inside():
    class Pair(Linear):
        x: Any
        y: Any

    y = jnp.arange(3.0)
    run = lambda mul: lambda y: jnp.sum(mul(Pair(y, y * y), y))
    by_function, by_primitive = run(jnp.multiply), run(lax.mul)
    forms = jax.grad(by_primitive), jax.jit(jax.grad(by_function)), jax.grad(jax.checkpoint(by_primitive))
    for fn in (*forms, jax.jacfwd(by_function)):
        out = ql.quaxify(fn)(y)
        np.testing.assert_allclose(ql.materialise(out), 2 * y + 3 * y**2)


def test_the_derivative_of_what_is_not_linear_is_dense_under_the_policy():
    f = ql.quaxify(jax.grad(lambda y: jnp.sum(ql.materialise(jnp.multiply(product(y), y)))))
    np.testing.assert_allclose(f(jnp.arange(3.0)), 2 * jnp.arange(3.0))
    with (
        ql.on_materialise("error"),
        pytest.raises(
            ql.MaterialisationError, match=r"derivative of a Value: Product(.|\n)*Use its operators"
        ),
    ):
        f(jnp.arange(3.0))


@pytest.mark.quick("mul-1-of what is not linear", "<lambda>-2-array")
@pytest.mark.parametrize("make", [lambda y: y, product], ids=["array", "of what is not linear"])
@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("multiply", [jnp.multiply, lax.mul, lambda x, y: x * y])
def test_the_derivative_by_a_number_that_is_given_a_unit_inside_has_none(make, paths, multiply):
    def total(y):
        lengths = multiply(Unitful(make(y), "m"), y if paths == 2 else 3 * jnp.ones_like(y))
        return jnp.sum(ql.materialise(lengths / Unitful(1.0, "m")))

    y = jnp.arange(3.0)
    for f in (jax.grad(total), jax.jit(jax.grad(total)), jax.grad(jax.checkpoint(total))):
        out = ql.quaxify(f)(y)
        assert isinstance(out, Array)
        np.testing.assert_allclose(out, 2 * y if paths == 2 else 3.0)


def test_what_was_traced_inside_is_refused_outside():
    """A program's result does not depend on whether it was traced within `quaxify` before."""
    fn = jax.jit(lambda x, y: lax.mul(x, y))
    x, y = strict(jnp.arange(3.0)), jnp.ones(3)
    with pytest.raises(RuntimeError, match="Strict was passed to `mul` outside"):
        fn(x, y)
    assert type(ql.quaxify(lambda y: fn(x, y))(y)) is Strict
    with pytest.raises(RuntimeError, match="Strict was passed to a JAX function outside"):
        fn(x, y)
    assert type(ql.quaxify(lambda y: fn(x, y))(y)) is Strict


def _custom():
    """Functions with a derivative of their own, of which each one uses jax.numpy."""
    by_jvp = jax.custom_jvp(lambda x: jnp.multiply(x, 3.0))
    by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), jnp.multiply(tangents[0], 5.0)))
    by_vjp = jax.custom_vjp(lambda x: jnp.multiply(x, 3.0))
    by_vjp.defvjp(lambda x: (jnp.multiply(x, 3.0), None), lambda _, ct: (jnp.multiply(ct, 5.0),))
    return {"relu6": jax.nn.relu6, "custom_jvp": by_jvp, "custom_vjp": by_vjp}


def _says_that_it_is_cut_off() -> bool:
    """Whether JAX traces a function of a custom derivative under a trace that no outermost one is."""
    seen = []
    fn = jax.custom_jvp(lambda x: (seen.append(compat.current_trace().parent_trace), x)[1])
    fn.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    jax.jit(fn)(1.0)
    return seen[0] is None


@pytest.mark.quick("closed over-relu6", "closed over-custom_vjp", "made-relu6", "made-custom_vjp")
@pytest.mark.parametrize("name", _custom())
@pytest.mark.parametrize("origin", ["closed over", "made"])
def test_functions_with_a_derivative_of_their_own_inside_of_jit(name, origin):
    """JAX traces them under a trace that does not know where it is."""
    if not _says_that_it_is_cut_off():
        pytest.skip("before JAX 0.12 such a function is at the top")
    y, fn = jnp.array([1.0, -2.0, 3.0]), jax.jit(_custom()[name])

    def total(make, y):
        if origin == "made":
            return ql.quaxify(lambda y: jnp.sum(ql.materialise(fn(make(y)))))(y)
        return jnp.sum(ql.materialise(ql.quaxify(lambda: fn(make(y)))()))

    expected = jax.value_and_grad(lambda y: total(lambda y: y, y))(y)
    named = lambda y: NamedArray(y, ("i",))
    for grad in (jax.value_and_grad, lambda f: jax.jit(jax.value_and_grad(jax.jit(f)))):
        found = grad(lambda y: total(named, y))(y)
        np.testing.assert_allclose(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1])
    with pytest.raises((TypeError, RuntimeError), match=r"outside `quaxlike\.quaxify`"):
        jax.jit(lambda y: fn(named(y)))(y)


def test_outside_of_quaxify():
    with pytest.raises(RuntimeError, match=r"Strict was passed to `add` outside .*quaxify"):
        lax.add(strict(jnp.ones(2)), jnp.ones(2))


class TestFilter:
    """What `filter_spec` leaves out is not dispatched on, however it comes."""

    @pytest.mark.parametrize(
        "f",
        [
            lambda x, y: lax.mul(x, y),
            lambda x, y: lax.mul(Strict(y), y),
            lambda x, y: jnp.sum(jax.jit(lax.mul)(x, y)),
        ],
    )
    def test_not_selected(self, f):
        x, y = strict(jnp.arange(3.0)), jnp.ones(3)
        for spec in (False, lambda leaf: False, (False, (False, True), False)):
            with pytest.raises(RuntimeError, match=r"Strict was passed to `\w+` but no `filter_s"):
                ql.quaxify(f, spec)(x, y)

    def test_closed_over(self):
        x = strict(jnp.arange(3.0))
        with pytest.raises(RuntimeError, match="no `filter_spec` selects"):
            ql.quaxify(lambda y: lax.mul(x, y), filter_spec=False)(jnp.ones(3))
        assert type(ql.quaxify(lambda y: lax.mul(x, y), (True, (False,), False))(jnp.ones(3))) is Strict

    def test_a_level_further_out_takes_it(self):
        x, y = strict(jnp.arange(3.0)), jnp.ones(3)
        inner = ql.quaxify(lambda y: lax.mul(x, y), filter_spec=False)
        assert type(ql.quaxify(inner)(y)) is Strict
        assert type(ql.quaxify(lambda z: ql.quaxify(lambda z: lax.mul(z, y))(z), False)(x)) is Strict

    def test_operators_work_as_they_do_outside(self):
        class Own(ql.ArrayOperators, ql.ArrayValue):
            array: Any

            def materialise(self) -> Array:
                return self.array

        x = Own(jnp.arange(3.0))
        np.testing.assert_array_equal(ql.quaxify(lambda x: x * 2.0, False)(x), x * 2.0)


@pytest.mark.slow
def test_concrete_python_control_flow():
    class Scalar(ql.ArrayValue):
        array: Any

        def materialise(self) -> Array:
            return self.array

    @ql.quaxify
    def f(x):
        plain = jnp.ones(3)
        found = [bool(x), int(x), float(x), complex(x), [10, 20, 30, 40][x], np.asarray(x).item()]
        return (plain if plain[0] > 0 and x > 2 else -plain), found, jnp.nonzero(plain)[0]

    out, found, nonzero = f(Scalar(jnp.array(3)))
    np.testing.assert_array_equal(out, 1.0)
    assert found == [True, 3, 3.0, 3 + 0j, 40, 3]
    np.testing.assert_array_equal(nonzero, [0, 1, 2])
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(ql.quaxify(lambda x: bool(x)))(Scalar(jnp.array(3)))
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(ql.quaxify(lambda x: np.asarray(x)))(Scalar(jnp.array(3)))


class _Sum(ql.ArrayValue):
    """Made of two arrays or Values, which its rule uses as arrays."""

    a: Any
    b: Any

    def materialise(self):
        raise ValueError("it refuses")

    def aval(self):
        return jax.core.ShapedArray(self.a.shape, self.a.dtype)


@ql.register("dot_general")
def _(x: _Sum, y: Array, **params):
    return x.a @ y - -x.b @ y


@ql.register("dot_general")
def _(y: Array, x: _Sum, **params):
    return y @ x.a + y @ x.b


@ql.register("neg")
def _(x: _Sum):
    return _Sum(-x.a, -x.b)


@ql.register("mul")
def _(x: _Sum, y: Array):
    return _Sum(x.a * y, x.b * y)


def _of_sums():
    """Programs on a `_Sum` and an array: each takes the product with a `_Sum` of two, which it makes."""
    product = lambda x, y: lax.dot(_Sum(x * 1.0, x), y)
    both = _Sum(_SUM, _SUM)
    jvp = jax.custom_jvp(lambda x, y: lax.dot(x, y))
    jvp.defjvp(lambda primals, tangents: (lax.dot(*primals), lax.dot(primals[0], tangents[1])))
    vjp = jax.custom_vjp(lambda x, y: lax.dot(x, y))
    vjp.defvjp(lambda x, y: (lax.dot(x, y), (x, y)), lambda res, ct: (None, lax.dot(*res) * ct[0]))
    return {
        "made": product,
        "made in jit": lambda x, y: jax.jit(product)(x, y),
        "argument of jit": lambda x, y: jax.jit(lax.dot)(_Sum(x, x), y),
        "made in scan": lambda x, y: lax.scan(lambda c, _: (c, product(x, y)), 0.0, length=2)[1][1],
        "made in grad": lambda x, y: jax.grad(lambda y: product(x, y).sum())(y),
        "made in custom_jvp": lambda x, y: jax.jvp(lambda y: jvp(_Sum(x, x), y), (y,), (y,))[1],
        "closed over": lambda x, y: lax.dot(both, y),
        "closed over by jit": lambda x, y: jax.jit(lambda y: lax.dot(both, y))(y),
        "closed over by checkpoint": lambda x, y: jax.checkpoint(lambda y: lax.dot(both, y))(y),
        "in a backward pass": lambda x, y: jax.grad(lambda y: ql.quaxify(vjp)(both, y).sum())(y),
        "returned by a rule": lambda x, y: lax.dot(_Sum(x, x) * 2.0 * 0.5, y),
    }


_SUM = _Sum(array(np.eye(2)), array(2.0 * np.eye(2)))


@pytest.mark.quick("made in custom_jvp-1", "closed over by jit-2", "returned by a rule-1")
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("name", _of_sums())
def test_a_rule_uses_parts_that_are_values(name, levels):
    y, program = jnp.arange(2.0), _of_sums()[name]
    for _ in range(levels):
        program = ql.quaxify(program)
    expected = {"made in grad": [6.0, 6.0]}.get(name, 6.0 * y)
    for run in (program, jax.jit(program)):
        if name == "in a backward pass":
            np.testing.assert_allclose(run(_SUM, y).shape, (2,))
        else:
            np.testing.assert_array_equal(run(_SUM, y), expected)


def test_outside_of_a_rule_a_value_that_no_level_takes_has_no_operators():
    passed_by = ql.quaxify(lambda x, y: x @ y, lambda x: not isinstance(x, _Sum))
    with pytest.raises(TypeError, match="no `filter_spec` selects it"):
        passed_by(_SUM, jnp.ones(2))
