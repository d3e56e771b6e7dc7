"""Methods that classes written for eformer expect to inherit from their base class."""

from collections.abc import Callable
from typing import Any

import jax.core
import jax.tree_util as jtu


class PostInit:
    """A base class with an empty `__post_init__`, so that subclasses can call `super().__post_init__()`.

    We can't just put this on `ImplicitArray` itself, because then Equinox would warn about every subclass
    that has an `__init__`.
    """

    def __post_init__(self) -> None:
        pass


class AvalHook:
    """Makes the method `aval` usable as a property as well, so that `x.aval.shape` is the same as
    `x.aval().shape`.
    """

    def __init__(self, hook: Callable[[Any], jax.core.ShapedArray]) -> None:
        self.hook = hook

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.hook if instance is None else _Aval(self.hook, instance)


class _Aval:
    def __init__(self, hook: Callable[[Any], jax.core.ShapedArray], of: Any) -> None:
        self._hook = hook
        self._of = of

    def __call__(self) -> jax.core.ShapedArray:
        return self._hook(self._of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self(), name)

    def __repr__(self) -> str:
        return repr(self())


class Flattening:
    """The methods that are usually used to register a class as a pytree, for classes that are already
    pytrees.
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        paths, structure = jtu.tree_flatten_with_path(self, is_leaf=lambda x: x is not self)
        return [(path[0], part) for path, part in paths], structure

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return jtu.tree_flatten(self, is_leaf=lambda x: x is not self)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> Any:
        return jtu.tree_unflatten(aux_data, children)
