"""`==`, `!=`, `<`, truth and `in` of every type mean those of the array that it stands for, or are an error:
wherever the value comes from, and never those of pytrees."""

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
import pytest

import quaxlike as ql
from tests import users
from tests.array_types import CORNERS, WEIGHTS


class Doubled(ql.ArrayOperators, ql.ArrayValue):
    """With the mixin, and a part that is metadata."""

    array: jax.Array
    name: str = eqx.field(static=True, default="")

    def materialise(self):
        return 2 * self.array


class Halved(ql.ArrayValue):
    """Without the mixin, of another Value."""

    inner: Doubled

    def materialise(self):
        return ql.materialise(self.inner) / 2


def _array(k):
    return jax.numpy.arange(4.0) % (2 + k)


USERS = {
    "a user's with operators": lambda k=0: Doubled(_array(k), "a"),
    "a user's of another": lambda k=0: Halved(Doubled(_array(k))),
    "a user's scalar": lambda k=0: users.Scaled(_array(k)[1], jax.numpy.asarray(1.0)),
}
TYPES = USERS | WEIGHTS | CORNERS

OPERATIONS = {
    "==": lambda x, y, _: x == y,
    "!=": lambda x, y, _: x != y,
    "<": lambda x, y, _: x < y,
    "truth": lambda x, y, _: 1 if x else 2,
    "in": lambda x, y, item: item in x,
}
# Each takes a function and its operands; the first comes from where the name says.
ORIGINS = {
    "passed": lambda f, x, *rest: ql.quaxify(f)(x, *rest),
    "closed over": lambda f, x, *rest: ql.quaxify(lambda *rest: f(x, *rest))(*rest),
    "made inside": lambda f, x, *rest: ql.quaxify(
        lambda leaves, *rest: f(jtu.tree_unflatten(jtu.tree_structure(x), leaves), *rest)
    )(jtu.tree_leaves(x), *rest),
    "argument of an inner jit": lambda f, x, *rest: ql.quaxify(lambda *rest: jax.jit(f)(x, *rest))(*rest),
    "outside": lambda f, x, *rest: f(x, *rest),
}


def _outcome(run):
    """The numbers that a call returns, or None for an error."""
    try:
        return np.asarray(ql.materialise(run()))
    except Exception:
        return None


@pytest.mark.quick("a user's with operators")
@pytest.mark.parametrize("name", TYPES)
@ql.on_materialise("allow")
def test_compares_as_the_array(name, default_promotion):
    x, y = TYPES[name](), TYPES[name](1)
    item = ql.quaxify(lambda x: x.ravel()[-1])(x) if 0 not in x.shape else 0
    dense = [ql.materialise(v) for v in (x, y, item)]
    for operation, f in OPERATIONS.items():
        expected = _outcome(lambda f=f: f(*dense))
        for origin, run in ORIGINS.items():
            case = f"{operation}, {origin}"
            if origin == "outside" and not isinstance(x, ql.ArrayOperators):
                with pytest.raises(TypeError, match=r"name `quaxlike\.ArrayOperators`"):
                    f(x, y, item)
                continue
            found = _outcome(lambda f=f, run=run: run(f, x, y, item))
            if origin == "argument of an inner jit" and operation in ("truth", "in") and found is None:
                continue  # the numbers are not known yet, unless the type has no arrays
            if expected is None:
                assert found is None, case
            else:
                assert found is not None, case
                np.testing.assert_array_equal(found, expected, case)
