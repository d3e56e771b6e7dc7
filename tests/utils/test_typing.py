import pytest

from . import typing_uses


@pytest.mark.quick("dataclasses_and_lenses")
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("use", typing_uses.RIGHT_USES, ids=lambda use: use.__name__)
def test_right_uses_run(use):
    use()
