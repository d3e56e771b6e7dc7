"""Products with stored weights: each codec on each backend in each form of a call, against float64."""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import kernels
from quaxlike.kernels import int8_matmul, lora_matmul, nf4_matmul, nf4_matmul_p
from quaxlike.kernels.block_matmul import (
    INTEGERS,
    NIBBLES,
    block_matmul,
    gpu,
    primitive,
    reference,
    to_ranks,
    tpu,
)
from quaxlike.kernels.block_matmul.product import Product
from tests.primitives.jaxprs import equations, names
from tests.samples import covering, normal

from .weights import lowered, relative_error, stored, stored_nf4, tpu_at_hand

# With bits, scales, minima and orders of all kinds.
FUSED = ["mxfp4", "mxfp8", "nvfp4", "fp8", "q4_0", "q4_1", "q4_k", "q8_0", "iq4_nl"]
FUSED += ["uint4_block", "int8_block"]
ON_TPUS = ["nf4", "fp4", "int4", "nested", *FUSED]
CODECS = [*ON_TPUS, "int8", "int8 in blocks", "q6_k", "int3_block"]
FORMS = ["x @ W.T", "x @ W", "an adapter", "an adapter for each row"]
RANK, SCALING = 8, 0.5
# Rounding of the inputs is no error of the operation: the oracle sees rounded activations. Weights and
# adapters are rounded to the dtype of the activations.
TOLERANCE = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}


_slow = lambda case: pytest.param(*case, marks=pytest.mark.slow)


def _x(w, lead, transpose=False, dtype="float32"):
    return normal(*lead, w.shape[not transpose], dtype=dtype, seed=1)


def _index(lead):
    return jax.device_put(np.random.default_rng(4).integers(-1, 3, lead, np.int32))


def _adapters(w, form, lead=()):
    """`a`, `b` and the adapter of each row, of which some have none; or nothing."""
    if "adapter" not in form:
        return ()
    count = (3,) if "each row" in form else ()
    a, b = normal(*count, RANK, w.shape[1], seed=2), normal(*count, w.shape[0], RANK, seed=3)
    return a / np.float32(np.sqrt(w.shape[1])), b, _index(lead) if count else None


def _times(x, w, leaves=None, adapters=(), scaling=SCALING, **options):
    """The product, by the function of its codec if there is one."""
    leaves = w.leaves if leaves is None else leaves
    options["block_size"] = w.block_size
    if w.decode == INTEGERS and not adapters:
        return int8_matmul(x, *leaves, **options)
    options["shape"] = w.shape
    if not adapters:
        if w.decode == NIBBLES:
            return nf4_matmul(x, *leaves, **options)
        return block_matmul(x, leaves, w.decode, **options)
    a, b, index = adapters
    if w.decode == NIBBLES:
        return lora_matmul(x, *leaves, a, b, scaling=scaling, adapter_index=index, **options)
    a, b = (z.astype(x.dtype)[None if index is None else ...] for z in (a, b))
    return block_matmul(x, leaves, w.decode, low_rank=(to_ranks(x, a, scaling, index), b), **options)


def _expected(x, w, adapters=(), transpose=False, dense=None):
    x, dense = np.float64(x), w.dense if dense is None else dense
    y = x @ (dense if transpose else dense.T)
    if not adapters:
        return y
    a, b, index = adapters
    if index is None:
        return y + SCALING * (x @ np.float64(a).T) @ np.float64(b).T
    terms = [
        np.float64(index == i)[..., None] * (x @ np.float64(a[i]).T) @ np.float64(b[i]).T for i in range(3)
    ]
    return y + SCALING * sum(terms)


