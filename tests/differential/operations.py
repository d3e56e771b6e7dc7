"""The operations of programs: source text of an expression in `x`, the array that a program has come to.

Those that `quaxlike.testing` lists are among them. Functions of one and two arrays of `jax.numpy` and `lax`
are found by trying them; only calls with more arguments are listed. Letters stand for operands, with shapes
in `OPERANDS`; holes in braces for numbers and modes, which `HOLES` draws.
"""

import ast
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from quaxlike.testing import operations as testing
from tests.numpy_api.arguments import UNTESTED, functions
from tests.primitives.jaxprs import equations

from . import custom
from .groups import GROUPS

Shape = tuple[int, ...]

LISTED = """
x + s
s - x
s * x
x * s
x / s
x * 2
2.0 * x
x - 1
-x
x**2
x + x
x * x
x + y
y - x
x * y
y * x
x / y
x + v
v - x
x * v
v * x
x @ v
v.T @ x
m.T @ x.T
r @ x.T
jnp.dot(q, x)
jnp.vdot(x, y)
jnp.vdot(x, x)
x * x + x * y
x * x + x * v
jnp.vdot(x, x) + jnp.vdot(x, y)
jnp.tensordot(x, y, {n})
jnp.einsum("...i,...i->...", x, y)
jnp.einsum("...i,...i->...i", x, v)
jnp.einsum("ij,ij->", x, x)
jnp.einsum("ij,kj->ki", x, x)
jnp.einsum("i...,i...->", x, v)
jnp.einsum("...ij,...j->...i", x, r)
jnp.kron(x, m)
jnp.outer(x, r)
jnp.inner(x, r)
jnp.sum(x, axis={a})
jnp.sum(x, axis=())
jnp.sum(x, axis={a}, keepdims=True)
jnp.prod(x, axis={a})
jnp.max(x, axis={a})
jnp.min(x, axis={a}, initial=s)
jnp.mean(x, axis={a})
jnp.var(x, axis={a})
jnp.std(x)
jnp.linalg.norm(x, axis={a})
lax.reduce_max(x, [{a}])
lax.reduce_min(x, range(x.ndim))
jnp.any(x > 0, axis={a})
jnp.all(x != 0)
jnp.argmax(x, axis={a})
jnp.cumsum(x, axis={a})
jnp.cumprod(x, axis={a})
lax.cummax(x, {a}, reverse=True)
lax.cumlogsumexp(x, {a})
jnp.sort(x, axis={a})
lax.approx_max_k(x, 1)[0]
jnp.flip(x, {a})
jnp.flip(x)
jnp.roll(x, {i}, {a})
jnp.swapaxes(x, {a}, {b})
jnp.moveaxis(x, {a}, {b})
jnp.expand_dims(x, {a})
x[None]
jnp.squeeze(x[..., None], -1)
jnp.squeeze(x, {a})
x.reshape((1, *x.shape))
lax.reduce_sum(x, range(x.ndim))
jnp.repeat(x, 2, {a})
jnp.stack([x, y], {a})
jnp.stack([x, v], {a})
jnp.concatenate([x, x], {a})
jnp.concatenate([y, x], {a})
jnp.concatenate([x, v], {a})
jnp.split(x, 2, {a})[1]
jnp.unstack(x, axis={a})[0]
jnp.pad(x, 1)
jnp.pad(x, {n}, constant_values=s)
lax.pad(x, jnp.zeros((), x.dtype), [(1, -1, {n})] * x.ndim)
x[{i}:]
x[:{i}]
x[..., {i}:{j}]
x[::2]
x[..., ::-1]
x[-1]
x[..., 0]
x[{n}]
x[jnp.array([0, {i}, -1]) % x.shape[0]]
x[..., jnp.array([{i}]) % x.shape[-1]]
x[jnp.array([0, 0]), jnp.array([0, -1])]
x.at[jnp.array([0, {i}])].get(mode="fill", fill_value={fill})
x.at[..., jnp.array([{i}, 1])].get(mode="{mode}")
jnp.take(x, {i}, {a}, mode="{mode}")
jnp.take(x, jnp.array([1, {i}]), {a}, mode="fill", fill_value={fill})
jnp.take_along_axis(x, jnp.argsort(y, {a}), {a})
lax.dynamic_index_in_dim(x, {i}, {a}, keepdims=False)
lax.dynamic_slice_in_dim(x, {i}, 1, {a})
lax.dynamic_slice_in_dim(x, {i}, x.shape[{a}], {a})
lax.dynamic_slice(x, ({i},) * x.ndim, (1,) * x.ndim)
lax.dynamic_update_slice_in_dim(y, x, {i}, {a})
lax.dynamic_update_slice(x, x[:1], ({i},) * x.ndim)
lax.dynamic_update_slice(jnp.ones((3, *x.shape), x.dtype) * s, x[None], ({i},) + (0,) * x.ndim)
jnp.broadcast_to(s, (3, *x.shape)).at[{n}].set(x)
jnp.broadcast_to(s, (3, *x.shape)).at[{n}].add(x)
x.at[{n}].set(s)
x.at[{n}].add(s)
x.at[jnp.array([0, {i}])].set(s, mode="{mode}")
jnp.where(p, x, y)
jnp.where(p, y, x)
jnp.where(p, x, v)
jnp.where(x > 0, x, s)
jnp.where(y > 0, x, 0)
jnp.where(y > 0, x, y)
lax.select(y > 0, x, v)
lax.select_n(p, y, x)
jnp.clip(x, s, 1)
jnp.tril(x, {i})
jnp.triu(x)
jnp.diagonal(x, axis1=-2, axis2=-1)
jnp.diag(x, {n})
jnp.trace(x, axis1=-2, axis2=-1)
jnp.linalg.solve(x + 3 * jnp.eye(x.shape[-1]), x)
jnp.linalg.matrix_power(x, {n})
lax.linalg.triangular_solve(jnp.triu(x) + 2 * jnp.eye(x.shape[-1]), y, left_side=True)
jax.nn.softmax(x, {a})
jax.nn.logsumexp(x, {a})
jax.nn.relu(x)
jax.nn.relu6(x)
jax.nn.softplus(x)
jax.nn.gelu(x)
jax.nn.silu(x)
jnp.logaddexp(x, y)
jnp.maximum(x, 0)
jnp.minimum(x, y)
jnp.power(x, 3)
jnp.arctan2(x, y)
lax.integer_pow(x, -2)
lax.integer_pow(x, 0)
lax.convert_element_type(x, jnp.float32)
lax.convert_element_type(x, jnp.bfloat16)
lax.convert_element_type(x, int)
lax.convert_element_type(x, bool)
lax.convert_element_type(x, complex)
lax.complex(x, y)
lax.stop_gradient(x) * x
lax.optimization_barrier(x)
lax.conv_general_dilated(y[None, None], x[None, None], (1,) * x.ndim, "SAME")
lax.conv_general_dilated(x[None, None], y[None, None], (1,) * x.ndim, "VALID")
lax.ragged_dot(y, x[None], jnp.array([y.shape[0]]))
lax.associative_scan(jnp.add, x)
lax.reduce_and(x > 0, [{a}])
lax.reduce_or(x > 0, [{a}])
lax.reduce_xor(x > 0, [{a}])
jnp.apply_along_axis(jnp.cumsum, {a}, x)
x.T[..., 1:3]
x[1::3]
x.T[None]
x[..., None, :]
jnp.squeeze(x[..., None, :], -2)
x.transpose(*range(1, x.ndim), 0)
x.reshape(-1).reshape(x.shape)
x.reshape(2, -1, x.shape[-1])[1]
x.reshape(*x.shape[:-1], 2, -1).reshape(x.shape)
x.reshape(*x.shape[:-1], 2, -1)
jnp.broadcast_to(x.T, (2, *x.T.shape))
jnp.concatenate([x, x[:1]])
jnp.concatenate([x, x * 0.5])
jnp.concatenate([x, 2 * x], -1)
jnp.concatenate([x.T, x.T], -1)
jnp.stack([x, x, -x])
jnp.stack([x, x], -1)
jnp.stack([x, 2.0 * x])[1]
jnp.stack([x, 2.0 * x, -x])[jnp.array([2, 0])]
jnp.stack([x, x[:]])
jnp.stack([x[0:4:2], x[1:4:2]])
jnp.stack(jnp.unstack(x))
jnp.stack(jnp.unstack(x, axis=-1), axis=-1)
jnp.swapaxes(jnp.stack([jnp.stack([x, -x])] * 3), 0, 1)
x[jnp.array([[1, 0]])]
jnp.take(x, jnp.array([[1, 0]]), axis=-1)
jnp.take(x, jnp.array([0, x.shape[0], -9]), axis=0)
jax.vmap(lambda i: x[i])(jnp.array([1, 0]))
x[jnp.argsort(y.ravel())[:2] % x.shape[0]]
jnp.take(x, 3 * jnp.argsort(y.ravel())[:3] - 3, axis={a}, mode="{mode}")
jnp.take(x, jnp.argsort(y.ravel())[:3], axis={b}, mode="{mode}", fill_value={fill})
lax.dynamic_index_in_dim(x, {i} - jnp.argmax(y.ravel()), {a})
lax.dynamic_index_in_dim(x, 9 + jnp.argmax(y.ravel()), {a})
lax.dynamic_index_in_dim(x, 9 + jnp.argmax(y.ravel()), {b})
jax.vmap(lambda i: lax.dynamic_index_in_dim(x, i, 0, False))(jnp.argsort(y.ravel())[:2])
jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 1, {b}))(jnp.argsort(y.ravel())[:2])
x[jnp.argmax(y.ravel())]
jax.device_put(x)
(s * x)[jnp.array([0, 1, 1])]
2.0 * x / 3.0
x * y[:1]
x * y[..., :1] / (1 + y[..., :1] ** 2)
x + (x - 3.0 * x) + y
abs(x).sum({a})
jnp.sum(x.T**3, axis=-1)
(x.T @ q.T).T
jnp.einsum("...i,ki->...k", x, m.T)
jnp.einsum("hdi,ti->thd", x.reshape(2, -1, x.shape[-1]), m.T)
jnp.einsum("ij,ij->", x, y)
jnp.tensordot(x, x, 0)
x * jax.pure_callback(np.cos, y, y, vmap_method="expand_dims")
x + jax.pure_callback(np.cos, y, y, vmap_method="expand_dims")
"""

