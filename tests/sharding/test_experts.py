"""Experts that devices share: which arrays are divided, and that results stay as they are."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike.lm import expert_parallel, tensor_parallel
from quaxlike.lm.models import DecoderConfig
from quaxlike.lm.models.feed_forward import Experts
from quaxlike.lm.sharding import usual_rule
from quaxlike.sharding import fsdp, shard, specs_for
from tests.samples import drawn, normal, random_key

KEY = random_key(0)
AUTO = (jax.sharding.AxisType.Auto,) * 2
MESH = jax.make_mesh((2, 2), ("data", "expert"), axis_types=AUTO)


def _config(architecture: str) -> DecoderConfig:
    return DecoderConfig.from_json({
        "architectures": [architecture], "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32,
        "intermediate_size": 32, "swiglu_alpha": 1.702, "head_dim": 16,
    })  # fmt: skip


@functools.cache
def _experts(architecture: str) -> Any:
    model = {"mlp": {"experts": drawn(Experts, _config(architecture), KEY)}}
    model = ql.loraify(ql.quantize(model, "nf4", block_size=32), rank=2, key=KEY)
    raised = lambda w: w.replace(b=w.b + 0.1) if isinstance(w, ql.LoraArray) else w
    return jax.tree.map(raised, model, is_leaf=lambda w: isinstance(w, ql.LoraArray))


@pytest.mark.slow
def test_stacks_are_cut_by_their_number():
    model = _experts("GptOssForCausalLM")
    rule = expert_parallel(model, MESH)
    experts = specs_for(model, rule)["mlp"]["experts"]
    w = experts.down_proj
    assert {spec[0] for spec in (w.a, w.b, w.w.codes, w.w.scale, experts.down_proj_bias)} == {"expert"}
    params, _ = eqx.partition(model, ql.trainable(model))
    moments = specs_for(eqx.filter_eval_shape(optax.adam(1e-3).init, params), rule)[0].mu
    assert moments["mlp"]["experts"].down_proj.a == w.a
    both = fsdp(MESH, over=rule)("mlp.experts.down_proj_bias", model["mlp"]["experts"].down_proj_bias)
    assert both == jax.P(("expert", "data"), None)


def test_along_the_axis_of_layers_where_there_is_no_other():
    model = eqx.filter_eval_shape(_experts, "Qwen3MoeForCausalLM")
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
    for rule in (tensor_parallel(model, mesh), expert_parallel(model, mesh)):
        assert specs_for(model, rule)["mlp"]["experts"].gate_up_proj.w.codes[0] == "model"
    odd = jax.sharding.AbstractMesh((3,), ("model",))
    assert specs_for(model, tensor_parallel(model, odd))["mlp"]["experts"].gate_up_proj.a[0] is None
    with pytest.raises(ValueError, match=r"experts.gate_up_proj.* over 3 devices: 4 is not a multiple"):
        expert_parallel(model, odd)
    with pytest.raises(ValueError, match="called expert or ep; it has data"):
        expert_parallel(model, jax.sharding.AbstractMesh((4,), ("data",)))


def test_read_and_fine_tuned_by_the_names_of_axes():
    """The rule by which checkpoints are read, one weight at a time, and models placed."""
    stack, matrix = (
        jax.ShapeDtypeStruct((4, 64, 32), jnp.float32),
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
    )
    rule = usual_rule(MESH, fully=False)
    assert rule("model.layers.0.mlp.experts.down_proj", stack) == jax.P("expert")
    assert rule("model.layers.0.self_attn.q_proj.weight", matrix) == jax.P()
    assert usual_rule(MESH)("model.layers.0.self_attn.q_proj.weight", matrix)[0] == ("data", "expert")


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture",
    ["Qwen3MoeForCausalLM", pytest.param("GptOssForCausalLM", marks=pytest.mark.slow)],
)
def test_results_are_those_of_one_device(architecture: str, tokens: int):
    """A batch of two, divided as well; one token of each looks its experts up, others for each of a batch."""
    model = _experts(architecture)
    placed = shard(model, MESH, expert_parallel(model, MESH))
    x = normal(2, tokens, 64)
    chosen = np.stack([np.stack([np.arange(tokens) % 4, np.arange(tokens) // 2 % 4 - 1], 1) % 4] * 2)
    share = np.abs(normal(2, tokens, 2)) + 0.1

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def loss(x: Any, adapters: Any, frozen: Any, chosen: Any, share: Any) -> Any:
        of_one = lambda m, *args: m["mlp"]["experts"](*args)
        run = lambda m, *args: jax.vmap(functools.partial(of_one, m))(*args)
        with ql.on_materialise("error"):
            y = ql.quaxify(run)(eqx.combine(adapters, frozen, rest), x, chosen, share)
        return jnp.sum(jnp.square(y))

    rest = eqx.filter(model, eqx.is_array, inverse=True)

    def found(model: Any, put: Any) -> Any:
        adapters, frozen = eqx.partition(model, ql.trainable(model))
        return loss(put(x), adapters, eqx.filter(frozen, eqx.is_array), put(chosen), put(share))

    on_mesh = found(placed, lambda x: jax.device_put(x, jax.NamedSharding(MESH, jax.P("data"))))
    on_one = found(model, jnp.asarray)
    for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(on_one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
