"""A Value with `ArrayOperators` computes like the array that it stands for."""

import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
import quaxlike.numpy as qnp
from quaxlike.arrays.zero import Zero
from tests.samples import array


class Doubled(ql.ArrayOperators, ql.ArrayValue):
    """Keeps its type through `neg` and `add` of two of its kind; everything else materialises."""

    array: jax.Array

    def materialise(self) -> jax.Array:
        return self.array + self.array


@ql.register("neg")
def _(x: Doubled, **params):
    return Doubled(-x.array)


@ql.register("add")
def _(x: Doubled, y: Doubled, **params):
    return Doubled(x.array + y.array)


ARITHMETIC = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.matmul,
    divmod,
]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
BITWISE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]

FLOATS = Doubled(array([0.5, 1.0, 2.0]))
INTEGERS = Doubled(array([1, 2, 3]))
MATRIX = Doubled(array(np.arange(6.0).reshape(2, 3)))


def same(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(ql.materialise(a), b), x, y, is_leaf=ql.is_value)


@pytest.mark.quick("other0-add", "other0-ne", "other1-truediv", "other1-lt")
@pytest.mark.parametrize("op", [*ARITHMETIC, *COMPARISONS])
@pytest.mark.parametrize("other", [array([3.0, 1.0, 2.0]), np.array([3.0, 1.0, 2.0], np.float32)])
def test_binary_on_both_sides(op, other):
    dense = FLOATS.materialise()
    same(op(FLOATS, other), op(dense, other))
    same(op(other, FLOATS), op(other, dense))
    same(op(FLOATS, FLOATS), op(dense, dense))


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in (*ARITHMETIC, *COMPARISONS) if op is not operator.matmul])
@pytest.mark.parametrize("scalar", [2, 1.5, np.float32(0.5)])
def test_scalars_on_both_sides(op, scalar):
    dense = FLOATS.materialise()
    same(op(FLOATS, scalar), op(dense, scalar))
    same(op(scalar, FLOATS), op(scalar, dense))


@pytest.mark.slow
@pytest.mark.parametrize("op", BITWISE)
def test_bitwise(op):
    dense = INTEGERS.materialise()
    same(op(INTEGERS, 1), op(dense, 1))
    same(op(5, INTEGERS), op(5, dense))


@pytest.mark.parametrize("op", [operator.neg, operator.pos, abs, round])
def test_unary(op):
    same(op(FLOATS), op(FLOATS.materialise()))


def test_the_type_is_kept_where_it_has_rules():
    assert type(-FLOATS) is Doubled
    assert type(FLOATS + FLOATS) is Doubled
    assert type(jax.jit(lambda x: -(x + x))(FLOATS)) is Doubled


def test_inside_quaxify_a_late_value_joins_the_level_under_way():
    closed_over = FLOATS
    out = ql.quaxify(lambda x: closed_over + x)(FLOATS)
    assert type(out) is Doubled
    same(out, 2 * FLOATS.materialise())


