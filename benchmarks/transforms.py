"""A Value under each transform, in quaxlike and in quax 0.4.6.

`python -m benchmarks.transforms` runs the programs of `quaxlike.testing` in both, on a type that forwards
every primitive to its array and refuses to materialise, and prints a Markdown table.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import quax

import quaxlike as ql
from quaxlike.testing.programs import LINEAR, MODES
from tests.strict import Through

X = jnp.array([1.0, -2.0, 3.0, 0.5])


class QuaxThrough(quax.ArrayValue):
    array: Any

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self) -> Any:
        raise RuntimeError("QuaxThrough refuses to materialise")

    @staticmethod
    def default(primitive: Any, values: Any, params: Any) -> Any:
        arrays = [x.array if isinstance(x, QuaxThrough) else x for x in values]
        out = primitive.bind(*arrays, **primitive.get_bind_params(params))
        wrap = lambda x: QuaxThrough(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return [wrap(x) for x in out] if primitive.multiple_results else wrap(out)


def _run(mode: str, g: Callable[..., Any], make: Callable[..., Any]) -> Any:
    def dense(tree: Any) -> Any:
        is_leaf = lambda x: isinstance(x, Through | QuaxThrough)
        return jtu.tree_map(lambda x: x.array if is_leaf(x) else x, tree, is_leaf=is_leaf)

    ways = {
        "eager": lambda: dense(g(make(X))),
        "jit": lambda: dense(jax.jit(g)(make(X))),
        "vmap": lambda: dense(jax.vmap(lambda v: g(v))(make(jnp.stack([X, 2.0 * X])))),
        "grad": lambda: jax.grad(lambda x: jnp.sum(dense(g(make(x)))))(X),
    }
    return ways[mode]()


def _expected(f: Callable[..., Any]) -> dict[str, Any]:
    """What plain arrays give, in the modes that JAX can do."""
    found: dict[str, Any] = {}
    for mode in MODES:
        with contextlib.suppress(Exception):
            found[mode] = _run(mode, f, lambda x: x)
    return found


def _passes(mode: str, quaxified: Callable[..., Any], make: Callable[..., Any], expected: Any) -> bool:
    try:
        np.testing.assert_allclose(_run(mode, quaxified, make), expected, rtol=1e-5)
    except Exception:  # whatever it is, the type or the result was lost
        return False
    return True


def main() -> None:
    print(f"JAX {jax.__version__}, quax {quax.__version__}\n")
    print("| program | quaxlike | quax |\n| --- | --- | --- |")
    totals = [0, 0, 0]
    for name, program in LINEAR.items():
        f = program.run
        expected = _expected(f)
        modes = list(expected)
        ours = [mode for mode in modes if _passes(mode, ql.quaxify(f), Through, expected[mode])]
        theirs = [mode for mode in modes if _passes(mode, quax.quaxify(f), QuaxThrough, expected[mode])]
        show = lambda kept, modes=modes: "all" if kept == modes else ", ".join(kept) or "–"
        print(f"| {name.replace('_', ' ')} | {show(ours)} | {show(theirs)} |")
        totals = [a + len(b) for a, b in zip(totals, (modes, ours, theirs), strict=True)]
    print(f"\n{totals[1]} of {totals[0]} with quaxlike, {totals[2]} with quax.")


if __name__ == "__main__":
    main()
