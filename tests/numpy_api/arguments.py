"""What each function of jax.numpy is called with: by the names of its parameters, or as listed here."""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

MODULES = {"": jnp, "linalg.": jnp.linalg, "fft.": jnp.fft}

# Functions that are not called in the tests, and why.
UNTESTED = {
    **dict.fromkeys(["load", "save", "savez"], "reads or writes a file"),
    **dict.fromkeys(["fromfile", "fromiter", "fromstring", "frombuffer", "from_dlpack"], "takes no array"),
    **dict.fromkeys(["get_printoptions", "set_printoptions", "printoptions"], "takes no array"),
    **dict.fromkeys(["array_repr", "array_str"], "prints the elements, which makes the array dense"),
    "einsum_path": "looks at shapes alone",
    "trim_zeros": "needs elements of an array that is not traced",
    **dict.fromkeys(["place", "put", "fill_diagonal"], "would write to its operand"),
    **dict.fromkeys(["empty", "empty_like"], "says nothing about the values of its result"),
}


class Draw:
    """Arrays of one draw: all are made to fit each other."""

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        self.shape = (rows, columns)
        self.rng = np.random.default_rng(seed)

    def floats(self, *shape: int) -> np.ndarray:
        return self.rng.uniform(0.1, 0.9, shape or self.shape).astype(np.float32)

    def integers(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 3, shape or self.shape).astype(np.int32)

    def symmetric(self, n: int = 3) -> np.ndarray:
        x = self.floats(n, n)
        return x @ x.T + 3 * np.eye(n, dtype=np.float32)

    def increasing(self, n: int = 5) -> np.ndarray:
        return np.cumsum(self.floats(n)).astype(np.float32)


# For the parameters that are no arrays.
OTHERS: dict[str, Any] = {
    "axis": 0, "axes": (0, 1), "axis1": 0, "axis2": 1, "shape": (2, 3), "indices_or_sections": 1, "M": 5,
    "N": 3, "n": 3, "start": 1.0, "stop": 3.0, "dtype": np.float32, "from_": np.int32, "to": np.float32,
    "kth": 1, "k": 1, "deg": 1, "beta": 2.0, "dimensions": (2, 3), "pad_width": 1, "source": 0,
    "destination": 1, "reps": 2, "repeats": 2, "shift": 1, "new_shape": (2, 2), "fill_value": 2.0, "obj": 1,
    "arg1": np.float32, "arg2": np.floating, "kind": "real floating", "dims": (4, 4),
}  # fmt: skip
SEQUENCES = frozenset(["arrays", "tup", "keys", "seq"])

