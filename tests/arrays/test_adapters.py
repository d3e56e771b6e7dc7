"""Adapters of published methods, and the combinators that they are made of."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import adapters as A
from quaxlike.arrays.structured import BlockDiagonalMatrix, DiagonalMatrix, KroneckerMatrix
from tests.samples import normal, random_key

KEY = random_key(0)


def _x(*shape, seed=0):
    return 0.3 * normal(*shape, seed=seed)


# By name: a method on a weight of 4 outputs and 6 inputs, with `layout` for its axes, and stacked parts.
def _methods(w, batch=(), **layout):
    out = tuple(w.shape[i] for i in layout.get("out_axes", (-2,)))
    into = tuple(w.shape[i] for i in layout.get("in_axes", (-1,)))
    x = lambda *shape, seed=0: _x(*batch, *shape, seed=seed)
    places = jnp.broadcast_to(jnp.asarray([3, 7, 20]), (*batch, 3))
    return {
        "sum": A.SumArray(w, KroneckerMatrix(x(2, 3), x(2, 2)), **layout),
        "scaled": A.ScaledArray(w, 1 + x(*out), 1 + x(*into), **layout),
        "rotated": A.RotatedArray(w, BlockDiagonalMatrix(x(3, 2, 2)), **layout),
        "rotated outputs": A.RotatedArray(w, BlockDiagonalMatrix(x(2, 2, 2)), of_outputs=True, **layout),
        "hadamard": A.HadamardArray(w, x(*out, *into), **layout),
        "IA3": A.IA3Array(w, 1 + x(*out), **layout),
        "OFT": A.OFTArray(w, x(2, 3), **layout),
        "OFT, shared": A.OFTArray(w, x(1, 3), terms=5, **layout),
        "BOFT": A.BOFTArray(w, x(1, 3, 2, 2), 1 + x(*out), **layout),
        "HRA": A.HRAArray(w, x(6, 3), **layout),
        "HRA, orthogonal": A.HRAArray(w, x(6, 3), orthogonal=True, **layout),
        "VeRA": A.VeRAArray(w, x(2, 9), x(7, 2), x(2), x(*out), **layout),
        "AdaLoRA": A.AdaLoRAArray(w, x(2, 6), x(4, 2), x(2), scaling=0.5, **layout),
        "DeLoRA": A.DeLoRAArray(w, x(2, 6), x(4, 2), x(), 1 + x(6), **layout),
        "MiSS": A.MiSSArray(w, x(4, 4), **layout),
        "MiSS, mini": A.MiSSArray(w, x(4, 2), **layout),
        "MiSS, bat": A.MiSSArray(w, bat=x(2, 2, 2), **layout),
        "GraLoRA": A.GraLoRAArray(w, x(2, 3, 4), x(2, 4, 2), x(1, 6), x(4, 1), scaling=0.5, **layout),
        "RandLoRA": A.RandLoRAArray(w, x(2, 1, 5), x(8, 3, 2), x(2, 2), x(2, 4), **layout),
        "LoHa": A.LoHaArray(w, x(4, 1), x(1, 6), x(4, 1), x(1, 6), **layout),
        "LoHa, dense": A.LoHaArray(w, x(4, 3), x(3, 6), x(4, 3), x(3, 6), **layout),
        "LoKr": A.LoKrArray(w, x(2, 2), x(2, 1), second_b=x(1, 3), alpha=2, **layout),
        "HiRA": A.HiRAArray(w, x(2, *into), x(*out, 2), **layout),
        "SHiRA": A.SHiRAArray(w, _sparse(batch), **layout),
        "C3A": A.C3AArray(w, x(2, 3, 2), **layout),
        "FourierFT": A.FourierFTArray(w, x(3), places, scaling=20.0, **layout),
    }


def _sparse(batch):
    places = np.broadcast_to([[0, 1], [1, 2], [3, 0]], (*batch, 3, 2))
    return ql.SparseArray.from_coo(_x(*batch, 3), places, (*batch, 4, 6))


LAYOUTS = {
    "oi": ((4, 6), {}),
    "io": ((6, 4), {"out_axes": (-1,), "in_axes": (-2,)}),
    "ioo": ((6, 2, 2), {"out_axes": (-2, -1), "in_axes": (-3,)}),
    "iio": ((2, 3, 4), {"out_axes": (-1,), "in_axes": (-3, -2)}),
}
NAMES = [*jax.eval_shape(lambda: _methods(_x(4, 6)))]


def _check(program, w, tolerance=1e-5):
    with ql.on_materialise("error"):
        found = ql.materialise(jax.jit(ql.quaxify(program))(w))
    expected = jax.jit(program)(w.materialise())
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def _dot(x, w_axes, x_axes, batch=((), ()), *, left=True):
    def program(w):
        if left:
            return jax.lax.dot_general(w, x, ((w_axes, x_axes), batch))
        return jax.lax.dot_general(x, w, ((x_axes, w_axes), batch[::-1]))

    return program


def test_it_is_negated():
    _check(jnp.negative, A.HadamardArray(_x(4, 6), _x(4, 6, seed=1)))


def test_each_multiplies_as_its_array():
    """All in one program, in the usual form."""
    made, x = _methods(_x(4, 6, seed=9)), _x(3, 6, seed=1)
    ws = {name: w for name, w in made.items() if name[0].isupper() and "," not in name}
    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(lambda ws: {name: x @ w.T for name, w in ws.items()}))(ws)
    for name, w in jax.jit(ql.materialise)(ws).items():
        np.testing.assert_allclose(found[name], x @ np.asarray(w).T, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.each_value
@pytest.mark.quick("rotated-io")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_products_from_both_sides_over_outputs_and_inputs(name, layout):
    shape, axes = LAYOUTS[layout]
    w = _methods(_x(*shape, seed=9), **axes)[name]
    for ends in (w.out_axes, w.in_axes):
        summed = tuple(w.ndim + axis for axis in ends)
        x = normal(3, *(w.shape[axis] for axis in summed))
        for left in (True, False):
            _check(_dot(x, summed, tuple(range(1, x.ndim)), left=left), w)
    turned = ql.quaxify(lambda w: jnp.swapaxes(w, 0, -1))(w)
    assert ql.is_value(turned)
    np.testing.assert_allclose(turned.materialise(), jnp.swapaxes(w.materialise(), 0, -1), atol=1e-6)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("base", [(), (5,)], ids=["one base", "stacked bases"])
@pytest.mark.parametrize("name", NAMES)
def test_several_on_one_weight_or_on_stacked_ones(name, base):
    w = _methods(_x(*base, 4, 6, seed=9), batch=(5,))[name]
    assert w.shape == (5, 4, 6)
    of_each, of_all = normal(5, 3, 6), normal(3, 6)
    for left in (True, False):
        _check(_dot(of_each, (2,), (2,), ((0,), (0,)), left=left), w)
        _check(_dot(of_all, (2,), (1,), left=left), w)
        _check(_dot(normal(5, 3, 4), (1,), (2,), ((0,), (0,)), left=left), w)
    if base:
        _check(lambda w: jax.lax.scan(lambda c, w: (c, w @ of_all[0]), 0, w)[1], w)
        _check(lambda w: w[1:3].swapaxes(1, 2)[0] @ normal(4), w)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_array(name, x64):
    w = jax.tree.map(
        lambda x: jnp.asarray(x, float) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        _methods(_x(4, 6, seed=9))[name],
    )
    params, rest = eqx.partition(w, eqx.is_inexact_array)
    x = jnp.asarray(normal(3, 6), float)

    def loss(params, x, dense):
        w = eqx.combine(params, rest)
        w = w.merged() if dense else w
        return jnp.sum(jnp.sin(ql.quaxify(lambda w: x @ w.T)(w)))

    found, expected = (
        jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(params, x, dense) for dense in (False, True)
    )
    assert not np.any(found[0].w)  # which is frozen
    found, expected = ((dataclasses.replace(g[0], w=None), g[1]) for g in (found, expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.quick("AdaLoRA")
@pytest.mark.parametrize("name", NAMES)
def test_merged_and_taken_out_again(name):
    model = {"w": _methods(_x(4, 6, seed=9))[name]}
    merged = ql.merge(model)
    np.testing.assert_allclose(merged["w"], model["w"].materialise())
    again = ql.unmerge(merged, model)
    np.testing.assert_allclose(again["w"].w, model["w"].w, atol=2e-6)


# On a weight of 96 outputs and 64 inputs, but for those that form a dense array.
def _thin(w):
    r = lambda *shape: _x(*shape, seed=len(shape))
    places = np.stack([np.arange(160) % 96, np.arange(160) % 64], -1)
    delta = ql.SparseArray.from_coo(r(160), places, (96, 64))
    return {
        "IA3": A.IA3Array(w, 1 + r(96)),
        "OFT": A.OFTArray(w, r(16, 6)),
        "BOFT": A.BOFTArray(w, r(3, 16, 4, 4), 1 + r(96)),
        "HRA": A.HRAArray(w, r(64, 3)),
        "VeRA": A.VeRAArray(w, r(2, 64), r(96, 2), r(2), r(96)),
        "AdaLoRA": A.AdaLoRAArray(w, r(2, 64), r(96, 2), r(2)),
        "DeLoRA": A.DeLoRAArray(w, r(2, 64), r(96, 2), r(), r(64)),
        "MiSS": A.MiSSArray(w, r(8, 96)),
        "GraLoRA": A.GraLoRAArray(w, r(2, 32, 4), r(2, 4, 48)),
        "LoHa": A.LoHaArray(w, r(96, 2), r(2, 64), r(96, 2), r(2, 64)),
        "LoKr": A.LoKrArray(w, r(8, 8), r(12, 8)),
        "SHiRA": A.SHiRAArray(w, delta),
        "C3A": A.C3AArray(w, r(12, 8, 8)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [*jax.eval_shape(lambda: _thin(_x(96, 64)))])
def test_no_dense_change_is_formed(name):
    """Neither in a step's forward pass nor in its backward pass has anything the size of the weight."""
    w, x = _thin(_x(96, 64))[name], normal(2, 64)
    params, rest = eqx.partition(w, ql.trainable(w))

    def loss(params, x):
        return jnp.sum(jnp.sin(ql.quaxify(jnp.matmul)(eqx.combine(params, rest), x.T)))

    with ql.on_materialise("error"):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, x)
    found = [eqn for eqn in _equations(jaxpr.jaxpr) if any(v.aval.size >= w.size // 2 for v in eqn.outvars)]
    assert all(
        eqn.primitive.name == "transpose" and eqn.outvars[0].aval.shape == (64, 96) for eqn in found
    ), found


def _equations(jaxpr):
    """All that is computed: `stop_gradient` returns its operand."""
    for eqn in (eqn for eqn in jaxpr.eqns if eqn.primitive.name != "stop_gradient"):
        inner = [x for x in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr) if _is_jaxpr(x)]
        if not inner:
            yield eqn
        for x in inner:
            yield from _equations(getattr(x, "jaxpr", x))


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.slow
def test_rows_of_embeddings_are_looked_up_first():
    table, axes = _x(1000, 8), {"out_axes": (-1,), "in_axes": (-2,)}
    programs = [
        lambda w: w[jnp.array([3, 1, 2000])], lambda w: jnp.take(w, jnp.array([[7], [3000]]), axis=0),
        lambda w: jax.vmap(lambda i: w[i])(jnp.array([4, 0])),
    ]  # fmt: skip
    for w in (
        A.OFTArray(table, _x(2, 6), of_outputs=True, **axes),
        A.HiRAArray(table, _x(2, 1000), _x(8, 2), **axes),
        A.IA3Array(table, 1 + _x(8), **axes),
        A.ScaledArray(table, 1 + _x(8), 1 + _x(1000), **axes),
        A.SumArray(table, ql.LoraArray(_x(8, 1000), _x(2, 1000), _x(8, 2), alpha=1), **axes),
        A.RotatedArray(
            _x(50, 2, 4), BlockDiagonalMatrix(_x(2, 4, 4)), of_outputs=True, out_axes=(-2, -1), in_axes=(-3,)
        ),
    ):
        for program in programs:
            _check(program, w)
            jaxpr = jax.make_jaxpr(ql.quaxify(program))(w)
            assert not any(v.aval.size >= 8000 for eqn in _equations(jaxpr.jaxpr) for v in eqn.outvars)


@pytest.mark.slow
def test_the_base_may_be_quantised_and_16_bits_wide():
    x = normal(3, 64)
    w = ql.NF4Array.quantize(normal(96, 64), block_size=32)
    for make in (lambda w: _thin(w)["LoKr"], lambda w: _thin(w)["OFT"], lambda w: _thin(w)["IA3"]):
        _check(lambda w: x @ w.T, make(w), 1e-3)
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), make(normal(96, 64).astype(jnp.bfloat16)))
        half = half.replace(**{name: getattr(make(w), name) for name in half.trained()})
        with jax.numpy_dtype_promotion("standard"), ql.on_materialise("error"):
            y = ql.quaxify(lambda w: x.astype(jnp.bfloat16) @ w.T)(half)
        assert (half.dtype, y.dtype) == (jnp.bfloat16, jnp.bfloat16)
        np.testing.assert_allclose(
            y.astype(float), x @ half.materialise().astype(float).T, rtol=0.05, atol=0.2
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["OFT", "BOFT", "HRA", "HRA of orthogonal directions"])
def test_rotations_are_solved_for_in_float32(name, dtype):
    w = _x(4, 8)
    make = {
        "OFT": lambda: A.OFTArray(w, _x(2, 6)),
        "BOFT": lambda: A.BOFTArray(w, _x(2, 4, 2, 2), 1 + _x(4)),
        "HRA": lambda: A.HRAArray(w, _x(8, 2)),
        "HRA of orthogonal directions": lambda: A.HRAArray(w, _x(8, 2), orthogonal=True),
    }[name]()
    half = jax.tree.map(lambda a: a.astype(dtype), make)
    with jax.numpy_dtype_promotion("standard"), ql.on_materialise("error"):
        y = ql.quaxify(lambda w: w @ jnp.ones(8, dtype))(half)
    assert (half.materialise().dtype, y.dtype) == (jnp.dtype(dtype), jnp.dtype(dtype))
    np.testing.assert_allclose(
        np.float64(y), np.float64(make.materialise() @ jnp.ones(8)), rtol=0.05, atol=0.3
    )


