"""Compiles and loads the native library, cached per user.

The filename is a hash of the sources, the jaxlib version and the processor, so that a library compiled for
something else is never loaded. Neither is code writable by other users.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib

from ... import _cache
from ..._checked import checked

_SOURCES = sorted(source for ending in ("*.cc", "*.h") for source in Path(__file__).parent.glob(ending))
_FLAGS = ("-std=c++17", "-O2", "-ftree-vectorize", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_FUNCTIONS = (
    *("multiply", "multiply_rounded", "multiply_dense", "multiply_stacked"),
    *("decode", "csr_multiply"),
)
PACKAGE = "quaxlike_cpu"
_COMMAND = "`python -m quaxlike.kernels.native`"


class NativeError(RuntimeError):
    """Raised if the native library cannot be built. The message is the reason why."""


class Library(NamedTuple):
    """The loaded library: its file, and the instruction sets it uses here.

    `rounding` is how products with 8-bit inputs round: "VNNI", "avx2" or "plain". `multiplies_bfloat16` is
    whether the processor has instructions for this.
    """

    path: Path
    instructions: str
    rounding: str
    multiplies_bfloat16: bool


class Built(NamedTuple):
    """The native library once compiled.

    **Attributes:**

    - `path`: the library's path.
    - `seconds`: the time taken to compile it, or `None` if it already existed.
    - `compiler`: the command for compiling it, even if it already existed.
    """

    path: Path
    seconds: float | None
    compiler: str


@functools.cache
def library() -> Library | str:
    """Returns the library, or why it isn't available to this process. Never compiles anything."""
    if os.environ.get("QUAXLIKE_NATIVE") == "0":
        return "native products are turned off by QUAXLIKE_NATIVE=0"
    try:
        path = built_path()
        if path.is_file():
            _check_own(path.parent, path)
        elif (path := installed_path()) is None:
            return f"the native products are not compiled; {_COMMAND} does it"
        loaded = ctypes.CDLL(str(path))
        for name in _FUNCTIONS:
            function = jax.ffi.pycapsule(getattr(loaded, f"quaxlike_{name}"))
            jax.ffi.register_ffi_target(f"quaxlike_{name}", function, platform="cpu")
    except (NativeError, OSError, RuntimeError) as error:  # XLA raises the latter for another FFI version
        return f"the native products could not be loaded: {error}"
    names = loaded.quaxlike_set, loaded.quaxlike_rounding
    for name in names:
        name.restype = ctypes.c_char_p
    loaded.quaxlike_bfloat16.restype = ctypes.c_bool
    instructions, rounding = (name().decode() for name in names)
    return Library(path, instructions, rounding, loaded.quaxlike_bfloat16())


def library_on(platform: str) -> Library | str:
    """Returns the library, or why it cannot be used on this platform."""
    return library() if platform == "cpu" else f"native products run on CPUs, not on platform {platform!r}"


def built_path() -> Path:
    """Returns the library's path for these sources, jaxlib and processor, even if it hasn't been built yet.

    **Raises:** `NativeError` if the user has no cache directory.
    """
    if _cache.FOLDER is None:
        raise NativeError(_cache.NO_FOLDER)
    version: Any = jaxlib.__version__
    return _cache.FOLDER / "native" / file_name(version, sys.platform, platform.machine())


def installed_path() -> Path | None:
    """Returns the library's path in the wheel `quaxlike-cpu`, if one for these sources is installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name(file_name())
    return path if path.is_file() else None


def file_name(*key: str) -> str:
    """Returns the library's filename, which also depends on `key`.

    In a wheel there is no key: the library is specific to a platform, but not to jaxlib.
    """
    sources = b"".join(source.read_bytes() for source in _SOURCES)
    # The name depends on everything affecting the compiled code, so that a stale library is never loaded.
    digest = hashlib.sha256(sources + "\0".join((*_FLAGS, *key)).encode()).hexdigest()
    return f"product-{digest[:24]}.so"


@checked
def build(*, again: bool = False) -> Built:
    """Compiles the native library into the user's cache, unless this has been done before.

    All programs compiled later on then use it, whether in this process or others. Also available as
    `python -m quaxlike.kernels.native`.

    **Arguments:**

    - `again`: whether to recompile the library if it already exists. Defaults to `False`.

    **Returns:** a `Built`, with attributes `path`, `seconds` (taken to compile, or `None` if the library
    already existed) and `compiler`.

    **Raises:** `NativeError` if there is no C++ compiler, if compilation fails, or if other users can write
    to the cache.

    !!! example

        ```python
        from quaxlike.kernels import native

        try:
            print(native.build().path)
        except native.NativeError as error:
            print(error)
        ```
    """
    if sys.platform not in ("linux", "darwin"):
        raise NativeError(f"Native products are for Linux and macOS, not for {sys.platform}.")
    path, compiler = built_path(), _compiler()
    if path.is_file() and not again:
        _check_own(path.parent, path)
        return Built(path, None, shlex.join(compiler))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(path.parent)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as own:  # on the same filesystem, for `replace`
        out = Path(own) / path.name
        compile_to(out)
        out.chmod(0o700)  # `_check_own` refuses anything writable by others
        out.replace(path)
    # This process may already have cached that there is no library.
    library.cache_clear()
    return Built(path, time.perf_counter() - start, shlex.join(compiler))


def compile_to(out: Path) -> None:
    """Compiles the library to the given path.

    **Raises:** `NativeError` if there is no C++ compiler, or if compilation fails.
    """
    compiler = _compiler()
    units = [str(source) for source in _SOURCES if source.suffix == ".cc"]
    command = [*compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", *units, "-o", str(out)]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NativeError(f"{shlex.join(compiler)} could not be run: {error}") from error
    if run.returncode:
        told = "\n".join(run.stderr.splitlines()[:20])
        raise NativeError(f"The compiler failed ({shlex.join(command)}):\n{told}")


def prepare(tell: Callable[[str], None]) -> None:
    """Compiles the library on behalf of a command, if needed.

    This is the case on a CPU, with the library neither compiled nor installed as a wheel. Reports this using
    `tell`, or otherwise why it cannot be compiled.
    """
    wanted = os.environ.get("QUAXLIKE_NATIVE") != "0" and jax.default_backend() == "cpu"
    if not wanted or installed_path() is not None:
        return
    try:
        if not (path := built_path()).is_file() and _compiler():
            tell(f"Compiling native products for this machine, once: {path}")
        build()
    except NativeError as error:
        tell(f"Native products are not compiled, and others take longer: {error}")


def _compiler() -> list[str]:
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise NativeError(
        f"No C++ compiler was found. Install one ({', '.join(_COMPILERS)}), or name it in CXX; then run "
        f"{_COMMAND}."
    )


def _check_own(*paths: Path) -> None:
    """Raises a `NativeError` if any other user has write access to these paths."""
    if reason := _cache.why_not_own(*paths):
        raise NativeError(reason)
