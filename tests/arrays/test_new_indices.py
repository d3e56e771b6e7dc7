"""An index into a Value is an operand of its program: another one compiles nothing, as for an array."""

import jax
import jax.numpy as jnp
import pytest

import quaxlike as ql
from tests.array_types import CORNERS, WEIGHTS

# Twice the same form of an index, into axes of size `n` and `m`.
FORMS = {
    "row": lambda n, m: [0, n - 1],
    "rows": lambda n, m: [slice(0, n - 1), slice(1, n)],
    "column": lambda n, m: [(slice(None), 0), (slice(None), m - 1)],
    "columns": lambda n, m: [(slice(None), slice(0, m - 1)), (slice(None), slice(1, m))],
    "element": lambda n, m: [(0, 0), (n - 1, m - 1)],
    "array": lambda n, m: [jnp.asarray(0), jnp.asarray(n - 1)],
    "list": lambda n, m: [jnp.asarray([0, 0]), jnp.asarray([n - 1, 0])],
    "list of columns": lambda n, m: [(slice(None), jnp.asarray([0])), (slice(None), jnp.asarray([m - 1]))],
}
READS = {
    "take": lambda v, i: jnp.take(v, jnp.asarray(i), 0),
    "dynamic_slice_in_dim": lambda v, i: jax.lax.dynamic_slice_in_dim(v, i, 1, 1),
    "write": lambda v, i: v.at[i].set(0),
}


@pytest.fixture
def compiled():
    """Counts the programs that a call compiles."""
    seen = []
    watch = lambda event, _, **about: seen.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(watch)

    def count(fn, *args):
        before = len(seen)
        with ql.on_materialise("allow"):
            jax.block_until_ready(ql.quaxify(fn)(*args))
        return len(seen) - before

    yield count
    jax.monitoring.unregister_event_duration_listener(watch)


def _check(x, compiled):
    n, m = (*x.shape, 1)[:2]
    cases = {name: (lambda v, i: v[i], *make(n, m)) for name, make in FORMS.items()}
    # Programs with units know the numbers 0 and 1.
    cases |= {name: (read, n - 2, n - 1) for name, read in READS.items()}
    more = {}
    for name, (read, first, second) in cases.items():
        of_array, of_value = (
            [compiled(read, v, i) for i in (first, second)][1] for v in (ql.materialise(x), x)
        )
        if of_value > of_array:
            more[name] = of_value
    assert not more


_QUICK = ("LoraArray", "LoraArray of NF4Array", "VeRAArray, stacked")


@pytest.mark.quick("LoraArray of NF4Array")
@pytest.mark.parametrize("name", _QUICK)
def test_another_index_compiles_nothing(name, compiled):
    _check({**WEIGHTS, **CORNERS}[name](), compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WEIGHTS, *(name for name in CORNERS if "stacked" in name)])
def test_another_index_into_any_type_compiles_nothing(name, compiled):
    _check({**WEIGHTS, **CORNERS}[name](), compiled)


@pytest.mark.slow
def test_rows_of_an_adapted_array_share_a_program(compiled):
    x = ql.LoraArray(jnp.ones((32, 8)), jnp.ones((2, 8)), jnp.ones((32, 2)))
    compiled(lambda x: x[0], x)
    assert sum(compiled(lambda x, i: x[i], x, i) for i in range(1, 32)) == 0
