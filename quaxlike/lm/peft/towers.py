"""Files of adapters for models of which a decoder is a part, such as those that read images as well."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...files.errors import listed
from ..families import BESIDE_TEXT, IN_TOWER


class Tower(NamedTuple):
    """How the names of a decoder begin in a file: those of its body, and that of its head."""

    body: str
    head: str

    def name_in_file(self, name: str) -> str:
        """The name of an array or a layer, by that in a file of the decoder alone."""
        if name.startswith("lm_head"):
            return self.head + name
        return self.body + name.removeprefix("model.")


def tower_in(file: Any) -> Tower | None:
    """How the names of the decoder begin in the file of an adapter; None if it is of a decoder alone."""
    names = [name for held in _all_of(file) for name in held]
    heads = (name.partition("lm_head")[0] for name in names if "language_model.lm_head" in name)
    head = next(heads, "")
    found = (IN_TOWER.match(name) for name in names if "lm_head" not in name)
    body = next((match[0] for match in found if match), None)
    if body is not None:
        return Tower(body, head)
    return Tower(f"{head}model.", head) if head else None


def leave_out_other_parts(file: Any) -> None:
    """Takes what is of the parts beside the decoder out of the file of an adapter, and warns of it.

    **Raises:** `CheckpointError` if nothing is left.
    """
    left_out: dict[str, str] = {}  # the name, and that of the part
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
    """What the file holds, by the names of layers or arrays."""
    yield file.adapters
    yield from (own for _, own in file.beside)
    yield file.trained
    yield file.bases
