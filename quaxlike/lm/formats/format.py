"""The definition of a quantised format, and helpers for reading and checking tensors and settings.

Each reader must check every shape, dtype and setting before using it. Under the wrong assumptions, the
resulting model would run but compute nonsense.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...arrays.quantized import CODECS, BlockArray, BlockScales, Codec
from ...files.errors import CheckpointError, file_error, quoted
from ...files.json_text import read_json_file
from ...files.tensors import TensorInfo, Tensors
from ...sharding.reading import RowReader

FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
INT8, UINT8, INT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)

Settings = Mapping[str, Any]


class StoredWeight(NamedTuple):
    """A weight in the unquantised checkpoint, with the tensors storing it and functions to read it."""

    tensors: tuple[str, ...]
    read: Callable[[], Any]
    rows: Callable[[], RowReader] | None = None
    """A reader for individual rows. This is only used for formats that need a custom one."""


#: Settings common to all formats. (The tensors themselves show which layers are quantised.)
OF_ALL = (
    *(
        "quant_method",
        "modules_to_not_convert",
        "ignore",
        "ignored_layers",
        "exclude_modules",
        "skip_modules",
    ),
    *("modules_to_convert", "dequantize", "version"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """Describes how to detect, read and write checkpoints in a quantised format.

    **Attributes:**

    - `methods`: this format's `quant_method`s in `config.json`. Writing uses the first.
    - `weights`: a function from a checkpoint's tensors and settings to its weights, keyed by their
        unquantised names. This includes incomplete weights, but reading them raises an error.
    - `codes`: the suffixes of tensors that must be part of a weight. If one isn't, then the checkpoint is
        damaged.
    - `used`: the settings used by `weights`.
    - `without_effect`: other settings found in files, but safe to ignore.
    - `by_rows`: whether `weights` can be called on a window of rows, as if this were the whole file. If so,
        then each tensor's first axis must be rows or tiles of rows, unless all rows share it.
    - `quantises_embeddings`: whether the format also quantises embeddings. If so, then the activation dtype
        can't be inferred from any weight.
    - `detect`: a function detecting the format if there aren't any settings.
    - `settings`: a function looking up any settings outside `quantization_config`, given `config.json` and
        the folder. It returns None if there aren't any.
    - `write`: a function converting weights (keyed by name) to their tensors and `quantization_config`. This
        is None if the format is read-only.
    - `types`: the types of Values to save in this format. If several formats support a type, then the first
        is used.
    - `codec`: the only `BlockArray` codec this format can store. This is empty if it can store any codec.
    """

    methods: tuple[str, ...]
    weights: Callable[[Tensors, Settings], Mapping[str, StoredWeight]]
    codes: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    by_rows: bool = False
    quantises_embeddings: bool = False
    detect: Callable[[Tensors], bool] = lambda tensors: False
    settings: Callable[[Settings, Path], Settings | None] = lambda config, folder: None
    write: Callable[[Path, Mapping[str, Any]], tuple[dict[str, np.ndarray], dict[str, Any]]] | None = None
    types: tuple[type, ...] = ()
    codec: str = ""

    @property
    def name(self) -> str:
        return self.methods[0]

    def accepts(self, value: Any) -> bool:
        """Returns whether a Value can be saved in this format."""
        return isinstance(value, self.types) and (not self.codec or value.codec == CODECS[self.codec])


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLayer:
    """The tensors for a single layer in a checkpoint. `at(suffix)` returns the name of a tensor."""

    tensors: Tensors
    name: str
    separator: str = "."

    def at(self, suffix: str) -> str:
        return self.name + self.separator + suffix

    def __contains__(self, suffix: str) -> bool:
        return self.at(suffix) in self.tensors

    def error(self, suffix: str | None, problem: str) -> CheckpointError:
        return self.tensors.error(self.name if suffix is None else self.at(suffix), problem)

    def shape(self, suffix: str, ndim: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a tensor, which must exist. If `ndim` is passed, it must have this many axes,
        none empty.
        """
        if suffix not in self:
            raise self.error(suffix, "is missing")
        shape = self.tensors.info[self.at(suffix)].shape
        if ndim is not None and (len(shape) != ndim or 0 in shape):
            raise self.error(suffix, f"expected {ndim} axes, none of them empty; found the shape {shape}")
        return shape

    def dtype(self, suffix: str) -> np.dtype:
        self.shape(suffix)
        return self.tensors.info[self.at(suffix)].dtype

    def get(self, suffix: str, dtypes: Iterable[np.dtype], *shapes: tuple[int, ...]) -> np.ndarray:
        """Reads a tensor. This must have one of these dtypes, and one of these shapes (if any are passed)."""
        shape, dtype, dtypes = self.shape(suffix), self.dtype(suffix), list(dtypes)
        if dtype not in dtypes or (shapes and shape not in shapes):
            wanted = " or ".join(str(s) for s in dict.fromkeys(shapes)) or "any"
            names = ", ".join(map(str, dtypes))
            raise self.error(suffix, f"expected {names} of shape {wanted}; found {dtype} of shape {shape}")
        return self.tensors[self.at(suffix)]

    def scales(self, suffix: str, *shapes: tuple[int, ...]) -> np.ndarray:
        """Reads floating-point scales, which must be finite."""
        scale = self.get(suffix, FLOATS, *shapes)
        if not np.isfinite(scale.astype(np.float32)).all():
            raise self.error(suffix, "has scales that are not finite")
        return scale


