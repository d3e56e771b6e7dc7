"""The memory that a process keeps between calls of a compiled program."""

import ctypes
import sys

# Options of mallopt by their numbers in glibc's malloc.h, and their values.
_OPTIONS = (
    (-8, 1),  # M_ARENA_MAX: other arenas map large arrays, whatever the next option says
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD: memory is never given back
)


def keep_memory() -> None:
    """Has the C library keep memory that is freed, for what is allocated next. Must be called before JAX
    computes: a thread that has allocated memory keeps an arena of its own.

    On CPUs, XLA allocates the temporary arrays of a program at each call. By default, glibc gives them back
    to the kernel after it, and the kernel clears each page again when it is next written. Only commands do
    this, which own their process. Other C libraries are left alone.
    """
    if sys.platform != "linux" or (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    for option, value in _OPTIONS:
        mallopt(option, value)
