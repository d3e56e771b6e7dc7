"""The bytes that devices communicate in a training step, from 1 to 1,024 devices: a table for the docs.

    python -m benchmarks.communication             # the table, from the cost model below
    python -m benchmarks.communication --measure   # the same next to compiled programs of a small Llama
    python -m benchmarks.communication --figure docs/assets/communication.png

The cost model counts the bytes that each device sends in a ring: summing `B` bytes over `n` devices takes
`2 (n - 1) / n B`, gathering parts into `B` bytes takes `(n - 1) / n B`.

- Tensor parallel: activations are summed `SUMS` times per layer, and `SUMS_BESIDE` times outside the layers.
  Gradients of adapters are summed over the replicas.
- FSDP: stored arrays are gathered once per step: codes and scales, not dense weights. Adapters, in float32,
  are gathered with the rest, and their gradients are summed.

Stored bytes are those of weights, adapters, and two moments per element of an adapter; activations are not
counted.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from quaxlike.core.inspect.exchange import exchanges

#: Sums of activations, as `--measure` counts them: of a layer, and beside the layers, less what the first one
#: does not need, since its inputs are not trained.
SUMS, SUMS_BESIDE = 7.22, -0.99
TOKENS = 4096  # of each device
RANK = 16
BLOCK = 64  # of 4-bit codes
COMPUTE, LINK = 4e14, 5e10  # a device's operations a second in bfloat16, and bytes a second that it sends
BITS = {"bfloat16 and LoRA": 16.0, "QLoRA": 4.5}  # of NF4 in blocks of 64 with float32 scales


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    name: str
    hidden: int
    wide: int
    layers: int
    keys: int
    """The width of keys, and of values."""
    vocabulary: int = 128_256

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(out, in) of the linear layers of a block."""
        h, w, k = self.hidden, self.wide, self.keys
        return [(h, h), (k, h), (k, h), (h, h), (w, h), (w, h), (h, w)]

    def weights(self, bits: float) -> float:
        """Bytes; embedding and output layer are in bfloat16."""
        linear = self.layers * sum(n * k for n, k in self.matrices)
        return linear * bits / 8 + 2 * self.vocabulary * self.hidden * 2

    @property
    def adapters(self) -> int:
        """Bytes, in float32."""
        return 4 * RANK * self.layers * sum(n + k for n, k in self.matrices)


SHAPES = (Shape("Llama-3-8B", 4096, 14336, 32, 1024), Shape("Llama-3-70B", 8192, 28672, 80, 1024))


def fsdp(shape: Shape, bits: float, devices: int) -> tuple[float, float]:
    """Bytes that a device stores, and sends in a step."""
    stored = shape.weights(bits) + 3 * shape.adapters
    ring = (devices - 1) / devices
    return stored / devices, ring * (shape.weights(bits) + shape.adapters) + 2 * ring * shape.adapters


def tensor_parallel(shape: Shape, bits: float, devices: int, model: int = 8) -> tuple[float, float]:
    """The same for groups of `model` devices that divide the layers, and share their batch."""
    model = min(model, devices)
    replicas = devices // model
    stored = shape.weights(bits) + 3 * shape.adapters
    activation = 2 * TOKENS * model * shape.hidden  # bfloat16
    sums = (SUMS * shape.layers + SUMS_BESIDE) * 2 * (model - 1) / model * activation
    return stored / model, sums + 2 * (replicas - 1) / replicas * shape.adapters / model


