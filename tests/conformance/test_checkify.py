"""`checkify` around a program on Values reports what it reports for their arrays, no more and no less."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify

import quaxlike as ql
from tests.array_types import CORNERS, WEIGHTS

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


def report(fn, *args):
    """The error that `checkify` finds, without its traceback, or the text of what the program raises."""
    with ql.on_materialise("allow"):
        try:
            error, _ = checkify.checkify(fn, errors=checkify.all_checks)(*args)
        except (TypeError, ValueError, IndexError) as raised:
            return type(raised)
    message = error.get()
    return None if message is None else message.split("\n")[0].split(". (")[0]


def differences(programs, x, indices=((),)):
    """For each program whose report differs from that on the array: the report, and the one on the array."""
    array, out = ql.materialise(x), {}
    for name, program in programs.items():
        run = ql.quaxify(lambda *args, program=program: jax.tree.leaves(ql.materialise(program(*args))))
        for index in indices:
            wanted = report(run, array, *index)
            found = report(run, x, *index)
            if found != wanted:
                out[name, *map(int, index)] = found, wanted
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_indices(name, default_promotion):
    x = TYPES[name]()
    if x.ndim:
        assert not differences(INDEXED, x, [(jnp.asarray(i),) for i in (0, min(x.shape) - 1, 50, -50)])


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_programs_on_whole_arrays(name, default_promotion):
    x = TYPES[name]()
    if x.ndim:
        assert not differences(WHOLE, x)
