"""LoHa, LoKr, HiRA, SHiRA, C³A and FourierFT."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ....adapters.products import C3AArray, FourierFTArray, HiRAArray, LoHaArray, LoKrArray, SHiRAArray
from ....arrays.sparse import SparseArray
from ....surgery.methods import two_factors
from ....surgery.random_numbers import Generator
from .method import DROPOUT, RANK, Layer, Method, Option, Written, as_written, by_pattern, count, flag, number

_OF_LYCORIS = {
    **RANK, "alpha": number(8), "alpha_pattern": by_pattern(number(8)), "rank_dropout": DROPOUT,
    "module_dropout": DROPOUT, "use_effective_conv2d": flag(),
}  # fmt: skip
_PATTERNS = {"r": "rank_pattern", "alpha": "alpha_pattern"}
_KINDS = ("linear", "matrix", "conv", "grouped conv")


def _is_effective(layer: Layer) -> bool:
    """Whether the change of a kernel has the form of Tucker."""
    return layer.option("use_effective_conv2d") and math.prod(layer.window) > 1


def _read_loha(layer: Layer) -> Any:
    r, alpha = layer.option("r", "rank_pattern"), layer.option("alpha", "alpha_pattern")
    out, into, cores = layer.outputs, layer.inputs, {}
    if _is_effective(layer):
        cores = {f"core_{n}": layer.read(f"core_{n}", r, r, *layer.window) for n in (1, 2)}
        into = layer.in_shape[0]
        a_1, a_2 = (layer.read(f"a_{n}", r, out).T for n in (1, 2))
    else:
        a_1, a_2 = (layer.read(f"a_{n}", out, r) for n in (1, 2))
    b_1, b_2 = (layer.read(f"b_{n}", r, into) for n in (1, 2))
    return layer.on(LoHaArray, a_1, b_1, a_2, b_2, **cores, scaling=alpha / r)


def _write_loha(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    effective = x.core_1 is not None
    parts = {name: getattr(x, name) for name in LOHA.parts if getattr(x, name) is not None}
    if effective:
        parts |= {"a_1": x.a_1.T, "a_2": x.a_2.T}
    r = x.a_1.shape[-1]
    options = {"r": r, "alpha": as_written(x.scaling * r)}
    return parts, options | ({"use_effective_conv2d": effective} if math.prod(layer.window) > 1 else {})


LOHA = Method(
    "LOHA", LoHaArray,
    parts={
        "a_1": ".hada_w1_a", "b_1": ".hada_w1_b", "a_2": ".hada_w2_a", "b_2": ".hada_w2_b",
        "core_1": ".hada_t1", "core_2": ".hada_t2",
    },
    options=_OF_LYCORIS, read=_read_loha, write=_write_loha, kinds=_KINDS, conv1d=False, patterns=_PATTERNS,
)  # fmt: skip


def _read_lokr(layer: Layer) -> Any:
    r, alpha = layer.option("r", "rank_pattern"), layer.option("alpha", "alpha_pattern")
    window, inputs = layer.window, layer.inputs // math.prod(layer.window)
    limit = layer.option("decompose_factor")
    (o_1, o_2), (i_1, i_2) = two_factors(layer.outputs, limit), two_factors(inputs, limit)
    if layer.has("first"):
        parts = {"first": layer.read("first", o_1, i_1)}
    else:
        parts = {"first": layer.read("first_a", o_1, r), "first_b": layer.read("first_b", r, i_1)}
    if layer.has("second"):
        parts["second"] = layer.read("second", o_2, i_2, *window).reshape(o_2, -1)
    elif layer.has("core"):
        parts["core"] = layer.read("core", r, r, *window)
        parts |= {"second": layer.read("second_a", r, o_2).T, "second_b": layer.read("second_b", r, i_2)}
    else:
        parts["second"] = layer.read("second_a", o_2, r)
        parts["second_b"] = layer.read("second_b", r, i_2 * math.prod(window))
    return layer.on(LoKrArray, **parts, alpha=float(alpha), rank=r)


def _write_lokr(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, window = layer.array, layer.window
    options = {"r": x.rank, "alpha": as_written(x.alpha)}
    parts = {"first_b": x.first_b, "second_b": x.second_b, "core": x.core}
    parts["first" if x.first_b is None else "first_a"] = x.first
    if x.second_b is None:
        parts["second"] = x.second.reshape(len(x.second), -1, *window)
    else:
        parts["second_a"] = x.second if x.core is None else x.second.T
        options |= {"use_effective_conv2d": x.core is not None} if math.prod(window) > 1 else {}
    return {name: part for name, part in parts.items() if part is not None}, options


def _settle_lokr(layers: Mapping[str, Written], options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The limit of the factors, and whether PEFT takes first matrices to be low-rank with these ranks."""
    shapes: dict[str, Any] = {}  # of both matrices, without the window
    for name, layer in layers.items():
        x, inputs = layer.array, layer.array.num_inputs // math.prod(layer.window)
        o_1, i_1 = len(x.first), (x.first if x.first_b is None else x.first_b).shape[-1]
        shapes[name] = (o_1, i_1), (x.num_outputs // o_1, inputs // i_1)
    factors = [pair for matrices in shapes.values() for pair in zip(*matrices, strict=True)]
    limits = (-1, *range(1, max(map(max, factors)) + 1))
    limit = next((n for n in limits if all(two_factors(x * y, n) == (x, y) for x, y in factors)), None)
    if limit is None:
        raise ValueError(f"PEFT's LoKr has one `decompose_factor` for all layers; none gives {shapes}.")
    both = any(layer.array.first_b is not None for layer in layers.values())
    for name, (first, second) in shapes.items():
        x = layers[name].array
        low = lambda shape, r=x.rank: r < max(shape) / 2
        if low(second) == (x.second_b is None) or (low(first) and both) == (x.first_b is None):
            raise ValueError(
                f"PEFT's LoKr of rank {x.rank} has low-rank matrices where that is less than half of their "
                f"size, and the first only if all layers have; {name} has others."
            )
    return {"decompose_factor": limit, "decompose_both": both}


LOKR = Method(
    "LOKR", LoKrArray,
    parts={"first": ".lokr_w1", "first_a": ".lokr_w1_a", "first_b": ".lokr_w1_b", "second": ".lokr_w2",
           "second_a": ".lokr_w2_a", "second_b": ".lokr_w2_b", "core": ".lokr_t2"},
    options={**_OF_LYCORIS, "decompose_both": flag(), "decompose_factor": count(-1, -1),
             "rank_dropout_scale": flag()},
    read=_read_lokr, write=_write_lokr, settle=_settle_lokr, kinds=_KINDS, conv1d=False, patterns=_PATTERNS,
)  # fmt: skip


def _read_hira(layer: Layer) -> Any:
    embedding = layer.layout.kind == "embedding"
    shape = layer.shape_of("embedding_b" if embedding else "b")
    r = shape[1] if len(shape) > 1 else 0  # PEFT 0.21 does not heed `rank_pattern`
    if layer.window:
        a, b = (
            layer.read("a", r, *layer.in_shape),
            layer.read("b", layer.outputs, r, *[1] * len(layer.window)),
        )
    else:
        names = ("embedding_a", "embedding_b") if embedding else ("a", "b")
        a, b = layer.read(names[0], r, layer.inputs), layer.read(names[1], layer.outputs, r)
    return layer.on(HiRAArray, a.reshape(r, *layer.in_shape), b.reshape(*layer.out_shape, r))


def _write_hira(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, kind = layer.array, layer.layout.kind
    r = x.b.shape[-1]
    a, b = x.a if kind == "conv" else x.a.reshape(r, -1), x.b.reshape(-1, r)
    b = b.reshape(*b.shape, *[1] * (x.a.ndim - 2)) if kind == "conv" else b
    start = "embedding_" if kind == "embedding" else ""
    return {f"{start}a": a, f"{start}b": b}, {"r": r}


HIRA = Method(
    "HIRA", HiRAArray,
    parts={
        "a": ".hira_A", "b": ".hira_B",
        "embedding_a": ".hira_embedding_A", "embedding_b": ".hira_embedding_B",
    },
    options={"r": count(32), "hira_dropout": DROPOUT, "fan_in_fan_out": flag()},
    read=_read_hira, write=_write_hira, kinds=("linear", "matrix", "conv", "embedding"),
    informative=("rank_pattern",),
)  # fmt: skip


def _read_shira(layer: Layer) -> Any:
    n = layer.option("r") * (layer.outputs + layer.inputs)
    values, places = layer.read("values", n), np.asarray(layer.read("places", 2, n, integers=True), np.int64)
    shape = (layer.outputs, layer.inputs)
    if n and (
        (places < 0).any() or (places.max(1) >= shape).any() or len({*zip(*places.tolist(), strict=True)}) < n
    ):
        raise layer.error("places", f"expected different places in {shape}")
    return layer.on(SHiRAArray, SparseArray.from_coo(values, places.T, shape))


def _write_shira(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    delta = layer.array.delta
    each = delta.nse / (layer.array.num_outputs + layer.array.num_inputs)
    if not bool(np.all(delta.is_stored)) or each != int(each) or each < 1:
        raise ValueError(
            f"PEFT's SHiRA trains a multiple of outputs and inputs of elements, here of "
            f"{layer.array.num_outputs + layer.array.num_inputs}; {layer.name} has {delta.nse}."
        )
    places = jnp.stack([index.astype(jnp.int32) for index in delta.indices])
    return {"values": delta.data, "places": places}, {"r": int(each)}


SHIRA = Method(
    "SHIRA", SHiRAArray,
    parts={"values": ".shira_weight", "places": ".shira_indices"},
    options={"r": count(32), "fan_in_fan_out": flag()},
    read=_read_shira, write=_write_shira, conv1d=False, informative=("mask_type", "random_seed"),
)  # fmt: skip


def _read_c3a(layer: Layer) -> Any:
    shape = layer.shape_of("kernel")
    b = shape[-1] if len(shape) == 3 else 0
    if not b or shape[:2] != (layer.outputs // b, layer.inputs // b) or layer.outputs % b or layer.inputs % b:
        raise layer.error("kernel", f"expected (outputs / b, inputs / b, b) for {layer.outputs} outputs and "
                          f"{layer.inputs} inputs; found {shape}")  # fmt: skip
    return layer.on(C3AArray, layer.read("kernel", *shape))


def _write_c3a(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"kernel": layer.array.kernel}, {"block_size": layer.array.kernel.shape[-1]}


C3A = Method(
    "C3A", C3AArray,
    parts={"kernel": ".c3a_kernel"},
    options={"block_size": count(256), "block_size_pattern": by_pattern(count(256))},
    read=_read_c3a, write=_write_c3a, conv1d=False, patterns={"block_size": "block_size_pattern"},
)  # fmt: skip


def _read_fourierft(layer: Layer) -> Any:
    n = layer.option("n_frequency", "n_frequency_pattern")
    spectrum, seed, size = (
        layer.read("spectrum", n),
        layer.option("random_loc_seed"),
        layer.outputs * layer.inputs,
    )
    if n > size:
        raise layer.error("spectrum", f"has more frequencies than the weight has elements, {size}")
    places = Generator(seed).permutation(size, n)
    return layer.on(FourierFTArray, spectrum, jnp.asarray(places), scaling=layer.option("scaling"), seed=seed)


def _write_fourierft(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    n = x.spectrum.shape[-1]
    if x.seed is None or not np.array_equal(
        x.places, Generator(x.seed).permutation(x.num_outputs * x.num_inputs, n)
    ):
        raise ValueError(
            "PEFT's files of FourierFT have no places of frequencies but those that `random_loc_seed` gives; "
            f"{layer.name} has others. Make it with these places and `seed`."
        )
    return {"spectrum": x.spectrum}, {"n_frequency": n, "scaling": x.scaling, "random_loc_seed": x.seed}


FOURIERFT = Method(
    "FOURIERFT", FourierFTArray,
    parts={"spectrum": ".fourierft_spectrum"},
    options={
        "n_frequency": count(1000), "n_frequency_pattern": by_pattern(count(1000)), "scaling": number(150.0),
        "random_loc_seed": Option(777, "an integer", lambda x: type(x) is int), "fan_in_fan_out": flag(),
    },
    read=_read_fourierft, write=_write_fourierft, patterns={"n_frequency": "n_frequency_pattern"},
)  # fmt: skip
