"""Models on the devices of several processes."""

import json

import pytest

from tests.lm.models.fixtures import folder
from tests.sharding.processes import run

# Each process tells how many bytes of whole tensors it read, and whether its devices store what they should.
_LOAD = """
import sys, json
import equinox as eqx, jax, numpy as np
from quaxlike.files.tensors import Tensors
from quaxlike.lm import load
from quaxlike.sharding import fsdp

whole = 0
def counted(self, name, read=Tensors.__getitem__):
    global whole
    found = read(self, name)
    whole += found.nbytes
    return found
Tensors.__getitem__ = counted

folder, quantize = sys.argv[1], json.loads(sys.argv[2])
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
model, _ = load(folder, mesh=mesh, quantize=quantize, sharding=fsdp(mesh))
told = {"whole": whole, "wrong": 0}
expected, _ = load(folder, quantize=quantize)
arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (model, expected)]
for found, wanted in zip(*arrays, strict=True):
    for shard in found.addressable_shards:
        told["wrong"] += np.asarray(shard.data).tobytes() != np.asarray(wanted)[shard.index].tobytes()
told["stored"] = sum(x.addressable_shards[0].data.nbytes for x in arrays[0])
told["all"] = sum(x.nbytes for x in arrays[0])
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("llama_llama3", {"scheme": "nf4", "block_size": 32}),
        ("mixtral", {"scheme": "nf4"}),
        ("gpt_oss", None),
    ],
)
def test_each_process_reads_what_its_devices_store(name, quantize):
    for told in map(json.loads, run(_LOAD, str(folder(name)), json.dumps(quantize), processes=2, devices=2)):
        assert told["wrong"] == 0
        assert told["stored"] < 0.3 * told["all"]
        if name == "llama_llama3":
            assert told["whole"] == 0
