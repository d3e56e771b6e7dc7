"""`adapter_config.json`."""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..._checked import is_finite
from ..._patterns import PatternError, compiled, fullmatch, value_for
from ...adapters import METHODS
from ...adapters.record import DROPOUT, Method
from ...files.errors import file_error, quoted
from ...files.json_text import read_json_file
from ...surgery.trees import layer_of
from ..folders.file_pair import Pair

PREFIX = "base_model.model."
#: The methods beside LoRA, by the entry `peft_type` of a configuration.
BY_TYPE = {method.peft_type: method for method in METHODS.values()}

# Entries that do not affect what a trained adapter computes.
_INFORMATIVE = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode",
    "lora_ga_config", "loftq_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "task_type", "corda_config",
}  # fmt: skip
# Initialisations that leave the base alone; those that move a part of it into the adapter, which can be told
# from the base; and the beginnings of those that change it in another way.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
CHANGES_BASE = ("pissa", "olora")
_UNKNOWN_CHANGES = {
    "pissa_niter_": "a part of the base that depends on random numbers",
    "corda": "a part of the base that depends on the inputs of its layers",
    "lora_ga": "a part of the base that depends on gradients",
    "loftq": "the rounding error of a base that PEFT quantised",
}


def files_of(folder: Path) -> Pair:
    return Pair(folder, "adapter_config.json", "adapter_model.safetensors")


class AdapterConfig(NamedTuple):
    """The configuration of an adapter, with PEFT's defaults."""

    r: int = 8
    lora_alpha: float | int = 8
    target_modules: str | Sequence[str] | None = None
    exclude_modules: str | Sequence[str] | None = None
    rank_pattern: Mapping[str, int] = {}
    alpha_pattern: Mapping[str, float | int] = {}
    bias: str = "none"
    lora_bias: bool = False
    lora_dropout: float | int = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: Sequence[str] | None = None
    init_lora_weights: Any = True
    layers_to_transform: int | Sequence[int] | None = None
    layers_pattern: str | Sequence[str] | None = None
    target_parameters: Sequence[str] = ()
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] = ()
    ensure_weight_tying: bool = False
    alora_invocation_tokens: Sequence[int] | None = None
    # Of another method than LoRA, and its own options.
    method: Method | None = None
    options: Mapping[str, Any] = {}

    def rank(self, name: str) -> int:
        return value_for(self.rank_pattern, layer_of(name), self.r)

    def alpha(self, name: str) -> float:
        return float(value_for(self.alpha_pattern, layer_of(name), self.lora_alpha))

    def targets(self, layer: str) -> bool:
        """Whether the adapter was put on this layer. Not defined for `"all-linear"`."""
        if _named(self.exclude_modules or (), layer) or self.saves(layer):
            return False
        if not _named(self.target_modules or (), layer):
            return False
        if self.layers_to_transform is None or isinstance(self.target_modules, str):
            return True
        wanted = self.layers_to_transform
        number = _layer_number(self.layers_pattern or (), layer)
        return number is not None and number in ([wanted] if isinstance(wanted, int) else wanted)

    def saves(self, name: str) -> bool:
        """Whether an array is part of `modules_to_save`."""
        return any(fullmatch(rf"(.*\.)?{module}(\..*)?", name) for module in self.modules_to_save or ())


_NUMBER = re.compile(r"\.(?P<number>\d+)(?=\.)")


def _layer_number(patterns: str | Sequence[str], layer: str) -> int | None:
    """The number after the part of the name that a pattern matches; without patterns, after any part."""
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


def _is_int(x: Any) -> bool:
    return type(x) is int


def _is_names(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(name, str) for name in x)


def _is_expression(x: Any) -> bool:
    if not isinstance(x, str):
        return False
    try:
        compiled(x)
    except PatternError:
        return False
    return True


def _are_expressions(x: Any) -> bool:
    return isinstance(x, list) and all(map(_is_expression, x))


def _is_by_pattern(x: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(x, dict) and all(map(_is_expression, x)) and all(map(fits, x.values()))


def _is_tokens(x: Any) -> bool:
    if isinstance(x, dict):
        return all(map(_is_tokens, x.values()))
    return isinstance(x, list) and all(_is_int(token) and token >= 0 for token in x)


_FLAGS = ("lora_bias", "use_rslora", "use_dora", "fan_in_fan_out", "ensure_weight_tying")
_MODULES = ("target_modules", "exclude_modules")
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_FLAGS, ("true or false", lambda x: type(x) is bool)),
    **dict.fromkeys(
        _MODULES, ("a regular expression or a list of names", lambda x: _is_expression(x) or _is_names(x))
    ),
    "r": ("a positive integer", lambda x: _is_int(x) and x > 0),
    "lora_alpha": ("a number", is_finite),
    "rank_pattern": (
        "positive integers by pattern",
        lambda x: _is_by_pattern(x, lambda rank: _is_int(rank) and rank > 0),
    ),
    "alpha_pattern": ("numbers by pattern", lambda x: _is_by_pattern(x, is_finite)),
    "bias": ("'none', 'all' or 'lora_only'", lambda x: x in ("none", "all", "lora_only")),
    "lora_dropout": ("a number from 0 to 1", lambda x: is_finite(x) and 0 <= x < 1),
    "modules_to_save": ("a list of names", _are_expressions),
    "init_lora_weights": (
        f"one of {', '.join(map(repr, (*_KEEPS_BASE, *CHANGES_BASE)))}",
        lambda x: x in (*_KEEPS_BASE, *CHANGES_BASE),
    ),
    "layers_to_transform": (
        "layer numbers",
        lambda x: _is_int(x) or (isinstance(x, list) and all(map(_is_int, x))),
    ),
    "target_parameters": ("a list of names", _is_names),
    "trainable_token_indices": ("tokens, or tokens by the name of an embedding", _is_tokens),
    "layers_pattern": ("a name or a list of names", lambda x: _is_expression(x) or _are_expressions(x)),
    "alora_invocation_tokens": (
        "one or more tokens",
        lambda x: isinstance(x, list) and x != [] and _is_tokens(x),
    ),
}


