"""Files that appear under their name once they are complete."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the block ends, and is gone after an error.

    It has the permissions of the file that it replaces, else those that any new file gets. Where `path` is a
    symbolic link, the file that it points to is replaced.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None

    def create(name: str, flags: int) -> int:
        # Never wider than it will be in the end: until then others could open it.
        return os.open(name, flags, 0o666 if mode is None else mode)

    with open(temporary, "xb", opener=create) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
