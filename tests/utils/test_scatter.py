from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quaxlike.utils import HasScatterArgs, ScatterArgs, dataclass, field, tree_scatter_set
from tests.samples import array


@dataclass
class Buffer:
    rows: Any

    @property
    def scatter_args(self) -> ScatterArgs:
        return {"mode": "drop", "fill_value": 0}


@dataclass
class Clipped:
    rows: Any

    @property
    def scatter_args(self) -> ScatterArgs:
        return {"mode": "clip", "wrap_negative_indices": False}


class Module(eqx.Module):
    w: Any

    @property
    def scatter_args(self) -> ScatterArgs:
        return {"mode": "clip"}


@pytest.mark.slow
@given(
    st.lists(st.integers(-7, 9), max_size=4, unique=True),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([np.float32, np.int32, bool]),
)
def test_agrees_with_numpy(idxs, rest, dtype):
    idxs = np.array([i for i in idxs if -5 <= i < 5 and i + 5 not in idxs], int)
    leaf = np.arange(5 * np.prod(rest, dtype=int)).reshape(5, *rest).astype(dtype)
    value = (100 + np.arange(len(idxs) * np.prod(rest, dtype=int))).reshape(len(idxs), *rest).astype(dtype)
    expected = leaf.copy()
    expected[idxs] = value
    out = tree_scatter_set({"a": leaf, "n": None}, {"a": value, "n": None}, idxs, {})
    np.testing.assert_array_equal(out["a"], expected)
    assert out["a"].dtype == expected.dtype
    assert out["n"] is None