def layers(
    tensors: Tensors, *suffixes: str, separator: str = ".", dtypes: Iterable[np.dtype] = ()
) -> list[StoredLayer]:
    """Finds layers with a tensor of one of these suffixes, or a `weight` of one of these dtypes.

    This includes incomplete layers, but reading them raises an error saying what is missing.
    """
    dtypes, found = tuple(dtypes), dict[str, None]()
    for name in tensors:
        layer, _, suffix = name.rpartition(separator)
        if suffix in suffixes or (suffix == "weight" and tensors.info[name].dtype in dtypes):
            found[layer] = None
    return [StoredLayer(tensors, layer, separator) for layer in found]


def weight(
    layer: StoredLayer, suffixes: Iterable[str], read: Callable[[], Any], field: str = ".weight"
) -> dict[str, StoredWeight]:
    """Returns a dict with a layer's weight, stored in whichever tensors with these suffixes exist."""
    taken = tuple(layer.at(suffix) for suffix in suffixes if suffix in layer)
    return {layer.name + field: StoredWeight(taken, _guarded(layer, read))}


def weights_of(
    found: Iterable[StoredLayer], suffixes: Sequence[str], read: Callable[[StoredLayer], Any]
) -> dict[str, StoredWeight]:
    """Returns a dict with the weights of several layers."""
    entries = (weight(layer, suffixes, partial(read, layer)) for layer in found)
    return {name: entry for own in entries for name, entry in own.items()}


def _guarded(layer: StoredLayer, read: Callable[[], Any]) -> Callable[[], Any]:
    """Converts any `ValueError` from `read` to a `CheckpointError` naming the layer."""

    def checked() -> Any:
        try:
            return read()
        except CheckpointError:
            raise
        except ValueError as error:
            raise layer.error(None, str(error)) from error

    return checked


def stream(words: np.ndarray) -> np.ndarray:
    """Views integers as a little-endian byte stream along the last axis."""
    return np.ascontiguousarray(words).view(np.uint8)


def integers(
    codes: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    *,
    bits: int,
    block: int | None,
    count: int | None = None,
    order: np.ndarray | None = None,
) -> BlockArray:
    """Creates an array with values `scale * (code - zero)` from unsigned `bits`-bit codes.

    The codec is symmetric if `zero` is None, or always equal to the middle of the range. Signed 8-bit codes
    can be converted to unsigned codes with `codes.view(np.uint8) ^ 128`.
    """
    middle = 1 << (bits - 1)
    symmetric = zero is None or (np.issubdtype(zero.dtype, np.integer) and (zero == middle).all())
    codec = Codec(bits, bias=middle) if symmetric else Codec(bits, zeros="points")
    return BlockArray.from_codes(
        codes,
        BlockScales(scale, zero=None if symmetric else zero),
        codec=codec,
        block_size=block,
        count=count,
        order=None if order is None else order.astype(np.int32),
    )


def small_floats(
    raw: np.ndarray,
    scale: np.ndarray,
    *,
    codec: str | Codec,
    block: int | None,
    outer: np.ndarray | None = None,
    count: int | None = None,
) -> BlockArray:
    """Creates an array from 8-bit or 4-bit floats. Pass `count` if the codes are already packed."""
    codec = CODECS[codec] if isinstance(codec, str) else codec
    scales = BlockScales(scale, outer=outer)
    return BlockArray.from_codes(raw.view(np.uint8), scales, codec=codec, block_size=block, count=count)


