"""Wrong arguments of public functions; about 7,000 of them by `python -m tests.fuzz --arguments`."""

import jax
import jax.numpy as jnp
import pytest

import quaxlike as ql
from quaxlike._checked import checked
from tests.fuzz.arguments import problems
from tests.samples import normal, wrong_types

pytestmark = [wrong_types, pytest.mark.usefixtures("default_promotion")]


@pytest.mark.slow
@pytest.mark.parametrize("every", [97, 7])
def test_errors_are_our_own(every, tmp_path):
    number, found = problems(tmp_path, every)
    assert not found
    assert number * every > 6_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": "x"}, r"quantize: `axis` must be int; found 'x'\."),
        ({"stacked": [1]}, r"quantize: `stacked` must be int; found \[1\], of type list\."),
    ],
)
def test_messages_name_argument_expected_and_found(arguments, message):
    with pytest.raises(TypeError, match=message):
        ql.NF4Array.quantize(normal(2, 64), **arguments)


def test_errors_from_elsewhere_are_kept():
    @checked
    def apply(f, x: int):
        return f(x)

    with pytest.raises(ZeroDivisionError, match="zero"):
        apply(lambda x: x // 0, 1)
    with pytest.raises(TypeError, match=r"apply: `x` must be int; found 'a'\.") as caught:
        apply(lambda x: x + 1, "a")
    assert isinstance(caught.value.__cause__, TypeError)
    assert apply(lambda x: x * 2, "a") == "aa"  # what works is let alone


def test_own_errors_are_kept():
    with pytest.raises(ValueError, match="`b` must be of shape"):
        ql.arrays.structured.solve(jnp.eye(2), jnp.ones(3))


def test_sizes_that_are_none():
    for shape in [(-4,), (2.5,), ("4",)]:
        with pytest.raises(ValueError, match=r"a shape of (sizes that are not negative|integers)"):
            ql.SparseArray.from_coo(jnp.ones(1), jnp.zeros((1, 1), int), shape)


@pytest.mark.slow
def test_warnings_name_the_line_of_the_user():
    model = {"q_proj.weight": normal(2, 64)}
    adapted = ql.loraify(
        ql.quantize(model, where=["q_proj"]), rank=2, where=["q_proj"], key=jax.random.key(0)
    )
    with pytest.warns(UserWarning, match="which rounds them") as caught:
        ql.merge(adapted)
    assert caught[0].filename == __file__
