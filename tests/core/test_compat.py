"""Names of JAX's private functions and texts of its errors: a test fails where a version of JAX differs."""

import contextlib
import sys
import threading

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax import lax

from quaxlike.core import compat


class Asked:
    """An object that is no array, and keeps what is known of the frames that ask whether it can be one."""

    def __init__(self):
        self.by = []

    @property
    def __jax_array__(self):
        frame = sys._getframe(1)
        is_check = compat.is_check_of_argument(frame)
        self.by.append((compat.is_operator_of_array(frame), is_check and compat.asking_function(frame)))


def asking(f):
    asked = Asked()
    with contextlib.suppress(TypeError):
        f(asked)
    return asked.by


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.ones(3) + x,
        lambda x: jnp.ones(3) @ x,
        lambda x: jnp.ones(3) == x,
        lambda x: jax.jit(lambda: jnp.ones(3) / x)(),
    ],
)
def test_operators_of_arrays(f):
    assert set(asking(f)) == {(True, False)}


@pytest.mark.parametrize("name", ["reshape", "split", "where"])
def test_checks_of_arguments(name):
    by = asking(lambda x: getattr(jnp, name)(x, 1))
    assert (False, name) in by
    assert not any(is_operator for is_operator, _ in by)


class Operand:
    pass


def test_the_primitive_that_asks():
    frames = []

    def converted(x):
        frames.append(sys._getframe(1))
        return jnp.ones(())

    compat.register_late_values(Operand, converted, lambda x: jax.core.ShapedArray((), jnp.float32))
    lax.neg_p.bind(Operand())
    assert compat.asking_primitive(frames[0]) is lax.neg_p


@pytest.mark.parametrize("jit", [False, True])
def test_the_equation_that_jax_works_on(jit):
    """Of a jaxpr that it interprets: the line that staged it, and not the one that runs it."""

    def staged(x):
        return lax.sin(x)

    jaxpr = jax.make_jaxpr(staged)(1.0)
    found = []

    def run(x):
        class Seen(jax.core.Trace):
            def process_primitive(self, primitive, operands, params, /):
                frame = sys._getframe(1)
                while frame is not None:
                    found.append(compat.traceback_of_equation(frame))
                    frame = frame.f_back
                return x

        with jax.extend.core.set_current_trace(Seen()):
            jax.extend.core.jaxpr_as_fun(jaxpr)(x)
        return x

    (jax.jit(run) if jit else run)(1.0)
    names = [f.function_name for traceback in found if traceback is not None for f in traceback.frames]
    assert any(name.endswith("staged") for name in names)


@pytest.mark.parametrize(("transform", "found"), [(jax.jacfwd, True), (jax.jacrev, False), (jax.grad, False)])
def test_jacfwd(transform, found):
    frames = []

    def f(x):
        frame = sys._getframe(1)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return x

    transform(f)(1.0)
    assert any(map(compat.is_jacfwd, frames)) is found


def test_no_forward_mode():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    with pytest.raises(TypeError) as error:
        jax.jvp(f, (1.0,), (1.0,))
    assert compat.lacks_forward_mode(error.value)
    with pytest.raises(TypeError) as error:
        jax.jvp(f, (1.0,), (1,))
    assert not compat.lacks_forward_mode(error.value)


def test_keys_that_cannot_be_sorted():
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is what is tested)
        jax.tree.leaves({1: 0, "a": 0})
    assert compat.has_unsortable_keys(error.value)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        jax.tree.map(lambda x, y: x, (1, 2), (1, 2, 3))
    assert not compat.has_unsortable_keys(error.value)


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (lambda x: jnp.zeros(x), True),
        (lambda x: 1 if x else 0, True),
        (lambda x: range(x), True),
        (lambda x: jnp.ones(6).reshape(x, -1), True),
        (lambda x: jnp.arange(x), True),
        (lambda x: jnp.nonzero(x * jnp.ones(3)), True),
        (lambda x: x + jnp.ones(3) @ jnp.ones(2), False),
    ],
)
def test_errors_that_ask_for_the_number_behind_a_tracer(f, found):
    with pytest.raises(Exception) as error:  # noqa: PT011
        jax.jit(f)(3)
    assert compat.wants_concrete(error.value) is found


def test_a_context_that_is_decided_when_a_cache_looks_at_it():
    context, wanted, traced = jax.make_user_context(None), ["a"], []

    @jax.jit
    def f(x):
        traced.append(wanted[0])
        return x

    compat.set_user_context(context, compat.DecidedLate(context, lambda: wanted[0]))
    try:
        for wanted[0] in ("a", "b", "a", "b"):
            f(1.0)
        assert traced == ["a", "b"]
        thread = threading.Thread(target=f, args=(1.0,))  # which has its own settings
        thread.start()
        thread.join()
        assert len(traced) == 3
    finally:
        compat.set_user_context(context, None)
