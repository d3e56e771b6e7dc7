"""Files that appear under their name only once they are complete."""

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
    """Adds the name of the file to errors that say none: those of a full disk, for example."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing; it replaces `path` when the block ends, and is deleted on an error.

    It has the permissions of the file that it replaces, or else those of any new file. If `path` is a
    symbolic link, the file that it points to is replaced. Half-written files that killed processes left in
    the folder are removed.
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
    """A new file beside `target`, locked for as long as it is open."""

    def create(name: str, flags: int) -> int:
        # The permissions are never wider than the final ones: others could open the file until then.
        return os.open(name, flags, 0o666 if mode is None else mode)

    while True:
        name = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        file = open(name, "xb", opener=create)  # noqa: SIM115 (the caller closes it)
        lock(file)
        if name.exists():  # before it was locked, another process may have removed it as abandoned
            return file
        file.close()


def _remove_abandoned(folder: Path) -> None:
    """Removes the temporary files that no running process is writing."""
    if fcntl is None:  # without locks they cannot be recognised
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in [entry for entry in entries if _TEMPORARY.fullmatch(entry.name)]:
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if lock(file):
                    os.unlink(entry.path)


def lock(file: Any) -> bool:
    """Locks an open file or folder for this process until it is closed; returns False if another one has.

    If the system or the file system has no locks, it always returns True.
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
    """Locks a folder until the result is closed; returns None if another process has locked it."""
    held = contextlib.ExitStack()
    if fcntl is not None:
        folder = os.open(path, os.O_RDONLY)
        held.callback(os.close, folder)
        if not lock(folder):
            held.close()
            return None
    return held
