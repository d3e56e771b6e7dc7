"""Programs of other libraries, unmodified, with Values flowing through."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.ode import odeint

import quaxlike as ql
from quaxlike.sharding import specs_for
from tests.samples import Late, array
from tests.strict import Through

diffrax, lx, optx = Late("diffrax"), Late("lineax"), Late("optimistix")

Y0 = (1.0, -2.0, 3.0, 0.5)


class Dense(Through):
    """The same, for where a library asks for a plain array."""

    def materialise(self):
        return self.array


def _decay(y0, saveat=None, dtmax=None):
    term = diffrax.ODETerm(lambda t, y, args: y * -0.5)
    controller = diffrax.PIDController(rtol=1e-5, atol=1e-5)
    saveat = diffrax.SaveAt(t1=True) if saveat is None else saveat
    solution = diffrax.diffeqsolve(
        term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y0, saveat=saveat, stepsize_controller=controller
    )
    return solution.ys


@pytest.mark.usefixtures("default_promotion")
class TestDiffrax:
    @pytest.mark.slow
    def test_saved_outputs_keep_the_type(self):
        y0, saveat = jnp.array(Y0), diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 3))
        controlled = ql.quaxify(_decay)(Through(y0), saveat)
        assert type(controlled) is Through
        np.testing.assert_allclose(controlled.array, _decay(y0, saveat), rtol=1e-5)

    @pytest.mark.slow
    def test_gradient_through_the_default_adjoint(self):
        y0 = jnp.array(Y0)
        found = jax.jit(jax.grad(lambda y: jnp.sum(ql.quaxify(_decay)(Dense(y)).array)))(y0)
        np.testing.assert_allclose(found, jax.grad(lambda y: jnp.sum(_decay(y)))(y0), rtol=1e-5)


@pytest.mark.usefixtures("default_promotion")
class TestSolvers:
    @pytest.mark.slow
    def test_lineax(self):
        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0, 4.0]))
        solve = lambda b: lx.linear_solve(operator, b).value
        found = ql.quaxify(solve)(Through(jnp.array(Y0)))
        assert type(found) is Through
        np.testing.assert_allclose(found.array, solve(jnp.array(Y0)), rtol=1e-6)

    @pytest.mark.slow
    def test_gradient_through_lineax(self):
        operator = lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 3.0, 4.0]))
        solve = lambda b: lx.linear_solve(operator, b).value
        found = jax.grad(lambda b: jnp.sum(ql.quaxify(solve)(Dense(b)).array))(jnp.array(Y0))
        np.testing.assert_allclose(found, 1.0 / jnp.array([1.0, 2.0, 3.0, 4.0]), rtol=1e-6)

    @pytest.mark.quick("fixed_point")
    @pytest.mark.parametrize("method", ["root", "fixed_point"])
    def test_optimistix(self, method):
        def solve(a):
            if method == "root":
                solver = optx.Newton(rtol=1e-5, atol=1e-5)
                return optx.root_find(lambda y, a: 2.0 * y - a, solver, jnp.zeros(4), args=a).value
            solver = optx.FixedPointIteration(rtol=1e-5, atol=1e-5)
            return optx.fixed_point(lambda y, a: 0.5 * y + a, solver, jnp.zeros(4), args=a).value

        found = ql.quaxify(solve)(Through(jnp.array(Y0)))
        assert type(found) is Through
        np.testing.assert_allclose(found.array, solve(jnp.array(Y0)), rtol=1e-4)


def _solve_with(method, layer, b):
    """Solves y = 0.1 layer(y) + b."""
    tolerances = {"rtol": 1e-6, "atol": 1e-6}
    residual = lambda y, b: y - 0.1 * layer(y) - b
    if method == "fixed_point":
        solver = optx.FixedPointIteration(**tolerances)
        return optx.fixed_point(lambda y, b: 0.1 * layer(y) + b, solver, jnp.zeros(4), args=b).value
    if method == "root":
        return optx.root_find(residual, optx.Newton(**tolerances), jnp.zeros(4), args=b).value
    if method == "least_squares":
        return optx.least_squares(residual, optx.LevenbergMarquardt(**tolerances), jnp.zeros(4), args=b).value
    if method == "minimise":
        distance = lambda y, b: jnp.sum(residual(y, b) ** 2)
        return optx.minimise(distance, optx.BFGS(**tolerances), jnp.zeros(4), args=b).value
    operator = lx.FunctionLinearOperator(
        lambda y: y - 0.1 * (layer.weight @ y), jax.ShapeDtypeStruct((4,), jnp.float32)
    )
    return lx.linear_solve(operator, b, lx.GMRES(**tolerances)).value


def _integrated_implicitly(layer, b):
    """y(0.5) of y' = -layer(y), from y(0) = b, by an implicit method."""
    step = diffrax.PIDController(rtol=1e-4, atol=1e-4)
    term = diffrax.ODETerm(lambda t, y, layer: -layer(y))
    return diffrax.diffeqsolve(
        term, diffrax.Kvaerno3(), 0.0, 0.5, 0.1, b, layer, stepsize_controller=step
    ).ys[0]


