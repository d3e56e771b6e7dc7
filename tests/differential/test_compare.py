"""What the comparison of a program with its array tells apart."""

import jax
import jax.numpy as jnp
import pytest

import quaxlike as ql

from . import compare
from .compare import Finding, check, outcomes
from .operations import GROUPS, lines, operations
from .origins import ORIGINS, allowed
from .program import Program, Step, under

TIMES_NAN = Program("SparseArray", (Step("x * NAN"),), jit=True)


def _quaxify(monkeypatch, change):
    """Every quaxified function is that of the arrays, with its results changed."""
    call = lambda f, filter_spec=None: lambda *args: jax.tree.map(change, f(*ql.materialise(args)))
    monkeypatch.setattr(ql, "quaxify", call)


@pytest.mark.slow
def test_nan_may_stay_zero_outside_of_a_structure():
    assert check(TIMES_NAN).status == "equal"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [TIMES_NAN, Program("SparseArray", numbers="NaN", steps=(Step("2 * x"),))]
)
def test_nan_may_not_be_lost_where_something_is_stored(program, monkeypatch):
    _quaxify(monkeypatch, lambda x: jnp.where(jnp.isnan(x), 0, x))
    with pytest.raises(Finding, match="no NaN"):
        check(program)


@pytest.mark.slow
def test_what_differs_by_rounding_is_equal_in_double_precision(monkeypatch):
    program = Program("TridiagonalMatrix", (Step("2 * x"),), jit=True, x64=False)
    _quaxify(monkeypatch, lambda x: x + 5e-4 if x.dtype == jnp.float32 else x)
    assert check(program).status == "rejected"
    _quaxify(monkeypatch, lambda x: x + 5e-4)
    with pytest.raises(Finding, match="wrong numbers"):
        check(program)


@pytest.mark.slow
def test_an_error_while_a_program_runs_is_a_finding(monkeypatch):
    def fail(x):
        raise RuntimeError("while it runs")

    _quaxify(monkeypatch, lambda x: jax.pure_callback(fail, x, x))
    with pytest.raises(Finding, match=r"(?s)raises .*while it runs"):
        check(Program("SparseArray", (Step("2 * x"),), jit=True))


@pytest.mark.slow
@pytest.mark.parametrize(("origin", "status"), [("argument", "equal"), ("closed_over", "declined")])
def test_jax_combines_the_leaves_of_a_value_that_is_no_argument(origin, status):
    program = Program("a user's multiple", (Step("lax.associative_scan(jnp.add, x)"),), origin=origin)
    assert check(program).status == status


def test_the_program_that_fails_is_named(monkeypatch):
    def fails(programs, operands):
        if any(program.steps[0].text == "3 * x" for program in programs):
            raise ValueError("nobody foresaw it")
        return compare.Outcome("equal")

    monkeypatch.setattr(compare, "_check", fails)
    found = outcomes([Program("Zero", (Step(f"{k} * x"),), first=k) for k in range(6)])
    assert [p.first for p, outcome in found if isinstance(outcome, Finding)] == [3]


@pytest.mark.slow
def test_units_are_checked_where_results_have_nans():
    """Other programs are traced before that, to see whether the NaNs have to be."""
    program = Program("Unitful of SparseArray", (Step("x / jnp.zeros(())"),), jit=True, x64=True)
    assert check(program).status == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_value_of_each_origin_is_compared(origin, monkeypatch):
    program = Program(
        "TridiagonalMatrix", (Step("x @ r", (("r", (4,)),)),), ("jit",), jit=True, origin=origin
    )
    assert allowed(origin, program.inner)
    assert check(program).status == "equal"
    _quaxify(monkeypatch, lambda x: 2 * x)
    with pytest.raises(Finding, match="wrong numbers"):
        check(program)


@pytest.mark.slow
def test_every_operation_of_a_group_is_one():
    with under(True):
        assert {text for group in GROUPS.values() for text in lines(group)} <= operations().keys()
