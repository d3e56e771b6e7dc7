"""`gradients`: whether a part frozen by default receives gradients, and whether it's trained.

The possible values are ordered. Always keep the stronger when combining two arrays: otherwise we may freeze
something the user is training.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import equinox as eqx

from .._deprecated import warn
from ..core.operators import ArrayOperators
from ..core.values import ArrayValue

Gradients = Literal["none", "pass", "train"]
_ORDER: tuple[Gradients, ...] = get_args(Gradients)


def strongest(*marks: Gradients) -> Gradients:
    """Returns the strongest of these values. Use this whenever arrays are combined."""
    return max(marks, key=_ORDER.index)


def trained_if(train: bool) -> Gradients:
    """Returns the value for a trained or frozen part."""
    return "train" if train else "none"


class _TakesSwitches(type(ArrayValue)):
    """Lets constructors (and so `dataclasses.replace`) accept the old field names until 0.3."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **cls.with_switches(kwargs))


class GradientsArray(ArrayOperators, ArrayValue, metaclass=_TakesSwitches):
    """An array with a part frozen by default, such as an adapter's base, or block scales.

    Version 0.1 had two boolean fields instead of `gradients`, which still occur in its files and pickles.
    """

    gradients: eqx.AbstractVar[Gradients]
    """`"none"`: this part is treated as a constant in differentiation. `"pass"`: gradients are propagated
    through it, but it isn't trained. `"train"`: it is trained.
    """

    older_switches: ClassVar[tuple[str, str]]
    """The old names for `gradients="train"` and `gradients="pass"`."""

    def __check_init__(self) -> None:
        if self.gradients not in _ORDER:
            raise ValueError(
                f"{type(self).__name__} takes 'none', 'pass' or 'train' as gradients; found "
                f"{self.gradients!r}."
            )

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(self.without_switches(state))

    @classmethod
    def without_switches(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Converts fields from version 0.1 to the current ones."""
        if fields.keys().isdisjoint(cls.older_switches):
            return dict(fields)
        train, passes = cls.older_switches
        mark = fields.get("gradients", "none")
        # An old file may only contain one of the two fields. If so, `gradients` determines the other one.
        trains, open_ = fields.get(train, mark == "train"), fields.get(passes, mark == "pass")
        kept = {name: x for name, x in fields.items() if name not in cls.older_switches}
        return kept | {"gradients": "train" if trains else "pass" if open_ else "none"}

    @classmethod
    def with_switches(cls, fields: dict[str, Any], gradients: Gradients = "none") -> dict[str, Any]:
        """As `without_switches`, but warns about old names: they were passed by a caller."""
        old = [name for name in cls.older_switches if name in fields]
        for name in old:
            _warn(cls, name)
        return cls.without_switches({"gradients": gradients, **fields}) if old else fields


def switch(name: str) -> Any:
    """A property with an old field name, to be removed in 0.3."""

    def is_on(self: GradientsArray) -> bool:
        _warn(type(self), name)
        return self.gradients == _mark(type(self), name)

    return property(is_on)


def _mark(cls: type[GradientsArray], name: str) -> Gradients:
    return "train" if name == cls.older_switches[0] else "pass"


def _warn(cls: type[GradientsArray], name: str) -> None:
    warn(f"{cls.__name__}.{name}", f'gradients="{_mark(cls, name)}"')
