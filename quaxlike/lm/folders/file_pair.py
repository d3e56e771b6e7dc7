"""Two files that belong together: tensors and their configuration.

No file system can replace two files at once. While a pair overwrites another, the new configuration waits
next to the old one, under a name with the hash of its tensors. It takes effect once those are in place, and
is then moved to its final name. A reader in between, or after a kill, takes the configuration that belongs to
the tensors it finds.
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
    """Opens tensors and reads their configuration; retries if the files are replaced in between.

    **Raises:** whatever the two functions raise, and `CheckpointError` if the files are replaced again and
    again.
    """
    for last in (False, False, True):
        try:
            opened: Any = open()
        except (CheckpointError, FileNotFoundError):
            read()  # errors in the configuration come first
            raise
        try:
            config = read()
        except FileNotFoundError:  # it was renamed before we read it
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
        """Writes both files, replacing existing ones. `last` is called just before the tensors are replaced.

        **Raises:** `CheckpointError` if the folder has an index of several files, as readers would prefer it.
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
        for left in self._all_waiting():  # also those of killed writers
            left.unlink(missing_ok=True)

    def config_path(self) -> Path:
        """Returns the path of the configuration for the tensors in the folder."""
        if self._all_waiting() and (self.folder / self.tensors).is_file():
            waiting = self._waiting(self.folder / self.tensors)
            if waiting.is_file():
                return waiting
        return self.folder / self.config

    def _waiting(self, tensors: Path) -> Path:
        """Returns the path where the configuration for these tensors waits."""
        with open(tensors, "rb") as file:
            return self.folder / f".{self.config}.for-{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def _all_waiting(self) -> list[Path]:
        return list(self.folder.glob(f".{self.config}.for-*"))