# The codec; the rows of `x`, its dtype and that of the result; rows and columns of the weight, and the block
# of 4-bit codebooks, which crosses rows but in sizes of powers of two; the form and the backend.
_CALLS = [
    ("nf4", ((4,), "bfloat16", "float32"), (128, 256, 64), "x @ W", "reference"),
    ("nested", ((), "float32", None), (128, 256, 64), "x @ W", "gpu"),
    ("int8", ((130,), "float32", None), (40, 100, 4096), "x @ W", "gpu"),
    ("mxfp4", ((300,), "bfloat16", None), (128, 256, 64), "an adapter for each row", "gpu"),
]
_SLOW_CALLS = [
    ("nf4", ((3, 5), "bfloat16", None), (33, 35, 64), "an adapter for each row", "reference"),
    ("nested", ((), "float32", None), (12, 64, 32), "x @ W.T", "reference"),
    ("q4_1", ((2, 4), "float32", "bfloat16"), (40, 100, 4096), "an adapter", "reference"),
    ("int4", ((16,), "float16", None), (7, 96, 64), "x @ W.T", "gpu"),
]
_CALLS_ON_TPUS = [
    ("nf4", ((4,), "bfloat16", "float32"), (128, 256, 64), "x @ W.T", "tpu"),
    ("q4_1", ((2, 4), "float32", "bfloat16"), (128, 256, 64), "x @ W", "tpu"),
    ("q8_0", ((300,), "bfloat16", None), (256, 512, 64), "an adapter for each row", "tpu"),
]


def _pairs(codecs, cases):
    """Every two entries of these cases together, which takes long."""
    _, *columns = (dict.fromkeys(column) for column in zip(*cases, strict=True))
    columns[2] = FORMS
    return [_slow(case) for case in covering(codecs, *columns) if case not in cases]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("codec", "call", "size", "form", "backend"),
    [
        *_CALLS,
        *_CALLS_ON_TPUS,
        *map(_slow, _SLOW_CALLS),
        *_pairs(CODECS, [*_CALLS, *_SLOW_CALLS]),
        *_pairs(ON_TPUS, _CALLS_ON_TPUS),
    ],
    ids=str,
)
def test_equals_the_dense_product(codec, call, size, form, backend):
    """A warning, which is an error, would tell that another backend ran."""
    (lead, dtype, out_dtype), transpose = call, form == "x @ W"
    w = stored(codec, *size)
    x, adapters = _x(w, lead, transpose, dtype), _adapters(w, form, lead)
    options: Any = {"adapters": adapters} if adapters else {"transpose": transpose}
    with kernels.backend(backend):
        y = jax.jit(lambda x: _times(x, w, out_dtype=out_dtype, **options))(x)
    assert y.dtype == (out_dtype or dtype)
    limit = max(TOLERANCE[dtype], TOLERANCE[str(y.dtype)]) * (2 if adapters else 1)
    assert relative_error(y, _expected(x, w, **options)) < limit


_PARTED = [(130, 64, 64), (67, 40, 32), (8, 33, 64), (67, 33, 512), (3, 501, 64), (1, 1, 64)]
WAYS = {"tiled": reference.tiled, "whole": reference.whole, "chunked": gpu.chunked}


