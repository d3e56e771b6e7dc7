"""What happens to a Value under each transform: quaxlike beside quax 0.4.6.

`python -m benchmarks.transforms` runs the conformance programs of the tests, in both, on a type that passes
every primitive on to its array and refuses to materialise; it prints a Markdown table.
"""

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
from tests.conformance.programs import NOT_IN_JAX, PROGRAMS, other
from tests.strict import Through

MODES = ("eager", "jit", "vmap", "grad")


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


def _passes(
    mode: str, f: Callable[..., Any], quaxified: Callable[..., Any], make: Callable[..., Any]
) -> bool:
    def dense(tree: Any) -> Any:
        is_leaf = lambda x: isinstance(x, Through | QuaxThrough)
        return jtu.tree_map(lambda x: x.array if is_leaf(x) else x, tree, is_leaf=is_leaf)

    x, xs = other(), jnp.stack([other(), 2.0 * other()])
    loss = lambda g, make: lambda x: jnp.sum(dense(g(make(x))))
    plain = lambda x: x
    ways = {
        "eager": lambda g, make: dense(g(make(x))),
        "jit": lambda g, make: dense(jax.jit(g)(make(x))),
        "vmap": lambda g, make: dense(jax.vmap(lambda v: g(v))(make(xs))),
        "grad": lambda g, make: jax.grad(loss(g, make))(x),
    }
    try:
        np.testing.assert_allclose(ways[mode](quaxified, make), ways[mode](f, plain), rtol=1e-5)
    except Exception:  # whatever it is, the type or the result was lost
        return False
    return True


def main() -> None:
    print(f"JAX {jax.__version__}, quax {quax.__version__}\n")
    print("| program | quaxlike | quax |\n| --- | --- | --- |")
    totals = [0, 0, 0]
    for name, f in PROGRAMS.items():
        modes = [mode for mode in MODES if mode not in NOT_IN_JAX.get(name, ())]
        ours = [mode for mode in modes if _passes(mode, f, ql.quaxify(f), Through)]
        theirs = [mode for mode in modes if _passes(mode, f, quax.quaxify(f), QuaxThrough)]
        show = lambda kept, modes=modes: "all" if kept == modes else ", ".join(kept) or "–"
        print(f"| {name.replace('_', ' ')} | {show(ours)} | {show(theirs)} |")
        totals = [a + len(b) for a, b in zip(totals, (modes, ours, theirs), strict=True)]
    print(f"\n{totals[1]} of {totals[0]} with quaxlike, {totals[2]} with quax.")


if __name__ == "__main__":
    main()
