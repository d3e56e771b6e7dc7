"""File formats: checkpoints that other libraries write and read."""

from .errors import CheckpointError as CheckpointError
