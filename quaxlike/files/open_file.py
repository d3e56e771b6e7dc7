"""A file kept open, so everything is read from the same version of it.

Tensors are loaded lazily, often long after the header. If somebody overwrites the file in between, then the
header's offsets no longer refer to the right data. To detect this, every read checks the file's size and
modification time.
"""

import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np

from .errors import CheckpointError, file_error

_TICK = 20_000_000  # nanoseconds; file systems have timestamps with a resolution of up to 10 ms
_MAX = 1 << 30  # bytes per system call
_lock = threading.Lock()


class OpenFile:
    """A file opened for reading.

    If another file replaces the path, then reads continue from the original file. If this file itself is
    modified, then reads raise an error.

    **Attributes:**

    - `path`: the path when the file was opened.
    - `file`: the file object, for reading the header.
    - `size`: the size in bytes.

    **Raises:** `FileNotFoundError` if this is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        check_regular(path)
        self.path = path
        self.file = open(path, "rb")  # noqa: SIM115 (closed with the last reference)
        weakref.finalize(self, self.file.close)
        # Without waiting, a later change may not update the timestamp.
        if 0 <= time.time_ns() - self._now()[1] < _TICK:
            time.sleep(_TICK / 1e9)
        self._state = self._now()
        self.size = self._state[0]

    def read(self, offset: int, nbytes: int, name: str | None) -> bytes:
        """Reads the bytes of the entry `name`. Raises `CheckpointError` if the file has been modified."""
        parts, end = [], offset + nbytes
        while offset < end and (part := _read_at(self.file.fileno(), min(_MAX, end - offset), offset)):
            parts.append(part)
            offset += len(part)
        self._check(name)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def mapped(self, offset: int, dtype: np.dtype, shape: tuple[int, ...], name: str) -> np.ndarray:
        """Memory-maps an array. Like `read`, this raises an error if the file has already been modified."""
        self._check(name)
        with _lock:  # `memmap` moves the file position
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
    """Raises `FileNotFoundError` for pipes, devices and folders: reading these could block forever."""
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}.")


def _read_at(descriptor: int, count: int, offset: int) -> bytes:
    if hasattr(os, "pread"):  # unlike seeking, this is safe with both threads and forks
        return os.pread(descriptor, count, offset)
    with _lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)
