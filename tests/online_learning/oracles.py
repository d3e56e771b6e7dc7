"""Gradients of a sequence: by backpropagation through time, by exact RTRL, and by a learner step by step."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


def squared_error(output, target):
    return jnp.sum((output - target) ** 2)


def backpropagated(step, model, state, xs, targets, loss=squared_error):
    """One reverse pass over the whole sequence."""

    def total(model):
        def body(state, x_and_target):
            x, target = x_and_target
            state, output = step(model, state, x)
            return state, loss(output, target)

        return jax.lax.scan(body, state, (xs, targets))[1].sum()

    return jax.jit(jax.grad(total))(model)


def recurrent(step, model, state, xs, targets, loss=squared_error):
    """Exact RTRL: the whole Jacobian of the state by the parameters is carried forward."""
    flat, unravel = jax.flatten_util.ravel_pytree(model)
    state_flat, unravel_state = jax.flatten_util.ravel_pytree(state)

    def forward(flat, state_flat, x):
        state, output = step(unravel(flat), unravel_state(state_flat), x)
        return jax.flatten_util.ravel_pytree(state)[0], output

    @jax.jit
    def advance(state_flat, jacobian, x, target):
        of_loss = lambda flat, s: loss(forward(flat, s, x)[1], target)
        by_flat, by_state = jax.grad(of_loss, argnums=(0, 1))(flat, state_flat)
        grad = by_flat + by_state @ jacobian
        by_flat, by_state = jax.jacfwd(lambda f, s: forward(f, s, x)[0], argnums=(0, 1))(flat, state_flat)
        return forward(flat, state_flat, x)[0], by_flat + by_state @ jacobian, grad

    jacobian = jnp.zeros((state_flat.size, flat.size))
    total = jnp.zeros(flat.size)
    for x, target in zip(xs, targets, strict=True):
        state_flat, jacobian, grad = advance(state_flat, jacobian, x, target)
        total += grad
    return unravel(total)


def online(learner, model, state, xs, targets, loss=squared_error):
    """The sum of the gradients of separate calls, one for each step."""
    traces = learner.init(model, state, xs[0])
    learn = jax.jit(
        lambda model, state, traces, x, target: learner.value_and_grad(
            loss, model, state, traces, x, targets=(target,)
        )
    )
    total = None
    for x, target in zip(xs, targets, strict=True):
        _, grads, state, traces, _ = learn(model, state, traces, x, target)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return total


def relative_error(found, expected):
    """The distance of two trees of gradients in the norm of the second, which is not zero."""
    assert jtu.tree_structure(found) == jtu.tree_structure(expected)
    found, expected = (np.concatenate([np.ravel(x) for x in jtu.tree_leaves(t)]) for t in (found, expected))
    norm = np.linalg.norm(expected)
    assert norm > 1e-3
    return np.linalg.norm(found - expected) / norm


def errors_by_leaf(found, expected):
    return jax.tree.map(relative_error, found, expected)
