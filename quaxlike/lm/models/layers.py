"""Small building blocks shared by several models."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from ...core.quaxify import value_of
from ...core.values import is_value
from ...kernels.dense_matmul import dense_matmul
from ...sharding.meshes import rows_of
from ..families import FAMILIES
from .decoder_config import DecoderConfig

Ids = Int[Array, " tokens"]
Seen = Bool[Array, " tokens"]
Hidden = Float[Array, "tokens hidden"]


def seen_of(ids: Ids, seen: Seen | None) -> Seen:
    """Returns `seen`, which defaults to True for every token.

    **Raises:** `ValueError` if `ids` isn't a single text.
    """
    if ids.ndim != 1:
        raise ValueError(
            f"`ids` must be the tokens of one text, of shape (tokens,); found {ids.shape}. For several, use "
            "`jax.vmap(model)`."
        )
    return jnp.ones_like(ids, bool) if seen is None else seen


class Part(eqx.Module):
    """A module of a decoder, with submodules named as in the checkpoint.

    Subclasses list the roles of their submodules using Llama's names. They then get a field for every name
    used for one of these roles by any architecture in the table. Unused fields are just None. (If an
    architecture added to the table later on uses other names, then this dynamically creates a subclass with
    fields for them.)
    """

    config: DecoderConfig = eqx.field(static=True)

    def __init_subclass__(cls, roles: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        tables = [{}, *(family.parts for family in FAMILIES.values())]
        names = [table.get(role, role) for table in tables for role in roles.split()]
        cls.__annotations__ = inspect.get_annotations(cls) | dict.fromkeys(names, Any)

    def _fill(self, config: DecoderConfig, **parts: Any) -> None:
        names = {config.family.name(role): part for role, part in parts.items()}
        fields = {field.name for field in dataclasses.fields(self)}
        if new := tuple(name for name in names if name not in fields):
            object.__setattr__(self, "__class__", _with_fields(type(self), new))
        for field in dataclasses.fields(self):
            setattr(self, field.name, names.get(field.name))
        self.config = config

    def part(self, role: str) -> Any:
        """Returns the submodule with this role, whatever its name."""
        return getattr(self, self.config.family.name(role))

    def normed(self, name: str, x: Array) -> Array:
        """Applies the norm called `name`. This is the identity function if the name is empty."""
        if not name:
            return x
        norm = self.part(name)
        if offset := self.config.family.norm_offset:
            norm = eqx.tree_at(lambda norm: norm.weight, norm, norm.weight + offset)
        return each(norm, x)


@functools.cache
def _with_fields(cls: type[Part], names: tuple[str, ...]) -> type[Part]:
    """Creates a subclass with the same name and additional fields.

    Only fields are part of the PyTree, so just setting an attribute isn't enough.
    """
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    namespace["__annotations__"] = dict.fromkeys(names, Any)
    return types.new_class(cls.__name__, (cls,), exec_body=lambda own: own.update(namespace))


class Conv1D(eqx.Module):
    """A linear layer with a weight of shape (in, out), as in GPT-2. (PEFT calls this `fan_in_fan_out`.)"""

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    weight_layouts: ClassVar = {"weight": "io"}

    def __init__(self, n_in: int, n_out: int, use_bias: bool = True, *, key: Any) -> None:
        self.weight = 0.02 * jax.random.normal(key, (n_in, n_out))
        self.bias = jnp.zeros(n_out)

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        return x @ self.weight + self.bias


def linears(
    config: DecoderConfig, n_in: int, sizes: Mapping[str, int], bias: bool, key: Any
) -> dict[str, Any]:
    """Creates several linear layers. `sizes` maps each role to its number of output features."""
    make = Conv1D if config.family.conv1d else eqx.nn.Linear
    keys = jax.random.split(key, len(sizes))
    return {role: make(n_in, n, bias, key=k) for (role, n), k in zip(sizes.items(), keys, strict=True)}


def norm(config: DecoderConfig, size: int) -> Any:
    if config.family.layer_norm:
        return eqx.nn.LayerNorm(size, eps=config.rms_norm_eps)
    return eqx.nn.RMSNorm(size, eps=config.rms_norm_eps, use_bias=False)


def normalised(x: Float[Array, "*batch size"], eps: float | int) -> Float[Array, "*batch size"]:
    """Applies RMS norm without a weight."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def each(layer: Any, x: Shaped[Array, "tokens *in"]) -> Float[Array, "tokens out"]:
    """Applies a layer to each token."""
    if isinstance(layer, eqx.nn.Embedding):
        return rows_of(layer, x)
    if not isinstance(layer, eqx.nn.Linear) or has_values(layer.weight, x):
        # JAX names the function using `repr`: slow for a whole module, so use a lambda.
        return jax.vmap(lambda x: layer(x))(x)
    y = dense_matmul(x, layer.weight)
    return y if layer.bias is None else jax.vmap(lambda y: y + layer.bias)(y)


def times_rows(x: Float[Array, "tokens in"], w: Any) -> Float[Array, "tokens out"]:
    """Computes `x @ w.T` for any type of weight, using the fastest CPU product for plain arrays."""
    return x @ w.T if has_values(x, w) else dense_matmul(x, w)


def has_values(*arrays: Any) -> bool:
    """Returns whether any of `arrays` is a Value, or inside `quaxify` the tracer for one."""
    return any(is_value(value_of(x)) for x in arrays)
