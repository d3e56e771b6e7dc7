"""Programs of other packages, each with adapted and quantised weights: values and gradients are those of the
materialised model, and nothing is materialised on the way, but for what is said below.

`pip install -e '.[test,frameworks]' && pytest -m frameworks tests/frameworks/test_programs.py`
"""

import diffrax
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import numpyro
import numpyro.distributions as dist
import optimistix as optx
import pytest
from flax import nnx
from numpyro.infer.util import log_density

import quaxlike as ql

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("default_promotion")]

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (32,))
TOLERANCES = {"rtol": 1e-6, "atol": 1e-6}


def in_linen():
    net = nn.Sequential([nn.Dense(32), nn.LayerNorm(), nn.gelu, nn.Dense(32)])
    return net.init(KEY, X), net.apply


def in_haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 32])(hk.LayerNorm(-1, True, True)(x))))
    return net.init(KEY, X), net.apply


def with_normalised_weights():
    net = nn.WeightNorm(nn.Dense(32))
    return net.init(KEY, X), net.apply


def in_recurrent_cells():
    net = nn.RNN(nn.OptimizedLSTMCell(32))
    return net.init(KEY, X[None]), lambda variables, x: net.apply(variables, jnp.stack([x, jnp.cos(x)]))


def in_nnx():
    graph, state = nnx.split(
        nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.LayerNorm(32, rngs=nnx.Rngs(1)))
    )
    return state, lambda state, x: nnx.merge(graph, state)(x)


def _of_a_layer(call):
    """A program of a layer of Equinox."""
    return lambda: (eqx.nn.Linear(32, 32, key=KEY), call)


@_of_a_layer
def in_diffrax(layer, x):
    term = diffrax.ODETerm(lambda t, y, layer: jnp.tanh(layer(y)))
    step = diffrax.PIDController(rtol=1e-4, atol=1e-4)
    return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, x, layer, stepsize_controller=step).ys


@_of_a_layer
def by_an_implicit_method(layer, x):
    term = diffrax.ODETerm(lambda t, y, layer: -y + 0.1 * jnp.tanh(layer(y)))
    step = diffrax.PIDController(rtol=1e-4, atol=1e-4)
    # The default adjoint writes what the solver carries, the layer too, into a buffer of checkpoints.
    options = {"stepsize_controller": step, "adjoint": diffrax.DirectAdjoint()}
    return diffrax.diffeqsolve(term, diffrax.Kvaerno3(), 0.0, 0.5, 0.1, x, layer, **options).ys


@_of_a_layer
def with_a_penalty(layer, x):
    return jnp.tanh(layer(x)) + 1e-3 * jnp.sum(layer.weight**2)


@_of_a_layer
def by_a_fixed_point(layer, x):
    solver = optx.FixedPointIteration(**TOLERANCES)
    return optx.fixed_point(lambda y, x: 0.1 * layer(y) + x, solver, jnp.zeros(32), args=x).value


@_of_a_layer
def by_newton(layer, x):
    residual = lambda y, x: y - 0.1 * layer(y) - x
    return optx.root_find(residual, optx.Newton(**TOLERANCES), jnp.zeros(32), args=x).value


@_of_a_layer
def by_gmres(layer, x):
    operator = lx.FunctionLinearOperator(
        lambda y: y - 0.1 * (layer.weight @ y), jax.ShapeDtypeStruct((32,), jnp.float32)
    )
    return lx.linear_solve(operator, x, lx.GMRES(**TOLERANCES)).value


@_of_a_layer
def in_numpyro(layer, x):
    def model(x):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(32), 1.0).to_event())
        with numpyro.plate("data", 32):
            numpyro.sample("y", dist.Normal(layer(z), 0.5), obs=x)

    return log_density(model, (x,), {}, {"z": jnp.sin(x)})[0]


PROGRAMS = {
    "Linen": in_linen,
    "Linen, WeightNorm": with_normalised_weights,
    "Linen, OptimizedLSTMCell": in_recurrent_cells,
    "Haiku": in_haiku,
    "NNX": in_nnx,
    "diffrax": in_diffrax,
    "diffrax, implicit": by_an_implicit_method,
    "penalty": with_a_penalty,
    "optimistix, fixed point": by_a_fixed_point,
    "optimistix, Newton": by_newton,
    "lineax": by_gmres,
    "numpyro": in_numpyro,
}


# The squares of the elements of a weight and its adapter are not of low rank.
DENSE = {"Linen, WeightNorm": ("LoRA", "QLoRA"), "penalty": ("LoRA", "QLoRA")}


def _adapted(model):
    return ql.loraify(model, rank=2, key=KEY, init="gaussian")


KINDS = {
    "LoRA": _adapted,
    "int8": lambda model: ql.quantize(model, "int8"),
    "NF4": lambda model: ql.quantize(model, "nf4", block_size=32),
    "QLoRA": lambda model: _adapted(ql.quantize(model, "nf4", block_size=32)),
}


@pytest.mark.filterwarnings("ignore:The model has no adapters")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_is_the_program_of_the_materialised_model(program, kind):
    model, call = PROGRAMS[program]()
    changed = KINDS[kind](model)
    trained, rest = eqx.partition(changed, ql.trainable(changed))

    def loss(run, prepare):
        return lambda trained, x: jnp.sum(jnp.sin(run(prepare(eqx.combine(trained, rest)), x)))

    both = lambda f: eqx.filter_jit(jax.value_and_grad(f, argnums=(0, 1)))(trained, X)
    quaxified = loss(ql.quaxify(call), lambda model: model)
    is_dense = kind in DENSE.get(program, ())
    if is_dense:
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match=r"LoraArray would be"):
            both(quaxified)
    with ql.on_materialise("allow" if is_dense else "error"):
        found = both(quaxified)
    expected = both(loss(call, ql.materialise))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * float(jnp.abs(y).max()) + 1e-6)
