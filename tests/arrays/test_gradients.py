"""`gradients`, and the two switches that were in its place in version 0.1."""

import dataclasses
import json
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import adapters
from quaxlike.arrays.gradients import strongest
from quaxlike.files import safetensors
from quaxlike.files.tensors import open_tensors, write_tensors
from tests.samples import normal, wrong_types


class Scaled(ql.AdaptedArray):
    """A user's adapter."""

    scale: jax.Array

    def materialise(self):
        return ql.materialise(self.base) * self.scale[..., None]


def _lora(**options):
    return ql.LoraArray(normal(4, 64), normal(2, 64), normal(4, 2), **options)


ARRAYS = {
    "LoraArray": _lora,
    "IA3Array": lambda **options: adapters.IA3Array(normal(4, 64), inputs=normal(64), **options),
    "Scaled": lambda **options: Scaled(normal(4, 64), normal(4), **options),
    "NF4Array": lambda **options: dataclasses.replace(ql.NF4Array.quantize(normal(4, 64)), **options),
    "BlockArray": lambda **options: dataclasses.replace(
        ql.BlockArray.quantize(normal(4, 64), codec="q8_0"), **options
    ),
}
# The first and the second switch, and what is in their place.
SWITCHES = {(False, False): "none", (False, True): "pass", (True, False): "train", (True, True): "train"}
each_array = pytest.mark.parametrize("kind", ARRAYS)
each_pair = pytest.mark.parametrize("on", SWITCHES)


def _older(fields, cls, on):
    """The fields of an array as version 0.1 had them."""
    switches = dict(zip(cls.older_switches, on, strict=True))
    return {name: x for name, x in fields.items() if name != "gradients"} | switches


def test_the_order_of_marks():
    assert strongest("none", "pass") == strongest("pass", "none", "pass") == "pass"
    assert strongest("pass", "train", "none") == "train"


@wrong_types
@each_array
def test_an_unknown_mark(kind):
    for mark in ("trained", True):
        with pytest.raises(ValueError, match=r"takes 'none', 'pass' or 'train' as gradients; found"):
            ARRAYS[kind](gradients=mark)


@pytest.mark.quick("IA3Array")
@each_array
def test_what_derivatives_see(kind):
    def size(mark):
        loss = lambda x: jnp.sum(ql.quaxify(lambda x: x @ jnp.ones(64))(x) ** 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ql.MaterialisationWarning)
            grad = jax.grad(loss, allow_int=True)(ARRAYS[kind](gradients=mark))
        part = grad.w if isinstance(grad, ql.AdaptedArray) else grad.scale
        return sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(part))

    assert size("none") == 0
    assert size("pass") == size("train") > 0


@each_array
@each_pair
def test_old_names(kind, on):
    x = ARRAYS[kind]()
    first, second = x.older_switches
    with pytest.warns(DeprecationWarning, match=rf'{type(x).__name__}\.\w+ is gradients="\w+" now'):
        made = ARRAYS[kind](**{first: on[0], second: on[1]})
    assert made.gradients == SWITCHES[on]
    with pytest.warns(DeprecationWarning, match="will not have the old name") as told:
        assert (getattr(made, first), getattr(made, second)) == (on[0], on[1] and not on[0])
    assert {warning.filename for warning in told} == {__file__}


@each_array
def test_replaced_by_old_names(kind):
    x = ARRAYS[kind](gradients="train")
    replace = type(x).replace if isinstance(x, ql.AdaptedArray) else dataclasses.replace
    first, second = x.older_switches

    def replaced(x, **options):
        with pytest.warns(DeprecationWarning, match="will not have the old name"):
            return replace(x, **options).gradients

    assert replaced(x, **{second: True}) == "train"
    assert replaced(x, **{first: False}) == "none"
    assert replaced(replace(x, gradients="pass"), **{first: False}) == "pass"


@each_array
@each_pair
def test_old_files(kind, on, tmp_path):
    x = ARRAYS[kind]()
    path, types = tmp_path / "model.safetensors", [Scaled]
    safetensors.save(path, {"x": x}, types=types)
    tensors = open_tensors(path)
    manifest = json.loads(tensors.metadata["quaxlike"])
    node = manifest["values"]["x"]
    node["fields"] = _older(node["fields"], type(x), [{"value": each} for each in on])
    arrays = {name: np.asarray(tensors[name]) for name in tensors}
    write_tensors(path, arrays, {"quaxlike": json.dumps(manifest)})
    found = safetensors.load(path, {"x": x}, types=types)["x"]
    assert jax.tree.structure(found) == jax.tree.structure(ARRAYS[kind](gradients=SWITCHES[on]))


@each_array
@each_pair
def test_old_pickles(kind, on):
    x = ARRAYS[kind]()
    older = pickle.loads(pickle.dumps(_Pickled(type(x), _older(vars(x), type(x), on))))
    assert jax.tree.structure(older) == jax.tree.structure(ARRAYS[kind](gradients=SWITCHES[on]))


class _Pickled:
    """Is pickled as an object of a class with these attributes is."""

    def __init__(self, cls, state):
        self.cls, self.state = cls, state

    def __reduce__(self):
        return object.__new__, (self.cls,), self.state


@each_array
def test_pickles(kind):
    x = ARRAYS[kind](gradients="pass")
    assert jax.tree.structure(pickle.loads(pickle.dumps(x))) == jax.tree.structure(x)
