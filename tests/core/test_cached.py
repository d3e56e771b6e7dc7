"""A rule with a cached trace runs once for each structure of its operands, and the trace does the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import quaxlike as ql
from quaxlike.core.jaxprs.evaluate import cached_trace
from tests.samples import normal

CALLS: list[str] = []


class Scaled(ql.ArrayValue):
    array: Any
    scale: Array

    on_materialise = "warn"

    def materialise(self):
        return ql.materialise(self.array) * self.scale


class Opaque(ql.ArrayValue):
    array: Array

    def materialise(self):
        return self.array


@ql.register("dot_general")
@cached_trace
def _product(x: Scaled, y: Array, **params: Any):
    CALLS.append("dot_general")
    if params["preferred_element_type"] == jnp.float16:
        return NotImplemented
    return ql.quaxify(jax.lax.dot_general)(x.array, y, **params) * x.scale


@ql.register("transpose")
@cached_trace
def _transpose(x: Scaled, *, permutation: Any):
    CALLS.append("transpose")
    return Scaled(ql.quaxify(jnp.transpose)(x.array, permutation), x.scale)


@pytest.fixture(autouse=True)
def _forget_calls():
    CALLS.clear()


def _scaled(n: int = 3) -> Scaled:
    return Scaled(normal(n, n), jnp.float32(2.0))


def _layers(ws: list[Scaled], x: Array) -> Array:
    for w in ws:
        x = jnp.sin(w.T @ x)
    return x


def _dense(ws: list[Scaled], x: Array) -> Array:
    return _layers([w.array * w.scale for w in ws], x)


@pytest.mark.slow
def test_traced_once_for_all_layers():
    ws, x = [_scaled() for _ in range(5)], jnp.arange(3.0)
    np.testing.assert_allclose(jax.jit(ql.quaxify(_layers))(ws, x), _dense(ws, x), rtol=1e-5)
    assert sorted(CALLS) == ["dot_general", "transpose"]
    jax.jit(ql.quaxify(_layers))([_scaled(4)] * 2, jnp.arange(4.0))
    assert sorted(CALLS) == ["dot_general"] * 2 + ["transpose"] * 2


def test_each_equation_has_the_line_of_its_own_caller():
    def two(w: Any, x: Array):
        y = w @ x
        return w @ y

    jaxpr = jax.make_jaxpr(ql.quaxify(two))(_scaled(), jnp.arange(3.0))
    tracebacks: list[Any] = [eqn.source_info.traceback for eqn in jaxpr.eqns]
    lines = {f.line_num for t in tracebacks for f in t.frames if f.function_name.endswith("two")}
    assert len(lines) == 2


def test_eager_calls_run_what_was_traced():
    w, x = _scaled(), jnp.arange(3.0)
    for _ in range(3):
        y = ql.quaxify(lambda w, x: jax.lax.dot(w, x))(w, x)
        np.testing.assert_allclose(y, w.materialise() @ x, rtol=1e-6)
    assert CALLS == ["dot_general"]


def test_without_jit_the_rule_is_asked():
    w, x = _scaled(), jnp.arange(3.0)
    with jax.disable_jit():
        for _ in range(2):
            ql.quaxify(lambda w, x: jax.lax.dot(w, x))(w, x)
    assert CALLS == ["dot_general"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "shape"),
    [(jax.grad, (3,)), (lambda f: jax.vmap(f, in_axes=(None, 0)), (2, 3)), (jax.hessian, (3,))],
)
def test_under_transforms(transform: Any, shape: tuple[int, ...]):
    w, x = _scaled(), jnp.linspace(0.0, 2.0, np.prod(shape)).reshape(shape)
    quaxified = ql.quaxify(lambda w, x: jnp.sum(_layers([w, w], x)))
    f = lambda array, x: quaxified(Scaled(array, w.scale), x)
    g = lambda array, x: jnp.sum(_layers([array * w.scale] * 2, x))
    np.testing.assert_allclose(
        jax.jit(transform(f))(w.array, x), transform(g)(w.array, x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_a_rule_of_a_part_that_is_registered_later():
    w = Scaled(Opaque(jnp.eye(3)), jnp.float32(1.0))
    f = lambda w, x: jnp.sum(w @ x)
    with ql.on_materialise("allow"):
        np.testing.assert_allclose(jax.jit(ql.quaxify(f))(w, jnp.ones(3)), 3.0)

    @ql.register("dot_general")
    def _(x: Opaque, y: Array, **params: Any):
        return 10 * jax.lax.dot_general(x.array, y, **params)

    with ql.on_materialise("allow"):
        np.testing.assert_allclose(jax.jit(ql.quaxify(f))(w, jnp.ones(3)), 30.0)


def test_a_declined_call_stays_declined():
    w, x = _scaled(), jnp.ones(3)
    f = lambda w, x: jax.lax.dot(w, x, preferred_element_type=jnp.float16)
    with ql.on_materialise("error"):
        for _ in range(2):
            with pytest.raises(ql.MaterialisationError, match="dot_general"):
                jax.jit(ql.quaxify(f))(w, x)
    assert len(CALLS) >= 2


@pytest.mark.slow
def test_a_rule_that_loses_a_type_is_asked_at_each_place():
    class Part(ql.ArrayValue):
        array: Array

        on_materialise = "warn"

        def materialise(self):
            return self.array

    w, x = Scaled(Part(jnp.eye(3)), jnp.float32(1.0)), jnp.ones(3)

    def two(w: Any, x: Array):
        y = jax.lax.dot(w, x)
        return y, jax.lax.dot(w, x)

    with pytest.warns(ql.MaterialisationWarning, match="Part was made dense"):
        jax.jit(ql.quaxify(two))(w, x)
    assert len(CALLS) == 3  # to find that out, and then at each place


def test_errors_pass():
    class Broken(ql.ArrayValue):
        array: Array

        def materialise(self):
            return self.array

    @ql.register("neg")
    @cached_trace
    def _broken(x: Broken, **params: Any):
        raise ValueError("as the rule says")

    for _ in range(2):
        with pytest.raises(ValueError, match="as the rule says"):
            jax.jit(ql.quaxify(jnp.negative))(Broken(jnp.ones(3)))


def test_explain_tells_of_every_call():
    report = ql.explain(_layers)([_scaled()] * 4, jnp.ones(3))
    assert sum(row.count for row in report.rules if row.primitive == "dot_general") >= 4
    assert report.first_loss is None
