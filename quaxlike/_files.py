"""Atomic file writes.

A file only appears under its final name once it is complete. In particular, killing a process never leaves
behind a corrupt checkpoint.

The data first goes to a temporary file in the same folder, which is then renamed. The writing process also
holds a lock on it: an unlocked temporary file has been abandoned, so anyone can delete it.
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
    """A context manager adding the filename to errors without one, e.g. if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing, which replaces `path` at the end of the block.

    After an error, the temporary file is deleted and `path` is left as it was. If `path` already exists then
    the new file has the same permissions. If it's a symbolic link then the link's target is replaced. Any
    temporary files left behind by killed processes are deleted as well.
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
    """Creates a temporary file alongside `target`, locked until it is closed."""

    def create(name: str, flags: int) -> int:
        # Others could open the file in the meantime, so never grant more than the final permissions.
        return os.open(name, flags, 0o666 if mode is None else mode)

    while True:
        name = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        file = open(name, "xb", opener=create)  # noqa: SIM115 (the caller closes it)
        lock(file)
        if name.exists():  # if not, then another process deleted it just before we locked it
            return file
        file.close()


def _remove_abandoned(folder: Path) -> None:
    """Removes any unlocked temporary files, i.e. those left by processes now gone."""
    if fcntl is None:  # without locks there is no way to tell which files are abandoned
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]:
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if lock(file):
                    os.unlink(entry.path)


def lock(file: Any) -> bool:
    """Locks an open file or folder until it is closed. Returns False if the lock is held by another process.

    If locks aren't supported (depending on the operating system and the file system), this always returns
    True.
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
    """Locks a folder until the returned stack is closed. Returns None if another process has locked it."""
    held = contextlib.ExitStack()
    if fcntl is not None:
        folder = os.open(path, os.O_RDONLY)
        held.callback(os.close, folder)
        if not lock(folder):
            held.close()
            return None
    return held
