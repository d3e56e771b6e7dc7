"""Values as hijax types, and hijax types of others in quaxified programs."""

import copy
import dataclasses
import operator
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.samples import array, normal, once

pytest.importorskip("quaxlike.hijax", exc_type=ImportError, reason="it needs JAX 0.11")
from jax.experimental import hijax

from quaxlike.hijax import HiTangent, HiValue, LeafAxes, as_hitype

X = normal(64)


@once
def nf4():
    return ql.NF4Array.quantize(normal(8, 64))


@once
def lora():
    return ql.LoraArray(nf4(), normal(2, 64, seed=1), normal(8, 2, seed=2), alpha=1.0)


VALUES = {
    "NF4Array": nf4,
    "LoraArray": lora,
    "SparseArray": once(lambda: ql.SparseArray.from_dense(normal(8, 64))),
    "NamedArray": once(lambda: ql.arrays.named.NamedArray(normal(8, 64), ("out", "in"))),
}


def _sum_of_squares(w, x=X):
    out = w @ x
    return jnp.sum(ql.materialise(getattr(out, "value", out)) ** 2)


def _close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=VALUES)
def value(request):
    return VALUES[request.param]()


def _hi(value):
    return as_hitype(type(value))(value)


@pytest.mark.slow
def test_it_is_one_operand(value):
    closed = jax.make_jaxpr(lambda w, x: w @ x)(_hi(value), X)
    assert [v.aval.shape for v in closed.jaxpr.invars] == [(8, 64), (64,)]
    assert type(value).__name__ in str(jax.typeof(_hi(value)))


@pytest.mark.quick("NamedArray-jit")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, ql.quaxify, lambda f: ql.quaxify(jax.jit(f))])
def test_operators(value, transform):
    run = transform(lambda w: ql.materialise(getattr(y := w @ X, "value", y)))
    _close(run(_hi(value)), value.materialise() @ X)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_rows(transform):
    w = _hi(nf4())
    assert len(w) == transform(len)(w) == 8
    rows = list(w)
    assert all(isinstance(row, HiValue) for row in rows)
    _close(transform(lambda w: jnp.stack([row @ X for row in w]))(w), nf4().materialise() @ X)
    first, *_ = w
    _close(first.value.materialise(), nf4().materialise()[0])
    vector = _hi(ql.arrays.named.NamedArray(X[:3], ("in",)))
    number = _hi(ql.arrays.named.NamedArray(X[0], ()))
    assert len(transform(list)(vector)) == 3
    for ask, message in [
        (len, r"len\(\) of an array without axes"),
        (list, "iteration over an array without axes"),
    ]:
        with pytest.raises(TypeError, match=message):
            transform(ask)(number)


