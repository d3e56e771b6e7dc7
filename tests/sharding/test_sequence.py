"""Long texts whose tokens are shared by eight devices: losses, gradients, memory, what is exchanged.

A process of its own has the devices, and prints what it finds for each mesh.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sequence import LAYERS, measured
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
TOKENS = 256


def program(name: str) -> None:
    """Trains the model on one device and on a mesh, with texts packed in rows; prints a line of JSON for
    each. Each device has several blocks of queries. Llama runs on both meshes, the others on the second."""
    from quaxlike.lm.models import attention_blocks

    attention_blocks._BLOCK = 16
    for mesh in (None, *(MESHES if name == "llama" else MESHES[1:])):
        print(json.dumps(_trained(name, mesh)), flush=True)


def _trained(name: str, mesh: str | None) -> dict[str, Any]:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import quaxlike as ql
    from quaxlike.lm.finetune.data import Batch
    from quaxlike.lm.finetune.devices import Devices
    from quaxlike.lm.finetune.settings import RunSettings, TrainSettings
    from quaxlike.lm.finetune.tasks import NextToken
    from quaxlike.lm.finetune.train import State, TrainingProgram, optimiser_for
    from quaxlike.lm.models import Decoder, DecoderConfig

    here = Path()
    settings = TrainSettings(here, batch_size=2, learning_rate=1e-2)
    task, devices = NextToken(128, packed=True), Devices(RunSettings(here, mesh=mesh))
    model = Decoder(DecoderConfig.from_json(CONFIGS[name]), key=jax.random.key(0))
    model = ql.loraify(ql.quantize(model, "nf4", block_size=32), rank=4, key=jax.random.key(1))
    model = devices.place(model)
    params, frozen = eqx.partition(model, ql.trainable(model))
    optimiser, _ = optimiser_for(settings, 3)
    step = TrainingProgram(task, optimiser, settings, devices)
    state = devices.place_along(State(params, optimiser.init(params)))

    ids = np.random.default_rng(0).integers(0, 64, (2, 1, TOKENS)).astype(np.int32)
    texts = np.where(np.arange(TOKENS) < TOKENS - 9, 1 + np.arange(TOKENS) // 100, 0)
    segments = np.broadcast_to(texts, ids.shape).astype(np.int32)
    batch = Batch(ids, segments, segments > 0, np.zeros(2, np.int32))
    rest = devices.batch(batch), devices.replicate(jnp.float32(task.weight(batch))), None
    losses, norms = list[float](), list[float]()
    hidden = lambda model, ids: model.hidden(ids, jnp.ones_like(ids, bool))
    report = ql.explain(jax.vmap(hidden, in_axes=(None, 0)))(model, jnp.asarray(rest[0].ids)[:, 0])
    told = sorted({exchange.kind for exchange in report.exchanged})
    for _ in range(3):
        state, loss = step(frozen, state, *rest)
        losses.append(float(loss))
        if len(losses) == 1:  # the mean is that of one gradient
            norms = [float(np.linalg.norm(x)) for x in jax.tree.leaves(optax.tree.get(state.optimiser, "mu"))]
    return {"mesh": mesh, "losses": losses, "gradients": norms, "told": told}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_shared_by_devices(name):
    code = f"from tests.sharding.test_sequence import program\nprogram({name!r})"
    one, *others = map(json.loads, run(code, devices=8)[0].splitlines())
    assert one["losses"][-1] < one["losses"][0]
    assert one["told"] == []
    for found in others:
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5), found["mesh"]
        assert found["gradients"] == pytest.approx(one["gradients"], rel=1e-5), found["mesh"]
        assert "collective-permute" in found["told"]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_a_text_that_fits_eight_devices_alone(tokens):
    """If a device has room for a fifth of a step, eight train on the text that one cannot. They send keys,
    values, which are seen, and texts; with their cotangents, on the way back."""
    one, eight = measured(tokens, 1), measured(tokens, 8)
    assert eight.temporaries < one.temporaries / 5
    keys = tokens * 2 * 32 * 4
    assert one.sent == 0
    assert 6 * keys * LAYERS <= eight.sent <= 6.5 * keys * LAYERS
