"""A user's types that have rules for one side alone, beside every shipped type.

Where a shipped type takes any other, operands keep their order while its rule redispatches on its parts.
Where it takes arrays alone, it is made dense for the user's rule.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

import quaxlike as ql
from quaxlike.implicit import ImplicitArray
from tests.array_types import CORNERS, TYPES, WEIGHTS
from tests.samples import covering, normal


class OneSided(ql.ArrayValue):
    """Linear, and never materialised."""

    array: jax.Array

    def aval(self):
        return jax.typeof(self.array)

    def materialise(self):
        raise AssertionError("materialised")


class Right(OneSided):
    pass


class Left(OneSided):
    pass


RULES = ql.RuleSet()
_AXES = ["broadcast_in_dim", "convert_element_type", "neg", "reduce_sum", "reshape", "squeeze", "transpose"]


@ql.register(_AXES, rules=RULES)
def _(primitive: Primitive, x: OneSided, **params):
    return type(x)(primitive.bind(x.array, **params))


@ql.register_on_either_side(["add", "mul", "sub"], OneSided, rules=RULES, precedence=-1)
def _(primitive, x, y, **params):
    cls = type(x) if isinstance(x, OneSided) else type(y)
    if not all(isinstance(each, OneSided | jax.Array) for each in (x, y)):
        return NotImplemented
    return cls(primitive.bind(*(getattr(each, "array", each) for each in (x, y)), **params))


@ql.register("dot_general", rules=RULES)
def _(x: jax.Array, y: Right, **params):
    return Right(jax.lax.dot_general_p.bind(x, y.array, **params))


@ql.register("dot_general", rules=RULES)
def _(x: Left, y: jax.Array, **params):
    return Left(jax.lax.dot_general_p.bind(x.array, y, **params))


PRODUCTS = {
    "w @ x": (Right, lambda w, x: w @ x),
    "w @ v": (Right, lambda w, x: w @ x[:, 0]),
    "w.T @ x": (Right, lambda w, x: w.T @ x),
    "x @ w": (Left, lambda w, x: x.T @ w),
    "x @ w.T": (Left, lambda w, x: x.T @ w.T),
}
# Of those that redispatch.
KINDS = [
    "LoraArray",
    "LoraArray, magnitude",
    "TrainableArray",
    "DiagonalMatrix",
    "KroneckerMatrix",
    "LowRankUpdate",
    "BlockDiagonalMatrix",
    "SumArray",
    "ScaledArray",
    "RotatedArray",
    "OFTArray",
    "LoKrArray",
    "Identity",
]


@pytest.mark.quick("BlockDiagonalMatrix-x @ w.T", "RotatedArray-w.T @ x")
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_for_one_side_is_found(kind, product):
    w = TYPES[kind]()
    cls, program = PRODUCTS[product]
    n = w.shape[0] if product in ("w.T @ x", "x @ w") else w.shape[1]
    x = jnp.asarray(normal(n, 3))
    want = program(ql.materialise(w), x)
    take = lambda x: x if product != "w @ v" else x[:, :1]
    run = lambda w, x: program(w, x) if product != "w @ v" else jnp.squeeze(w @ x, 1)
    for wrap in (lambda f: f, jax.jit):
        out = ql.quaxify(wrap(run), rules=RULES)(w, cls(take(x)))
        assert isinstance(out, cls)
        np.testing.assert_allclose(out.array, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_levels_between(jit):
    """The inner level multiplies arrays; what it binds keeps the order for the outer one."""
    w, x = TYPES["LoraArray"](), jnp.asarray(normal(4, 3))
    inner = ql.quaxify(lambda w, x: w @ x, (False, True, False))
    inner = jax.jit(inner) if jit else inner
    out = ql.quaxify(inner, (False, False, True), rules=RULES)(w, Right(x))
    np.testing.assert_allclose(out.array, ql.materialise(w) @ x, rtol=1e-4, atol=1e-5)


# Beside types that take arrays alone -----------------------------------------------------------------


class Mine(ql.ArrayValue):
    """It may not be materialised while a rule of its own could be asked."""

    on_materialise = "error"
    array: jax.Array

    def materialise(self):
        return self.array


class OnTheRight(Mine):
    pass


class OnTheLeft(Mine):
    pass


class OnBothSides(Mine):
    pass


ASKED: list[str] = []  # the primitives for which a rule of theirs ran
OPERATIONS = {
    "dot_general": lambda x, y: jax.lax.dot_general(x, y, (((x.ndim - 1,), (y.ndim - 1,)), ((), ()))),
    "mul": jax.lax.mul,
    "add": jax.lax.add,
    "concatenate": lambda x, y: jax.lax.concatenate([x, y, x], 0),
}
_BINARY = ["dot_general", "mul", "add"]


@ql.register(_BINARY)
def _(primitive: Primitive, x: ArrayLike, y: OnTheRight | OnBothSides, **params):
    ASKED.append(primitive.name)
    return type(y)(primitive.bind(x, y.array, **params))


@ql.register(_BINARY)
def _(primitive: Primitive, x: OnTheLeft | OnBothSides, y: ArrayLike, **params):
    ASKED.append(primitive.name)
    return type(x)(primitive.bind(x.array, y, **params))


@ql.register("concatenate")
def _(*xs: ArrayLike | Mine, dimension):
    ASKED.append("concatenate")
    (cls,) = {type(x) for x in xs if isinstance(x, Mine)}
    return cls(jax.lax.concatenate([getattr(x, "array", x) for x in xs], dimension))


TAKES_ARRAYS = [
    "NF4Array",
    "Int8Array",
    "BlockArray",
    "CacheArray",
    "Full",
    "SparseArray",
    "BlockSparseArray",
]
# Units say themselves what they cannot be added to.
OTHERS = [kind for kind in WEIGHTS | CORNERS if kind not in TAKES_ARRAYS and "Unitful" not in kind]


SIDES = [OnTheRight, OnTheLeft, OnBothSides]


@pytest.mark.each_value
@pytest.mark.quick(14)
@pytest.mark.parametrize(
    ("kind", "operation", "cls"),
    [
        *covering(TAKES_ARRAYS, OPERATIONS, SIDES),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in covering(OTHERS, OPERATIONS, SIDES)),
    ],
)
def test_a_rule_for_an_array_is_found_beside(kind, operation, cls):
    program = OPERATIONS[operation]
    with jax.numpy_dtype_promotion("standard"):
        shipped = TYPES[kind]()
    array = ql.materialise(shipped)
    if array.dtype == bool or (not array.ndim and operation in ("dot_general", "concatenate")):
        pytest.skip("not defined")
    other = jnp.asarray(normal(*array.shape, seed=3), array.dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if array.dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for right in (True, False):
        order = lambda x, y, right=right: (x, y) if right else (y, x)
        operands, want = order(shipped, cls(other)), program(*order(array, other))
        if operation != "concatenate" and cls is (OnTheLeft if right else OnTheRight):
            continue  # neither has a rule
        first = ql.explain(program)(*operands).rows[0]
        if kind not in TAKES_ARRAYS and first.outcome != "materialised":
            continue  # it has a rule for any type
        ASKED.clear()
        with ql.on_materialise("allow"):
            out = ql.quaxify(program)(*operands)
        assert tuple(ASKED) == (operation,)
        assert isinstance(out, cls)
        np.testing.assert_allclose(out.array, want, **tolerance)
        if first.outcome == "materialised":
            assert first.notes[-1] == f"only {type(shipped).__name__} is made dense"
            assert first.bytes == array.nbytes
            with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as raised:
                ql.quaxify(program)(*operands)
            assert f"; {type(shipped).__name__} would be made dense" in str(raised.value)


@dataclass
class Doubled(ImplicitArray):
    array: jax.Array

    def materialize(self):
        return 2 * self.array


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rule_for_an_array_is_found_beside_an_implicit_one(operation):
    x, y = jnp.asarray(normal(3, 3)), jnp.asarray(normal(3, 3, seed=1))
    program = OPERATIONS[operation]
    with pytest.warns(ql.MaterialisationWarning, match="; Doubled was made dense"):
        out = ql.quaxify(program)(Doubled(x), OnTheRight(y))
    assert isinstance(out, OnTheRight)
    np.testing.assert_allclose(out.array, program(2 * x, y), rtol=1e-5)


# Types that have a rule for the product, and no other ---------------------------------------------------


class Alone(OneSided):
    pass


class RightAlone(Alone):
    pass


class LeftAlone(Alone):
    pass


class SummedRight(Alone):
    """Its product is an array."""


class SummedLeft(Alone):
    """Its product is an array."""


PRODUCT_ALONE = ql.RuleSet()


@ql.register("dot_general", rules=PRODUCT_ALONE)
def _(x: jax.Array, y: RightAlone | SummedRight, **params):
    product = jax.lax.dot_general_p.bind(x, y.array, **params)
    return RightAlone(product) if isinstance(y, RightAlone) else product


@ql.register("dot_general", rules=PRODUCT_ALONE)
def _(x: LeftAlone | SummedLeft, y: jax.Array, **params):
    product = jax.lax.dot_general_p.bind(x.array, y, **params)
    return LeftAlone(product) if isinstance(x, LeftAlone) else product


def _contracted(axis: int, w_axis: int, on_left: bool):
    """`dot_general` of a shipped matrix and an array, or the other way round."""

    def program(w, x):
        summed = ((w.ndim + w_axis,), (axis,)) if on_left else ((axis,), (w.ndim + w_axis,))
        return jax.lax.dot_general(*((w, x) if on_left else (x, w)), (summed, ((), ())))

    return program


# Which operand is on the left; the summed axis of the shipped one; the shape of the other, n on that axis.
ALONE = {
    "w @ x": (True, -1, ("n", 3)),
    "w @ v": (True, -1, ("n",)),
    "w.T @ x": (True, -2, ("n", 3)),
    "w @ x.T": (True, -1, (3, "n")),
    "x @ w": (False, -2, (3, "n")),
    "v @ w": (False, -2, ("n",)),
    "x @ w.T": (False, -1, (3, "n")),
    "x.T @ w": (False, -2, ("n", 3)),
}
# `Zero` knows the product; users' types are made dense anyway.
MULTIPLYING = [
    kind
    for kind in WEIGHTS | CORNERS
    if not any(word in kind for word in ("Zero", "user's", "vector", "scalar", "OneHot", "booleans", "Bias"))
    and kind not in ("Full, infinity", "Full, nan", "Full, empty infinity")
]


@pytest.mark.each_value
@pytest.mark.quick(
    "DiagonalMatrix, empty-w.T @ x-False", "LowRankUpdate, stacked-w @ x.T-True", "RandLoRAArray-w @ x.T-True"
)
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
@pytest.mark.parametrize(("kind", "product", "returns_arrays"), covering(MULTIPLYING, ALONE, (False, True)))
def test_a_rule_for_the_product_alone_is_found(kind, product, returns_arrays):
    with jax.numpy_dtype_promotion("standard"):
        w = TYPES[kind]()
    on_left, w_axis, shape = ALONE[product]
    array = ql.materialise(w)
    x = jnp.asarray(normal(*(array.shape[w_axis] if n == "n" else n for n in shape)), array.dtype)
    program = _contracted(shape.index("n"), w_axis, on_left)
    cls = {
        (True, False): RightAlone,
        (True, True): SummedRight,
        (False, False): LeftAlone,
        (False, True): SummedLeft,
    }[on_left, returns_arrays]
    for wrap in (lambda f: f, jax.jit):
        out = ql.quaxify(wrap(program), rules=PRODUCT_ALONE)(w, cls(x))
        while ql.is_value(out) and not isinstance(out, cls):
            out = out.array  # its names or unit
        # An identity returns the operand as it is, unless the product transposes it.
        untouched = kind.split(",")[0] == "Identity" and "x.T" not in product
        assert isinstance(out, cls if untouched or not returns_arrays else jax.Array)
        tolerance = 3e-2 if array.dtype == jnp.bfloat16 else 1e-4
        out = out.array if isinstance(out, cls) else out
        np.testing.assert_allclose(out, program(array, x), rtol=tolerance, atol=tolerance)


def test_what_an_adapter_lacks_is_said():
    """It needs sums of products. What is made dense instead says so, under every policy."""
    w, x = TYPES["LoraArray"](), RightAlone(jnp.asarray(normal(4, 3)))
    run = ql.quaxify(jnp.matmul, rules=PRODUCT_ALONE)
    lacking = (
        r"(?s)dot_general: no rule for \(LoraArray f32\[4,4\], RightAlone f32\[4,3\]\); LoraArray %s be made "
        r"dense.*A rule declined, since it needs one for mul of \(RightAlone f32\[2,3\], f32\[\]\):\n"
        r"\s*dot_general\(LoraArray.*To keep the type, write a rule:\n\s*@quaxlike.register\(\"mul\"\)\n"
        r"\s*def _\(x: RightAlone, y: jax.Array, \*\*params\)"
    )
    with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match=lacking % "would"):
        run(w, x)
    with pytest.warns(ql.MaterialisationWarning, match=lacking.replace("%s be", "was")):
        assert isinstance(run(w, x), RightAlone)
    row = ql.explain(jnp.matmul, rules=PRODUCT_ALONE)(w, x).rows[0]
    assert (row.outcome, row.notes[-1]) == ("materialised", "only LoraArray is made dense")


def test_a_rule_that_names_both_types_decides():
    """It may make either dense."""
    rules = ql.RuleSet()
    w, x = TYPES["LoraArray"](), Mine(jnp.asarray(normal(4, 3)))

    @ql.register("dot_general", rules=rules)
    def _(x: jax.Array, y: Mine, **params):
        raise AssertionError("asked")

    @ql.register("dot_general", rules=rules)
    def _(x: ql.LoraArray, y: Mine, **params):
        return ql.quaxify(lambda y: jax.lax.dot_general_p.bind(x.w, jnp.sin(y), **params))(y)

    with ql.on_materialise("allow"):
        out = ql.quaxify(jnp.matmul, rules=rules)(w, x)
    np.testing.assert_allclose(out, w.w @ jnp.sin(x.array), rtol=1e-5)


class Before(Alone):
    pass


class After(Alone):
    pass


@ql.register("mul", rules=PRODUCT_ALONE)
def _(x: Before, y: jax.Array, **params):
    return Before(jax.lax.mul_p.bind(x.array, y, **params))


@ql.register("mul", rules=PRODUCT_ALONE)
def _(x: jax.Array, y: After, **params):
    return After(jax.lax.mul_p.bind(x, y.array, **params))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Before, After])
@pytest.mark.parametrize("product", ["w @ x", "w @ v", "x @ w"])
def test_the_product_with_a_diagonal_is_one_of_elements(product, cls):
    """A rule for `mul` is enough, for either order: `x` stays as it is."""
    w = TYPES["DiagonalMatrix"]()
    on_left, w_axis, shape = ALONE[product]
    x = jnp.asarray(normal(*(4 if n == "n" else n for n in shape)))
    program = _contracted(shape.index("n"), w_axis, on_left)
    out = ql.quaxify(program, rules=PRODUCT_ALONE)(w, cls(x))
    assert isinstance(out, cls)
    np.testing.assert_allclose(out.array, program(ql.materialise(w), x), rtol=1e-5)
