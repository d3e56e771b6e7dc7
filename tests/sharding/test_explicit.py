"""Values on meshes whose axes are explicit: the types of arrays say how they are spread."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import tensor_parallel
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.sharding import constrain, fsdp, shard
from tests.samples import normal, random_key
from tests.sharding.test_communication import exchanged

KEY = random_key(0)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
X = normal(8, 64)


def _mlp() -> Any:
    return eqx.nn.MLP(64, 64, 256, depth=1, use_bias=False, use_final_bias=False, key=KEY)


def _adapted(model: Any) -> Any:
    raised = lambda w: w.replace(b=w.b + 0.1) if isinstance(w, ql.LoraArray) else w
    model = ql.loraify(model, rank=4, key=KEY)
    return jax.tree.map(raised, model, is_leaf=lambda w: isinstance(w, ql.LoraArray))


MODELS = {
    "NF4": lambda: ql.quantize(_mlp(), "nf4"),
    "NF4, doubly quantised": lambda: ql.quantize(_mlp(), "nf4", double_quant=True),
    "int8": lambda: ql.quantize(_mlp(), "int8"),
    "int8 in blocks": lambda: ql.quantize(_mlp(), "int8", block_size=32),
    "LoRA": lambda: _adapted(_mlp()),
    "LoRA over NF4": lambda: _adapted(ql.quantize(_mlp(), "nf4")),
}
QUICK = ("LoRA over NF4",)
ADAPTED_OR_NOT = pytest.mark.filterwarnings("ignore:The model has no adapters")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


def _run(model: Any, x: Any, **out: Any) -> Any:
    first, second = (layer.weight for layer in model.layers)
    return jnp.matmul(jax.nn.relu(x @ first.T), second.T, **out)


def _gradients(model: Any, x: Any, **out: Any) -> Any:
    """By the inputs, and by the adapters."""
    trained, rest = eqx.partition(model, ql.trainable(model))

    def loss(trained: Any, x: Any) -> Any:
        return jnp.sum(ql.quaxify(lambda m, x: _run(m, x, **out))(eqx.combine(trained, rest), x) ** 2)

    with ql.on_materialise("error"):
        return eqx.filter_jit(lambda: jax.grad(loss, (0, 1))(trained, x))()


def _agree(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@ADAPTED_OR_NOT
@pytest.mark.parametrize("name", EACH)
def test_tensor_parallel(name: str):
    model = MODELS[name]()
    with jax.set_mesh(MESH):
        placed = shard(model, MESH, tensor_parallel(model, MESH))
        x = jax.device_put(X, jax.P("data"))
        out = {"out_sharding": jax.P("data", None)}
        fn = ql.quaxify(lambda m, x: _run(m, x, **out))
        with ql.on_materialise("error"):
            y = eqx.filter_jit(fn)(placed, x)
            gradients = _gradients(placed, x, **out)
    assert jax.typeof(y).sharding.spec == jax.P("data", None)
    _agree(y, ql.quaxify(_run)(model, X))
    _agree(gradients, _gradients(model, X))


MAPPED = {
    "vmap": lambda run, w, x: jax.vmap(lambda x: run(w, x))(x),
    "vmap, the weight passed": lambda run, w, x: jax.vmap(run, (None, 0))(w, x),
    "jit of vmap": lambda run, w, x: jax.jit(jax.vmap(run, (None, 0)))(w, x),
    "vmap of jit": lambda run, w, x: jax.vmap(jax.jit(run), (None, 0))(w, x),
    "vmap of grad": lambda run, w, x: jax.vmap(jax.grad(lambda x: run(w, x).sum()))(x),
    "grad of vmap": lambda run, w, x: jax.grad(lambda x: jax.vmap(run, (None, 0))(w, x).sum())(x),
    "jit of grad of vmap": lambda run, w, x: jax.jit(
        jax.grad(lambda x, w: jax.vmap(run, (None, 0))(w, x).sum())
    )(x, w),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "over", [*(pytest.param(o, marks=pytest.mark.slow) for o in (None, "model")), "data"]
)
@pytest.mark.parametrize("name", EACH)
def test_mapped_outside_of_quaxify(name: str, over: str | None):
    """The mesh axis of the batch is that of `vmap`; JAX passes it no weights that are spread over it."""
    w = MODELS[name]().layers[0].weight
    run = lambda w, x: x @ w.T
    for kind in ("Explicit", "Auto"):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType[kind],) * 2)
        with jax.set_mesh(mesh), ql.on_materialise("error"):
            placed = shard({"w": w}, mesh, {"w": jax.P(over, None)})["w"]
            x = jax.device_put(X, jax.P("data"))
            for how, mapped in MAPPED.items():
                if over == "data" and (kind == "Auto" or how not in ("vmap", "vmap of grad")):
                    continue
                _agree(mapped(ql.quaxify(run), placed, x), mapped(run, ql.materialise(w), X))


# A dense weight that is spread over the devices of the batch has to be gathered first: JAX refuses it.
@pytest.mark.slow
@ADAPTED_OR_NOT
@pytest.mark.parametrize("name", [p for p in EACH if p.values != ("LoRA",)])
def test_fully_sharded(name: str):
    model = MODELS[name]()
    with jax.set_mesh(MESH):
        placed = shard(model, MESH, fsdp(MESH))
        x = jax.device_put(X, jax.P(("data", "model")))
        gradients = _gradients(placed, x)
        arrays, rest = eqx.partition(placed, eqx.is_array)
        fn = jax.jit(lambda arrays, x: ql.quaxify(_run)(eqx.combine(arrays, rest), x))
        compiled = fn.lower(arrays, x).compile()
        y = compiled(arrays, x)
    assert jax.typeof(y).sharding.spec == jax.P(("data", "model"), None)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    assert sum(n for (kind, _), n in exchanged(compiled).items() if kind == "all-gather") <= stored
    _agree(y, ql.quaxify(_run)(model, X))
    _agree(gradients, _gradients(model, X))


@pytest.mark.parametrize("name", EACH)
def test_materialised(name: str):
    w = {"down_proj": {"weight": MODELS[name]().layers[1].weight}}
    with jax.set_mesh(MESH):
        for rule in (tensor_parallel(w, MESH), fsdp(MESH)):
            placed = shard(w, MESH, rule)["down_proj"]["weight"]
            _agree(jax.jit(lambda w: ql.materialise(w))(placed), ql.materialise(w["down_proj"]["weight"]))


@pytest.mark.slow
def test_eagerly_and_on_another_mesh():
    model = MODELS["LoRA over NF4"]()
    expected = ql.quaxify(_run)(model, X)
    for sizes in ((1, 4), (4, 1)):
        mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        with jax.set_mesh(mesh):
            model = shard(model, mesh, tensor_parallel(model, mesh))
            x = jax.device_put(X, jax.P("data"))
            y = ql.quaxify(lambda m, x: _run(m, x, out_sharding=jax.P("data", None)))(model, x)
        _agree(y, expected)


def _as_it_is(x: Any) -> Any:
    return x


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_EXPERTS = _LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "moe_intermediate_size": 32,
}  # fmt: skip
_GEMMA4 = _LLAMA | {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": 2 * ["sliding_attention", "full_attention"], "sliding_window": 3, "global_head_dim": 32,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 32, "enable_moe_block": True,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_DECODERS = {"Llama": _LLAMA, "experts": _EXPERTS, "Gemma 4": _GEMMA4}


@pytest.mark.slow
@pytest.mark.parametrize("name", _DECODERS)
@pytest.mark.parametrize("layout", ["tensor parallel", "fully sharded"])
def test_a_decoder(layout: str, name: str):
    """The gradient that a fine-tuning run takes, of which nothing is left to the compiler to divide."""
    config = DecoderConfig.from_json(_DECODERS[name])
    model = _adapted(ql.quantize(Decoder(config, key=KEY), "nf4", block_size=32))
    ids: Any = np.random.default_rng(0).integers(0, 32, (4, 6)).astype(np.int32)

    def step(model: Any, ids: Any, used: Any = _as_it_is, told: Any = _as_it_is) -> Any:
        params, rest = eqx.partition(model, ql.trainable(model))
        frozen, static = eqx.partition(rest, eqx.is_array)

        def loss(params: Any, frozen: Any, ids: Any) -> Any:
            model = used(eqx.combine(params, frozen, static))
            logits = ql.quaxify(lambda m, ids: jax.vmap(m)(ids, jnp.ones_like(ids, bool)))(model, ids)
            scores = told(jax.nn.log_softmax(logits))[:, :-1]
            return -jnp.mean(jnp.take_along_axis(scores, ids[:, 1:, None], -1))

        with ql.on_materialise("error"):
            return jax.jit(jax.value_and_grad(loss))(params, frozen, ids)

    with jax.set_mesh(MESH):
        if layout == "tensor parallel":  # the output layer divides the vocabulary
            rule, rows = tensor_parallel(model, MESH), jax.P("data")
            options = {"told": lambda scores: constrain(scores, MESH, rows)}
        else:
            rule, rows = fsdp(MESH), jax.P(("data", "model"))
            options = {"used": lambda model: constrain(model, MESH, None)}
        placed = shard(model, MESH, rule)
        found = step(placed, jax.device_put(ids, rows), **options)
    for gradient, x in zip(
        jax.tree.leaves(found[1]),
        jax.tree.leaves(eqx.filter(placed, ql.trainable(placed))),
        strict=True,
    ):
        assert gradient.sharding == x.sharding
    _agree(found, step(model, ids))
