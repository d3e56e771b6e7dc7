"""Every transform keeps the type: programs on types that refuse to materialise."""

import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import quaxlike as ql
from tests.conformance.programs import NOT_IN_JAX, NOT_LINEAR, PROGRAMS, other
from tests.strict import product, strict, strict_pair


def _dense(tree):
    return jtu.tree_map(lambda x: x.dense() if ql.is_value(x) else x, tree, is_leaf=ql.is_value)


def _stacked(x):
    return jnp.stack([x, 2.0 * x])


def _found(mode, f, make):
    """The program on Values in a mode."""
    quaxified = ql.quaxify(f)
    loss = lambda x: jnp.sum(_dense(quaxified(make(x))))
    if mode == "eager":
        return _dense(quaxified(make(other())))
    if mode == "jit":
        return _dense(jax.jit(quaxified)(make(other())))
    if mode == "vmap":
        return _dense(jax.vmap(lambda v: quaxified(v))(make(_stacked(other()))))
    if mode == "grad":
        return jax.grad(loss)(other())
    return jax.jit(jax.grad(loss))(other())


@functools.cache
def _expected(transform, name):
    """The program on arrays, once for all types."""
    f = PROGRAMS[name]
    if transform == "vmap":
        return jax.vmap(f)(_stacked(other()))
    if transform == "grad":
        return jax.grad(lambda x: jnp.sum(f(x)))(other())
    return f(other())


# Modes, each with the transform that arrays go through.
MODES = {"eager": "none", "jit": "none", "vmap": "vmap", "grad": "grad", "jit of grad": "grad"}


@pytest.mark.slow
@pytest.mark.parametrize("make", [strict, strict_pair, product], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_type_is_kept(name, make, default_promotion):
    allowed = make is product and name in NOT_LINEAR
    for mode, transform in MODES.items():
        if transform in NOT_IN_JAX.get(name, ()):
            with pytest.raises((ValueError, NotImplementedError, AttributeError)):
                _found(mode, PROGRAMS[name], lambda x: x)
            continue
        with ql.on_materialise("allow" if allowed else "error"):
            found = _found(mode, PROGRAMS[name], make)
        expected = _expected(transform, name)
        assert jnp.shape(found) == jnp.shape(expected), mode
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=mode)