METHODS = {
    "all": (),
    "any": (),
    "argmax": (1,),
    "argmin": (1,),
    "argpartition": (1,),
    "argsort": (),
    "astype": (jnp.int32,),
    "clip": (1.0, 5.0),
    "compress": (np.array([True, False]), 0),
    "conj": (),
    "conjugate": (),
    "copy": (),
    "cumprod": (1,),
    "cumsum": (1,),
    "diagonal": (),
    "dot": (array(np.ones((3, 2))),),
    "flatten": (),
    "max": (0,),
    "mean": (0,),
    "min": (0,),
    "nonzero": (),
    "prod": (0,),
    "ptp": (0,),
    "ravel": (),
    "repeat": (2,),
    "reshape": (3, 2),
    "round": (1,),
    "sort": (),
    "squeeze": (),
    "std": (0,),
    "sum": (1,),
    "swapaxes": (0, 1),
    "take": (array([0, 2]), 1),
    "trace": (),
    "transpose": (1, 0),
    "var": (0,),
    "view": (jnp.int32,),
    "tolist": (),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    out = getattr(MATRIX, name)(*METHODS[name])
    same(out, getattr(MATRIX.materialise(), name)(*METHODS[name]))


@pytest.mark.slow
def test_choose():
    choices = [jnp.arange(3) + i for i in range(7)]
    same(INTEGERS.choose(choices, mode="clip"), INTEGERS.materialise().choose(choices, mode="clip"))


# What tells of the buffers of one array, or is a method of NumPy's alone; a Value has leaves instead.
OF_BUFFERS = {
    "addressable_data",
    "addressable_shards",
    "byteswap",
    "clone",
    "committed",
    "copy_to_host_async",
    "delete",
    "device_buffer",
    "device_buffers",
    "flat",
    "format",
    "global_shards",
    "is_deleted",
    "is_fully_addressable",
    "is_fully_replicated",
    "is_ready",
    "itemsize",
    "nbytes",
    "on_device_size_in_bytes",
    "platform",
    "tobytes",
    "traceback",
    "unsafe_buffer_pointer",
    "unsafe_raw_buffer",
    "weak_type",
}


def test_every_public_method_of_arrays_is_there_and_tested():
    public = {name for name in dir(type(jnp.ones(1))) if not name.startswith("_")}
    assert public - OF_BUFFERS <= set(dir(MATRIX))
    apart = {"aval", "at", "block_until_ready", "choose", "dtype", "imag", "item", "mT", "ndim", "real"}
    apart |= {"searchsorted", "shape", "size", "T", "device", "devices", "sharding", "to_device"}
    assert public - OF_BUFFERS - apart == set(METHODS)


def test_every_operator_of_arrays_is_there():
    array = type(jnp.ones(1))
    operators = {
        f"__{side}{op.__name__.strip('_')}__" for op in [*ARITHMETIC, *BITWISE] for side in ("", "r")
    }
    for name in operators & set(dir(array)):
        assert getattr(ql.ArrayOperators, name) is not getattr(object, name, None)


def test_block_until_ready():
    assert MATRIX.block_until_ready().array is MATRIX.array


def test_searchsorted():
    same(FLOATS.searchsorted(2.0), FLOATS.materialise().searchsorted(2.0))


@pytest.mark.parametrize("name", ["T", "mT", "real", "imag"])
def test_attributes(name):
    same(getattr(MATRIX, name), getattr(MATRIX.materialise(), name))


def test_nbytes():
    assert MATRIX.nbytes == MATRIX.array.nbytes
    assert MATRIX.itemsize == MATRIX.array.itemsize
    assert ql.quaxify(lambda x: jnp.asarray(x.nbytes))(MATRIX) == MATRIX.array.nbytes


@pytest.mark.parametrize(
    "index",
    [0, -1, slice(None, None, 2), (0, slice(1, None)), (..., None), array([1, 0]), (jax.device_put(1), 2)],
)
def test_indexing(index):
    same(MATRIX[index], MATRIX.materialise()[index])


@pytest.mark.quick(4)
@pytest.mark.parametrize("method", ["set", "add", "subtract", "multiply", "divide", "power", "min", "max"])
def test_at(method):
    dense = MATRIX.materialise()
    same(getattr(MATRIX.at[0, 1:], method)(3.0), getattr(dense.at[0, 1:], method)(3.0))


def test_at_get_and_apply():
    dense = MATRIX.materialise()
    same(MATRIX.at[5, 0].get(mode="fill", fill_value=7.0), dense.at[5, 0].get(mode="fill", fill_value=7.0))
    same(MATRIX.at[1].apply(jnp.sin), dense.at[1].apply(jnp.sin))
    with pytest.raises(AttributeError, match=r"Index first: `x.at\[index\].set"):
        MATRIX.at.set(1.0)


def test_what_python_asks_for():
    one = Doubled(jnp.array(1))
    assert bool(one) is True
    assert (int(one), float(one), complex(one), operator.index(one), one.item()) == (2, 2.0, 2 + 0j, 2, 2)
    assert f"{one:.2f} {one}" == "2.00 Doubled(array=weak_i32[])"
    assert len(MATRIX) == 2
    assert [row.shape for row in MATRIX] == [(3,), (3,)]
    assert 4.0 in FLOATS
    assert 5.0 not in FLOATS
    np.testing.assert_array_equal(np.asarray(MATRIX), MATRIX.materialise())
    with pytest.raises(TypeError, match="of shape \\(\\) has no len"):
        len(one)


def test_what_is_no_array_is_left_to_python():
    assert (FLOATS == None) is False  # noqa: E711
    with pytest.raises(TypeError, match="unsupported operand"):
        FLOATS + "text"


def test_like_arrays_such_values_have_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        hash(FLOATS)


def test_materialising_for_python_follows_the_policy():
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="bool"):
        bool(Doubled(jnp.array(1)))


