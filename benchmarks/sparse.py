"""`python -m benchmarks.sparse [--quick] [--json FILE]`: sparse weights, dense ones, and JAX's BCSR and BCOO.

`x @ W.T` for a weight with 10 % of its elements stored, in blocks of 128 or one by one; alone, and together
with the gradients with respect to `x` and the stored elements. Times are medians of alternating runs; memory
is what XLA allocates for temporaries.
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import sparse
from rich.console import Console
from rich.table import Table

import quaxlike as ql

from .harness import Case, measure

_SIZE, _ROWS, _DENSITY = 4096, 128, 0.1

Product = Callable[[Any, jax.Array], jax.Array]


def _ours(w: ql.SparseArray | ql.BlockSparseArray) -> tuple[jax.Array, Product]:
    stored = "blocks" if isinstance(w, ql.BlockSparseArray) else "data"
    product = ql.quaxify(lambda w, x: x @ w.T)
    return getattr(w, stored), lambda data, x: product(w.replace(**{stored: data}), x)


def _bcsr(w: ql.SparseArray) -> tuple[jax.Array, Product]:
    matrix = w.to_bcsr()
    of = lambda data: sparse.BCSR((data, matrix.indices, matrix.indptr), shape=matrix.shape)
    return matrix.data, lambda data, x: (of(data) @ x.T).T


def _bcoo(w: ql.SparseArray) -> tuple[jax.Array, Product]:
    matrix = w.to_bcoo()
    of = lambda data: sparse.BCOO(
        (data, matrix.indices), shape=matrix.shape, indices_sorted=True, unique_indices=True
    )
    return matrix.data, lambda data, x: (of(data) @ x.T).T


def _ways(w: Any) -> dict[str, tuple[jax.Array, Product]]:
    elements = w if isinstance(w, ql.SparseArray) else ql.SparseArray.from_dense(w.materialise())
    dense = w.materialise(), lambda w, x: x @ w.T
    return {"quaxlike": _ours(w), "dense": dense, "BCSR": _bcsr(elements), "BCOO": _bcoo(elements)}


def _with_gradients(product: Product) -> Callable[..., Any]:
    def both(data: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        y, pullback = jax.vjp(product, data, x)
        return y, pullback(cotangent)

    return both


def _case(name: str, w: Any, gradients: bool) -> tuple[Case, dict[str, float]]:
    x, cotangent = jax.random.normal(jax.random.key(1), (2, _ROWS, _SIZE))
    compiled, operands = {}, {}
    for way, (data, product) in _ways(w).items():
        operands[way] = (data, x, cotangent) if gradients else (data, x)
        fn = _with_gradients(product) if gradients else product
        compiled[way] = jax.jit(fn).lower(*operands[way]).compile()
    runs = {way: lambda way=way: jax.block_until_ready(compiled[way](*operands[way])) for way in compiled}
    memory = {way: fn.memory_analysis().temp_size_in_bytes / 2**20 for way, fn in compiled.items()}
    return Case(f"{name}, {'forward and backward' if gradients else 'forward'}", runs), memory


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    args = parser.parse_args()
    w = jax.random.normal(jax.random.key(0), (_SIZE, _SIZE))
    weights = {
        "blocks of 128": ql.BlockSparseArray.from_dense(w, density=_DENSITY),
        "single elements": ql.SparseArray.from_dense(w, density=_DENSITY),
    }
    title = f"{_SIZE}², {_DENSITY:.0%} stored, M = {_ROWS}, float32: ms, medians ± quartiles, and MiB"
    table = Table(title=f"{title} of temporaries; JAX {jax.__version__}, {jax.default_backend()}")
    ways = ("quaxlike", "dense", "BCSR", "BCOO")
    for column in ("case", *ways, "÷ quaxlike"):
        table.add_column(column, justify="left" if column == "case" else "right")
    rows = []
    for name, weight in weights.items():
        for gradients in (False, True):
            case, memory = _case(name, weight, gradients)
            m = measure(case, repeats=5 if args.quick else 15)
            cells = [
                f"{1e3 * m.median[way]:.1f} ± {500 * m.spread[way]:.1f}, {memory[way]:.0f}" for way in ways
            ]
            ratios = "  ".join(f"{way} {m.ratio(way, 'quaxlike'):.1f}" for way in ways[1:])
            table.add_row(case.name, *cells, ratios)
            rows.append(m.as_json() | {"temporaries_mib": memory})
    Console(width=150).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
