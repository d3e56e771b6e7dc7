"""Every transform keeps the type: programs on types that refuse to materialise."""

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


def _mode(mode, f, make):
    """The program on Values in a mode, and the same on arrays."""
    quaxified = ql.quaxify(f)
    x = other()
    if mode == "eager":
        return _dense(quaxified(make(x))), f(x)
    if mode == "jit":
        return _dense(jax.jit(quaxified)(make(x))), f(x)
    if mode == "vmap":
        xs = jnp.stack([x, 2.0 * x])
        return _dense(jax.vmap(lambda v: quaxified(v))(make(xs))), jax.vmap(f)(xs)
    loss = lambda x: jnp.sum(_dense(quaxified(make(x))))
    expected = jax.grad(lambda x: jnp.sum(f(x)))(x)
    if mode == "grad":
        return jax.grad(loss)(x), expected
    return jax.jit(jax.grad(loss))(x), expected


@pytest.mark.parametrize("make", [strict, strict_pair, product], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_type_is_kept(name, make, default_promotion):
    allowed = make is product and name in NOT_LINEAR
    for mode in ["eager", "jit", "vmap", "grad", "jit of grad"]:
        if mode.split()[-1] in NOT_IN_JAX.get(name, ()):
            with pytest.raises((ValueError, NotImplementedError, AttributeError)):
                _mode(mode, PROGRAMS[name], lambda x: x)
            continue
        with ql.on_materialise("allow" if allowed else "error"):
            found, expected = _mode(mode, PROGRAMS[name], make)
        assert jnp.shape(found) == jnp.shape(expected), mode
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=mode)
