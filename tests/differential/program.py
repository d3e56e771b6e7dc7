"""A program as data: a value, operations, and the transforms that it goes through."""

import contextlib
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import quaxlike as ql
from quaxlike.core.values import aval_of
from tests.array_types import TYPES, WEIGHTS, parts

from .groups import GROUPS
from .operations import (
    HOLES,
    OPERANDS,
    VALUE,
    filled,
    function_of,
    holes_of,
    lines,
    listed,
    operands_of,
    operations,
)
from .origins import ORIGINS, WHOLE, allowed, takes
from .transforms import INNER, OUTER, ROWS, Function

Shape = tuple[int, ...]

# The primitives that programs are mostly made of: half of the steps bind one of them, if there is a rule.
COMMON = (
    "add",
    "dot_general",
    "dynamic_slice",
    "gather",
    "mul",
    "reduce_sum",
    "select_n",
    "sub",
    "transpose",
)

Change = Callable[[jax.Array], jax.Array]


def _with(*numbers: float) -> Change:
    """The first elements are these numbers."""
    return lambda x: x.ravel().at[: len(numbers)].set(jnp.array(numbers[: x.size], x.dtype)).reshape(x.shape)


def _in(dtype: Any) -> Change:
    return lambda x: x if jnp.iscomplexobj(x) else x.astype(dtype)