def test_copies():
    w = _hi(nf4())
    for copied in (copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert type(copied) is type(w)
        assert jax.typeof(copied) == jax.typeof(w)
        np.testing.assert_array_equal(copied.value.codes, w.value.codes)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_operators_of_one_operand(transform):
    w, array = _hi(ql.arrays.named.NamedArray(normal(3), ("in",))), normal(3)
    for op in (operator.neg, operator.pos, abs, round):
        _close(transform(op)(w).value.materialise(), op(array))
    for found, expected in zip(transform(lambda w: divmod(w, 2.0))(w), divmod(array, 2.0), strict=True):
        _close(found.value.materialise(), expected)


def test_arrays_on_the_left():
    w, x = _hi(nf4()), normal(3, 8)
    for found in (x @ w, np.asarray(x) @ w, jax.jit(lambda w: x @ w)(w), jax.jit(lambda x: x @ w)(x)):
        _close(found, x @ nf4().materialise())
    _close(jax.jit(ql.hijax.quaxify(jnp.matmul))(x, w), x @ nf4().materialise())


@pytest.mark.quick("NF4Array")
def test_it_is_returned(value):
    doubled = jax.jit(lambda w: w * 2.0)(_hi(value))
    assert isinstance(doubled, as_hitype(type(value)))
    _close(doubled.value.materialise(), 2 * value.materialise())
    made = jax.jit(as_hitype(type(value)))(value)
    assert jax.tree.structure(made.value) == jax.tree.structure(value)


@pytest.mark.quick("NamedArray-eager-quaxify")
@pytest.mark.parametrize("around", [lambda f: f, ql.quaxify], ids=["plain", "quaxify"])
@pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients(value, around, inside):
    found = jax.grad(around(inside(_sum_of_squares)))(_hi(value))
    expected = jax.grad(ql.quaxify(_sum_of_squares), allow_int=True)(value)
    assert isinstance(found, HiTangent | HiValue)
    moving = [x for x in jax.tree.leaves(expected) if x.dtype != jax.dtypes.float0]
    for x, y in zip(jax.tree.leaves(found.value), moving, strict=True):
        _close(x, y)
    by_x = jax.grad(inside(lambda x: _sum_of_squares(_hi(value), x)))(X)
    _close(by_x, jax.grad(lambda x: jnp.sum((value.materialise() @ x) ** 2))(X))


def test_batches_and_loops():
    stack = jax.vmap(ql.NF4Array.quantize)(normal(3, 8, 64))
    w, expected = as_hitype(ql.NF4Array)(stack), stack.materialise() @ X
    rows = {"in_axes": (LeafAxes(),), "axis_size": 3}
    _close(jax.vmap(lambda w: w @ X, **rows)(w), expected)
    same = jax.vmap(lambda w: w, **rows, out_axes=LeafAxes())(w)
    np.testing.assert_array_equal(same.value.codes, stack.codes)
    _close(lax.scan(lambda c, w: (c, w @ X), 0.0, w, length=3)[1], expected)
    total = lambda w: jnp.sum(jax.vmap(lambda w: w @ X, **rows)(w) ** 2)
    found = jax.grad(total)(w).value.scale
    _close(found, jax.grad(lambda s: jnp.sum((dataclasses.replace(stack, scale=s).materialise() @ X) ** 2))(
        stack.scale))  # fmt: skip
    carry = lax.scan(lambda w, _: (w, w @ X), _hi(nf4()), None, length=2)
    np.testing.assert_array_equal(carry[0].value.codes, nf4().codes)
    with pytest.raises(ValueError, match=r"is mapped along 0.*LeafAxes\(\)"):
        jax.vmap(lambda w: w @ X)(w)


@pytest.mark.slow
def test_functions():
    run = jax.jit(ql.hijax.quaxify(lambda w, x: jnp.tanh(jnp.matmul(x, jnp.transpose(w)))))
    _close(run(_hi(lora()), X), jnp.tanh(lora().materialise() @ X))


def test_what_is_no_value(unchecked):
    with pytest.raises(TypeError, match=r"takes a subclass of quaxlike\.Value; found <class 'int'>"):
        as_hitype(int)
    with pytest.raises(TypeError, match="HiNF4Array takes a NF4Array; found"):
        as_hitype(ql.NF4Array)(X)


# A type of somebody else


@dataclasses.dataclass(frozen=True)
class _Scaled:
    codes: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class _ScaledType(hijax.HiType):
    shape: tuple[int, ...]

    def lo_ty(self):
        return [hijax.ShapedArray(self.shape, jnp.dtype("int8")), hijax.ShapedArray((), jnp.dtype("float32"))]

    def lower_val(self, hi_val):
        return [hi_val.codes, hi_val.scale]

    def raise_val(self, *lo_vals):
        return _Scaled(*lo_vals)

    def to_tangent_aval(self):
        return hijax.ShapedArray(self.shape, jnp.dtype("float32"))

    def str_short(self, *_, **__):
        return f"Scaled{list(self.shape)}"


hijax.register_hitype(_Scaled, lambda x: _ScaledType(x.codes.shape))


class _Dense(hijax.HiPrim):
    def __init__(self, kind):
        self.in_avals, self.out_aval = (kind,), hijax.ShapedArray(kind.shape, jnp.dtype("float32"))
        self.params = {}
        super().__init__()

    def expand(self, x):
        return x.codes.astype(jnp.float32) * x.scale

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd_retval(self, res, outgrad):
        return (outgrad,)


_CODES = np.arange(16, dtype=np.int8).reshape(2, 8)
THEIRS = _Scaled(array(_CODES), array(0.5))
DENSE = array(0.5 * _CODES)


def _product(theirs, w):
    return jnp.matmul(_Dense(jax.typeof(theirs))(theirs), w)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        _product,
        jax.jit(_product),
        jax.checkpoint(_product),
        lambda theirs, w: jax.jit(lambda w: _product(theirs, w))(w),
        lambda theirs, w: lax.cond(X[0] < 9, lambda: _product(theirs, w), lambda: jnp.zeros((2, 64))),
        lambda theirs, w: lax.scan(lambda c, _: (c + _product(theirs, w), None), 0.0 * DENSE @ DENSE.T @ (
            jnp.ones((2, 64))), None, length=1)[0],
    ],
    ids=["eager", "jit", "checkpoint", "closed over", "cond", "scan"],
)  # fmt: skip
def test_a_type_of_somebody_else_passes_untouched(program):
    with ql.on_materialise("error"):
        _close(ql.quaxify(program)(THEIRS, lora()), DENSE @ lora().materialise())
        _close(jax.jit(ql.quaxify(program))(THEIRS, lora()), DENSE @ lora().materialise())


@pytest.mark.slow
def test_its_derivative_is_its_own():
    by_theirs, by_lora = jax.grad(
        lambda theirs, a: jnp.sum(ql.quaxify(_product)(theirs, lora().replace(a=a))), argnums=(0, 1)
    )(THEIRS, lora().a)
    _close(by_theirs, jnp.ones((2, 64)) @ lora().materialise().T)
    expected = jax.grad(lambda a: jnp.sum(DENSE @ lora().replace(a=a).materialise()))(lora().a)
    _close(by_lora, expected)


# Rules for a class of high-level primitives


