"""Random programs on every type are what they are on the arrays that the types stand for.

The programs are the same in each run. `python -m tests.differential` goes on with others.
"""

import zlib
from pathlib import Path

import pytest

import quaxlike as ql
from tests.array_types import TYPES, WEIGHTS, parts

from .faults import FAULTS
from .hunt import hunt
from .operations import operations
from .program import NUMBERS, of_each_rule, programs, under

ARRAYS = Path(ql.__file__).parent / "arrays"

PADDED = ("SparseArray, stacked", "SparseArray, stacked matrices")

# What no function of `jax.numpy` or `lax` binds on its own: transforms do, or other functions; and what is
# left out of the programs, as it may never end.
NOT_OPERATIONS = {"add_any", "sharding_constraint", "geqrf", "eq_to", "le_to", "lt_to", "svd"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TYPES if " of " not in name])
def test_every_rule(name):
    # A corner is of a type that is among the weights, too; but these have no padding.
    common, share = (1, 12) if name in WEIGHTS or name in PADDED else (1, 48)
    _no_findings(name, of_each_rule((name,), common, share))


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("numbers", list(NUMBERS)[1:])
@pytest.mark.parametrize("name", WEIGHTS)
def test_rules_on_other_numbers(name, numbers):
    _no_findings(f"{name}, {numbers}", of_each_rule((name,), 1, 24, numbers))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TYPES if " of " in name])
def test_programs(name):
    _no_findings(name, programs((name,)))


def _no_findings(case, drawn):
    found = hunt(drawn, seed_=zlib.crc32(case.encode()), examples=1, shrink=False)
    assert not found.findings, "\n\n".join(found.findings.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_materialises(name, default_promotion):
    x = TYPES[name]()
    dense = ql.materialise(x)
    assert (dense.shape, dense.dtype) == (x.shape, x.dtype)


@pytest.mark.slow
def test_operations_bind_every_primitive_that_has_a_rule():
    """A new rule is met without being named, unless its primitive is new to the operations, too."""
    with under(True):
        classes = {type(part) for make in TYPES.values() for part in parts(make())}
        rules = [rule for cls in classes for rule in ql.rules_for(cls)]
        ruled = {r.primitive.name for r in rules if r.function.__module__.startswith("quaxlike.arrays.")}
        bound = frozenset().union(*operations().values())
    assert ruled - bound <= NOT_OPERATIONS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_seeded_faults_have_their_places(fault):
    assert (ARRAYS / fault.file).read_text().count(fault.before) == 1
