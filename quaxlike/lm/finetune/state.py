"""Checkpoints of a run. Using the same command again resumes the run from these."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._files import lock_folder, naming, replacing
from ..._version import __version__
from ...arrays.adapted import without_numbers
from ...core.values import is_value
from ...files import safetensors
from ...files.json_text import read_json_file
from ...surgery.trees import path_of
from .options import options
from .settings import FinetuneError, Settings

CHECKPOINT = "checkpoint.safetensors"
_WRITER = "quaxlike"  # the entry of `run.json` for the version that wrote it


@dataclasses.dataclass
class Saved:
    """The newest checkpoint of a run. Its `str` is the message if the run is interrupted."""

    output: Path
    step: int | None = None
    """The step of this checkpoint. 0 if there isn't one, and None if the run hasn't checked yet."""
    here: bool = True
    """Whether this process saves the checkpoints."""

    def __str__(self) -> str:
        if not self.here:
            return "Stopped."
        file = self.output / CHECKPOINT
        if self.step:
            return (
                f"Stopped. The same command resumes from the last checkpoint, after step {self.step}: {file}"
            )
        if self.step is None and file.exists():  # for all we know, this is from a run with other settings
            return f"Stopped before the run began; {file} is as it was."
        return "Stopped. Nothing was saved yet: the same command begins with the first step."


class RunDirectory:
    """The directory of a run.

    This contains `run.json` (the settings), `checkpoint.safetensors` (the most recent state), `log.jsonl`
    (one line per step), and once the run is complete the adapter. The directory is locked until `close`.

    **Raises:** `FinetuneError` if the directory has a run with different settings, a run still active in
    another process, or an adapter not written by a run.
    """

    def __init__(self, settings: Settings, saved: Saved | None = None) -> None:
        self.path = settings.run.output
        self.saved = Saved(self.path) if saved is None else saved
        self.checkpoint = self.path / CHECKPOINT
        self.log = self.path / "log.jsonl"
        about, fingerprint = self.path / "run.json", settings.fingerprint()
        for adapter in (self.path / name for name in ("adapter_config.json", "adapters.safetensors")):
            if adapter.exists() and not about.exists():
                raise FinetuneError(f"There is an adapter already, {adapter}. Choose another --output.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path)
        if self._lock is None:
            raise FinetuneError(f"Another run is active in {self.path}. Choose another --output.")
        try:
            if about.exists():
                _compare(about, read_json_file(about, "the settings of the run"), fingerprint)
            else:
                with replacing(about) as file:
                    file.write(json.dumps({_WRITER: __version__, **fingerprint}, indent=2).encode())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def save(self, step: int, state: PyTree) -> None:
        """Writes a checkpoint, replacing the previous one atomically."""
        safetensors.save(self.checkpoint, _named(step, state))
        self.saved.step = step

    def restore(self, state: PyTree) -> tuple[int, PyTree]:
        """Returns the step and the state in the checkpoint, or 0 and `state` itself if there is none.

        Later steps will be repeated, so they are removed from the log.
        """
        step, named = 0, _named(0, state)
        if self.checkpoint.exists():
            named = safetensors.load(self.checkpoint, like=named)
            step = int(named.pop("step"))
            bare = _bare(state)
            leaves = [named[path_of(path)] for path, _ in jtu.tree_leaves_with_path(bare)]
            state = eqx.combine(jtu.tree_unflatten(jtu.tree_structure(bare), leaves), state)
        self._write([entry for entry in self.entries() if entry["step"] <= step])
        self.saved.step = step
        return step, state

    def note(self, **entry: Any) -> None:
        with naming(self.log), open(self.log, "ab") as file:
            file.write(_line(entry))

    def amend(self, step: int, **entry: Any) -> None:
        """Adds entries to the line for an already logged step."""
        self._write([x | entry if x["step"] == step else x for x in self.entries()])

    def _write(self, entries: list[dict[str, Any]]) -> None:
        with replacing(self.log) as file:
            file.writelines(_line(entry) for entry in entries)

    def entries(self) -> list[dict[str, Any]]:
        """Reads the log, ignoring an incomplete last line. (The run may have been killed.)"""
        if not self.log.exists():
            return []
        lines = self.log.read_bytes().splitlines(keepends=True)
        entries: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or type(entry.get("step")) is not int:
                raise FinetuneError(
                    f"{self.log}:{number}: expected an object with the number of a step; "
                    f"found {line[:60]!r}. Remove the line, or the file, to continue."
                )
            entries.append(entry)
        return entries


def _named(step: int, state: PyTree) -> dict[str, Any]:
    named = {path_of(path): leaf for path, leaf in jtu.tree_leaves_with_path(_bare(state))}
    return {"step": jnp.asarray(step, jnp.int32)} | named


def _bare(state: PyTree) -> PyTree:
    """Returns the state without anything determined by the settings, and so not worth saving."""
    return jtu.tree_map(without_numbers, state, is_leaf=is_value)


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _compare(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    writer = str(found.pop(_WRITER, "unknown"))[:40]
    names = {option.name for option in options()}
    known = {*names, *(f"sha256 of {name}" for name in names), *wanted}
    if later := sorted(found.keys() - known):
        raise FinetuneError(
            f"{path} is from a run of quaxlike {writer}, with settings that this quaxlike {__version__} does "
            f"not know: {', '.join(later)[:200]}. Install quaxlike>={writer} to resume it, or choose another "
            "--output."
        )
    # Earlier versions without some setting behaved as though it had its default value.
    defaults = {option.name: option.default for option in options()}
    found = {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items() if k in wanted} | found
    differing = [
        f"{name} {found.get(name)!r} (now {value!r})"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differing:
        raise FinetuneError(
            f"{path} is from a run with {', '.join(differing)}. Use its options to resume it, or choose "
            "another --output."
        )
