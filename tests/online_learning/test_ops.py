"""Each built-in ETP primitive computes what it says, and learns exactly where D-RTRL is exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike
from quaxlike import NF4Array
from quaxlike.online_learning import (
    DRTRL,
    PPProp,
    SparsePattern,
    conv,
    elementwise,
    embedding,
    etp_emb_p,
    etp_lora_mm_p,
    etp_lora_mv_p,
    etp_mm_p,
    etp_mv_p,
    etp_sp_mm_p,
    etp_sp_mv_p,
    lora_matmul,
    matmul,
    sparse_matmul,
)
from tests.samples import wrong_types

from ..primitives.jaxprs import primitives
from .oracles import backpropagated, errors_by_leaf, online

pytestmark = pytest.mark.usefixtures("x64", "default_promotion")

BATCH, IN, HIDDEN, STEPS = 3, 4, 5, 7
PATTERN = SparsePattern([0, 1, 1, 3, 3, 0], [4, 0, 2, 2, 1, 4], (IN, HIDDEN))


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def _cell(use):
    """A leaky cell with a non-linear read-out."""

    def step(model, last, x):
        h = jax.nn.sigmoid(elementwise(model["leak"])) * last + use(model, x)
        h = h.astype(last.dtype)
        return h, jnp.sin(h)

    return step


def _indices():
    return np.random.default_rng(0).integers(0, 6, (STEPS, BATCH))


CASES = {
    "matmul": (lambda m, x: matmul(x, m["w"], m["b"]), {"w": (IN, HIDDEN), "b": (HIDDEN,)}, (BATCH, IN)),
    "matmul_one": (lambda m, x: matmul(x, m["w"], m["b"]), {"w": (IN, HIDDEN), "b": (HIDDEN,)}, (IN,)),
    "matmul_batches": (lambda m, x: matmul(x, m["w"]), {"w": (IN, HIDDEN)}, (2, BATCH, IN)),
    "matmul_vmap": (lambda m, x: jax.vmap(lambda x: matmul(x, m["w"]))(x), {"w": (IN, HIDDEN)}, (BATCH, IN)),
    "lora": (
        lambda m, x: lora_matmul(x, m["b"], m["a"], scale=0.5),
        {"b": (IN, 2), "a": (2, HIDDEN)},
        (BATCH, IN),
    ),
    "lora_one": (lambda m, x: lora_matmul(x, m["b"], m["a"]), {"b": (IN, 2), "a": (2, HIDDEN)}, (IN,)),
    "sparse": (lambda m, x: sparse_matmul(x, m["w"], PATTERN), {"w": (6,)}, (BATCH, IN)),
    "sparse_one": (lambda m, x: sparse_matmul(x, m["w"], PATTERN), {"w": (6,)}, (IN,)),
    "conv": (lambda m, x: conv(x, m["k"], m["b"]), {"k": (3, 2, HIDDEN), "b": (HIDDEN,)}, (BATCH, 6, 2)),
    "conv_strided": (
        lambda m, x: conv(x, m["k"], strides=(2, 1), padding=((1, 0), (0, 0)), dilation=(1, 2)),
        {"k": (2, 2, 3, HIDDEN)},
        (BATCH, 5, 4, 3),
    ),
    "embedding": (lambda m, x: embedding(x, m["t"]), {"t": (6, HIDDEN)}, None),
}


def _problem(case, steps=STEPS):
    use, shapes, x_shape = CASES[case]
    model = {key: jnp.asarray(_normal(i, *shape)) for i, (key, shape) in enumerate(shapes.items())}
    model["leak"] = jnp.asarray(_normal(9, HIDDEN))
    xs = jnp.asarray(_indices() if x_shape is None else _normal(10, STEPS, *x_shape))[:steps]
    y = jax.eval_shape(use, model, xs[0])
    state = jnp.asarray(_normal(11, *y.shape))
    return _cell(use), model, state, xs, jnp.asarray(_normal(12, steps, *y.shape))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_d_rtrl_is_exact(case):
    step, *problem = _problem(case)
    errors = errors_by_leaf(online(DRTRL(step), *problem), backpropagated(step, *problem))
    assert max(jax.tree.leaves(errors)) < 1e-13


# The dtypes of weights, inputs and the state.
MIXED = {
    "weights_bfloat16": ("bfloat16", "float32", "float32"),
    "weights_float16": ("float16", "float32", "float32"),
    "state_float32": ("bfloat16", "bfloat16", "float32"),
    "inputs_bfloat16": ("float32", "bfloat16", "float32"),
    "state_bfloat16": ("float32", "float32", "bfloat16"),
    "all_float16": ("float16", "float16", "float16"),
    "weights_float32": ("float32", "float64", "float64"),
}


def _in_dtypes(weights, inputs, state, case, steps=STEPS):
    step, model, h, xs, targets = _problem(case, steps)
    model = jax.tree.map(lambda w: w.astype(weights), model)
    xs = xs if jnp.issubdtype(xs.dtype, jnp.integer) else xs.astype(inputs)
    return step, model, h.astype(state), xs, targets.astype(state)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("case", CASES)
def test_d_rtrl_in_mixed_precision(case, mixed):
    step, *problem = _in_dtypes(*MIXED[mixed], case)
    found = online(DRTRL(step), *problem)
    expected = backpropagated(step, *problem)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, expected)
    errors = errors_by_leaf(
        *(jax.tree.map(lambda g: np.asarray(g, np.float64), t) for t in (found, expected))
    )
    # Sums in float16 are rounded step by step where XLA's optimisations are off.
    tolerance = {"weights_float32": 1e-6, "all_float16": 5e-2}.get(mixed, 2e-2)
    assert max(jax.tree.leaves(errors)) < tolerance


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("case", CASES)
def test_pp_prop_in_mixed_precision(case, mixed):
    """As in double precision, for the numbers that the weights, inputs and states have."""
    step, *problem = _in_dtypes(*MIXED[mixed], case)
    precise, *rounded = _in_dtypes("float64", "float64", "float64", case)
    found = online(PPProp(step, decay=0.9), *problem)
    expected = online(PPProp(precise, decay=0.9), *rounded)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, problem[0])
    found = jax.tree.map(lambda g: np.asarray(g, np.float64), found)
    errors = errors_by_leaf(found, expected)
    assert max(jax.tree.leaves(errors)) < (1e-5 if mixed == "weights_float32" else 0.2)  # terms cancel


@pytest.mark.slow
@pytest.mark.parametrize("learner", [DRTRL, functools.partial(PPProp, decay=0.999)])
def test_traces_in_half_precision_decay_as_slowly_as_the_state(learner):
    """In bfloat16, 0.999 is 1."""

    def step(w, h, x):
        h = 0.999 * h + matmul(x, w).astype(h.dtype)
        return h, h

    def at_the_end(dtype):
        w, h, x = jnp.ones((1, 1), dtype), jnp.zeros((1, 1), jnp.float32), jnp.ones((1, 1), dtype)
        of = learner(step)
        learn = lambda w, h, traces: of.value_and_grad(jnp.sum, w, h, traces, x)
        next_ = lambda carry, _: (learn(w, *carry)[2:4], learn(w, *carry).grads)
        return jax.lax.scan(next_, (h, of.init(w, h, x)), length=2000)[1][-1].astype(float)

    assert abs(at_the_end(jnp.bfloat16) / at_the_end(jnp.float32) - 1) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_pp_prop_is_exact_for_one_step(case):
    step, *problem = _problem(case, 1)
    errors = errors_by_leaf(online(PPProp(step, decay=0.7), *problem), backpropagated(step, *problem))
    assert max(jax.tree.leaves(errors)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_pp_prop_points_where_backpropagation_does(case):
    step, *problem = _problem(case)
    found, expected = online(PPProp(step, decay=0.5), *problem), backpropagated(step, *problem)
    for key in CASES[case][1]:
        a, b = np.ravel(found[key]), np.ravel(expected[key])
        assert a @ b > 0.5 * np.linalg.norm(a) * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("mapped", "single", "weights"),
    [
        (etp_mm_p, etp_mv_p, [_normal(0, IN, HIDDEN)]),
        (etp_lora_mm_p, etp_lora_mv_p, [_normal(0, IN, 2), _normal(1, 2, HIDDEN)]),
        (etp_sp_mm_p, etp_sp_mv_p, [_normal(0, 6)]),
    ],
)
def test_a_single_example_under_vmap_is_a_batch(mapped, single, weights):
    params = {"pattern": PATTERN} if single is etp_sp_mv_p else {}
    x = _normal(2, IN, BATCH)
    fn = jax.vmap(lambda x: single(x, *weights, **params), in_axes=1)
    assert primitives(fn, x) == {mapped} | primitives(lambda x: jnp.moveaxis(x, 1, 0), x)
    np.testing.assert_allclose(fn(x), mapped(x.T, *weights, **params))
    twice = jax.vmap(jax.vmap(lambda x: single(x, *weights, **params)))
    assert mapped in primitives(twice, np.stack([x.T, x.T]))


def test_values():
    x, w, b = _normal(0, BATCH, IN), _normal(1, IN, HIDDEN), _normal(2, HIDDEN)
    np.testing.assert_allclose(matmul(x, w, b), x @ w + b)
    np.testing.assert_allclose(lora_matmul(x, w, w.T, scale=2.0), 2 * x @ w @ w.T)
    dense = np.zeros(PATTERN.shape)
    np.add.at(dense, (PATTERN.rows, PATTERN.columns), np.arange(6.0))
    np.testing.assert_allclose(sparse_matmul(x, np.arange(6.0), PATTERN), x @ dense)
    np.testing.assert_array_equal(embedding(np.array([2, 0]), w), w[[2, 0]])
    assert etp_emb_p in primitives(embedding, np.array([2, 0]), w)
    np.testing.assert_array_equal(elementwise(b), b)
    kernel = _normal(3, 3, IN, HIDDEN)
    signal = _normal(4, BATCH, 8, IN)
    windows = np.lib.stride_tricks.sliding_window_view(signal, 3, axis=1)
    np.testing.assert_allclose(
        conv(signal, kernel, b, padding="VALID"), np.einsum("bsiw,wio->bso", windows, kernel) + b
    )


# How a weight `b` is used, the shapes of other weights and of x, and that of `b`.
SHARED = {
    "matmul, ()": (lambda m, x: matmul(x, m["w"], m["b"]), {"w": (IN, HIDDEN)}, (BATCH, IN), ()),
    "matmul, (1,)": (lambda m, x: matmul(x, m["w"], m["b"]), {"w": (IN, HIDDEN)}, (IN,), (1,)),
    "conv, ()": (lambda m, x: conv(x, m["k"], m["b"]), {"k": (3, 2, HIDDEN)}, (BATCH, 6, 2), ()),
    "conv, (1,)": (lambda m, x: conv(x, m["k"], m["b"]), {"k": (3, 2, HIDDEN)}, (BATCH, 6, 2), (1,)),
    "sparse, ()": (lambda m, x: sparse_matmul(x, m["b"], PATTERN), {}, (BATCH, IN), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED)
def test_a_weight_that_several_outputs_share(case):
    use, shapes, x_shape, shape = SHARED[case]
    shapes = shapes | {"b": shape, "leak": (HIDDEN,)}
    model = {key: jnp.asarray(_normal(i, *shape)) for i, (key, shape) in enumerate(shapes.items())}
    xs = jnp.asarray(_normal(10, 3, *x_shape))
    y = jax.eval_shape(use, model, xs[0])
    problem = model, jnp.zeros(y.shape), xs, jnp.asarray(_normal(12, 3, *y.shape))
    expected = backpropagated(_cell(use), *problem)
    errors = errors_by_leaf(online(DRTRL(_cell(use)), *problem), expected)
    assert max(jax.tree.leaves(errors)) < 1e-13


@pytest.mark.quick("uint8-learner1")
@pytest.mark.parametrize("learner", [DRTRL, functools.partial(PPProp, decay=0.5)])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_indices_are_those_of_jax(learner, dtype):
    """Negative ones count from the end, and those out of bounds are those of the first or the last row."""
    numbers = [[-1, 9], [-9, 2], [0, -5]] if dtype == "int8" else [[4, 9], [255, 2], [0, 1]]
    rows = [[4, 4], [0, 2], [0, 0]] if dtype == "int8" else [[4, 4], [4, 2], [0, 1]]
    table, indices = jnp.asarray(_normal(0, 5, HIDDEN)), jnp.asarray(numbers, dtype)
    h, target = jnp.zeros((3, 2, HIDDEN)), _normal(1, 1, 3, 2, HIDDEN)
    np.testing.assert_array_equal(embedding(indices, table), table[indices])
    step = lambda t, h, i: ((n := 0.5 * h + embedding(i, t)), jnp.sin(n))
    plain = lambda t, h, i: ((n := 0.5 * h + t[jnp.asarray(rows)]), jnp.sin(n))
    found = online(learner(step), table, h, indices[None], target)
    expected = backpropagated(plain, table, h, indices[None], target)
    np.testing.assert_allclose(found, expected, atol=1e-12)


VALUES = {
    "matmul": lambda x, w: matmul(x, w),
    "bias": lambda x, w: matmul(x, w, bias=jnp.ones(64)),
    "lora": lambda x, w: lora_matmul(x, w, jnp.ones((64, 2))),
    "elementwise": lambda x, w: elementwise(w=w),
    "embedding": lambda x, w: embedding(np.array([1, 0]), w),
    "conv": lambda x, w: conv(x[None], w[None]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_values_outside_of_quaxify(name):
    x, w = _normal(0, 3, 64), NF4Array.quantize(jnp.asarray(_normal(1, 64, 64), jnp.float32))
    x = jnp.asarray(x, jnp.float32)
    found, expected = (quaxlike.materialise(VALUES[name](x, w)) for w in (w, quaxlike.materialise(w)))
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
    inside = quaxlike.quaxify(lambda x: VALUES[name](x, w))(x)
    np.testing.assert_allclose(quaxlike.materialise(inside), expected, 1e-4, 1e-4)


def test_patterns():
    same = SparsePattern(PATTERN.rows.copy(), PATTERN.columns.tolist(), (IN, HIDDEN))
    assert same == PATTERN
    assert hash(same) == hash(PATTERN)
    assert same != SparsePattern(PATTERN.rows, PATTERN.columns, (IN, HIDDEN + 1))
    assert repr(PATTERN) == "SparsePattern(6 of 4 × 5)"
    with pytest.raises(ValueError, match=r"columns of a SparsePattern .* in \[0, 5\); found \[0, 5\]"):
        SparsePattern([0, 1], [0, 5], (IN, HIDDEN))
    with pytest.raises(ValueError, match=r"vectors of equal length; found shapes \(2,\) and \(1,\)"):
        SparsePattern([0, 1], [0], (IN, HIDDEN))


@wrong_types
@pytest.mark.parametrize("scale", [np.array(2.0), lambda: jnp.float32(2)])
def test_a_scale_that_is_an_array(scale):
    scale = scale() if callable(scale) else scale
    x, b, a = _normal(0, BATCH, IN), _normal(1, IN, 2), _normal(2, 2, HIDDEN)
    message = r"a static number as `scale`; found an array of type f.*\[\]. Multiply the result by it"
    with pytest.raises(TypeError, match=message):
        lora_matmul(x, b, a, scale=scale)
    assert lora_matmul(x, b, a, scale=np.float64(2)).shape == (BATCH, HIDDEN)