# The calls that names do not tell; arrays are NumPy's.
CALLS: dict[str, Callable[[Draw], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "apply_along_axis": lambda d: ((lambda row: row * 2, 0, d.floats()), {}),
    "apply_over_axes": lambda d: ((jnp.sum, d.floats(), (0,)), {}),
    "block": lambda d: (([[d.floats(), d.floats()]],), {}),
    "broadcast_shapes": lambda d: (((2, 1), (3,)), {}),
    "broadcast_arrays": lambda d: ((d.floats(), d.floats()), {}),
    "choose": lambda d: ((d.integers(4), [d.floats(4) for _ in range(3)]), {"mode": "clip"}),
    "bincount": lambda d: ((d.integers(6),), {"length": 4}),
    "dsplit": lambda d: ((d.floats(2, 3, 4), 2), {}),
    "matvec": lambda d: ((d.floats(2, 3), d.floats(3)), {}),
    "vecmat": lambda d: ((d.floats(3), d.floats(3, 2)), {}),
    "unpackbits": lambda d: ((d.integers(3).astype(np.uint8),), {}),
    "compress": lambda d: ((np.array([True]), d.floats()), {"axis": 0}),
    "digitize": lambda d: ((d.floats(4), d.increasing()), {}),
    "einsum": lambda d: (("ij,kj->ik", d.floats(), d.floats()), {}),
    "extract": lambda d: ((d.floats(4) > 0.5, d.floats(4)), {}),
    "frexp": lambda d: ((d.floats(),), {}),
    "from_dlpack": lambda d: ((jnp.asarray(d.floats()),), {}),
    "frompyfunc": lambda d: ((lambda x, y: x + y, 2, 1), {}),
    "fromfunction": lambda d: ((lambda i, j: i + j, (2, 3)), {"dtype": np.float32}),
    "histogramdd": lambda d: ((d.floats(6, 2),), {"bins": 3}),
    "histogram2d": lambda d: ((d.floats(6), d.floats(6)), {"bins": 3}),
    "insert": lambda d: ((d.floats(4), 1, d.floats(1)), {}),
    "interp": lambda d: ((d.floats(4), d.increasing(), d.increasing()), {}),
    "ix_": lambda d: ((d.integers(2), d.integers(3)), {}),
    "mask_indices": lambda d: ((3, jnp.triu), {}),
    "meshgrid": lambda d: ((d.floats(2), d.floats(3)), {}),
    "piecewise": lambda d: (
        (d.floats(4), [np.arange(4) < 2, np.arange(4) >= 2], [lambda x: x * 2, lambda x: -x]), {}
    ),
    "poly": lambda d: ((d.floats(3),), {}),
    "polyfit": lambda d: ((d.increasing(), d.floats(5), 1), {}),
    "put_along_axis": lambda d: ((d.floats(3, 2), d.integers(3, 1) % 2, 1.0, 1), {"inplace": False}),
    "ravel_multi_index": lambda d: (((d.integers(4), d.integers(4)), (4, 4)), {"mode": "clip"}),
    "reshape": lambda d: ((d.floats(), (-1,)), {}),
    "select": lambda d: (([d.floats(4) > 0.5, d.floats(4) > 0.2], [d.floats(4), d.floats(4)]), {}),
    "take": lambda d: ((d.floats(4), d.integers(2)), {}),
    "take_along_axis": lambda d: ((d.floats(4, 2), d.integers(4, 1) % 2, 1), {}),
    "vectorize": lambda d: ((lambda x: x * 2,), {}),
    "where": lambda d: ((d.floats() > 0.5, d.floats(), d.floats()), {}),
    "linalg.lstsq": lambda d: ((d.floats(5, 2), d.floats(5)), {}),
    "linalg.multi_dot": lambda d: (([d.floats(2, 3), d.floats(3, 4), d.floats(4, 2)],), {}),
    "linalg.tensorinv": lambda d: ((d.symmetric(6).reshape(2, 3, 6),), {"ind": 2}),
    "linalg.tensorsolve": lambda d: ((d.symmetric(6).reshape(2, 3, 6), d.floats(2, 3)), {}),
    "linalg.vecdot": lambda d: ((d.floats(), d.floats()), {}),
    "linalg.matrix_power": lambda d: ((d.symmetric(), 2), {}),
    "linalg.cross": lambda d: ((d.floats(2, 3), d.floats(2, 3)), {}),
    "cross": lambda d: ((d.floats(2, 3), d.floats(2, 3)), {}),
    "convolve": lambda d: ((d.floats(5), d.floats(3)), {}),
    "correlate": lambda d: ((d.floats(5), d.floats(3)), {}),
}  # fmt: skip
# How many elements there are is data; `size` says it where data is traced.
_UNIQUE = ["unique", "unique_all", "unique_counts", "unique_inverse", "unique_values"]
CALLS |= dict.fromkeys(_UNIQUE, lambda d: ((d.floats(4),), {"size": 4}))
_SETS = ["intersect1d", "setdiff1d", "setxor1d", "union1d"]
CALLS |= dict.fromkeys(_SETS, lambda d: ((d.floats(4), d.floats(4)), {"size": 8}))


def functions() -> Iterator[str]:
    """The names of all public functions: `sin`, `linalg.norm`, ..."""
    for prefix, module in MODULES.items():
        for name in dir(module):
            x = getattr(module, name)
            if callable(x) and not isinstance(x, type | types.ModuleType) and not name.startswith("_"):
                yield prefix + name


def function(name: str) -> Callable[..., Any]:
    prefix, _, last = name.rpartition(".")
    return getattr(MODULES[prefix + "." if prefix else ""], last)


def calls(name: str, draw: Draw) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that the function may take; which of them it does, JAX tells."""
    if name in CALLS:
        yield CALLS[name](draw)
        return
    required = [
        p.name
        for p in inspect.signature(function(name)).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not required:  # (*args)
        required = ["x", "y"] if getattr(function(name), "nin", 1) == 2 else ["x"]
    for array in (draw.floats, draw.integers, draw.symmetric, draw.increasing, lambda: draw.floats(3)):
        make = lambda p, array=array: OTHERS[p] if p in OTHERS else array()
        yield tuple([make(p), make(p)] if p in SEQUENCES else make(p) for p in required), {}
