"""Configures the C allocator so that compiled programs can reuse memory on CPUs."""

import ctypes
import sys

# Options for `mallopt`. These values are from glibc's `malloc.h`.
_OPTIONS = (
    (-8, 1),  # M_ARENA_MAX: only the main arena respects the next option
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD: -1 means to never return memory to the kernel
)


def keep_memory() -> None:
    """Makes the C library keep memory once it has been freed, so that later allocations can reuse it.

    On CPUs, XLA allocates temporaries every time that a program is called. By default, glibc returns this
    memory to the kernel in between, and the kernel must then zero every page before handing it out again.

    Importantly, you must call this before JAX computes anything, because each thread that allocates gets a
    separate arena. It also affects the whole process, which means that it should only be used by commands.
    For any C library other than glibc this has no effect.
    """
    if sys.platform != "linux" or (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    for option, value in _OPTIONS:
        mallopt(option, value)
