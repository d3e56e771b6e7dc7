"""Classes whose annotations are strings, for `test_lenses`."""

from __future__ import annotations

from typing import Any

import equinox as eqx

import quaxlike.utils as qu
from quaxlike.utils import HasLensFields, LensField, dataclass
from quaxlike.utils import LensField as Renamed


@dataclass
class Point(HasLensFields):
    x: LensField[Any]
    y: qu.LensField[Any]
    z: Renamed[Any]
    plain: Any = 0


class Module(HasLensFields, eqx.Module):
    x: LensField[Any]


def local_point() -> type[Any]:
    import quaxlike.utils as local

    @dataclass
    class Local:
        x: local.LensField[int]

    return Local