def table() -> str:
    lines = [
        "| model | devices | layout | stored: bfloat16 and LoRA | QLoRA | sent: bfloat16 and LoRA | QLoRA |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    gib = lambda x: f"{x / 2**30:.2f} GiB"
    for shape in SHAPES:
        for devices in (1, 8, 64, 256, 1024):
            for name, layout in (("FSDP", fsdp), ("tensor parallel over 8", tensor_parallel)):
                if devices == 1 and layout is tensor_parallel:
                    continue
                found = [layout(shape, bits, devices) for bits in BITS.values()]
                cells = [gib(stored) for stored, _ in found] + [gib(sent) for _, sent in found]
                lines.append(f"| {shape.name} | {devices} | {name if devices > 1 else 'one'} | "
                             f"{' | '.join(cells)} |")  # fmt: skip
    return "\n".join(lines)


def limits() -> str:
    """Where each layout ends: the devices that can share blocks, and the tokens that hide what is sent."""
    lines = [
        "| model | blocks of the widest weight | devices that can share them "
        "| tokens a device, FSDP over 64: bfloat16 and LoRA | QLoRA |",
        "| --- | --- | --- | --- | --- |",
    ]
    for shape in SHAPES:
        blocks = shape.wide // BLOCK
        parameters = shape.layers * sum(n * k for n, k in shape.matrices) + shape.vocabulary * shape.hidden
        # Forward, and back to the inputs alone: four operations for each number and token.
        tokens = [fsdp(shape, bits, 64)[1] / LINK * COMPUTE / (4 * parameters) for bits in BITS.values()]
        lines.append(
            f"| {shape.name} | {blocks} | {blocks & -blocks} | {tokens[0]:,.0f} | {tokens[1]:,.0f} |"
        )
    return "\n".join(lines)


def figure(path: str) -> None:
    """Draws what a device stores and sends, over the number of devices."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
    counts = [2**i for i in range(11)]
    styles = {"bfloat16 and LoRA": "--", "QLoRA": "-"}
    layouts = {"FSDP": (fsdp, "tab:blue"), "tensor parallel over 8": (tensor_parallel, "tab:orange")}
    for column, shape in zip(axes.T, SHAPES, strict=True):
        for name, (layout, colour) in layouts.items():
            for weights, bits in BITS.items():
                found = [layout(shape, bits, n) for n in counts]
                for ax, values in zip(column, zip(*found, strict=True), strict=True):
                    gib = [x / 2**30 for x in values]
                    label = f"{name}, {weights}"
                    ax.plot(counts, gib, styles[weights], color=colour, marker=".", label=label)
        column[0].set_title(shape.name)
        column[0].set_yscale("log")
        column[1].set_xlabel("devices")
        column[1].set_xscale("log", base=2)
        column[1].set_ylim(bottom=0)
    axes[0][0].set_ylabel("GiB that a device stores")
    axes[1][0].set_ylabel("GiB that a device sends in a step")
    axes[0][0].legend(frameon=False, fontsize=9)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    fig.tight_layout()
    fig.savefig(path, dpi=110)


_COMPILE = """
import json, sys
import equinox as eqx, jax, jax.numpy as jnp
import quaxlike as ql
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.lm import tensor_parallel
from quaxlike.sharding import abstract, constrain, fsdp

layers, kind = int(sys.argv[1]), sys.argv[2]
mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
config = DecoderConfig.from_json({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512,
    "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
})

model = ql.quantize(Decoder(config, key=jax.random.key(0)), "nf4", block_size=32)
model = ql.loraify(model, rank=8, key=jax.random.key(1))
rule = tensor_parallel(model, mesh) if kind == "tensor" else fsdp(mesh)
arrays, rest = eqx.partition(model, eqx.is_array)
params, frozen = eqx.partition(arrays, ql.trainable(model))

def loss(params, frozen, ids):
    model = eqx.combine(params, frozen, rest)
    model = constrain(model, mesh, None) if kind == "fsdp" else model
    logits = jax.vmap(ql.quaxify(model))(ids, jnp.ones_like(ids, bool))
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

spec = jax.P("model") if kind == "fsdp" else jax.P()
ids = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=jax.NamedSharding(mesh, spec))
stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
grad = jax.jit(jax.grad(loss))
text = grad.lower(abstract(params, mesh, rule), abstract(frozen, mesh, rule), ids).compile().as_text()
print(json.dumps({"stored": stored, "text": [line for line in text.splitlines() if "all-" in line]}))
"""


def measured(kind: str, layers: int) -> tuple[int, dict[str, int]]:
    """The bytes of the arrays of a small Llama, and what the collectives of its gradient give each device."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _COMPILE, str(layers), kind]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    total: dict[str, int] = {}
    for e in exchanges("\n".join(found["text"])):
        total[e.kind] = total.get(e.kind, 0) + e.bytes
    return found["stored"], total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.communication")
    parser.add_argument("--measure", action="store_true", help="compile a small Llama for 8 virtual devices")
    parser.add_argument("--figure", metavar="FILE", help="draw it, too")
    arguments = parser.parse_args(argv)
    if arguments.figure:
        figure(arguments.figure)
    if arguments.measure:
        activation = 8 * 16 * 256 * 4
        one, two = (measured("tensor", layers)[1].get("all-reduce", 0) / activation for layers in (1, 2))
        print(f"tensor parallel: {two - one:.2f} sums of activations a layer, {2 * one - two:.2f} beside")
        stored, found = measured("fsdp", 2)
        print(f"FSDP: {found.get('all-gather', 0) / stored:.3f} of what is stored is gathered")
    print(table())
    print(limits())
    return 0


if __name__ == "__main__":
    sys.exit(main())
