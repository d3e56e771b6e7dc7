"""Parsing of PEFT's `adapter_config.json`."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..._patterns import fullmatch, is_pattern
from ...adapters import METHODS
from ...adapters.record import DROPOUT, PREFIX, Method, Option
from ...files.errors import file_error, quoted
from ...files.json_text import read_json_file
from ..folders.entries import is_off
from ..folders.file_pair import Pair

#: Maps each `peft_type` to our method.
BY_TYPE = {method.peft_type: method for method in METHODS.values()}

# Options of all methods without any effect once an adapter is trained, e.g. describing where it came from.
_INFORMATIVE = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    "task_type",
)

#: PEFT finds tied embeddings and output layers by these names.
TIED_BY_PEFT = ("embed_tokens", "lm_head")


def files_of(folder: Path) -> Pair:
    return Pair(folder, "adapter_config.json", "adapter_model.safetensors")


class AdapterConfig(NamedTuple):
    """The configuration of an adapter, with the same defaults as in PEFT."""

    method: Method
    options: Mapping[str, Any]
    """The options that are specific to the method."""
    target_modules: str | Sequence[str] | None = None
    exclude_modules: str | Sequence[str] | None = None
    modules_to_save: Sequence[str] | None = None
    layers_to_transform: int | Sequence[int] | None = None
    layers_pattern: str | Sequence[str] | None = None

    def option(self, name: str) -> Any:
        """Returns the value of an option, or None if the method doesn't have it."""
        return self.options.get(name)

    @property
    def ties_head(self) -> bool:
        """Whether PEFT gives a tied embedding and output layer the same change (`ensure_weight_tying`).

        It only does so if the configuration uses Llama's name for one of them. For example, it ignores this
        option for GPT-2's `wte`.
        """
        if not self.option("ensure_weight_tying"):
            return False
        named = [*(self.modules_to_save or ())]
        if isinstance(self.target_modules, str):
            named += [name for name in TIED_BY_PEFT if fullmatch(self.target_modules, name)]
        else:
            named += self.target_modules or ()
        return any(name.rpartition(".")[2] in TIED_BY_PEFT for name in named)

    def targets(self, layer: str) -> bool:
        """Returns whether the adapter targets this layer. This isn't defined for `"all-linear"`."""
        if self.excludes(layer):
            return False
        if not _named(self.target_modules or (), layer):
            return False
        # As in PEFT, layer numbers don't restrict layers named in full.
        in_full = isinstance(self.target_modules, str) or layer in (self.target_modules or ())
        if self.layers_to_transform in (None, []) or in_full:
            return True
        wanted = self.layers_to_transform
        number = _layer_number(self.layers_pattern or (), layer)
        return number is not None and number in ([wanted] if isinstance(wanted, int) else wanted)

    def excludes(self, layer: str) -> bool:
        """Returns whether the adapter leaves out this layer, even if `target_modules` matches it."""
        return _named(self.exclude_modules or (), layer) or self._saves(layer)

    def saves(self, name: str) -> bool:
        """Returns whether `modules_to_save` includes this array."""
        return self._saves(name.rpartition(".")[0] or name)

    def _saves(self, layer: str) -> bool:
        """Returns whether `modules_to_save` includes this layer or a module containing it.

        As in PEFT, a name only has to end with an entry. For example, `norm` also matches `input_layernorm`.
        """
        parts = layer.split(".")
        modules = [f"{PREFIX}{'.'.join(parts[:n])}" for n in range(1, len(parts) + 1)]
        return any(module.endswith(end) for end in self.modules_to_save or () for module in modules)


_NUMBER = re.compile(r"\.(?P<number>\d+)(?=\.)")


def _layer_number(patterns: str | Sequence[str], layer: str) -> int | None:
    """Returns the first number in the name after any of the patterns, or at all if there are no patterns."""
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(?P<number>\d+)\.", layer)
        return int(found["number"]) if found else None
    starts = [0, *(i + 1 for i, c in enumerate(layer) if c == ".")]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for start in starts:
            for found in _NUMBER.finditer(layer, start):
                if fullmatch(pattern, layer[start : found.start()]):
                    return int(found["number"])
    return None


def _named(patterns: str | Sequence[str], layer: str) -> bool:
    if isinstance(patterns, str):
        return fullmatch(patterns, layer)
    return any(layer == p or layer.endswith(f".{p}") for p in patterns)


def _is_int(x: Any) -> bool:
    return type(x) is int


def _are_patterns(x: Any) -> bool:
    return isinstance(x, list) and all(map(is_pattern, x))


def _is_names(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(name, str) for name in x)


_MODULES = Option(None, "a regular expression or a list of names", lambda x: is_pattern(x) or _is_names(x))
#: Options of all methods.
_OF_ALL = {
    "target_modules": _MODULES,
    "exclude_modules": _MODULES,
    "modules_to_save": Option(None, "a list of names", _is_names),
    "layers_to_transform": Option(
        None, "layer numbers", lambda x: _is_int(x) or (isinstance(x, list) and all(map(_is_int, x)))
    ),
    "layers_pattern": Option(None, "a name or a list of names", lambda x: is_pattern(x) or _are_patterns(x)),
}


def read_config(path: Path) -> AdapterConfig:
    fields = read_json_file(path, "the configuration")
    kind = fields.get("peft_type")
    if kind == "LILY":
        raise file_error(
            path, "peft_type", "'LILY' is not supported: what it adds to a layer depends on all tokens of a "
            "batch, and is no product with a weight",
        )  # fmt: skip
    if not isinstance(kind, str) or kind not in BY_TYPE:
        expected = ", ".join(map(repr, BY_TYPE))
        raise file_error(path, "peft_type", f"expected one of {expected}; found {quoted(kind)}")
    method = BY_TYPE[kind]
    if "bias" not in method.options and fields.get("bias") not in (None, "none"):
        raise file_error(
            path, "bias", f"expected 'none', since PEFT's {method.peft_type} trains no biases; found "
            f"{quoted(fields['bias'])}",
        )  # fmt: skip
    known = {**_OF_ALL, **method.options}
    for name, value in fields.items():
        is_known = name in known or name in _INFORMATIVE or name in method.informative or name == "bias"
        if not is_known and not is_off(value):
            raise file_error(
                path, name, f"{quoted(value)} is not supported, and what the adapter computes depends on it"
            )
    given = {name: fields[name] for name in known if fields.get(name) is not None}
    for name, value in given.items():
        if not known[name].fits(value):
            raise file_error(path, name, f"expected {known[name].expected}; found {quoted(value)}")
        if known[name] is DROPOUT and value:
            warnings.warn(
                f"{path}: {name} is {value}. Nothing is dropped where this adapter is trained further.",
                stacklevel=2,
            )
    options = {name: given.get(name, option.default) for name, option in method.options.items()}
    if method.refused is not None and (found := method.refused(options)):
        name, problem = found
        raise file_error(path, name, problem.format(quoted(fields[name])))
    return AdapterConfig(method, options, **{name: given[name] for name in _OF_ALL if name in given})