@pytest.mark.each_value
@pytest.mark.quick("nf4-(67, 33, 512)-19-float16-tiled-True")
@pytest.mark.parametrize(
    ("codec", "size", "rows", "dtype", "way", "transpose"),
    [
        ("nf4", (67, 33, 512), 19, "float16", "tiled", True),
        ("fp4", (130, 64, 64), 2, "float32", "chunked", False),
        ("int8", (67, 40, 64), 19, "float16", "chunked", True),
        ("int8", (67, 40, 64), 19, "float32", "chunked", True),
        ("int8", (67, 40, 64), 2, "bfloat16", "whole", False),
        ("int8 in blocks", (8, 33, 64), 70, "bfloat16", "whole", True),
        *map(_slow, [("nested", (67, 33, 64), 2, "bfloat16", "tiled", False)]),
        *map(_slow, [("q6_k", (67, 33, 64), 70, "float32", "tiled", True)]),
        *map(_slow, covering(CODECS, _PARTED, [0, 2, 19, 70], TOLERANCE, WAYS, [False, True])),
        ("q4_1", (0, 16, 32), 3, "float32", "chunked", False),
        *map(_slow, covering(CODECS, [(0, 16, 32), (16, 0, 32)], [0, 3], TOLERANCE, WAYS, [False, True])),
    ],
    ids=str,
)
def test_ways_of_plain_jax(monkeypatch, codec, size, rows, dtype, way, transpose):
    """Small weights and activations are tiled and cut as large ones."""
    for module, name, number in (
        *((reference, "_TILE_FEW", 512), (reference, "_TILE_MANY", 2048)),
        *((gpu, "_MOST", 8000), (gpu, "_LEAST", 64)),
    ):
        monkeypatch.setattr(module, name, number)
    w = stored(codec, *size)
    # Small: products with scales of blocks, in float16, would be subnormal.
    x = _x(w, (rows, 1), transpose, dtype) * jnp.asarray(1e-3, dtype)
    product = w.product(transpose)
    y = jax.jit(lambda x: WAYS[way](x, w.leaves, decode=w.decode, product=product))(x)
    assert y.dtype == np.float32
    # Weights are rounded once; where scales of rows stay outside of the product, not at all. XLA multiplies
    # a weight of one element in its dtype.
    outside = codec == "int8" and way != "tiled"
    dense = w.dense if outside else np.float64(jnp.asarray(w.dense, "float32").astype(dtype))
    limit = TOLERANCE[dtype] if (outside and transpose) or w.dense.size == 1 else 1e-6
    assert relative_error(y, _expected(x, w, transpose=transpose, dense=dense)) < limit


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "gpu"])
@pytest.mark.parametrize("codec", ["nf4", "q4_1"])
def test_double_precision_is_kept(x64, backend, codec):
    w = stored(codec, 48, 64)
    x = _x(w, (3,), dtype="float64")
    with kernels.backend(backend):
        y = _times(x, w)
    assert y.dtype == jnp.float64
    assert relative_error(y, _expected(x, w)) < 1e-14


@pytest.mark.quick("tuple", "usual")
@pytest.mark.parametrize("stored_as", ["array", "tuple", "usual"])
def test_the_map_of_nested_scales(stored_as):
    """Kernels take it however it is stored; only an array is a leaf."""
    w = stored("nested", 128, 256)
    (packed, nested, codebook), x = w.leaves, _x(w, (4,))
    maps = {"array": nested.quant_map, "tuple": tuple(nested.quant_map.tolist()), "usual": None}
    assert relative_error(w.dense, stored("nf4", 128, 256).dense) < 0.05
    scales = dataclasses.replace(nested, quant_map=maps[stored_as])
    assert len(jax.tree.leaves(scales)) == (4 if stored_as == "array" else 3)
    product = lambda scales: _times(x, w, (packed, scales, codebook))
    np.testing.assert_array_equal(jax.jit(product)(scales), product(nested))
    again = jax.tree.map(lambda leaf: leaf, scales)
    assert jax.tree.structure(again) == jax.tree.structure(scales)
    assert stored_as == "array" or again.quant_map == maps[stored_as]


# Derivatives and transforms


def _arguments(w, form, lead=(3,)):
    """Everything that may be trained."""
    return (
        _x(w, lead, form == "x @ W") / 16,
        w.leaves,
        *(_adapters(w, form)[:2] or (None, None)),
        jnp.float32(1.5),
    )


def _fused(w, form, x, leaves, a, b, scaling):
    options = (
        {"transpose": form == "x @ W"}
        if a is None
        else {"adapters": (a, b, _index(x.shape[:-1]) if a.ndim == 3 else None)}
    )
    return _times(x, w, leaves, scaling=scaling, **options)


