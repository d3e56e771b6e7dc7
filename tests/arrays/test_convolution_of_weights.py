"""Convolutions with quantised and adapted kernels, in the layouts of PyTorch and Flax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.array_types import TYPES
from tests.samples import random_key

KEY = random_key(0)
LAYOUTS = {"oihw": ("NCHW", "OIHW", "NCHW"), "hwio": ("NHWC", "HWIO", "NHWC")}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def quantized(scheme, **options):
    return lambda layer, layout: ql.quantize(layer, scheme, where=["kernel"], layout=layout, **options)


def adapted(layer, layout, **options):
    model = ql.loraify(layer, rank=2, where=["kernel"], key=KEY, init="gaussian", layout=layout, **options)
    return eqx.tree_at(lambda m: m["kernel"].b, model, normal(*model["kernel"].b.shape, seed=1))


KINDS = {
    "int8": quantized("int8"),
    "NF4": quantized("nf4", block_size=32),
    "int4, nested scales": quantized("int4", block_size=32, double_quant=True),
    "LoRA": adapted,
    "DoRA": lambda layer, layout: adapted(layer, layout, dora=True),
    "QLoRA": lambda layer, layout: adapted(quantized("nf4", block_size=32)(layer, layout), layout),
}
PROGRAMS = {
    "forward": lambda f: f,
    "gradient": lambda f: lambda x, w: jax.grad(lambda x: jnp.sum(f(x, w) ** 2))(x),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w),
    "checkpoint": lambda f: lambda x, w: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x, w) ** 2))(x),
}


# Scales of scales tie the window to the channels, so that a gradient cannot reverse it.
CASES = [
    pytest.param(k, p, marks=[pytest.mark.slow] if p in ("vmap", "checkpoint") or k == "DoRA" else [])
    for k in KINDS
    for p in PROGRAMS
    if not ("nested" in k and p in ("gradient", "checkpoint"))
]


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "program"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_type_is_kept_forward_and_backward(kind, layout, program):
    sizes = {"o": 6, "i": 32, "h": 3, "w": 2}
    kernel = KINDS[kind]({"kernel": normal(*(sizes[c] for c in layout))}, {"kernel": layout})["kernel"]
    x = normal(2, 32, 5, 4) if layout == "oihw" else normal(2, 5, 4, 32)

    def f(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=LAYOUTS[layout])

    run = PROGRAMS[program](f)
    dense = ql.materialise(kernel)
    with ql.on_materialise("error"):
        y = jax.jit(ql.quaxify(run))(x, kernel)
    np.testing.assert_allclose(y, run(x, dense), rtol=2e-4, atol=2e-4 * float(jnp.abs(y).max()))


@pytest.mark.slow
def test_only_codes_are_kept_for_the_backward_pass():
    kernel = ql.quantize(
        {"kernel": normal(16, 32, 3, 3)}, "int8", where=["kernel"], layout={"kernel": "oihw"}
    )
    f = ql.quaxify(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"))
    _, pullback = jax.vjp(lambda x: f(x, kernel["kernel"]), normal(1, 32, 2, 2))
    kept = [x for x in jax.tree.leaves(pullback) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert max(x.size for x in kept) < 16 * 32 * 9


@pytest.mark.slow
def test_scales_are_trained():
    kernel = ql.quantize(
        {"kernel": normal(4, 8, 3, 3)}, "int8", where=["kernel"], layout={"kernel": "oihw"}, train_scales=True
    )["kernel"]
    x = normal(1, 8, 4, 4)
    f = lambda x, w: jnp.sum(jax.lax.conv(x, w, (1, 1), "SAME") ** 2)
    scale = lambda f, w: jax.grad(lambda scale: f(x, eqx.tree_at(lambda w: w.scale, w, scale)))(w.scale)
    with ql.on_materialise("error"):
        ours = scale(ql.quaxify(f), kernel)
    theirs = scale(lambda x, w: f(x, w.materialise()), kernel)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["LoraArray", "LoraArray, magnitude", "LoraArray of NF4Array", "NF4Array"])
@pytest.mark.parametrize("rhs", ["WIO", "WOI"])
def test_a_matrix_is_the_kernel_of_a_window_of_one(kind, rhs):
    w, x = TYPES[kind](), normal(1, 5, 4)

    def f(x, w):
        return jax.lax.conv_general_dilated(x, w[None], (2,), "SAME", dimension_numbers=("NWC", rhs, "NWC"))

    value_and_grad = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))))
    with ql.on_materialise("error"):
        found = ql.quaxify(value_and_grad)(x, w)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found,
        value_and_grad(x, ql.materialise(w)),
    )


def test_magnitudes_of_several_places_of_the_window():
    w, x = TYPES["LoraArray, magnitude"](), normal(1, 5, 4)
    f = lambda w: jax.lax.conv_transpose(x, jnp.broadcast_to(w, (3, 4, 4)), (2,), "SAME")
    with ql.on_materialise("allow"):
        found = jax.jit(ql.quaxify(f))(w)
    np.testing.assert_allclose(found, jax.jit(f)(ql.materialise(w)), rtol=1e-5, atol=1e-6)
