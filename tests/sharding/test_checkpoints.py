"""Values in checkpoints of Orbax, from one mesh to another: bit for bit."""

import pytest

from tests.sharding.processes import run

pytestmark = pytest.mark.frameworks

_PROGRAM = """
import sys
import equinox as eqx, jax, numpy as np
import orbax.checkpoint as ocp
import quaxlike as ql
from quaxlike.lm import tensor_parallel
from quaxlike.sharding import abstract, fsdp, shard

path, mesh = sys.argv[2], jax.make_mesh(
    tuple(map(int, sys.argv[3].split(","))), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
model = ql.quantize(eqx.nn.MLP(512, 512, 1024, depth=1, key=jax.random.key(0)), "nf4", block_size=32)
model = ql.loraify(model, rank=8, key=jax.random.key(1))
rule = fsdp(mesh, over=tensor_parallel(model, mesh))
arrays, _ = eqx.partition(model, eqx.is_array)
with ocp.StandardCheckpointer() as checkpointer:
    if sys.argv[1] == "save":
        checkpointer.save(path, shard(arrays, mesh, rule))
    else:
        found = checkpointer.restore(path, abstract(eqx.filter_eval_shape(lambda: arrays), mesh, rule))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(arrays), strict=True):
            assert a.sharding.mesh.shape == mesh.shape
            for part in a.addressable_shards:
                assert np.asarray(part.data).tobytes() == np.asarray(b)[part.index].tobytes()
"""


def test_onto_other_meshes_one_device_and_other_numbers_of_processes(tmp_path):
    path = str(tmp_path / "checkpoint")
    run(_PROGRAM, "save", path, "2,4", processes=2, devices=4)
    run(_PROGRAM, "restore", path, "8,1", devices=8)
    run(_PROGRAM, "restore", path, "1,1", devices=1)
    run(_PROGRAM, "restore", path, "4,2", processes=4, devices=2)
