"""Modules of Flax NNX that hold Values, through the transforms of NNX."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import quaxlike as ql
from quaxlike.files import safetensors

pytestmark = pytest.mark.frameworks

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (3, 32))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def lora(model):
    return ql.loraify(model, rank=2, key=KEY, init="gaussian")


KINDS = {
    "LoRA": lora,
    "int8": lambda m: ql.quantize(m, "int8"),
    "NF4": lambda m: ql.quantize(m, "nf4", block_size=32),
    "QLoRA": lambda m: lora(ql.quantize(m, "nf4", block_size=32, double_quant=True)),
}


def call(model, x):
    return model(x)


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0,), out_axes=0)
def stack(rngs):
    return Block(rngs)


def scanned(layers, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def step(x, layer):
        return layer(x)

    return step(x, layers)


def scanned_remat(layers, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def step(x, layer):
        return layer(x)

    return step(x, layers)


PROGRAMS = {
    "call": (Block, call),
    "split and merge": (Block, lambda m, x: nnx.merge(*nnx.split(m))(x)),
    "vmap": (Block, lambda m, x: nnx.vmap(call, in_axes=(None, 0))(m, x)),
    "remat": (Block, lambda m, x: nnx.remat(call)(m, x)),
    "grad": (Block, lambda m, x: nnx.grad(lambda x: jnp.sum(m(x) ** 2))(x)),
    "cond": (Block, lambda m, x: nnx.cond(x.sum() > 0, call, call, m, x)),
    "scan": (stack, scanned),
    "scan of remat": (stack, scanned_remat),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_type_is_kept(kind, program):
    make, run = PROGRAMS[program]
    model = KINDS[kind](make(nnx.Rngs(0)))
    expected = run(ql.materialise(model), X)
    with ql.on_materialise("error"):
        y = nnx.jit(ql.quaxify(run))(model, X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_attention_of_heads():
    model = nnx.MultiHeadAttention(num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(0))
    kernels = ["key.kernel", "out.kernel", "query.kernel", "value.kernel"]
    assert list(ql.select(model)) == kernels
    adapted = ql.loraify(model, rank=2, key=KEY, init="gaussian")
    shapes = {n: (x.a.shape, x.b.shape) for n, x in ql.select(adapted).items()}
    assert shapes["query.kernel"] == ((2, 64), (4, 16, 2))
    assert shapes["out.kernel"] == ((2, 4, 16), (64, 2))
    x = jax.random.normal(KEY, (2, 5, 64))
    for changed in (adapted, ql.quantize(model, "int8"), ql.loraify(ql.quantize(model), rank=2, key=KEY)):
        with ql.on_materialise("error"):
            y = nnx.jit(ql.quaxify(call))(changed, x)
        np.testing.assert_allclose(y, ql.materialise(changed)(x), rtol=1e-4, atol=1e-5)


LAYERS = {
    "Linear": (lambda r: nnx.Linear(2, 3, rngs=r), "io"),
    "LinearGeneral": (lambda r: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=r), "iioo"),
    "Einsum": (lambda r: nnx.Einsum("abc,bcd->abd", (3, 2, 4), rngs=r), "io"),
    "Conv": (lambda r: nnx.Conv(2, 3, (3, 3), rngs=r), "hwio"),
    "ConvTranspose": (lambda r: nnx.ConvTranspose(2, 3, (3, 3), rngs=r), "hwio"),
    "Embed": (lambda r: nnx.Embed(2, 3, rngs=r), "vo"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_say_what_their_axes_are(name):
    make, expected = LAYERS[name]
    found = {n: str(x) for n, x in ql.layouts(make(nnx.Rngs(0))).items() if x is not None}
    assert list(found.values()) == [expected]
    assert found.keys() <= {"kernel", "embedding"}


def test_paths_are_without_the_variable():
    model = Block(nnx.Rngs(0))
    names = ["down.bias", "down.kernel", "norm.bias", "norm.scale", "up.bias", "up.kernel"]
    for tree in (model, nnx.state(model)):
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        assert [ql.path_of(path) for path in paths] == names
        assert [ql.path_of(path, tree) for path in paths] == names
        assert [row.path for row in ql.summary(tree).rows] == names


def test_a_variable_at_two_places_stays_one():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)
            self.b.kernel = self.a.kernel

    model = lora(Tied(nnx.Rngs(0)))
    assert model.a.kernel is model.b.kernel
    assert ql.merge(model).a.kernel is not None


@pytest.fixture
def promotion():
    """As optax and users have it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("promotion")
def test_trained_by_partition():
    """Adapters over 4 bits: what is trained is apart from what is not, whose codes have no gradient."""
    graph, state = nnx.split(KINDS["QLoRA"](Block(nnx.Rngs(0))))
    params, rest = eqx.partition(state, ql.trainable(state))
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, opt):
        loss = lambda p: jnp.mean(ql.quaxify(call)(nnx.merge(graph, eqx.combine(p, rest)), X) ** 2)
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt)
        return value, optax.apply_updates(params, updates), opt

    opt, losses = tx.init(params), []
    with ql.on_materialise("error"):
        for _ in range(5):
            value, params, opt = step(params, opt)
            losses.append(float(value))
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("promotion")
def test_trained_by_an_optimizer_of_nnx():
    """With moments and weight decay, over dense weights: adapters alone are trained, as by optax itself."""
    model = lora(Block(nnx.Rngs(0)))
    params, rest = eqx.partition(nnx.state(model), ql.trainable(nnx.state(model)))
    graph = nnx.graphdef(model)
    adapted = lambda path, x: isinstance(x, nnx.Param) and ql.is_value(x.get_value())
    parts = {True: optax.flatten(optax.adamw(1e-2)), False: optax.set_to_zero()}
    optimizer = nnx.Optimizer(model, optax.partition(parts, ql.trainable), wrt=adapted)
    before = jax.tree.map(jnp.copy, (model.up.kernel[...], model.norm.scale[...]))

    @nnx.jit
    def step(model, optimizer):
        loss = lambda m: jnp.mean(ql.quaxify(call)(m, X) ** 2)
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, adapted))(model)
        optimizer.update(model, grads)
        return value

    @jax.jit
    def plain_step(params, opt):
        loss = lambda p: jnp.mean(ql.quaxify(call)(nnx.merge(graph, eqx.combine(p, rest)), X) ** 2)
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        return value, optax.apply_updates(params, updates), opt

    tx = optax.adamw(1e-2)
    opt, losses, expected = tx.init(params), [], []
    with ql.on_materialise("error"):
        for _ in range(4):
            losses.append(step(model, optimizer))
            value, params, opt = plain_step(params, opt)
            expected.append(value)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(model.up.kernel[...].w, before[0].w)
    np.testing.assert_array_equal(model.norm.scale[...], before[1])


def test_saved_and_read(tmp_path):
    model = KINDS["QLoRA"](Block(nnx.Rngs(0)))
    safetensors.save(tmp_path / "m.safetensors", model)
    again = safetensors.load(tmp_path / "m.safetensors", model)
    assert eqx.tree_equal(nnx.state(again), nnx.state(model))
