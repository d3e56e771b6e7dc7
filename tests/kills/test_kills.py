"""A few kills of each writer; 60 of them by `python -m tests.kills`."""

import sys

import pytest

from tests.kills.kill import kills
from tests.kills.runs import interrupts_of_runs, kills_of_runs
from tests.kills.writers import WRITERS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Processes cannot be killed so there.")


@pytest.mark.slow
def test_kills_of_an_adapter():
    assert not kills("adapter", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_kills(name):
    assert not kills(name, 3)


@pytest.mark.slow
def test_kills_of_runs():
    assert not kills_of_runs(3)


@pytest.mark.slow
def test_interrupts_of_runs():
    assert not interrupts_of_runs(3)
