"""An adapter of the user's own, with one rule: whatever works with LoRA works with it."""

import ast
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

import quaxlike as ql
from quaxlike.arrays.axis_rules import with_all_axes
from quaxlike.files import safetensors
from quaxlike.lm import generate, peft, tensor_parallel
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.sharding import fsdp, shard
from quaxlike.testing import check_type
from tests.samples import drawn, normal, random_key, tree_equal
from tests.sharding.processes import run as on_devices

KEY = random_key(0)
MLP = drawn(eqx.nn.MLP, 64, 8, 32, depth=2, key=KEY)
X = normal(8, 64)


class Scaled(ql.AdaptedArray):
    """Rows of a weight, each multiplied by `1 + scale` (IA3, but for the one)."""

    scale: jax.Array
    part_axes: ClassVar = {"scale": "out"}

    def materialise(self):
        return jnp.einsum("...oi,...o->...oi", ql.materialise(self.base), 1 + self.scale)

    def unmerged(self, weight):
        return self.with_base(weight / (1 + self.scale)[..., None])

    def adds_nothing(self):
        return True

    def times(self, factor):
        return NotImplemented if factor.ndim else self.with_base(ql.quaxify(jnp.multiply)(self.base, factor))


@ql.register_on_either_side("dot_general", Scaled, other=ArrayLike)
def _product(primitive: Primitive, x, y, *, dimension_numbers, **params):
    on_left = isinstance(x, Scaled)
    w, other = (x, y) if on_left else (y, x)
    of_w, _ = ql.dot_axes(w, other, dimension_numbers, on_left=on_left)
    out = w.ndim - 2
    if w.scale.ndim > 1 or out in of_w.contracting:
        return NotImplemented
    operands = (w.base, other) if on_left else (other, w.base)
    out_of = ql.quaxify(primitive.bind)(*operands, dimension_numbers=dimension_numbers, **params)
    return out_of * jnp.expand_dims(1 + w.scale, [i for i in range(out_of.ndim) if i != of_w.in_result[out]])


def _make(w, *, key, layout):
    return Scaled(w, 0.3 * jax.random.normal(key, layout.out_shape(tuple(w.shape))))


def _adapted(seed=1, base=MLP, **options):
    return ql.adapt(base, _make, key=jax.random.key(seed), **options)


def _run(model, x=X):
    with ql.on_materialise("error"):
        return jax.vmap(ql.quaxify(model))(x)


def _weights(model):
    return [layer.weight for layer in model.layers]


def _close(x, y, tolerance=1e-6):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_only_its_parts_are_trained():
    model = _adapted()
    spec = ql.trainable(model)
    assert [(w.w, w.scale) for w in _weights(spec)] == [(False, True)] * 3
    params, rest = eqx.partition(model, spec)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(params):
        return jnp.mean(_run(eqx.combine(params, rest)) ** 2)

    before, grads = loss(params)
    for _ in range(5):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        after, grads = loss(params)
    assert after < before


@pytest.mark.slow
def test_the_base_is_frozen_unless_it_is_trained():
    gradient = jax.grad(lambda w: jnp.sum(jnp.sin(w @ X[0])))
    w = _weights(_adapted())[0]
    assert not np.any(gradient(w).w)
    trained = w.replace(gradients="train")
    assert ql.trainable(trained).w
    _close(gradient(trained).w, jax.grad(lambda v: jnp.sum(jnp.sin(w.with_base(v).merged() @ X[0])))(w.w))


@pytest.mark.slow
def test_it_is_merged_and_taken_out_again():
    model = _adapted()
    merged = ql.merge(model)
    for x, y in zip(_weights(merged), _weights(model), strict=True):
        _close(x, np.asarray(y.w, np.float64) * (1 + np.asarray(y.scale, np.float64))[:, None])
    _close(jax.vmap(merged)(X), _run(model), 1e-5)
    again = ql.unmerge(merged, model)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        if eqx.is_array(x):
            _close(x, y)
    with pytest.raises(ValueError, match=r"layers\.0\.weight is not the sum of its base and its adapter"):
        ql.unmerge(merged, _adapted(seed=2))


