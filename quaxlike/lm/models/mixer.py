"""The interface of a mixer: the part of a layer in which tokens read from earlier tokens, such as
attention."""

import abc
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
from jaxtyping import Array, Float

from .attention_blocks import Sight
from .decoder_config import DecoderConfig
from .layers import Hidden


class Context(NamedTuple):
    """The inputs that all layers of one kind share: rotary embedding, visible tokens, and query factors.

    Only `inputs` are a layer's own: its per-layer embedding of each token.
    """

    rotation: tuple[Float[Array, "tokens size"], Float[Array, "tokens size"]] | None
    sight: Sight
    factor: Float[Array, " tokens"] | None = None
    inputs: Float[Array, "tokens size"] | None = None


_M = TypeVar("_M", bound="AbstractMemory")


class AbstractMemory(eqx.Module):
    """The state that a mixer keeps between calls, such as the key-value cache.

    Under `scan_layers`, its arrays hold the state for all layers, because the scan must carry them. `layer`
    then selects one. Otherwise `layer` is None.
    """

    by_place: ClassVar[bool]
    """Whether tokens are stored by position. Only then can a caller go back and overwrite the last ones."""

    @property
    @abc.abstractmethod
    def room(self) -> int:
        """The maximal number of tokens."""

    @abc.abstractmethod
    def grown(self: _M, more: int) -> _M:
        """Returns a copy with room for `more` additional tokens."""


class AbstractMixer(eqx.Module):
    """A mixer module. Its fields have the checkpoint's names, since weights are loaded by name."""

    role: ClassVar[str] = "linear_attn"
    """The field of the layer that holds this mixer. `Family.parts` may rename it."""

    @abc.abstractmethod
    def __init__(self, config: DecoderConfig, key: Any) -> None: ...

    @abc.abstractmethod
    def __call__(self, x: Hidden, context: Context, memory: Any, start: Any) -> tuple[Hidden, Any]:
        """Mixes the tokens from position `start` on.

        Returns the output and the updated memory. Without a memory, `x` is a whole text, and the result is
        None or what later layers read. `context.sight` tells padding and the boundaries of packed texts.
        """

    @classmethod
    @abc.abstractmethod
    def memory(cls, config: DecoderConfig, room: int, dtype: Any, cache: str | None) -> AbstractMemory:
        """Makes an empty memory. `cache` is as for `generate`."""
