"""`NamedArray`: names followed through code that knows nothing of them; `einsum` is the oracle."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quaxlike as ql
from quaxlike.arrays.named import AxisError, NamedArray, align
from quaxlike.arrays.structured import DiagonalMatrix
from quaxlike.arrays.unitful import Unitful
from tests.samples import array

SIZES = {"batch": 2, "time": 3, "feature": 4, "hidden": 5}


def make(*names, seed=0):
    numbers = np.random.default_rng(seed).standard_normal([SIZES[n] for n in names])
    return NamedArray(array(numbers, jnp.float32), names)


X, W, B = make("batch", "feature"), make("feature", "hidden"), make("hidden")


def same(x, array, names, what=""):
    assert (x.names if isinstance(x, NamedArray) else (None,) * jnp.ndim(x)) == names, what
    assert x.shape == np.shape(array), what
    np.testing.assert_allclose(ql.materialise(x), array, rtol=2e-5, atol=2e-6, err_msg=what)


axes = st.lists(st.sampled_from(list(SIZES)), unique=True, max_size=4)


def letters(names):
    return "".join(name[0] for name in names)


# By name


@pytest.mark.slow
@given(axes, axes)
def test_operators_broadcast_by_name(left, right):
    x, y = make(*left, seed=1), make(*right, seed=2)
    names = (*left, *(n for n in right if n not in left))
    expected = np.einsum(f"{letters(left)},{letters(right)}->{letters(names)}", x.array, y.array)
    for out in (x * y, ql.quaxify(jnp.multiply)(*align(x, y))):
        if names:
            same(out, expected, names)
    if names:
        assert (x - y).names == (x <= y).names == names


@pytest.mark.slow
@given(axes, axes, st.data())
def test_products_contract_by_name(left, right, data):
    shared = [n for n in left if n in right]
    names = data.draw(st.lists(st.sampled_from(shared), unique=True)) if shared else []
    x, y = make(*left, seed=1), make(*right, seed=2)
    paired = [n for n in shared if n not in names]
    rest = [n for n in (*left, *right) if n not in shared]
    out = x.contract(y, *names)
    expected = np.einsum(
        f"{letters(left)},{letters(right)}->{letters((*paired, *rest))}", x.array, y.array, dtype=np.float64
    )
    same(out, expected, (*paired, *rest))


@pytest.mark.quick("sum")
@pytest.mark.parametrize(
    "method", ["sum", "mean", "max", "min", "std", "var", "prod", "argmax", "argmin", "all", "any", "ptp"]
)
def test_reductions_by_name(method):
    same(getattr(X, method)("feature"), getattr(X.array, method)(1), ("batch",))
    assert jnp.ndim(getattr(X, method)()) == 0
    if not method.startswith("arg"):
        x = make("batch", "time", "feature")
        same(getattr(x, method)(("time", "batch")), getattr(x.array, method)((0, 1)), ("feature",))
        same(
            getattr(X, method)("batch", keepdims=True),
            getattr(X.array, method)(0, keepdims=True),
            (None, "feature"),
        )


def test_more_by_name():
    same(X.cumsum("feature"), X.array.cumsum(1), X.names)
    same(X.sort("feature"), jnp.sort(X.array, 1), X.names)
    same(X.ordered("feature", "batch"), X.array.T, ("feature", "batch"))
    same(X.rename({"batch": "time"}), X.array, ("time", "feature"))
    same(X.isel(feature=1), X.array[:, 1], ("batch",))
    same(X.isel(batch=0, feature=slice(2)), X.array[0, :2], ("feature",))
    same(X[:1].squeeze("batch"), X.array[0], ("feature",))


def test_by_name_inside_of_a_quaxified_function():
    @ql.quaxify
    def layer(x, w, b):
        y = x.contract(w, "feature") + b
        return (y - jnp.mean(y, y.axis("hidden"), keepdims=True)).isel(batch=1)

    with jax.numpy_rank_promotion("allow"):
        y = X.array @ W.array + B.array
        expected = (y - y.mean(1, keepdims=True))[1]
        same(layer(X, W, B), expected, ("hidden",))
        same(jax.jit(layer)(X, W, B), expected, ("hidden",))


# Through code that knows nothing of names

BF, FB = ("batch", "feature"), ("feature", "batch")
FUNCTIONS = {
    "transpose": (jnp.transpose, FB),
    "moveaxis": (lambda x: jnp.moveaxis(x, 0, 1), FB),
    "exp": (jnp.exp, BF),
    "where": (lambda x: jnp.where(x > 0, x, 0.0), BF),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), BF),
    "gelu": (jax.nn.gelu, BF),
    "softmax": (lambda x: jax.nn.softmax(x, axis=0), BF),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=1), ("batch",)),
    "var": (lambda x: jnp.var(x, axis=0), ("feature",)),
    "norm": (lambda x: jnp.linalg.norm(x, axis=1), ("batch",)),
    "row": (lambda x: x[0], ("feature",)),
    "column": (lambda x: x[:, 1], ("batch",)),
    "last": (lambda x: x[..., -1], ("batch",)),
    "slice": (lambda x: x[:, 1:3], BF),
    "reverse": (lambda x: x[::-1], BF),
    "new axis": (lambda x: x[:, None], ("batch", None, "feature")),
    "gathered": (lambda x: x[:, jnp.array([0, 2, 2])], ("batch", None)),
    "dynamic slice": (lambda x: jax.lax.dynamic_slice(x, (0, 1), (2, 2)), BF),
    "written to": (lambda x: x.at[0].set(x[1]), BF),
    "added to": (lambda x: x.at[:, 1].add(1.0), BF),
    "axis of size 1": (lambda x: x.reshape(2, 1, 4), ("batch", None, "feature")),
    "axis of size 1 removed": (lambda x: x.reshape(2, 1, 4).reshape(2, 4), BF),
    "split axis": (lambda x: x.reshape(2, 2, 2), ("batch", None, None)),
    "merged axes": (jnp.ravel, (None,)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (3, 2, 4)), (None, "batch", "feature")),
    "concatenate": (lambda x: jnp.concatenate([x, x], axis=1), BF),
    "stack": (lambda x: jnp.stack([x, x], axis=1), ("batch", None, "feature")),
    "split": (lambda x: jnp.split(x, 2, axis=1)[1], BF),
    "roll": (lambda x: jnp.roll(x, 1, axis=1), BF),
    "flip": (jnp.flip, BF),
    "pad": (lambda x: jnp.pad(x, 1), BF),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), BF),
    "sort": (lambda x: jnp.sort(x, axis=0), BF),
    "argsort": (lambda x: jnp.argsort(x, axis=0), BF),
    "top_k": (lambda x: jax.lax.top_k(x, 2)[0], BF),
    "fft": (jnp.fft.fft, BF),
    "matmul": (lambda x: x @ W.array, ("batch", None)),
    "Gram matrix": (lambda x: x.T @ x, ("feature", "feature")),
    "einsum": (lambda x: jnp.einsum("bf,bg->fg", x, x), ("feature", "feature")),
    "mapped": (jax.vmap(lambda row: row / row.sum()), (None, "feature")),
    "mapped along": (jax.vmap(lambda c: 2 * c, in_axes=1, out_axes=1), ("batch", None)),
    "scanned": (lambda x: jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(4), x)[1], (None, "feature")),
    "carried": (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + x, jnp.zeros((2, 4))), BF),
    "chosen": (lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: jnp.zeros((2, 4))), BF),
    "derivative": (jax.grad(lambda x: jnp.sum(jnp.sin(x) @ jnp.ones(4))), BF),
    "checkpointed": (jax.grad(jax.checkpoint(lambda x: jnp.sum(x**3))), BF),
}


def follow(x):
    return {name: ql.quaxify(f)(x) for name, (f, _) in FUNCTIONS.items()}


def plain(x):
    return {name: f(x) for name, (f, _) in FUNCTIONS.items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f])
def test_names_are_followed(transform, default_promotion):
    with ql.on_materialise("error"):
        found = transform(follow)(X)
    for name, expected in jax.jit(plain)(X.array).items():
        names = FUNCTIONS[name][1]
        if name.startswith("mapped"):  # which axis a map runs over depends on how the primitives batch
            names = found[name].names
            assert set(names) - {None} <= set(BF)
        same(found[name], expected, names, name)


@pytest.mark.slow
def test_rows_have_the_names_that_are_left():
    """So that they go with what is computed of them, where structures have to be equal."""
    chosen = lambda row: jax.lax.cond(row.sum() > 0, lambda: row, lambda: -row)
    same(ql.quaxify(lambda x: jax.lax.map(chosen, x))(X), jax.vmap(chosen)(X.array), (None, "feature"))
    last = ql.quaxify(lambda x: jax.lax.scan(lambda c, row: (row, c * 2), x[0], x)[0])(X)
    same(last, X.array[-1], ("feature",))


@pytest.mark.slow
def test_products_know_both_sides():
    f = ql.quaxify(jnp.matmul)
    same(f(X, W), X.array @ W.array, ("batch", "hidden"))
    gx, gw = ql.quaxify(jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w)), (0, 1)))(X, W)
    expected = jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w)), (0, 1))(X.array, W.array)
    same(gx, expected[0], X.names)
    same(gw, expected[1], W.names)
    outside = jax.grad(lambda x: ql.materialise(ql.quaxify(lambda x, w: jnp.sum(jnp.tanh(x @ w)))(x, W)))(X)
    same(outside, expected[0], X.names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "match"),
    [
        (lambda x, y: jnp.add(x, y), r"`add` .* found \('batch', 'feature'\) and \('time', 'feature'\)"),
        (lambda x, y: jnp.concatenate([x, y]), r"`concatenate` .* found \('batch', 'feature'\) and \('time'"),
        (lambda x, y: jnp.where(x > 0, x, y), r"found \('batch', 'feature'\) and \('time', 'feature'\)"),
        (
            lambda x, y: x.T @ y,
            r"pairs axis 'batch' of .*\('feature', 'batch'\) and axis 'time' of .*\('time'",
        ),
        (lambda x, y: jax.lax.cond(True, lambda: x, lambda: y), "cannot be unified"),
        (lambda x, y: jax.lax.fori_loop(0, 3, lambda i, c: c.T, x[:, :2]), "cannot be unified"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_axes_that_do_not_fit(f, match, jit):
    g = ql.quaxify(f)
    with pytest.raises(TypeError, match=match):
        (jax.jit(g) if jit else g)(X, X.rename({"batch": "time"}))


@pytest.mark.parametrize("f", [jnp.multiply, lambda x, y: jnp.matmul(x.T, y)])
def test_names_inside_of_a_unit_beside_names(f):
    """The names are outside of the unit in the result, and are compared wherever they are."""
    found = ql.quaxify(f)(X, Unitful(X, "m"))
    assert type(found) is NamedArray
    assert not isinstance(ql.value_of(found.array).array, NamedArray)
    np.testing.assert_allclose(found.array.array, f(X.array, X.array), rtol=1e-6)
    for pair in (
        (X, Unitful(X.rename({"batch": "time"}), "m")),
        (Unitful(X.rename({"batch": "time"}), "m"), X),
    ):
        with pytest.raises(AxisError, match="time"):
            ql.quaxify(f)(*pair)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, lambda f: lambda x: jax.lax.cond(True, f, f, x)],
    ids=["eager", "jit", "cond"],
)
def test_zeros_beside_names_around_units(transform):
    """What JAX fills with zeros has any unit, also where names are around it."""
    x = NamedArray(Unitful(jnp.ones((2, 3)), "m"), ("i", "j"))
    out = ql.quaxify(transform(lambda x: jnp.pad(x, 1)))(x)
    assert out.names == ("i", "j")
    assert out.array.unit == x.array.unit
    np.testing.assert_array_equal(ql.materialise(out.array.array), np.pad(np.ones((2, 3)), 1))


def test_names_inside_of_a_matrix_beside_names():
    matrix = DiagonalMatrix(NamedArray(B.array, ("step",)))
    found = ql.quaxify(jnp.matmul)(matrix, NamedArray(W.array.T, (None, "feature")))
    same(found, jnp.diag(B.array) @ W.array.T, ("step", "feature"))
    assert isinstance(found.array, jax.Array)


def test_names_that_are_not_there():
    with pytest.raises(AxisError, match=r"axes \('batch', 'feature'\) has no axis called 'time'"):
        X.sum("time")
    with pytest.raises(AxisError, match="has several axes called 'feature'"):
        (X.T @ X).axis("feature")
    with pytest.raises(AxisError, match=r"shape \(2, 4\) takes as many names; found \('batch',\)"):
        NamedArray(X.array, ["batch"])
    with pytest.raises(AxisError, match=r"names each of them; found \('batch',\)"):
        X.ordered("batch")
    with pytest.raises(AxisError, match="has no axis called 'hidden'"):
        X.contract(W, "hidden")


@pytest.mark.slow
def test_transforms_outside_keep_the_shape_true():
    x = make("time", "batch", "feature")
    row = jax.eval_shape(lambda x: jax.vmap(lambda row: row)(x), x)
    assert (row.names, row.shape) == (x.names, x.shape)
    seen = []
    out = jax.vmap(lambda row: seen.append((row.names, row.shape)) or row.sum("feature"))(x)
    assert seen == [(("batch", "feature"), (2, 4))]
    same(out, x.array.sum(2), (None, "batch"))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), X, X)
    assert (stacked.names, stacked.shape) == ((None, "batch", "feature"), (2, 2, 4))
    total, _ = jax.lax.scan(lambda c, row: (c + row.array, None), jnp.zeros((2, 4)), x)
    np.testing.assert_allclose(total, x.array.sum(0), rtol=1e-5, atol=1e-6)


def test_nothing_is_left_at_run_time():
    f = lambda x, w: jax.nn.softmax(x @ w, axis=-1).sum(0)
    assert str(jax.make_jaxpr(ql.quaxify(f))(X, W)) == str(jax.make_jaxpr(f)(X.array, W.array))


def test_printing():
    assert eqx.tree_pformat(X) == repr(X) == "NamedArray(float32[batch=2, feature=4])"
    assert repr(X[:, None]) == "NamedArray(float32[batch=2, _=1, feature=4])"


@pytest.mark.parametrize("part", [None, True, (2, 4), jnp.dtype("float32"), jax.P("batch")], ids=str)
def test_printing_what_a_map_over_leaves_makes(part):
    mapped = jax.tree.map(lambda _: part, X)
    assert repr(mapped) == f"NamedArray(array={eqx.tree_pformat(part)}, names=('batch', 'feature'))"