def _dense(w, form, x, leaves, a, b, scaling):
    dense = w.decode.matrix(leaves, w.product())
    y = x @ (dense if form == "x @ W" else dense.T)
    if a is None:
        return y
    if a.ndim == 2:
        return y + scaling * (x @ a.T) @ b.T
    return y + scaling * jnp.einsum("mk,erk,enr,me->mn", x, a, b, jax.nn.one_hot(_index(x.shape[:-1]), 3))


def _loss(fn, *given):
    return lambda *args: jnp.sum(jnp.sin(fn(*given, *args)) ** 2)


def _assert_close(found, expected):
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if e.dtype != jax.dtypes.float0:  # not those of codes
            assert relative_error(f, e) < max(1e-5, jnp.finfo(e.dtype).eps)


_DIFFERENTIATED = ["nf4", "nested", "int8", "int8 in blocks", "q4_1", "q6_k", "mxfp4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "form", "backend", "size"),
    covering(_DIFFERENTIATED, FORMS, ["reference", "gpu", "tpu"], [(128, 256, 64), (48, 64, 64)]),
    ids=str,
)
@pytest.mark.filterwarnings("ignore::quaxlike.kernels.KernelFallbackWarning")
def test_gradients(codec, form, backend, size):
    w = stored(codec, *size)
    arguments = _arguments(w, form)
    of = lambda fn: jax.grad(_loss(fn, w, form), (0, 1, 2, 3, 4), allow_int=True)
    with kernels.backend(backend):
        found = jax.jit(of(_fused))(*arguments)
    _assert_close(found, of(_dense)(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "form"), covering(["nf4", "nested", "int8", "q4_1"], FORMS), ids=str)
def test_forward_mode_and_second_derivatives(codec, form):
    w = stored(codec, 48, 64)
    x, leaves, a, b, scaling = _arguments(w, form, (5,))
    tangents = jax.tree.map(jnp.cos, (x, a, b))
    for i in range(3 if a is not None else 1):
        of = lambda fn: jax.grad(lambda x, a, b: _loss(fn, w, form)(x, leaves, a, b, scaling), i)
        hvp = lambda fn: jax.jvp(of(fn), (x, a, b), tangents)[1]
        _assert_close(hvp(_fused), hvp(_dense))


def _products(fn, *args):
    return [name for name in names(fn, *args) if "matmul" in name]


@pytest.mark.quick("nested-an adapter-expected5")
@pytest.mark.parametrize(
    ("codec", "form", "expected"),
    [
        ("nf4", "x @ W.T", ["nf4_matmul", "nf4_matmul"]),
        ("nested", "x @ W", ["nf4_matmul", "nf4_matmul"]),
        ("int8", "x @ W.T", ["int8_matmul", "int8_matmul"]),
        _slow(("q4_1", "x @ W.T", ["block_matmul", "block_matmul"])),
        ("nf4", "an adapter", ["lora_matmul", "nf4_matmul"]),
        ("nested", "an adapter", ["lora_matmul", "nf4_matmul"]),
    ],
)
def test_derivatives_are_kernels(codec, form, expected):
    """The backward pass is the transposed contraction; forward mode over it, both once more."""
    w = stored(codec, 48, 64)
    x, leaves, a, b, scaling = _arguments(w, form)
    loss = lambda x, b: _loss(_fused, w, form)(x, leaves, a, b, scaling)
    assert _products(jax.grad(loss), x, b) == expected
    assert len(_products(lambda x: jax.jvp(lambda x: jax.grad(loss)(x, b), (x,), (x,)), x)) == 2 * len(
        expected
    )
    if b is not None:  # of the adapters alone, the weight is not read backwards
        assert _products(jax.grad(loss, 1), x, b) == ["lora_matmul"]


