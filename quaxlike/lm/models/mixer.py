"""The abstract base class for mixers, i.e. attention or any other layer in which tokens interact."""

import abc
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
from jaxtyping import Array, Float

from .attention_blocks import Sight
from .decoder_config import DecoderConfig
from .layers import Hidden


class Context(NamedTuple):
    """The inputs shared by all layers of a kind, e.g. the rotary embedding and the attention mask.

    Only `inputs` differs from layer to layer: each token's per-layer embedding.
    """

    rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]] | None
    sight: Sight
    factor: Float[Array, " tokens"] | None = None
    inputs: Float[Array, "tokens size"] | None = None


_M = TypeVar("_M", bound="AbstractMemory")


class AbstractMemory(eqx.Module):
    """Abstract base class for the state of a mixer between calls. For attention this is the KV cache.

    If layers are scanned over, then the arrays must be part of the scan's carry. They are therefore stacked
    over all layers, and `layer` is the index into the stack. Otherwise `layer` is None.
    """

    by_place: ClassVar[bool]
    """Whether the state is stored by position. If it isn't, then the most recent tokens can't be overwritten
    with different ones."""

    @property
    @abc.abstractmethod
    def room(self) -> int:
        """The maximum number of tokens."""

    @abc.abstractmethod
    def grown(self: _M, more: int) -> _M:
        """Returns a copy with space for `more` additional tokens."""


class AbstractMixer(eqx.Module):
    """Abstract base class for mixers. Weights are loaded by name, so name fields as in checkpoints."""

    role: ClassVar[str] = "linear_attn"
    """The name of the layer's field for this mixer, unless renamed by `Family.parts`."""

    @abc.abstractmethod
    def __init__(self, config: DecoderConfig, key: Any) -> None: ...

    @abc.abstractmethod
    def __call__(self, x: Hidden, context: Context, memory: Any, start: Any) -> tuple[Hidden, Any]:
        """Mixes the tokens at position `start` onwards.

        Returns the output along with the updated memory. Without a memory, `x` must be the complete text, and
        the second output is either None or a memory for later layers to read. Padding and the boundaries
        between packed texts are in `context.sight`.
        """

    @classmethod
    @abc.abstractmethod
    def memory(cls, config: DecoderConfig, room: int, dtype: Any, cache: str | None) -> AbstractMemory:
        """Creates an empty memory. `cache` is the argument of the same name in `generate`."""
