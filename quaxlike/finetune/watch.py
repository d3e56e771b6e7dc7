"""A watch over other processes: if one is gone, the others end instead of waiting for it."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: A process is considered gone after this many seconds without a sign of life.
SILENCE = 20.0
_BEAT = 1.0


class Watch:
    """Writes signs of life to a shared folder, and reads those of the other processes.

    If a process gives none for `SILENCE` seconds, or has failed, this process prints which one, and exits
    with status 1: a program that runs on many devices could not continue, and would wait for ever. If the
    coordinator is gone, JAX aborts the others at once, which then wait until they have printed this.

    **Arguments:**

    - `folder`: the folder, with one file per process.
    - `process`, `count`: the number of this process, and the number of processes.
    - `silence`: the limit, in seconds.
    """

    def __init__(self, folder: Path, process: int, count: int, *, silence: float = SILENCE) -> None:
        self._folder, self._process, self._count, self._silence = folder, process, count, silence
        self._over = threading.Event()
        self._old: list[str] = []
        self._default: Any = None
        self._thread = threading.Thread(target=self._run, name="quaxlike watch", daemon=True)

    def __enter__(self) -> "Watch":
        if self._count > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(f"{time.time_ns()} {socket.gethostname()} {os.getpid()}")
            # Existing signs are from an earlier run.
            self._old = [self._read(other) for other in range(self._count)]
            self._thread.start()
            self._default = _on_abort(self._aborted)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._count == 1:
            return
        if error is None:
            self._stop("done")
            return
        if isinstance(error, RuntimeError):
            # Probably because another process is gone; wait for the watch to report it.
            self._thread.join(self._silence + 10 * _BEAT)
        interrupted = isinstance(error, KeyboardInterrupt)
        why = "was interrupted" if interrupted else f"failed: {error}"
        print(f"Process {self._process} of {self._count} {why}", file=sys.stderr, flush=True)
        self._stop("failed")
        os._exit(130 if interrupted else 1)  # JAX would wait for the others at exit

    def _aborted(self, number: int) -> None:
        """Runs in the aborting thread, which is JAX's; if it returns, the abort goes ahead."""
        if not self._over.is_set():
            self._thread.join(self._silence + 10 * _BEAT)

    def _stop(self, word: str) -> None:
        self._over.set()
        _on_abort(self._default)
        self._thread.join()
        self._write(f"{word} {time.time_ns()}")

    def _run(self) -> None:
        start = time.monotonic()
        seen = {other: (sign, start) for other, sign in enumerate(self._old)}
        names: dict[int, str] = {}
        while not self._over.wait(_BEAT):
            self._write(f"{time.time_ns()} {socket.gethostname()} {os.getpid()}")
            now = time.monotonic()
            for other in range(self._count):
                if other == self._process:
                    continue
                sign = self._read(other)
                fresh = sign != self._old[other]
                if fresh and sign.startswith("done"):
                    continue
                before, since = seen[other]
                if sign != before:
                    since = now
                seen[other] = sign, since
                if fresh and len(parts := sign.split()) == 3:
                    names[other] = f" (on {parts[1]}, process {parts[2]} there)"
                failed = fresh and sign.startswith("failed")
                if failed or now - since > self._silence:
                    self._end(other, names.get(other, ""), failed)

    def _end(self, other: int, name: str, failed: bool) -> None:
        why = "has failed" if failed else f"has given no sign for {self._silence:.0f} s"
        print(
            f"Process {other} of {self._count}{name} {why}; process {self._process} ends. Start all of them "
            "again with the same commands: they resume from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _write(self, sign: str) -> None:
        path = self._folder / f"{self._process}"
        beside = path.with_suffix(".new")
        beside.write_text(sign)
        beside.replace(path)

    def _read(self, other: int) -> str:
        try:
            return (self._folder / f"{other}").read_text()
        except OSError:
            return ""


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


def _on_abort(handler: Any) -> Any:
    """Registers `handler` with C for aborts of the process, since Python's own handlers run too late. Returns
    the previous handler; None on systems without them."""
    if os.name != "posix":
        return None
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    if callable(handler):
        handler = _Handler(handler)
        _kept.append(handler)  # C holds no reference
    return set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


_kept: list[Any] = []
