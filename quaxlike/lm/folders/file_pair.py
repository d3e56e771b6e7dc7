"""Two files that belong together: tensors, and the configuration that says how they are read.

No file system replaces two files at once. While a pair overwrites another, the new configuration waits beside
the old one, under a name with the hash of its tensors. It takes effect once those are in place, and is then
moved to its final name. A reader in between, or after a kill, takes the configuration that belongs to the
tensors it finds.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..._files import replacing
from ...files.errors import CheckpointError, file_error
from ...files.tensors import write_to

_O = TypeVar("_O")
_C = TypeVar("_C")


def consistent(open: Callable[[], _O], read: Callable[[], _C], path: Path) -> tuple[_O, _C]:
    """Opens tensors, which know whether they are still current, and reads the configuration that belongs to
    them. If they are replaced meanwhile, it tries again.

    **Raises:** what the two functions raise; `CheckpointError` if the files are replaced again and again.
    """
    for last in (False, False, True):
        try:
            opened: Any = open()
        except (CheckpointError, FileNotFoundError):
            read()  # what is wrong with the configuration is said first
            raise
        try:
            config = read()
        except FileNotFoundError:  # it was moved to its final name before it was read
            if last:
                raise
            continue
        if opened.is_current():
            return opened, config
    raise file_error(path, None, "is replaced again and again while it is read")


class Pair(NamedTuple):
    """A file of tensors and its configuration, in one folder."""

    folder: Path
    config: str = "config.json"
    tensors: str = "model.safetensors"

    def write(
        self,
        tensors: Mapping[str, np.ndarray],
        config: bytes,
        metadata: Mapping[str, str] = {"format": "pt"},
        *,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes both files, in place of those that are there. `last` is called just before the new tensors
        take their place.

        **Raises:** `CheckpointError` if the folder has tensors in several files, which readers prefer.
        """
        index = self.folder / f"{self.tensors}.index.json"
        if index.exists():
            raise file_error(index, None, "is of a checkpoint in several files; write to another folder")
        file_path = self.folder / self.tensors
        with replacing(file_path) as file:
            write_to(file, file_path, tensors, metadata)
            file.flush()
            waiting = self._waiting(Path(file.name))
            with replacing(waiting) as beside:
                beside.write(config)
            last()
        with replacing(self.folder / self.config) as file:
            file.write(config)
        for left in self._all_waiting():  # also from writers that were killed
            left.unlink(missing_ok=True)

    def config_path(self) -> Path:
        """The path of the configuration that belongs to the tensors in the folder."""
        if self._all_waiting() and (self.folder / self.tensors).is_file():
            waiting = self._waiting(self.folder / self.tensors)
            if waiting.is_file():
                return waiting
        return self.folder / self.config

    def _waiting(self, tensors: Path) -> Path:
        """The path where the configuration for these tensors waits until they are in place."""
        with open(tensors, "rb") as file:
            return self.folder / f".{self.config}.for-{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def _all_waiting(self) -> list[Path]:
        return list(self.folder.glob(f".{self.config}.for-*"))