def spread_tiles(grid: np.ndarray, rows: int, tile_rows: int) -> np.ndarray:
    """Repeats per-tile scales for each row: from `(ceil(rows / tile_rows), blocks)` to `(rows, blocks)`."""
    return np.repeat(grid, min(tile_rows, rows), axis=0)[:rows]  # a tile can be far larger than the array


def per_row(scale: np.ndarray, rows: int) -> np.ndarray:
    """Broadcasts per-tensor or per-row scales to shape `(rows, 1)`."""
    return np.broadcast_to(scale.reshape(-1, 1), (rows, 1))


def num_words(count: int, bits: int) -> int:
    """Returns the number of 32-bit words for this many codes."""
    return -(-count * bits // 32)


def integer(config: Mapping[str, Any], key: str, path: Path, *, among: Iterable[int] = ()) -> int:
    value, among = config.get(key), list(among)
    if type(value) is not int or (among and value not in among):
        wanted = f"one of {', '.join(map(str, among))}" if among else "an integer"
        raise file_error(path, key, f"the quantisation config must give {wanted}; found {quoted(value)}")
    return value


def settings(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """Reads an object from a configuration. Returns an empty dict if this is missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise file_error(path, key, f"the quantisation config must give an object; found {quoted(value)}")
    return value or {}


def settings_in(
    name: str, method: str, key: str | None = None
) -> Callable[[Settings, Path], Settings | None]:
    """Creates a `Format.settings` function for a method with its settings in a separate file.

    `key` is the entry with the settings in this file. By default, this is the file as a whole.
    """

    def read(config: Settings, folder: Path) -> Settings | None:
        file = folder / name
        if config.get("quantization_config") is not None or not file.is_file():
            return None
        found = read_json_file(file, "the configuration")
        return {"quant_method": method, **(found if key is None else settings(found, key, file))}

    return read


def group_size(config: Mapping[str, Any], path: Path) -> int | None:
    """Returns the number of codes per scale, or None if there is just one scale per row."""
    size = integer(config, "group_size", path)
    if size != -1 and not 1 <= size < 2**31:
        raise file_error(path, "group_size", f"must be positive, below 2**31, or -1 for rows; found {size}")
    return None if size == -1 else size


# Reads by rows, so that each process only has to read the rows for its own devices --------------


def dense_rows(tensors: Any, name: str) -> RowReader:
    shape = tensors.info[name].shape

    def read(start: int = 0, stop: int | None = None) -> np.ndarray:
        return tensors.mapped(name)[start:stop]

    return RowReader(shape[0], read) if shape else RowReader(None, lambda: tensors[name])


def rows_of_weight(
    tensors: Tensors,
    name: str,
    weight: StoredWeight,
    reader: Callable[[Tensors, Mapping[str, Any]], Mapping[str, StoredWeight]],
    settings: Mapping[str, Any],
) -> RowReader:
    """Creates a row reader, for formats with `by_rows=True`."""
    names, read = weight.tensors, weight.read
    count = max((tensors.info[part].shape or (1,))[0] for part in names)
    tile = settings.get("weight_block_size")
    each = {part: _rows_an_entry(tensors.info[part], count, tile[0] if tile else 1) for part in names}
    if None in each.values():
        return RowReader(None, read)

    def part(start: int = 0, stop: int | None = None) -> Any:
        if stop is None or (start, stop) == (0, count):
            return read()
        info = {part: _cut(tensors.info[part], each[part] or 0, start, stop) for part in names}
        window = Tensors(tensors.path, info, tensors.metadata)
        return reader(window, settings)[name].read()

    return RowReader(count, part, math.lcm(*(n for n in each.values() if n)))


def _rows_an_entry(info: TensorInfo, count: int, tile: int) -> int | None:
    """Returns the number of rows per entry of a tensor: 0 if all rows share it, and None if unknown."""
    if math.prod(info.shape) == 1 < count:
        return 0
    entries = info.shape[0] if info.shape else 1
    return next((rows for rows in (1, tile) if -(-count // rows) == entries), None)


def _cut(info: TensorInfo, each: int, start: int, stop: int) -> TensorInfo:
    """Slices a tensor to the entries for rows `start` to `stop`."""
    if each == 0:
        return info
    first, last = start // each, -(-stop // each)
    size = info.nbytes // info.shape[0]
    return info._replace(shape=(last - first, *info.shape[1:]), offset=info.offset + first * size)
