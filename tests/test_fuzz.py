"""A few mutated files for each reader; an hour of them by `python -m tests.fuzz`."""

import pytest

from tests import fuzz


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.READERS)
def test_mutated_files(name, tmp_path):
    fuzz.warm_up(tmp_path)
    problems = [fuzz.one(name, seed, tmp_path) for seed in range(40)]
    assert not [problem for problem in problems if problem is not None]