# What programs do to the arrays of their values, and to their other operands.
NUMBERS: dict[str, tuple[Change | None, Change | None]] = {
    "": (None, None),
    "NaN": (_with(jnp.nan), None),
    "infinity": (_with(jnp.inf), None),
    "zeros": (_with(0.0, -0.0), None),
    "operands with NaN": (None, _with(jnp.nan)),
    "operands with infinity": (None, _with(-jnp.inf)),
    "operands with zeros": (None, _with(0.0)),
    "float16": (_in(jnp.float16), None),
    "bfloat16": (_in(jnp.bfloat16), None),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation with its holes filled, and its operands by letter: a shape, or a type and a seed."""

    text: str
    operands: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    type: str
    steps: tuple[Step, ...]
    inner: tuple[str, ...] = ()
    """Inside of `quaxify`, from the outermost on."""
    outer: tuple[str, ...] = ()
    """Outside of `quaxify`, from the outermost on."""
    jit: bool = False
    x64: bool = True
    first: int = 0
    """The number of the first step, which names its operands."""
    origin: str = "argument"
    """Where the value comes from, in `ORIGINS`."""
    numbers: str = ""
    """What is done to the numbers, in `NUMBERS`."""

    def operands(self) -> dict[str, Any]:
        """All operands by name, and as `x` the value itself."""
        x = _value(self.type, 0, self.x64, self.numbers)
        of_operands = NUMBERS[self.numbers][1] or (lambda x: x)
        out = {"x": x, "z": _plain("z", *_shape_dtype(x))}
        aval = self._seen_by_steps()
        for i, step in enumerate(self.steps, self.first):
            for letter, spec in step.operands:
                if letter == VALUE:
                    out[f"{letter}{i}"] = _value(*spec, self.x64, self.numbers)
                else:
                    operand = _operand(letter, i, spec, aval.dtype)
                    inexact = jnp.issubdtype(operand.dtype, jnp.inexact)
                    out[f"{letter}{i}"] = of_operands(operand) if inexact else operand
            aval = result(step, aval)
        return out

    def function(self, make: Any = None, quaxify: Any = None, nan: float = math.nan) -> Function:
        """`f(x, ops)`: the steps, inside of the inner transforms, on a value that comes from where it comes.

        `make(x)` is the value, or its array, for what stands for it outside of `quaxify`; without that `x`
        is the array itself. `NAN` is another number in the steps if that is given.
        """

        def chain(x: Any, ops: dict[str, Any]) -> Any:
            for i, step in enumerate(self.steps, self.first):
                of_step = {letter: ops[f"{letter}{i}"] for letter, _ in step.operands}
                x = function_of(step.text, nan)(x, **of_step)
            return x

        same = lambda x, *_: x
        inside = functools.partial(_inside, self.inner)
        of_origin = functools.partial(ORIGINS[self.origin], make or same, quaxify or same, inside, chain)
        names = [
            "z",
            *(f"{letter}{i}" for i, s in enumerate(self.steps, self.first) for letter, _ in s.operands),
        ]
        # Not those of programs that are checked together with it.
        return lambda x, ops: of_origin(x, {name: ops[name] for name in names})

    def _seen_by_steps(self) -> jax.ShapeDtypeStruct:
        shape, dtype = _shape_dtype(_value(self.type, 0, self.x64, self.numbers))
        return jax.ShapeDtypeStruct(_seen(self.inner, shape, self.origin), dtype)

    def __str__(self) -> str:
        """Source that runs on its own, and shows what is computed."""
        out = [f"x = TYPES[{self.type!r}]()"]
        for i, step in enumerate(self.steps, self.first):
            args = "".join(f", {letter}{i}={spec}" for letter, spec in step.operands)
            out.append(f"  x = {step.text}{'   # ' + args[2:] if args else ''}")
        out.append(f"  inside: {' of '.join(self.inner) or '-'}; outside: {' of '.join(self.outer) or '-'}")
        out[-1] += f"; {self.origin}; {self.numbers or 'usual numbers'}"
        out[-1] += f"; {'jit' if self.jit else 'eager'}, {64 if self.x64 else 32} bits"
        return "\n".join([*out, f"check({self!r})"])


@contextlib.contextmanager
def under(x64: bool) -> Iterator[None]:
    """The settings that programs run under: those of JAX, but for 64-bit types."""
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _shape_dtype(x: Any) -> tuple[Shape, Any]:
    aval = aval_of(x)
    return aval.shape, aval.dtype


@functools.cache
def _value(name: str, k: int, x64: bool, numbers: str = "") -> Any:
    with under(x64):
        x = TYPES[name](k)
        # What slots hold that stand for no element is NaN: it may not be read, here either.
        dense = ql.materialise(x)
        assert isinstance(x, ql.arrays.zero.Full) or jnp.isfinite(dense).all(), f"{name} is {dense}"
        change = NUMBERS[numbers][0]
        return x if change is None else _changed(x, change)


def _changed(x: Any, change: Change) -> Any:
    """The value, with its first array changed, or if that changes a dtype with all of them; or the value
    itself, where another dtype does not go with its fields."""
    leaves, tree = jtu.tree_flatten(x)
    first = True
    for i, leaf in enumerate(leaves):
        if eqx.is_inexact_array(leaf) and leaf.size:
            new = change(leaf)
            if first or new.dtype != leaf.dtype:
                leaves[i], first = new, False
    out = jtu.tree_unflatten(tree, leaves)
    return out if _shape_dtype(out) == (x.shape, ql.materialise(out).dtype) else x


def _operand(letter: str, i: int, shape: Shape, dtype: Any) -> jax.Array:
    return jnp.array(bool(i % 2)) if letter == "p" else _plain(f"{letter}{i}", shape, dtype)


def _plain(name: str, shape: Shape, dtype: Any) -> jax.Array:
    """Numbers that are the same for the same name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    numbers = rng.uniform(0.3, 1.5, shape) * rng.choice([-1, 1], shape, p=[0.3, 0.7])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(numbers * (1 - 0.5j), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(numbers, dtype)
    return jnp.asarray(
        rng.integers(0, 4, shape) if jnp.issubdtype(dtype, jnp.integer) else numbers > 0, dtype
    )


def _seen(inner: tuple[str, ...], shape: Shape, origin: str = "argument") -> Shape:
    """The shape that is left of `shape` for what is inside of the transforms."""
    for name in () if origin in WHOLE else inner:
        if name in ROWS:
            shape = shape[:-1] if name == "vmap_of_columns" else shape[1:]
    return shape


def _inside(inner: tuple[str, ...], f: Any) -> Any:
    return functools.reduce(lambda f, name: INNER[name](f), reversed(inner), f)


def result(step: Step, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
    """What plain JAX gives for the operation; None if it takes no such operands."""
    out = _result(step, aval.shape, aval.dtype, jax.config.jax_enable_x64)
    return out if isinstance(out, jax.ShapeDtypeStruct) and out.size <= 256 else None


@functools.lru_cache(maxsize=1 << 16)
def _result(step: Step, shape: Shape, dtype: Any, x64: bool) -> jax.ShapeDtypeStruct | None:
    return _evaluated(function_of(step.text), jax.ShapeDtypeStruct(shape, dtype), **_avals(step, dtype, x64))


@functools.lru_cache(maxsize=1 << 16)
def _has_gradient(step: Step, inner: tuple[str, ...], x: jax.ShapeDtypeStruct, x64: bool) -> bool:
    """Whether plain JAX differentiates the operation inside of the transforms."""
    f = _inside(
        inner, lambda x, ops: function_of(step.text)(x, **{name: ops[name] for name, _ in step.operands})
    )
    grad = OUTER["grad"](f) if jnp.issubdtype(x.dtype, jnp.inexact) else f
    return _evaluated(grad, x, _avals(step, x.dtype, x64) | {"z": x}) is not None


def _avals(step: Step, dtype: Any, x64: bool) -> dict[str, jax.ShapeDtypeStruct]:
    of = lambda letter, spec: (
        jax.ShapeDtypeStruct(*_shape_dtype(_value(*spec, x64)))
        if letter == VALUE
        else jax.ShapeDtypeStruct(spec, bool if letter == "p" else dtype)
    )
    return {letter: of(letter, spec) for letter, spec in step.operands}


def _evaluated(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return jax.eval_shape(f, *args, **kwargs)
    except Exception:  # whatever JAX says of it
        return None


# -------------------------------------------------------------------------------------------------
# Drawing
# -------------------------------------------------------------------------------------------------


@functools.cache
def _by_primitive(name: str) -> Mapping[str, tuple[str, ...]]:
    """For each primitive that the type, or a part of it, has a rule for: the operations that bind it."""
    ruled = {rule.primitive.name for cls in classes_of(name) for rule in ql.rules_for(cls)}
    table = {p: tuple(text for text, bound in operations().items() if p in bound) for p in sorted(ruled)}
    return {p: texts for p, texts in table.items() if texts}


@functools.cache
def classes_of(name: str) -> frozenset[type]:
    """The classes that a value of the type is made of."""
    return frozenset(map(type, parts(_value(name, 0, True))))


def _others(name: str, shape: Shape, x64: bool) -> list[str]:
    """The types of which a value of this shape may stand beside one of type `name`."""
    same = [name] if _value(name, 0, x64).shape == shape else []
    return same + (list(WEIGHTS) if shape == (4, 4) else [])


@st.composite
def steps(draw: st.DrawFn, name: str, aval: jax.ShapeDtypeStruct, x64: bool) -> Step:
    by_primitive = _by_primitive(name)
    common = [primitive for primitive in COMMON if primitive in by_primitive]
    kind = draw(st.integers(0, 5))
    if kind > 3:
        text = draw(st.sampled_from(lines(GROUPS[draw(st.sampled_from(sorted(GROUPS)))])))
    elif by_primitive and kind:
        primitive = draw(st.sampled_from(common if common and kind > 1 else sorted(by_primitive)))
        text = draw(st.sampled_from(by_primitive[primitive]))
    else:
        text = draw(st.sampled_from(sorted(operations())))
    return draw(calls(text, name, aval, x64))


@st.composite
def calls(draw: st.DrawFn, text: str, name: str, aval: jax.ShapeDtypeStruct, x64: bool) -> Step:
    """The operation with its holes filled, and operands."""
    holes = {hole: draw(HOLES[hole]) for hole in holes_of(text)}
    operands = []
    for letter in operands_of(text):
        if letter == VALUE:
            others = _others(name, aval.shape, x64)
            assume(others)
            other = draw(st.one_of(st.just(others[0]), st.sampled_from(others)))
            operands.append((letter, (other, draw(st.sampled_from([1, 0])))))
        else:
            operands.append((letter, draw(st.sampled_from(OPERANDS[letter](aval.shape)))))
    return Step(filled(text, **holes), tuple(operands))


@st.composite
def programs(
    draw: st.DrawFn, names: tuple[str, ...] = tuple(TYPES), max_steps: int = 4
) -> tuple[Program, ...]:
    """A chain of operations inside and outside of transforms."""
    name = draw(st.sampled_from(names))
    x64 = draw(st.sampled_from([True, True, True, False]))
    origin = draw(st.sampled_from(["argument", *ORIGINS]))
    numbers = draw(st.sampled_from([""] * len(NUMBERS) + sorted(NUMBERS)))
    with under(x64):
        shape, dtype = _shape_dtype(_value(name, 0, x64, numbers))
        inner = tuple(draw(st.lists(st.sampled_from(sorted(INNER)), max_size=2)))
        outer = tuple(draw(st.lists(st.sampled_from(sorted(OUTER)), max_size=2)))
        assume(sum(t in ROWS for t in inner) <= len(shape) and allowed(origin, inner))
        aval = jax.ShapeDtypeStruct(_seen(inner, shape, origin), dtype)
        chain: list[Step] = []
        for _ in range(draw(st.integers(0 if inner else 1, max_steps))):
            valid = lambda step, aval=aval: takes(origin, step.text, inner) and result(step, aval) is not None
            step = draw(steps(name, aval, x64).filter(valid))
            chain.append(step)
            aval = result(step, aval)
    jit = draw(st.sampled_from([True, True, False]))
    return (Program(name, tuple(chain), inner, outer, jit, x64, origin=origin, numbers=numbers),)


def _listed(texts: tuple[str, ...], with_value: bool) -> tuple[str, ...]:
    """Those that are listed, or if there are any those with another Value; else all."""
    usual = tuple(text for text in texts if text in listed())
    of_two = tuple(text for text in usual if VALUE in operands_of(text))
    return (of_two if with_value else ()) or usual or texts


@st.composite
def of_each_rule(
    draw: st.DrawFn, names: tuple[str, ...] = tuple(TYPES), common: int = 2, share: int = 1, numbers: str = ""
) -> tuple[Program, ...]:
    """Operations that bind the primitives that a type has rules for, and its transforms, one by one.

    There are so many of each of the `common` primitives, listed ones, about half of them with another
    Value; of the other primitives, and of the transforms, one in `share` is taken. A type that has rules for
    most primitives has alike ones: of those a quarter.
    """
    name = draw(st.sampled_from(names))
    x64 = draw(st.sampled_from([True, True, True, False]))
    out: list[Program] = []
    with under(x64):
        shape, dtype = _shape_dtype(_value(name, 0, x64, numbers))
        table = _by_primitive(name) or {"any": tuple(sorted(operations()))}
        usual = [primitive for primitive in COMMON if primitive in table] or sorted(table)
        taken = lambda: draw(st.integers(0, (share if len(table) < 80 else 4 * share) - 1)) == 0
        wanted = [(_listed(table[p], draw(st.booleans())), ()) for p in usual * common]
        wanted += [(texts, ()) for p, texts in table.items() if p not in usual and taken()]
        wanted += [(lines(group), ()) for group in GROUPS.values() if taken()]
        wanted += [(table[draw(st.sampled_from(usual))], (each,)) for each in sorted(INNER) if taken()]
        for texts, inner in wanted:
            origin = draw(st.sampled_from(sorted(ORIGINS))) if inner else "argument"
            if sum(t in ROWS for t in inner) > len(shape) or not allowed(origin, inner):
                continue
            for _ in range(3):  # some operations are not for this shape or dtype
                text = draw(st.sampled_from(texts))
                if not takes(origin, text, inner):
                    continue
                aval = jax.ShapeDtypeStruct(_seen(inner, shape, origin), dtype)
                step = draw(calls(text, name, aval, x64))
                if result(step, aval) is not None and _has_gradient(
                    step, inner, jax.ShapeDtypeStruct(shape, dtype), x64
                ):
                    outer = ("grad_and_result",)
                    out.append(Program(name, (step,), inner, outer, True, x64, len(out), origin, numbers))
                    break
    return tuple(out)
