from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quaxlike.utils import (
    PyTreeDef,
    SupportsTreeMatch,
    dataclass,
    field,
    tree_concat,
    tree_map,
    tree_stack,
    tree_structure,
    tree_where_broadcast_last,
    tree_zeros_like,
)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Point:
    x: Any
    name: str = field(default="p", static=True)


@dataclass
class Aligned:
    """Rows that go by labels."""

    rows: Any
    labels: tuple[str, ...] = field(static=True)

    def __tree_match__(self, *others):
        labels = sorted({label for node in (self, *others) for label in node.labels})

        def over_all_labels(node):
            rows = [node.rows[node.labels.index(v)] if v in node.labels else 0.0 for v in labels]
            return Aligned(jnp.array(rows), tuple(labels))

        return tuple(over_all_labels(node) for node in (self, *others))


@dataclass
class Wrapper:
    """A node that matches, with matching nodes below it."""

    inner: Any
    shift: int = field(static=True)

    def __tree_match__(self, *others):
        shift = max(node.shift for node in (self, *others))
        return tuple(Wrapper(node.inner, shift) for node in (self, *others))


class Opaque:
    """A leaf that matches: no pytree."""

    def __init__(self, value):
        self.value = value

    def __tree_match__(self, *others):
        top = max(node.value for node in (self, *others))
        return tuple(Opaque(top) for _ in (self, *others))


def assert_trees_equal(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_array_equal(a, b)
        assert jnp.result_type(a) == jnp.result_type(b)


# tree_structure


def test_structure():
    tree = {"a": 1, "b": [2, Point(3)]}
    structure = tree_structure(tree)
    assert structure == jax.tree.structure(tree)
    assert structure.num_leaves == 3
    assert structure.flatten_up_to({"a": [0], "b": [1, Point(2)]}) == [[0], 1, 2]
    assert structure.unflatten([4, 5, 6]) == {"a": 4, "b": [5, Point(6)]}
    assert isinstance(structure, PyTreeDef)
    assert not isinstance(tree, PyTreeDef)


def test_structure_with_leaves_of_ones_own():
    structure = tree_structure({"a": (1, 2), "b": 3}, is_leaf=lambda x: isinstance(x, tuple))
    assert structure.num_leaves == 2
    assert structure.flatten_up_to({"a": (1, 2), "b": 3}) == [(1, 2), 3]


# tree_map


leaves = st.integers(-5, 5)
trees = st.recursive(
    leaves | st.none(),
    lambda t: st.lists(t, max_size=3) | st.dictionaries(st.sampled_from("abc"), t) | st.builds(Pair, t, t),
    max_leaves=6,
)


@pytest.mark.slow
@given(trees)
def test_map_is_that_of_jax_without_matching_nodes(tree):
    assert tree_map(lambda x: x + 1, tree) == jax.tree.map(lambda x: x + 1, tree)
    assert tree_map(lambda x, y: (x, y), tree, tree) == jax.tree.map(lambda x, y: (x, y), tree, tree)
    is_leaf = lambda x: isinstance(x, list)
    assert tree_map(repr, tree, is_leaf=is_leaf) == jax.tree.map(repr, tree, is_leaf=is_leaf)


def test_nodes_match():
    x = {"p": Aligned([1.0, 2.0], ("a", "b")), "q": 1.0}
    y = {"p": Aligned([10.0, 20.0], ("b", "c")), "q": 2.0}
    out = tree_map(jnp.add, x, y)
    assert out == {"p": Aligned(jnp.array([1.0, 12.0, 20.0]), ("a", "b", "c")), "q": jnp.float32(3)}
    assert isinstance(x["p"], SupportsTreeMatch)
    assert not isinstance(Point(1), SupportsTreeMatch)


def test_nodes_match_in_all_trees():
    nodes = [Aligned([1.0], (label,)) for label in "cab"]
    out = tree_map(lambda *rows: sum(rows), *nodes)
    assert out == Aligned(jnp.ones(3), ("a", "b", "c"))


def test_one_tree_has_nothing_to_match():
    node = Aligned([1.0, 2.0], ("b", "a"))
    assert tree_map(lambda x: 2 * x, node) == Aligned([2.0, 4.0], ("b", "a"))


def test_matching_nodes_inside_matching_nodes():
    x = Wrapper([Aligned([1.0], ("a",)), 1.0], 1)
    y = Wrapper([Aligned([2.0], ("b",)), 5.0], 3)
    out = tree_map(jnp.add, x, y)
    assert out == Wrapper([Aligned(jnp.array([1.0, 2.0]), ("a", "b")), jnp.float32(6.0)], 3)


def test_a_leaf_that_matches():
    out = tree_map(lambda x, y: (x.value, y.value), [Opaque(1)], [Opaque(4)])
    assert out == [(4, 4)]


def test_is_leaf_and_matching():
    is_leaf = lambda x: isinstance(x, Aligned)
    x, y = Aligned([1.0], ("a",)), Aligned([2.0], ("b",))
    out = tree_map(lambda x, y: (x.labels, y.labels), [x], [y], is_leaf=is_leaf)
    assert out == [(("a", "b"), ("a", "b"))], "matched first, then a leaf"


def test_a_match_of_the_wrong_length():
    class Forgetful:
        def __tree_match__(self, *others):
            return (self,)

    with pytest.raises(
        ValueError,
        match=r"Forgetful.__tree_match__ must return itself and its 1 counterparts, found 1 nodes at \['a'\]",
    ):
        tree_map(lambda x, y: x, {"a": Forgetful()}, {"a": Forgetful()})


def test_structures_that_differ():
    with pytest.raises(ValueError, match=r"(?s)'list'.*'tuple'"):
        tree_map(jnp.add, [1, 2], (1, 2))
    with pytest.raises(ValueError, match=r"'q'"):
        tree_map(jnp.add, Point(1, "p"), Point(1, "q"))


# tree_stack and tree_concat

arrays = hnp.arrays(
    st.sampled_from([np.float32, np.int32, np.bool_]),
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=3),
)


