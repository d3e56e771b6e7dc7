"""A file that stays open, so everything is read from the same version of it.

Tensors are read on demand, long after the header. If the file was overwritten in between, the offsets in the
header would point at other data, so every read first checks size and modification time.
"""

import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np

from .errors import CheckpointError, file_error

_TICK = 20_000_000  # nanoseconds; file systems store times in steps of up to 10 ms
_MAX = 1 << 30  # bytes in one system call
_lock = threading.Lock()


class OpenFile:
    """A file opened for reading.

    If another file replaces it, then we continue to read the original file. If the file itself is changed,
    then reading raises an error.

    **Attributes:**

    - `path`: its path when it was opened.
    - `file`: the file object, for reading the header.
    - `size`: its size in bytes.

    **Raises:** `FileNotFoundError` unless it is a regular file.
    """

    def __init__(self, path: Path) -> None:
        check_regular(path)
        self.path = path
        self.file = open(path, "rb")  # noqa: SIM115 (closed with the last reference)
        weakref.finalize(self, self.file.close)
        if 0 <= time.time_ns() - self._now()[1] < _TICK:  # a later change could have the same time
            time.sleep(_TICK / 1e9)
        self._state = self._now()
        self.size = self._state[0]

    def read(self, offset: int, nbytes: int, name: str | None) -> bytes:
        """Reads bytes of the entry `name`. Raises `CheckpointError` if the file has changed."""
        parts, end = [], offset + nbytes
        while offset < end and (part := _read_at(self.file.fileno(), min(_MAX, end - offset), offset)):
            parts.append(part)
            offset += len(part)
        self._check(name)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def mapped(self, offset: int, dtype: np.dtype, shape: tuple[int, ...], name: str) -> np.ndarray:
        """Maps an array of the file into memory. Raises like `read`, for changes before this call."""
        self._check(name)
        with _lock:  # NumPy seeks in the file
            return np.memmap(self.file, dtype, "r", offset, shape)

    def is_current(self) -> bool:
        """Returns whether the path still refers to the opened file."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == self._state

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self.file.fileno())
        return found.st_size, found.st_mtime_ns

    def _check(self, name: str | None) -> None:
        if (now := self._now()) != self._state:
            how = "cut short" if now[0] < self.size else "written to"
            problem = f"the file has been {how} since its header was read; open the checkpoint again"
            raise file_error(self.path, name, problem)


def foreign(file: OpenFile, kind: str) -> CheckpointError:
    start = file.read(0, 40, None)
    if start.startswith(b"version https://git-lfs"):
        return file_error(
            file.path,
            None,
            "is a pointer of Git LFS in place of the file: run `git lfs pull` where it came from",
        )
    return file_error(file.path, None, f"is not a {kind} file: it begins with {start!r}")


def check_regular(path: Path) -> None:
    """Raises `FileNotFoundError` for a pipe, a device or a folder, as reading could block forever."""
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}.")


def _read_at(descriptor: int, count: int, offset: int) -> bytes:
    if hasattr(os, "pread"):  # safe with threads and forked processes
        return os.pread(descriptor, count, offset)
    with _lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)