def _named(patterns: str | Sequence[str], layer: str) -> bool:
    if isinstance(patterns, str):
        return fullmatch(patterns, layer)
    return any(layer == p or layer.endswith(f".{p}") for p in patterns)


def read_config(path: Path) -> AdapterConfig:
    fields = read_json_file(path, "the configuration")
    kind = fields.get("peft_type")
    if kind == "LORA":
        return _read_lora(path, fields)
    if kind == "LILY":
        raise file_error(
            path, "peft_type", "'LILY' is not supported: what it adds to a layer depends on all tokens of a "
            "batch, and is no product with a weight",
        )  # fmt: skip
    if not isinstance(kind, str) or kind not in BY_TYPE:
        expected = ", ".join(map(repr, ("LORA", *BY_TYPE)))
        raise file_error(path, "peft_type", f"expected one of {expected}; found {quoted(kind)}")
    return _read_method(path, fields, BY_TYPE[kind])


def _check_known(path: Path, fields: Mapping[str, Any], names: Collection[str]) -> None:
    unknown = {
        name: value
        for name, value in fields.items()
        if name not in (*names, *_INFORMATIVE) and value not in (None, False, {}, [])
    }
    if unknown:
        name, value = next(iter(unknown.items()))
        raise file_error(
            path, name, f"{quoted(value)} is not supported, and what the adapter computes depends on it"
        )


def _check_values(path: Path, known: Mapping[str, Any], checks: Mapping[str, Any]) -> None:
    for name, value in known.items():
        expected, fits = checks[name]
        if not fits(value):
            raise file_error(path, name, f"expected {expected}; found {quoted(value)}")


# Entries of all methods, and those that only say how an adapter started.
_OF_ALL = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
_STARTS = ("init_weights", "init_ia3_weights")


def _read_method(path: Path, fields: Mapping[str, Any], method: Method) -> AdapterConfig:
    if fields.get("bias") not in (None, "none"):
        raise file_error(
            path, "bias", f"expected 'none', since PEFT's files of {method.peft_type} hold no biases; found "
            f"{quoted(fields['bias'])}",
        )  # fmt: skip
    _check_known(path, fields, (*_OF_ALL, *_STARTS, *method.options, *method.informative, "bias"))
    given = {name: fields[name] for name in (*_OF_ALL, *method.options) if fields.get(name) is not None}
    checks = _CHECKS | {name: (option.expected, option.fits) for name, option in method.options.items()}
    _check_values(path, given, checks)
    for name, option in method.options.items():
        if option is DROPOUT and given.get(name):
            warnings.warn(
                f"{path}: {name} is {given[name]}. Nothing is dropped where this adapter is trained further.",
                stacklevel=2,
            )
    options = {name: given.get(name, option.default) for name, option in method.options.items()}
    of_all = {name: given[name] for name in _OF_ALL if name in given}
    fan_in_fan_out = options.get("fan_in_fan_out", False)
    return AdapterConfig(**of_all, fan_in_fan_out=fan_in_fan_out, method=method, options=options)


def _read_lora(path: Path, fields: Mapping[str, Any]) -> AdapterConfig:
    names = [name for name in AdapterConfig._fields if name not in ("method", "options")]
    _check_known(path, fields, names)
    known = {name: fields[name] for name in names if fields.get(name) is not None}
    if isinstance(init := known.get("init_lora_weights"), str):
        known["init_lora_weights"] = init.lower()
        for start, taken in _UNKNOWN_CHANGES.items():
            if init.lower().startswith(start):
                raise file_error(
                    path,
                    "init_lora_weights",
                    f"with {quoted(init)} the adapter holds {taken}, which is not in the file. If the model "
                    "holds the base as it was left then, write true here; else save the adapter in PEFT "
                    "again, with `path_initial_model_for_weight_conversion`",
                )
    _check_values(path, known, _CHECKS)
    if "alora_invocation_tokens" in known:
        changing = {"init_lora_weights": CHANGES_BASE, "use_dora": (True,), "lora_bias": (True,)}
        for name, values in changing.items():
            if known.get(name) in values:
                raise file_error(
                    path, name, f"{quoted(known[name])} is not supported beside alora_invocation_tokens"
                )
    return AdapterConfig(**known)
