"""Values that hold others in units, or with names: where the part cannot stay as it is, it becomes dense,
under the policy, and what holds it stays. Values and gradients are those of the program on arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.structured import DiagonalMatrix
from quaxlike.arrays.unitful import Unitful
from quaxlike.arrays.zero import Full, Zero

_RNG = np.random.default_rng(0)
_W, _A, _B = (_RNG.normal(size=shape) for shape in ((4, 4), (2, 4), (4, 2)))

HOLDERS = {"units": lambda x: Unitful(x, "m"), "names": lambda x: NamedArray(x, ("i", "j"))}


def _lora():
    return ql.LoraArray(jnp.asarray(_W), jnp.asarray(_A), jnp.asarray(_B), gradients="train")


def _nf4():
    return ql.NF4Array.quantize(jnp.asarray(_W), block_size=32)


def _diagonal():
    return DiagonalMatrix(jnp.asarray(_W[0]))


@jax.custom_jvp
def twice(x):
    return x + x


@twice.defjvp
def _(primals, tangents):
    return jax.jvp(lambda x: x * 2, primals, tangents)


@jax.custom_vjp
def thrice(x):
    return x * 3


thrice.defvjp(lambda x: (x * 3, x), lambda x, ct: (ct * 3,))


@jax.custom_jvp
def twice_with_dense_tangents(x):
    return x * 2


@twice_with_dense_tangents.defjvp
def _(primals, tangents):
    return primals[0] * 2, tangents[0] * 2 + 0 * tangents[0][0, 0]


@jax.custom_vjp
def thrice_with_dense_cotangents(x):
    return x * 3


thrice_with_dense_cotangents.defvjp(lambda x: (x * 3, None), lambda _, ct: (ct * 3 + 0 * ct[0, 0],))


def half(x):
    halved = lambda _, y: y * 0.5
    return lax.custom_linear_solve(lambda y: y * 2.0, x, halved, transpose_solve=halved)


def backwards(x):
    flipped = lambda _, y: y[::-1]
    return lax.custom_linear_solve(lambda y: y[::-1], x, flipped, transpose_solve=flipped)


PROGRAMS = {
    "custom_jvp": lambda x: twice(x)[1:3],
    "custom_vjp": thrice,
    "custom_vjp of a slice": lambda x: thrice(x[1:3, 1:2]),
    "custom_jvp of a sum": lambda x: twice(x + x[0, 0]),
    "custom_jvp with dense tangents": twice_with_dense_tangents,
    "custom_vjp with dense cotangents": thrice_with_dense_cotangents,
    "carry that becomes dense": lambda x: lax.scan(lambda c, _: (c + x + x[0, 0], None), x, length=2)[0],
    "linear solve": half,
    "linear solve, backwards": backwards,
    "branches": lambda x: lax.cond(True, lambda: x, lambda: x + x[0, 0]),
    "rows of a stack": lambda x: lax.map(lambda row: row[1:3], jnp.stack([x, x + x])),
    "rows": lambda x: lax.map(lambda row: row * 2, x),
    "stack of rows": lambda x: lax.scan(lambda c, _: (c, x * 2), 0.0, length=2)[1],
}


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
@pytest.mark.parametrize("part", [_lora, _nf4, _diagonal])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_what_it_is_on_arrays(name, holder, part, x64, default_promotion):
    f, x = PROGRAMS[name], HOLDERS[holder](part())
    moving, still = _split(x)

    def loss(f, combine):
        return lambda moving: jnp.sum(jnp.sin(ql.materialise(f(combine(moving)))))

    on_values = loss(ql.quaxify(f), lambda moving: _joined(moving, still))
    on_arrays = loss(f, lambda moving: ql.materialise(_joined(moving, still)))
    for transform in (lambda f: f, jax.jit):
        ours, ours_by = transform(jax.value_and_grad(on_values))(moving)
        theirs, theirs_by = jax.value_and_grad(on_arrays)(moving)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-6), ours_by, theirs_by)
    y = jax.eval_shape(ql.quaxify(f), x)
    assert type(y) is type(x)


def _split(x):
    leaves, tree = jax.tree.flatten(x)
    moving = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return moving, (leaves, tree)


def _joined(moving, still):
    leaves, tree = still
    moving = iter(moving)
    leaves = [next(moving) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_constant_that_a_scan_stacks(holder):
    x = HOLDERS[holder](Zero((4, 4), jnp.float32))
    y = ql.quaxify(lambda x: lax.scan(lambda c, _: (c, x), 0.0, length=2)[1])(x)
    assert type(y) is type(x)
    assert y.shape == (2, 4, 4)
    np.testing.assert_array_equal(ql.materialise(y), 0)


@pytest.mark.quick("<lambda>1")
@pytest.mark.parametrize("inside", [lambda x: x, HOLDERS["names"]])
def test_a_constant_in_a_custom_jvp_has_tangents_in_its_unit(inside):
    product = jax.custom_jvp(lambda x, y: y @ x)
    product.defjvp(lambda primals, tangents: jax.jvp(lambda x, y: y @ x, primals, tangents))
    x, y = Unitful(inside(Full(0.25, (4, 4))), "m"), jnp.ones((1, 4), jnp.float32)
    found = jax.grad(lambda y: jnp.sum(ql.materialise(ql.quaxify(product)(x, y).array)))(y)
    np.testing.assert_array_equal(ql.materialise(found), np.full((1, 4), 1.0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
@pytest.mark.parametrize("part", [_lora, _nf4, _diagonal, lambda: jnp.asarray(_W)])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_cotangent_of_an_array_beside_a_value(part, holder, x64):
    product = jax.custom_vjp(lambda x, y: jnp.sum(x * y))
    product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda res, ct: (ct * res[1], ct * res[0]))
    x, y = HOLDERS[holder](part()), jnp.ones((4, 4))
    for transform in (lambda f: f, jax.jit):
        found = transform(jax.grad(lambda y: ql.materialise(ql.quaxify(product)(x, y))))(y)
        np.testing.assert_allclose(found, ql.materialise(x), rtol=1e-6)


@pytest.mark.slow
def test_a_system_whose_transposed_product_has_no_leaves(x64):
    y = jnp.asarray(_W)

    def loss(y, x):
        solution = ql.quaxify(jnp.linalg.solve)(x, y)
        assert str(solution.unit) == "m⁻¹"
        return jnp.sum(ql.materialise(solution.array))

    wanted = jax.grad(lambda y: jnp.sum(jnp.linalg.solve(jnp.zeros((4, 4)), y)))(y)
    for transform in (lambda f: f, jax.jit):
        found = transform(jax.grad(loss))(y, Unitful(Zero((4, 4), y.dtype), "m"))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(4, 4), (4,)])
def test_second_derivatives_of_a_system_of_zeros(x64, shape):
    y = jnp.asarray(_W) if len(shape) == 2 else jnp.asarray(_W)[0]
    inner = jax.grad(lambda y, x: jnp.sum(jnp.linalg.solve(x, y) ** 2))
    loss = lambda y, x: jnp.sum(ql.materialise(ql.quaxify(inner)(y, x)))
    gradient = jax.jit(jax.grad(loss))
    wanted = gradient(y, jnp.zeros((4, 4)))
    np.testing.assert_array_equal(gradient(y, Unitful(Zero((4, 4), y.dtype), "m")), wanted)


@pytest.mark.slow
def test_a_plain_array_beside_a_matrix_with_names():
    x = HOLDERS["names"](_diagonal())
    with ql.on_materialise("allow"):
        y = ql.quaxify(lambda x, y: lax.cond(x[0, 0] > 9, lambda: x, lambda: y))(x, jnp.ones((4, 4), x.dtype))
    assert y.names == ("i", "j")
    np.testing.assert_array_equal(ql.materialise(y), 1)


@pytest.mark.quick("average-_lora", "no rule-_nf4")
@pytest.mark.parametrize("part", [_lora, _nf4, _diagonal, lambda: HOLDERS["names"](_lora())])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: lax.fori_loop(0, 2, lambda _, c: 0.5 * c + 0.5 * (x + 0.3), x),
        lambda x: lax.fori_loop(0, 2, lambda _, c: c + x, jnp.zeros(x.shape, x.dtype)),
        lambda x: lax.cond(True, lambda: x, lambda: x * 2.0),
        lambda x: lax.linalg.hessenberg(x)[0],
    ],
    ids=["average", "sum", "branches", "no rule"],
)
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
def test_a_unit_without_dimensions_is_dropped(program, part):
    """It comes off in the rules, too."""
    x = part()
    y = ql.quaxify(program)(Unitful(x, "m/m"))
    np.testing.assert_allclose(ql.materialise(y), program(ql.materialise(x)), rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("start", ["zeros", "itself", "half of it"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_part_that_grows_in_a_loop_is_dense_and_what_holds_it_stays(holder, start, x64):
    """The rank grows in each iteration."""

    def run(x):
        init = {"zeros": jnp.zeros(x.shape, x.dtype), "itself": x, "half of it": x * 0.5}[start]
        return lax.scan(lambda c, _: (c + x, None), init, length=3)[0]

    def found(w, a, b):
        return ql.quaxify(run)(HOLDERS[holder](ql.LoraArray(w, a, b, alpha=3.0)))

    def value_and_grads(f):
        total = lambda *parts: jnp.sum(jnp.sin(f(*parts)))
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(_W, _A, _B)

    with ql.on_materialise("allow"):
        y = jax.jit(found)(_W, _A, _B)
        ours = value_and_grads(lambda *parts: ql.materialise(found(*parts)))
    assert jax.tree.structure(y) == jax.tree.structure(HOLDERS[holder](jnp.asarray(_W)))
    dense = value_and_grads(lambda w, a, b: run(w + 1.5 * b @ a))
    # The base is not trained.
    np.testing.assert_allclose(ours[0], dense[0])
    for x, expected in zip(ours[1][1:], dense[1][1:], strict=True):
        np.testing.assert_allclose(x, expected)