@pytest.mark.slow
def test_merged_weights_have_the_dtype_that_they_had():
    with jax.numpy_dtype_promotion("standard"):
        model = _adapted(base={"a.weight": normal(4, 4).astype(jnp.bfloat16)})
        merged = ql.merge(model)["a.weight"]
        assert (model["a.weight"].dtype, merged.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(merged, model["a.weight"].materialise().astype(jnp.bfloat16))


def test_a_type_that_does_not_say_how_it_is_taken_out():
    class Shifted(ql.AdaptedArray):
        shift: jax.Array

        def materialise(self):
            return ql.materialise(self.base) + self.shift

    model = ql.adapt(MLP, lambda w, **_: Shifted(w, jnp.ones(w.shape)))
    assert ql.summary(model).trainable == sum(w.size for w in _weights(MLP))
    with pytest.raises(ValueError, match=r"layers\.0\.weight is of type Shifted, which .*`Shifted.unmerged`"):
        ql.unmerge(ql.merge(model), model)
    with pytest.raises(ValueError, match=r"is trained too: Shifted, .*`part_axes`"):
        ql.stack_adapters([model, model])


@pytest.mark.slow
def test_it_is_counted():
    table = ql.summary(_adapted())
    rows = {row.path: row for row in table.rows}
    row = rows["layers.0.weight"]
    assert (row.type, row.size, row.adapter_size, row.trainable) == ("Scaled", 2048, 32, 32)
    assert (table.size, table.trainable) == (ql.summary(MLP).size, 32 + 32 + 8)


@pytest.mark.slow
def test_weights_are_quantised_beneath():
    model = _adapted(where=["layers.0", "layers.1"])
    quantised = ql.quantize(model, "nf4")
    assert [row.type for row in ql.summary(quantised).rows][::2] == 2 * ["Scaled of NF4Array"] + ["NF4Array"]
    rounded = ql.fake_quantize(model, "nf4")
    assert isinstance(rounded.layers[0].weight, Scaled)
    _close(_run(quantised), _run(rounded), 1e-4)
    with pytest.warns(UserWarning, match="Adapters were merged into quantised weights"):
        merged = ql.merge(quantised)
    assert isinstance(merged.layers[0].weight, ql.NF4Array)
    _close(_run(merged), _run(quantised), 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [_adapted, lambda: ql.loraify(MLP, rank=2, key=KEY, init="gaussian")])
def test_scales_are_trained_beneath(adapted):
    """With the gradient of the dense weight at them; codes and other scales have none."""
    model = ql.train_scales(ql.quantize(adapted(), "nf4"), where=["layers.0"])
    marks = ql.trainable(model)
    assert marks.layers[0].weight.w.scale
    assert not marks.layers[1].weight.w.scale
    w, other = _weights(model)[:2]
    size = lambda w, x: jnp.sum(jnp.sin(ql.quaxify(jnp.matmul)(w, x)))
    found = jax.grad(size, allow_int=True)(w, X[0]).w.scale
    dense = lambda scale: jnp.sum(jnp.sin(w.with_base(dataclasses.replace(w.w, scale=scale)).merged() @ X[0]))
    assert np.any(found)
    _close(found, jax.grad(dense)(w.w.scale), 1e-5)
    assert not np.any(jax.grad(size, allow_int=True)(other, X[0, :32]).w.scale)


def test_each_sample_chooses_one_of_several():
    models = [_adapted(i) for i in range(3)] + [_adapted(3, where=["layers.0"])]
    stacked = ql.stack_adapters(models)
    assert all(w.w is v for w, v in zip(_weights(stacked), _weights(MLP), strict=True))
    assert _weights(stacked)[0].shape == (4, 32, 64)
    with pytest.raises(ValueError, match=r"adapters of shape \(4, 32, 64\) on a weight of shape \(32, 64\)"):
        ql.merge(stacked)
    indices = np.array([0, 3, 1, 1, 0, 2, 3, 0])

    @eqx.filter_jit
    def run(stacked, indices):
        return jax.vmap(lambda i, x: ql.quaxify(ql.choose_adapter(stacked, i))(x))(indices, X)

    with ql.on_materialise("error"):
        y = run(stacked, indices)
    alone = eqx.filter_jit(lambda model, x: ql.quaxify(model)(x))
    _close(y, np.stack([alone(models[i], x) for i, x in zip(indices, X, strict=True)]), 1e-5)


@pytest.mark.slow
def test_each_text_is_continued_with_its_own():
    config = DecoderConfig.from_json({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    })  # fmt: skip
    model, ids = Decoder(config, key=KEY), np.arange(2 * 5).reshape(2, 5)
    models = [_adapted(i, model, where=["q_proj", "up_proj"]) for i in range(2)]
    apart = [generate(each, ids[i : i + 1], max_new_tokens=6)[0] for i, each in enumerate(models)]
    np.testing.assert_array_equal(generate(ql.stack_adapters(models), ids, max_new_tokens=6), np.stack(apart))
    with pytest.raises(ValueError, match="There are 2 texts and 3 adapters"):
        generate(ql.stack_adapters([*models, models[0]]), ids, max_new_tokens=6)


def test_adapters_of_two_types_are_not_stacked():
    with pytest.raises(ValueError, match=r"The adapters on layers\.0\.weight do not fit each other"):
        ql.stack_adapters([_adapted(), ql.loraify(MLP, rank=2, key=KEY)])
    with pytest.raises(ValueError, match=r"on layers\.0\.weight .* Scaled, which .*`Scaled\.combined`"):
        ql.combine_adapters([_adapted(1), _adapted(2)], [1.0, 1.0])


def check_sharded(kind, devices):
    """Weights and parts lie in pieces, and outputs and gradients are those of one device."""
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    model = _adapted()
    placed = shard(model, mesh, tensor_parallel(model, mesh) if kind == "tensor" else fsdp(mesh))
    w = placed.layers[0].weight
    assert isinstance(w, Scaled)
    assert w.w.sharding.spec == jax.P("model", None) or kind == "fsdp"
    assert w.w.sharding.num_devices == devices
    assert w.scale.sharding.spec == (jax.P("model"))
    assert w.scale.sharding.shard_shape(w.scale.shape) == (32 // devices,)

    @eqx.filter_jit
    def value_and_grad(model):
        params, rest = eqx.partition(model, ql.trainable(model))
        return eqx.filter_value_and_grad(lambda params: jnp.sum(_run(eqx.combine(params, rest)) ** 2))(params)

    found, expected = value_and_grad(placed), value_and_grad(model)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


class Shifted(ql.AdaptedArray):
    shift: jax.Array
    part_axes: ClassVar = {"shift": "out in"}

    def materialise(self):
        return ql.materialise(self.base) + self.shift

    def combined(self, others, weights, method, rank):
        return self.replace(shift=sum(w * x.shift for w, x in zip(weights, others, strict=True)))


@pytest.mark.slow
def test_they_are_combined_as_their_type_says():
    """Where the first model has no adapter, too."""
    make = lambda seed: lambda w, **_: Shifted(w, normal(*w.shape, seed=seed))
    first, second = ql.adapt(MLP, make(1), where=["layers.0"]), ql.adapt(MLP, make(2))
    combined = ql.combine_adapters([first, second], [2.0, -0.5])
    for i, (x, y, w) in enumerate(zip(_weights(combined), _weights(second), _weights(MLP), strict=True)):
        assert x.w is w
        _close(x.shift, 2 * (_weights(first)[0].shift if i == 0 else 0) - 0.5 * y.shift)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "fsdp"])
