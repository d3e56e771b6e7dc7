"""The abstract base class of mixers: attention, and other layers in which tokens read from earlier tokens."""

import abc
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
from jaxtyping import Array, Float

from .attention_blocks import Sight
from .decoder_config import DecoderConfig
from .layers import Hidden


class Context(NamedTuple):
    """Inputs shared by all layers of the same kind: rotary embedding, attention mask, and query factors."""

    rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]] | None
    sight: Sight
    factor: Float[Array, " tokens"] | None = None


_M = TypeVar("_M", bound="AbstractMemory")


class AbstractMemory(eqx.Module):
    """Abstract base class for the state of a mixer between calls, e.g. its key-value cache.

    If layers are scanned over, then the arrays are stacked over all layers, as they must be part of the
    scan's carry, and `layer` is the index into this stack. Otherwise, `layer` is None.
    """

    by_place: ClassVar[bool]
    """Whether the state is stored by position. If not, then the most recent tokens can't be overwritten."""

    @property
    @abc.abstractmethod
    def room(self) -> int:
        """The maximum number of tokens."""

    @abc.abstractmethod
    def grown(self: _M, more: int) -> _M:
        """Returns a copy with space for `more` additional tokens."""


class AbstractMixer(eqx.Module):
    """Abstract base class for mixers. Weights are loaded by name, so fields are named as in checkpoints."""

    role: ClassVar[str] = "linear_attn"
    """The field of the layer containing this mixer, unless renamed by `Family.parts`."""

    @abc.abstractmethod
    def __init__(self, config: DecoderConfig, key: Any) -> None: ...

    @abc.abstractmethod
    def __call__(self, x: Hidden, context: Context, memory: Any, start: Any) -> tuple[Hidden, Any]:
        """Mixes the tokens at position `start` onwards.

        Returns the output and the updated memory. If there is no memory then `x` must be a complete text.
        `context.sight` specifies padding and the boundaries between packed texts.
        """

    @classmethod
    @abc.abstractmethod
    def memory(cls, config: DecoderConfig, room: int, dtype: Any, cache: str | None) -> AbstractMemory:
        """Creates an empty memory. `cache` is as in `generate`."""
