"""OFT, BOFT and HRA: rotations of what a layer is applied to."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ....adapters.rotated import BOFTArray, HRAArray, OFTArray
from .method import DROPOUT, Layer, Method, Written, count, flag, number


def _tell_of_windows(layers: Sequence[Layer | Written], given: Mapping[str, Any]) -> None:
    """Warns of convolutions whose windows overlap, where PEFT does not compute what it merges."""
    if names := [layer.name for layer in layers if math.prod(layer.window) > 1]:
        warnings.warn(
            f"PEFT computes {', '.join(names)} with OFT in another way than it merges it: its forward pass "
            "leaves out the padding of a convolution, and adds up windows that overlap. Here the outputs are "
            "those of the merged weights. An adapter that PEFT trained may not fit them.",
            stacklevel=2,
        )


def _read_oft(layer: Layer) -> Any:
    embedding = layer.layout.kind == "embedding"
    part = "embedding" if embedding else "skew"
    shape = layer.shape_of(part)
    size = layer.outputs if embedding else layer.inputs
    terms = layer.option("num_cayley_neumann_terms") if layer.option("use_cayley_neumann") else None
    eps = layer.option("eps") if layer.option("coft") else None
    if len(shape) != 2:
        raise layer.error(part, f"expected two axes; found {shape}")
    x = layer.on(OFTArray, layer.read(part, *shape), terms=terms, eps=eps, of_outputs=embedding)
    b = x.block_size
    expected = 1 if layer.option("block_share") else size // max(b, 1)
    if shape != (expected, b * (b - 1) // 2) or size % b:
        raise layer.error(part, f"expected (blocks, b (b - 1) / 2) with b dividing {size}; found {shape}")
    return x


def _write_oft(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, kind = layer.array, layer.layout.kind
    if x.of_outputs != (kind == "embedding"):
        raise ValueError(f"PEFT's OFT rotates the inputs of layers, and the outputs of embeddings alone; "
                         f"{layer.name} is of kind {kind!r}.")  # fmt: skip
    if kind == "conv" and (len(layer.window) != 2 or len({*layer.window}) > 1):
        raise ValueError(
            f"PEFT's OFT is for convolutions with a square window; that of {layer.name} is {layer.window}."
        )
    options = {
        "block": (x.block_size, x.skew.shape[-2]),
        "coft": x.eps is not None,
        "use_cayley_neumann": x.terms is not None,
        **({} if x.eps is None else {"eps": x.eps}),
        **({} if x.terms is None else {"num_cayley_neumann_terms": x.terms}),
    }
    return {"embedding" if x.of_outputs else "skew": x.skew}, options


def _settle_oft(layers: Any, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    _tell_of_windows([*layers.values()], {})
    blocks = {name: own["block"] for name, own in options.items()}
    inputs = {
        name: w.array.num_outputs if w.array.of_outputs else w.array.num_inputs for name, w in layers.items()
    }
    shared = all(number == 1 for _, number in blocks.values())
    shared = shared and any(size < inputs[name] for name, (size, _) in blocks.items())
    if shared:  # where PEFT repeats the block
        for name, own in options.items():
            own["block"] = (blocks[name][0], inputs[name] // blocks[name][0])
    size, number = _size_or_number("OFT", options)
    return {"oft_block_size": size, "r": number, "block_share": shared}


OFT = Method(
    "OFT", OFTArray,
    parts={"skew": ".oft_R.weight", "embedding": ".oft_embedding_R.weight"},
    options={
        "r": count(0, 0), "oft_block_size": count(32, 0), "module_dropout": DROPOUT, "coft": flag(),
        "eps": number(6e-5), "block_share": flag(), "use_cayley_neumann": flag(True),
        "num_cayley_neumann_terms": count(5),
    },
    read=_read_oft, write=_write_oft, settle=_settle_oft, prepare=_tell_of_windows,
    kinds=("linear", "matrix", "embedding", "conv"), conv1d=False,
)  # fmt: skip


def _read_boft(layer: Layer) -> Any:
    shape, m = layer.shape_of("blocks"), layer.option("boft_n_butterfly_factor")
    b = shape[-1] if len(shape) == 4 else 0
    if not b or shape != (m, layer.inputs // b, b, b) or layer.inputs % b:
        raise layer.error(
            "blocks", f"expected ({m}, inputs / b, b, b) for {layer.inputs} inputs; found {shape}"
        )
    scale = layer.read("scale", *((1, layer.outputs) if layer.window else (layer.outputs, 1)))
    return layer.on(BOFTArray, layer.read("blocks", *shape), scale.reshape(layer.out_shape))


def _write_boft(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, (m, n, b, _) = layer.array, layer.array.blocks.shape
    scale = x.scale.reshape((1, -1) if layer.layout.is_conv else (-1, 1))
    return {"blocks": x.blocks, "scale": scale}, {"block": (b, n), "boft_n_butterfly_factor": m}


def _settle_boft(layers: Any, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    size, number = _size_or_number("BOFT", options)
    return {"boft_block_size": size, "boft_block_num": number}


def _size_or_number(kind: str, options: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """The size of the blocks of all layers, or else their number; the other is 0."""
    sizes, numbers = map(set, zip(*(own.pop("block") for own in options.values()), strict=True))
    if len(sizes) > 1 and len(numbers) > 1:
        raise ValueError(
            f"PEFT's {kind} has one size of blocks for all layers, or one number of them; found sizes "
            f"{sorted(sizes)} and numbers {sorted(numbers)}."
        )
    return (sizes.pop(), 0) if len(sizes) == 1 else (0, numbers.pop())


BOFT = Method(
    "BOFT", BOFTArray,
    parts={"blocks": ".boft_R", "scale": ".boft_s"},
    options={
        "boft_block_size": count(4, 0), "boft_block_num": count(0, 0), "boft_n_butterfly_factor": count(1),
        "boft_dropout": DROPOUT,
    },
    read=_read_boft, write=_write_boft, settle=_settle_boft,
    kinds=("linear", "matrix", "conv"), conv1d=False,
)  # fmt: skip


def _read_hra(layer: Layer) -> Any:
    return layer.on(HRAArray, layer.read("u", layer.inputs, layer.option("r")),
                    orthogonal=layer.option("apply_GS"))  # fmt: skip


def _write_hra(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    return {"u": x.u}, {"r": x.u.shape[-1], "apply_GS": x.orthogonal}


HRA = Method(
    "HRA", HRAArray,
    parts={"u": ".hra_u"},
    options={"r": count(8), "apply_GS": flag()},
    read=_read_hra, write=_write_hra, kinds=("linear", "matrix", "conv"), conv1d=False,
)  # fmt: skip
