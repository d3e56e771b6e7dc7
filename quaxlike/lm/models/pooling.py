"""Pools a sentence's token vectors into a single vector."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..._checked import checked
from ...files.errors import file_error, quoted
from ...files.json_text import read_json_file
from ..folders.companions import modules_of
from ..folders.entries import warn_of_unknown

_Tokens = Float[Array, "tokens hidden"]
_Seen = Bool[Array, " tokens"]
_Sentence = Float[Array, " hidden"]


def _last(x: _Tokens, seen: _Seen) -> _Sentence:
    return x[len(x) - 1 - jnp.argmax(seen[::-1])]


def _weighted(x: _Tokens, seen: _Seen) -> _Sentence:
    weights = jnp.where(seen, jnp.arange(1, len(x) + 1) - jnp.argmax(seen), 0).astype(x.dtype)
    return weights @ x / jnp.maximum(weights.sum(), 1)


def _mean(x: _Tokens, seen: _Seen) -> _Sentence:
    return seen.astype(x.dtype) @ x / _count(x, seen)


def _mean_sqrt_len(x: _Tokens, seen: _Seen) -> _Sentence:
    return seen.astype(x.dtype) @ x / jnp.sqrt(_count(x, seen))


def _count(x: _Tokens, seen: _Seen) -> Float[Array, ""]:
    return jnp.maximum(seen.sum(), 1).astype(x.dtype)


#: The pooling modes, named as in sentence-transformers.
MODES: Mapping[str, Callable[[_Tokens, _Seen], _Sentence]] = {
    "cls": lambda x, seen: x[jnp.argmax(seen)],
    "max": lambda x, seen: jnp.max(jnp.where(seen[:, None], x, -jnp.inf), axis=0),
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted,
    "lasttoken": _last,
}
# Older files instead have one boolean per mode. Their vectors are concatenated in this order.
_OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Only the first is read. All others can be inferred from the model or its input.
_OTHERS = ("pooling_mode", "word_embedding_dimension", "embedding_dimension", "include_prompt")


class Pooling(eqx.Module):
    """Pools token vectors into a single vector, as in sentence-transformers.

    **Arguments:**

    - `modes`: any of `"cls"` (the first token), `"lasttoken"`, `"max"`, `"mean"`, `"mean_sqrt_len_tokens"`
        (the sum divided by the square root of the length) or `"weightedmean"` (weighted by position). The
        vectors of several modes are concatenated.
    - `normalize`: whether to normalise the result to unit length. Default: True.

    Call an instance with token vectors of shape `(tokens, hidden)`, along with a mask `seen` of shape
    `(tokens,)`, False for padding. The result has shape `(len(modes) * hidden,)`.
    """

    modes: tuple[str, ...] = eqx.field(static=True, default=("mean",))
    normalize: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise ValueError(f"Pooling takes modes of {', '.join(MODES)}; found {quoted(self.modes)}.")

    def __call__(self, x: _Tokens, seen: _Seen) -> Float[Array, " out"]:
        out = jnp.concatenate([MODES[mode](x, seen) for mode in self.modes])
        return out / jnp.maximum(jnp.linalg.norm(out), 1e-12) if self.normalize else out

    @classmethod
    @checked
    def of(cls, directory: str | os.PathLike[str]) -> "Pooling":
        """Reads the pooling from a checkpoint's `modules.json`. Without this file it's the mean.

        **Raises:** `CheckpointError` if the file is corrupt, or if it lists any module other than `Pooling`
        and `Normalize`. (Ignoring these would silently give different vectors.)
        """
        folder = Path(directory)
        found = cls(normalize=False)
        for kind, name in modules_of(folder)[1:]:
            match kind:
                case "Pooling":
                    found = cls(_modes(folder / name / "config.json"), found.normalize)
                case "Normalize":
                    found = cls(found.modes, True)
                case _:
                    what = f"modules after the model must be Pooling or Normalize; found {quoted(kind)}"
                    raise file_error(folder / "modules.json", None, what)
        return found


def _modes(path: Path) -> tuple[str, ...]:
    settings = read_json_file(path, "the settings of the pooling")
    warn_of_unknown(str(path), settings, (*_OLDER, *_OTHERS))
    older = [mode for key, mode in _OLDER.items() if settings.get(key)]
    given = settings.get("pooling_mode", older or "mean")
    modes = tuple(given) if isinstance(given, list) else (given,)
    if not modes or not all(isinstance(mode, str) and mode in MODES for mode in modes):
        raise file_error(path, None, f"pooling_mode must be of {', '.join(MODES)}; found {quoted(given)}")
    return modes


def mean_pooled(x: _Tokens, seen: _Seen) -> _Sentence:
    """Computes the mean over all non-padding tokens and then normalises it to unit length.

    This is a common sentence embedding, and the default of `Pooling`.
    """
    return Pooling()(x, seen)
