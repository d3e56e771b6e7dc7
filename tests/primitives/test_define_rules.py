"""Hand-written rules, implementations per platform, slots, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import quaxlike
from quaxlike.primitives import MissingRuleError, define_primitive
from tests.samples import array

from .jaxprs import names, primitives

X = array(np.arange(1.0, 4.0))
W = array(np.arange(6.0).reshape(3, 2) / 6)


# -------------------------------------------------------------------------------------------------
# Platforms
# -------------------------------------------------------------------------------------------------

wave_p = define_primitive("test_wave", jnp.sin, gpu=jnp.cos, tpu=jnp.tanh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "operation"),
    [("cpu", "sine"), ("cuda", "cosine"), ("rocm", "cosine"), ("tpu", "tanh")],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap, lambda f: jax.vmap(jax.vmap(f))])
def test_the_implementation_is_chosen_at_lowering(platform, operation, wrap):
    lowered = jax.jit(wrap(wave_p)).trace(jnp.ones((2, 3, 4))).lower(lowering_platforms=(platform,))
    assert {op for op in ("sine", "cosine", "tanh") if f".{op} " in lowered.as_text()} == {operation}


def test_several_platforms_in_one_export():
    exported = jax.export.export(jax.jit(wave_p), platforms=("cpu", "cuda", "tpu"))(X)
    text = exported.mlir_module()
    assert all(f".{op} " in text for op in ("sine", "cosine", "tanh"))
    np.testing.assert_allclose(exported.call(X), jnp.sin(X), rtol=1e-6)


def test_derivatives_come_from_the_default_implementation():
    lowered = jax.jit(jax.grad(lambda x: wave_p(x).sum())).trace(X).lower(lowering_platforms=("tpu",))
    assert "cosine" in lowered.as_text()


def test_a_platform_that_computes_another_type_is_refused():
    p = define_primitive("test_wrong_platform", jnp.sin, tpu=lambda x: x.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"tpu implementation of primitive 'test_wrong_platform'.*bf"):
        jax.jit(p).trace(X).lower(lowering_platforms=("tpu",))


# -------------------------------------------------------------------------------------------------
# Rules by hand
# -------------------------------------------------------------------------------------------------


def _matmul_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    terms = [matmul_p(dx, w)] if dx is not None else []
    terms += [matmul_p(x, dw)] if dw is not None else []
    return sum(terms[1:], terms[0])


def _matmul_transpose(ct, x, w):
    if ad.is_undefined_primal(x):
        return matmul_p(ct, w.T), None
    return None, matmul_p(x.T, ct)


def _matmul_batch(size, args, dims):
    (x, w), (x_dim, w_dim) = args, dims
    if w_dim is not None:
        return NotImplemented
    rows = jnp.moveaxis(x, x_dim, 1)
    flat = rows.reshape(-1, rows.shape[-1])
    return matmul_p(flat, w).reshape(*rows.shape[:-1], w.shape[1]), 1


matmul_p = define_primitive(
    "test_matmul",
    jnp.matmul,
    jvp=_matmul_jvp,
    transpose=_matmul_transpose,
    batching=_matmul_batch,
)


def _matmul_loss(matmul, x, w):
    return jnp.sum(matmul(x, w) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: lambda *a: jax.jvp(f, a, a),
        lambda f: jax.hessian(f, argnums=1),
        lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(jax.grad(f)(x, w) ** 2), 1)),
    ],
)
def test_rules_written_with_the_primitive_itself(transform):
    x = jnp.stack([X, 2 * X])
    apply = transform(partial(_matmul_loss, matmul_p))
    expected = transform(partial(_matmul_loss, jnp.matmul))(x, W)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), apply(x, W), expected)
    found = primitives(apply, x, W)
    assert matmul_p in found
    # Every derivative is the primitive again, so that none of the derived ones is needed.
    assert not {matmul_p.jvp_p, matmul_p.vjp_p, matmul_p.transpose_p} & found


@pytest.mark.slow
def test_any_batch_axis_of_the_result_and_not_implemented():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    by_hand = jax.vmap(matmul_p, in_axes=(2, None))
    np.testing.assert_allclose(by_hand(x, W), jnp.einsum("mkb,kn->bmn", x, W), rtol=1e-6)
    assert primitives(by_hand, x, W) >= {matmul_p}
    assert matmul_p.batch_p not in primitives(by_hand, x, W)
    weights = jnp.stack([W, W, W, W])
    derived = jax.vmap(matmul_p, in_axes=(2, 0))
    np.testing.assert_allclose(derived(x, weights), jnp.einsum("mkb,kn->bmn", x, W), rtol=1e-6)
    assert matmul_p.batch_p in primitives(derived, x, weights)
    unmapped = jax.vmap(lambda x: x.sum() * matmul_p(jnp.ones((1, 3)), W))(x)
    assert unmapped.shape == (2, 1, 2)


def _norm(x, *, eps):
    scale = lax.rsqrt(jnp.mean(x**2) + eps)
    return {"y": x * scale, "scale": scale}


def _norm_vjp(ct, out, x, *, eps):
    """With the saved scale, marked by a cube root so that its use can be seen."""
    y_ct = jnp.zeros_like(x) if ct["y"] is None else ct["y"]
    scale_ct = jnp.zeros(()) if ct["scale"] is None else ct["scale"]
    s = jnp.cbrt(out["scale"] ** 3)
    return (y_ct * s - (jnp.sum(y_ct * x) + scale_ct) * s**3 * x / x.size,)


norm_p = define_primitive("test_norm", _norm, multiple_results=True, vjp=_norm_vjp, vjp_with_results=True)


@pytest.mark.slow
@pytest.mark.parametrize("use", [("y",), ("scale",), ("y", "scale")])
@pytest.mark.parametrize("order", ["grad", "vmap_grad", "grad_vmap", "hessian"])
def test_vjp_by_hand_with_results(use, order):
    def loss(norm, x):
        out = norm(x, eps=1e-3)
        return sum(jnp.sum(jnp.sin(out[k])) for k in use)

    apply = {
        "grad": jax.grad,
        "hessian": lambda f: jax.jacfwd(jax.grad(f)),
        "vmap_grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
        "grad_vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()),
    }[order]
    found = apply(partial(loss, norm_p))
    np.testing.assert_allclose(found(X), apply(partial(loss, _norm))(X), rtol=1e-4, atol=1e-6)
    assert "cbrt" in names(found, X)
    assert norm_p.vjp_p not in primitives(found, X)


@pytest.mark.slow
def test_forward_mode_is_derived_beside_a_vjp_by_hand():
    f = lambda x: norm_p(x, eps=1e-3)
    tangent = jax.jvp(f, (X,), (X,))[1]
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        tangent,
        jax.jvp(partial(_norm, eps=1e-3), (X,), (X,))[1],
    )


def test_linear_primitives_transpose():
    diff_p = define_primitive("test_diff", lambda x, k: (x[1:] - x[:-1]) * k)
    pull = lambda ct: jax.linear_transpose(lambda x: diff_p(x, 2.0), X)(ct)[0]
    ct = jnp.array([1.0, 10.0])
    expected = jnp.array([-2.0, -18.0, 20.0])
    np.testing.assert_allclose(pull(ct), expected)
    np.testing.assert_allclose(jax.vmap(pull)(jnp.stack([ct, ct]))[1], expected)
    twice = jax.linear_transpose(pull, ct)(X)[0]
    np.testing.assert_allclose(twice, diff_p(X, 2.0))
    assert diff_p in primitives(lambda x: jax.linear_transpose(pull, ct)(x), X)
    batched = lambda x: jax.vmap(diff_p, in_axes=(None, 0))(x, jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(
        jax.linear_transpose(batched, X)(jnp.ones((2, 2)))[0], jnp.array([-3.0, 0.0, 3.0])
    )


@pytest.mark.quick(
    "options1-for each of its 1 operands", "options2-the jvp rule of .* returned the structure"
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vjp": lambda ct, x: ct[0]}, "the vjp rule of primitive .* must return a tuple"),
        ({"vjp": lambda ct, x: (ct, ct)}, "for each of its 1 operands"),
        ({"jvp": lambda p, t: {"a": t[0]}}, "the jvp rule of .* returned the structure"),
    ],
)
def test_rules_that_return_the_wrong_structure(options, message):
    p = define_primitive(
        f"test_bad_{abs(hash(message))}", lambda x: [x * x], multiple_results=True, **options
    )
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda x: p(x)[0].sum())(X)


# -------------------------------------------------------------------------------------------------
# Slots
# -------------------------------------------------------------------------------------------------


def test_slots():
    p = define_primitive("test_slots", jnp.sin)
    assert not p.slot("cost").registered
    with pytest.raises(MissingRuleError, match=r"primitive 'test_slots' has no rule in slot 'cost'"):
        p.slot("cost")(X)

    @p.slot("cost").register
    def cost(x):
        return x.size

    assert p.slot("cost")(X) == 3
    assert p.slot("cost").rule is cost
    assert not p.slot("other").registered
    assert "'cost' of 'test_slots', registered" in repr(p.slot("cost"))


# -------------------------------------------------------------------------------------------------
# What is refused
# -------------------------------------------------------------------------------------------------


def test_names():
    define_primitive("test_taken", jnp.sin)
    with pytest.raises(ValueError, match=r"'test_taken' was already defined from"):
        define_primitive("test_taken", jnp.cos)
    assert define_primitive("test_taken", jnp.cos, replace=True)(0.0) == 1.0
    with pytest.raises(ValueError, match="'dot_general' is taken by a primitive of JAX"):
        define_primitive("dot_general", jnp.dot, replace=True)
    with pytest.raises(ValueError, match=r"must be an identifier, got 'a\.b'"):
        define_primitive("a.b", jnp.sin)
    for reserved in (lambda x, forms: x, lambda x, *, _param_types: x):
        with pytest.raises(ValueError, match=r"has a parameter '(forms|_param_types)'"):
            define_primitive("test_reserved", reserved)


def _of_another_library(name):
    theirs = Primitive(name)
    theirs.def_abstract_eval(lambda x: x)
    mlir.register_lowering(theirs, mlir.lower_fun(jnp.cos, multiple_results=False))
    return theirs


@pytest.mark.quick("False")
@pytest.mark.parametrize("theirs_first", [True, False])
def test_a_name_that_another_library_has(theirs_first):
    name = f"test_shared_{theirs_first}"
    theirs = _of_another_library(name) if theirs_first else None
    if theirs_first:
        quaxlike.register(name)  # is theirs
    ours = define_primitive(name, jnp.sin)
    theirs = theirs or _of_another_library(name)
    assert ours(0.0) == 0.0
    assert jax.jit(theirs.bind)(0.0) == 1.0

    class Negated(quaxlike.ArrayValue):
        array: jax.Array

        def materialise(self):
            return -self.array

    @quaxlike.register(ours)
    def _(x: Negated):
        return Negated(ours(x.array))

    x = Negated(jnp.ones(()))
    assert isinstance(quaxlike.quaxify(ours)(x), Negated)
    assert quaxlike.quaxify(jax.jit(theirs.bind))(x) == jnp.cos(-1.0)
    with pytest.raises(ValueError, match=f"2 primitives of different libraries are called '{name}'"):
        quaxlike.register(name)


@pytest.mark.slow
def test_a_primitive_that_was_replaced_has_no_name():
    old = define_primitive("test_replaced", jnp.sin)
    jax.grad(old)(0.0)
    new = define_primitive("test_replaced", jnp.cos, replace=True)
    jax.grad(new)(0.0)
    assert quaxlike.register("test_replaced")
    assert quaxlike.register("test_replaced.jvp")


def test_operands_and_parameters():
    p = define_primitive("test_operands", lambda x, *, k=0: x["a"] * 2.0)
    with pytest.raises(TypeError, match=r"operand 0 of primitive 'test_operands' holds .* at \['b'\]"):
        p({"a": X, "b": jnp.tanh})
    with pytest.raises(TypeError, match=r"parameter 'k' .* is an array of type f"):
        p({"a": X}, k=X)
    with pytest.raises(TypeError, match=r"parameter 'k' .* must be hashable, got \[1\]"):
        p({"a": X}, k=[1])
    several = define_primitive("test_several", lambda x: (x, x))
    with pytest.raises(TypeError, match=r"has one result, but .* define it with `multiple_results"):
        several(X)


def test_no_transpose_in_a_point_of_linearisation():
    p = define_primitive("test_point", jnp.sin)
    with pytest.raises(TypeError, match="not linear in that"):
        jax.linear_transpose(lambda x: jax.jvp(p, (x,), (X,))[1], X)(X)


@pytest.mark.slow
def test_gradients_of_mapped_primitives_with_a_custom_vjp():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))
    f = lambda x: sine(x) * x
    own = lambda ct, x: (ct * (jnp.sin(x) + 2 * x * jnp.cos(x)),)
    x = jnp.array([0.3, 0.5])
    for p in (define_primitive("sine_times", f), define_primitive("sine_times_by_hand", f, vjp=own)):
        for grad in (
            lambda g: jax.grad(lambda x: jax.vmap(g)(x).sum())(x),
            lambda g: jax.vmap(jax.grad(lambda x: jax.vmap(g)(x).sum()))(x[None]),
            lambda g: jax.jit(jax.grad(lambda x: lax.map(jax.vmap(g), x[None]).sum()))(x),
        ):
            np.testing.assert_allclose(grad(p), grad(f), rtol=1e-6)
    p = define_primitive("sine_times_again", f)
    hessian = jax.hessian(lambda x: p(x).sum())(x)
    np.testing.assert_allclose(hessian, jax.jacrev(jax.grad(lambda x: f(x).sum()))(x), rtol=1e-6)