# The axes of x, of the leaves of the weight, and of both adapters.
_MAPPED = [
    *(((*axes, None, None), form) for axes in [(0, None), (0, 0), (None, 0)] for form in FORMS[:3]),
    *(((axis, None, 0, 0), "an adapter") for axis in (0, None)),
]


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(("codec", "mapped"), covering(["nf4", "nested", "int8", "q4_1"], _MAPPED), ids=str)
def test_vmap_is_one_after_the_other(codec, mapped):
    axes, form = mapped
    ws = [stored(codec, 48, 64, seed=i) for i in range(3)]
    x, _, a, b, _ = _arguments(ws[0], form)
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    adapters = ((a, 2 * a, a), (b, -b, b)) if form == "an adapter" else ([a], [b])
    thrice = (x, 2 * x, x + 1), [w.leaves for w in ws], *adapters
    x, leaves, a, b = (z[0] if axis is None else stack(*z) for z, axis in zip(thrice, axes, strict=True))

    def fn(x, leaves, a, b):
        options = {"transpose": form == "x @ W"} if a is None else {"adapters": (a, b, None)}
        return _times(x, ws[0], leaves, **options)

    part = lambda z, axis, i: z if axis is None else jax.tree.map(lambda z: z[i], z)
    one = lambda i, *args: fn(*(part(z, axis, i) for z, axis in zip(args, axes, strict=True)))
    looped = lambda x, a, b: jnp.stack([one(i, x, leaves, a, b) for i in range(3)])
    mapped = lambda x, a, b: jax.vmap(fn, axes)(x, leaves, a, b)
    assert relative_error(mapped(x, a, b), looped(x, a, b)) < 1e-6
    of = lambda fn: jax.grad(_loss(fn), (0, 1, 2))(x, a, b)
    _assert_close(of(mapped), of(looped))


def test_the_weight_is_read_once_for_all_that_is_mapped():
    w = stored("nf4", 48, 64)
    x = _x(w, (5, 3))
    fn = jax.vmap(lambda x: _times(x, w), in_axes=1, out_axes=2)
    assert names(fn, x) == ["transpose", "nf4_matmul", "transpose"]
    assert relative_error(jax.jit(fn)(x), np.moveaxis(_expected(np.moveaxis(x, 1, 0), w), 0, 2)) < 1e-6
    a, b, _ = _adapters(w, "an adapter for each row")
    fn = lambda x, a, b: _times(x, w, adapters=(a, b, None))
    assert _products(jax.vmap(fn), x[:3], a, b) == ["nf4_matmul"]
    assert _products(jax.vmap(fn, in_axes=(0, None, None)), x, a[0], b[0]) == ["lora_matmul"]
    codes = np.stack([w.leaves[0]] * 2)
    assert "nf4_matmul" in names(jax.vmap(lambda c: _times(x, w, (c, *w.leaves[1:]))), codes)


# Memory and the work of a program


def _large(codec, n, transpose=False):
    """A product with a square weight, and the shapes of its operands."""
    of = jax.ShapeDtypeStruct
    w = stored(codec, 48, 64)._replace(shape=(n, n), block_size=n if codec == "int8" else 64)
    leaves = of((n, n), jnp.int8), of((n, 1), jnp.float32)
    if codec == "nf4":
        leaves = *stored_nf4(n, n), of((16,), jnp.float32)
    return lambda x, *leaves: _times(x, w, leaves, transpose=transpose), (of((16, n), jnp.float32), *leaves)


def _temporaries(fn, operands):
    return jax.jit(fn).lower(*operands).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("codec", "n", "most"), [("nf4", 4096, 8), ("int8", 2048, 5)])
def test_no_dense_copy_of_the_weight(codec, n, most, transpose):
    """A tile of 4 MiB, where the dense weight would take 64 or 16."""
    assert _temporaries(*_large(codec, n, transpose)) <= most * 2**20


@pytest.mark.slow
def test_no_dense_copy_between_forward_and_backward():
    fn, operands = _large("nf4", 2048)
    layer = lambda x, *leaves: fn(jnp.tanh(x), *leaves)
    step = jax.grad(lambda x, *leaves: jnp.sum(layer(layer(x, *leaves), *leaves)))
    assert _temporaries(step, operands) < 2048 * 2048 * 4 / 2


