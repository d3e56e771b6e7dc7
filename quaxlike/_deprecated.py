"""Names that have moved: they work for one more release, with a warning that names the new ones."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def deprecated(
    module: str, names: Mapping[str, tuple[str, Any]], *, removed_in: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a module whose names have moved.

    **Arguments:**

    - `module`: the `__name__` of the module.
    - `names`: for each old name, the new one in full and the object.
    - `removed_in`: the version that no longer has the old names.

    **Returns:**

    Both functions. Access to an old name warns with a `DeprecationWarning` at the line that asks for it.
    """

    def __getattr__(name: str) -> Any:
        if name == "__all__":  # of `from module import *`
            return list(names)
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, found = names[name]
        message = f"{module}.{name} is {new} now; quaxlike {removed_in} will not have the old name."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return found

    return __getattr__, lambda: sorted(names)