@pytest.mark.usefixtures("default_promotion")
class TestReverseModeThroughSolvers:
    """With an adapted layer in what is solved."""

    B = array([0.1, -0.4, 0.3, 0.2])

    @pytest.fixture
    def layer(self):
        layer = ql.loraify(eqx.nn.Linear(4, 4, key=jax.random.key(0)), rank=2, key=jax.random.key(1))
        return eqx.tree_at(lambda x: x.weight.b, layer, jnp.full((4, 2), 0.3))

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["linear", "fixed_point", "root", "least_squares", "minimise"])
    def test_gradients(self, layer, method):
        loss = lambda solve: lambda layer, b: jnp.sum(solve(method, layer, b) ** 2)
        with ql.on_materialise("error"):
            by_layer, by_b = eqx.filter_grad(lambda xs: loss(ql.quaxify(_solve_with))(*xs))((layer, self.B))
        dense = ql.materialise(layer)
        dense_by_layer, dense_by_b = eqx.filter_grad(lambda xs: loss(_solve_with)(*xs))((dense, self.B))
        np.testing.assert_allclose(by_b, dense_by_b, rtol=1e-3)
        lora = layer.weight
        np.testing.assert_allclose(
            by_layer.weight.a, lora.scaling * lora.b.T @ dense_by_layer.weight, rtol=1e-3, atol=1e-5
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["linear", "fixed_point", "root", "least_squares", "minimise", "ode"])
    def test_gradients_through_a_vmap_inside(self, layer, method):
        """The batched solver has the derivative of the solver, not that of its iterations."""
        solve = _integrated_implicitly if method == "ode" else functools.partial(_solve_with, method)
        batched = lambda layer, bs: jax.vmap(lambda b: solve(layer, b))(bs)
        loss = lambda batched: lambda xs: jnp.sum(batched(*xs) ** 2)
        bs = jnp.stack([self.B, 2 * self.B, -self.B])
        with ql.on_materialise("allow"):
            by_layer, by_bs = eqx.filter_grad(loss(ql.quaxify(batched)))((layer, bs))
        dense_by_layer, dense_by_bs = eqx.filter_grad(loss(batched))((ql.materialise(layer), bs))
        np.testing.assert_allclose(by_bs, dense_by_bs, rtol=1e-3, atol=1e-5)
        lora = layer.weight
        np.testing.assert_allclose(
            by_layer.weight.a, lora.scaling * lora.b.T @ dense_by_layer.weight, rtol=1e-3, atol=1e-4
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("transform", [jax.hessian, lambda f: jax.vmap(jax.grad(f))])
    def test_nested(self, layer, transform):
        f = lambda solve, layer: lambda b: jnp.sum(jnp.sin(solve("linear", layer, b)))
        b = self.B if transform is jax.hessian else jnp.stack([self.B, 2 * self.B])
        found = transform(f(ql.quaxify(_solve_with), layer))(b)
        expected = transform(f(_solve_with, ql.materialise(layer)))(b)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)

    @pytest.mark.slow
    def test_second_derivative_by_the_operator(self, layer):
        def second(solve, with_a):
            loss = lambda s: jnp.sum(solve("linear", with_a(s * layer.weight.a), self.B) ** 2)
            return jax.grad(jax.grad(loss))(1.0)

        adapted = lambda a: eqx.tree_at(lambda x: x.weight.a, layer, a)
        found = second(ql.quaxify(_solve_with), adapted)
        expected = second(_solve_with, lambda a: ql.materialise(adapted(a)))
        np.testing.assert_allclose(found, expected, rtol=1e-3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _called(f, y, *consts):
    return f(y, *consts)


_called.defvjp(lambda f, *xs: (f(*xs), xs), lambda f, xs, ct: jax.vjp(f, *xs)[1](ct))


def _converted(f, y):
    f, consts = jax.closure_convert(f, y)
    return _called(f, y, *consts)


def _integrated(f, y):
    return odeint(lambda y, t: f(y), y, jnp.array([0.0, 1.0]))


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("call", [_converted, _integrated])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gradients_by_a_value_that_a_converted_function_closes_over(call, wrap):
    """`jax.closure_convert` sees the arrays of a Value: they are arguments of the custom derivative, too."""
    matrices = jax.random.split(jax.random.key(0), 3)
    w = ql.LoraArray(*map(jax.random.normal, matrices, [(4, 4), (2, 4), (4, 2)]))
    loss = lambda w: jnp.sum(call(lambda y: jnp.tanh(w @ y), jnp.array(Y0)) ** 2)
    with ql.on_materialise("allow"):  # the function is traced apart
        found = wrap(jax.grad(ql.quaxify(loss)))(w)
    expected = jax.grad(lambda w: loss(w.materialise()))(w)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), found, expected)


