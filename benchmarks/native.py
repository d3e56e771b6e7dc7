"""`python -m benchmarks.native [--json FILE] [--only TEXT]`: native products on a CPU beside XLA's.

Products with weights of 4096² in several formats, dense ones among them, by the native library and by the
reference, and XLA's of dense weights of the same dtype, alternately in one run, on weights that are rotated
past the caches. Ratios are medians of those of a repeat: below 1, the native product is faster.
"""

import argparse
import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

import quaxlike as ql
from quaxlike import kernels
from quaxlike.kernels import native
from quaxlike.kernels.dense_matmul import dense_matmul

from .harness import Case, Measured, measure

_SIZE, _COPIES = 4096, 5
_FORMATS: dict[str, Callable[[Any], Any]] = {
    "NF4": ql.NF4Array.quantize,
    "int8": ql.Int8Array.quantize,
    "Q4_0": functools.partial(ql.BlockArray.quantize, codec="q4_0"),
    "Q4_K": functools.partial(ql.BlockArray.quantize, codec="q4_k"),
}
_OTHERS = ("reference", "dense")


def _in_turn(fn: Callable[..., Any], x: jax.Array, weights: list[Any]) -> Callable[[], Any]:
    compiled, turn = jax.jit(fn).lower(x, weights[0]).compile(), itertools.cycle(weights)
    return lambda: jax.block_until_ready(compiled(x, next(turn)))


def _product(x: jax.Array, w: Any) -> jax.Array:
    return ql.quaxify(lambda x, w: x @ w.T)(x, w) if ql.is_value(w) else dense_matmul(x, w)


def _case(name: str, weights: list[Any], dense: list[Any], m: int, dtype: Any) -> Case:
    x = jax.random.normal(jax.random.key(1), (m, _SIZE), dtype)
    ways = {}
    for way, backend in {"quaxlike": "native", "reference": "reference"}.items():
        with kernels.backend(backend):
            ways[way] = _in_turn(_product, x, weights)
    ways["dense"] = _in_turn(lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), x, dense)
    return Case(f"{name}, M = {m}, {jnp.dtype(dtype).name}", ways)


def _cases(only: str) -> list[Case]:
    cases = []
    for dtype in (jnp.float32, jnp.bfloat16):
        dense = [jax.random.normal(jax.random.key(0), (_SIZE, _SIZE), dtype) + i for i in range(_COPIES)]
        if only in "dense":
            cases += [_case("dense", dense, dense, m, dtype) for m in (1, 2, 4, 8, 16, 64)]
        for name, quantize in _FORMATS.items():
            if only not in name:
                continue
            weights = [quantize(w) for w in dense]
            cases += [_case(name, weights, dense, m, dtype) for m in (1, 8, 128, 512)]
    return cases


def _table(measured: list[Measured]) -> Table:
    table = Table(title=f"native products, medians; JAX {jax.__version__}")
    for column in ("case", "ms", *(f"÷ {way}" for way in _OTHERS), "reference ÷ dense"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for m in measured:
        ratios = [*(m.ratio("quaxlike", way) for way in _OTHERS), m.ratio("reference", "dense")]
        table.add_row(m.case.name, f"{1e3 * m.median['quaxlike']:.2f}", *(f"{r:.2f}" for r in ratios if r))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native", description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--only", default="", help="formats whose names contain this")
    args = parser.parse_args()
    native.build()
    measured = [measure(case, repeats=9) for case in _cases(args.only)]
    Console(width=100).print(_table(measured))
    if args.json is not None:
        args.json.write_text(json.dumps([m.as_json() for m in measured], indent=2))


if __name__ == "__main__":
    main()
