"""`python -m benchmarks.quantized [--quick]`: products with quantised weights against decode-then-multiply.

Times are medians of alternating runs; memory is what XLA allocates for temporaries. The naive way decodes the
whole weight and multiplies, in one jitted function. The product with a dense weight is timed both as written
and with the weight on the left, since XLA is slow at one of them.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import quaxlike as ql

from .harness import Case, measure

_KEY = jax.random.key(0)


def _product(w: Any, x: jax.Array, transpose: bool) -> jax.Array:
    return x @ w if transpose else x @ w.T


def _weight_first(w: Any, x: jax.Array, transpose: bool) -> jax.Array:
    return ((w.T if transpose else w) @ x.T).T


def _case(w: Any, m: int, dtype: Any, transpose: bool) -> tuple[Case, dict[str, float]]:
    x = jax.random.normal(_KEY, (m, w.shape[not transpose]), dtype)
    ways = {
        "quaxlike": jax.jit(lambda w, x: ql.quaxify(_product)(w, x, transpose)),
        "naive": jax.jit(lambda w, x: _product(w.materialise(), x, transpose)),
    }
    compiled = {way: fn.lower(w, x).compile() for way, fn in ways.items()}
    dense = w.materialise().astype(dtype)
    for way, product in {"dense": _product, "dense first": _weight_first}.items():
        compiled[way] = jax.jit(lambda w, x, f=product: f(w, x, transpose)).lower(dense, x).compile()
    runs = {
        way: lambda fn=fn, arg=w if way in ways else dense: jax.block_until_ready(fn(arg, x))
        for way, fn in compiled.items()
    }
    temporaries = {way: fn.memory_analysis().temp_size_in_bytes / 2**20 for way, fn in compiled.items()}
    scheme = type(w).__name__.removesuffix("Array")
    nested = " double" if not isinstance(w.scale, jax.Array) else ""
    direction = "x @ W" if transpose else "x @ W.T"
    shape = "×".join(map(str, w.shape))
    return Case(f"{scheme}{nested} {shape}, {direction}, M = {m}, {jnp.dtype(dtype).name}", runs), temporaries


def _cases(quick: bool) -> list[tuple[Any, int, Any, bool]]:
    def weight(cls: Any, shape: tuple[int, int], **options: Any) -> Any:
        quantize = jax.jit(lambda key: cls.quantize(jax.random.normal(key, shape), **options))
        return quantize(_KEY)

    large = (4096, 4096)
    nf4 = weight(ql.NF4Array, large)
    rows = [(nf4, m, jnp.float32, transpose) for m in (1, 16) for transpose in (False, True)]
    rows += [(nf4, 16, jnp.bfloat16, False)]
    if not quick:
        rows += [(nf4, m, jnp.float32, False) for m in (64, 512)]
        rows += [(weight(ql.NF4Array, large, double_quant=True), 16, jnp.float32, False)]
        rows += [(weight(ql.NF4Array, (4096, 4100)), 16, jnp.float32, False)]
        rows += [(weight(ql.Int8Array, large), m, jnp.float32, False) for m in (1, 16)]
        rows += [(weight(ql.NF4Array, (384, 1536)), 16, jnp.float32, False)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the required rows alone, fewer repeats")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    args = parser.parse_args()
    table = Table(title=f"ms, medians ± quartiles; JAX {jax.__version__}, {jax.default_backend()}")
    for column in (
        "case",
        "quaxlike",
        "naive",
        "dense weight",
        "W @ x",
        "naive ÷ quaxlike",
        "temporaries, MiB",
        "naive",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    rows = []
    for row in _cases(args.quick):
        case, memory = _case(*row)
        m = measure(case, repeats=7 if args.quick else 15)
        cell = lambda way, m=m: f"{1e3 * m.median[way]:.1f} ± {500 * m.spread[way]:.1f}"
        table.add_row(
            case.name,
            *map(cell, ("quaxlike", "naive", "dense", "dense first")),
            f"{m.ratio('naive', 'quaxlike'):.1f}",
            f"{memory['quaxlike']:.1f}",
            f"{memory['naive']:.1f}",
        )
        rows.append(m.as_json() | {"temporaries_mib": memory})
    Console(width=150).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