def _train(model, forward, steps=10):
    """Losses of an optax loop over the trainable part of a model."""
    params, static = eqx.partition(model, ql.trainable(model))
    schedule = optax.cosine_decay_schedule(1e-2, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    x = jax.random.normal(jax.random.key(3), (16, 4))
    y = jnp.sum(x, axis=1, keepdims=True)

    @jax.jit
    def step(params, state):
        loss = lambda params: jnp.mean((ql.quaxify(forward)(eqx.combine(params, static), x) - y) ** 2)
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return eqx.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    with ql.on_materialise("error"):
        for _ in range(steps):
            params, state, value = step(params, state)
            losses.append(float(value))
    return losses


@pytest.mark.usefixtures("default_promotion")
class TestOptax:
    @pytest.mark.slow
    def test_equinox_model(self):
        model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
        model = ql.loraify(model, rank=2, key=jax.random.key(1))
        static = eqx.filter(model, eqx.is_array, inverse=True)
        arrays = eqx.filter(model, eqx.is_array)
        losses = _train(arrays, lambda m, x: jax.vmap(eqx.combine(m, static))(x))
        assert losses[-1] < losses[0]

    @pytest.mark.slow
    def test_plain_jax_model(self):
        keys = jax.random.split(jax.random.key(0), 2)
        model = {
            "hidden": {"weight": jax.random.normal(keys[0], (8, 4)), "bias": jnp.zeros(8)},
            "out": {"weight": jax.random.normal(keys[1], (1, 8)), "bias": jnp.zeros(1)},
        }
        model = ql.loraify(model, rank=2, where=r".*weight", key=jax.random.key(1))

        def forward(model, x):
            hidden = jax.nn.relu(x @ model["hidden"]["weight"].T + model["hidden"]["bias"])
            return hidden @ model["out"]["weight"].T + model["out"]["bias"]

        losses = _train(model, forward)
        assert losses[-1] < losses[0]


class TestHalves:
    """A model as `eqx.partition` leaves it: Values with parts that are None are pytrees, no arrays."""

    @pytest.fixture(params=["dense", "nf4"])
    def model(self, request):
        model = eqx.nn.MLP(64, 3, 8, 1, key=jax.random.key(0))
        model = ql.quantize(model, "nf4", where=["layers.0.weight"]) if request.param == "nf4" else model
        return ql.loraify(model, rank=2, key=jax.random.key(1))

    @staticmethod
    def call(trained, frozen, x):
        return eqx.combine(trained, frozen)(x)

    @pytest.mark.slow
    def test_joined_inside(self, model):
        halves, x = eqx.partition(model, ql.trainable(model)), jnp.ones(64)
        with ql.on_materialise("error"):
            found = ql.quaxify(self.call)(*halves, x)
        np.testing.assert_array_equal(found, ql.quaxify(model)(x))

    @pytest.mark.slow
    def test_gradient_by_one_half(self, model):
        trained, frozen = eqx.partition(model, ql.trainable(model))
        with ql.on_materialise("error"):
            loss = lambda trained: jnp.sum(ql.quaxify(self.call)(trained, frozen, jnp.ones(64)) ** 2)
            found = jax.grad(loss)(trained)
            whole = eqx.filter_grad(lambda model: jnp.sum(ql.quaxify(model)(jnp.ones(64)) ** 2))(model)
        assert jax.tree.structure(found) == jax.tree.structure(trained)
        jax.tree.map(np.testing.assert_array_equal, found, eqx.filter(whole, ql.trainable(model)))

    @pytest.mark.slow
    def test_norm(self, model):
        trained, _ = eqx.partition(model, ql.trainable(model))
        np.testing.assert_allclose(ql.quaxify(optax.tree.norm)(trained), optax.tree.norm(trained))

    @pytest.mark.quick("nf4")
    def test_state_of_an_optimiser(self, model):
        state = optax.masked(optax.adam(1e-3), ql.trainable(model)).init(eqx.filter(model, eqx.is_array))
        specs = specs_for(state, lambda name, leaf: None)
        assert jax.tree.structure(specs) == jax.tree.structure(state)

    @pytest.mark.slow
    def test_materialised(self, model):
        trained, frozen = eqx.partition(model, ql.trainable(model))
        assert eqx.tree_equal(ql.materialise(trained), trained)
        assert not ql.is_value(ql.materialise(frozen).layers[0].weight.w)

    @pytest.mark.quick("nf4")
    def test_used_as_an_array(self, model):
        trained, _ = eqx.partition(model, ql.trainable(model))
        with pytest.raises(ValueError, match=r"Parts of LoraArray are missing.*`eqx.combine`"):
            trained.layers[0].weight + 1.0
        with pytest.raises(ValueError, match=r"Parts of LoraArray are missing.*`eqx.combine`"):
            ql.quaxify(lambda: jnp.sin(trained.layers[0].weight))()

    def test_what_is_missing(self):
        class Scaled(ql.ArrayValue):
            array: Any
            scale: Any

            def materialise(self):
                return self.array if self.scale is None else self.array * self.scale

        x = Scaled(jnp.ones(2), None)
        assert ql.is_value(x)
        assert not ql.is_value(eqx.filter(x, False))
        assert not ql.is_value(eqx.filter(Through(jnp.ones(2)), False))


class TestAheadOfTime:
    def test_lower_and_compile(self):
        x = Through(jnp.array(Y0))
        compiled = jax.jit(ql.quaxify(lambda v: v * 2.0)).lower(x).compile()
        np.testing.assert_array_equal(compiled(x).array, 2.0 * x.array)

    def test_export(self):
        f = jax.jit(lambda x: ql.quaxify(lambda v: v * 2.0)(Through(x)).array)
        x = jnp.array(Y0)
        np.testing.assert_array_equal(jax.export.export(f)(x).call(x), 2.0 * x)

    def test_shapes_and_jaxprs(self):
        x, f = Through(jnp.array(Y0)), ql.quaxify(lambda v: v * 2.0)
        assert jax.eval_shape(f, x).array.shape == (4,)
        assert [eqn.primitive.name for eqn in jax.make_jaxpr(f)(x).eqns] == ["mul"]


@pytest.mark.slow
def test_keys_beside_values():
    x = Through(jnp.array(Y0))
    found = ql.quaxify(lambda v, key: v * jax.random.normal(key, (4,)))(x, jax.random.key(0))
    np.testing.assert_allclose(found.array, x.array * jax.random.normal(jax.random.key(0), (4,)))


def test_debug_print_shows_the_value(capfd):
    ql.quaxify(lambda v: jax.debug.print("v = {v}", v=v))(Through(jnp.array(Y0)))
    jax.effects_barrier()
    assert "v = Through(" in capfd.readouterr().out


def test_debug_callback_sees_the_value():
    seen = []
    ql.quaxify(jax.jit(lambda v: jax.debug.callback(seen.append, v)))(Through(jnp.array(Y0)))
    jax.effects_barrier()
    assert [type(x) for x in seen] == [Through]


def test_pallas_kernel_is_named():
    from jax.experimental import pallas as pl

    def double(x_ref, out_ref):
        out_ref[...] = 2.0 * x_ref[...]

    call = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), interpret=True)
    with pytest.raises(NotImplementedError, match=r"kernel '?double.*takes arrays; found Through"):
        ql.quaxify(call)(Through(jnp.array(Y0)))


def test_ref_of_a_value():
    with pytest.raises(NotImplementedError, match=r"new_ref.*takes arrays; found Through"):
        ql.quaxify(lambda v: jax.new_ref(v)[...])(Through(jnp.array(Y0)))
