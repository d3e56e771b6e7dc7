"""The two files of an adapter, which belong together.

No file system replaces two files at once. While an adapter is written over another, the new configuration
waits beside the old one, under a name that tells the tensors it belongs to. Once those are in place it holds,
and it is moved to its own name. Whoever reads in between, or after a kill, takes the one that belongs to the
tensors that are there.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..._files import replacing
from ..tensors import write_to

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: bytes) -> None:
    """Puts an adapter in place of the one in `folder`, if there is one."""
    with replacing(folder / TENSORS_FILE) as file:
        write_to(file, folder / TENSORS_FILE, tensors, {"format": "pt"})
        file.flush()
        waiting = _waiting(folder, Path(file.name))
        with replacing(waiting) as beside:
            beside.write(config)
    with replacing(folder / CONFIG_FILE) as file:
        file.write(config)
    for left in _all_waiting(folder):  # by others that were killed, too
        left.unlink(missing_ok=True)


def config_path(folder: Path) -> Path:
    """The configuration that belongs to the tensors in `folder`."""
    if _all_waiting(folder) and (folder / TENSORS_FILE).is_file():
        waiting = _waiting(folder, folder / TENSORS_FILE)
        if waiting.is_file():
            return waiting
    if not (folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(
            f"There is no {folder / CONFIG_FILE}: an adapter's directory has {CONFIG_FILE} in it."
        )
    return folder / CONFIG_FILE


def _waiting(folder: Path, tensors: Path) -> Path:
    """Where the configuration for these tensors waits."""
    with open(tensors, "rb") as file:
        return folder / f".{CONFIG_FILE}.for-{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _all_waiting(folder: Path) -> list[Path]:
    return list(folder.glob(f".{CONFIG_FILE}.for-*"))