def test_it_is_sharded(kind):
    check_sharded(kind, 4)


@pytest.mark.slow
def test_it_is_sharded_on_eight_devices():
    on_devices(
        "from tests.surgery.test_adapted import check_sharded\n"
        "for kind in ('tensor', 'fsdp'):\n"
        "    check_sharded(kind, 8)",
        devices=8,
    )


@pytest.mark.slow
def test_layers_are_stacked_and_scanned():
    layers = [_adapted(i, eqx.nn.Linear(64, 64, key=jax.random.key(i)), where=r"weight") for i in range(3)]
    stacked = ql.stack_layers(layers)
    step = lambda x, layer: (layer(x), None)
    with ql.on_materialise("error"):
        y = ql.quaxify(lambda stacked, x: jax.lax.scan(step, x, stacked)[0])(stacked, X[0])
        rows = ql.unstack_layers(stacked)
        second = ql.quaxify(lambda w: w[1])(stacked.weight)
    x = X[0]
    for layer in layers:
        x = ql.quaxify(layer)(x)
    _close(y, x, 1e-5)
    assert isinstance(second, Scaled)
    for row in (rows[1].weight, second):
        assert tree_equal(row, layers[1].weight)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (2,)], ids=["alone", "stacked"])
def test_it_equals_its_array_under_every_transform(batch):
    report = check_type(Scaled(normal(*batch, 4, 4), normal(*batch, 4, seed=1)))
    assert not report.failures, report


