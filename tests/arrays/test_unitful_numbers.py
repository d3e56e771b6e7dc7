"""Numbers without a unit beside quantities: the user's, those of jax.numpy, and guards of divisions."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.unitful import DimensionError, Unit, Unitful, metre, to_astropy, to_pint
from tests.samples import array

from .test_unitful import NUMBERS, X, same

PAIR = Unitful(array([2.0, -1.0]), "m")
GAP = Unitful(array([2.0, jnp.nan, 4.0]), "m")
FIRST = array([True, False, False])
OUTSIDE = array([9])


def at_nine(x, fill):
    return x.at[jnp.array(9)].get(mode="fill", fill_value=fill)


@pytest.mark.quick("3.0-take", "3.0-nan_to_num", "3.0-select_n")
@pytest.mark.parametrize(
    "f",
    {
        "take": lambda x, n: jnp.take(x, OUTSIDE, mode="fill", fill_value=n),
        "take_along_axis": lambda x, n: jnp.take_along_axis(x, OUTSIDE, 0, mode="fill", fill_value=n),
        "at": at_nine,
        "interp": lambda x, n: jnp.interp(x, x, x, right=n),
        "left of interp": lambda x, n: jnp.interp(x, x, x, left=n),
        "nan_to_num": lambda x, n: jnp.nan_to_num(x, nan=n),
        "posinf": lambda x, n: jnp.nan_to_num(x, posinf=n),
        "map_coordinates": lambda x, n: jax.scipy.ndimage.map_coordinates(
            x, [jnp.array([0.0, 7.0])], 1, mode="constant", cval=n
        ),
        "piecewise": lambda x, n: jnp.piecewise(x, [x > 0], [n, lambda x: x]),
        "select": lambda x, n: jnp.select([x > 0], [x], n),
        "where": lambda x, n: jnp.where(x > 0, x, n),
        "where, computed": lambda x, n: jnp.where(x > 0, x, n * x / x),
        "where, a ratio": lambda x, n: jnp.where(x > 0, x, x / x),
        "select_n": lambda x, n: jax.lax.select_n(x > 0, jnp.full(3, n), x),
        "vmap": lambda x, n: jax.vmap(lambda x: jnp.where(x > 0, x, n))(x),
        "scan": lambda x, n: jax.lax.scan(lambda c, x: (c, jnp.where(x > 0, x, n)), 0, x),
        "vmap of cond": lambda x, n: jax.vmap(lambda x: jax.lax.cond(x > 0, lambda: x, lambda: n))(x),
        "max": lambda x, n: jnp.max(x, initial=n, where=FIRST),
        "pad": lambda x, n: jnp.pad(x, 1, constant_values=n),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("number", [3.0, 1e-6])
def test_a_number_of_the_users_beside_a_quantity(f, number, default_promotion):
    name, f = f
    match = "arrays in the same unit|fills with the number|An array without a unit"
    for g in (ql.quaxify(lambda x: f(x, number)), jax.jit(ql.quaxify(lambda x: f(x, number)))):
        with pytest.raises(DimensionError, match=match):
            g(X)
    if "ratio" not in name and "computed" not in name:
        unit = (ql.quaxify(lambda x: f(x, 0.0))(X),) if name != "vmap of cond" else ()
        assert all(getattr(x, "unit", metre) == metre for x in jax.tree.leaves(unit, is_leaf=ql.is_value))


@pytest.mark.slow
def test_a_scalar_ratio_is_computed_and_no_number_that_is_known():
    for x in (2.0 * metre, X):
        with pytest.raises(DimensionError, match=r"found \(dimensionless, m\)"):
            ql.quaxify(lambda x: jnp.where(x > 0, x, x / x))(x)


@pytest.mark.quick("0.5-False", "1.0-False", "1.0-True")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("of_nan", [0, 0.5, 1.0])
def test_the_step_of_heaviside_has_no_unit(jit, of_nan, default_promotion):
    wrap = (lambda f: jax.jit(ql.quaxify(f))) if jit else ql.quaxify
    x = jnp.array([2.0, -1.0, 0.0])
    step = jnp.heaviside(x, of_nan)
    same(wrap(lambda x: jnp.heaviside(x, of_nan))(Unitful(x, "m")), step)
    same(wrap(lambda x: x * jnp.heaviside(x, of_nan))(Unitful(x, "m")), x * step, "m")
    same(wrap(jax.vmap(lambda x: jnp.heaviside(x, of_nan)))(Unitful(x, "m")), step)
    with pytest.raises(DimensionError, match="without a dimension"):
        wrap(lambda x: jnp.heaviside(x, x))(Unitful(x, "m"))


@pytest.mark.quick(13)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.prod(x, where=FIRST),
        jnp.nanprod,
        lambda x: jnp.where(x > 0, x, 1) + x,
        lambda x: jnp.where(x > 0, x, 1).sum(),
        lambda x: jnp.where(x > 0, x, 1) * x + x * x,
        lambda x: jnp.where(x > 0, x, 1) + jnp.where(x > 0, x, 1),
        lambda x: jnp.where(x > 0, x, 1) / x + 1.0,
        lambda x: jnp.exp(jnp.where(x > 0, x, 1) / x),
        lambda x: jnp.sort(jnp.where(x > 0, x, 1)),
        lambda x: jnp.maximum(jnp.where(x > 0, x, 1), x),
        lambda x: jnp.where(x > 0, x, 1) > x,
        lambda x: jnp.where(x > 0, x, jnp.where(x < 0, 1, x)) + x,
        lambda x: jnp.interp(x, x, x, right=1.0) + x,
        lambda x: jnp.where(x > 0, x, 1) @ x,
    ],
)
def test_one_is_no_quantity(f, default_promotion):
    """In `jnp.where` it may guard a division. Anything else tells it from a quantity."""
    for g in (ql.quaxify(f), jax.jit(ql.quaxify(f))):
        with pytest.raises(DimensionError, match=r"found \(.*bare number"):
            g(X)


def test_a_guard_says_that_it_is_one():
    guard = ql.quaxify(lambda x: jnp.where(x > 0, x, 1))(PAIR)
    assert str(guard) == "[2. 1.] m or a bare number"
    assert guard.unit != metre
    assert guard.unit == pickle.loads(pickle.dumps(guard.unit))
    for convert in (to_pint, to_astropy):
        with pytest.raises(DimensionError, match="m or a bare number"):
            convert(guard)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "unit"),
    [
        (lambda x, t: t / jnp.where(x > 0, x, 1), "s/m"),
        (lambda x, t: t / jnp.where(x > 0, x, 1.0) ** 2, "s/m^2"),
        (lambda x, t: t * jnp.where(x > 0, x, jnp.ones_like(t)) ** -1, "s/m"),
        (lambda x, t: t * jax.lax.rsqrt(jnp.where(x > 0, x, 1)), "s m^(-1/2)"),
        (lambda x, t: t / (2 * jnp.abs(-jnp.where(x > 0, x, 1)))[::1], "s/m"),
        (lambda x, t: jnp.where(x > 0, t / jnp.where(x > 0, x, 1), 0), "s/m"),
        (lambda x, t: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0), "m^(1/2)"),
        (lambda x, t: jax.jit(lambda x, one: t / jnp.where(x > 0, x, one))(x, 1.0), "s/m"),
        (
            lambda x, t: jax.lax.cond(True, lambda one: t / jnp.where(x > 0, x, one), lambda one: t / x, 1.0),
            "s/m",
        ),
        (lambda x, t: jnp.nan_to_num(x), "m"),
        (lambda x, t: jnp.nan_to_num(x, posinf=jnp.inf), "m"),
        (lambda x, t: jnp.where(x > 0, x, jnp.finfo(x.dtype).min), "m"),
        (lambda x, t: jnp.where(x > 0, x, 2.0 * metre), "m"),
    ],
)
def test_guards_of_divisions_and_numbers_that_have_any_unit(f, unit, default_promotion):
    arrays = jnp.array([2.0, -1.0, 0.0]), jnp.array([3.0, 4.0, 5.0])
    expected = (
        np.array(f(*arrays)) if "metre" not in f.__code__.co_names else np.where(arrays[0] > 0, arrays[0], 2)
    )
    quantities = Unitful(arrays[0], "m"), Unitful(arrays[1], "s")
    same(ql.quaxify(f)(*quantities), expected, unit)
    same(jax.jit(ql.quaxify(f))(*quantities), expected, unit)


@pytest.mark.slow
@pytest.mark.parametrize(
    "f", [lambda x: x**2 / jnp.where(x > 0, x, 1), lambda x: 1 / jnp.sqrt(jnp.where(x > 0, x, 1))]
)
def test_gradients_through_guards(f, default_promotion):
    x = jnp.array([2.0, -1.0, 0.0])
    gradient = lambda x: jax.grad(lambda x: f(x).sum())(x)
    found = ql.quaxify(gradient)(Unitful(x, "m"))
    np.testing.assert_allclose(getattr(found, "array", found), gradient(x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_numbers_of_jax_numpys_own_that_fit_any_unit(jit, default_promotion):
    wrap = (lambda f: jax.jit(ql.quaxify(f))) if jit else ql.quaxify
    x, y = jnp.array([3.0, 1e30, 5.0]), jnp.array([4.0, 1e30, 12.0])
    length = Unitful(x, "m"), Unitful(y, "m")
    same(wrap(jnp.hypot)(*length), np.hypot(np.float64(x), np.float64(y)), "m")
    same(wrap(jax.vmap(jnp.hypot))(*length), np.hypot(np.float64(x), np.float64(y)), "m")
    if not getattr(
        jax.config, "jax_custom_jvp3", False
    ):  # there JAX adds zeros, of results that are not used
        slope = wrap(jax.grad(lambda x, y: jnp.hypot(x, y)[0]))(*length)
        same(slope, [0.6, 0, 0])
    with pytest.raises(DimensionError, match=r"found \(m, (s|dimensionless)\)"):
        wrap(jnp.hypot)(length[0], Unitful(y, "s"))
    with pytest.raises(DimensionError, match=r"found \(m, dimensionless\)"):
        wrap(jnp.hypot)(length[0], 3.0)
    data = np.array([1.0, 2.0, 2.5, 7.0], np.float32)
    for bins in (2, 3):
        counts, edges = wrap(lambda x, bins=bins: jnp.histogram(x, bins))(Unitful(data, "m"))
        same(counts, np.histogram(data, bins)[0])
        same(edges, np.histogram(data, bins)[1], "m")
    within = Unitful(jnp.array([0.0, 5.0]), "m")
    same(wrap(lambda x, r: jnp.histogram(x, 2, range=r)[1])(Unitful(data, "m"), within), [0.0, 2.5, 5.0], "m")
    counts, *edges = wrap(lambda x, y: jnp.histogram2d(x, y, 2))(Unitful(data, "m"), Unitful(data, "m"))
    same(counts, np.histogram2d(data, data, 2)[0])
    assert [e.unit for e in edges] == [metre, metre]
    with pytest.raises(DimensionError, match="takes arrays in the same unit"):
        wrap(lambda x: jnp.histogram(x, 2, range=(0.0, 5.0)))(Unitful(data, "m"))
    with pytest.raises(DimensionError, match=r"in `isclose` of jax\.numpy"):
        wrap(jnp.isclose)(*length)


def test_what_jax_traced_before_does_not_decide(default_promotion):
    """`jnp.where` is traced once for all of its callers, `jnp.hypot` and `jnp.heaviside` among them."""
    x = Unitful(jnp.array([5.0, -5.0]), "m")
    ql.quaxify(lambda x: (jnp.heaviside(x, 0.5), jnp.hypot(x, x)))(x)
    with pytest.raises(DimensionError, match="same unit"):
        ql.quaxify(lambda x: jnp.where(x > 0, x, 0.5))(x)
    with pytest.raises(DimensionError, match="same unit"):
        ql.quaxify(lambda x: x >= 0.5)(x)

    @jax.jit
    def hypot(x):
        return x > 0.5

    with pytest.raises(DimensionError, match="same unit"):
        ql.quaxify(hypot)(x)


MASK = Unitful(array([True, False, True]), "")
PLACE = Unitful(jax.device_put(1), "")


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "f",
    [
        lambda m, i, x, y: jnp.where(m, x, y),
        lambda m, i, x, y: jax.lax.select_n(m, x, y),
        lambda m, i, x, y: jnp.select([m], [x], y),
        lambda m, i, x, y: x[i],
        lambda m, i, x, y: x.at[i].set(y[0]),
        lambda m, i, x, y: x.at[i].add(y[0]),
        lambda m, i, x, y: x.at[i].multiply(2.0),
        lambda m, i, x, y: jax.lax.dynamic_slice(x, (i,), (2,)),
        lambda m, i, x, y: jax.lax.dynamic_update_slice(x, y[:1], (i,)),
        lambda m, i, x, y: jax.lax.cond(i == 1, lambda: x, lambda: y),
        lambda m, i, x, y: jax.lax.switch(i, [lambda: x, lambda: y]),
        lambda m, i, x, y: jnp.take(x, i, axis=0),
        lambda m, i, x, y: jnp.sum(x, where=m),
    ],
)
@pytest.mark.parametrize("unit", ["", "m"])
def test_masks_and_places_without_dimension(f, unit, default_promotion):
    x, y = NUMBERS, 10 * NUMBERS
    expected = f(MASK.array, PLACE.array, x, y)
    found = ql.quaxify(f)(MASK, PLACE, Unitful(x, unit), Unitful(y, unit))
    assert Unit(unit) == (found.unit if isinstance(found, Unitful) else Unit())
    np.testing.assert_array_equal(found.array if isinstance(found, Unitful) else found, expected)
    if not unit:
        np.testing.assert_array_equal(ql.materialise(ql.quaxify(f)(MASK, PLACE, x, y)), expected)


@pytest.mark.parametrize(
    "f",
    [
        lambda m, i, x: jnp.where(m, x, x),
        lambda m, i, x: x.at[i].set(x[0]),
        lambda m, i, x: jax.lax.dynamic_update_slice(x, x[:1], (i,)),
        lambda m, i, x: x[i],
    ],
)
def test_masks_and_places_with_a_unit(f):
    with pytest.raises(DimensionError, match=r"without a dimension|in the same unit"):
        ql.quaxify(f)(Unitful(MASK.array, "m"), Unitful(PLACE.array, "m"), X)