@pytest.mark.slow
def test_each_sample_chooses_one_of_several():
    mlp = eqx.nn.MLP(6, 6, 6, depth=1, key=KEY)
    make = lambda i: lambda w, **_: A.OFTArray(w, _x(2, 3, seed=i))
    models = [ql.adapt(mlp, make(i)) for i in range(3)]
    stacked, indices, x = ql.stack_adapters(models), np.array([2, 0, 1, 1]), normal(4, 6)

    @eqx.filter_jit
    def run(indices, x):
        return jax.vmap(lambda i, x: ql.quaxify(ql.choose_adapter(stacked, i))(x))(indices, x)

    with ql.on_materialise("error"):
        y = run(indices, x)
    expected = np.stack([ql.quaxify(models[i])(x) for i, x in zip(indices, x, strict=True)])
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.slow
def test_rows_out_of_bounds_leave_gradients_finite():
    w = A.OFTArray(_x(9, 6), _x(3, 1), of_outputs=True, out_axes=(-1,), in_axes=(-2,))

    def loss(skew, dense):
        v = w.replace(skew=skew)
        rows = ql.quaxify(lambda v: v.at[jnp.array([1, 20])].get(mode="fill"))(
            v.materialise() if dense else v
        )
        return jnp.nansum(rows**2)

    found, expected = (jax.grad(loss)(w.skew, dense) for dense in (False, True))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_combinators_hold_each_other():
    """Any Value is a change or a factor, on any base, another adapter among them."""
    w = A.ScaledArray(A.RotatedArray(A.SumArray(_x(4, 6), KroneckerMatrix(_x(2, 3), DiagonalMatrix(_x(2)))),
                                     ql.LoraArray(_x(6, 6), _x(2, 6), _x(6, 2))), 1 + _x(4))  # fmt: skip
    for axis in (0, 1):
        _check(_dot(normal(3, w.shape[axis]), (axis,), (1,)), w)
    for other in (ql.LoraArray(_x(6, 5), _x(2, 5), _x(6, 2)), A.OFTArray(_x(6, 4), _x(2, 1))):
        with ql.on_materialise("error"):
            y = ql.quaxify(jnp.matmul)(w, other)
        np.testing.assert_allclose(y, w.materialise() @ other.materialise(), atol=1e-5)


@pytest.mark.slow
def test_coefficients_that_share_their_places():
    w, spectra, places = _x(4, 6), _x(2, 3), jnp.array([3, 7, 20])
    shared = A.FourierFTArray(w, spectra, places, scaling=20.0)
    each = [A.FourierFTArray(w, spectrum, places, scaling=20.0).materialise() for spectrum in spectra]
    np.testing.assert_allclose(shared.materialise(), jnp.stack(each), atol=1e-6)


def test_a_method_beside_an_array_that_is_trained_in_full():
    """Each has a `default` of its own; that of the method composes its array first."""
    x = A.MiSSArray(normal(4, 6), normal(2, 4, seed=1))
    v = ql.TrainableArray(normal(4, 6, seed=2))
    with ql.on_materialise("allow"):
        product = ql.quaxify(jnp.multiply)(x, v)
    np.testing.assert_allclose(ql.materialise(product), x.materialise() * v.materialise(), rtol=1e-5)
