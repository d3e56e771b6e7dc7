"""The memory that it takes to load a checkpoint onto a mesh while quantising it.

    python -m benchmarks.sharded_loading --gib 2 --devices 8

writes a Llama with random bfloat16 weights to a temporary folder, loads it onto virtual CPU devices in a
separate process, and prints the peak memory of that process. Virtual devices share the host's memory, so the
peak includes what they store.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_HIDDEN, _WIDE, _VOCABULARY = 2048, 8192, 32000
_LOAD = """
import resource, sys, json
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import jax, equinox as eqx, quaxlike as ql
from quaxlike.sharding import fsdp
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
jax.block_until_ready(jax.numpy.ones(1))
before = peak()
model, _ = ql.lm.load(sys.argv[1], quantize="nf4", mesh=mesh, sharding=fsdp(mesh))
arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
jax.block_until_ready(arrays)
stored = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
print(json.dumps({"before": before, "peak": peak(), "stored": stored}))
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded_loading")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        size = write_llama(Path(folder), round(arguments.gib * 2**30))
        flags = f"--xla_force_host_platform_device_count={arguments.devices}"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            [sys.executable, "-c", _LOAD, folder], env=environment, check=True, capture_output=True, text=True
        )
    found = json.loads(run.stdout.splitlines()[-1])
    gib = {name: x / 2**30 for name, x in found.items()}
    print(
        f"checkpoint {size / 2**30:.2f} GiB of bfloat16, {arguments.devices} devices: they store "
        f"{gib['stored']:.2f} GiB; the process peaks at {gib['peak']:.2f} GiB, {gib['before']:.2f} of it "
        "before loading"
    )
    return 0


def write_llama(
    folder: Path, nbytes: int, *, hidden: int = _HIDDEN, wide: int = _WIDE, vocabulary: int = _VOCABULARY
) -> int:
    """Writes a checkpoint of about this size, tensor by tensor; returns the size."""
    import ml_dtypes
    import numpy as np

    of_layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (hidden, hidden),
        "self_attn.v_proj.weight": (hidden, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    count = lambda shapes: 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    layers = max(1, round((nbytes - count(shapes)) / count(of_layer)))
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": wide,
        "num_hidden_layers": layers, "num_attention_heads": 16, "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write((0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16).tobytes())
    return at


if __name__ == "__main__":
    sys.exit(main())