def _dots(program):
    return [line for line in program.splitlines() if "stablehlo.dot_general" in line]


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("codec", "size", "m", "most", "chunks"),
    [
        # Blocks that cross rows, and blocks within rows; a last chunk that is smaller.
        ("nf4", (67, 96, 64), 4, 8000, 4),
        ("nf4", (50, 160, 32), 4, 8000, 5),
        ("mxfp4", (128, 256, 32), 65, 128 * 256, 4),
        ("q6_k", (128, 256, 16), 65, 128 * 256, 4),
    ],
)
def test_chunks_end_where_blocks_do(codec, size, m, most, chunks, transpose, monkeypatch):
    monkeypatch.setattr(gpu, "_MOST", most)
    w = stored(codec, *size)
    x = _x(w, (m,), transpose)
    with kernels.backend("gpu"):
        multiply = jax.jit(lambda x: _times(x, w, transpose=transpose))
        assert relative_error(multiply(x), _expected(x, w, transpose=transpose)) < 1e-6
        assert len(_dots(multiply.lower(x).as_text())) == chunks


def test_chunks_of_a_large_weight():
    assert gpu.chunk_size(14336, 2 * 4096) == 14336
    assert gpu.chunk_size(131072, 2 * 8192, aligned=64) == 8192  # 128 MiB


@pytest.mark.parametrize(("transpose", "products"), [(False, 1), (True, 4)])
def test_on_gpus_activations_meet_scales_a_quarter_at_a_time(transpose, products):
    n, k = 14336, 4096
    of = jax.ShapeDtypeStruct
    matmul = lambda *operands: int8_matmul(*operands, transpose=transpose)
    for m, count in ((4096, products), (1024, 1)):
        x = of((m, n if transpose else k), jnp.bfloat16)
        assert len(_dots(lowered(matmul, x, of((n, k), jnp.int8), of((n, 1), jnp.float32)))) == count


@pytest.mark.quick(2)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("m", "dtype"), [(63, "f32"), (64, "bf16")])
def test_many_rows_are_multiplied_in_their_dtype(m, dtype, transpose):
    w = stored("q4_1", 128, 256)
    x = _x(w, (m,), transpose, "bfloat16")
    with kernels.backend("reference"):
        dots = _dots(jax.jit(lambda x: _times(x, w, transpose=transpose)).lower(x).as_text())
    assert dots
    assert all(f"x{dtype}>, tensor" in line and "xf32>\n" in f"{line}\n" for line in dots)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["nf4", "int8", "q4_1"])
def test_the_reference_is_traced_once(codec, monkeypatch):
    traced = []
    count = lambda *args, **params: traced.append(1) or reference.tiled(*args, **params)
    monkeypatch.setattr(primitive, "tiled", count)
    w = stored(codec, 24, 64)
    with kernels.backend("reference"):
        jax.block_until_ready(_times(_x(w, (7,)), w))
    assert len(traced) == 1


# The choice of a backend, and programs for devices that are not here


def _operation(codec, transpose=False, dtype="bfloat16", m=3, adapted=False, shape=(128, 256)):
    """`x @ w` of a user, with the shapes of its arguments."""
    of, (n, k), on_bytes = jax.ShapeDtypeStruct, shape, codec in ("nf4", "nested")
    options = {"double_quant": codec == "nested"} if on_bytes else {"codec": codec}
    quantise = functools.partial((ql.NF4Array if on_bytes else ql.BlockArray).quantize, **options)
    w = jax.eval_shape(quantise, of(shape, dtype))
    if adapted:
        w = ql.LoraArray(w, normal(4, k, dtype=dtype), normal(n, 4, dtype=dtype), alpha=8)
    return ql.quaxify(lambda x, w: x @ (w if transpose else w.T)), of((m, n if transpose else k), dtype), w


_at_hand = lambda platform: tpu_at_hand() if platform == "tpu" else contextlib.nullcontext()


