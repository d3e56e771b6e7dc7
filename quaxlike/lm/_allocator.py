"""Configures the C allocator so that compiled programs can reuse memory on CPUs."""

import ctypes
import sys

# Options for `mallopt`, from glibc's `malloc.h`.
_OPTIONS = (
    (-8, 1),  # M_ARENA_MAX: only the main arena respects the next option
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD: -1 means to never return memory to the kernel
)


def keep_memory() -> None:
    """Makes the C library keep freed memory, so that later allocations can reuse it.

    On CPUs, XLA allocates temporaries every time a program is called. By default, glibc returns this memory
    to the kernel in between, and the kernel must then zero every page before handing it out again.

    You must call this before JAX computes anything: each allocating thread gets a separate arena. It affects
    the whole process, so only commands should use it. It does nothing for C libraries other than glibc.
    """
    if sys.platform != "linux" or (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    for option, value in _OPTIONS:
        mallopt(option, value)
