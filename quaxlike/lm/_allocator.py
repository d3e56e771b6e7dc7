"""Configures the C allocator such that compiled programs reuse memory on CPUs."""

import ctypes
import sys

# Options for `mallopt`, using their values in glibc's `malloc.h`.
_OPTIONS = (
    (-8, 1),  # M_ARENA_MAX: only the main arena respects the next option
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD: never return memory to the kernel
)


def keep_memory() -> None:
    """Configures the C library to keep memory once it is freed, in order to reuse it for later allocations.

    On CPUs, XLA allocates a program's temporaries every time it is called. By default, glibc then returns
    this memory to the kernel, which must zero each page again before its next use. Call this function before
    JAX computes anything, since each thread that allocates gets a separate arena. It affects the whole
    process, and so should only be used by commands. There is no effect for C libraries other than glibc.
    """
    if sys.platform != "linux" or (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    for option, value in _OPTIONS:
        mallopt(option, value)