@pytest.mark.slow
@given(st.lists(arrays, min_size=1, max_size=3), st.integers(1, 4))
def test_stack_then_unstack(layers, n):
    trees = [{"layers": [np.roll(x, i) for x in layers], "pair": Pair(i, None)} for i in range(n)]
    stacked = tree_stack(*trees)
    assert stacked["layers"][0].shape == (n, *layers[0].shape)
    for i, tree in enumerate(trees):
        row = jax.tree.map(lambda x, i=i: x[i], stacked)
        assert_trees_equal(row, jax.tree.map(lambda x: jnp.asarray(x), tree))


@pytest.mark.slow
@given(st.lists(arrays, min_size=1, max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_concat_then_split(layers, lengths):
    trees = [[np.resize(x, (n, *x.shape[1:])) for x in layers] for n in lengths]
    joined = tree_concat(*trees)
    ends = np.cumsum([0, *lengths])
    for i, tree in enumerate(trees):
        part = jax.tree.map(lambda x, i=i: x[ends[i] : ends[i + 1]], joined)
        assert_trees_equal(part, jax.tree.map(jnp.asarray, tree))


@pytest.mark.slow
@given(arrays, st.integers(1, 3))
def test_concat_agrees_with_numpy(x, n):
    np.testing.assert_array_equal(tree_concat(*[x] * n), np.concatenate([x] * n))


@pytest.mark.slow
def test_stack_for_scan():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Linear(2, 2, key=key) for key in keys]
    x = jnp.ones(2)
    looped = x
    for layer in layers:
        looped = layer(looped)
    scanned, _ = jax.lax.scan(lambda x, layer: (layer(x), None), x, tree_stack(*layers))
    np.testing.assert_allclose(scanned, looped, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("join", [tree_stack, tree_concat])
def test_dtypes_promote(join):
    out = join([jnp.ones(2, jnp.int32)], [jnp.ones(2, jnp.bfloat16)], [np.ones(2, np.float16)])
    assert out[0].dtype == jnp.float32
    assert join([jnp.ones(2, jnp.int8)], [jnp.ones(2, bool)])[0].dtype == jnp.int8


@pytest.mark.slow
def test_stack_of_numbers_keys_and_traced():
    np.testing.assert_array_equal(tree_stack(1, 2), [1, 2])
    keys = jax.random.split(jax.random.key(0), 2)
    assert jnp.all(tree_stack(keys[0], keys[1]) == keys)
    out = jax.jit(lambda x: tree_stack({"x": x}, {"x": 2 * x}))(jnp.ones(2))
    np.testing.assert_array_equal(out["x"], [[1, 1], [2, 2]])


def test_joining_matches_nodes():
    out = tree_stack(Aligned([1.0], ("a",)), Aligned([2.0], ("b",)))
    assert out == Aligned(jnp.array([[1.0, 0.0], [0.0, 2.0]]), ("a", "b"))


@pytest.mark.parametrize("join", [tree_stack, tree_concat])
def test_no_trees(join):
    with pytest.raises(TypeError, match=rf"{join.__name__} needs at least one tree, found none"):
        join()


def test_no_leaves():
    assert tree_stack([None], [None]) == [None]


def test_concat_of_scalars():
    message = r"tree_concat: the leaves at \['a'\]\[1\].x do not fit \(float32\[\]\): scalars have no axis"
    with pytest.raises(ValueError, match=message):
        tree_concat({"a": [jnp.ones(1), Point(jnp.float32(1))]})
    with pytest.raises(ValueError, match=r"tree_concat: the leaves do not fit"):
        tree_concat(1.0, 2.0)


@pytest.mark.parametrize("join", [tree_stack, tree_concat])
def test_shapes_that_differ(join):
    message = rf"{join.__name__}: the leaves at \['a'\]\[0\] do not fit \(float32\[2, 3\], float32\[2, 4\]\)"
    with pytest.raises(ValueError, match=message):
        join({"a": [jnp.ones((2, 3))]}, {"a": [jnp.ones((2, 4))]})


@pytest.mark.parametrize("join", [tree_stack, tree_concat, tree_zeros_like])
def test_leaves_that_are_no_arrays(join):
    with pytest.raises(
        TypeError, match=rf"{join.__name__}: the leaf at .f is of type function, .*eqx.partition"
    ):
        join(_WithFunction(lambda x: x))


class _WithFunction(eqx.Module):
    f: Any


def test_strict_promotion_is_respected():
    with pytest.raises(
        ValueError, match=r"tree_stack: the leaves at \[0\] do not fit \(int32\[2\], float32\[2\]\)"
    ):
        tree_stack([jnp.ones(2, int)], [jnp.ones(2)])


# tree_zeros_like


@pytest.mark.slow
@given(arrays)
def test_zeros(x):
    out = tree_zeros_like({"x": x, "n": None})
    assert_trees_equal(out, {"x": np.zeros_like(x), "n": None})


def test_zeros_of_numbers_and_shapes():
    tree = [1, 2.0, np.float16(3), jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)]
    out = tree_zeros_like(tree)
    assert [(z.shape, z.dtype) for z in out] == [
        ((), jnp.int32),
        ((), jnp.float32),
        ((), jnp.float16),
        ((2, 3), jnp.bfloat16),
    ]


# tree_where_broadcast_last


@pytest.mark.slow
@given(hnp.arrays(np.bool_, hnp.array_shapes(max_dims=2, max_side=3)), st.data())
def test_where(accept, data):
    rest = data.draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3))
    x = np.arange(accept.size * np.prod(rest, dtype=int), dtype=np.float32).reshape(accept.shape + rest)
    out = tree_where_broadcast_last(accept, {"x": x}, {"x": -x - 1.0})
    for index in np.ndindex(accept.shape):
        np.testing.assert_array_equal(out["x"][index], x[index] if accept[index] else -x[index] - 1.0)


