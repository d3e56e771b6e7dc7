"""Ctrl-C as a request that a program takes at points of its own choice.

Python raises `KeyboardInterrupt` wherever the program happens to be. Inside a conversion by NumPy it becomes
another error, inside a callback or destructor it is printed and forgotten. And while the program waits for a
device or a compiler, nothing is raised at all.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

_requested = False


def take_interrupt() -> None:
    """Raises `KeyboardInterrupt` if one was requested since `interrupts_deferred` began."""
    if _requested:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_deferred(last_words: str, *, patience: int = 1) -> Iterator[None]:
    """Within this block, interrupts are raised by `take_interrupt` alone.

    **Arguments:**

    - `last_words`: printed if the process ends without taking its interrupt.
    - `patience`: how many interrupts wait to be taken. The next one ends the process at once, with status
        130. Files must always be complete under their names, as after a kill. Default: 1.

    Other threads than the main one cannot have handlers of signals; there, the block changes nothing.
    """
    global _requested
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: object) -> None:
        global _requested
        _requested = True

    # The handler above runs when the main thread is back in Python; this is told at once.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    watching = threading.Thread(target=_watch, args=(receiver, last_words, patience), daemon=True)
    watching.start()
    before = signal.signal(signal.SIGINT, request)
    told_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(told_before)
        signal.signal(signal.SIGINT, before)
        sender.close()
        watching.join()
        receiver.close()
        _requested = False


def _watch(receiver: socket.socket, last_words: str, patience: int) -> None:
    count = 0
    while number := receiver.recv(1):
        if number[0] != signal.SIGINT:
            continue
        count += 1
        if count > patience:
            os.write(1, f"{last_words}\n".encode())
            os._exit(130)
        print("Stops after this step. Press Ctrl-C again to stop at once.", file=sys.stderr, flush=True)
