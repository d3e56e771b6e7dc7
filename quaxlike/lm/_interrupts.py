"""Handles Ctrl-C and SIGTERM, but only at points chosen by the program.

By default, Python can raise `KeyboardInterrupt` anywhere. Inside a NumPy conversion it turns into some other
error. Inside a callback or a destructor it is printed and then ignored. And whilst waiting for a device or
for compilation, it isn't raised at all.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

_requested = 0  # the number of the pending signal


def interrupt_requested() -> int:
    """Returns the number of the pending signal, or 0 if there is none."""
    return _requested


def take_interrupt() -> None:
    """Raises `KeyboardInterrupt` if a signal is pending, with the signal's number as its argument."""
    if _requested:
        raise KeyboardInterrupt(_requested)


def status_of(error: KeyboardInterrupt) -> int:
    """Returns the exit status for an interrupt, by the same convention as shells."""
    return 128 + (error.args[0] if error.args else signal.SIGINT)


@contextlib.contextmanager
def interrupts_deferred(
    last_words: object,
    *,
    patience: int = 1,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
) -> Iterator[None]:
    """A context manager inside which interrupts are only raised by `take_interrupt`.

    **Arguments:**

    - `last_words`: printed (using `str`) if the process is terminated before `take_interrupt` is called.
    - `patience`: the maximum number of pending interrupts. Any further one terminates the process immediately
        with status 130, or 143 for SIGTERM, so you should write files atomically. Default: 1.
    - `signals`: the signals to handle. Default: Ctrl-C.

    Note that this does nothing outside the main thread: other threads can't handle signals.
    """
    global _requested
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: object) -> None:
        global _requested
        _requested = number

    # Python only runs the handler above once the main thread is back in the interpreter, and this can take a
    # long time. A separate thread is notified immediately.
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