# The shapes of operands, for the shape of `x`; the first is the simplest.
OPERANDS: dict[str, Callable[[Shape], list[Shape]]] = {
    **{letter: lambda s, of=of: [of(s)] for letter, of in testing.OPERANDS.items()},
    "y": lambda s: [s, *({(1,) * len(s), (*s[:-1], 1), (1, *s[1:]), s[1:], ()} - {s} if s else ())],
    "p": lambda s: [()],
    "k": lambda s: [(2, *(1,) * len(s)), (1,) * (len(s) + 1)],
    "e": lambda s: [(0, s[-2] if len(s) > 1 else s[0] if s else 1)],
}
VALUE = "v"

HOLES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.sampled_from([0, 1, 2]),
    "i": st.sampled_from([0, 1, -1, 2, -2, 3, -3, 5, -6, 9]),
    "j": st.sampled_from([1, -1, 2, 3, 9]),
    "a": st.sampled_from([0, -1, 1]),
    "b": st.sampled_from([-1, 0, 1]),
    "mode": st.sampled_from(["fill", "clip", "wrap"]),
    "fill": st.sampled_from(["0", "7", "jnp.nan", "-jnp.inf"]),
    "bad": st.sampled_from(["NAN", "INF", "-INF", "ZERO"]),
    "derivative": st.sampled_from(custom.CUSTOM),
    "staged": st.sampled_from(custom.STAGED),
    "activation": st.sampled_from(["relu", "relu6", "silu", "elu", "selu", "leaky_relu"]),
}

