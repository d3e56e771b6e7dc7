"""`LoraArray`: every operation on it against the same operation on `w + s * b @ a` in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quaxlike as ql
from quaxlike.arrays import zero
from quaxlike.surgery.loraify import with_magnitude
from tests.samples import normal


def make_lora(shape=(6, 5), rank=2, *, seed=0, batch=((), (), ()), dtype=jnp.float32, dora=False, **options):
    """A `LoraArray` with random parts; `batch` are the batch axes of `w`, `a` and `b`."""
    rng = np.random.default_rng(seed)
    options = {"alpha": 3.0} | options
    n = len(shape)
    out_axes, in_axes = options.get("out_axes", (-2,)), options.get("in_axes", (-1,))
    out, into = [shape[n + i] for i in out_axes], [shape[n + i] for i in in_axes]

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    w, a, b = normal(*batch[0], *shape), normal(*batch[1], rank, *into), normal(*batch[2], *out, rank)
    if dora:
        options["magnitude"] = jnp.asarray(rng.uniform(0.5, 2, (*batch[2], *out)), dtype)
    return ql.LoraArray(w, a, b, **options)


def exact(lora):
    """The dense array in double precision."""
    w, a, b = (np.asarray(x, np.float64) for x in (ql.materialise(lora.w), lora.a, lora.b))
    n, k = len(lora.shape), 1 + len(lora.in_axes)
    out, into = [n + i for i in lora.out_axes], [n + i for i in lora.in_axes]
    batch = [i for i in range(n) if i not in out and i not in into]
    rank = n
    a_labels = [*batch[len(batch) - (a.ndim - k) :], rank, *into]
    b_labels = [*batch[len(batch) - (b.ndim - 1 - len(out)) :], *out, rank]
    divisor = max(lora.rank, 1)
    scaling = np.asarray(lora.alpha) / (divisor**0.5 if lora.rslora else divisor)
    scaling = np.expand_dims(scaling, [i for i in range(n) if i not in batch[len(batch) - scaling.ndim :]])
    present = [i for i in range(n) if i in a_labels or i in b_labels]
    delta = np.einsum(a, a_labels, b, b_labels, present)
    delta = np.expand_dims(delta, [i for i in range(n) if i not in present])
    total = w + scaling * delta
    if lora.magnitude is not None:
        norm = np.sqrt(np.sum(total**2, axis=tuple(into), keepdims=True))
        m = np.asarray(lora.magnitude, np.float64)
        m = np.expand_dims(np.einsum(m, b_labels[:-1], sorted(b_labels[:-1])),
                           [i for i in range(n) if i not in b_labels[:-1]])  # fmt: skip
        total = m * total / norm
    return total


def agrees(got, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=tolerance * scale)


KINDS = {
    "plain": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "transposed": {"out_axes": (-1,), "in_axes": (-2,)},
    "transposed dora": {"out_axes": (-1,), "in_axes": (-2,), "dora": True},
    "trained base": {"gradients": "train"},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_value(kind):
    lora = make_lora(**KINDS[kind])
    agrees(lora.materialise(), exact(lora))
    assert (lora.shape, lora.dtype) == ((6, 5), jnp.float32)


# Which weights have rows of zeros, and an input for each.
ZERO_ROWS = {
    "a row": (lambda w: w.at[1].set(0), {}, (4,)),
    "all": (jnp.zeros_like, {}, (4,)),
    "stacked": (lambda w: w.at[0, 1].set(0), {"batch": ((2,), (2,), (2,))}, (4,)),
    "convolution": (jnp.zeros_like, {"out_axes": (-4,), "in_axes": (-3, -2, -1)}, (1, 2, 5, 5)),
}


@pytest.mark.quick("a row")
@pytest.mark.parametrize("name", ZERO_ROWS)
def test_rows_of_zeros_in_a_dora(name):
    """They have no norm to divide by."""
    change, options, x_shape = ZERO_ROWS[name]
    lora = make_lora((3, 2, 3, 3) if name == "convolution" else (3, 4), **options)
    lora = with_magnitude(lora.replace(w=change(lora.w), b=jnp.zeros_like(lora.b)))
    lora, x = lora.replace(gradients="train"), normal(*x_shape, seed=3)

    def run(w, x):
        return jax.lax.conv(x, w, (1, 1), "SAME") if name == "convolution" else w @ x

    agrees(jax.jit(ql.quaxify(run))(lora, x), run(lora.w, x))
    for merged in (False, True):
        loss = lambda lora, x: jnp.sum(run(lora.merged(), x) if merged else ql.quaxify(run)(lora, x))
        grads = jax.grad(loss, (0, 1))(lora, x)
        assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))
        assert np.any(grads[0].b)
    agrees(lora.unmerged(lora.merged()).w, lora.w)
    # After the first step, these rows have a norm, but the magnitude is still zero.
    trained = lora.replace(b=jnp.ones_like(lora.b))
    agrees(trained.unmerged(trained.merged()).w, lora.w)


# -------------------------------------------------------------------------------------------------
# dot_general
# -------------------------------------------------------------------------------------------------


@st.composite
def products(draw):
    """A LoraArray with axes anywhere, another operand, and dimension numbers."""
    n_batch = draw(st.integers(0, 2))
    n_out, n_in = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    n = n_batch + n_out + n_in
    shape = draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
    # Which axes are whose: any, but for those that must stand in front.
    shared_w = draw(st.booleans())  # w lacks the batch axes, so they stand in front
    matrix = list(range(n_batch, n)) if shared_w else draw(st.permutations(range(n)))[: n_out + n_in]
    matrix = draw(st.permutations(matrix))
    out_axes, in_axes = tuple(i - n for i in matrix[:n_out]), tuple(i - n for i in matrix[n_out:])
    batch = [shape[i] for i in range(n) if i not in matrix]
    a_batch = batch if shared_w else batch[draw(st.integers(0, n_batch)) :]
    b_batch = batch[draw(st.integers(0, n_batch)) :]
    rank = draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    normal = lambda *s: rng.normal(size=s).astype(np.float32)
    dora = draw(st.booleans()) and rank > 0
    out, into = [shape[i] for i in out_axes], [shape[i] for i in in_axes]
    parts = {  # not a LoraArray yet: checking its types draws random numbers
        "w": normal(*(shape[n_batch:] if shared_w else shape)),
        "a": normal(*a_batch, rank, *into),
        "b": normal(*b_batch, *out, rank),
        "alpha": 2.0,
        "magnitude": 1 + normal(*b_batch, *out) ** 2 if dora else None,
        "out_axes": out_axes,
        "in_axes": in_axes,
    }
    paired = draw(st.permutations(range(n)))[: draw(st.integers(0, n))]
    n_contracted = draw(st.integers(0, len(paired)))
    free = draw(st.lists(st.integers(1, 3), max_size=2))
    x_axes = draw(st.permutations(range(len(paired) + len(free))))
    x_shape = [0] * len(x_axes)
    for size, axis in zip([shape[i] for i in paired] + free, x_axes, strict=True):
        x_shape[axis] = size
    x_paired = x_axes[: len(paired)]
    split = lambda axes: (tuple(axes[:n_contracted]), tuple(axes[n_contracted:]))
    return parts, normal(*x_shape), split(paired), split(x_paired)


def test_a_magnitude_for_each_of_a_stack():
    lora = make_lora(batch=((3,), (3,), (3,)))
    dora = with_magnitude(lora)
    np.testing.assert_allclose(dora.magnitude, np.linalg.norm(exact(lora), axis=-1), rtol=1e-5)
    agrees(dora.materialise(), exact(lora))


@pytest.mark.slow
@given(products(), st.booleans())
def test_dot_general_with_any_dimension_numbers(product, lora_first):
    parts, x, (contracted, batch), (x_contracted, x_batch) = product
    lora = jax.tree.map(jnp.asarray, ql.LoraArray(**parts))
    dense, x64 = exact(lora), np.asarray(x, np.float64)
    if lora_first:
        numbers = ((contracted, x_contracted), (batch, x_batch))
        operands, exact_operands = (lora, x), (dense, x64)
    else:
        numbers = ((x_contracted, contracted), (x_batch, batch))
        operands, exact_operands = (x, lora), (x64, dense)
    dot = lambda x, y: jax.lax.dot_general(x, y, numbers)
    with ql.on_materialise("error"):
        got = ql.quaxify(dot)(*operands)
    with jax.enable_x64(True):
        expected = dot(*map(jnp.asarray, exact_operands))
    assert got.shape == expected.shape
    assert got.dtype == jnp.float32
    agrees(got, expected)


def test_product_of_two_adapted_arrays():
    x, y = make_lora((4, 6)), make_lora((6, 5), seed=1, dora=True)
    with ql.on_materialise("error"):
        agrees(ql.quaxify(jnp.matmul)(x, y), exact(x) @ exact(y))


@pytest.mark.slow
def test_precision_is_that_of_the_base():
    """An adapter in float32 on a base in bfloat16: the product is bfloat16, summed in float32."""
    lora = make_lora(dtype=jnp.bfloat16)
    lora = lora.replace(a=lora.a.astype(jnp.float32), b=lora.b.astype(jnp.float32))
    x = jnp.ones(5, jnp.bfloat16)
    with ql.on_materialise("error"):
        y = ql.quaxify(jnp.matmul)(lora, x)
        z = ql.quaxify(lambda w, x: jnp.matmul(w, x, preferred_element_type=jnp.float32))(lora, x)
    assert y.dtype == jnp.bfloat16
    assert z.dtype == jnp.float32
    agrees(y, exact(lora) @ np.ones(5), 1e-2)
    agrees(z, exact(lora) @ np.ones(5), 1e-6)


# -------------------------------------------------------------------------------------------------
# What else is done to weights
# -------------------------------------------------------------------------------------------------


# -------------------------------------------------------------------------------------------------
# Over other types
# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qlora():
    """LoRA over NF4, and the same over the dense array that the codes stand for."""
    rng = np.random.default_rng(0)
    w = ql.NF4Array.quantize(jnp.asarray(rng.normal(size=(128, 64)) / 16, jnp.float32))
    a, b = (jnp.asarray(rng.normal(size=s) / 8, jnp.float32) for s in ((4, 64), (128, 4)))
    return ql.LoraArray(w, a, b, alpha=8), ql.LoraArray(w.materialise(), a, b, alpha=8)


X = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)


@pytest.mark.slow
def test_no_pair_of_types_is_ambiguous():
    ql.check_ambiguities(
        ql.LoraArray, ql.TrainableArray, ql.LoraBias, ql.NF4Array, ql.Int8Array, ql.SparseArray,
        ql.BlockSparseArray, zero.Zero, zero.Full, zero.Identity,
    )  # fmt: skip


@pytest.mark.quick("plain", "rslora", "transposed", "trained base")
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_constants(kind):
    lora = make_lora(**KINDS[kind])
    matmul = ql.quaxify(jnp.matmul)
    with ql.on_materialise("error"):
        none = matmul(lora, zero.Zero((5, 3)))
        same = matmul(lora, zero.Identity(5))
    assert isinstance(none, zero.Zero)
    assert none.shape == (6, 3)
    agrees(ql.materialise(same), exact(lora))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_frozen_unless_it_is_trained(kind):
    lora, x = make_lora(**KINDS[kind]), jnp.linspace(-1, 1, 5)
    loss = lambda lora: jnp.sum(jnp.sin(ql.quaxify(jnp.matmul)(lora, x)))
    frozen, trained = (jax.grad(loss)(lora.replace(gradients=mark)) for mark in ("none", "train"))
    assert not np.any(frozen.w)
    w = jax.grad(lambda w: jnp.sum(jnp.sin(lora.replace(w=w).merged() @ x)))(lora.w)
    agrees(trained.w, w, 2e-5)
    agrees(frozen.a, trained.a)
    agrees(frozen.b, trained.b)


# -------------------------------------------------------------------------------------------------
# Convolutions and experts
# -------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "plain": {},
    "same": {"padding": "SAME"},
    "strided": {"window_strides": (2, 1)},
    "dilated": {"rhs_dilation": (1, 2), "padding": ((1, 1), (2, 0))},
    "transposed": {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))},
    "groups": {"feature_group_count": 2},
    "depthwise": {"feature_group_count": 4},
    "channels last": {"dimension_numbers": ("NHWC", "HWIO", "NHWC")},
}


@pytest.mark.quick("depthwise-True")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, dora):
    options = {"window_strides": (1, 1), "padding": "VALID"} | CONVOLUTIONS[name]
    groups = options.get("feature_group_count", 1)
    last = name == "channels last"
    shape, x_shape = ((3, 2, 4, 6), (2, 7, 5, 4)) if last else ((8, 4 // groups, 3, 2), (2, 4, 7, 5))
    out_axes, in_axes = ((-1,), (-2, -4, -3)) if last else ((-4,), (-3, -2, -1))
    kernel = make_lora(shape, dora=dora, out_axes=out_axes, in_axes=in_axes)
    x = jnp.asarray(np.random.default_rng(2).normal(size=x_shape), jnp.float32)
    f = lambda x, w: jax.lax.conv_general_dilated(x, w, **options)
    with ql.on_materialise("error"):
        y = jax.jit(ql.quaxify(f))(x, kernel)
    agrees(y, f(x, jnp.asarray(exact(kernel), jnp.float32)), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_ragged_dot(swapped):
    """A mixture of experts, its weights stored as (in, out) or as (out, in)."""
    axes = {"out_axes": (-1,), "in_axes": (-2,)} if not swapped else {}
    experts = make_lora((5, 4), batch=((3,), (3,), (3,)), **axes)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(9, 5)), jnp.float32)
    sizes = jnp.array([4, 0, 5])
    f = lambda x, w: jax.lax.ragged_dot(x, w, sizes)
    with ql.on_materialise("error"):
        y = jax.jit(ql.quaxify(f))(x, experts)
        grads = jax.grad(lambda w: jnp.sum(jnp.sin(ql.quaxify(f)(x, w))))(experts)
    dense = exact(experts)
    expected = np.concatenate([np.asarray(x)[:4] @ dense[0], np.asarray(x)[4:] @ dense[2]])
    agrees(y, expected)
    materialised = jax.grad(lambda w: jnp.sum(jnp.sin(f(x, w.materialise()))))(experts)
    agrees(grads.a, materialised.a)
    agrees(grads.b, materialised.b)


# -------------------------------------------------------------------------------------------------
# Joining
# -------------------------------------------------------------------------------------------------

JOINED = {
    "stacked": lambda x, y, w: jnp.stack([x, y, x]),
    "stacked inside": lambda x, y, w: jnp.stack([x, y], axis=1),
    "stacked with a plain one": lambda x, y, w: jnp.stack([w, y]),
    "one above the other": lambda x, y, w: jnp.concatenate([x, w, y]),
    "side by side": lambda x, y, w: jnp.concatenate([x, y, w], axis=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_joined_arrays(name, dora):
    if dora and name in ("stacked with a plain one", "side by side"):
        name = "stacked"  # others have rows of other norms
    join = JOINED[name] if not dora else lambda x, y, w: JOINED[name](x, y, y)
    x, y = make_lora(dora=dora), make_lora(seed=1, rank=3, rslora=True, dora=dora)
    w = jnp.asarray(np.random.default_rng(3).normal(size=(6, 5)), jnp.float32)
    with ql.on_materialise("error"):
        out = ql.quaxify(join)(x, y, w)
    assert isinstance(out, ql.LoraArray)
    dense = [jnp.asarray(exact(v), jnp.float32) for v in (x, y)]
    agrees(exact(out), join(*dense, w))

    # The plain part is open to gradients, the bases of the adapted ones are not.
    v = jnp.linspace(-1, 1, out.shape[-1])
    loss = lambda x, y, w: jnp.sum(jnp.sin(ql.quaxify(lambda *xs: join(*xs) @ v)(x, y, w)))
    plain = lambda x, y, w: jnp.sum(jnp.sin(join(x.materialise(), y.materialise(), w) @ v))
    grads, expected = (jax.grad(f, argnums=(0, 1, 2))(x, y, w) for f in (loss, plain))
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        agrees(g, e, 2e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_joined_to_a_stack_with_shared_adapters(axis):
    x = make_lora(batch=((2,), (), ()))
    w = jnp.asarray(np.random.default_rng(3).normal(size=(2, 6, 5)), jnp.float32)
    with ql.on_materialise("error"):
        for operands in ((x, w), (w, x)):
            out = ql.quaxify(lambda x, y: jnp.concatenate([x, y], axis))(*operands)
            assert isinstance(out, ql.LoraArray)
            dense = [exact(v) if v is x else v for v in operands]
            agrees(exact(out), jnp.concatenate([jnp.asarray(v, jnp.float32) for v in dense], axis))


@pytest.mark.parametrize("scale", [lambda x: x / 0.0, lambda x: jnp.inf * x])
def test_a_factor_that_is_not_finite(scale):
    x = make_lora()
    with ql.on_materialise("allow"):
        np.testing.assert_array_equal(ql.quaxify(scale)(x), np.sign(exact(x)) * np.inf)


@pytest.mark.parametrize("scale", [lambda x, y: x / (0 * y), lambda x, y: x * (1 / (0 * y))])
def test_no_factor_of_an_array_without_elements_is_divided_by_zero(scale):
    w = ql.LoraArray(normal(0, 4), normal(2, 4), normal(0, 2), gradients="train")
    gradients = jax.jit(jax.grad(lambda w, y: ql.quaxify(scale)(w, y).materialise().sum(), (0, 1)))
    found, y = gradients(w, jnp.ones((1, 4)))
    np.testing.assert_array_equal(found.a, 0)
    np.testing.assert_array_equal(y, 0)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("old", "new"), [((0, 4), (4, 0)), ((0, 4), (0, 2, 2)), ((1, 1), (1,)), ((1, 1), ())]
)
def test_reshape_without_elements_or_with_one(old, new):
    w = ql.LoraArray(normal(*old), normal(2, old[1]), normal(old[0], 2, seed=1))
    with ql.on_materialise("allow"):
        found = ql.materialise(ql.quaxify(lambda w: w.reshape(new))(w))
    np.testing.assert_allclose(found, w.materialise().reshape(new), rtol=1e-6)
