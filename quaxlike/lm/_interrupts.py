"""Ctrl-C and SIGTERM, handled at points that the program chooses.

By default, Python raises `KeyboardInterrupt` anywhere. Inside a conversion by NumPy it turns into another
error. Inside a callback or destructor it is only printed. While the program waits for a device or a compiler,
it is not raised at all.
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
    """Returns the number of the pending signal; 0 if there is none."""
    return _requested


def take_interrupt() -> None:
    """Raises `KeyboardInterrupt` if a signal is pending, with its number."""
    if _requested:
        raise KeyboardInterrupt(_requested)


def status_of(error: KeyboardInterrupt) -> int:
    """Returns the exit status after an interrupt, as in shells."""
    return 128 + (error.args[0] if error.args else signal.SIGINT)


@contextlib.contextmanager
def interrupts_deferred(
    last_words: object,
    *,
    patience: int = 1,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
) -> Iterator[None]:
    """Within this block, only `take_interrupt` raises interrupts.

    **Arguments:**

    - `last_words`: printed (as `str`) if the process ends before `take_interrupt` is called.
    - `patience`: how many interrupts can be pending. The next one ends the process at once, with status 130,
        or 143 after SIGTERM. Hence files must be written atomically, as for a kill. Default: 1.
    - `signals`: the signals to handle. Default: Ctrl-C.

    Only the main thread can handle signals. In other threads, this has no effect.
    """
    global _requested
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: object) -> None:
        global _requested
        _requested = number

    # The handler above only runs when the main thread is back in Python. The thread below notices at once.
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
