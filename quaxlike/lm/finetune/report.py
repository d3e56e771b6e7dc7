"""Reports progress and metrics during a run."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..._files import naming
from .train import TrainingStep


def console_on(file: Any = None) -> Console:
    """Creates a console. Long lines are only wrapped if it's a terminal, and not e.g. a file."""
    console = Console(file=file)
    console.soft_wrap = not console.is_terminal
    return console


def shown(run: Iterator[TrainingStep], console: Console, first: int, steps: int) -> Iterator[TrainingStep]:
    progress = Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeRemainingColumn(), TextColumn("left"), console=console,
    )  # fmt: skip
    with progress:
        bar = progress.add_task("", total=steps, completed=first)
        for step in run:
            yield step
            description = f"loss {step.loss:.4f}  {step.tokens / step.seconds:,.0f} tokens/s"
            progress.update(bar, completed=step.number, description=description)


class Metrics:
    """Writes metrics as JSON lines (appending if a run is resumed), and optionally for TensorBoard."""

    def __init__(self, directory: Path, tensorboard: bool) -> None:
        self._lines = directory / "metrics.jsonl"
        if self._lines.exists():  # if the run was killed then the last line may be incomplete
            with open(self._lines, "rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._events = TensorBoard(directory) if tensorboard else None

    def note(self, step: int, **entry: Any) -> None:
        """Appends a line. For TensorBoard, nested entries become scalars such as `held_out/loss`."""
        with naming(self._lines), open(self._lines, "a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **entry}) + "\n")
        if self._events is not None:
            flat: dict[str, float] = {}
            for name, value in entry.items():
                parts = value.items() if isinstance(value, dict) else [("", value)]
                flat |= {f"{name}/{part}".rstrip("/"): x for part, x in parts if x is not None}
            self._events.write(step, flat)


class TensorBoard:
    """Writes scalars to a new event file: a sequence of `tensorflow.Event`s in `TFRecord`s.

    TensorFlow defines this format in `core/util/event.proto`, `core/framework/summary.proto` and
    `lib/io/record_writer.h`. (It is simple enough not to need TensorFlow itself.)
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"events.out.tfevents.{time.time_ns() // 10**6:013d}.quaxlike"
        self._append(_field(3, b"brain.Event:2"))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [_field(1, _field(1, tag.encode()) + _field(2, float(x))) for tag, x in scalars.items()]
        self._append(_field(2, step) + _field(5, b"".join(values)))

    def _append(self, event: bytes) -> None:
        # Unlike all other non-integer fields, this one is a double.
        data = b"\x09" + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(data))
        with naming(self._path), open(self._path, "ab") as file:
            file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _field(number: int, value: int | float | bytes) -> bytes:
    """Encodes one field of a protocol buffer: an integer, a float or bytes."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3]) + _varint(value)
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def _masked_crc(data: bytes) -> bytes:
    """Computes a CRC-32C (Castagnoli) checksum. `TFRecord` requires these to be masked."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
