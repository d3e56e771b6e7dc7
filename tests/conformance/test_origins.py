"""A value of every shipped type keeps its type wherever it comes from: passed in, closed over, or made inside
of a transform, whether operators or functions of `jax.numpy` use it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.testing.compare import disagreement
from tests.array_types import TYPES, WEIGHTS
from tests.samples import some_of

# Each applies a function of a vector under a transform, so that what the function makes belongs to it.
TRANSFORMS = {
    "jit": lambda f, x: jax.jit(f)(x),
    "scan": lambda f, x: lax.scan(lambda c, row: (c, f(row)), 0.0, jnp.stack([x, 2 * x]))[1],
    "while": lambda f, x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "cond": lambda f, x: lax.cond(x[0] > 0, f, lambda x: f(-x), x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "grad": lambda f, x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x),
    "checkpoint": lambda f, x: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x) ** 2))(x),
}
PRODUCTS = {
    "operators": lambda w, x: w @ x + x @ w,
    "jax.numpy": lambda w, x: jnp.matmul(w, x) + jnp.matmul(x, w),
    "einsum": lambda w, x: jnp.einsum("ij,j->i", w, x),
    "lax": lambda w, x: lax.dot_general(w, x, (((1,), (0,)), ((), ()))),
}
ORIGINS = ["passed in", "closed over", "made inside"]
_QUICK = "LoraArray of NF4Array"
_NAMES = [pytest.param(n, marks=[] if n == _QUICK else pytest.mark.slow) for n in WEIGHTS]
# Few functions of JAX are enough for every type: they differ in how JAX calls them, which types do not see.
_CASES = [
    pytest.param(n, p, marks=[] if n == _QUICK else pytest.mark.slow)
    for n in WEIGHTS
    for p in PRODUCTS
    if n == _QUICK or p in ("operators", "jax.numpy")
]


def _of_the_transform(w, x):
    """`w`, of arrays that belong to the transform that traces `x`."""
    return jtu.tree_map(lambda leaf: jnp.where(x[0] == x[0], leaf, leaf), w)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize(("name", "product"), _CASES)
def test_keeps_its_type(name, origin, product, default_promotion):
    w = WEIGHTS[name]()
    f = lambda w, x: PRODUCTS[product](w, x) + x
    if origin == "made inside" and not jtu.tree_leaves(w):
        return  # of no arrays: it belongs to no transform
    x = jnp.array([0.5, -0.25, 1.0, 0.75])
    for transform, apply in some_of(TRANSFORMS, f"{name}, {origin}", 2).items():
        run = {
            "passed in": lambda w, x: apply(lambda x: f(w, x), x),
            "closed over": lambda _, x: apply(lambda x: f(w, x), x),
            # What leaves the transform is a pytree to JAX: a carry starts as an array, and ends as one.
            "made inside": lambda _, x: apply(lambda x: ql.materialise(f(_of_the_transform(w, x), x)), x),
        }[origin]
        expected = apply(lambda x: f(ql.materialise(w), x), x)
        with ql.on_materialise("error"):
            for quaxified in (ql.quaxify(run), jax.jit(ql.quaxify(run))):
                found = ql.materialise(quaxified(w if origin == "passed in" else None, x))
                assert not disagreement(found, expected, tolerance=1e-4), transform


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_gradients_by_the_leaves_of_one_that_is_made_inside(name, default_promotion):
    leaves, treedef = jtu.tree_flatten(WEIGHTS[name]())
    x = jnp.array([0.5, -0.25, 1.0, 0.75])
    floating = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def loss(make, *moving):
        for i, leaf in zip(floating, moving, strict=True):
            leaves[i] = leaf
        w = make(jtu.tree_unflatten(treedef, leaves))
        return jnp.sum(ql.materialise((w @ x) ** 2 + x @ w))

    if not floating:
        return
    of = lambda make: jax.grad(lambda moving: loss(make, *moving))
    moving = [leaves[i] for i in floating]
    with ql.on_materialise("error"):
        found = ql.quaxify(lambda moving: of(lambda w: w)(moving))(moving)
        jitted = ql.quaxify(lambda moving: jax.jit(of(lambda w: w))(moving))(moving)
    expected = of(ql.materialise)(moving)
    assert not disagreement([found, jitted], [expected, expected], tolerance=1e-4)


@pytest.mark.slow
def test_a_model_that_is_closed_over():
    """The usual way to write it: `quaxify(lambda x: model(x))`, with everything that an adapter may hold."""

    class Model(eqx.Module):
        embedding: eqx.nn.Embedding
        linear: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, i):
            return self.head(jnp.tanh(self.linear(self.embedding(i))))

    one, two, three = jax.random.split(jax.random.key(0), 3)
    model = Model(
        eqx.nn.Embedding(7, 4, key=one), eqx.nn.Linear(4, 8, key=two), eqx.nn.Linear(8, 4, key=three)
    )
    model = eqx.tree_at(lambda m: m.linear.weight, model, replace_fn=ql.NF4Array.quantize)
    model = ql.loraify(model, rank=2, where=["linear"], lora_bias=True, modules_to_save=["head"], key=one)
    rows = ql.TrainableRows(model.embedding.weight, jnp.ones((2, 4)), (1, 3))
    model = eqx.tree_at(lambda m: m.embedding.weight, model, rows)
    tokens = jnp.array([1, 2, 3])
    expected = jnp.stack([ql.quaxify(model)(i) for i in tokens])
    with ql.on_materialise("error"):
        run = ql.quaxify(lambda i: model(i))
        for found in (
            jnp.stack([run(i) for i in tokens]),
            jax.vmap(run)(tokens),
            jax.jit(jax.vmap(run))(tokens),
            ql.quaxify(lambda tokens: jax.vmap(model)(tokens))(tokens),
            ql.quaxify(lambda tokens: jax.lax.map(jax.checkpoint(lambda i: model(i)), tokens))(tokens),
        ):
            assert not disagreement(found, expected, tolerance=1e-4)


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", TYPES)
def test_what_stands_for_an_array_has_its_operators(name, default_promotion):
    if type(value := TYPES[name]()).__module__.startswith("quaxlike."):
        assert isinstance(value, ql.ArrayOperators)
