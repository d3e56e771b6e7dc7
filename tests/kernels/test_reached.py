"""The kernels are reached from `x @ w` in a model whose weights are Values."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import quaxlike as ql
from quaxlike import kernels
from quaxlike.kernels import lora_matmul_p, nf4_matmul_p
from tests.primitives.jaxprs import equations
from tests.samples import normal

from .weights import relative_error

KERNELS = (nf4_matmul_p, lora_matmul_p)


def _mlp():
    return eqx.nn.MLP(128, 64, 128, 2, key=jax.random.key(0))


def _models(**options):
    quantised = ql.quantize(_mlp(), "nf4", **options)
    adapted = ql.loraify(quantised, rank=4, key=jax.random.key(1))
    # B starts as zeros, and would hide the adapters.
    raised = lambda w: eqx.tree_at(lambda w: w.b, w, w.b + 0.1) if isinstance(w, ql.LoraArray) else w
    adapted = jax.tree.map(raised, adapted, is_leaf=lambda w: isinstance(w, ql.LoraArray))
    return {"NF4": quantised, "LoRA over NF4": adapted}


def _loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def _kernels(fn, *args):
    """The name of each kernel primitive in the jaxpr, and whether it contracts rows."""
    found = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive in KERNELS]
    return [(eqn.primitive.name, eqn.params["product"].transpose) for eqn in found]


@pytest.mark.slow
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize(("name", "kernel"), [("NF4", "nf4_matmul"), ("LoRA over NF4", "lora_matmul")])
def test_forward_and_backward_are_the_kernel(name, kernel, double_quant):
    model = _models(double_quant=double_quant)[name]
    x = normal(5, 128)
    forward = lambda x: eqx.filter_jit(ql.quaxify(_loss))(model, x)
    # Three layers, each with a product and, in the backward pass, its transposed contraction.
    assert _kernels(forward, x) == [(kernel, False)] * 3
    assert _kernels(jax.grad(forward), x) == [(kernel, False)] * 3 + [("nf4_matmul", True)] * 3
    with ql.on_materialise("allow"):
        dense = ql.materialise(model)
    expected = jax.grad(lambda x: _loss(dense, x))(x)
    assert relative_error(jax.jit(jax.grad(forward))(x), expected) < 1e-5


@pytest.mark.slow
def test_transforms_leave_no_other_form_of_the_kernel():
    """Under `vmap`, `jvp`, `hessian` and `checkpoint` as well: nothing falls back to a derived primitive."""
    model = _models(double_quant=True)["LoRA over NF4"]
    forward = lambda x: ql.quaxify(_loss)(model, x)
    x = normal(2, 128)
    for transform in (
        jax.grad(jax.checkpoint(forward)),
        jax.hessian(forward),
        lambda x: jax.jvp(jax.grad(forward), (x,), (x,)),
        lambda x: jax.vmap(jax.grad(forward))(x[None]),
    ):
        eqns = equations(jax.make_jaxpr(transform)(x))
        roots = [e.primitive for e in eqns if getattr(e.primitive, "root", None) in KERNELS]
        assert roots
        assert all(primitive in KERNELS for primitive in roots)


@pytest.mark.slow
def test_explain_tells_the_backend():
    model, x = _models()["NF4"], jnp.ones((5, 128))
    with kernels.backend("reference"):
        notes = [note for row in ql.explain(_loss)(model, x).rules for note in row.notes]
    assert set(notes) == {"nf4_matmul on reference: forced"}
    with kernels.backend("gpu"):
        notes = [note for row in ql.explain(_loss)(model, x).rules for note in row.notes]
    assert notes
    assert all(note.startswith("nf4_matmul on gpu: decoded for the library") for note in notes)


@pytest.mark.slow
def test_gradients_of_adapters_go_through_the_kernel():
    model = _models()["LoRA over NF4"]
    x = normal(5, 128)
    trained, frozen = eqx.partition(model, ql.trainable(model))
    loss = lambda trained, x: ql.quaxify(_loss)(eqx.combine(trained, frozen), x)
    # The first layer's input needs no gradient.
    expected = [("lora_matmul", False)] * 3 + [("nf4_matmul", True)] * 2
    assert sorted(_kernels(eqx.filter_grad(loss), trained, x)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_on_each_platform_the_model_runs_its_kernel(lora):
    half = lambda z: z.astype(jnp.bfloat16) if eqx.is_array(z) else z
    quantised = ql.quantize(jax.tree.map(half, _mlp()), "nf4")
    adapted = ql.loraify(quantised, rank=4, key=jax.random.key(1))
    with_halves = lambda w: w.replace(a=half(w.a), b=half(w.b)) if isinstance(w, ql.LoraArray) else w
    adapted = jax.tree.map(with_halves, adapted, is_leaf=lambda w: isinstance(w, ql.LoraArray))
    model = adapted if lora else quantised
    fn = lambda x: ql.quaxify(_loss)(model, x)
    jaxpr = jax.make_jaxpr(fn)(jnp.ones((5, 128), jnp.bfloat16))
    eqns = [eqn for eqn in equations(jaxpr) if eqn.primitive in KERNELS]
    for eqn in eqns:
        operands = [v.aval for v in eqn.invars]
        choice = kernels.chosen_backend(eqn.primitive, *operands, platform="cuda", **eqn.params)
        assert choice.reason == "one fused kernel"
    assert len(eqns) == 3
