"""Products with booleans, integers and complex numbers are those of the materialised array: the dtype of the
other operand is not one to compute in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.testing.compare import disagreement
from tests.array_types import TYPES

QUICK = ["LoraArray, magnitude", "BlockSparseArray of NF4Array", "Int8Array", "Unitful of LoraArray"]
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TYPES]
DTYPES = [bool, np.int8, np.complex64]

PRODUCTS = {
    "x @ w": lambda w, x, y: x @ w,
    "w @ y": lambda w, x, y: w @ y,
    "w * x[0]": lambda w, x, y: w * x[0][:, None],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_products_with_other_dtypes(name):
    with jax.numpy_dtype_promotion("standard"):
        w = TYPES[name]()
        dense = ql.materialise(w)
    if dense.ndim != 2 or dense.size == 0:
        pytest.skip("Not a matrix.")
    (m, n), rng = dense.shape, np.random.default_rng(0)
    for dtype in DTYPES:
        x, y = (jnp.asarray(rng.integers(0, 4, shape).astype(dtype)) for shape in [(3, m), (n, 2)])
        for text, product in PRODUCTS.items():
            with jax.numpy_dtype_promotion("standard"), ql.on_materialise("allow"):
                expected = product(dense, x, y)
                found = ql.materialise(ql.quaxify(product)(w, x, y))
            rounded = jnp.bfloat16 in (found.dtype, w.dtype)
            differ = disagreement(found, expected, tolerance=0.03 if rounded else 1e-4, scale=1.0)
            assert not differ, f"{text} of {dtype}"
