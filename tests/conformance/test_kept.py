"""What each type keeps, and what makes it dense, is what `tests/differential/kept.txt` says; and what is not
made dense has the numbers of the array."""

import pytest

from tests.differential import kept
from tests.samples import some_of

# Of the others the slow tests alone ask.
QUICK = [
    "LoraArray, magnitude",
    "TrainableArray",
    "BlockSparseArray, uneven",
    "OneHotVector, stacked",
    "Identity",
]
# The type that meets all programs; each other one meets a sixth of them.
WHOLE = "Int8Array, blocks in rows"


def _not_dense(name):
    return {text: letter for text, letter in kept.read()[name].items() if letter in "kva"}


@pytest.mark.quick(WHOLE)
@pytest.mark.parametrize("name", kept.TYPES)
def test_what_becomes_of_a_value(name):
    """`python -m tests.differential.kept` writes the table anew."""
    expected = some_of(kept.read()[name], name, 1 if name == WHOLE else 6)
    found = kept.outcomes(name, expected)
    assert not {text: (letter, found[text]) for text, letter in expected.items() if letter != found[text]}


@pytest.mark.parametrize("name", QUICK)
def test_what_is_kept(name):
    assert kept.outcomes(name, _not_dense(name)) == _not_dense(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", kept.TYPES)
def test_what_is_not_dense_has_the_numbers_of_the_array(name):
    assert not kept.differences(name, some_of(_not_dense(name), name, 24))


def test_the_table_has_every_program_and_type():
    assert [*kept.read()] == [*kept.TYPES]
    assert [*kept.read()["LoraArray"]] == [*kept.texts()]
