"""Ctrl-C, and SIGTERM, as a request that a program takes at points of its own choice.

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
from collections.abc import Iterator, Sequence

_requested = 0  # the number of a signal


def interrupt_requested() -> int:
    """The number of the signal that asked for an interrupt since `interrupts_deferred` began; 0 if none
    did."""
    return _requested


def take_interrupt() -> None:
    """Raises `KeyboardInterrupt`, with the number of its signal, if one was requested."""
    if _requested:
        raise KeyboardInterrupt(_requested)


def status_of(error: KeyboardInterrupt) -> int:
    """The exit status of a process that an interrupt ended, as shells have it."""
    return 128 + (error.args[0] if error.args else signal.SIGINT)


@contextlib.contextmanager
def interrupts_deferred(
    last_words: object,
    *,
    patience: int = 1,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
) -> Iterator[None]:
    """Within this block, interrupts are raised by `take_interrupt` alone.

    **Arguments:**

    - `last_words`: its text is printed if the process ends without taking its interrupt.
    - `patience`: how many interrupts wait to be taken. The next one ends the process at once, with status
        130, or 143 after SIGTERM. Files must always be complete under their names, as after a kill.
        Default: 1.
    - `signals`: what is an interrupt. Default: Ctrl-C.

    Other threads than the main one cannot have handlers of signals; there, the block changes nothing.
    """
    global _requested
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: object) -> None:
        global _requested
        _requested = number

    # The handler above runs when the main thread is back in Python; this is told at once.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    watching = threading.Thread(target=_watch, args=(receiver, last_words, patience, {*signals}), daemon=True)
    watching.start()
    before = {number: signal.signal(number, request) for number in signals}
    told_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(told_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        sender.close()
        watching.join()
        receiver.close()
        _requested = 0


def _watch(receiver: socket.socket, last_words: object, patience: int, signals: set[int]) -> None:
    count = 0
    while number := receiver.recv(1):
        if number[0] not in signals:
            continue
        count += 1
        if count > patience:
            os.write(1, f"{last_words}\n".encode())
            os._exit(128 + number[0])
        print("Stops after this step. Press Ctrl-C again to stop at once.", file=sys.stderr, flush=True)
