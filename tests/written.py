"""Small files of this release, which later ones must read: `python -m tests.written` writes them.

They are in `tests/data/written/VERSION`, and stay as they are once that version is released. Needs orbax
(`pip install '.[frameworks]'`).
"""

import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import safetensors
from quaxlike.lm import peft
from quaxlike.lm.finetune.options import settings_of
from quaxlike.lm.finetune.settings import Settings
from quaxlike.lm.finetune.state import RunDirectory
from tests.array_types import CORNERS, WEIGHTS, parts
from tests.fixtures import DATA
from tests.samples import normal

FOLDER = DATA / "written"
# What the writers of published formats take: the file, the format, and weights.
FORMATS: dict[str, tuple[str, str, Any]] = {
    "gguf": ("x.gguf", "gguf", lambda w: ql.BlockArray.quantize(w, codec="q8_0")),
    "gguf-k": ("x.gguf", "gguf", lambda w: ql.BlockArray.quantize(w, codec="q4_0")),
    "bitsandbytes": ("", "bitsandbytes", lambda w: ql.NF4Array.quantize(w, double_quant=True)),
    "compressed-tensors": ("", "compressed-tensors", ql.Int8Array.quantize),
    "mxfp4": ("", "mxfp4", lambda w: ql.BlockArray.quantize(w, codec="mxfp4")),
}


def tables() -> dict[str, Any]:
    """The tables of shipped types."""
    shipped = lambda make: all(type(x).__module__.startswith("quaxlike.") for x in parts(make()))
    return {
        name: {key: make for key, make in table.items() if shipped(make)}
        for name, table in {"weights": WEIGHTS, "corners": CORNERS}.items()
    }


def linear() -> dict[str, Any]:
    """A model with adapters, as a flat dict."""
    base = {
        "model.layers.0.q_proj.weight": normal(8, 6),
        "model.layers.0.v_proj.weight": normal(8, 6, seed=1),
    }
    return ql.loraify(base, rank=2, key=jax.random.key(0), init="gaussian", rslora=True)


def optimiser_state() -> Any:
    params = {"w": normal(4, 4), "b": normal(4, seed=1)}
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return transformation.update(params, transformation.init(params), params)[1]


def quantised_state() -> Any:
    """The state of an optimiser whose moments have few bits."""
    params = {"w": normal(64, 64), "b": normal(4, seed=1)}
    transformation = ql.optim.quantize_state(optax.adamw(1e-3))
    return transformation.update(params, transformation.init(params), params)[1]


def settings(folder: Path) -> Settings:
    """Of a run whose model and data are files of this folder, which do not change."""
    file = folder / "mxfp4" / "config.json"
    return settings_of(model=file, data=file, output=folder / "run", rank=2)


def write_run(folder: Path) -> None:
    """The files of a run that was stopped after the second step."""
    run = RunDirectory(settings(folder))
    run.note(step=1, loss=1.5)
    run.note(step=2, loss=1.25)
    run.save(2, {"adapters": linear(), "optimiser": quantised_state()})
    run.close()
    about = json.loads((folder / "run" / "run.json").read_text())
    portable = {name: value for name, value in about.items() if name not in ("model", "data")}
    (folder / "run" / "run.json").write_text(json.dumps(portable, indent=2))


def write_orbax(folder: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / "orbax", for_orbax())
    told = folder / "orbax" / "commit_success.txt"  # Orbax writes the path of the folder into it
    told.write_text(told.read_text().replace(str(folder.resolve()) + "/", ""))


def for_orbax() -> Any:
    return {"weights": ql.NF4Array.quantize(jnp.asarray(normal(4, 64))), "optimiser": optimiser_state()}


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, table in tables().items():
        values = {key: make() for key, make in table.items()}
        dense = {key: np.asarray(ql.materialise(x)) for key, x in values.items()}
        safetensors.save(folder / f"{name}.safetensors", values)
        np.savez_compressed(folder / f"{name}.npz", **{k: _portable(x) for k, x in dense.items()})
        leaves = jtu.tree_map(np.asarray, values)
        if name == "weights":
            (folder / f"{name}.pickle").write_bytes(pickle.dumps(leaves, protocol=4))
    for name, (file, format, quantised) in FORMATS.items():
        w = quantised(jnp.asarray(normal(4, 64)))
        (folder / name).mkdir()
        lm.write(folder / name / file, {"x.weight": w}, format=format)
        np.save(folder / name / "x.npy", np.asarray(w.materialise()))
    model = linear()
    safetensors.save_adapters(folder / "adapters.safetensors", model)
    peft.save_adapter(folder / "peft", model)
    safetensors.save(folder / "optimiser.safetensors", optimiser_state())
    safetensors.save(folder / "quantised-optimiser.safetensors", quantised_state())
    write_run(folder)
    write_orbax(folder)


def _portable(x: np.ndarray) -> np.ndarray:
    """NumPy's files know no bfloat16."""
    return x.astype(np.float32) if x.dtype.kind == "V" or x.dtype.name == "bfloat16" else x


if __name__ == "__main__":
    write(FOLDER / ql.__version__)
