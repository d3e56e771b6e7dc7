"""`KeyArray`: keys for a pseudo-random number generator.

JAX's own keys have an extended dtype, unsupported by `np.save`, weight averaging and many checkpointers. Here
the leaves are plain words instead, and the generator's name is static.
"""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..._arrays import as_array
from ..._checked import checked
from ...core.operators import ArrayOperators
from ...core.rules import register
from ...core.values import ArrayValue
from ...primitives.classes import REARRANGEMENTS
from .philox import philox4x32

_IMPLEMENTATIONS: dict[str, Any] = {"philox4x32": philox4x32}
_NAMES = ("threefry2x32", "rbg", "unsafe_rbg", *_IMPLEMENTATIONS)


class KeyArray(ArrayOperators, ArrayValue):
    """Keys for a pseudo-random number generator, stored as plain words.

    Under [`quaxlike.quaxify`][] these are accepted as keys by `jax.random`. Unlike with JAX's own keys, any
    code operating on leaves (checkpointing, weight averaging, `np.save`) only encounters uint32 arrays.

    Pass them as arguments to the quaxified function. `jax.random` only recognises JAX's own arrays, so if the
    function closes over a `KeyArray` or creates one, use `to_jax`.

    **Arguments:**

    - `data`: the words, uint32 with shape `(*shape, words)`: 2 for Threefry and Philox, 4 for RBG.
    - `impl`: the generator: "threefry2x32" (default), "rbg", "unsafe_rbg" or "philox4x32".

    !!! example

        ```python
        import jax, quaxlike as ql
        from quaxlike.arrays import prng

        a, b = ql.quaxify(jax.random.split)(prng.key(0, "philox4x32"))
        ql.quaxify(jax.random.normal)(a, (3,))
        ```
    """

    data: jax.Array = eqx.field(converter=as_array)
    impl: str = eqx.field(static=True, default="threefry2x32")

    def __check_init__(self) -> None:
        if not isinstance(self.impl, str):
            raise TypeError(f"`impl` must be the name of a generator; found {self.impl!r}.")
        _implementation(self.impl)
        _, words = _like(self.impl)
        if self.data.dtype != jnp.uint32 or self.data.shape[-1:] != (words,):
            raise ValueError(
                f"KeyArray of {self.impl} takes uint32 data of shape (*shape, {words}); found "
                f"{self.data.dtype} of shape {self.data.shape}."
            )

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.data.shape[:-1], _like(self.impl)[0])

    def materialise(self) -> jax.Array:
        return self.to_jax()

    def to_jax(self) -> jax.Array:
        """Converts to JAX's own keys."""
        return jax.random.wrap_key_data(self.data, impl=_implementation(self.impl))

    @classmethod
    def from_jax(cls, key: jax.Array) -> "KeyArray":
        """Converts JAX's own keys, as created by `jax.random.key` or `jax.random.split`.

        **Raises:**

        `ValueError` if the keys are for a different generator.
        """
        for name in _NAMES:
            if key.dtype == _like(name)[0]:
                return cls(jax.random.key_data(key), name)
        raise ValueError(
            f"KeyArray.from_jax takes a key of threefry2x32, rbg, unsafe_rbg or philox4x32; found "
            f"{key.dtype}."
        )

    @classmethod
    def promote(cls, array: Any, like: Any) -> "KeyArray":
        return cls(jax.random.key_data(array), like.impl)

    def leading_axis(self) -> Any:
        return [0] if self.data.ndim > 1 else NotImplemented

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P]:
        return [jax.P(*spec, *[None] * (self.data.ndim - len(spec)))]


def _implementation(name: str) -> Any:
    if name not in _NAMES:
        raise ValueError(f"`impl` must be {', '.join(_NAMES[:-1])} or {_NAMES[-1]}; found {name!r}.")
    return _IMPLEMENTATIONS.get(name, name)


@functools.cache
def _like(impl: str) -> tuple[Any, int]:
    """Returns the JAX dtype for this generator's keys, and the number of words per key."""

    def make() -> Any:
        return jax.random.key(0, impl=_implementation(impl))

    words = jax.eval_shape(lambda: jax.random.key_data(make()))
    return jax.eval_shape(make).dtype, words.shape[-1]


@checked
def key(seed: ArrayLike, impl: str = "threefry2x32") -> KeyArray:
    """Creates a key from a seed.

    This is like `jax.random.key`, but returns a [`quaxlike.arrays.prng.KeyArray`][].

    **Arguments:**

    - `seed`: an integer.
    - `impl`: the generator. Default: "threefry2x32".
    """
    if not jnp.issubdtype(jnp.result_type(seed), jnp.integer):
        raise TypeError(f"`seed` must be a whole number; found {seed!r}.")
    return KeyArray.from_jax(jax.random.key(seed, impl=_implementation(impl)))


@register(["random_bits", "random_gamma"])
def _numbers(primitive: Primitive, x: KeyArray, *rest: ArrayLike, **params: Any):
    return primitive.bind(x.to_jax(), *rest, **params)


@register("random_unwrap")
def _random_unwrap(x: KeyArray, **params: Any):
    return x.data


@register([*REARRANGEMENTS, "dynamic_slice", "gather", "random_split", "random_fold_in", "random_clone"])
def _keys_of_keys(primitive: Primitive, x: KeyArray, *rest: ArrayLike, **params: Any):
    out = primitive.bind(x.to_jax(), *rest, **params)
    return [*map(KeyArray.from_jax, out)] if primitive.multiple_results else KeyArray.from_jax(out)


@register(["concatenate", "stack"])
def _joined(primitive: Primitive, x: KeyArray, *rest: KeyArray, **params: Any):
    # Keys for different generators can't be stored in a single array.
    if any(y.impl != x.impl for y in rest):
        return NotImplemented
    return KeyArray.from_jax(primitive.bind(*(y.to_jax() for y in (x, *rest)), **params))
