"""Long texts whose tokens are shared by eight devices: losses, memory of a step, what is exchanged.

A process of its own has the devices, and prints what it finds for each mesh.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.processes import run

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_WINDOWS = _LLAMA | {"sliding_window": 100, "num_hidden_layers": 2}  # in every other layer
CONFIGS = {
    "llama": _LLAMA,
    "windows and caps": _WINDOWS | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 5.0},
    "windows and sinks": _WINDOWS | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4},
    "learned positions": _LLAMA | {"architectures": ["GPT2LMHeadModel"], "n_positions": 4096},
}  # fmt: skip
MESHES = ["seq=8", "data=2,seq=4"]
LONG = 1024


def program(name: str, tokens: int) -> None:
    """Trains the model on each mesh, with texts packed in rows; prints a line of JSON for each. Attention is
    by blocks in long texts."""
    from quaxlike.models import attention

    if tokens >= LONG:
        attention._ALL_AT_ONCE, attention._BLOCK = 0, 64
    for mesh in (None, *MESHES):
        print(json.dumps(_trained(name, tokens, mesh)), flush=True)


def _trained(name: str, tokens: int, mesh: str | None) -> dict[str, Any]:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np

    import quaxlike as ql
    from quaxlike.finetune.data import Batch
    from quaxlike.finetune.devices import Devices
    from quaxlike.finetune.settings import Settings
    from quaxlike.finetune.tasks import NextToken
    from quaxlike.finetune.train import Program, State, optimiser_for
    from quaxlike.models import Decoder, DecoderConfig

    here = Path()
    settings = Settings(here, here, here, batch_size=2, mesh=mesh, learning_rate=1e-2, loss_chunk=512)
    task, devices = NextToken(256, packed=True), Devices(settings)
    model = Decoder(DecoderConfig.from_json(CONFIGS[name]), key=jax.random.key(0))
    model = ql.loraify(ql.quantize(model, "nf4", block_size=32), rank=4, key=jax.random.key(1))
    model = devices.place(model)
    params, frozen = eqx.partition(model, ql.trainable(model))
    optimiser, _ = optimiser_for(settings, 3)
    step = Program(task, optimiser, settings, devices)
    state = devices.place_along(State(params, optimiser.init(params)))

    ids = np.random.default_rng(0).integers(0, 64, (2, 1, tokens)).astype(np.int32)
    texts = 1 + np.arange(tokens) // (tokens * 2 // 5)
    segments = np.broadcast_to(np.where(np.arange(tokens) < tokens - 9, texts, 0), ids.shape).astype(np.int32)
    batch = Batch(ids, segments, segments > 0, np.zeros(2, np.int32))
    rest = devices.batch(batch), devices.replicate(jnp.float32(task.weight(batch))), None
    memory, losses = step.memory(frozen, state, *rest), []
    hidden = lambda model, ids: model.hidden(ids, jnp.ones_like(ids, bool))
    report = ql.explain(jax.vmap(hidden, in_axes=(None, 0)))(model, jnp.asarray(rest[0].ids)[:, 0])
    told = sorted({exchange.kind for exchange in report.exchanged})
    for _ in range(3):
        state, loss = step(frozen, state, *rest)
        losses.append(float(loss))
    return {"mesh": mesh, "losses": losses, "temporaries": memory.activations, "told": told}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_shared_by_devices(name):
    tokens = LONG if name == "llama" else 256
    code = f"from tests.sharding.test_sequence import program\nprogram({name!r}, {tokens})"
    one, *others = map(json.loads, run(code, devices=8)[0].splitlines())
    assert one["losses"][-1] < one["losses"][0]
    assert one["told"] == []
    for found in others:
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5), found["mesh"]
        assert "all-gather" in found["told"]
        # A device with room for a third of the text's step takes part in the step of all of it.
        assert name != "llama" or found["temporaries"] < one["temporaries"] / 3