@pytest.mark.parametrize("to_leaf", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("to_value", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("to_idxs", [np.asarray, jnp.asarray])
def test_numpy_and_jax(to_leaf, to_value, to_idxs):
    leaf = to_leaf(np.zeros((3, 2), np.float32))
    out = tree_scatter_set([leaf], [to_value(np.ones(2, np.float32))], to_idxs([0, 2]), {})
    assert isinstance(out[0], jax.Array)
    np.testing.assert_array_equal(out[0], [[1, 1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(leaf, np.zeros((3, 2)))


@pytest.mark.slow
def test_indices_of_any_shape():
    leaf = jnp.zeros((4, 2))
    np.testing.assert_array_equal(tree_scatter_set(leaf, jnp.ones(2), 1, {})[1], [1, 1])
    out = tree_scatter_set(leaf, jnp.arange(8.0).reshape(2, 2, 2), jnp.array([[0, 1], [2, 3]]), {})
    np.testing.assert_array_equal(out, np.arange(8.0).reshape(4, 2))


# Values


@pytest.mark.slow
def test_numbers_as_values():
    tree = {"f": jnp.zeros(3), "i": jnp.zeros((3, 2), int), "b": jnp.zeros(3, bool)}
    out = tree_scatter_set(tree, {"f": 2, "i": 3, "b": True}, jnp.array([1]), {})
    np.testing.assert_array_equal(out["f"], [0, 2, 0])
    np.testing.assert_array_equal(out["i"], [[0, 0], [3, 3], [0, 0]])
    np.testing.assert_array_equal(out["b"], [False, True, False])
    assert [out[k].dtype for k in "fib"] == [jnp.float32, jnp.int32, bool]


@pytest.mark.slow
def test_one_number_for_all_leaves():
    out = tree_scatter_set([jnp.ones(2), Buffer(np.ones(3, np.int32))], 0, jnp.array([1]), {})
    np.testing.assert_array_equal(out[0], [1, 0])
    np.testing.assert_array_equal(out[1].rows, [1, 0, 1])


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (array(np.zeros(3, int)), 1.5),
        (array(np.zeros(3, int)), array(np.ones(1))),
        (np.zeros(3, np.int32), np.ones(1, np.float32)),
        (array(np.zeros(3, bool)), 1),
        (array(np.zeros(3)), 1j),
        (array(np.zeros(3, jnp.bfloat16)), array(np.ones(1))),
        (array(np.zeros(3, jnp.int8)), array(np.ones(1, jnp.int32))),
    ],
)
@pytest.mark.parametrize("idxs", [[1], []])
def test_no_silent_cast(leaf, value, idxs):
    message = r"tree_scatter_set: a value of \w+ may lose information in a leaf of \w+ at \['a'\]. Convert it"
    with pytest.raises(TypeError, match=message):
        tree_scatter_set({"a": leaf}, {"a": value}, np.array(idxs, int), {})


@pytest.mark.quick("leaf0-value0", "leaf1-value1")
@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (array(np.zeros(3)), array(np.ones(1, int))),
        (array(np.zeros(3)), array(np.ones(1, jnp.bfloat16))),
        (array(np.zeros(3, jnp.bfloat16)), 1.5),
        (array(np.zeros(3, jnp.bfloat16)), array(np.ones(1, jnp.int32))),
        (array(np.zeros(3, complex)), 1.5),
    ],
)
def test_casts_that_lose_no_kind(leaf, value):
    out = tree_scatter_set(leaf, value, jnp.array([2]), {})
    assert out.dtype == leaf.dtype
    assert out[2] == jnp.asarray(value).astype(leaf.dtype).reshape(())


@pytest.mark.slow
def test_keys():
    keys = jax.random.split(jax.random.key(0), 3)
    new = jax.random.key(1)
    out = tree_scatter_set([keys], [new], jnp.array([1]), {})
    assert out[0][1] == new
    assert jnp.all(out[0][0] == keys[0])


# Options


def test_options_reach_the_scatter():
    leaf = jnp.zeros(3)
    np.testing.assert_array_equal(tree_scatter_set(leaf, 1.0, jnp.array([5]), {"mode": "clip"}), [0, 0, 1])
    np.testing.assert_array_equal(tree_scatter_set(leaf, 1.0, jnp.array([5]), {"mode": "drop"}), leaf)
    np.testing.assert_array_equal(tree_scatter_set(leaf, 1.0, jnp.array([-1]), {}), [0, 0, 1])
    out = tree_scatter_set(leaf, 1.0, jnp.array([-1]), {"wrap_negative_indices": False})
    np.testing.assert_array_equal(out, leaf)
    jaxpr = jax.make_jaxpr(
        lambda x: tree_scatter_set(
            x, 1.0, jnp.array([1]), {"unique_indices": True, "indices_are_sorted": True}
        )
    )(leaf)
    (scatter,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scatter"]
    assert scatter.params["unique_indices"] is True
    assert scatter.params["indices_are_sorted"] is True


def test_options_of_nodes():
    assert isinstance(Buffer(0), HasScatterArgs)
    out = tree_scatter_set([Clipped(jnp.zeros(3)), jnp.zeros(3)], 1.0, jnp.array([7]), {})
    np.testing.assert_array_equal(out[0].rows, [0, 0, 1])
    np.testing.assert_array_equal(out[1], [0, 0, 0])


def test_options_go_down():
    node = Clipped({"a": [jnp.zeros(2), Buffer(jnp.zeros(2))]})
    out = tree_scatter_set(node, 1.0, jnp.array([7]), {})
    np.testing.assert_array_equal(out.rows["a"][0], [0, 1])
    np.testing.assert_array_equal(out.rows["a"][1].rows, [0, 1], "an outer node wins")
    out = tree_scatter_set(Buffer(Clipped(jnp.zeros(2))), 1.0, jnp.array([-1]), {})
    np.testing.assert_array_equal(out.rows.rows, [0, 0], "options that do not collide add up")


def test_the_caller_wins():
    args: ScatterArgs = {"mode": "drop"}
    out = tree_scatter_set(Clipped(jnp.zeros(3)), 1.0, jnp.array([7]), args)
    np.testing.assert_array_equal(out.rows, [0, 0, 0])
    assert args == {"mode": "drop"}


def test_options_of_siblings_do_not_mix():
    out = tree_scatter_set([Clipped(jnp.zeros(2)), Buffer(jnp.zeros(2))], 1.0, jnp.array([7]), {})
    np.testing.assert_array_equal(out[0].rows, [0, 1])
    np.testing.assert_array_equal(out[1].rows, [0, 0])


@dataclass
class Labelled:
    """Rows by label, with both protocols."""

    rows: jax.Array
    labels: tuple[str, ...] = field(static=True)

    def __tree_match__(self, *others: "Labelled") -> "tuple[Labelled, ...]":
        names = tuple(sorted({n for x in (self, *others) for n in x.labels}))
        move = lambda x: jnp.array([names.index(n) for n in x.labels])[x.rows]
        return tuple(Labelled(move(x), names) for x in (self, *others))

    @property
    def scatter_args(self) -> ScatterArgs:
        return {"mode": "drop"}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"a": [x]}, Buffer])
