"""Attention by blocks is what it is at once, with linear memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike.lm.models import attention_blocks
from quaxlike.lm.models.attention import Sight, attend
from tests.samples import Lazy, array, normal

HEADS, SHARED, SIZE = 4, 2, 8
PADDED = np.arange(45) >= 7
TEXTS = array(np.repeat([0, 1, 2], [11, 20, 14]), jnp.int32)
SIGHTS = Lazy(
    {
        "all": lambda: Sight.of(array(np.ones(45, bool))),
        "causal": lambda: Sight.of(array(np.ones(45, bool)), after=0),
        "window": lambda: Sight.of(array(np.ones(45, bool)), before=9, after=0),
        "near": lambda: Sight.of(array(PADDED), before=5, after=5),
        "padded before": lambda: Sight.of(array(PADDED), after=0),
        "padded after": lambda: Sight.of(array(PADDED[::-1]), after=0),
        "packed": lambda: Sight.of(array(np.ones(45, bool)), after=0, texts=(TEXTS, TEXTS)),
        "cached": lambda: Sight.of(array(np.arange(45) < 33), array(20 + np.arange(13)), after=0),
    }
)
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.2},
    "sinks": {"sinks": normal(HEADS)},
}


def _operands(tokens, keys=45, dtype="float32"):
    shapes = (tokens, HEADS, SIZE), (keys, SHARED, SIZE), (keys, SHARED, SIZE)
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def _forms(monkeypatch, f, *args):
    """What a function gives with all pairs at once, and by blocks."""
    out = []
    for pairs in (2**20, 0):
        monkeypatch.setattr(attention_blocks, "_ALL_AT_ONCE", pairs)
        out.append(jax.jit(lambda *args: f(*args))(*args))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sight", SIGHTS)
def test_by_blocks_it_is_the_same(sight, options, monkeypatch):
    monkeypatch.setattr(attention_blocks, "_BLOCK", 8)
    sight, options = SIGHTS[sight], OPTIONS[options]
    sees = np.asarray(sight.mask()).any(axis=1)
    operands = _operands(len(sight.places))

    def loss(operands, sinks):
        y = attend(*operands, sight, **(options | sinks))
        return jnp.sum(jnp.sin(y)[sees]), y

    sinks = {"sinks": options["sinks"]} if "sinks" in options else {}
    (_, at_once), (_, by_blocks) = forms = _forms(
        monkeypatch, lambda *args: jax.grad(loss, argnums=(0, 1), has_aux=True)(*args), operands, sinks
    )
    np.testing.assert_allclose(by_blocks[sees], at_once[sees], atol=2e-6)
    for one, other in zip(*(jax.tree.leaves(gradient) for gradient, _ in forms), strict=True):
        np.testing.assert_allclose(one, other, atol=4e-6)


@pytest.mark.slow
def test_in_bfloat16_it_is_that_of_the_rounded_operands(monkeypatch):
    """At once and by blocks, with gradients; CPUs have products of their own for keys from a cache."""
    monkeypatch.setattr(attention_blocks, "_BLOCK", 16)
    operands, sight = _operands(13, dtype="bfloat16"), SIGHTS["cached"]

    def loss(*operands):
        y = attend(*operands, sight)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    forms = _forms(monkeypatch, jax.grad(loss, argnums=(0, 1, 2), has_aux=True), *operands)
    exact = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*(x.astype("float32") for x in operands))
    for form in forms:
        for found, expected in zip(jax.tree.leaves(form), jax.tree.leaves(exact), strict=True):
            assert found.dtype == jnp.bfloat16
            error = np.abs(np.asarray(found, np.float32) - expected).max()
            assert error < 2e-2 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sight", "options"),
    [*zip([name for name in SIGHTS if name != "cached"], itertools.cycle(OPTIONS), strict=False)],
)
def test_divided_among_devices_it_is_the_same(sight, options, monkeypatch):
    monkeypatch.setattr(attention_blocks, "_BLOCK", 8)
    mesh = jax.make_mesh((3,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    sight, options = SIGHTS[sight], OPTIONS[options]
    sees = np.asarray(sight.mask()).any(axis=1)
    operands, sinks = _operands(45), {"sinks": options["sinks"]} if "sinks" in options else {}

    def loss(operands, sinks):
        y = attend(*operands, sight, **(options | sinks))
        return jnp.sum(jnp.where(sees[:, None], jnp.sin(y), 0))

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    of_one = jax.jit(lambda *args: gradient(*args))(operands, sinks)
    operands, sinks = [put(x, jax.P("seq")) for x in operands], put(sinks, jax.P())
    for of_many in _forms(monkeypatch, gradient, operands, sinks):
        for one, other in zip(*map(jax.tree.leaves, (of_one, of_many)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=4e-6)


@pytest.mark.slow
def test_by_blocks_in_a_batch_and_in_half_precision(monkeypatch):
    monkeypatch.setattr(attention_blocks, "_BLOCK", 16)
    operands = [jnp.stack([x, 2 * x]) for x in _operands(45, dtype="bfloat16")]
    seen = jnp.stack([jnp.ones(45, bool), jnp.asarray(PADDED)])
    of_batch = jax.vmap(lambda q, k, v, seen: attend(q, k, v, Sight.of(seen, after=0)))
    at_once, by_blocks = _forms(monkeypatch, of_batch, *operands, seen)
    assert by_blocks.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(by_blocks)[0], np.float32(at_once)[0], rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(np.float32(by_blocks)[1, 7:], np.float32(at_once)[1, 7:], rtol=2e-2, atol=2e-2)


@pytest.mark.quick("softcap-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_one_query_sees_what_it_sees_among_others(options, dtype):
    sight = Sight.of(jnp.asarray(PADDED), jnp.asarray([30, 20]), before=25, after=0)
    query, key, value = _operands(2, dtype=dtype)

    def loss(of, query, key, value):
        y = of(query, key, value).astype(jnp.float32)
        return jnp.sum(jnp.sin(y)), y

    together = lambda *operands: attend(*operands, sight, **OPTIONS[options])
    one = lambda query, place, *others: attend(
        query[None], *others, sight._replace(places=place[None]), **OPTIONS[options]
    )[0]
    each = lambda query, *others: jax.vmap(one, (0, 0, None, None))(query, sight.places, *others)
    forms = [
        jax.jit(jax.grad(functools.partial(loss, of), argnums=(0, 1, 2), has_aux=True))(query, key, value)
        for of in (each, together)
    ]
    atol = 2e-6 if dtype == "float32" else 2e-2
    for ours, expected in zip(*map(jax.tree.leaves, forms), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), expected.astype(jnp.float32), atol=2 * atol)


def _temporaries(tokens):
    """MiB beside the operands of the gradient of causal attention with 8 heads of 64."""
    shape = jax.ShapeDtypeStruct((tokens, 8, 64), jnp.float32)

    def loss(*operands):
        return jnp.sum(attend(*operands, Sight.of(jnp.ones(tokens, bool), after=0)))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


@pytest.mark.slow
def test_memory_is_linear_in_the_number_of_tokens():
    few, some, many = map(_temporaries, (2048, 8192, 32768))
    assert many <= 16 * few
    assert some <= 300


def test_no_pair_of_far_blocks_is_computed(monkeypatch):
    monkeypatch.setattr(attention_blocks, "_ALL_AT_ONCE", 0)
    operands = _operands(45)
    sight = functools.partial(Sight.of, jnp.ones(45, bool))
    text = jax.jit(lambda *x: attend(*x, sight(after=0))).lower(*operands).as_text()
    assert "stablehlo.case" in text
