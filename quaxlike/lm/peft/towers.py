"""Support for loading just the decoder's part of an adapter for a multimodal model."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...files.errors import listed
from ..families import BESIDE_TEXT, IN_TOWER


class Tower(NamedTuple):
    """A file's prefixes for the body and the head of a decoder."""

    body: str
    head: str

    def name_in_file(self, name: str) -> str:
        """Converts a name for just the decoder to the corresponding name for a multimodal model."""
        if name.startswith("lm_head"):
            return self.head + name
        return self.body + name.removeprefix("model.")


def tower_in(file: Any) -> Tower | None:
    """Finds an adapter file's prefixes for the decoder. Returns None if the file is just for a decoder."""
    names = [name for held in _all_of(file) for name in held]
    heads = (name.partition("lm_head")[0] for name in names if "language_model.lm_head" in name)
    head = next(heads, "")
    found = (IN_TOWER.match(name) for name in names if "lm_head" not in name)
    body = next((match[0] for match in found if match), None)
    if body is not None:
        return Tower(body, head)
    return Tower(f"{head}model.", head) if head else None


def leave_out_other_parts(file: Any) -> None:
    """Removes any adapters for other parts of a multimodal model, with a warning if there are any.

    **Raises:** `CheckpointError` if this leaves no adapters.
    """
    left_out: dict[str, str] = {}  # name -> part
    count = 0
    for held in _all_of(file):
        others = {name: found[2] for name in held if (found := BESIDE_TEXT.match(name))}
        keys = [held.pop(name) for name in others]
        count += sum(1 if isinstance(own, str) else len(own) for own in keys)
        left_out |= others
    if not left_out:
        return
    parts = ", ".join(dict.fromkeys(left_out.values()))
    if not any(_all_of(file)):
        raise file.tensors.error(
            parts, "is all that this adapter is for; the model is the decoder alone, which has no such part"
        )
    warnings.warn(
        f"{file.tensors.path}: {count:,} tensors of {parts} are left out, since the model is the decoder "
        f"alone: {listed(left_out)}.",
        stacklevel=2,
    )


def _all_of(file: Any) -> Iterator[dict[str, Any]]:
    """Yields the file's contents as dicts, keyed by layer or array names."""
    yield file.adapters
    yield from (own for _, own in file.beside)
    yield file.trained
    yield file.bases
