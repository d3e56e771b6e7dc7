"""Threads register, quaxify, warn and explain at the same time."""

import concurrent.futures
import threading
import warnings

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.core.rules import GLOBAL

N = 1000

tag_p = jexc.Primitive("tag")
tag_p.def_abstract_eval(lambda x: x)


class Tagged(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


def _together(function, n=N):
    """Runs `function(0)` to `function(n - 1)` in a thread each, all released at once."""
    start, errors, results = threading.Event(), [], [None] * n

    def run(i):
        start.wait()
        try:
            results[i] = function(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def types():
    """A type for each of ten groups of threads; their rules are taken out again."""
    before = dict(GLOBAL.items())
    yield [type(f"Tagged{i}", (Tagged,), {}) for i in range(10)]
    for primitive, _ in GLOBAL.items():
        GLOBAL._rules[primitive] = before.get(primitive, ())


@pytest.mark.slow
def test_registrations_and_calls(types):
    """Each thread registers a rule and calls; it always sees its own rule, and a whole one of the others'."""
    answers = jax.device_put(list(np.arange(N, dtype=np.float32)))  # nothing is computed, so nothing compiled
    number = {id(answer): i for i, answer in enumerate(answers)}

    def register(i, **where):
        cls = types[i % 10]

        def rule(x: cls, **params):
            return answers[i]

        ql.register(tag_p, **where)(rule)

    for i in range(10):
        register(i)

    def work(i):
        mine = ql.RuleSet()
        register(i, rules=mine)
        if i % 50 < 10:
            register(i)
        value = types[i % 10](answers[0])
        return ql.quaxify(tag_p.bind, rules=mine)(value), ql.quaxify(tag_p.bind)(value)

    for i, (mine, theirs) in enumerate(_together(work)):
        assert mine is answers[i]
        assert number[id(theirs)] % 10 == i % 10  # that of some thread for the same type
    for i, cls in enumerate(types):
        (rule,) = ql.rules_for(cls)
        last = ql.quaxify(tag_p.bind)(cls(answers[0]))
        assert last is rule.function(None)
        assert number[id(last)] % 10 == i


@pytest.mark.slow
def test_what_is_registered_last_is_followed_everywhere(types):
    """Resolutions that were under way when a rule came do not stay."""
    cls = types[0]
    value = cls(jnp.float32(1.0))
    f = jax.jit(ql.quaxify(jax.lax.sin))
    stop = threading.Event()

    def call():
        while not stop.is_set():
            f(value)
            ql.quaxify(jax.lax.sin)(value)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call) for _ in range(3)]
        for i in range(20):

            def rule(x: cls, **params):
                return x.array + i

            ql.register("sin")(rule)
            assert float(f(value)) == 1.0 + i
            assert float(ql.quaxify(jax.lax.sin)(value)) == 1.0 + i
        stop.set()
        for done in calls:
            done.result()


@pytest.mark.slow
def test_policies_and_reports():
    """Each thread has its own mode, and records its own events alone."""
    x = Tagged(jnp.ones(3))
    f = ql.quaxify(jax.jit(lambda x: jnp.sin(x)))

    def work(i):
        if i % 3 == 0:
            with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError):
                f(x)
        elif i % 3 == 1:
            return ql.explain(f)(x).materialised[0].count
        return f(x).shape[0] // 3

    assert _together(work, 60) == [1] * 60


@pytest.mark.slow
def test_one_warning(monkeypatch):
    """Counted where the core gives it: `warnings.catch_warnings` is of the process, and beartype's, in other
    threads, would take the warning."""
    x, given = Tagged(jnp.ones(3)), []
    monkeypatch.setattr(warnings, "warn_explicit", lambda warning, *_: given.append(type(warning)))
    warned = ql.on_materialise("warn")

    def work(_):
        with warned:
            ql.quaxify(jax.lax.sin)(x)

    _together(work, 50)
    assert given.count(ql.MaterialisationWarning) == 1
