"""Notes for `explain` about the backends of the kernels that rules call."""

from collections.abc import Callable

from ..core.recording import active, note
from ..kernels.backends import Choice, listeners


def _tell(name: str, choose: Callable[[], Choice]) -> None:
    if active() is not None:
        choice = choose()
        note(f"{name} on {choice.backend}: {choice.reason}")


listeners.append(_tell)