NAMESPACE = {
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "np": np,
    "custom": custom,
    "NAN": math.nan,
    "INF": math.inf,
    "ZERO": 0.0,
}

# Results that say nothing, that are not told apart by what the function returns, or that are as small as the
# rounding of a sum. JAX's `gcd` and `lcm` never end for the least integer, and an array of shifts makes
# `roll` as long a program as it is large.
_SKIPPED = {
    *UNTESTED,
    "gcd",
    "lcm",
    "roll",
    "nextafter",
    "spacing",
    "frombuffer",
    "fromfunction",
    "astype",
    "linalg.eig",
    "linalg.eigh",
    "unique",
}


@functools.cache
def function_of(text: str, nan: float = math.nan) -> Callable[..., Any]:
    """`f(x, y=..., s=...)` for the text of an operation whose holes are filled; if another number is given
    for `NAN`, `INF` is finite, too."""
    letters = ", ".join(f"{letter}=None" for letter in (*OPERANDS, VALUE))
    return eval(
        f"lambda x, {letters}: {text}",
        NAMESPACE | {"NAN": nan} | ({"INF": 1.0} if math.isfinite(nan) else {}),
    )


def lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line]


@functools.cache
def listed() -> dict[str, None]:
    """The operations that are listed here, or for `check_type`."""
    parsed = ast.parse(inspect.getsource(testing)).body
    (table,) = (x.value for x in parsed if isinstance(x, ast.AnnAssign) and x.target.id == "LISTED")
    functions = (f for programs in table.values for f in programs.elts)
    return dict.fromkeys([*(ast.unparse(f.body) for f in functions), *lines(LISTED)])