def _choice(platform, fn, *args):
    (eqn,) = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if "matmul" in eqn.primitive.name]
    operands = (v.aval for v in eqn.invars)
    with _at_hand(platform):
        return kernels.chosen_backend(eqn.primitive, *operands, platform=platform, **eqn.params)


@pytest.mark.quick(15)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("codec", ["nf4", "nested", *FUSED])
def test_formats_are_fused(codec, transpose):
    operation = _operation(codec, transpose)
    assert _choice("cuda", *operation).reason == "one fused kernel"
    assert _choice("tpu", *operation).reason == "a Pallas kernel"


@pytest.mark.parametrize(
    ("codec", "options", "reason"),
    [
        ("int3_block", {}, "does not take codes of this format"),
        ("q4_0", {"m": 129}, "1 to 128 rows of x, not 129"),
        ("q4_0", {"dtype": "float32"}, "takes bfloat16 and float16, not float32"),
        ("mxfp4", {"m": 2000, "transpose": True}, "decoded for the library's product"),
        ("q6_k", {"m": 64, "transpose": True}, "in the expression of the library's product"),
    ],
)
def test_what_is_not_fused_is_told(codec, options, reason):
    assert reason in _choice("cuda", *_operation(codec, **options)).reason


def test_chosen_backend_tells_what_runs():
    operation = _operation("nf4")
    assert _choice("cpu", *operation).backend in ("native", "reference")
    assert _choice("cuda", *operation).backend == _choice("rocm", *operation).backend == "gpu"
    assert _choice("tpu", *operation).backend == "tpu"
    with kernels.backend("tpu"):
        assert _choice(None, *operation).reason == "a Pallas kernel, interpreted"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": (96, 256)}, r"multiples of 128 and 256, not \(96, 256\)"),
        ({"block_size": 96}, "blocks of a power of two within rows, not 96"),
        ({"dtype": "float16"}, "bfloat16 and float32, not float16"),
        ({"m": 0}, "at least one row"),
        ({"platform": "cuda"}, "not on platform 'cuda'"),
        ({"at_hand": False}, "must know which TPU"),
    ],
)
def test_what_the_tpu_kernel_takes(change, reason):
    given = {"m": 4, "dtype": "bfloat16", "platform": "tpu", "at_hand": True} | change
    m, dtype, platform, at_hand = (given.pop(name) for name in ("m", "dtype", "platform", "at_hand"))
    product = Product(**({"shape": (128, 256), "block_size": 64} | given))
    x = jax.ShapeDtypeStruct((m, product.contracted), dtype)
    params = {"platform": platform, "backend": "tpu", "decode": NIBBLES, "product": product}
    with _at_hand("tpu" if at_hand else None):
        choice = kernels.chosen_backend(nf4_matmul_p, x, None, None, None, **params)
    assert choice.backend == "reference"
    assert re.search(reason, choice.reason)


KERNELS = {"cuda": "stored_matmul", "tpu": "tpu_custom_call"}
_SMALL, _LARGE = [(128, 256)], [(4096, 4096), (14336, 4096), (4096, 14336)]


@pytest.mark.parametrize(
    ("codec", "platform", "form", "shape", "m"),
    [
        ("mxfp4", "cuda", "forward", (128, 256), 3),
        ("q4_1", "cuda", "adapted", (128, 256), 3),
        ("q8_0", "tpu", "backward", (128, 256), 3),
        *map(
            _slow,
            covering(["mxfp4", "q4_1", "q8_0"], KERNELS, ["forward", "backward", "adapted"], _SMALL, [3]),
        ),
        *map(_slow, covering(["nf4", "nested"], ["tpu"], ["forward", "x @ W"], _LARGE, [1, 64, 4096])),
    ],
    ids=str,
)
def test_products_lower_to_kernels(codec, platform, form, shape, m):
    fn, x, w = _operation(codec, form == "x @ W", m=m, adapted=form == "adapted", shape=shape)
    backward = jax.grad(lambda x, w: jnp.sum(fn(x, w).astype(jnp.float32)))
    with _at_hand(platform):
        assert KERNELS[platform] in lowered(backward if form == "backward" else fn, x, w, platform=platform)


