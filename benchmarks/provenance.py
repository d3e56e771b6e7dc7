"""The commit, packages and machine that figures come from; `None` for what cannot be found out."""

import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata


def commit() -> str | None:
    """Of the checkout, with `-dirty` if files differ from it."""
    return _first_line("git", "describe", "--always", "--abbrev=8", "--dirty", "--exclude=*")


def versions(packages: Sequence[str]) -> str:
    """Of Python and of those packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def driver() -> str | None:
    """Of the first NVIDIA GPU."""
    return _of_gpu("driver_version")


def clocks() -> str | None:
    """The most and the present ones of the first NVIDIA GPU, and how much power it may take."""
    most, now, memory, power = "clocks.max.sm", "clocks.sm", "clocks.mem", "power.limit"
    if (found := _of_gpu(most, now, memory, power)) is None:
        return None
    values = [value.strip() for value in found.split(",")]
    return "at most {}, now {}; memory {}; {}".format(*values)


def _of_gpu(*names: str) -> str | None:
    return _first_line("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None
