"""Settings of the C allocator, so compiled programs reuse memory on CPUs."""

import ctypes
import sys

# Options of mallopt (their numbers in glibc's malloc.h) and values.
_OPTIONS = (
    (-8, 1),  # M_ARENA_MAX: other arenas would ignore the next option
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD: never return memory to the kernel
)


def keep_memory() -> None:
    """Makes the C library keep freed memory for later allocations.

    On CPUs, XLA allocates the temporary arrays of a program at each call. By default, glibc returns them to
    the kernel afterwards, and the kernel has to clear each page again. Call this before JAX computes
    anything, as each thread that allocates gets its own arena. Only commands should do this, since it affects
    the whole process. Other C libraries are not affected.
    """
    if sys.platform != "linux" or (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    for option, value in _OPTIONS:
        mallopt(option, value)