@functools.cache
def operands_of(text: str) -> tuple[str, ...]:
    """The letters of the operands that the text mentions."""
    names = {node.id for node in ast.walk(ast.parse(filled(text))) if isinstance(node, ast.Name)}
    return tuple(letter for letter in (*OPERANDS, VALUE) if letter in names)


def holes_of(text: str) -> tuple[str, ...]:
    """The names of the holes in the text."""
    return tuple(name for name in HOLES if f"{{{name}}}" in text)


def filled(text: str, **holes: Any) -> str:
    """The text with its holes filled, by the simplest of each if not told."""
    simplest = {"n": 0, "i": 1, "j": 1, "a": 0, "b": -1, "mode": "fill", "fill": "0", "bad": "NAN"}
    simplest |= {"derivative": "scaled", "staged": "now", "activation": "relu"}
    for name, hole in (simplest | holes).items():
        text = text.replace(f"{{{name}}}", str(hole))
    return text


def _names() -> list[str]:
    names = [f"jnp.{name}" for name in functions() if name not in _SKIPPED]
    public = [name for name in dir(lax) if name.islower() and not name.startswith("_")]
    return names + [f"lax.{name}" for name in public if not name.endswith("_p")]


def _calls(name: str) -> list[str]:
    """Calls with as many arrays as the function asks for, if that is one or two."""
    fn = eval(name, NAMESPACE)
    if not callable(fn) or isinstance(fn, type):
        return []
    required = getattr(fn, "nin", None) or sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(fn).parameters.values()
    )
    return {1: ["(x)"], 2: ["(x, y)", "(y, x)"]}.get(required, [])


_SAMPLES = [
    ((3, 3), float),
    ((3, 3), int),
    ((3,), float),
    ((2, 3, 3), float),
    ((3, 3), bool),
    ((1, 4), float),
    ((3, 3), complex),
]


@functools.cache
def operations() -> dict[str, frozenset[str]]:
    """The text of each operation, and the names of the primitives that it binds."""
    texts = listed() | dict.fromkeys(itertools.chain(*map(lines, GROUPS.values())))
    found = {text: primitives for text in texts if (primitives := _primitives(text))}
    assert len(found) == len(texts), set(texts) - set(found)
    for name in _names():
        for call in _calls(name):
            if (primitives := _primitives(name + call)) and "svd" not in primitives:  # LAPACK's may never end
                found[name + call] = primitives
            else:
                break
    return found


def _primitives(text: str) -> frozenset[str]:
    """What the operation binds of the first sample that it takes, if it makes an array of that."""
    for shape, dtype in _SAMPLES:
        x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        operands = {
            letter: jax.ShapeDtypeStruct(shapes(shape)[0], x.dtype) for letter, shapes in OPERANDS.items()
        }
        operands |= {VALUE: x, "p": jax.ShapeDtypeStruct((), jnp.dtype(bool))}
        used = {letter: operands[letter] for letter in operands_of(text)}
        try:
            jaxpr, out = jax.make_jaxpr(function_of(filled(text)), return_shape=True)(x, **used)
        except Exception:  # the function takes other arguments
            continue
        if isinstance(out, jax.ShapeDtypeStruct):
            return frozenset(eqn.primitive.name for eqn in equations(jaxpr.jaxpr))
    return frozenset()
