"""Wrong arguments: which errors of a function are replaced."""

from pathlib import Path

import pytest

import quaxlike as ql
from quaxlike._checked import checked

_FUNCTION = """
def f(x: int):
    if x == "own":
        raise ValueError("an error of the library")
    return 1 + x
"""


def test_errors_that_the_library_raises_are_kept():
    """Also where its source cannot be read."""
    made = {}
    exec(compile(_FUNCTION, str(Path(ql.__file__).parent / "made.py"), "exec"), made)
    with pytest.raises(ValueError, match="an error of the library"):
        checked(made["f"])("own")
    with pytest.raises(TypeError, match="f: `x` must be int; found 'other'"):
        checked(made["f"])("other")
