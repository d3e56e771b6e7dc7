"""What devices exchange: read from the compiled programs."""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.core.inspect.exchange import exchanges
from quaxlike.lm import tensor_parallel
from quaxlike.sharding import constrain, fsdp, shard
from tests.samples import normal, random_key

KEY = random_key(0)
AUTO = (jax.sharding.AxisType.Auto,) * 2
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=AUTO)
X = normal(8, 64)


def exchanged(compiled: Any) -> Counter[tuple[str, str]]:
    """The bytes that collectives give each device, by kind and dtype."""
    found = Counter[tuple[str, str]]()
    for e in exchanges(compiled.as_text()):
        found[e.kind, e.dtype] += e.bytes
    return found


def _mlp(format: str, *, adapted: bool, **options: Any) -> Any:
    mlp = ql.quantize(eqx.nn.MLP(64, 64, 256, depth=1, key=KEY), format, **options)
    if not adapted:
        return mlp
    mlp = ql.loraify(mlp, rank=4, key=KEY)
    raised = lambda w: w.replace(b=w.b + 0.1) if isinstance(w, ql.LoraArray) else w
    return jax.tree.map(raised, mlp, is_leaf=lambda w: isinstance(w, ql.LoraArray))


def _loss(model: Any, x: Any) -> Any:
    with ql.on_materialise("error"):
        return jnp.mean(ql.quaxify(jax.vmap(model))(x) ** 2)


def _compiled(fn: Any, *args: Any) -> Any:
    arrays, static = eqx.partition(args, eqx.is_array)
    return jax.jit(lambda arrays: fn(*eqx.combine(arrays, static))).lower(arrays).compile(), arrays


MODELS = {
    "NF4": ("nf4", {}, False),
    "LoRA over NF4": ("nf4", {}, True),
    "LoRA over NF4, doubly quantised": ("nf4", {"double_quant": True}, True),
    "int4 in blocks": ("int4", {"block_size": 32}, False),
    "int8": ("int8", {}, True),
    "int8 in blocks": ("int8", {"block_size": 32}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["LoRA over NF4", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "LoRA over NF4")],
)
def test_tensor_parallel_gathers_no_weight(name: str):
    format, options, adapted = MODELS[name]
    model = _mlp(format, adapted=adapted, **options)
    placed = shard(model, MESH, tensor_parallel(model, MESH))
    x = jax.device_put(X, jax.NamedSharding(MESH, jax.P("data")))
    step = jax.value_and_grad(lambda x, model: _loss(model, x))
    compiled, args = _compiled(step, x, placed)
    assert {kind for kind, _ in exchanged(compiled)} == {"all-reduce"}
    expected = step(X, model)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), compiled(args), expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_fully_sharded_weights_are_gathered_as_codes(name: str):
    format, options, adapted = MODELS[name]
    model = _mlp(format, adapted=adapted, **options)
    placed = shard(model, MESH, fsdp(MESH))
    x = jax.device_put(X, jax.NamedSharding(MESH, jax.P(("data", "model"))))
    step = jax.value_and_grad(lambda x, model: _loss(constrain(model, MESH, None), x))
    compiled, args = _compiled(step, x, placed)
    found = exchanged(compiled)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    codes = sum(layer.weight.size for layer in model.layers) // (1 if "int8" in name else 2)
    assert found["all-gather", "s8" if "int8" in name else "u8"] <= codes + codes // 16
    assert sum(n for (kind, _), n in found.items() if kind == "all-gather") <= stored
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    expected = step(X, model)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), compiled(args), expected
    )


@pytest.mark.slow
def test_what_is_divided_and_fully_sharded_is_gathered_over_the_rest_alone():
    model = _mlp("nf4", adapted=False)
    by_layer = tensor_parallel(model, MESH)
    placed = shard(model, MESH, fsdp(MESH, over=by_layer))
    x = jax.device_put(X, jax.NamedSharding(MESH, jax.P("data")))
    compiled, _ = _compiled(lambda model, x: _loss(constrain(model, MESH, by_layer), x), placed, x)
    codes = sum(layer.weight.codes.size for layer in model.layers)
    assert exchanged(compiled)["all-gather", "u8"] == codes // 2


def test_explain_tells_which_weights_are_gathered():
    """Rows that are spread over the devices of the batch, too, cannot be multiplied where they are."""
    w = shard(ql.quantize(normal(64, 64), "nf4"), MESH, jax.P("data"))
    adapted = ql.LoraArray(
        w, *(jax.device_put(x, jax.NamedSharding(MESH, jax.P())) for x in (normal(4, 64), normal(64, 4)))
    )
    x = jax.device_put(X, jax.NamedSharding(MESH, jax.P("data")))
    report = ql.explain(lambda w, x: x @ w.T)(adapted, x)
    assert "What its 4 devices exchange is in `exchanged`" in report.summary
    codes = next(e for e in report.exchanged if e.dtype == "u8")
    assert (codes.kind, codes.shape, codes.bytes, codes.packed) == ("all-gather", (64, 32), 64 * 32, True)
    packed = sum(e.bytes for e in report.exchanged if e.packed)
    assert packed == 64 * 32 + 4 * 64
    assert f"Its 4 devices gather packed weights in 2 gathers, {packed:,} bytes" in report.summary


def test_explain_tells_that_none_is():
    w = shard(ql.quantize(normal(64, 64), "nf4"), MESH, jax.P("model"))
    report = ql.explain(lambda w, x: x @ w.T)(w, jax.device_put(X, jax.NamedSharding(MESH, jax.P("data"))))
    assert not any(e.packed for e in report.exchanged)
    assert "gather packed weights nowhere" in report.summary
    on_one = ql.explain(lambda w, x: x @ w.T)(ql.quantize(normal(64, 64), "nf4"), X)
    assert on_one.exchanged == ()
    assert "devices" not in on_one.summary


def test_programs_of_gpus_exchange_in_two_steps():
    text = """
      %s = (u8[8,32]{1,0}, u8[64,32]{1,0}) all-gather-start(%p), channel_id=1
      %d = u8[64,32]{1,0} all-gather-done(%s)
      %r = f32[8]{0} all-reduce-start(%q), channel_id=2
      %t = (f32[4]{0}, bf16[2,2]{1,0}) all-reduce(%a, %b), channel_id=3
    """
    found = {(e.kind, e.dtype, e.shape): (e.count, e.bytes, e.packed) for e in exchanges(text)}
    assert found == {
        ("all-gather", "u8", (64, 32)): (1, 2048, False),
        ("all-reduce", "f32", (8,)): (1, 32, False),
        ("all-reduce", "f32", (4,)): (1, 16, False),
        ("all-reduce", "bf16", (2, 2)): (1, 8, False),
    }
