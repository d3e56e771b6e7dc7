"""Kernels of libraries for attention: what they take gives what blocks give, and the rest says why."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.kernels import KernelFallbackWarning
from quaxlike.lm.models import Decoder, DecoderConfig, attention_backend, attention_backends
from quaxlike.lm.models.attention import attend
from quaxlike.lm.models.attention_blocks import Sight
from tests.samples import array, normal

TOKENS = 128
SEEN = array((np.arange(TOKENS) >= 30) & (np.arange(TOKENS) < 120))
TEXTS = array(np.arange(TOKENS) // 50, jnp.int32)
REACHES = {
    "causal": {"after": 0},
    "window": {"before": 20, "after": 0},
    "near": {"before": 9, "after": 9},
    "all": {},
}
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0}, "scale": {"scale": 0.3}, "sinks": {"sinks": normal(4)}}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "vocab_size": 50,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _every_reason_is_told():
    attention_backends._tell_once.cache_clear()


def _operands(dtype="float32", size=16):
    shapes = (2, TOKENS, 4, size), (2, TOKENS, 2, size), (2, TOKENS, 2, size)
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def _assert_as_by_blocks(backend, sight, **options):
    """The values and the gradients of a batch."""

    def loss(operands, sinks):
        run = functools.partial(attend, sight=sight, **(options | sinks))
        y = jax.vmap(lambda *operands: run(*operands))(*operands)
        return jnp.sum(jnp.where(SEEN[:, None], jnp.sin(y), 0)), y

    arguments = _operands(), {name: options.pop(name) for name in ("sinks",) if name in options}
    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    wanted, whole = run(*arguments)
    with attention_backend(backend):
        found, y = run(*arguments)
    np.testing.assert_allclose(y[:, SEEN], whole[:, SEEN], atol=2e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reach", REACHES)
def test_splash_attention(reach, options):
    """Interpreted, with padding on both sides; every other case has several texts in a row."""
    texts = (TEXTS, TEXTS) if options in ("plain", "sinks") else None
    _assert_as_by_blocks("splash", Sight.of(SEEN, **REACHES[reach], texts=texts), **OPTIONS[options])


@pytest.mark.quick("all")
@pytest.mark.parametrize("reach", [name for name in REACHES if name != "near"])
def test_cudnn_is_asked_for_the_same(reach, monkeypatch):
    """By JAX's own form of the function that calls cuDNN."""
    in_xla = functools.partial(attention_backends.by_cudnn, implementation="xla")
    monkeypatch.setitem(attention_backends._KERNELS, "cudnn", in_xla)
    monkeypatch.setitem(attention_backends._REFUSALS, "cudnn", ())
    _assert_as_by_blocks("cudnn", Sight.of(SEEN, **REACHES[reach]), scale=0.3)


@pytest.mark.slow
def test_programs_for_gpus_call_cudnn(monkeypatch):
    """Forward and backward, in layers that are scanned, beside weights and adapters that are Values."""
    monkeypatch.setattr(attention_backends, "device_platform", lambda: "cuda")
    # JAX asks for the library that the program will call.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    model = Decoder(DecoderConfig.from_json(LLAMA), key=jax.random.key(0)).stacked()
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
    model = ql.loraify(ql.quantize(model, "int8"), rank=2, key=jax.random.key(1))
    params, frozen = eqx.partition(model, ql.trainable(model))

    def loss(params, ids, seen):
        hidden = lambda ids, seen: eqx.combine(params, frozen).hidden(ids, seen)
        return jnp.sum(ql.quaxify(jax.vmap(hidden))(ids, seen).astype(jnp.float32))

    batch = jnp.zeros((3, 24), jnp.int32), jnp.ones((3, 24), bool)
    with attention_backend("cudnn"), ql.on_materialise("error"):
        traced = jax.jit(jax.grad(loss)).trace(params, *batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "24x24x" not in text


CASES = {
    "which device": ("cudnn", {}, {}, "cuDNN is for NVIDIA's GPUs"),
    "float32": ("cudnn", {"dtype": "float32"}, {}, "cuDNN takes float16 and bfloat16"),
    "size": ("cudnn", {"size": 12}, {}, "heads of a multiple of 8"),
    "texts": ("cudnn", {}, {"texts": (TEXTS, TEXTS)}, "does not tell texts in a row apart"),
    "near": ("cudnn", {}, REACHES["near"], "windows before a token alone"),
    "places": (
        "splash",
        {},
        {"places": array(np.arange(TOKENS))},
        "must be known when the program is traced",
    ),
    "tokens": ("splash", {"tokens": 100}, {}, "a multiple of 128 tokens"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_a_kernel_does_not_take_is_told(name, monkeypatch):
    backend, operands, sight, reason = CASES[name]
    if name != "which device" and backend == "cudnn":
        monkeypatch.setattr(attention_backends, "device_platform", lambda: "cuda")
    tokens = operands.get("tokens", TOKENS)
    options = {"dtype": "bfloat16"} | {name: x for name, x in operands.items() if name != "tokens"}
    operands = [x[0, :tokens] for x in _operands(**options)]
    sight = Sight.of(SEEN[:tokens], **sight)
    wanted = attend(*operands, sight)
    with attention_backend(backend), pytest.warns(KernelFallbackWarning, match=reason):
        np.testing.assert_array_equal(attend(*operands, sight), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_windows_of_some_layers_are_known_where_these_are_not_scanned(scanned):
    config = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 20}
    model = Decoder(DecoderConfig.from_json(config), key=jax.random.key(0))
    model = model.stacked() if scanned else model
    ids, seen = jnp.zeros(TOKENS, jnp.int32), jnp.ones(TOKENS, bool)
    told = pytest.warns(KernelFallbackWarning, match="windows of some of the layers that are scanned")
    with attention_backend("splash"), told if scanned else contextlib.nullcontext():
        jax.eval_shape(lambda: model.hidden(ids, seen))


def test_unknown_backends():
    with pytest.raises(ValueError, match=r"takes one of \('cudnn', 'splash'\) or None; found 'flash'"):
        attention_backend("flash").__enter__()
