"""The settings of a fine-tuning run."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from ..interop.files.errors import ErrorAboutFiles


class FinetuneError(ErrorAboutFiles):
    """A run cannot start or continue, for the reason in the message."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the command line; `python -m quaxlike.finetune --help` describes them."""

    model: Path
    data: Path
    output: Path
    eval_data: Path | None = None
    held_out: float | int = 0.1
    max_length: int | None = None
    quantize: str = "nf4"
    block_size: int | None = None
    target: tuple[str, ...] = ()
    rank: int = 8
    alpha: float | int = 16
    dropout: float | int = 0.0
    rslora: bool = False
    dora: bool = False
    steps: int | None = None
    epochs: float | int = 3
    batch_size: int = 16
    accumulate: int = 1
    learning_rate: float | int = 2e-4
    schedule: str = "cosine"
    warmup: float | int = 0.1
    weight_decay: float | int = 0.0
    clip: float | int = 1.0
    seed: int = 0
    checkpoint_every: int = 50
    eval_every: int | None = None
    compute_dtype: str | None = None
    remat: str | None = None
    loss_chunk: int = 1024
    pack: bool = False
    tensorboard: bool = False
    mesh: str | None = None
    fsdp: bool = False
    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None
    train_tokens: tuple[int, ...] = ()
    scan_layers: bool = False
    merge: str | None = None
    format: str = "safetensors"
    outtype: str | None = None

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the result depends on, as JSON: runs with equal fingerprints are the same run."""
        devices = ("mesh", "fsdp", "coordinator", "process_id", "num_processes")
        free = (
            "output",
            "checkpoint_every",
            "eval_every",
            "tensorboard",
            "merge",
            "format",
            "outtype",
            *devices,
        )
        options = {name: value for name, value in dataclasses.asdict(self).items() if name not in free}
        files = {name: path for name, path in options.items() if isinstance(path, Path)}
        options |= {name: str(path.resolve()) for name, path in files.items()}
        digests = {f"sha256 of {name}": _digest(path) for name, path in files.items()}
        return options | digests | {"target": list(self.target), "train_tokens": list(self.train_tokens)}


def _digest(path: Path) -> str:
    """The SHA-256 of a file, or of the names and contents of a checkpoint's files."""
    if not path.is_dir():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    parts = sorted(part for part in path.iterdir() if part.suffix in (".json", ".safetensors"))
    return hashlib.sha256("".join(f"{x.name} {_digest(x)}\n" for x in parts).encode()).hexdigest()
