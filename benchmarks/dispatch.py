"""Eager dispatch, tracing and fixed costs of quaxlike, plain JAX, a hand-written Equinox module, and quax."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

import quaxlike as ql

from .harness import Case

try:
    import quax
except ImportError:  # `pip install '.[benchmark]'`
    quax = None

N = 50  # operations in a chain


class Boxed(ql.ArrayValue):
    array: Any

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self) -> jax.Array:
        return self.array


@ql.register("add")
def _add(x: Boxed, y: Boxed, **params: Any) -> Boxed:
    return Boxed(lax.add_p.bind(x.array, y.array, **params))


@ql.register("dot_general")
def _dot(x: Boxed, y: jax.Array, **params: Any) -> jax.Array:
    return lax.dot_general_p.bind(x.array, y, **params)


class ByHand(eqx.Module):
    """What a user would write without any of this."""

    array: Any

    def __add__(self, other: "ByHand") -> "ByHand":
        return ByHand(lax.add(self.array, other.array))


if quax is not None:

    class QuaxBoxed(quax.ArrayValue):
        array: Any

        def aval(self) -> jax.core.ShapedArray:
            return jax.core.ShapedArray(self.array.shape, self.array.dtype)

        def materialise(self) -> jax.Array:
            return self.array

    @quax.register(lax.add_p)
    def _quax_add(x: QuaxBoxed, y: QuaxBoxed, **params: Any) -> QuaxBoxed:
        return QuaxBoxed(lax.add_p.bind(x.array, y.array, **params))


def _chain(op: Callable[[Any, Any], Any], n: int = N) -> Callable[[Any, Any], Any]:
    def run(a: Any, b: Any) -> Any:
        for _ in range(n):
            a = op(a, b)
        return a

    return run


def _four_ways(
    plain: Callable[..., Any], by_hand: Callable[..., Any], run: Callable[..., Callable[[], Any]]
) -> dict[str, Callable[[], Any]]:
    ways = {
        "plain": run(plain, lambda x: x),
        "by hand": run(by_hand, ByHand),
        "quaxlike": run(ql.quaxify(plain), Boxed),
    }
    if quax is not None:
        ways["quax"] = run(quax.quaxify(plain), QuaxBoxed)
    return ways


def _eagerly(f: Callable[..., Any], make: Callable[[Any], Any]) -> Callable[[], Any]:
    x = make(jnp.ones(4))
    return lambda: f(x, x)


def _traced(f: Callable[..., Any], make: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> Any:
        out = lambda a, b: jax.tree_util.tree_leaves(f(make(a), make(b)))
        return jax.make_jaxpr(out)(jnp.ones(4), jnp.ones(4))

    return run


OPERATORS = {"lax.add": lax.add, "a + b": lambda a, b: a + b, "jnp.add": jnp.add}


def chains() -> list[Case]:
    by_hand = _chain(lambda a, b: a + b)
    return [
        Case(f"{how} chain of {name}", _four_ways(_chain(op), by_hand, run), N)
        for how, run in {"eager": _eagerly, "tracing": _traced}.items()
        for name, op in OPERATORS.items()
    ]


def growth(quick: bool) -> list[Case]:
    cases = []
    for n in (10, 100, 1000) if quick else (10, 100, 1000, 10_000):
        f, x = ql.quaxify(_chain(lax.add, n)), Boxed(jnp.ones(4))
        cases.append(Case(f"eager, {n:,} operations", {"quaxlike": functools.partial(f, x, x)}, n))
    return cases


def calls() -> list[Case]:
    x = jnp.ones(4)
    jitted = jax.jit(lambda a, b: a + b)
    many = lambda f, *args: lambda: [f(*args) for _ in range(N)]
    warm = {
        "plain": many(jitted, x, x),
        "by hand": many(jax.jit(lambda a, b: a + b), ByHand(x), ByHand(x)),
        "quaxlike": many(ql.quaxify(jitted), Boxed(x), Boxed(x)),
    }
    if quax is not None:
        warm["quax"] = many(quax.quaxify(jitted), QuaxBoxed(x), QuaxBoxed(x))
    inline = {
        "plain": many(jitted, x, x),
        "quaxlike": lambda: [ql.quaxify(jitted)(Boxed(x), Boxed(x)) for _ in range(N)],
    }
    if quax is not None:
        inline["quax"] = lambda: [quax.quaxify(jitted)(QuaxBoxed(x), QuaxBoxed(x)) for _ in range(N)]
    nested = ql.quaxify(ql.quaxify(lambda a: a + a), filter_spec=False)
    mixed = lambda a, y: (a + a, lax.add(y, y), lax.mul(y, y))
    weight, y = jnp.ones((4, 4)), jnp.ones(4)
    lora = ql.LoraArray(weight, jnp.ones((2, 4)), jnp.ones((4, 2)))
    by_hand_lora = lambda w, a, b, y: lax.add(lax.dot(w, y), lax.dot(b, lax.dot(a, y)))
    return [
        Case("warm quaxify(jit(f))", warm, N),
        Case("inline quaxify(jit)", inline, N),
        Case(
            "warm jit(quaxify(f)), same leaves",
            {
                "plain": many(jax.jit(lambda a, b: Boxed(lax.add(a.array, b.array))), Boxed(x), Boxed(x)),
                "quaxlike": many(jax.jit(ql.quaxify(lambda a, b: a + b)), Boxed(x), Boxed(x)),
            },
            N,
        ),
        Case("fixed cost of a call", {"quaxlike": many(ql.quaxify(lambda a: a), Boxed(x))}, N),
        Case("nested quaxify", {"quaxlike": many(nested, Boxed(x))}, N),
        Case(
            "one operation on Values, two on arrays",
            {
                "plain": many(mixed, x, x),
                "by hand": many(mixed, ByHand(x), x),
                "quaxlike": many(ql.quaxify(mixed), Boxed(x), x),
            },
            3 * N,
        ),
        Case(
            "eager matmul with LoRA",
            {
                "by hand": many(by_hand_lora, weight, lora.a, lora.b, y),
                "quaxlike": many(ql.quaxify(lax.dot), lora, y),
            },
            N,
        ),
        Case("building a Value", {"by hand": many(ByHand, x), "quaxlike": many(Boxed, x)}, N),
        Case(
            "flattening and unflattening a Value",
            {
                "by hand": many(functools.partial(jax.tree_util.tree_map, lambda v: v), ByHand(x)),
                "quaxlike": many(functools.partial(jax.tree_util.tree_map, lambda v: v), Boxed(x)),
            },
            N,
        ),
    ]


def control_flow() -> list[Case]:
    body = lambda c, _: (c + c, None)
    double = lambda a: a + a
    programs = {
        "scan": lambda a: lax.scan(body, a, None, length=3)[0],
        "cond": lambda a: lax.cond(True, double, double, a),
        "while_loop": lambda a: lax.while_loop(_below_3, _step, (a, 0))[0],
    }
    x = jnp.ones(4)
    return [
        Case(
            f"repeated eager {name}",
            {"plain": _repeated(f, x), "quaxlike": _repeated(ql.quaxify(f), Boxed(x))},
            5,
        )
        for name, f in programs.items()
    ]


def _repeated(f: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    return lambda: [f(x) for _ in range(5)]


def _below_3(carry: Any) -> Any:
    return carry[1] < 3


def _step(carry: Any) -> Any:
    return carry[0] + carry[0], carry[1] + 1


def many_jits() -> list[Case]:
    x = jnp.linspace(0.0, 1.0, 32)
    f = lambda x: jnp.histogram2d(x, x, bins=4)[0]
    ways = {"plain": functools.partial(f, x), "quaxlike": functools.partial(ql.quaxify(f), Boxed(x))}
    if quax is not None:
        ways["quax"] = functools.partial(quax.quaxify(f), QuaxBoxed(x))
    return [Case("jnp.histogram2d", ways)]


def many_rules() -> list[Case]:
    """Dispatch costs the same however many rules there are."""
    x = Boxed(jnp.ones(4))
    rules = ql.RuleSet()
    for i in range(1000):
        other = type(f"Other{i}", (Boxed,), {})

        def rule(x: Any, y: Any, **params: Any) -> Any: ...

        rule.__annotations__ = {"x": other, "y": other}
        ql.register("add", rules=rules)(rule)
    chain = _chain(lax.add)
    return [
        Case(
            "eager chain, 1,000 more rules",
            {
                "quaxlike": functools.partial(ql.quaxify(chain, rules=rules), x, x),
                "few rules": functools.partial(ql.quaxify(chain), x, x),
            },
            N,
        )
    ]


def imports() -> list[Case]:
    def run(module: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    return [Case("import", {"equinox": run("equinox"), "quaxlike": run("quaxlike")})]
