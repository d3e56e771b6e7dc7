"""Arrays of a model, each made up of one tensor in a file or of the matrices of experts in turn."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.quaxify import quaxify
from ..sharding.reading import Rows
from .checkpoint import Checkpoint
from .files.errors import CheckpointError, listed
from .formats.mxfp4 import in_published_layout


def tensors_of(
    wanted: Iterable[str],
    names: Iterable[str],
    source: Any,
    *,
    published: Callable[[str], list[str]] = lambda name: [name],
    optional: Collection[str] = (),
) -> dict[str, list[str]]:
    """The tensors of a file that make up each array of a model.

    `published` returns those of an array that the file does not store under its own name; those in `optional`
    may be present. Raises `CheckpointError`, which names `source`, for any other missing or superfluous name.
    """
    files = {name: name for name in names}
    sources = {name: [name] if name in files else published(name) for name in wanted}
    used = {file for own in sources.values() for file in own}
    if not used & files.keys():  # saved inside of a model with a task's head, or outside
        head = Counter(file.partition(".")[0] for file in used).most_common(1)[0][0]
        inside = {name.partition(".")[2]: name for name in files}
        files = inside if used & inside.keys() else {f"{head}.{name}": name for name in files}
    missing, known = sorted(used - files.keys()), {*used, *optional}
    unknown = [name for name in files if name not in known and not name.endswith(_BUFFERS)]
    if missing or unknown:
        raise CheckpointError(
            f"{source} does not fit the model of its config.json. "
            f"Missing: {listed(missing) or 'none'}. Unknown: {listed(unknown) or 'none'}."
        )
    return {name: [files[file] for file in own] for name, own in sources.items()}


def rows_of(
    name: str, files: Sequence[str], shape: tuple[int, ...], weights: Checkpoint, source: Any
) -> Rows:
    """Reads an array of this shape by rows, from the tensors `files`.

    **Raises:** when rows are read, `CheckpointError` for another shape, or a dtype that no model computes
    with.
    """

    def checked(leaf: Any, start: int = 0, stop: int = shape[0]) -> Any:
        expected = (min(stop, shape[0]) - start, *shape[1:])
        if tuple(leaf.shape) != expected:
            raise CheckpointError(f"{source}: {name} must be of shape {expected}; found {tuple(leaf.shape)}.")
        if not _computes(leaf.dtype):
            raise CheckpointError(
                f"{source}: {name} must be of float32, bfloat16 or float16 (or float64 with jax_enable_x64); "
                f"found {leaf.dtype}."
            )
        return leaf

    if len(files) > 1:
        each = len(files) // shape[0]

        def stacked(start: int = 0, stop: int = shape[0]) -> Any:
            wanted, parts = files[start * each : stop * each], []
            for file in wanted:
                parts.append(weights[file])
                found, expected = tuple(parts[-1].shape), (shape[1] // each, *shape[2:])
                if found != expected or parts[-1].dtype != parts[0].dtype:
                    raise CheckpointError(
                        f"{source}: {file} must be of {parts[0].dtype} and of shape {expected}, like the "
                        f"other parts of {name}; found {parts[-1].dtype} of shape {found}."
                    )
            return checked(_joined(parts, stop - start), start, stop)

        return Rows(shape[0], stacked)
    (file,) = files
    rows = weights.rows(file)

    def read(*span: int) -> Any:
        return checked(in_published_layout(name, rows.read(*span) if span else weights[file]), *span)

    return Rows(rows.count, read, rows.step) if rows.count == shape[0] else Rows(None, read)


def split_into_tensors(arrays: Mapping[str, Any], sources: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Splits arrays of a model into the tensors that a file stores; `sources` names them."""
    out: dict[str, Any] = {}
    for name, files in sources.items():
        leaf = arrays[name]
        parts = [in_published_layout(name, leaf)]
        if len(files) > 1:
            each, rows = len(files) // leaf.shape[0], leaf.shape[1]
            cut = quaxify(lambda x, i, at, size=rows // each: x[i, at : at + size])
            starts = range(0, rows, rows // each)
            parts = [cut(leaf, i, at) for i in range(leaf.shape[0]) for at in starts]
        out |= zip(files, parts, strict=True)
    return out


def _joined(parts: list[Any], count: int) -> Any:
    """Stacks `count` matrices. The rows of each are those of the next parts, concatenated."""
    each = len(parts) // count
    concatenate, stack = quaxify(jnp.concatenate), quaxify(jnp.stack)
    rows = [concatenate(parts[i : i + each]) if each > 1 else parts[i] for i in range(0, len(parts), each)]
    return stack(rows)


def _computes(dtype: Any) -> bool:
    """Whether models compute with weights of this dtype in JAX's present configuration."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2
    return wide and jax.dtypes.canonicalize_dtype(dtype) == dtype


# Constants that some versions of transformers save too.
_BUFFERS = (
    *("position_ids", "rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"),
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),  # GGUF's; in the config
)
