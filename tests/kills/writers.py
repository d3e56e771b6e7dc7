"""The writers that are killed. Each writes numbered versions, and what it has written is read again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import safetensors
from quaxlike.lm import bitsandbytes, peft
from quaxlike.lm.finetune.options import settings_of
from quaxlike.lm.finetune.report import Metrics
from quaxlike.lm.finetune.state import RunDirectory
from tests.fixtures import fixture


class Writer(NamedTuple):
    """A writer of numbered versions."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], set[int]]
    """The numbers of all parts of what is there."""


def _numbers(tree: Any) -> set[int]:
    arrays = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return {round(x) for array in arrays for x in np.unique(array)}


def _numbered(n: int) -> dict[str, np.ndarray]:
    """Large enough that writing takes a while."""
    return {"a": np.full((64, 512), n, np.float32), "b": np.full((512, 64), n, np.float32)}


def _write_values(folder: Path, n: int) -> None:
    safetensors.save(folder / "model.safetensors", _numbered(n))


def _read_values(folder: Path) -> set[int]:
    return _numbers(safetensors.load(folder / "model.safetensors", like=_numbered(0)))


def _quantised(kind: Any, shape: tuple[int, ...], n: int) -> Any:
    """All of its values are n, up to rounding: the code of 1 with the scale of n."""
    quantised = kind.quantize(np.ones(shape, np.float32))
    return jax.tree.map(lambda x: np.asarray(x * n if x.dtype == np.float32 else x), quantised)


def _write_quantised(folder: Path, n: int) -> None:
    bitsandbytes.save(
        folder / "model.safetensors", {"w": _quantised(ql.NF4Array, (64, 512), n), **_numbered(n)}
    )


def _read_quantised(folder: Path) -> set[int]:
    return _numbers(ql.materialise(dict(bitsandbytes.load(folder / "model.safetensors"))))


def _write_gguf(folder: Path, n: int) -> None:
    lm.write(folder / "model.gguf", _numbered(n), "gguf", metadata={"number": n})


def _read_gguf(folder: Path) -> set[int]:
    found = lm.open_checkpoint(folder / "model.gguf")
    return _numbers(dict(found)) | {found.metadata["number"]}


def _write_folder(folder: Path, n: int) -> None:
    lm.write(folder, _numbered(n), "compressed-tensors", config={"number": n})


def _read_folder(folder: Path) -> set[int]:
    found = lm.open_checkpoint(folder)
    return _numbers(dict(found)) | {found.config["number"]}


def _write_adapter(folder: Path, n: int) -> None:
    w = np.zeros((64, 512), np.float32)
    a, b = np.full((1, 512), n, np.float32), np.full((64, 1), n, np.float32)
    peft.save_adapter(folder, {"layer.weight": ql.LoraArray(w, a, b, alpha=float(n))})


def _read_adapter(folder: Path) -> set[int]:
    lora = peft.load_adapter(folder, {"layer.weight": jnp.zeros((64, 512))})["layer.weight"]
    return _numbers([lora.a, lora.b]) | {int(lora.alpha)}


_BASE = "peft_llama/base"
_KINDS = (None, ql.NF4Array, ql.Int8Array)


def _write_model(folder: Path, n: int) -> None:
    """In turn as it is, in four bits and in eight, which its configuration has to tell."""
    model, _ = _base_model()
    kind = _KINDS[n % 3]

    def numbered(x: Any) -> Any:
        if kind is None or x.ndim < 2:
            return np.full(x.shape, n, np.float32)
        return _quantised(kind, x.shape, n)

    ql.lm.save(folder, jax.tree.map(numbered, model), fixture(_BASE))


def _base_model() -> Any:
    if not _MODELS:
        _MODELS.append(ql.lm.load(fixture(_BASE)))
    return _MODELS[0]


_MODELS: list[Any] = []


def _read_model(folder: Path) -> set[int]:
    model, config = ql.lm.load(folder)
    kinds = {type(x).__name__ for x in jax.tree.leaves(model, is_leaf=ql.is_value) if ql.is_value(x)}
    method = config.get("quantization_config", {}).get("quant_method")
    expected = {None: set(), "bitsandbytes": {"NF4Array"}, "compressed-tensors": {"Int8Array", "BlockArray"}}
    if not kinds <= expected[method] or bool(kinds) != (method is not None):
        raise AssertionError(f"The configuration says {method}; the tensors are {kinds}.")
    return _numbers(ql.materialise(model))


def _run(folder: Path) -> RunDirectory:
    file = fixture(_BASE) / "config.json"
    return RunDirectory(settings_of(model=file, data=file, output=folder))


def _write_run(folder: Path, n: int) -> None:
    directory, metrics = _run(folder), Metrics(folder, tensorboard=False)
    try:
        directory.restore(_numbered(0))
        directory.note(step=n, loss=0.0)
        metrics.note(n, loss=0.0)
        directory.save(n, _numbered(n))
    finally:
        directory.close()


def _read_run(folder: Path) -> set[int]:
    directory, metrics = _run(folder), Metrics(folder, tensorboard=False)
    try:
        step, state = directory.restore(_numbered(0))
        noted = {entry["step"] for entry in directory.entries()}
    finally:
        directory.close()
    if noted != set(range(min(noted, default=step + 1), step + 1)):
        raise AssertionError(f"The log has {sorted(noted)} at step {step}.")
    metrics.note(step)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    return _numbers(state) | {step}


WRITERS = {
    "safetensors": Writer(_write_values, _read_values),
    "quantised": Writer(_write_quantised, _read_quantised),
    "gguf": Writer(_write_gguf, _read_gguf),
    "compressed-tensors": Writer(_write_folder, _read_folder),
    "adapter": Writer(_write_adapter, _read_adapter),
    "models": Writer(_write_model, _read_model),
    "runs": Writer(_write_run, _read_run),
}