@pytest.mark.slow
def test_codes_are_looked_up_along_lanes_before_tpu_v5(monkeypatch):
    w = stored("nf4", 128, 256)
    x = _x(w, (7,))
    with tpu_at_hand("TPU v4"):
        assert KERNELS["tpu"] in lowered(lambda x: _times(x, w), x, platform="tpu")
    asked = []
    monkeypatch.setattr(tpu, "_looks_up_along_sublanes", asked.append)
    with kernels.backend("tpu"):
        y = jax.jit(lambda x: _times(x, w))(x)
    assert asked == [True]
    assert relative_error(y, _expected(x, w)) < 1e-6


# Shapes of operands that fit each other; those of a change do not.
_NF4 = {"x": (2, 64), "packed": (1536,), "absmax": (48,), "codebook": (16,), "block_size": 64}
_LORA = _NF4 | {"a": (8, 64), "b": (48, 8)}
_INT8 = {"x": (3, 32), "codes": (8, 32), "scale": (8, 1)}
_MANY = {"a": (3, 8, 64), "b": (3, 48, 8), "adapter_index": (3,)}
_DTYPES = {"packed": jnp.uint8, "codes": jnp.int8, "adapter_index": jnp.int32}


@pytest.mark.parametrize(
    ("function", "fits", "change", "match"),
    [
        (nf4_matmul, _NF4, {"x": (2, 63)}, r"last axis of x must be K = 64 .* got x of shape \(2, 63\)"),
        (nf4_matmul, _NF4, {"transpose": True}, r"last axis of x must be N = 48"),
        (nf4_matmul, _NF4, {"packed": (7,)}, r"packed .* must have shape \(1536,\), got \(7,\)"),
        (nf4_matmul, _NF4, {"absmax": (7,)}, r"absmax .* must have shape \(48,\), got \(7,\)"),
        (nf4_matmul, _NF4, {"codebook": (8,)}, r"codebook .* must have shape \(16,\), got \(8,\)"),
        (nf4_matmul, _NF4, {"block_size": 63}, r"block_size must be a positive even number, got 63"),
        (lora_matmul, _LORA, {"a": (8, 7)}, r"a must be \(\.\.\., rank, 64\) .* got shapes \(8, 7\)"),
        (lora_matmul, _LORA, {"b": (48, 5)}, r"b \(\.\.\., 48, rank\), got shapes"),
        (lora_matmul, _LORA, {"adapter_index": (2,)}, r"must have 3 axes with adapter_index"),
        (lora_matmul, _LORA, {"a": (2, 8, 64)}, r"must have 2 axes without adapter_index"),
        (lora_matmul, _LORA, {"x": (2, 7)}, r"lora_matmul: the last axis of x must be K = 64"),
        (lora_matmul, _LORA, _MANY, r"leading shape \(2,\) of x, got \(3,\)"),
        (int8_matmul, _INT8, {"block_size": 16}, r"scale of a weight of shape \(8, 32\) in blocks of 16"),
        (int8_matmul, _INT8, {"block_size": 0}, r"block_size must be at least 1, or None; got 0"),
        (int8_matmul, _INT8, {"transpose": True}, r"last axis of x must be N .* got x of shape \(3, 32\)"),
    ],
)
def test_operands_that_do_not_fit(function, fits, change, match):
    array = lambda name, z: jnp.ones(z, _DTYPES.get(name, jnp.float32)) if isinstance(z, tuple) else z
    options = {} if function is int8_matmul else {"shape": (48, 64)}
    call = lambda given: jax.eval_shape(
        lambda: function(**{name: array(name, z) for name, z in given.items()}, **options)
    )
    call(fits)
    with pytest.raises(ValueError, match=match):
        call(fits | change)
