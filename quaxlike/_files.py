"""Atomic file writes.

A file only appears under its final name once it is complete, so that killing a process never leaves behind a
corrupt checkpoint. To do this we write to a temporary file in the same folder, holding a lock on it, and then
rename it. A temporary file that isn't locked has been abandoned, and can be deleted by anyone.
"""

import contextlib
import importlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

try:
    fcntl: Any = importlib.import_module("fcntl")
except ModuleNotFoundError:  # Windows
    fcntl = None


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.partial")


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the filename to errors that lack one, e.g. if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing, which replaces `path` at the end of the block.

    If an error is raised then the temporary file is deleted, and `path` is left untouched. The permissions of
    the existing file (if any) are kept, and if `path` is a symbolic link then its target is replaced. This
    also cleans up temporary files left behind by killed processes.
    """
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    _remove_abandoned(target.parent)
    with naming(target), _temporary(target, mode) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                os.chmod(file.name, mode)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _temporary(target: Path, mode: int | None) -> BinaryIO:
    """Creates a file alongside `target`, which stays locked until it is closed."""

    def create(name: str, flags: int) -> int:
        # Never grant wider permissions than the final ones, as others could open the file in the meantime.
        return os.open(name, flags, 0o666 if mode is None else mode)

    while True:
        name = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        file = open(name, "xb", opener=create)  # noqa: SIM115 (the caller closes it)
        lock(file)
        if name.exists():  # otherwise, another process took it for abandoned before we locked it
            return file
        file.close()


def _remove_abandoned(folder: Path) -> None:
    """Removes temporary files that are no longer locked."""
    if fcntl is None:  # without locks, we can't tell which files are abandoned
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]:
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if lock(file):
                    os.unlink(entry.path)


def lock(file: Any) -> bool:
    """Locks an open file or folder until it is closed. Returns False if another process holds the lock.

    Always returns True if locks aren't supported by the operating system or the file system.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def lock_folder(path: Path) -> contextlib.ExitStack | None:
    """Locks a folder until the returned stack is closed. Returns None if another process holds the lock."""
    held = contextlib.ExitStack()
    if fcntl is not None:
        folder = os.open(path, os.O_RDONLY)
        held.callback(os.close, folder)
        if not lock(folder):
            held.close()
            return None
    return held
