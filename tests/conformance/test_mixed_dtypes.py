"""Products with booleans, integers and complex numbers are those of the materialised array: the dtype of the
other operand is not one to compute in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.testing.compare import disagreement
from tests.array_types import TYPES
from tests.samples import some_of

QUICK = ["LoraArray, magnitude", "BlockSparseArray of NF4Array", "Int8Array", "Unitful of LoraArray"]
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TYPES]
DTYPES = [bool, np.int8, np.complex64]

PRODUCTS = {
    "x @ w": lambda w, x, y: x @ w,
    "w @ y": lambda w, x, y: w @ y,
    "w * x[0]": lambda w, x, y: w * x[0][:, None],
}
CASES = {f"{text} of {np.dtype(dtype)}": (text, dtype) for text in PRODUCTS for dtype in DTYPES}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_products_with_other_dtypes(name):
    with jax.numpy_dtype_promotion("standard"):
        w = TYPES[name]()
        dense = ql.materialise(w)
    if dense.ndim != 2 or dense.size == 0:
        pytest.skip("Not a matrix.")
    (m, n), rng = dense.shape, np.random.default_rng(0)
    for case, (text, dtype) in some_of(CASES, name, 6).items():
        x, y = (jnp.asarray(rng.integers(0, 4, shape).astype(dtype)) for shape in [(3, m), (n, 2)])
        with jax.numpy_dtype_promotion("standard"), ql.on_materialise("allow"):
            expected = PRODUCTS[text](dense, x, y)
            found = ql.materialise(ql.quaxify(PRODUCTS[text])(w, x, y))
        rounded = jnp.bfloat16 in (found.dtype, w.dtype)
        assert not disagreement(found, expected, tolerance=0.03 if rounded else 1e-4, scale=1.0), case