STACK = Scaled(normal(2, 3, 5, 4), normal(3, 5, seed=1))
ALONE = Scaled(normal(5, 4, seed=2), normal(5, seed=3))
AT = np.array([[2, 0], [1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "operands"),
    [
        (lambda w: w.transpose(1, 0, 2, 3), lambda: [STACK]),
        (lambda w: w.reshape(6, 5, 4), lambda: [STACK]),
        (lambda w: w[1:], lambda: [STACK]),
        (lambda w: jnp.squeeze(w[:1], 0), lambda: [STACK]),
        (lambda w: jax.lax.dynamic_slice_in_dim(w, 1, 2, 1), lambda: [STACK]),
        (lambda w: w.astype(jnp.bfloat16), lambda: [ALONE]),
        (lambda w: w[None], lambda: [ALONE]),
        (lambda w: jnp.broadcast_to(w, (3, 5, 4)), lambda: [ALONE]),
        (lambda w: jnp.broadcast_to(w, (2, 2, 3, 5, 4)), lambda: [STACK]),
        (lambda w: jnp.expand_dims(w, (1, 3)), lambda: [STACK]),
        (lambda v, w: jnp.stack([v, w, v]), lambda: [ALONE, ALONE * -1.5]),
        (lambda v, w: jnp.stack([v, w], 1), lambda: [STACK, STACK]),
        (lambda v, w: jnp.stack([v, w]), lambda: [ALONE, ALONE.materialise()]),
        (lambda v, w: jnp.concatenate([v, w], 1), lambda: [STACK, STACK[:, 1:]]),
        (lambda w: jnp.split(w, [1], 1)[1], lambda: [STACK]),
        (lambda w, at: w[at, at], lambda: [STACK, AT % 2]),
        (lambda w, at: w[:, at], lambda: [STACK, AT]),
        (lambda w, at: w.at[:, at].get(mode="clip"), lambda: [STACK, AT + 5]),
        (lambda w, at: jnp.take(w, at, 1, mode="fill"), lambda: [STACK, AT]),
        (lambda w, at: jax.vmap(lambda w, i: w[i])(w, at), lambda: [STACK, AT]),
        (lambda w, at: jax.vmap(lambda i: w[:, i])(at[0]), lambda: [with_all_axes(STACK), AT]),
        (jax.lax.stop_gradient, lambda: [ALONE]),
        (lambda w: jax.jit(lambda w: w[0].astype(jnp.float16))(w), lambda: [STACK]),
    ],
)
def test_batch_axes_move_and_keep_the_type(program, operands):
    operands = operands()
    with ql.on_materialise("error"):
        out = ql.quaxify(program)(*operands)
    expected = program(*ql.materialise(operands))
    assert isinstance(out, Scaled)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    _close(
        out.materialise().astype(jnp.float32), expected.astype(jnp.float32), _TOLERANCE.get(out.dtype, 1e-6)
    )


_TOLERANCE = {jnp.dtype(jnp.bfloat16): 2e-2, jnp.dtype(jnp.float16): 2e-3}


@pytest.mark.slow
def test_a_branch_without_it():
    """The plain weight becomes one whose parts add nothing, and gets its gradient."""
    w, v = _weights(_adapted())[0], normal(32, 64, seed=5)

    def loss(v, p):
        return jnp.sum(jnp.sin(jax.lax.cond(p, lambda: -w, lambda: v) @ X[0]))

    gradient = jax.jit(jax.grad(ql.quaxify(loss)))
    for p in (True, False):
        with ql.on_materialise("error"):
            found = gradient(v, p)
        dense = np.zeros(v.shape) if p else np.outer(np.cos(np.asarray(v) @ X[0]), X[0])
        _close(found, dense, 1e-5)


@pytest.mark.slow
def test_it_is_adapted_once():
    model = _adapted(where=["layers.0"])
    with pytest.raises(ValueError, match=r"layers\.0\.weight is of type Scaled already. Merge the model"):
        ql.loraify(model, rank=2, key=KEY)
    with pytest.raises(ValueError, match=r"layers\.0\.weight is of type LoraArray already. Merge the model"):
        _adapted(base=ql.loraify(MLP, rank=2, key=KEY))
    both = ql.loraify(model, rank=2, key=KEY, exclude=["layers.0"])
    assert [type(w).__name__ for w in _weights(both)] == ["Scaled", "LoraArray", "LoraArray"]
    assert ql.summary(ql.merge(both)).stored_bytes == ql.summary(MLP).stored_bytes


def test_no_file_leaves_it_out(tmp_path):
    both = ql.loraify(_adapted(where=["layers.0"]), rank=2, key=KEY, exclude=["layers.0"])
    with pytest.raises(ValueError, match=r"layers\.0\.weight is of type Scaled, which the files of PEFT's"):
        peft.save_adapter(tmp_path, both)
    safetensors.save(tmp_path / "model.safetensors", both, types=[Scaled])
    again = safetensors.load(tmp_path / "model.safetensors", MLP, types=[Scaled])
    assert tree_equal(_weights(again), _weights(both))


@pytest.mark.slow
def test_which_weights():
    tied = {"a.weight": MLP.layers[1].weight, "b.weight": MLP.layers[1].weight, "c.weight": normal(4, 4)}
    model = _adapted(base=tied)
    assert model["a.weight"] is model["b.weight"]
    assert not np.array_equal(model["a.weight"].scale[:4], model["c.weight"].scale)
    assert not ql.is_value(_adapted(base=tied, exclude=["c"])["c.weight"])
    layouts = []
    ql.adapt({"k": {"kernel": normal(3, 5)}}, lambda w, *, key, layout: layouts.append(layout) or Scaled(
        w, jnp.zeros(3)))  # fmt: skip
    assert [str(layout) for layout in layouts] == ["io"]


@pytest.mark.parametrize("made", [lambda w: w, lambda w: Scaled(w[:1], jnp.ones(1))], ids=["array", "row"])
def test_what_make_may_not_return(made):
    with pytest.raises(
        ValueError, match=r"`make` must return an AdaptedArray of the shape of layers\.0\.weight"
    ):
        ql.adapt(MLP, lambda w, **_: made(w))


def test_how_make_is_called():
    with pytest.raises(
        TypeError, match=r"make\(w, key=..., layout=...\); this cannot be called so: got an unex"
    ):
        ql.adapt(MLP, lambda w, key: w)


def test_dropout_keys_go_to_types_that_drop():
    class Dropping(Scaled):
        key: jax.Array | None = None
        dropout: float = eqx.field(static=True, default=0.1)

    model = ql.adapt(MLP, lambda w, **_: Dropping(w, jnp.zeros(w.shape[0])), where=["layers.0"])
    assert ql.with_dropout_key(model, KEY).layers[0].weight.key is not None
    assert ql.with_dropout_key(_adapted(), KEY).layers[0].weight.scale is not None


def _classes(cls):
    own = {cls.__name__} if cls.__module__.startswith("quaxlike.") else set()
    return own | {name for each in cls.__subclasses__() for name in _classes(each)}


def _asks(tree, classes):
    """Whether there is a test for one of these classes: `isinstance`, or a pattern of `match`."""
    found = [
        node.args[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
    ]
    found += [node.cls for node in ast.walk(tree) if isinstance(node, ast.MatchClass)]
    return any(getattr(x, "id", getattr(x, "attr", "")) in classes for y in found for x in ast.walk(y))


@pytest.mark.slow
def test_nothing_above_the_arrays_asks_for_the_class_of_an_adapter():
    """They ask the type what it trains, merges and adds. PEFT's files hold what each entry knows."""
    package = Path(ql.__file__).parent
    classes = _classes(ql.AdaptedArray) - {"AdaptedArray"}
    assert classes >= {"LoraArray", "LoraBias", "TrainableArray", "TrainableRows", "TransparentValue"}
    names = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    asking = {name for name, file in names.items() if _asks(ast.parse(file.read_text("utf-8")), classes)}
    assert {name for name in asking if not name.startswith(("arrays/", "adapters/", "lm/peft/"))} == set()
    assert "arrays/lora/low_rank.py" in asking


@pytest.mark.slow
def test_factors_are_for_the_type_to_take():
    scaled = Scaled(normal(6, 4), normal(6, seed=1))
    for fn in (lambda w: w * 3, lambda w: 3 * w, lambda w: w / 4, lambda w: -w):
        out = ql.quaxify(fn)(scaled)
        assert isinstance(out, Scaled)
        np.testing.assert_allclose(out.materialise(), fn(scaled.materialise()), rtol=1e-6)
    rows = normal(6, 1)
    out = ql.quaxify(jnp.multiply)(scaled, rows)  # which it declines
    np.testing.assert_allclose(out, scaled.materialise() * rows, rtol=1e-6)


@pytest.mark.slow
def test_a_rule_of_its_own_comes_first():
    class Own(Scaled):
        pass

    @ql.register("mul")
    def _mul(w: Own, y: Any, **params):  # neither more nor less specific than that of all adapters
        return w.with_base(w.w + y)

    w = Own(jnp.ones((2, 2)), jnp.zeros(2))
    assert (ql.quaxify(jnp.multiply)(w, 3.0).w == 4).all()
