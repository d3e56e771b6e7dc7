"""Consistently replaces two files: some tensors and their configuration.

File systems can't replace two files atomically. Instead, first write the new configuration next to the old
one, under a filename containing the hash of the new tensors. This takes effect as soon as the tensors have
been written, and is then renamed. At every point in between, even if the process is killed, readers can find
the right configuration for the tensors.
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
    """Opens the tensors and reads their configuration, trying again if they are replaced in the meantime.

    **Raises:** any errors raised by the two functions, and `CheckpointError` if the files are replaced too
    many times.
    """
    for last in (False, False, True):
        try:
            opened: Any = open()
        except (CheckpointError, FileNotFoundError):
            read()  # if the configuration is damaged as well then report this first
            raise
        try:
            config = read()
        except FileNotFoundError:  # the file was renamed before reading it
            if last:
                raise
            continue
        if opened.is_current():
            return opened, config
    raise file_error(path, None, "is replaced again and again while it is read")


class Pair(NamedTuple):
    """A file with tensors and a file with their configuration, both in the same folder."""

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
        """Writes both files, replacing them if they exist. Calls `last` just before replacing the tensors.

        **Raises:** `CheckpointError` if the folder contains a sharded checkpoint's index. (Readers would use
        this instead.)
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
        # This includes any left behind by a killed process.
        for left in self._all_waiting():
            left.unlink(missing_ok=True)

    def config_path(self) -> Path:
        """Returns the path of the configuration for the tensors currently in the folder."""
        if self._all_waiting() and (self.folder / self.tensors).is_file():
            waiting = self._waiting(self.folder / self.tensors)
            if waiting.is_file():
                return waiting
        return self.folder / self.config

    def _waiting(self, tensors: Path) -> Path:
        """Returns the path of the configuration for these tensors until they are in place."""
        with open(tensors, "rb") as file:
            return self.folder / f".{self.config}.for-{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def _all_waiting(self) -> list[Path]:
        return list(self.folder.glob(f".{self.config}.for-*"))
