"""The straight-through estimator: values of the function, derivatives of the identity."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.implicit import implicit, ste
from tests.samples import normal

from .types import Codes

W = normal(4, 3)
X = normal(2, 4)

quantize = ste(Codes.quantize)


class Doubled(ql.ArrayValue):
    """Cut into rows by way of its leaf."""

    half: jax.Array

    def materialise(self):
        return 2 * self.half


class Scaled(ql.ArrayValue):
    """Cannot be cut into rows."""

    array: jax.Array
    scale: jax.Array

    def materialise(self):
        return self.array * self.scale[..., None, None]


class TestArrays:
    @pytest.mark.slow
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_value_and_gradient(self, wrap):
        f = wrap(lambda w: (ste(jnp.round)(w) ** 2).sum())
        value, grad = jax.value_and_grad(f)(W)
        np.testing.assert_allclose(value, (jnp.round(W) ** 2).sum(), rtol=1e-6)
        np.testing.assert_allclose(grad, 2 * jnp.round(W), rtol=1e-6)

    def test_forward_mode(self):
        y, dy = jax.jvp(ste(jnp.sign), (W,), (2 * W,))
        np.testing.assert_array_equal(y, jnp.sign(W))
        np.testing.assert_array_equal(dy, 2 * W)

    @pytest.mark.slow
    def test_vmap(self):
        grads = jax.vmap(jax.grad(lambda w: (ste(jnp.round)(w) * w).sum()))(W)
        np.testing.assert_allclose(grads, jnp.round(W) + W, rtol=1e-6)

    @pytest.mark.slow
    def test_other_arguments(self):
        @ste
        def f(w, step, shift=0.0, *, mode, name="x"):
            assert name == "y"
            return getattr(jnp, mode)(w / step) * step + shift

        run = lambda w, step, shift: f(w, step, shift=shift, mode="floor", name="y").sum()
        value, grads = jax.value_and_grad(run, (0, 1, 2))(W, 0.5, 0.25)
        np.testing.assert_allclose(value, (jnp.floor(W / 0.5) * 0.5 + 0.25).sum(), rtol=1e-5)
        np.testing.assert_array_equal(grads[0], jnp.ones_like(W))
        assert grads[1:] == (0.0, 0.0)

    def test_static_arguments_of_jit(self):
        @functools.partial(jax.jit, static_argnames=("bits", "sign"))
        def run(w, bits, *, sign):
            return ste(lambda w, bits, sign: jnp.round(w * 2**bits) / 2**bits * sign)(
                w, bits, sign=sign
            ).sum()

        np.testing.assert_array_equal(jax.grad(run)(W, 2, sign=-1), jnp.ones_like(W))

    @pytest.mark.slow
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
    def test_what_is_closed_over_has_no_gradient(self, wrap):
        loss = wrap(lambda s, w: ste(lambda w: jnp.round(w / s) * s)(w).sum())
        s_grad, w_grad = jax.grad(loss, (0, 1))(0.7, W)
        assert jax.grad(loss)(0.7, W) == s_grad == 0.0
        np.testing.assert_array_equal(w_grad, jnp.ones_like(W))

    def test_python_scalars(self):
        assert jax.grad(ste(jnp.round))(1.4) == 1.0

    def test_the_first_argument_by_name(self):
        assert ste(lambda x: jnp.round(x))(x=1.4) == 1.0
        assert ste(jnp.round)(x=1.4) == 1.0
        assert jax.grad(lambda v: ste(lambda w, n: jnp.round(w, n))(n=0, w=v))(1.4) == 1.0

    @pytest.mark.slow
    @pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
    @pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
    def test_second_derivatives(self, outer, inner):
        assert outer(inner(lambda x: ste(jnp.round)(x) ** 2))(0.6) == 2.0
        assert jax.jit(outer(inner(jax.jit(lambda x: ste(jnp.round)(x) ** 3))))(1.6) == 12.0

    def test_low_precision(self):
        grad = jax.grad(lambda w: ste(lambda w: w.astype(jnp.bfloat16))(w).astype(jnp.float32).sum())(W)
        np.testing.assert_array_equal(grad, jnp.ones_like(W))
        assert grad.dtype == jnp.float32

    def test_a_tree(self):
        rounded = ste(lambda tree: jax.tree.map(jnp.round, tree))
        grads = jax.grad(lambda tree: rounded(tree)["a"] ** 2 + 3 * rounded(tree)["b"])({"a": 1.6, "b": 0.2})
        assert grads == {"a": 4.0, "b": 3.0}

    @pytest.mark.slow
    def test_a_tree_of_which_some_leaves_become_values(self):
        encoded = ste(lambda tree: {"w": Codes.quantize(tree["w"]), "x": tree["x"]})
        f = lambda tree: (tree["x"] @ tree["w"]).sum()
        grads = jax.grad(lambda tree: implicit(f)(encoded(tree)))({"w": W, "x": X})
        dense = Codes.quantize(W).materialise()
        np.testing.assert_allclose(grads["w"], jax.grad(lambda w: (X @ w).sum())(dense), rtol=1e-5)
        np.testing.assert_allclose(grads["x"], jax.grad(lambda x: (x @ dense).sum())(X), rtol=1e-5)

    def test_a_function_that_changes_the_structure(self):
        with pytest.raises(ValueError, match=r"keeps the structure .*found PyTreeDef\(\{'a': \*\}\) in"):
            ste(lambda tree: tree["a"])({"a": W})

    def test_a_function_that_changes_the_shape(self):
        with pytest.raises(ValueError, match=r"keeps the shape .*found \(4, 3\) in and \(\) out"):
            ste(jnp.sum)(W)


class TestValues:
    """Of functions that return a Value."""

    @pytest.mark.quick("<lambda>")
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_casts(self, wrap):
        def through(dtype, w):
            q = quantize(w).astype(dtype)
            assert (type(q), q.dtype) == (type(quantize(w)), dtype)
            return ql.materialise(q.astype(jnp.float32))

        for dtype, slope in [(jnp.float16, 1), (jnp.int32, 0)]:
            f = wrap(functools.partial(through, dtype))
            cast = Codes.quantize(W).astype(dtype).materialise()
            np.testing.assert_array_equal(f(W), cast.astype(jnp.float32))
            grad = jax.grad(lambda w, f=f: f(w).sum())(W)
            np.testing.assert_array_equal(grad, jnp.full_like(W, slope))

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
    def test_passes_for_the_value(self, wrap):
        q = wrap(quantize)(W)
        assert isinstance(q, Codes)
        assert (q.shape, q.dtype, q.bits) == (W.shape, W.dtype, 8)
        np.testing.assert_array_equal(q.codes, Codes.quantize(W).codes)
        np.testing.assert_array_equal(ql.materialise(q), Codes.quantize(W).materialise())

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "order",
        [
            lambda f: jax.grad(implicit(f)),
            lambda f: implicit(jax.grad(f)),
            lambda f: jax.jit(jax.grad(implicit(f))),
            lambda f: jax.grad(jax.jit(implicit(f))),
            lambda f: jax.grad(implicit(jax.jit(f))),
        ],
    )
    def test_gradients(self, order):
        dense = Codes.quantize(W).materialise()
        f = lambda w: ((X @ quantize(w)) ** 2).sum()
        np.testing.assert_allclose(order(f)(W), jax.grad(lambda w: ((X @ w) ** 2).sum())(dense), rtol=1e-4)

    def test_the_rule_is_followed(self):
        f = lambda w: (X @ quantize(w)).sum()
        report = ql.explain(jax.grad(f), False)(W)
        del report
        rows = ql.explain(lambda w: X @ w)(quantize(W)).rows
        assert [(row.primitive, row.outcome) for row in rows if row.outcome == "rule"] == [
            ("dot_general", "rule")
        ]
        assert not [row for row in rows if row.outcome == "materialised"]

    @pytest.mark.slow
    def test_gradients_of_the_other_operand(self):
        dense = Codes.quantize(W).materialise()
        grads = jax.grad(implicit(lambda x, w: ((x @ quantize(w)) ** 2).sum()), (0, 1))(X, W)
        expected = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(X, dense)
        for got, want in zip(grads, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
    @pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
    def test_second_derivatives(self, outer, inner):
        loss = lambda x, w: (jnp.sin(x @ w) ** 2).sum()
        estimated = implicit(lambda x, w: loss(x, quantize(w)))
        dense = Codes.quantize(W).materialise()
        hessian = lambda f: outer(inner(f, (0, 1)), (0, 1))
        for got, want in zip(
            jax.tree.leaves(hessian(estimated)(X, W)), jax.tree.leaves(hessian(loss)(X, dense)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_structure_is_that_within_transformations(self, dtype):
        w = normal(64, 8).astype(dtype)
        for encode in (ql.NF4Array.quantize, lambda w: ql.Int8Array.quantize(w.astype("float32"))):
            eager, traced = ste(encode)(w), jax.jit(ste(encode))(w)
            assert isinstance(eager, type(encode(w)))
            assert jax.tree.structure(eager) == jax.tree.structure(traced)
            assert [*map(jax.typeof, jax.tree.leaves(eager))] == [*map(jax.typeof, jax.tree.leaves(traced))]
            assert jax.tree.structure(eager.value) == jax.tree.structure(encode(w))
            assert eager.array.dtype == eager.dtype

    @pytest.mark.slow
    @pytest.mark.parametrize("encode", [Codes.quantize, ql.Int8Array.quantize])
    @pytest.mark.parametrize("wrap", ["plain", "jit", "quaxify", "jit of quaxify", "quaxify of jit"])
    @pytest.mark.parametrize("loop", ["fori_loop", "while_loop", "scan", "cond"])
    def test_a_value_is_the_carry_of_a_loop(self, loop, wrap, encode):
        w = normal(16, 16)

        def run(w, quantize):
            half = lambda q: quantize(ql.materialise(q) / 2)
            match loop:
                case "fori_loop":
                    out = jax.lax.fori_loop(0, 2, lambda i, q: half(q), quantize(w))
                case "while_loop":
                    body = lambda c: (c[0] + 1, half(c[1]))
                    out = jax.lax.while_loop(lambda c: c[0] < 2, body, (0, quantize(w)))[1]
                case "scan":
                    out, _ = jax.lax.scan(lambda q, _: (half(q), None), quantize(w), length=2)
                case _:
                    out = jax.lax.cond(w.sum() > 1e3, lambda: quantize(w), lambda: half(quantize(w)))
            return (ql.materialise(out) ** 2).sum()

        of_values = lambda w: run(w, ste(encode))
        wanted = lambda w: run(w, ste(lambda w: encode(w).materialise()))
        wrapped = {
            "plain": of_values,
            "jit": jax.jit(of_values),
            "quaxify": ql.quaxify(of_values),
            "jit of quaxify": jax.jit(ql.quaxify(of_values)),
            "quaxify of jit": ql.quaxify(jax.jit(of_values)),
        }[wrap]
        np.testing.assert_allclose(wrapped(w), wanted(w), rtol=1e-5)
        # The weight of a loop may be a constant of the program.
        np.testing.assert_allclose(jax.jit(lambda: wrapped(w))(), wanted(w), rtol=1e-5)
        for got, want in zip(*(jax.jvp(f, (w,), (w,)) for f in (wrapped, wanted)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
        if loop in ("scan", "cond"):
            np.testing.assert_allclose(jax.grad(wrapped)(w), jax.grad(wanted)(w), rtol=1e-5, atol=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("encode", [Codes.quantize, lambda w: Codes.quantize(w).materialise()])
    @pytest.mark.parametrize("wrap", [lambda f: f, ql.quaxify])
    def test_gradients_pass_to_the_leaves_of_a_value(self, encode, wrap):
        a, b = normal(2, 3), normal(4, 2, seed=1)
        run = lambda w: jnp.sin(ql.materialise(ste(lambda w: encode(ql.materialise(w)))(w))).sum()
        grad = jax.grad(wrap(lambda b: run(ql.LoraArray(W, a, b))))(b)
        np.testing.assert_allclose(grad, jax.grad(lambda b: run(W + b @ a))(b), rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_carries_and_branches_are_of_one_structure(self):
        start = jax.jit(quantize)(W)
        assert jax.tree.structure(start) == jax.tree.structure(quantize(W))

        def f(w, quantize):
            half = lambda q: quantize(ql.materialise(q) / 2)
            out, _ = jax.lax.scan(lambda q, _: (half(q), None), quantize(w), length=2)
            return jax.lax.cond(w.sum() > 0, lambda: quantize(w), lambda: out)

        run = lambda w: (X @ ql.materialise(f(w, quantize))).sum()
        for w in (W, -W):
            expected = jax.grad(lambda w: (X @ f(w, lambda w: w)).sum())(w)
            np.testing.assert_allclose(jax.grad(run)(w), expected, rtol=1e-5)
            np.testing.assert_allclose(jax.grad(jax.jit(run))(w), expected, rtol=1e-5)
        # JAX compares trees before anything is dispatched, and a Codes has no leaf for this derivative.
        with pytest.raises(TypeError, match="same pytree structure"):
            jax.lax.scan(lambda q, _: (quantize(ql.materialise(q)), None), Codes.quantize(W), length=2)
        with pytest.raises(TypeError, match="StraightThrough"):
            jax.lax.cond(True, quantize, Codes.quantize, W)

    def test_copies(self):
        for q in (quantize(W), jax.jit(quantize)(W)):
            copy = pickle.loads(pickle.dumps(q))
            assert type(copy) is type(q)
            assert jax.tree.structure(copy) == jax.tree.structure(q)
            np.testing.assert_array_equal(ql.materialise(copy), ql.materialise(q))
        q = quantize(W).value
        np.testing.assert_array_equal(dataclasses.replace(q, scale=2 * q.scale).scale, 2 * q.scale)

    @pytest.mark.slow
    def test_through_rules_that_return_values(self):
        dense = Codes.quantize(W).materialise()
        f = implicit(lambda w: (X @ (quantize(w) * 3.0)).sum())
        np.testing.assert_allclose(f(W), (X @ (dense * 3.0)).sum(), rtol=1e-4)
        np.testing.assert_allclose(
            jax.grad(f)(W), jax.grad(lambda w: (X @ (w * 3.0)).sum())(dense), rtol=1e-4
        )

    def test_materialize(self):
        f = lambda w: (quantize(w).materialize() ** 2).sum()
        np.testing.assert_allclose(jax.grad(f)(W), 2 * Codes.quantize(W).materialise(), rtol=1e-5)

    @pytest.mark.slow
    def test_without_a_rule(self):
        f = lambda w: jnp.sum(jnp.sin(quantize(w) + 1.0))
        dense = Codes.quantize(W).materialise()
        with ql.on_materialise("allow"):
            np.testing.assert_allclose(jax.grad(implicit(f))(W), jnp.cos(dense + 1.0), rtol=1e-5)

    def test_forward_mode(self):
        dense = Codes.quantize(W).materialise()
        y, dy = jax.jvp(implicit(lambda w: X @ quantize(w)), (W,), (2 * W,))
        np.testing.assert_allclose(y, X @ dense, rtol=1e-4)
        np.testing.assert_allclose(dy, X @ (2 * W), rtol=1e-4)

    @pytest.mark.slow
    def test_vmap(self):
        w = normal(5, 4, 3)
        f = lambda w: ((X @ quantize(w)) ** 2).sum()
        grads = jax.vmap(jax.grad(implicit(f)))(w)
        for got, each in zip(grads, w, strict=True):
            dense = Codes.quantize(each).materialise()
            np.testing.assert_allclose(got, jax.grad(lambda w: ((X @ w) ** 2).sum())(dense), rtol=1e-4)

    @pytest.mark.slow
    def test_scan(self):
        def f(w):
            q = quantize(w)
            return jax.lax.scan(lambda c, x: (c + (x[None] @ q).sum(), None), 0.0, X)[0]

        with ql.on_materialise("allow"):
            np.testing.assert_allclose(
                jax.grad(implicit(f))(W), jax.grad(lambda w: (X @ w).sum())(W), rtol=1e-4
            )

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["codes", "nf4", "rows", "no rows"])
    def test_a_scan_over_a_stack(self, kind):
        encode = {
            "codes": Codes.quantize,
            "nf4": ql.NF4Array.quantize,
            "rows": Doubled,
            "no rows": lambda w: Scaled(w, jnp.ones(w.shape[:-2])),
        }[kind]
        weights, x = normal(3, 64, 64) / 8, normal(5, 64)
        scan = lambda w: jax.lax.scan(lambda h, w: (h @ w, None), x, w)[0]
        squares = lambda run: lambda w: (run(w) ** 2).sum()
        dense = jnp.stack([ql.materialise(encode(w)) for w in weights])
        # Of these types, all but the last are cut into rows, and NF4Array alone has a rule for the product.
        with ql.on_materialise("error" if kind == "nf4" else "allow"):
            stack = jax.vmap(ste(encode))(weights)
            np.testing.assert_allclose(implicit(scan)(stack), scan(dense), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(
                implicit(lambda q: jax.lax.map(lambda w: x @ w, q))(stack), x @ dense, rtol=1e-4, atol=1e-5
            )
            run = squares(implicit(scan))
            grads = [jax.grad(lambda w: run(ste(encode)(w)))(weights)]
            if kind == "nf4":
                grads.append(jax.jit(jax.grad(lambda w: run(ste(encode)(w))))(weights))
                grads.append(jax.grad(jax.jit(lambda w: run(jax.vmap(ste(encode))(w))))(weights))
        for grad in grads:
            np.testing.assert_allclose(grad, jax.grad(squares(scan))(dense), rtol=1e-4, atol=1e-4)

    def test_static_and_keyword_arguments(self):
        q = quantize(W, bits=4)
        assert q.bits == 4
        np.testing.assert_array_equal(ql.materialise(q), Codes.quantize(W, bits=4).materialise())

    @pytest.mark.slow
    def test_training_lowers_the_loss(self):
        x = normal(16, 4)
        target = x @ normal(4, 3)
        loss = implicit(lambda w: jnp.mean((x @ quantize(w, bits=4) - target) ** 2))
        w = jnp.full((4, 3), 0.1)
        first = loss(w)
        step = jax.jit(lambda w: w - 0.1 * jax.grad(loss)(w))
        for _ in range(60):
            w = step(w)
        assert loss(w) < first / 10
