"""Tree functions that stop at ImplicitArrays, and layers of nested ones."""

import jax
import numpy as np
import pytest

import quaxlike as ql
import quaxlike.implicit as qi
from tests.samples import array, normal

from .types import Codes


class Pair(qi.ImplicitArray, warn_on_materialize=False):
    left: object
    right: object

    def materialize(self):
        return ql.materialise(self.left) + ql.materialise(self.right)


X = array(np.ones((4, 3)))


def _codes():
    return Codes.quantize(normal(4, 3))


@pytest.mark.parametrize("x", [np.ones(3), np.float32(1), array(np.ones(3))])
def test_is_array(x):
    assert qi.is_array(x)


@pytest.mark.parametrize("x", [1.0, [1.0], None, "text"])
def test_is_not_array(x):
    assert not qi.is_array(x)


class TestTrees:
    def test_as_leaves(self):
        q, other = _codes(), ql.Int8Array.quantize(normal(4, 8))
        tree = {"a": q, "b": [X, other], "c": None}
        leaves, structure = qi.tree_flatten_with_implicit(tree)
        assert [type(x) for x in leaves] == [Codes, type(X), ql.Int8Array]
        assert qi.tree_leaves_with_implicit(tree)[0] is q
        assert qi.tree_structure_with_implicit(tree) == structure
        again = structure.unflatten(leaves)
        assert again["a"] is q
        assert again["b"][1] is other
        paths, _ = qi.tree_flatten_with_path_with_implicit(tree)
        assert [jax.tree_util.keystr(path) for path, _ in paths] == ["['a']", "['b'][0]", "['b'][1]"]

    def test_map(self):
        q = _codes()
        assert qi.tree_map_with_implicit(lambda x, y: (type(x), y), {"a": q}, {"a": 3}) == {"a": (Codes, 3)}
        found = qi.tree_map_with_path_with_implicit(lambda path, x: jax.tree_util.keystr(path), [q, X])
        assert found == ["[0]", "[1]"]

    @pytest.mark.parametrize("name", ["is_leaf", "new_is_leaf"])
    def test_more_leaves(self, name):
        tree = {"a": _codes(), "b": (1, 2)}
        leaves = qi.tree_leaves_with_implicit(tree, **{name: lambda x: isinstance(x, tuple)})
        assert [type(x) for x in leaves] == [Codes, tuple]

    def test_more_leaves_by_position(self):
        tree = {"a": _codes(), "b": (1, 2)}
        is_pair = lambda x: isinstance(x, tuple)
        leaves, structure = qi.tree_flatten_with_implicit(tree, is_pair)
        assert [type(x) for x in leaves] == [Codes, tuple]
        assert qi.tree_structure_with_implicit(tree, is_pair) == structure
        assert list(map(type, qi.tree_leaves_with_implicit(tree, is_pair))) == [Codes, tuple]
        paths, _ = qi.tree_flatten_with_path_with_implicit(tree, is_pair)
        assert [type(x) for _, x in paths] == [Codes, tuple]
        at_b = lambda path, x: jax.tree_util.keystr(path) == "['b']"
        paths, _ = qi.tree_flatten_with_path_with_implicit(tree, at_b, True)
        assert [type(x) for _, x in paths] == [Codes, tuple]
        with pytest.raises(TypeError, match=r"tree_leaves\(\) got multiple values for argument 'is_leaf'"):
            qi.tree_leaves_with_implicit(tree, is_pair, is_leaf=is_pair)

    def test_the_predicate(self):
        assert qi.leaf_predicate(_codes())
        assert not qi.leaf_predicate(X)

    def test_combine(self):
        leaves = qi.combine_leaf_predicate(jax.tree.leaves, lambda x: isinstance(x, list))
        assert leaves({"a": [1, 2], "b": (3,)}) == [[1, 2], 3]
        assert leaves({"a": [1, 2], "b": (3,)}, is_leaf=lambda x: isinstance(x, tuple)) == [[1, 2], (3,)]


class TestLayers:
    def test_one_layer(self):
        q = _codes()
        tree = [X, Pair(q, X), {"a": q}]
        leaves, structure = qi.flatten_one_implicit_layer(tree)
        assert [type(x) for x in leaves] == [type(X), Codes, type(X), type(X), type(X)]
        assert leaves[1] is q
        again = structure.unflatten(leaves)
        assert jax.tree.structure(again) == jax.tree.structure(tree)
        assert again[1].left is q

    def test_of_an_array_alone(self):
        leaves, structure = qi.flatten_one_implicit_layer(X)
        assert leaves == [X]
        assert structure.unflatten(leaves) is X

    @pytest.mark.parametrize(
        ("make", "depth"),
        [
            (lambda: [X, 3, None], 0),
            (lambda: _codes(), 1),
            (lambda: {"a": X, "b": Pair(X, X)}, 1),
            (lambda: Pair(X, Pair(_codes(), X)), 3),
            (lambda: [_codes(), Pair(_codes(), X)], 2),
        ],
    )
    def test_depth(self, make, depth):
        assert qi.implicit_depth(make()) == depth

    def test_taking_apart_to_the_bottom(self):
        tree = Pair(X, Pair(_codes(), X))
        for _ in range(qi.implicit_depth(tree)):
            tree, _ = qi.flatten_one_implicit_layer(tree)
        assert qi.implicit_depth(tree) == 0