def test_the_mixin_comes_first():
    with pytest.raises(TypeError, match="must name ArrayOperators before ArrayValue"):

        class Wrong(ql.ArrayValue, ql.ArrayOperators):
            array: jax.Array

            def materialise(self):
                return self.array


def test_it_prints_as_a_module():
    assert eqx.tree_pformat(FLOATS) == "Doubled(array=f32[3])"


# Where it is, and the array API -------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda: MATRIX, lambda: ql.NF4Array.quantize(jnp.ones((4, 32))), lambda: Zero((3,))],
    ids=["Doubled", "NF4Array", "Zero"],
)
def test_where_it_is(make):
    value = make()
    run = lambda f, x: (f(x), ql.quaxify(lambda x: [f(x)])(x)[0])
    for ask in (
        lambda x: x.device,
        lambda x: x.sharding,
        lambda x: x.devices(),
        lambda x: x.__dlpack_device__(),
    ):
        expected = ask(jnp.zeros(()))
        assert run(ask, value) == (expected, expected)
    moved = value.to_device(jax.devices()[1])
    assert type(moved) is type(value)
    assert not jax.tree.leaves(moved) or moved.device == jax.devices()[1]
    assert not hasattr(value, "addressable_shards")
    with pytest.raises(AttributeError, match="its leaves have shards, of shapes of their own"):
        run(lambda x: x.addressable_shards, value)


def test_of_traced_arrays_it_is_nowhere_yet():
    def asks(x):
        for name in ("device", "sharding"):
            with pytest.raises(
                AttributeError, match=f"'{name}' attribute is not available on Doubled of traced"
            ):
                getattr(x, name)
        with pytest.raises(jax.errors.ConcretizationTypeError, match="devices"):
            x.devices()
        with pytest.raises(jax.errors.ConcretizationTypeError, match="__dlpack__"):
            x.__dlpack__()
        return jnp.sum(x.to_device(jax.devices()[0]).materialise())

    jax.jit(asks)(MATRIX)
    jax.grad(asks)(MATRIX)


def test_the_sharding_of_what_it_stands_for():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
    rows, columns = place(jnp.ones((4, 4)), "i"), place(jnp.ones((4, 4)), None, "i")
    assert Doubled(rows).sharding == rows.sharding == Doubled(rows).device
    assert ql.TrainableArray(columns).sharding == columns.sharding
    lora = ql.LoraArray(rows, place(jnp.ones((2, 4))), place(jnp.ones((4, 2)), "i"))
    assert lora.sharding == rows.sharding
    assert lora.devices() == rows.devices()
    with pytest.raises(AttributeError, match="No one sharding says how the leaves of LoraArray are placed"):
        _ = eqx.tree_at(lambda x: x.b, lora, place(jnp.ones((4, 2)))).sharding
    with pytest.raises(AttributeError, match="No one sharding"):  # a device for each leaf
        _ = eqx.tree_at(lambda x: x.b, lora, jnp.ones((4, 2))).sharding
    with pytest.raises(BufferError, match="one device"):
        lora.__dlpack_device__()


def test_exchange_by_dlpack_follows_the_policy():
    np.testing.assert_array_equal(np.from_dlpack(MATRIX), MATRIX.materialise())
    np.testing.assert_array_equal(jnp.from_dlpack(MATRIX), MATRIX.materialise())
    assert ql.quaxify(lambda x: np.from_dlpack(x).shape)(MATRIX) == (2, 3)
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="dlpack"):
        MATRIX.__dlpack__()


def test_nothing_is_changed_in_place():
    for run in (lambda f: f(MATRIX), lambda f: ql.quaxify(f)(MATRIX)):
        with pytest.raises(TypeError, match=r"\.at\[\w+\]\.set\("):
            run(lambda x: operator.setitem(x, 0, 1.0))


def test_its_namespace():
    assert MATRIX.__array_namespace__() is qnp
    xp = MATRIX.__array_namespace__(api_version=jnp.__array_api_version__)
    assert type(xp.negative(MATRIX)) is Doubled
    with pytest.raises(ValueError, match="1999"):
        MATRIX.__array_namespace__(api_version="1999.12")