def test_nodes_that_match_and_have_options(wrap):
    a, b = Labelled(jnp.array([0, 1, 0]), ("p", "q")), Labelled(jnp.array([0]), ("r",))
    found = tree_scatter_set(wrap(a), wrap(b), jnp.array([1]), {})
    expected = wrap(Labelled(jnp.array([0, 2, 0]), ("p", "q", "r")))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    np.testing.assert_array_equal(*map(jax.tree.leaves, (found, expected)))
    dropped = tree_scatter_set(wrap(a), wrap(b), jnp.array([9]), {})
    np.testing.assert_array_equal(jax.tree.leaves(dropped)[0], [0, 1, 0])


def test_a_leaf_with_options_is_no_array():
    class Opaque:
        @property
        def scatter_args(self) -> ScatterArgs:
            return {}

    with pytest.raises(TypeError, match="found Opaque, not an array"):
        tree_scatter_set(Opaque(), Opaque(), jnp.array([0]), {})


def test_equinox_modules():
    out = tree_scatter_set(Module(jnp.zeros(3)), 1.0, jnp.array([9]), {})
    np.testing.assert_array_equal(out.w, [0, 0, 1])


def test_unknown_options():
    with pytest.raises(TypeError, match=r"tree_scatter_set has no option sorted; there are mode, "):
        tree_scatter_set(jnp.zeros(3), 1.0, jnp.array([1]), {"sorted": True})  # pyright: ignore


# Errors


@pytest.mark.parametrize("idxs", [[0, 1], []])
def test_shapes_are_checked_also_without_indices(idxs):
    message = (
        r"the leaves at \['a'\]\[0\] do not fit \(float32\[3, 2\], float32\[5\]\): the value must broadcast"
    )
    with pytest.raises(ValueError, match=message):
        tree_scatter_set({"a": [jnp.zeros((3, 2))]}, {"a": [jnp.zeros(5)]}, np.array(idxs, int), {})


def test_no_indices():
    leaf = jnp.arange(3.0)
    out = tree_scatter_set([leaf], [jnp.zeros(0)], jnp.zeros(0, int), {})
    np.testing.assert_array_equal(out[0], leaf)
    empty = tree_scatter_set(jnp.zeros((0, 2)), jnp.zeros((0, 2)), jnp.zeros(0, int), {})
    assert empty.shape == (0, 2)


def test_scalar_leaves():
    with pytest.raises(
        ValueError, match=r"leaves at \[0\] do not fit .* the leaf has no axis to set rows of"
    ):
        tree_scatter_set([jnp.float32(1)], [1.0], jnp.array([0]), {})


def test_a_value_with_more_axes():
    with pytest.raises(ValueError, match=r"must broadcast to \(1,\), the shape of `leaf\[idxs\]`"):
        tree_scatter_set(jnp.zeros(3), jnp.zeros((2, 1)), jnp.array([1]), {})


def test_indices_that_are_no_integers():
    with pytest.raises(TypeError, match=r"`idxs` must be integers, found float32 of shape \(1,\)"):
        tree_scatter_set(jnp.zeros(3), 1.0, jnp.array([1.0]), {})
    with pytest.raises(TypeError, match=r"`idxs` must be integers, found bool of shape \(3,\)"):
        tree_scatter_set(jnp.zeros(3), 1.0, jnp.array([True, False, True]), {})


def test_leaves_that_are_no_arrays():
    with pytest.raises(TypeError, match=r"tree_scatter_set: found str, not an array at \['a'\]"):
        tree_scatter_set({"a": "text"}, {"a": 1.0}, jnp.array([0]), {})


def test_structures_that_differ():
    with pytest.raises(ValueError, match=r"(?s)tuple.*list|list.*tuple"):
        tree_scatter_set([jnp.zeros(3)], (1.0,), jnp.array([0]), {})


# Transforms


@pytest.mark.slow
def test_under_transforms():
    item = Buffer([jnp.zeros((3, 2))])
    idxs = jnp.array([0, 7])
    f = lambda item, value: tree_scatter_set(item, Buffer([value]), idxs, {})
    value = jnp.ones((2, 2))
    eager = f(item, value)
    assert jax.jit(f)(item, value) == eager
    grads = jax.grad(lambda i, v: jnp.sum(f(i, v).rows[0] * 2.0), argnums=(0, 1))(item, value)
    np.testing.assert_array_equal(grads[0].rows[0], [[0, 0], [2, 2], [2, 2]])
    np.testing.assert_array_equal(grads[1], [[2, 2], [0, 0]])
    batched = jax.vmap(f, in_axes=(None, 0))(item, jnp.stack([value, 2 * value]))
    np.testing.assert_array_equal(batched.rows[0][1], 2 * eager.rows[0])
