"""`alpha` and scalings are leaves: others run in the same compiled program, and nothing trains them."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike import adapters as A
from quaxlike.arrays.lora import LoraBias
from tests.samples import drawn, normal, random_key

MLP = drawn(eqx.nn.MLP, 6, 3, 8, depth=1, key=random_key(0))
W, A_, B = normal(4, 6), normal(2, 6, seed=1), normal(4, 2, seed=2)
X = normal(5, 6, seed=3)


def lora(**options):
    return ql.LoraArray(W, A_, B, **options)


# By name: an adapter of a weight of 4 outputs and 6 inputs, for a number, and the value of that number.
METHODS = {
    "LoRA": lambda n: lora(alpha=n),
    "rsLoRA": lambda n: lora(alpha=n, rslora=True),
    "DoRA": lambda n: lora(alpha=n, magnitude=1 + normal(4, seed=4)),
    "AdaLoRA": lambda n: A.AdaLoRAArray(W, A_, B, normal(2, seed=4), scaling=n),
    "GraLoRA": lambda n: A.GraLoRAArray(
        W, normal(2, 3, 4), normal(2, 4, 2), normal(1, 6), normal(4, 1), scaling=n
    ),
    "LoHa": lambda n: A.LoHaArray(W, B, A_, B, A_, scaling=n),
    "LoKr": lambda n: A.LoKrArray(W, normal(2, 2), normal(2, 3), alpha=n, rank=2),
    "FourierFT": lambda n: A.FourierFTArray(W, normal(3), jnp.asarray([1, 5, 9]), scaling=n),
    "RandLoRA": lambda n: A.RandLoRAArray(
        W, normal(2, 1, 4), normal(6, 2, 2), normal(2, 2), normal(2, 4), scaling=n
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_other_numbers_run_in_the_same_program(name):
    make, traces = METHODS[name], []

    def run(w, x):
        traces.append(None)
        return ql.quaxify(lambda w, x: x @ w.T)(w, x)

    jitted = jax.jit(run)
    for compiled in (jitted, eqx.filter_jit(run)):
        found = [compiled(make(n), X) for n in (1, 3, np.float32(0.5), jnp.asarray(2.0))]
        assert compiled is not jitted or compiled._cache_size() == 1
        base = X @ W.T
        if name != "DoRA":  # the change is linear in the number
            for n, y in zip((3, 0.5, 2), found[1:], strict=True):
                np.testing.assert_allclose(y - base, n * (found[0] - base), rtol=1e-4, atol=1e-4)
        for n, y in zip((1, 3, 0.5, 2), found, strict=True):
            np.testing.assert_allclose(y, X @ make(n).materialise().T, rtol=1e-5, atol=1e-5)
    assert len(traces) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_numbers_are_constants(name):
    """For derivatives, for `trainable`, for `summary`, and so for an optimiser with weight decay."""
    x = METHODS[name](3)
    (number,) = x.numbers
    loss = lambda w: jnp.sum(ql.quaxify(lambda w: X @ w.T)(w) ** 2)
    grads = eqx.filter_grad(loss)(x)
    np.testing.assert_array_equal(getattr(grads, number), 0)
    assert any(np.any(np.asarray(getattr(grads, part))) for part in x.trained())
    np.testing.assert_array_equal(getattr(eqx.filter_grad(lambda w: jnp.sum(w.materialise()))(x), number), 0)

    spec = ql.trainable(x)
    assert getattr(spec, number) is False
    params, rest = eqx.partition(x, spec)
    optimiser = optax.adamw(0.1, weight_decay=0.5)
    with jax.numpy_dtype_promotion("standard"):
        grads = jax.grad(lambda p: loss(eqx.combine(p, rest)))(params)
        updates, _ = optimiser.update(grads, optimiser.init(params), params)
        after = eqx.combine(optax.apply_updates(params, updates), rest)
    np.testing.assert_array_equal(getattr(after, number), getattr(x, number))

    trained = sum(getattr(x, part).size for part in x.trained())
    assert ql.summary(x).trainable == trained
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(x)) - 4
    assert ql.summary(x).stored_bytes == stored


@pytest.mark.slow
def test_a_training_step_is_compiled_once():
    """For LoRA with other alphas, and with other ranks padded to one."""
    traces = []

    @eqx.filter_jit
    def step(params, rest, x):
        traces.append(None)
        loss = lambda params: jnp.sum(jax.vmap(ql.quaxify(eqx.combine(params, rest)))(x) ** 2)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    for alpha in (8, 2, 1.5):
        model = ql.loraify(MLP, rank=2, alpha=alpha, lora_bias=True, key=jax.random.key(1))
        params, rest = eqx.partition(model, ql.trainable(model))
        step(params, rest, X)
    assert len(traces) == 1


def test_a_number_reads_as_one():
    x = lora(alpha=8)
    assert x.alpha == 8
    assert x.scaling == 4
    assert float(x.alpha) == 8
    assert f"{x.alpha:g}" == "8"
    assert lora().alpha == 2
    assert lora(alpha=8, rslora=True).scaling == pytest.approx(8 / 2**0.5)
    assert x.alpha.dtype == np.float32
    known = []
    jax.eval_shape(lambda: known.append(lora(alpha=8).scaling))
    assert known == [4]  # not traced
    assert x.replace(alpha=3).alpha == 3
    assert isinstance(x.replace(alpha=3).alpha, jax.Array)
    again = eqx.tree_at(lambda x: x.alpha, x, jnp.float32(6))
    np.testing.assert_allclose(again.delta(), lora(alpha=6).delta())
    assert pickle.loads(pickle.dumps(x)).alpha == copy.deepcopy(x).alpha == 8
    with pytest.raises((TypeError, ValueError), match="alpha"):
        lora(alpha="8")
    with pytest.raises(ValueError, match=r"alpha would have to be of shape"):
        ql.LoraArray(normal(3, 4, 6), normal(3, 2, 6), normal(3, 4, 2), alpha=jnp.ones(2))


def test_pickles_with_a_static_number_are_read():
    x, bias = lora(alpha=8), LoraBias(normal(4), normal(4), 0.5)
    for value, name, number in ((x, "alpha", 8.0), (bias, "scaling", 0.5)):
        state = vars(value) | {name: number}
        again = object.__new__(type(value))
        again.__setstate__(state)
        assert jax.tree.structure(again) == jax.tree.structure(value)
        assert getattr(again, name) == number


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_number_promotes_nothing(dtype):
    half = jax.tree.map(lambda x: x.astype(dtype), lora())
    for x in (half.replace(alpha=3), half.replace(alpha=jnp.float32(3)), half):
        for y in (ql.quaxify(jnp.matmul)(x, X[0].astype(dtype)), x.materialise(), x.delta()):
            assert y.dtype == dtype
    assert ql.quaxify(lambda x: x.astype(dtype))(lora(alpha=3)).alpha.dtype == np.float32


@pytest.mark.quick("LoRA", "LoHa")
@pytest.mark.parametrize(
    "name", sorted(METHODS.keys() - {"DoRA", "LoKr"})
)  # which an array can't be lifted to
def test_models_whose_leaves_are_all_cast(name):
    """A carry or a branch holds such an adapter at one time, and an array at another."""
    cast = lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x
    w = METHODS[name](4)
    low, dense = jax.tree.map(cast, w), ql.materialise(w).astype(jnp.bfloat16)

    def run(w, other):
        twice = jnp.ones(2, jnp.bfloat16)
        return (
            jax.lax.scan(lambda c, s: (w * s, None), other, twice)[0],
            jax.lax.scan(lambda c, s: (c * s, None), w, twice)[0],
            jax.lax.cond(jnp.all(X < 100), lambda: w, lambda: other),
        )

    found = ql.materialise(jax.jit(ql.quaxify(run))(low, dense))
    for got, want in zip(found, jax.jit(run)(ql.materialise(low), dense), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.03, atol=0.03)


@pytest.mark.slow
def test_adapters_of_a_stack_have_their_own_numbers():
    """As axes of `vmap` and `scan`, in products over the axis, rows and slices."""
    alphas = [1.0, 4.0, 6.0]
    each = [
        ql.LoraArray(normal(4, 6, seed=i), normal(2, 6, seed=i + 3), normal(4, 2, seed=i + 6), alpha=n)
        for i, n in enumerate(alphas)
    ]
    dense = jnp.stack([x.materialise() for x in each])
    with ql.on_materialise("error"):
        whole = ql.quaxify(lambda *xs: jnp.stack(xs))(*each)
        assert whole.alpha.shape == (3,)
        by_hand = ql.LoraArray(whole.w, whole.a, whole.b, alpha=jnp.asarray(alphas))
        run = ql.quaxify(lambda w, x: w @ x)
        for x in (whole, by_hand):
            close = lambda y, wanted: np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
            close(jax.vmap(run, in_axes=(0, None))(x, X[0]), dense @ X[0])
            close(jax.lax.scan(lambda c, w: (c, run(w, X[0])), 0, x)[1], dense @ X[0])
            close(ql.quaxify(lambda w: jnp.einsum("noi,i->no", w, X[0]))(x), dense @ X[0])
            summed = jnp.einsum("noi,ni->o", dense, X[:3])
            close(ql.quaxify(lambda w: jnp.einsum("noi,ni->o", w, X[:3]))(x), summed)
            close(ql.quaxify(lambda w: w[1] @ X[0])(x), dense[1] @ X[0])
            close(ql.quaxify(lambda w: w[:, 1:3] @ X[0])(x), dense[:, 1:3] @ X[0])
            close(ql.quaxify(lambda w: w.transpose(0, 2, 1) @ normal(4))(x), dense.mT @ normal(4))
            close(ql.quaxify(lambda w: w[jnp.array([2, 0])] @ X[0])(x), dense[jnp.array([2, 0])] @ X[0])
            close(x.delta(), jnp.stack([x.delta() for x in each]))
            rows = ql.quaxify(lambda w: w[jnp.array([2, 0]), jnp.array([1, 3])])(x)
            close(rows, dense[jnp.array([2, 0]), jnp.array([1, 3])])


@pytest.mark.slow
def test_one_pair_of_factors_with_several_alphas():
    alphas = jnp.array([0.0, 1, 4])
    x = lora(alpha=alphas)
    dense = jnp.stack([lora(alpha=n).materialise() for n in alphas])
    assert x.shape == (3, 4, 6)
    np.testing.assert_allclose(x.materialise(), dense, rtol=1e-5)
    np.testing.assert_allclose(ql.quaxify(lambda w: w @ X[0])(x), dense @ X[0], rtol=1e-5, atol=1e-5)
    y = ql.quaxify(lambda w: jnp.einsum("noi,ni->o", w, X[:3]))(x)
    np.testing.assert_allclose(y, jnp.einsum("noi,ni->o", dense, X[:3]), rtol=1e-5, atol=1e-5)
    dora = x.replace(magnitude=1 + normal(4))
    wanted = jnp.stack([lora(alpha=n, magnitude=1 + normal(4)).materialise() for n in alphas])
    np.testing.assert_allclose(dora.materialise(), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ql.quaxify(lambda w: w @ X[0])(dora), wanted @ X[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_experts_have_their_own_numbers():
    x = ql.LoraArray(normal(3, 4, 6), normal(3, 2, 6), normal(3, 4, 2), alpha=jnp.array([1.0, 3, 5]))
    sizes = jnp.array([2, 1, 2])
    run = lambda w: jax.lax.ragged_dot(X, w.transpose(0, 2, 1), sizes)
    with ql.on_materialise("error"):
        y = ql.quaxify(run)(x)
    np.testing.assert_allclose(y, run(x.materialise()), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_branches_and_carries_hold_other_numbers():
    x, y = lora(alpha=8), lora(alpha=3)
    run = jax.jit(ql.quaxify(lambda p, x, y: jax.lax.cond(p, lambda: x, lambda: y)))
    for p, wanted in ((True, x), (False, y)):
        out = run(p, x, y)
        assert isinstance(out, ql.LoraArray)
        np.testing.assert_allclose(out.materialise(), wanted.materialise(), rtol=1e-6)
        np.testing.assert_array_equal(out.alpha, wanted.alpha)
    other = ql.LoraArray(W, normal(3, 6), normal(4, 3), alpha=5, rslora=True)
    out = ql.quaxify(lambda p, x, y: jax.lax.cond(p, lambda: x, lambda: y))(False, x, other)
    np.testing.assert_allclose(out.materialise(), other.materialise(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_stack_of_adapters_keeps_their_scalings():
    models = [
        ql.loraify(MLP, init="gaussian", key=jax.random.key(i), **options)
        for i, options in enumerate(({"rank": 2, "alpha": 8}, {"rank": 3, "alpha": 5, "rslora": True}))
    ]
    filled = lambda x: x.replace(b=normal(*x.b.shape)) if isinstance(x, ql.LoraArray) else x
    models = [jax.tree.map(filled, model, is_leaf=ql.is_value) for model in models]
    stacked = ql.stack_adapters(models)
    assert stacked.layers[0].weight.alpha.shape == (2,)
    for i, model in enumerate(models):
        chosen = ql.choose_adapter(stacked, i)
        np.testing.assert_allclose(ql.quaxify(chosen)(X[0]), ql.quaxify(model)(X[0]), rtol=1e-5)
        mine, its = model.layers[0].weight, chosen.layers[0].weight
        assert its.scaling == pytest.approx(mine.scaling)
        np.testing.assert_array_equal(its.b[:, : mine.rank], mine.b)
    alike = ql.stack_adapters([models[0], models[0]])  # what is the same is stored once
    assert alike.layers[0].weight.alpha.shape == ()


@pytest.mark.slow
def test_weights_of_a_sum_may_be_traced():
    models = [ql.loraify(MLP, rank=2, alpha=n, init="gaussian", key=jax.random.key(n)) for n in (1, 2)]
    filled = lambda x: x.replace(b=normal(*x.b.shape)) if isinstance(x, ql.LoraArray) else x
    models = [jax.tree.map(filled, model, is_leaf=ql.is_value) for model in models]
    traces = []

    @eqx.filter_jit
    def run(models, weights):
        traces.append(None)
        return ql.quaxify(ql.combine_adapters(models, weights))(X[0])

    for weights in ([0.7, 0.3], [-1.0, 2.0]):
        wanted = ql.quaxify(ql.combine_adapters(models, weights))(X[0])
        np.testing.assert_allclose(run(models, jnp.asarray(weights)), wanted, rtol=1e-5, atol=1e-5)
    assert len(traces) == 1
    with pytest.raises(ValueError, match=r"one weight a model; found 3 for 2"):
        ql.combine_adapters(models, jnp.ones(3))
