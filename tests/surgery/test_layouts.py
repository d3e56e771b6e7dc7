"""Which axes of weights are outputs and inputs: told by classes, by names, and by the user."""

import json
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files.tensors import open_tensors
from quaxlike.lm import peft
from tests.samples import random_key, tree_equal

KEY = random_key(0)
z = lambda shape: jax.device_put(np.zeros(shape, np.float32))  # which compiles nothing


def told(params, layout=None):
    return {name: x and str(x) for name, x in ql.layouts(params, layout).items()}


# Parameters in the naming of a framework, and what is told about them; what is left out is no weight.
NAMED = {
    "a state dict": (
        {
            "wte.weight": z((9, 4)), "h.0.q.weight": z((6, 4)), "h.0.q.bias": z(6),
            "h.0.ln_1.weight": z((3, 4)),
            "conv1.weight": z((8, 2, 3, 5)), "conv1.bias": z(8), "layers.weight": z((3, 6, 4)),
            "layers.bias": z((3, 6)),
        },
        {"wte.weight": "vo", "h.0.q.weight": "oi", "conv1.weight": "oihw", "layers.weight": "oi"},
    ),
    "Linen": (
        {
            "params": {
                "Dense_0": {"kernel": z((3, 4)), "bias": z(4)},
                "Conv_0": {"kernel": z((3, 5, 2, 8))},
                "LayerNorm_0": {"scale": z((2, 4)), "bias": z((2, 4))},
                "Embed_0": {"embedding": z((9, 4))},
                "attention": {
                    "query": {"kernel": z((8, 4, 2)), "bias": z((4, 2))},
                    "out": {"kernel": z((4, 2, 8)), "bias": z(8)},
                },
                "bare": {
                    "query": {"kernel": z((8, 4, 2))},
                    "key": {"kernel": z((8, 1, 2))},
                    "out": {"kernel": z((4, 2, 8))},
                },
                "bare_stack": {"query": {"kernel": z((3, 8, 6))}, "out": {"kernel": z((3, 6, 8))}},
                "stack": {
                    "query": {"kernel": z((3, 8, 6)), "bias": z((3, 6))},
                    "out": {"kernel": z((3, 6, 8)), "bias": z((3, 8))},
                    "Dense_0": {"kernel": z((3, 4, 5))},
                },
            }
        },
        {
            "Dense_0": "io", "Conv_0": "hwio", "Embed_0": "vo", "attention.query": "ioo",
            "attention.out": "iio",
            "bare.query": "ioo", "bare.key": "ioo", "bare.out": "iio", "bare_stack.query": "io",
            "bare_stack.out": "io", "stack.query": "io", "stack.out": "io",
            "stack.Dense_0": "io",
        },
    ),
    "Haiku": (
        {
            "mlp/~/linear_0": {"w": z((3, 4)), "b": z(4)},
            "linear": {"w": z((4, 4)), "b": z(4)},
            "net/~/conv2_d": {"w": z((3, 3, 2, 8)), "b": z(8)},
            "net/~/layer_norm": {"scale": z((2, 4)), "offset": z((2, 4))},
            "net/~/embed": {"embeddings": z((9, 4))},
            "layers/linear": {"w": z((3, 4, 5)), "b": z((3, 5))},
            "gru": {"w_i": z((3, 12)), "w_h": z((4, 12)), "b": z(12)},
        },
        {
            "mlp/~/linear_0": "io", "linear": "io", "net/~/conv2_d": "hwio", "net/~/embed": "vo",
            "layers/linear": "io", "gru.w_i": "io", "gru.w_h": "io",
        },
    ),
    "by hand": (
        {"dense": {"w": z((3, 4)), "b": z(4)}, "rows": {"w": z((5, 3)), "b": z(5)}},
        {"dense": "io", "rows": "oi"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_names(name):
    params, expected = NAMED[name]
    found = {name: x for name, x in told(params).items() if x is not None}
    by_layer = {n.removeprefix("params."): x for n, x in found.items()}
    fields = (".kernel", ".w", ".embedding", ".embeddings")
    short = {}
    for n, x in by_layer.items():
        field = next((f for f in fields if n.endswith(f)), "")
        short[n.removesuffix(field) if not n.endswith((".w_i", ".w_h")) else n] = x
    assert short == expected


# A layer of its own, with arrays that may be read in more than one way.
UNKNOWN = {
    "three axes": {"mixer": {"kernel": z((4, 4, 4)), "bias": z((4, 4))}},
    "no bias": {"query": {"kernel": z((8, 4, 2))}},
    "a transposed convolution": {"ConvTranspose_0": {"kernel": z((3, 2, 8))}},
    "square": {"dense": {"w": z((4, 4)), "b": z(4)}},
    "a name of no framework": {"block": {"mix": z((4, 8))}},
    "a bias of other outputs": {"c_attn": {"weight": z((4, 12)), "bias": z(12)}},
}


@pytest.mark.quick("a bias of other outputs")
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_is_an_error_with_a_hint(name):
    params = UNKNOWN[name]
    (weight,) = [n for n, x in told(params).items() if x == "?"]
    shape = tuple(ql.select(params, [weight])[weight].shape)
    for change in (
        lambda **more: ql.loraify(params, rank=2, key=KEY, **more),
        lambda **more: ql.quantize(params, "int8", **more),
        lambda **more: ql.select(params, **more),
    ):
        with pytest.raises(ValueError, match=rf"cannot tell.*{weight}.*layout=\{{'{weight}': \.\.\.\}}"):
            change()
        assert change(layout={weight: "io"}) is not None
    with pytest.raises(ValueError, match=r"cannot be told which axes.*layout="):
        ql.loraify(params, rank=2, key=KEY, where=[weight])
    assert "?" in str(ql.summary(params))
    adapted = ql.loraify(params, rank=2, key=KEY, layout={weight: "io"})
    assert ql.select(adapted, [weight])[weight].a.shape == (*shape[:-2], 2, shape[-2])


def test_an_array_that_stands_alone_is_a_matrix_if_it_has_two_axes():
    assert told({"table": z((4, 8)), "tables": z((2, 4, 8))}) == {"table": "oi", "tables": "?"}
    assert told([z((4, 8))]) == {"0": "oi"}


@pytest.mark.slow
def test_all_linear_passes_over_biases_norms_embeddings_and_heads():
    params, expected = NAMED["Linen"]
    layers = {n.removeprefix("params.").removesuffix(".kernel") for n in ql.select(params)}
    assert layers == expected.keys() - {"Conv_0", "Embed_0"}
    model = ql.loraify(
        params, rank=2, key=KEY, where=lambda name, x: True
    )  # biases are passed over there, too
    adapted = [n for n, x in ql.select(model, lambda *_: True).items() if isinstance(x, ql.LoraArray)]
    assert len(adapted) == len(expected)


@pytest.mark.parametrize("router", ["gate", "router"])
def test_all_linear_passes_over_routers(router):
    layer = f"0.{router}.weight"
    experts = {"0.experts.0.up_proj.weight": z((4, 8)), "1.gate.weight": z((4, 8))}
    assert list(ql.select({layer: z((2, 8)), **experts})) == list(experts)
    assert list(ql.select({layer: z((2, 8)), **experts}, [f"0.{router}"])) == [layer]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dens": "io"}, r"'dens' in `layout` matches none.*Did you mean 'dense'"),
        ({"dense": "ioo"}, r"The layout ioo has more axes than dense\.w, which is of shape \(3, 4\)"),
        ({"dense": "oi"}, r"The layout oi of dense\.w \(3, 4\) gives outputs of \(3,\); found dense\.b of"),
        ({"dense": "ix"}, r"A layout has a letter for each axis.*found 'ix'"),
        ({"dense": "ii"}, r"A layout has a letter for each axis.*found 'ii'"),
    ],
)
def test_layouts_that_cannot_be(layout, message):
    with pytest.raises(ValueError, match=message):
        ql.layouts({"dense": {"w": z((3, 4)), "b": z(4)}}, layout)


def test_what_the_user_says_goes_first():
    params = {"a": {"kernel": z((3, 4))}, "b": {"kernel": z((2, 3, 4))}, "c": {"mix": z((3, 4))}}
    layout = {"a": "oi", "b.kernel": ql.Layout((-1,), (-2,), "linear"), "c.mix": None}
    assert told(params, layout) == {"a.kernel": "oi", "b.kernel": "io", "c.mix": None}
    assert list(ql.select(params, layout=layout)) == ["a.kernel", "b.kernel"]
    # One layout for all of which nothing else is known.
    assert told(params, "io") == {"a.kernel": "io", "b.kernel": "?", "c.mix": "io"}


class Own(eqx.Module):
    """A layer that says what its weights are."""

    mix: jax.Array
    table: jax.Array

    weight_layouts: ClassVar = {"mix": "iio"}


@pytest.mark.slow
def test_a_class_may_say_it():
    model = Own(normal(2, 3, 4), normal(4, 4))
    assert told(model) == {"mix": "iio", "table": None}
    lora = ql.loraify(model, rank=2, key=KEY).mix
    assert (lora.a.shape, lora.b.shape) == ((2, 2, 3), (4, 2))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# -------------------------------------------------------------------------------------------------
# The same model in several namings
# -------------------------------------------------------------------------------------------------


class Attention(eqx.Module):
    query: eqx.nn.Linear
    out: eqx.nn.Linear


class Twin(eqx.Module):
    attention: Attention
    dense: eqx.nn.Linear
    conv: eqx.nn.Conv2d

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.attention = Attention(eqx.nn.Linear(6, 8, key=a), eqx.nn.Linear(8, 6, key=b))
        self.dense = eqx.nn.Linear(6, 5, key=c)
        self.conv = eqx.nn.Conv2d(2, 4, 3, key=d)


def in_linen(twin):
    """Its parameters as Linen has them, with 2 heads of 4."""
    query, out, dense, conv = twin.attention.query, twin.attention.out, twin.dense, twin.conv
    return {
        "attention": {
            "query": {"kernel": query.weight.T.reshape(6, 2, 4), "bias": query.bias.reshape(2, 4)},
            "out": {"kernel": out.weight.T.reshape(2, 4, 6), "bias": out.bias},
        },
        "dense": {"kernel": dense.weight.T, "bias": dense.bias},
        "conv": {"kernel": conv.weight.transpose(2, 3, 1, 0), "bias": conv.bias[:, 0, 0]},
    }


def in_haiku(twin):
    query, out, dense, conv = twin.attention.query, twin.attention.out, twin.dense, twin.conv
    return {
        "net/attention/query": {"w": query.weight.T, "b": query.bias},
        "net/attention/out": {"w": out.weight.T, "b": out.bias},
        "net/dense": {"w": dense.weight.T, "b": dense.bias},
        "net/conv": {"w": conv.weight.transpose(2, 3, 1, 0), "b": conv.bias[:, 0, 0]},
    }


def in_pytorch(twin):
    arrays = ql.select(twin, r".*")
    return arrays | {"conv.bias": twin.conv.bias[:, 0, 0]}


NAMINGS = {
    "Linen": (in_linen, None),
    "Haiku": (in_haiku, lambda name: name.removeprefix("net/").replace("/", ".")),
    "PyTorch": (in_pytorch, None),
}
LAYERS = ["query", "out", "dense", "conv"]
OPTIONS = {
    "plain": {"bias": "lora_only"},
    "dora": {"dora": True},
    "gaussian, a layer in full": {
        "init": "gaussian",
        "where": LAYERS[:2],
        "modules_to_save": ["dense", "conv"],
    },
    "pissa": {"init": "pissa", "where": LAYERS[:3]},
    "biases": {"lora_bias": True, "where": LAYERS[:3]},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("naming", NAMINGS)
def test_adapters_and_files_are_those_of_the_equinox_twin(naming, options, tmp_path):
    convert, rename = NAMINGS[naming]
    twin = Twin(KEY)
    keywords = {"rank": 2, "where": LAYERS, "key": jax.random.key(1)} | OPTIONS[options]
    if naming == "Haiku":
        keywords["where"] = [f"{x}.w" for x in keywords["where"]]
        keywords["modules_to_save"] = [f"net/{x}" for x in keywords.get("modules_to_save", ())]
    expected, params = ql.loraify(twin, **keywords_of(keywords, OPTIONS[options])), convert(twin)
    model = ql.loraify(params, **keywords)
    for folder, each, name in (("twin", expected, None), ("other", model, rename)):
        peft.save_adapter(tmp_path / folder, each, rename=name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "twin" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    assert not json.loads((tmp_path / "other" / "adapter_config.json").read_text())["fan_in_fan_out"]
    # What the adapters add is the same array, with its axes in another order.
    merged = convert(ql.merge(expected))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ql.merge(model), merged)
    again = peft.load_adapter(tmp_path / "other", params, rename=rename)
    assert options == "pissa" or tree_equal(again, model)  # which belongs to another base


def keywords_of(keywords, options):
    return keywords | {"where": LAYERS} | options


def test_peft_refuses_what_pytorch_has_no_layer_for(tmp_path):
    stack = {"Dense_0": {"kernel": normal(3, 4, 5)}}
    with pytest.raises(ValueError, match=r"Dense_0 is of shape \(3, 4, 5\).*Save layers.*one by one"):
        peft.save_adapter(tmp_path, ql.loraify(stack, rank=2, key=KEY))
    unknown = {"mixer": {"kernel": normal(3, 4, 5)}}
    model = ql.loraify(unknown, rank=2, key=KEY, layout={"mixer": "iio"})
    with pytest.raises(ValueError, match=r"no place for mixer\.kernel, of shape \(3, 4, 5\).*pass `layout`"):
        peft.save_adapter(tmp_path, model)
    peft.save_adapter(tmp_path, model, layout={"mixer": "iio"})
    shapes = {
        key[17:]: x.shape for key, x in open_tensors(tmp_path / "adapter_model.safetensors").info.items()
    }
    assert shapes == {"mixer.lora_A.weight": (2, 12), "mixer.lora_B.weight": (5, 2)}
    assert tree_equal(peft.load_adapter(tmp_path, unknown, layout={"mixer": "iio"}), model)


@pytest.mark.slow
def test_gpt2_weights_are_fan_in_fan_out(tmp_path):
    state = {"c_attn.weight": normal(4, 12), "c_attn.bias": normal(12)}
    model = ql.loraify(state, rank=2, key=KEY, fan_in_fan_out=True)
    peft.save_adapter(tmp_path, model)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"]
    assert tree_equal(peft.load_adapter(tmp_path, state), model)


# -------------------------------------------------------------------------------------------------
# Quantised along the inputs
# -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "nf4", "int4"])
def test_blocks_run_along_the_inputs(scheme):
    """However the kernel is laid out, it is rounded as the twin's."""
    twin = Twin(KEY)
    expected = in_linen(ql.materialise(ql.quantize(twin, scheme, where=["query", "dense"])))
    model = ql.quantize(in_linen(twin), scheme, where=["query", "dense"])
    jax.tree.map(np.testing.assert_array_equal, ql.materialise(model), expected)
    x = normal(3, 6)
    with ql.on_materialise("error"):
        y = jax.jit(ql.quaxify(lambda w, x: jnp.einsum("bi,ihd->bhd", x, w)))(
            model["attention"]["query"]["kernel"], x
        )
    w = expected["attention"]["query"]["kernel"]
    np.testing.assert_allclose(y, jnp.einsum("bi,ihd->bhd", x, w), atol=1e-5)


class _OwnLayer(eqx.Module):
    weight: jax.Array
    table: jax.Array


def test_of_a_layer_of_ones_own_weights_are_adapted():
    model = {"layer": _OwnLayer(jnp.ones((4, 8)), jnp.ones((4, 8)))}
    adapted = ql.loraify(model, rank=2, key=jax.random.key(0))["layer"]
    assert isinstance(adapted.weight, ql.LoraArray)
    assert not ql.is_value(adapted.table)
    with pytest.raises(ValueError, match=r"It cannot be told which axes of layer\.table"):
        ql.loraify(model, rank=2, key=jax.random.key(0), where="layer.table")


def test_sizes_of_outputs_and_inputs():
    sizes = {"oi": ((3, 5), (3,), (5,)), "io": ((3, 5), (5,), (3,)), "hwio": ((2, 4, 3, 5), (5,), (3, 2, 4))}
    for text, (shape, out, into) in sizes.items():
        layout = ql.Layout.parse(text)
        assert (layout.out_shape(shape), layout.in_shape(shape)) == (out, into)
        assert layout.in_shape((7, *shape)) == (7, *into)  # a stack
