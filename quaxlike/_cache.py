"""The user's cache: folders of code that later runs execute, which others must not write to."""

import hashlib
import os
import platform
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import jax


def _folder() -> Path | None:
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "quaxlike"
    try:
        home = Path.home()
    except RuntimeError:  # a user that the machine does not know
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "quaxlike"


FOLDER = _folder()
"""The folder, whether or not it is there, as the environment has it when quaxlike is imported."""

NO_FOLDER = "this user has no home folder; set XDG_CACHE_HOME to a folder that only you may write to"


def why_not_own(*paths: Path) -> str | None:
    """Why others may write to one of these files and folders of code; None if only the user may."""
    if not hasattr(os, "getuid"):  # Windows, whose users have caches of their own
        return None
    for path in paths:
        info = path.stat()
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022:
            mode = f"{stat.S_IMODE(info.st_mode):o}"
            return (
                f"{path} holds code that will run, and others may write to it (owner {info.st_uid}, mode "
                f"{mode}): make it yours alone, or set XDG_CACHE_HOME to a folder that is."
            )
    return None


def keep_programs(where: str | None, tell: Callable[[str], None]) -> None:
    """Lets JAX keep compiled programs for later runs of a command, and tells so in a line. Must be called
    before JAX compiles.

    What the user has set for JAX (`JAX_COMPILATION_CACHE_DIR`, `JAX_ENABLE_COMPILATION_CACHE`) is left as it
    is unless `where` is given. Programs take the instructions of the processor that they were compiled on,
    which JAX does not look at: processors that share a home have folders of their own.

    **Arguments:**

    - `where`: a folder, or `"off"`. Default: a folder in the user's cache. If that cannot be used, the line
        tells why.

    **Raises:** `OSError` for a folder that is given and cannot be used.
    """
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if where is None and (
        jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache
    ):
        return
    try:
        if where is not None:
            folder = Path(where)
        elif FOLDER is not None:
            folder = FOLDER / "programs" / _processor()
        else:
            raise OSError(NO_FOLDER)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := why_not_own(folder):
            raise PermissionError(reason)
    except OSError as error:
        if where is not None:
            raise
        tell(f"Compiled programs are not kept: {error}")
        return
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small ones take seconds
    tell(f"Compiled programs are kept for later runs in {folder}")


def _processor() -> str:
    """A name for the kind of processor and its instructions."""
    told = [platform.machine(), platform.processor()]
    if (info := Path("/proc/cpuinfo")).exists():
        lines = {line.strip() for line in info.read_text(errors="replace").splitlines()}
        told += sorted(x for x in lines if x.partition("\t")[0] in ("model name", "flags", "Features"))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
