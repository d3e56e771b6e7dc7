"""What modules of Flax NNX write while they are called through `quaxify`: as plain NNX is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import quaxlike as ql

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 32))


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.bn = nnx.BatchNorm(32, rngs=nnx.Rngs(1))
        rngs = nnx.Rngs(dropout=2)
        self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])

    def __call__(self, x):
        x = self.bn(self.linear(x))
        for drop in self.drops:
            x = drop(x)
        return x


class Sowing(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(0))])
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        y = self.layers[0](x)
        self.sow(nnx.Intermediate, "seen", y)
        self.layers[0].sow(nnx.Intermediate, "below", y)
        return y


class Attending(nnx.Module):
    def __init__(self):
        self.attend = nnx.MultiHeadAttention(
            num_heads=2, in_features=32, decode=True, rngs=nnx.Rngs(0), use_bias=False
        )
        self.attend.init_cache((4, 3, 32))

    def __call__(self, x):
        return self.attend(x[:, None])


MODULES = [Net, Sowing, Attending]
call = lambda m, x: m(x)
CALLS = {
    "quaxify": lambda m, x: ql.quaxify(call)(m, x),
    "with a filter": lambda m, x: ql.quaxify(call, lambda x: True)(m, x),
    "by name": lambda m, x: ql.quaxify(lambda x, *, m: m(x))(x, m=m),
    "in a dict": lambda m, x: ql.quaxify(lambda d, x: d["m"](x))({"m": m}, x),
    "the module": lambda m, x: ql.quaxify(m)(x),
    "its method": lambda m, x: ql.quaxify(type(m).__call__)(m, x),
    "within nnx.jit": lambda m, x: nnx.jit(ql.quaxify(call))(m, x),
    "around nnx.jit": lambda m, x: ql.quaxify(nnx.jit(call))(m, x),
    "twice": lambda m, x: ql.quaxify(ql.quaxify(call))(m, x),
    "around nnx.remat": lambda m, x: ql.quaxify(nnx.remat(call))(m, x),
}


def same_state(found, expected):
    found, expected = (nnx.to_flat_state(nnx.state(m)) for m in (found, expected))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (_, x), (_, y) in zip(found, expected, strict=True):
        x, y = (ql.materialise(v.get_value()) for v in (x, y))
        if isinstance(x, tuple):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), x, y)
        elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(jax.random.key_data(x), jax.random.key_data(y))
        else:
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("module", MODULES)
def test_what_is_written_arrives(module, how):
    found, expected = module(), module()
    for _ in range(3):
        np.testing.assert_allclose(CALLS[how](found, X), expected(X), rtol=1e-5, atol=1e-5)
    same_state(found, expected)


@pytest.mark.parametrize("module", MODULES)
def test_beside_values(module):
    """A dense adapter of zeros changes nothing, and stays where it is."""
    adapted, expected = ql.loraify(module(), rank=2, key=KEY), module()
    values = lambda m: [x for x in jax.tree.leaves(m, is_leaf=ql.is_value) if ql.is_value(x)]
    before = values(adapted)
    assert before
    for _ in range(2):
        y = ql.quaxify(call)(adapted, X)
        np.testing.assert_allclose(y, expected(X), rtol=1e-4, atol=1e-4)
    assert all(a is b for a, b in zip(values(adapted), before, strict=True))


def test_a_value_that_is_written():
    class Holder(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(ql.LoraArray(jnp.eye(3), jnp.ones((1, 3)), jnp.ones((3, 1))))
            self.last = nnx.Variable(jnp.zeros((3, 3)))

        def __call__(self):
            self.last.set_value(self.w.get_value())
            self.w.set_value(self.w.get_value().T)

    holder = Holder()
    w = holder.w.get_value()
    ql.quaxify(lambda m: m())(holder)
    assert isinstance(holder.w.get_value(), ql.LoraArray)
    assert isinstance(holder.last.get_value(), ql.LoraArray)
    np.testing.assert_array_equal(ql.materialise(holder.w.get_value()), ql.materialise(w).T)


def test_a_training_step():
    def trained(through):
        model = Net()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            loss = lambda m: jnp.mean(through(m, x) ** 2)
            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        losses = [step(model, optimizer, X) for _ in range(3)]
        return model, losses

    (found, losses), (expected, others) = trained(ql.quaxify(call)), trained(call)
    np.testing.assert_allclose(losses, others, rtol=1e-5)
    same_state(found, expected)
    assert jnp.abs(found.bn.mean.get_value()).max() > 0


def test_nothing_arrives_from_a_call_that_fails():
    def fails(m, x):
        m(x)
        raise ValueError("half-way")

    model = Net()
    with pytest.raises(ValueError, match="half-way"):
        ql.quaxify(fails)(model, X)
    same_state(model, Net())


def test_another_trace_cannot_write():
    model = Net()
    with pytest.raises(Exception, match="different trace level"):
        jax.jit(lambda x: ql.quaxify(call)(model, x))(X)
    same_state(model, Net())
