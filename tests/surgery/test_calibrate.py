"""Codes chosen by what goes into a layer come closer than the nearest ones, for each kind of codes."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.quantized.grid import grid_of
from quaxlike.surgery.calibrate import _with_fitting_scales
from tests.samples import array, drawn, normal, random_key, tree_equal

SCHEMES = {
    **{"nf4": {}, "int4": {}, "int8": {}},
    **{"uint4_block": {"block_size": 32}, "int3_block": {"block_size": 32}, "q4_k": {}, "mxfp4": {}},
}


def _inputs():
    """Correlated, as activations are."""
    return jnp.asarray(normal(256, 8) @ normal(8, 64, seed=1) + 0.1 * normal(256, 64, seed=2))


def _model():
    return drawn(eqx.nn.Linear, 64, 16, use_bias=False, key=random_key())


def _outputs(model, x):
    return np.asarray(x @ ql.materialise(model.weight).T)


def _moments(model, x):
    return ql.input_moments(lambda model, x: jax.vmap(model)(x))(model, x)


@pytest.mark.quick("nf4")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantize_with_moments(scheme):
    model, x, options = _model(), _inputs(), SCHEMES[scheme]
    plain = ql.quantize(model, scheme, **options)
    fitted = ql.quantize(model, scheme, calibrate=_moments(model, x), **options)
    assert jax.tree.structure(fitted) == jax.tree.structure(plain)
    wanted = _outputs(model, x)
    error = lambda q: np.square(_outputs(q, x) - wanted).sum()
    assert error(fitted) < 0.5 * error(plain)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_errors_are_handed_on_from_part_to_part(scheme):
    """Of more columns than are rounded together, and no multiple of these."""
    x = jnp.asarray(normal(512, 8) @ normal(8, 320, seed=1) + 0.1 * normal(512, 320, seed=2))
    model = eqx.nn.Linear(320, 8, use_bias=False, key=jax.random.key(0))
    wanted = _outputs(model, x)
    error = lambda q: np.square(_outputs(q, x) - wanted).sum()
    fitted = ql.quantize(model, scheme, calibrate=_moments(model, x))
    assert error(fitted) < 0.5 * error(ql.quantize(model, scheme))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_rows_of_zeros_stay_so(scheme):
    rows = np.arange(16)[:, None] != 3
    model = eqx.tree_at(lambda m: m.weight, _model(), array(rows * np.asarray(_model().weight), "float32"))
    fitted = ql.quantize(model, scheme, calibrate=_moments(model, _inputs()))
    assert not np.any(np.asarray(ql.materialise(fitted.weight))[3])


def _cost(error, moments):
    return np.sum(error @ moments * error)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ql.NF4Array, ql.Int8Array])
def test_scales_fit_the_codes(cls):
    x = np.asarray(_inputs(), np.float64)
    w, h = np.float64(normal(16, 64)), x.T @ x
    start = cls.quantize(jnp.asarray(w, np.float32))
    indices = grid_of(start).nearest(w)
    cost = lambda array: _cost(grid_of(array).values(indices) - w, h)
    fitted = _with_fitting_scales(start, indices, w, h)
    assert cost(fitted) < 0.9 * cost(start)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nf4", "int8", "mxfp4"])
def test_nothing_gets_worse_where_an_adapter_is_small(scheme):
    """It is lost by the nearest codes; and blocks of 64 may cross rows of 48."""
    x = _inputs()[:, :32] if scheme == "mxfp4" else _inputs()[:, :48]
    layer = eqx.nn.Linear(x.shape[1], 16, use_bias=False, key=jax.random.key(0))
    model = ql.loraify(ql.quantize(layer, scheme), rank=2, key=jax.random.key(1))
    model = eqx.tree_at(lambda m: m.weight.b, model, 0.003 * jnp.asarray(normal(16, 2)))
    wanted = _outputs(model, x)
    exact = ql.merge(model, exact=_moments(model, x))
    error = lambda w: np.square(np.asarray(x @ ql.materialise(w).T) - wanted).sum()
    with pytest.warns(UserWarning, match="which rounds them"):
        nearest = ql.merge(model)
    assert error(exact.weight) < 1.001 * min(error(model.weight.w), error(nearest.weight))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nf4", "uint4_block"])
def test_merging_meets_base_and_adapter(scheme):
    x = _inputs()
    model = ql.loraify(ql.quantize(_model(), scheme, **SCHEMES[scheme]), rank=2, key=jax.random.key(1))
    model = eqx.tree_at(lambda m: m.weight.b, model, 0.1 * jnp.asarray(normal(16, 2)))
    wanted = _outputs(model, x)
    moments = _moments(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = ql.merge(model, exact=moments)
    with pytest.warns(UserWarning, match="which rounds them: weight"):
        rounded = ql.merge(model)
    assert type(exact.weight) is type(model.weight.w)
    assert jax.tree.map(jnp.shape, exact) == jax.tree.map(jnp.shape, rounded)
    error = lambda q: np.square(_outputs(q, x) - wanted).sum()
    assert error(exact) < 0.25 * error(rounded)


def test_another_weight_of_the_same_shape_compiles_nothing():
    moments, seen = _moments(_model(), _inputs()), []
    watch = lambda event, _, **about: seen.append(event) if "backend_compile" in event else None
    ql.quantize(_model(), "int8", calibrate=moments)
    other = jax.tree.map(lambda w: 2 * w, _model()), {"weight": 3 * moments["weight"]}
    jax.monitoring.register_event_duration_secs_listener(watch)
    try:
        ql.quantize(other[0], "int8", calibrate=other[1])
    finally:
        jax.monitoring.unregister_event_duration_listener(watch)
    assert not seen


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        ({}, "calibrate has no moments for weight"),
        ({"weight": array(np.full(64, np.nan))}, r"weight: moments are sums of squares, .* found nan to nan"),
        ({"weight": array(-np.eye(64))}, r"weight: moments are sums of squares, .* found -1"),
        ({"weight": array(np.eye(3))}, r"must have shape \(64, 64\), or \(64,\) for their diagonal; found"),
    ],
)
def test_moments_must_fit(moments, message):
    with pytest.raises(ValueError, match=message):
        ql.quantize(_model(), calibrate=moments)


def test_weights_without_moments_are_rounded():
    """As recipes also quantise output layers, whose inputs are those of no linear layer if they are tied."""
    assert tree_equal(ql.quantize(_model(), calibrate={"weight": None}), ql.quantize(_model()))