class _Halves(hijax.HiPrim):
    """Two halves of an array, each times a number."""

    def __init__(self, kind, times):
        half = kind.update(shape=(kind.shape[0] // 2, *kind.shape[1:]))
        self.in_avals, self.out_aval = (kind,), (half, half)
        self.params = {"kind": kind, "times": times}
        super().__init__()

    def expand(self, x):
        n = x.shape[0] // 2
        return self.times * x[:n], self.times * x[n:]

    def jvp(self, primals, tangents):
        return self(*primals), self(*map(hijax.instantiate_zeros, tangents))

    def transpose(self, cts, operand):
        operand.accum(self.times * jnp.concatenate(list(map(hijax.instantiate_zeros, cts))))

    lin, linearized = hijax.linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp


def _halves(x, times=3.0):
    return _Halves(jax.typeof(x), times)(x)


def _rule(x: ql.LoraArray, *, prim):
    n, times = x.shape[0] // 2, prim.times
    halves = [x.replace(w=times * w, b=times * b) for w, b in ((x.w[:n], x.b[:n]), (x.w[n:], x.b[n:]))]
    return halves


def test_a_rule_for_a_class():
    rules = ql.RuleSet()
    assert ql.register(_Halves, rules=rules)(_rule) is _rule
    run = ql.quaxify(_halves, rules=rules)
    with ql.on_materialise("error"):
        for halves in (run(lora()), jax.jit(run)(lora()), ql.quaxify(jax.jit(_halves), rules=rules)(lora())):
            assert all(isinstance(x, ql.LoraArray) for x in halves)
            _close(jnp.concatenate([x.materialise() for x in halves]), 3 * lora().materialise())
    # By the rule or by its expansion, the derivative is that of the array.
    for under in (rules, None):
        f = ql.quaxify(lambda w: sum(jnp.sum(x**2) for x in _halves(w)), rules=under)
        with ql.on_materialise("allow"):
            found = jax.grad(lambda a: ql.materialise(f(lora().replace(a=a))))(lora().a)
        _close(found, jax.grad(lambda a: 9 * jnp.sum(lora().replace(a=a).materialise() ** 2))(lora().a))


@pytest.mark.slow
def test_a_rule_that_declines_is_followed_by_the_expansion():
    rules = ql.RuleSet()
    ql.register(_Halves, rules=rules)(_declines)
    with ql.on_materialise("allow"):
        found = ql.quaxify(_halves, rules=rules)(lora())
    _close(jnp.concatenate(list(map(ql.materialise, found))), 3 * lora().materialise())


def _declines(x: ql.LoraArray, *, prim):
    return NotImplemented


def test_rules_for_a_class_are_checked():
    rules = ql.RuleSet()
    for returned, message in [
        (lambda x: x, r"_Halves\(LoraArray\).*must return a sequence of 2 result\(s\); found LoraArray"),
        (lambda x: [x], r"must return a sequence of 2 result\(s\); found one of 1"),
        (lambda x: [x, x], r"must return .*\[4,64\] as result 0, as `_Halves` does"),
    ]:

        @ql.register(_Halves, rules=rules)
        def _(x: ql.LoraArray, *, prim, returned=returned):
            return returned(x)

        with pytest.raises(ql.RuleError, match=message):
            ql.quaxify(_halves, rules=rules)(lora())

    @ql.register(_Halves, rules=rules)
    def by_position(x: ql.LoraArray, prim):
        return x, x

    with pytest.raises(TypeError, match="can never match: `prim` is a parameter of `_Halves`"):
        ql.quaxify(_halves, rules=rules)(lora())


class _Holding(ql.ArrayValue):
    """A Value whose only leaf is of a hijax type."""

    leaf: Any

    def materialise(self):
        return _Dense(jax.typeof(self.leaf))(self.leaf)


class _Refusing(_Holding):
    def aval(self):
        kind = jax.typeof(self.leaf)
        return jax.core.ShapedArray(kind.shape, jnp.dtype("float32"))

    def materialise(self):
        raise ValueError("it refuses")


@ql.register("transpose")
def _(x: _Holding, **params):
    return x if params["permutation"] == (0, 1) else NotImplemented


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda f: jax.jit(jax.jit(f)),
        lambda f: jax.jit(ql.quaxify(f)),
        jax.checkpoint,
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: lax.cond(True, f, lambda x: x, x),
    ],
)
def test_a_value_of_a_hijax_leaf_goes_through_transforms(transform):
    for cls in (_Holding, _Refusing):
        x = cls(THEIRS)
        found = ql.quaxify(transform(lambda x: lax.transpose(x, (0, 1))))(x)
        assert type(found) is cls
        assert found.shape == (2, 8)
        _close(found.leaf.codes, THEIRS.codes)
    _close(ql.quaxify(transform(lambda x: x))(_Holding(THEIRS)).materialise(), DENSE)
    _close(ql.quaxify(jax.jit(jnp.sum))(_Holding(THEIRS)), DENSE.sum())
