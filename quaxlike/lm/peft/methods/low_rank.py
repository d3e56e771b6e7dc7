"""VeRA, AdaLoRA, DeLoRA, MiSS, GraLoRA and RandLoRA: changes of low rank."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ....adapters.low_rank import AdaLoRAArray, DeLoRAArray, GraLoRAArray, MiSSArray, RandLoRAArray, VeRAArray
from ....surgery.random_numbers import Generator, randlora_projections, vera_projections
from .method import DROPOUT, RANK, Layer, Method, Option, Written, as_written, count, flag, number, one_of

# VeRA and RandLoRA, whose layers share random matrices ---------------------------------------------

_SEED = Option(0, "an integer", lambda x: type(x) is int)


def _shared_of(layers: Sequence[Layer], given: Mapping[str, Any], part: str, drawn: Any) -> Any:
    """The shared matrices, and the number that they were drawn with if the file does not hold them. `part`
    has a row for each rank."""
    if not layers:
        return None
    options = layers[0].options
    for layer in layers:
        if (found := layer.shape_of(part)[:1]) != (options["r"],):  # before allocating that much
            raise layer.error(part, f"the configuration gives rank {options['r']}; found {found}")
    if options["save_projection"]:
        for name in ("a", "b"):
            if name not in given:
                raise layers[0].missing_for_all(name)
        return given["a"], given["b"], None
    seed = options["projection_prng_key"]
    a, b = drawn(Generator(seed), options)
    return jnp.asarray(a), jnp.asarray(b), seed


def _prepare_vera(layers: Sequence[Layer], given: Mapping[str, Any]) -> Any:
    def drawn(generator: Generator, options: Mapping[str, Any]) -> tuple[Any, Any]:
        n, m = max(x.inputs for x in layers), max(x.outputs for x in layers)
        return vera_projections(generator, n, m, options["r"])

    return _shared_of(layers, given, "scale_a", drawn)


def _read_vera(layer: Layer) -> Any:
    a, b, seed = layer.shared
    r = layer.option("r")
    if a.shape[:-1] != (r,) or b.shape[1:] != (r,) or a.shape[-1] < layer.inputs or len(b) < layer.outputs:
        raise layer.error("scale_a", f"vera_A {a.shape} and vera_B {b.shape} do not reach over the layer, of "
                          f"{layer.inputs} inputs and {layer.outputs} outputs, with rank {r}")  # fmt: skip
    scale_b = layer.read("scale_b", layer.outputs).reshape(layer.out_shape)
    return layer.on(VeRAArray, a, b, layer.read("scale_a", r), scale_b, seed=seed)


def _write_vera(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    return {"scale_a": x.scale_a, "scale_b": x.scale_b.reshape(-1)}, {"r": x.a.shape[-2]}


def _write_shared(layers: Sequence[Written], fits: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = [layer.array for layer in layers]
    first = arrays[0]
    for layer, x in zip(layers, arrays, strict=True):
        for name in ("a", "b"):
            mine, own = getattr(first, name), getattr(x, name)
            if mine is not own and not np.array_equal(mine, own):
                raise ValueError(
                    f"PEFT's files hold one pair of random matrices for all layers; {layer.name} and "
                    f"{layers[0].name} have others."
                )
    if first.seed is not None and fits(layers):
        return {}, {"save_projection": False, "projection_prng_key": first.seed}
    return {"a": first.a, "b": first.b}, {"save_projection": True, "projection_prng_key": first.seed or 0}


def _fits_vera(layers: Sequence[Written]) -> bool:
    """Whether PEFT draws the same for these layers."""
    sizes = zip(*((x.array.num_inputs, x.array.num_outputs) for x in layers), strict=True)
    n, m = map(max, sizes)
    return (layers[0].array.a.shape[-1], len(layers[0].array.b)) == (n, m)


VERA = Method(
    "VERA", VeRAArray,
    parts={"scale_a": ".vera_lambda_d", "scale_b": ".vera_lambda_b"},
    options={
        "r": count(256), "projection_prng_key": _SEED, "save_projection": flag(True), "vera_dropout": DROPOUT,
        "fan_in_fan_out": flag(),
    },
    read=_read_vera, write=_write_vera, informative=("d_initial",),
    shared={"a": "vera_A", "b": "vera_B"}, prepare=_prepare_vera,
    write_shared=lambda layers: _write_shared(layers, _fits_vera),
)  # fmt: skip


def _prepare_randlora(layers: Sequence[Layer], given: Mapping[str, Any]) -> Any:
    def drawn(generator: Generator, options: Mapping[str, Any]) -> tuple[Any, Any]:
        n, m = sorted((max(x.inputs for x in layers), max(x.outputs for x in layers)))
        return randlora_projections(generator, n, m, options["r"], _sparsity(options))

    return _shared_of(layers, given, "scale", drawn)


def _sparsity(options: Mapping[str, Any]) -> str:
    return "very_sparse" if options["very_sparse"] else "sparse" if options["sparse"] else "dense"


def _read_randlora(layer: Layer) -> Any:
    a, b, seed = layer.shared
    r, few, many = layer.option("r"), *sorted((layer.inputs, layer.outputs))
    bases = math.ceil(few / r)
    for part, x in (("a", a), ("b", b)):  # which the file has again for each layer
        if layer.has(part) and not np.array_equal(layer.read(part, *x.shape), x):
            raise layer.error(part, "is not the matrix that all layers share")
    short = lambda: a.shape[-1] < few or len(b) < many or b.shape[1] < bases
    if a.shape[:-1] != (r, 1) or b.shape[2:] != (r,) or short():
        raise layer.error(
            "scale",
            f"randlora_A {a.shape} and randlora_B {b.shape} do not reach over the layer, of {layer.inputs} "
            f"inputs and {layer.outputs} outputs, with rank {r}",
        )
    return layer.on(
        RandLoRAArray, a, b, layer.read("scale", r, bases), layer.read("gamma", bases, few),
        scaling=layer.option("randlora_alpha") / r, seed=seed, sparsity=_sparsity(layer.options),
    )  # fmt: skip


def _write_randlora(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    r = x.scale.shape[-2]
    options = {"r": r, "randlora_alpha": as_written(x.scaling * r), "sparse": x.sparsity == "sparse",
               "very_sparse": x.sparsity == "very_sparse"}  # fmt: skip
    parts = {"scale": x.scale, "gamma": x.gamma}
    return (parts if x.seed is not None else parts | {"a": x.a, "b": x.b}), options


RANDLORA = Method(
    "RANDLORA", RandLoRAArray,
    parts={"scale": ".randlora_lambda", "gamma": ".randlora_gamma", "a": ".randlora_A", "b": ".randlora_B"},
    options={
        "r": count(32), "randlora_alpha": number(640), "projection_prng_key": _SEED,
        "save_projection": flag(True), "sparse": flag(), "very_sparse": flag(), "randlora_dropout": DROPOUT,
        "fan_in_fan_out": flag(),
    },
    read=_read_randlora, write=_write_randlora,
    shared={"a": "randlora_A", "b": "randlora_B"}, prepare=_prepare_randlora,
    write_shared=lambda layers: _write_shared(layers, lambda layers: True),
)  # fmt: skip


# The others ---------------------------------------------------------------------------------------


def _read_adalora(layer: Layer) -> Any:
    pattern, r = layer.option("rank_pattern"), layer.option("init_r")
    kept = next((mask for name, mask in pattern.items() if name == f"{layer.name}.lora_E"), None)
    rank = r if kept is None else sum(kept)
    alpha = layer.option("lora_alpha")
    return layer.on(
        AdaLoRAArray, layer.read("a", rank, layer.inputs), layer.read("b", layer.outputs, rank),
        layer.read("e", rank, 1)[:, 0], scaling=(alpha if alpha > 0 else r) / (r + 1e-5),
    )  # fmt: skip


def _write_as_lora(layer: Written) -> Any:
    raise ValueError(f"{layer.name} is an AdaLoRAArray, which is written as the LoRA that it is.")


_KEPT = Option(
    {}, "whether each rank is kept, by the name of a layer's lora_E",
    lambda x: isinstance(x, dict) and all(isinstance(own, list) and all(type(y) is bool for y in own)
                                          for own in x.values()),
)  # fmt: skip

ADALORA = Method(
    "ADALORA", AdaLoRAArray,
    parts={"a": ".lora_A", "b": ".lora_B", "e": ".lora_E"},
    options={
        "init_r": count(12), "lora_alpha": number(8), "rank_pattern": _KEPT, "lora_dropout": DROPOUT,
        "fan_in_fan_out": flag(),
    },
    read=_read_adalora, write=_write_as_lora, kinds=("linear", "matrix", "conv"),
    informative=(
        "r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
        "init_lora_weights", "use_rslora",
    ),
)  # fmt: skip


def _read_delora(layer: Layer) -> Any:
    r = layer.option("r", "rank_pattern")
    return layer.on(
        DeLoRAArray, layer.read("a", r, layer.inputs), layer.read("b", layer.outputs, r),
        layer.read("strength", 1)[0], layer.read("column_norms", layer.inputs),
    )  # fmt: skip


def _write_delora(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    parts = {"a": x.a, "b": x.b, "strength": x.strength.reshape(1), "column_norms": x.column_norms}
    return parts, {"r": x.a.shape[-2]}


DELORA = Method(
    "DELORA", DeLoRAArray,
    parts={
        "a": ".delora_A", "b": ".delora_B", "strength": ".delora_lambda", "column_norms": ".delora_w_norm",
    },
    options={**RANK, "module_dropout": DROPOUT},
    read=_read_delora, write=_write_delora, conv1d=False, patterns={"r": "rank_pattern"},
    informative=("delora_lambda", "lambda_pattern"),
)  # fmt: skip


def _read_miss(layer: Layer) -> Any:
    r, variant = layer.option("r"), layer.option("init_weights")
    if variant == "bat":
        if layer.outputs % r or layer.inputs % r:
            raise layer.error("block", f"'bat' takes outputs and inputs that {r} divides; found "
                              f"{layer.outputs} and {layer.inputs}")  # fmt: skip
        return layer.on(MiSSArray, bat=layer.read("block", layer.outputs // r, r, r))
    columns = layer.option("mini_r") if variant == "mini" else layer.outputs
    if layer.outputs % columns:
        raise layer.error("block", f"mini_r must divide {layer.outputs} outputs; found {columns}")
    return layer.on(MiSSArray, layer.read("block", r, columns))


def _write_miss(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    if x.bat is not None:
        return {"block": x.bat}, {"r": x.bat.shape[-1], "init_weights": "bat"}
    r, columns = x.block.shape[-2:]
    mini = {"init_weights": "mini", "mini_r": columns} if columns != x.num_outputs else {"init_weights": True}
    return {"block": x.block}, {"r": r, **mini}


MISS = Method(
    "MISS", MiSSArray,
    parts={"block": ".miss_block"},
    options={
        "r": count(64), "mini_r": count(1), "init_weights": one_of(True, False, "bat", "mini"),
        "miss_dropout": DROPOUT,
    },
    read=_read_miss, write=_write_miss, conv1d=False,
)  # fmt: skip


def _read_gralora(layer: Layer) -> Any:
    r, k, h = (layer.option(name) for name in ("r", "gralora_k", "hybrid_r"))
    if r % k or layer.inputs % k or layer.outputs % k:
        raise layer.error("a", f"gralora_k must divide the rank, {layer.inputs} inputs and {layer.outputs} "
                          f"outputs; found rank {r} and gralora_k {k}")  # fmt: skip
    a, b = layer.read("a", k, layer.inputs // k, r), layer.read("b", k, r, layer.outputs // k)
    general = {"general_a": layer.read("general_a", h, layer.inputs),
               "general_b": layer.read("general_b", layer.outputs, h)} if h else {}  # fmt: skip
    return layer.on(GraLoRAArray, a, b, **general, scaling=layer.option("alpha") / (r + h))


def _write_gralora(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    k, r, h = *x.b.shape[-3:-1], 0 if x.general_a is None else x.general_a.shape[-2]
    parts = {"a": x.a, "b": x.b, "general_a": x.general_a, "general_b": x.general_b}
    options = {"r": r, "hybrid_r": h, "gralora_k": k, "alpha": as_written(x.scaling * (r + h))}
    return {name: part for name, part in parts.items() if part is not None}, options


GRALORA = Method(
    "GRALORA", GraLoRAArray,
    parts={
        "a": ".gralora_A", "b": ".gralora_B",
        "general_a": ".gralora_A_general.weight", "general_b": ".gralora_B_general.weight",
    },
    options={
        "r": count(32), "hybrid_r": count(0, 0), "alpha": number(64), "gralora_k": count(2),
        "gralora_dropout": DROPOUT, "fan_in_fan_out": flag(),
    },
    read=_read_gralora, write=_write_gralora,
)  # fmt: skip
