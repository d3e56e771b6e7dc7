"""Private sets of rules: who sees them, and when."""

import subprocess
import sys
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import array


class Box(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


X = array(np.arange(3.0))


def _set(factor: float) -> ql.RuleSet:
    """Rules under which `sin` multiplies instead."""
    rules = ql.RuleSet()

    @ql.register("sin", rules=rules)
    def _(x: Box, **params):
        return x.array * factor

    return rules


def sin(x):
    return jnp.sin(x)


def _check(out, factor):
    np.testing.assert_allclose(out, jnp.sin(X) if factor is None else X * factor)


def test_only_where_it_is_asked_for():
    two = _set(2.0)
    _check(ql.quaxify(sin, rules=two)(Box(X)), 2.0)
    _check(ql.quaxify(sin)(Box(X)), None)
    _check(ql.quaxify(sin, rules=_set(3.0))(Box(X)), 3.0)


def test_before_the_global_rules():
    class Local(Box):
        pass

    @ql.register("sin")
    def _(x: Local, **params):
        return x.array * 5.0

    _check(ql.quaxify(sin)(Local(X)), 5.0)
    # A less specific rule of the private set still comes first.
    _check(ql.quaxify(sin, rules=_set(2.0))(Local(X)), 2.0)


def test_declining_asks_the_next_layer():
    class Local(Box):
        pass

    @ql.register("sin")
    def _(x: Local, **params):
        return x.array * 5.0

    rules = ql.RuleSet()

    @ql.register("sin", rules=rules)
    def _(x: Box, **params):
        return NotImplemented

    _check(ql.quaxify(sin, rules=rules)(Local(X)), 5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        eqx.filter_jit,
        lambda f: lambda x: jax.lax.cond(True, f, f, x),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0.0, None, length=1)[1][0],
    ],
)
def test_a_quaxify_inside_inherits(wrap):
    """Also one that is called by jitted code, whose trace outlives the call."""
    inner = ql.quaxify(sin)
    outer = wrap(lambda x: inner(x))
    for _ in range(2):
        _check(ql.quaxify(outer, (False, (False,), False), rules=_set(2.0))(Box(X)), 2.0)
        _check(ql.quaxify(outer, (False, (False,), False), rules=_set(3.0))(Box(X)), 3.0)
        _check(outer(Box(X)), None)


def test_layers_stack():
    rules = ql.RuleSet()

    @ql.register("cos", rules=rules)
    def _(x: Box, **params):
        return x.array * 7.0

    def both(x):
        return ql.quaxify(lambda x: jnp.sin(x) + jnp.cos(x), rules=rules)(x)

    _check(ql.quaxify(both, False, rules=_set(2.0))(Box(X)), 9.0)
    np.testing.assert_allclose(both(Box(X)), jnp.sin(X) + 7.0 * X)


def test_the_inner_set_comes_first():
    inner = ql.quaxify(sin, rules=_set(3.0))
    _check(ql.quaxify(lambda x: inner(x), False, rules=_set(2.0))(Box(X)), 3.0)


def test_a_rule_inherits():
    """What a rule of any layer redispatches sees all layers."""
    rules = _set(2.0)

    @ql.register("tanh", rules=rules)
    def _(x: Box, **params):
        return ql.quaxify(sin)(x)

    _check(ql.quaxify(jnp.tanh, rules=rules)(Box(X)), 2.0)


@pytest.mark.slow
def test_the_backward_pass_inherits():
    """Of a custom_vjp, which runs when the quaxified function has returned."""

    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (ct * ql.quaxify(sin)(Box(jnp.ones(3))),))
    grad = jax.grad(lambda x: ql.materialise(ql.quaxify(f, rules=_set(2.0))(Box(x))).sum())
    np.testing.assert_allclose(grad(X), 2.0 * jnp.ones(3))


@pytest.mark.slow
def test_a_new_rule_is_seen_by_what_was_compiled():
    rules = ql.RuleSet()
    eager, outside = ql.quaxify(jax.jit(sin), rules=rules), jax.jit(ql.quaxify(sin, rules=rules))
    _check(eager(Box(X)), None)
    _check(outside(Box(X)), None)

    @ql.register("sin", rules=rules)
    def _(x: Box, **params):
        return x.array * 2.0

    _check(eager(Box(X)), 2.0)
    _check(outside(Box(X)), 2.0)


def test_threads_do_not_inherit():
    found = []

    def outer(x):
        thread = threading.Thread(target=lambda: found.append(ql.quaxify(sin)(Box(X))))
        thread.start()
        thread.join()
        return x

    ql.quaxify(outer, rules=_set(2.0))(Box(X))
    _check(found[0], None)


def test_replacing_a_rule_of_another_module_warns():
    rules = _set(2.0)
    code = "import jax\ndef rule(x: Box, **params): return x.array * 3.0\nrule.__module__ = 'elsewhere'"
    names = {"Box": Box}
    exec(code, names)
    with pytest.warns(UserWarning, match=r"sin\(Box\) at .* replaces sin\(Box\) at "):
        ql.register("sin", rules=rules)(names["rule"])
    _check(ql.quaxify(sin, rules=rules)(Box(X)), 3.0)


@pytest.mark.slow
def test_importing_a_type_changes_nothing_for_another():
    """In a process of its own: what each module of array types registers names its own types."""
    code = """
import importlib, pkgutil, sys
import quaxlike.core as core
from quaxlike.core.inspect.coverage import rules_for
from quaxlike.core.rules import GLOBAL
from quaxlike.core.values import Value

def types(cls=Value):
    yield cls
    for sub in cls.__subclasses__():
        yield from types(sub)

checked = 0
for module in pkgutil.iter_modules(importlib.import_module("quaxlike.arrays").__path__, "quaxlike.arrays."):
    present = {m for m in sys.modules if m.startswith("quaxlike.arrays.")}
    before = set(GLOBAL) if module.name not in present else set()
    importlib.import_module(module.name)
    if module.name.endswith((".pairs", ".axis_rules")):  # which are for types of other modules
        continue
    subject = module.name.removesuffix("_rules")  # adapted_rules are those of adapted
    mine = [cls for cls in types() if cls.__module__.startswith(subject)]
    own = {rule for cls in mine for rule in rules_for(cls)}
    here = [rule for rule in set(GLOBAL) - before if rule.function.__module__.startswith(module.name)]
    assert set(here) <= own, set(here) - own
    checked += len(here)
print("checked", checked)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout.startswith("checked"), out.stderr
    assert int(out.stdout.split()[1]) > 100


def test_a_rule_for_either_side_belongs_to_the_module_that_writes_it():
    rules = ql.RuleSet()

    @ql.register_on_either_side("add", Box, rules=rules)
    def _sum(primitive, x, y, **params):
        return X

    assert {rule.function.__module__ for rule in rules} == {__name__}
