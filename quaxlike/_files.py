"""Atomic writing of files.

A file only appears under its name once it is complete, so a killed process never leaves a damaged
checkpoint. We write to a locked temporary file in the same folder, and rename it. A temporary file without a
lock is abandoned, and may be deleted.
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
    """Adds the name of the file to errors without one, such as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing, which replaces `path` at the block's end.

    After an error it is deleted instead. The file keeps the permissions of the file it replaces. If
    `path` is a symbolic link, then the target is replaced. Temporary files of killed processes are removed.
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
    """Creates a file next to `target`, which is locked while it is open."""

    def create(name: str, flags: int) -> int:
        # Never use wider permissions than the final ones: others could open the file in between.
        return os.open(name, flags, 0o666 if mode is None else mode)

    while True:
        name = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        file = open(name, "xb", opener=create)  # noqa: SIM115 (the caller closes it)
        lock(file)
        if name.exists():  # before it was locked, another process may have removed it as abandoned
            return file
        file.close()


def _remove_abandoned(folder: Path) -> None:
    """Removes temporary files without a lock."""
    if fcntl is None:  # without locks, we cannot recognise them
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]:
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if lock(file):
                    os.unlink(entry.path)


def lock(file: Any) -> bool:
    """Locks an open file or folder until it is closed. Returns False if another process has locked it.

    If the system or the file system does not support locks, then this always returns True.
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
    """Locks a folder until the result is closed. Returns None if another process has locked it."""
    held = contextlib.ExitStack()
    if fcntl is not None:
        folder = os.open(path, os.O_RDONLY)
        held.callback(os.close, folder)
        if not lock(folder):
            held.close()
            return None
    return held
