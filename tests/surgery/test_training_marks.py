"""Arithmetic does not decide what is trained."""

import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from jax import lax

import quaxlike as ql
from tests.samples import normal


def _lora(w, **options):
    return ql.LoraArray(w, normal(2, 64, seed=1), normal(8, 2, seed=2), **options)


def _quantised(kind, **options):
    return lambda: kind.quantize(normal(8, 64), **options)


TYPES = {
    "nf4": _quantised(ql.NF4Array),
    "nf4, trained": _quantised(ql.NF4Array, train_scales=True),
    "nf4, nested": _quantised(ql.NF4Array, double_quant=True),
    "fp4": _quantised(ql.FP4Array),
    "int4": _quantised(ql.Int4Array),
    "int8": _quantised(ql.Int8Array, block_size=16),
    "int8, trained": _quantised(ql.Int8Array, train_scales=True),
    "block": _quantised(ql.BlockArray, codec="q8_0", train_scales=False),
    "lora": lambda: _lora(normal(8, 64)),
    "lora, trained": lambda: _lora(normal(8, 64), gradients="train"),
    "dora": lambda: _lora(normal(8, 64), magnitude=1.0 + jnp.abs(normal(8))),
    "qlora": lambda: _lora(ql.NF4Array.quantize(normal(8, 64))),
    "qlora, trained scales": lambda: _lora(ql.NF4Array.quantize(normal(8, 64), train_scales=True)),
    "qlora, trained base": lambda: _lora(
        ql.NF4Array.quantize(normal(8, 64), train_scales=True), gradients="train"
    ),
}

OPERATIONS = {
    "mul": lambda w: 2.0 * w,
    "div": lambda w: w / 3.0,
    "rows": lambda w: w * jnp.arange(1.0, 9.0)[:, None],
    "neg": lambda w: -w,
    "square": jnp.square,
    "abs": jnp.abs,
    "add": lambda w: w + 1.0,
    "sub": lambda w: 1.0 - w,
    "sum with itself": lambda w: w + w * 0.5,
    "stack": lambda w: jnp.stack([w, -w]),
    "stack with a dense one": lambda w: jnp.stack([w, jnp.ones((8, 64))]),
    "concatenate": lambda w: jnp.concatenate([w, w / 2.0]),
    "loop": lambda w: lax.fori_loop(0, 3, lambda i, w: w * 0.5, w),
    "loop with a traced factor": lambda w: lax.fori_loop(0, 3, lambda i, w: w * (1.0 + jnp.float32(i)), w),
    "cond": lambda w: lax.cond(jnp.sum(w[0]) > 0, lambda: w * 2.0, lambda: w),
    "cond with a dense branch": lambda w: lax.cond(jnp.sum(w[0]) > 0, lambda: w, lambda: jnp.ones((8, 64))),
}


def _marked(x):
    """The fields that are selected."""
    return {jtu.keystr(path[:1]) for path, on in jtu.tree_leaves_with_path(ql.trainable(x)) if on}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The model has no adapters", "ignore::quaxlike.MaterialisationWarning")
@pytest.mark.parametrize("jitted", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TYPES)
def test_a_result_trains_what_its_operands_train(kind, jitted):
    w = TYPES[kind]()
    kept = 0
    for name, operation in OPERATIONS.items():
        run = ql.quaxify(operation)
        out = (jax.jit(run) if jitted else run)(w)
        if isinstance(out, type(w) | ql.BlockArray):
            dense = isinstance(out, ql.LoraArray) and type(out.w) is not type(w.w)
            dense_base = dense and w.gradients != "train"
            assert _marked(out) == _marked(w) - ({".w"} if dense_base else set()), name
            kept += 1
    assert kept >= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "lora", "qlora"])
def test_a_constant_factor_changes_nothing_but_numbers(kind):
    w = TYPES[kind]()
    assert jax.tree.structure(ql.quaxify(lambda w: -(w * 2.0) / 3.0)(w)) == jax.tree.structure(w)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "block", "lora", "qlora"])
def test_frozen_and_trained_arrays_meet(kind):
    """Gradients of the trained one arrive, and those of the frozen one do not."""
    frozen, trained = TYPES[kind](), _trained(TYPES[kind]())
    x = normal(64, seed=4)

    def loss(frozen, trained, p):
        both = (
            jnp.stack([frozen, trained]) if p is None else lax.cond(p, lambda: frozen * 2.0, lambda: trained)
        )
        return jnp.sum(jnp.sin(both @ x))

    size = lambda grad: sum(
        float(jnp.abs(g).sum()) for g in jax.tree.leaves(_base(grad)) if g.dtype != jax.dtypes.float0
    )
    with ql.on_materialise("error"):
        for p in (None, False):
            grad = functools.partial(jax.grad(ql.quaxify(loss), (0, 1), allow_int=True), p=p)
            ours, other = grad(frozen, trained)
            assert size(ours) == 0
            assert size(other) > 0


def _base(x):
    return x.w if isinstance(x, ql.LoraArray) else x


def _trained(x):
    if isinstance(x, ql.LoraArray):
        w = _trained(x.w) if not isinstance(x.w, jax.Array) else x.w
        return x.replace(w=w, gradients="train")
    return ql.train_scales({"w": x})["w"]


@pytest.mark.slow
def test_gradients_reach_a_factor_after_the_call():
    """The product leaves one call and enters another."""
    w, x = ql.NF4Array.quantize(normal(8, 64)), normal(64, seed=3)
    scaled = ql.quaxify(lambda w, s: w * s)
    loss = lambda s: jnp.sum(ql.quaxify(jnp.matmul)(scaled(w, s), x))
    expected = jnp.sum(w.materialise() @ x)
    assert jnp.allclose(jax.grad(loss)(0.7), expected, rtol=1e-4)
    assert jnp.allclose(jax.jit(jax.grad(loss))(0.7), expected, rtol=1e-4)
