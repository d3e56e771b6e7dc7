"""The user's cache folder.

Later runs execute code from this folder: anyone else with write access could run arbitrary code as this user.
So we refuse to use the folder unless only the user has write access.
"""

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
    except RuntimeError:  # the system knows no home directory for this user
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "quaxlike"


FOLDER = _folder()
"""The cache folder, as determined from the environment at import time. It might not exist yet."""

NO_FOLDER = "this user has no home folder; set XDG_CACHE_HOME to a folder that only you may write to"


def why_not_own(*paths: Path) -> str | None:
    """Explains why other users may be able to write to one of `paths`. Returns None if they can't."""
    if not hasattr(os, "getuid"):  # Windows, where the cache folder is private to each user
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
    """Turns on JAX's persistent compilation cache for a command and reports where it is.

    Call this before JAX compiles anything. The user's own JAX settings (`JAX_COMPILATION_CACHE_DIR`,
    `JAX_ENABLE_COMPILATION_CACHE`) take precedence, except over an explicit `where`.

    Each kind of processor gets a separate folder: compiled programs use the processor's instruction set, but
    JAX's cache key doesn't include it. This matters if several machines share a home directory.

    **Arguments:**

    - `where`: a folder, or `"off"`. Default: a subfolder of the user's cache folder. If this can't be used,
        then the reason is reported rather than raised.

    **Raises:** `OSError` if `where` cannot be used.
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
        # By default JAX only caches slow compilations, but our many fast ones add up to seconds.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    tell(f"Compiled programs are kept for later runs in {folder}")


def _processor() -> str:
    """Returns an identifier for this kind of processor, including its instruction set."""
    parts = [platform.machine(), platform.processor()]
    if (info := Path("/proc/cpuinfo")).exists():
        lines = {line.strip() for line in info.read_text(errors="replace").splitlines()}
        parts += sorted(x for x in lines if x.partition("\t")[0] in ("model name", "flags", "Features"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
