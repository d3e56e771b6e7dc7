"""What a run has saved, for its last message."""

import dataclasses
from pathlib import Path

CHECKPOINT = "checkpoint.safetensors"


@dataclasses.dataclass
class Saved:
    """The newest checkpoint of a run. `str` says what happened to an interrupted run."""

    output: Path
    step: int | None = None
    """The checkpoint's step, 0 if there is none; None until the run has looked for it."""
    here: bool = True
    """Whether this process saves."""

    def __str__(self) -> str:
        if not self.here:
            return "Stopped."
        file = self.output / CHECKPOINT
        if self.step:
            return (
                f"Stopped. The same command resumes from the last checkpoint, after step {self.step}: {file}"
            )
        if self.step is None and file.exists():  # possibly from other settings
            return f"Stopped before the run began; {file} is as it was."
        return "Stopped. Nothing was saved yet: the same command begins with the first step."
