"""The parts of a mixer: the part of a layer in which tokens read those before them."""

import abc
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
from jaxtyping import Array, Float

from .attention_blocks import Sight
from .decoder_config import DecoderConfig
from .layers import Hidden


class Context(NamedTuple):
    """The inputs that layers of one kind share: rotations of heads, the tokens that are seen, and factors of
    queries."""

    rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]] | None
    sight: Sight
    factor: Float[Array, " tokens"] | None = None


_M = TypeVar("_M", bound="AbstractMemory")


class AbstractMemory(eqx.Module):
    """What a mixer keeps of the tokens that it has read.

    Those of scanned layers are arrays of all of them, which the scan carries: the field `layer` says then
    which one is meant, and is None otherwise.
    """

    by_place: ClassVar[bool]
    """Whether each token is kept at its place, so that others may replace it, and all that follow it."""

    @property
    @abc.abstractmethod
    def room(self) -> int:
        """For how many tokens it has room."""

    @abc.abstractmethod
    def grown(self: _M, more: int) -> _M:
        """The memory with room for so many tokens more."""


class AbstractMixer(eqx.Module):
    """A module whose parts have their names in the checkpoint. It is made with a configuration and a key."""

    role: ClassVar[str] = "linear_attn"
    """The name of the mixer in its layer, which `Family.parts` may change."""

    @abc.abstractmethod
    def __init__(self, config: DecoderConfig, key: Any) -> None: ...

    @abc.abstractmethod
    def __call__(self, x: Hidden, context: Context, memory: Any, start: Any) -> tuple[Hidden, Any]:
        """What the tokens from place `start` on take from each other, and the memory with them; without a
        memory, they are all tokens. `context.sight` says which of them are padding, and which belong to one
        text."""

    @classmethod
    @abc.abstractmethod
    def memory(cls, config: DecoderConfig, room: int, dtype: Any, cache: str | None) -> AbstractMemory:
        """An empty memory; `cache` is as for `generate`."""