@pytest.mark.slow
def test_where_with_leaves_of_several_ranks():
    accept = jnp.array([True, False])
    t1 = Point([jnp.ones(2), jnp.ones((2, 3)), jnp.ones((2, 3, 4))])
    out = tree_where_broadcast_last(accept, t1, tree_zeros_like(t1))
    for leaf in out.x:
        np.testing.assert_array_equal(leaf[0], jnp.ones_like(leaf[0]))
        np.testing.assert_array_equal(leaf[1], jnp.zeros_like(leaf[1]))


def test_where_of_a_scalar_condition_and_the_same_tree():
    tree = [jnp.ones(2), jnp.float32(3)]
    assert_trees_equal(tree_where_broadcast_last(True, tree, tree_zeros_like(tree)), tree)
    assert_trees_equal(tree_where_broadcast_last(np.array(False), tree, tree), tree)
    assert_trees_equal(tree_where_broadcast_last(accept=False, tree1=tree_zeros_like(tree), tree2=tree), tree)


def test_where_with_less_axes_than_the_condition():
    message = (
        r"tree_where_broadcast_last: the leaves at \['e'\] do not fit \(float32\[\], float32\[\]\): "
        r"`accept` of shape \(2,\) has more axes"
    )
    accept = jnp.array([True, False])
    with pytest.raises(ValueError, match=message):
        tree_where_broadcast_last(accept, {"e": jnp.float32(1)}, {"e": jnp.float32(0)})


def test_where_with_another_batch():
    with pytest.raises(
        ValueError, match=r"the leaves at \[0\] do not fit \(float32\[3, 2\], float32\[3, 2\]\)"
    ):
        tree_where_broadcast_last(jnp.array([True, False]), [jnp.ones((3, 2))], [jnp.ones((3, 2))])


def test_where_with_fewer_rows_than_the_condition():
    """Leaves are not broadcast, so that results have their shapes."""
    message = r"the leaves at \[0\] do not fit \(.*\): `accept` of shape \(4,\) does not fit the leading axes"
    with pytest.raises(ValueError, match=message):
        tree_where_broadcast_last(jnp.ones(4, bool), [jnp.ones((1, 3))], [jnp.zeros((1, 3))])
    out = tree_where_broadcast_last(jnp.ones(1, bool), jnp.ones((4, 3)), jnp.zeros((4, 3)))
    np.testing.assert_array_equal(out, jnp.ones((4, 3)))


@pytest.mark.slow
def test_where_under_grad_and_vmap():
    accept = jnp.array([True, False])
    loss = lambda x: jnp.sum(tree_where_broadcast_last(accept, [x], [x**2])[0])
    np.testing.assert_array_equal(jax.grad(loss)(jnp.full((2, 2), 3.0)), [[1, 1], [6, 6]])
    out = jax.vmap(tree_where_broadcast_last)(accept, [jnp.ones((2, 3))], [jnp.zeros((2, 3))])
    np.testing.assert_array_equal(out[0], [[1, 1, 1], [0, 0, 0]])
