"""A few mutated files for each reader; an hour of them by `python -m tests.fuzz`."""

import pytest

from tests.fuzz.cases import one, warm_up
from tests.fuzz.readers import READERS


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_mutated_files(name, tmp_path):
    warm_up([name], tmp_path)
    problems = [one(name, seed, tmp_path) for seed in range(15)]
    assert not [problem for problem in problems if problem is not None]
