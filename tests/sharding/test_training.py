"""Training steps of quantised and adapted models on eight devices: losses, what is stored, what is exchanged.

A process of its own has the devices, and prints what it finds for each layout of one model.
"""

import json
import math
from typing import Any

import pytest

from tests.sharding.processes import run

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "vocab_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32,
}  # fmt: skip
CONFIGS = {
    "llama": _LLAMA,
    "experts": _LLAMA
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "moe_intermediate_size": 64,
    },
}  # fmt: skip
STEPS = 20


def program(name: str) -> None:
    """Trains the model by each layout; prints a line of JSON for each."""
    layouts = {
        "fsdp": {"data": 8},
        "tensor": {"data": 2, "model": 4},
        "expert": {"data": 2, "expert": 4},
    }
    print(json.dumps({"layout": "one", **_trained(name, "one", {}, "Auto")}))
    for layout, sizes in layouts.items():
        for kind in ("Auto", "Explicit") if layout != "expert" or name == "experts" else ():
            found = _trained(name, layout, sizes, kind)
            print(json.dumps({"layout": f"{layout}, {kind}", **found}), flush=True)


def _trained(name: str, layout: str, sizes: dict[str, int], kind: str) -> dict[str, Any]:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import quaxlike as ql
    from quaxlike.lm import expert_parallel, tensor_parallel
    from quaxlike.lm.models import Decoder, DecoderConfig
    from quaxlike.sharding import constrain, fsdp, shard
    from tests.sharding.test_communication import exchanged

    model = Decoder(DecoderConfig.from_json(CONFIGS[name]), key=jax.random.key(0))
    model = ql.loraify(ql.quantize(model, "nf4", block_size=32), rank=4, key=jax.random.key(1))
    params, rest = eqx.partition(model, ql.trainable(model))
    frozen, static = eqx.partition(rest, eqx.is_array)
    optimiser = optax.adam(1e-2)
    state = params, optimiser.init(params)
    ids: Any = np.random.default_rng(0).integers(0, 64, (8, 12)).astype(np.int32)
    mesh: Any = None
    rule: Any = None
    if sizes:
        types = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        rules = {"fsdp": lambda model, mesh: fsdp(mesh), "tensor": tensor_parallel, "expert": expert_parallel}
        rule = rules[layout](model, mesh)
        state, frozen = shard(state, mesh, rule), shard(frozen, mesh, rule)
        batch = tuple(axis for axis in sizes if axis != "model")
        ids = jax.device_put(ids, jax.NamedSharding(mesh, jax.P(batch)))

    def loss(params: Any, frozen: Any, ids: Any) -> Any:
        model = eqx.combine(params, frozen, static)
        if layout == "fsdp":
            model = constrain(model, mesh, None)
        logits = ql.quaxify(lambda m, ids: jax.vmap(m)(ids, jnp.ones_like(ids, bool)))(model, ids)
        told = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids[:, 1:, None], -1)
        return -jnp.mean(told)

    def step(state: Any, frozen: Any, ids: Any) -> Any:
        params, rest = state
        with ql.on_materialise("error"):
            value, grads = jax.value_and_grad(loss)(params, frozen, ids)
        updates, rest = optimiser.update(grads, rest, params)
        state = optax.apply_updates(params, updates), rest
        return (state, value) if mesh is None else (constrain(state, mesh, rule), value)

    before = jax.tree.leaves(state)
    if mesh is None or kind == "Auto":
        compiled = jax.jit(step, donate_argnums=0).lower(state, frozen, ids).compile()
    else:
        out = jax.tree.map(lambda x: x.sharding.spec, state), jax.P()
        divided = jax.sharding.auto_axes(step, out_sharding=out)
        with jax.set_mesh(mesh):
            compiled = jax.jit(divided, donate_argnums=0).lower(state, frozen, ids).compile()
    arrays = map(jnp.asarray, jax.tree.leaves((state[0], frozen)))  # an `alpha` that is known is one of NumPy
    parts = [(x.nbytes, math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize, x.dtype == jnp.uint8)
             for x in arrays]  # fmt: skip
    losses = []
    for _ in range(STEPS):
        state, value = compiled(state, frozen, ids)
        losses.append(float(value))
    return {
        "losses": losses,
        "exchanged": {f"{kind} {dtype}": n for (kind, dtype), n in exchanged(compiled).items()},
        "stored": sum(n for n, _, _ in parts),
        "codes": sum(n for n, _, packed in parts if packed),
        "codes of a device": sum(n for _, n, packed in parts if packed),
        "whole": sum(n for n, part, _ in parts if n == part),
        "of a device": sum(part for _, part, _ in parts),
        "donated": all(x.is_deleted() for x in before),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_bytes(name: str):
    code = f"from tests.sharding.test_training import program; program({name!r})"
    (printed,) = run(code, devices=8)
    check(name, printed)


def check(name: str, printed: str) -> None:
    """What `program` printed is as it should be."""
    one, *others = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert one["losses"][-1] < one["losses"][0] - 1
    assert len(others) == (4 if name == "llama" else 6)
    for found in others:
        gathered = {kind: n for kind, n in found["exchanged"].items() if kind.startswith("all-gather")}
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5), found["layout"]
        assert found["donated"]
        layout, devices = found["layout"].split(",")[0], 8 if "fsdp" in found["layout"] else 4
        if layout == "fsdp":
            routing = 8 * 12 * 8 * 4 if name == "experts" else 0  # the logits of the router
            assert sum(gathered.values()) - routing <= found["stored"]
            assert gathered["all-gather u8"] == found["codes"]
        else:  # activations, shares of experts, updates of adapters: less than the scales of weights alone
            assert "all-gather u8" not in gathered
            inputs = 8 * 12 * 128 * 4 if layout == "expert" else 0
            assert sum(gathered.values()) - inputs < 0.25 * found["codes"]
        # All that is not whole on every device is spread evenly.
        assert found["of a device"] == found["whole"] + (found["stored"] - found["whole"]) / devices
        if layout == "expert":  # attention is on every device
            assert found["codes of a device"] < 0.45 * found["codes"]
        else:
            assert found["codes of a device"] == found["codes"] / devices
