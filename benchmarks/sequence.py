"""The memory of a training step whose tokens are shared by devices: a table for the docs.

    python -m benchmarks.sequence                                # the table
    python -m benchmarks.sequence --tokens 65536 --devices 1 8   # other numbers

A small Llama with weights in NF4 and LoRA is compiled for each length of its one text, on as many virtual
CPUs as share the tokens; nothing is run. Temporary arrays are those of `memory_analysis`, on each device.
What a device sends in attention is read from the compiled program: keys, values and their cotangents, in
each turn of each layer.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LAYERS = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


class Measured(NamedTuple):
    """Bytes of a step, on each device."""

    temporaries: int
    sent: int


def compiled(tokens: int, devices: int) -> Measured:
    """The step of a text of so many tokens, on all devices of this process."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np

    import quaxlike as ql
    from quaxlike.core.inspect.exchange import exchanges
    from quaxlike.lm.finetune.data import Batch
    from quaxlike.lm.finetune.devices import Devices
    from quaxlike.lm.finetune.settings import RunSettings, TrainSettings
    from quaxlike.lm.finetune.tasks import NextToken
    from quaxlike.lm.finetune.train import State, TrainingProgram, optimiser_for
    from quaxlike.lm.models import Decoder, DecoderConfig

    here = Path()
    mesh = f"seq={devices}" if devices > 1 else None
    settings = TrainSettings(here, batch_size=1)
    task, places = NextToken(settings.loss_chunk), Devices(RunSettings(here, mesh=mesh))
    model = Decoder(DecoderConfig.from_json(CONFIG), key=jax.random.key(0)).stacked()
    model = ql.loraify(ql.quantize(model, "nf4", block_size=32), rank=4, key=jax.random.key(1))
    model = places.place(model)
    params, frozen = eqx.partition(model, ql.trainable(model))
    optimiser, _ = optimiser_for(settings, 1)
    program = TrainingProgram(task, optimiser, settings, places)
    state = places.place_along(State(params, optimiser.init(params)))
    ids = np.zeros((1, 1, tokens), np.int32)
    batch = Batch(ids, np.ones_like(ids), np.ones_like(ids, bool), np.zeros(1, np.int32))
    step = program.compiled(frozen, state, places.batch(batch), places.replicate(jnp.float32(1)), None)
    passed = [e.bytes for e in exchanges(step.as_text()) if e.kind == "collective-permute"]
    return Measured(step.memory_analysis().temp_size_in_bytes, sum(passed) * devices * LAYERS)


def measured(tokens: int, devices: int) -> Measured:
    """The same, in a process of its own that has so many devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment.pop("XLA_FLAGS", None)
    code = f"import json; from benchmarks.sequence import *; print(json.dumps(compiled({tokens}, {devices})))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return Measured(*json.loads(run.stdout.splitlines()[-1]))


def table(tokens: Sequence[int], devices: Sequence[int]) -> str:
    lines = [
        "| tokens | devices | temporary arrays | of one device | sent |",
        "| --- | --- | --- | --- | --- |",
    ]
    mib = lambda size: f"{size / 2**20:,.1f} MiB"
    for length in tokens:
        one: Any = None
        for count in devices:
            found = measured(length, count)
            one = found if one is None else one
            share = f"{found.temporaries / one.temporaries:.2f}"
            cells = f"{length:,}", str(count), mib(found.temporaries), share, mib(found.sent)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args(argv)
    print(table(arguments.tokens, arguments.devices))
    return 0


if __name__ == "__main__":
    sys.exit(main())
