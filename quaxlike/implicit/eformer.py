"""Methods expected from the base class by classes written for eformer."""

from collections.abc import Callable
from typing import Any

import jax.core
import jax.tree_util as jtu


class PostInit:
    """A base class with an empty `__post_init__`, so subclasses can call `super().__post_init__()`.

    This can't just go on `ImplicitArray` itself: Equinox would then warn about every subclass with an
    `__init__`.
    """

    def __post_init__(self) -> None:
        pass


class AvalHook:
    """Makes the method `aval` usable as a property as well: `x.aval.shape` is `x.aval().shape`."""

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
    """The methods usually used to register a pytree, for classes that are already pytrees."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        paths, structure = jtu.tree_flatten_with_path(self, is_leaf=lambda x: x is not self)
        return [(path[0], part) for path, part in paths], structure

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return jtu.tree_flatten(self, is_leaf=lambda x: x is not self)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Any) -> Any:
        return jtu.tree_unflatten(aux_data, children)
