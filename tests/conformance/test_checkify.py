"""`checkify` around a program on Values reports what it reports for their arrays, no more and no less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import quaxlike as ql
from tests.array_types import CORNERS, WEIGHTS
from tests.samples import some_of

TYPES = {**WEIGHTS, **CORNERS}

# Programs of an array and an index that is traced.
INDEXED = {
    "row": lambda v, i: v[i],
    "rows": lambda v, i: v[jnp.stack([i, 0, i])],
    "rows that exist": lambda v, i: v.at[i].get(mode="fill"),
    "nearest row": lambda v, i: v.at[i].get(mode="clip"),
    "negative row": lambda v, i: v[-1 - i],
    "element": lambda v, i: v[(i,) * v.ndim],
    "column": lambda v, i: v[..., i],
    "columns": lambda v, i: v[..., jnp.stack([i, i])],
    "elements": lambda v, i: v[(jnp.stack([i, 0]),) * v.ndim],
    "take": lambda v, i: jnp.take(v, i, 0),
    "take of a tuple": lambda v, i: jnp.take(v, jnp.stack([i, 0]), -1),
    "take_along_axis": lambda v, i: jnp.take_along_axis(v, jnp.full((1,) * v.ndim, i), 0),
    "dynamic_slice": lambda v, i: lax.dynamic_slice(v, (i,) * v.ndim, (1,) * v.ndim),
    "dynamic_slice_in_dim": lambda v, i: lax.dynamic_slice_in_dim(v, i, 1, 0),
    "dynamic_index_in_dim": lambda v, i: lax.dynamic_index_in_dim(v, i, -1),
    "dynamic_slice_p": lambda v, i: lax.dynamic_slice_p.bind(v, *(i,) * v.ndim, slice_sizes=v.shape),
    "write": lambda v, i: v.at[i].set(0),
    "add": lambda v, i: v.at[..., i].add(1),
    "vmap": lambda v, i: jax.vmap(lambda j: v[j])(jnp.stack([i, 0])),
    "vmap of slices": lambda v, i: jax.vmap(lambda j: lax.dynamic_slice_in_dim(v, j, 1, 0))(
        jnp.stack([0, i])
    ),
    "scan": lambda v, i: lax.scan(lambda c, j: (c, v[j]), 0, jnp.stack([0, i]))[1],
    "jit": lambda v, i: jax.jit(lambda v: v[i])(v),
    "cond": lambda v, i: lax.cond(i > -9, lambda: ql.materialise(v[i]), lambda: ql.materialise(v[0])),
    "of a product": lambda v, i: (v * 2)[i],
}
# Programs of an array alone, which is indexed inside of its rules.
WHOLE = {
    "first row": lambda v: v[0],
    "last rows": lambda v: v[-2:],
    "last columns": lambda v: v[..., -2:],
    "known rows": lambda v: v[jnp.array([1, 0])],
    "known rows beyond the end": lambda v: v[jnp.array([0, 99])],
    "steps": lambda v: v[::2],
    "mask": lambda v: jnp.where(v > 0, v, 0),
    "materialise": lambda v: v + 0.5,
    "transpose": lambda v: v.T,
    "reshape": lambda v: v.reshape(-1),
    "flip": lambda v: v[::-1],
    "sum": lambda v: v.sum(0),
    "sum of rows": lambda v: v.sum(-1),
    "product": lambda v: jnp.ones((2, v.shape[0])) @ v,
    "other product": lambda v: v @ jnp.ones(v.shape[-1:]),
    "elementwise": lambda v: v * jnp.ones(v.shape),
    "concatenate": lambda v: jnp.concatenate([v, v]),
    "scan over rows": lambda v: lax.scan(lambda c, row: (c + row.sum(), None), 0.0, v)[0],
    "division": lambda v: 1 / (v * 0.0),
    "logarithm": lambda v: jnp.log(v - 100.0),
}


def reports(program, x, indices):
    """The errors that `checkify` finds for each index, or the type of what it raises; None for a program that
    JAX or the type itself refuses, such as a sum of metres and a number."""
    run = ql.quaxify(lambda *args: jax.tree.leaves(ql.materialise(program(*args))))
    checked = jax.jit(checkify.checkify(run, errors=checkify.all_checks))
    try:
        with ql.on_materialise("allow"):
            found = [checked(x, *index)[0].get() for index in indices]
    except (TypeError, ValueError, IndexError) as raised:
        try:
            with ql.on_materialise("allow"):
                jax.eval_shape(run, x, *indices[0])
        except type(raised):
            return None
        return [type(raised)]
    return [None if text is None else _normal(text) for text in found]


def _normal(text):
    """Without the place, and without the primitive that makes a NaN: a rule may compute it by another one."""
    return text.split("\n")[0].split(". (")[0].split(" by primitive")[0]


def differences(programs, x, indices=((),)):
    """For each program whose reports differ from those on the array: the reports, and those on the array."""
    array, out = ql.materialise(x), {}
    for name, program in programs.items():
        found, wanted = (reports(program, v, indices) for v in (x, array))
        if found != wanted and None not in (found, wanted):
            out[name] = found, wanted
    return out


def _indices(x):
    return [(jnp.asarray(i),) for i in (0, min(x.shape) - 1, 50, -50)]


@pytest.mark.quick("SparseArray")
@pytest.mark.parametrize("name", ["Int8Array", "LoraArray of NF4Array", "SparseArray", "BlockSparseArray"])
def test_rows(name):
    few = {program: INDEXED[program] for program in ("row", "rows", "dynamic_slice_in_dim")}
    x = TYPES[name]()
    assert not differences(few, x, _indices(x))
    assert not differences({"first row": WHOLE["first row"]}, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.parametrize("name", TYPES)
def test_indices(name, default_promotion):
    x = TYPES[name]()
    if x.ndim:
        assert not differences(some_of(INDEXED, name, 12), x, _indices(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_programs_on_whole_arrays(name, default_promotion):
    x, programs = TYPES[name](), some_of(WHOLE, name, 6)
    if isinstance(x, ql.SparseArray) and x.order is None:
        # The product rematerialises, and JAX 0.12 refuses checks of indices in `jax.checkpoint`.
        programs = {text: program for text, program in programs.items() if "product" not in text}
    if x.ndim:
        assert not differences(programs, x)


@pytest.mark.parametrize("name", ["Int8Array", "LoraArray"])
def test_gradients(name):
    """The id of a row that is looked up in a loss."""
    x = TYPES[name]()

    def loss(scale, x, i):
        return (ql.quaxify(lambda x: jnp.sum(jnp.take(x, i[None], 0) * scale))(x)) ** 2

    checked = jax.jit(checkify.checkify(jax.grad(loss), errors=checkify.index_checks))
    assert checked(2.0, x, jnp.asarray(3))[0].get() is None
    assert "index 7 is out of bounds for axis 0 with size 4" in checked(2.0, x, jnp.asarray(7))[0].get()


def test_an_index_that_is_known_or_eager_adds_nothing():
    x = TYPES["Int8Array"]()
    zero = np.int32(0)
    row = ql.quaxify(lambda x, i: lax.dynamic_slice_p.bind(x, i, zero, slice_sizes=(1, 4)))
    assert str(jax.make_jaxpr(row)(x, zero)).count("quaxlike_index") == 1
    assert "quaxlike_index" not in str(jax.make_jaxpr(lambda x: row(x, zero))(x))
    assert "quaxlike_index" not in jax.jit(row).lower(x, zero).as_text()


@pytest.mark.slow
def test_a_slice_of_all_is_the_array():
    x = TYPES["NF4Array, double"]()
    whole = ql.quaxify(lambda x, i: lax.dynamic_slice_p.bind(x, i, i, slice_sizes=(4, 4)))(x, jnp.asarray(2))
    assert type(whole) is ql.NF4Array
