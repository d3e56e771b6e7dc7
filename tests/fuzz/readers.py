"""The readers that meet mutated files, and what they read."""

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from rich.console import Console

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError, safetensors
from quaxlike.files.json_text import read_json_file
from quaxlike.files.tensors import open_tensors
from quaxlike.lm import UnsupportedConfigError, bitsandbytes, peft
from quaxlike.lm.finetune.data import Tokens
from quaxlike.lm.finetune.options import settings_of
from quaxlike.lm.finetune.run import read_data
from quaxlike.lm.finetune.settings import DataSettings, FinetuneError, Settings, TrainSettings
from quaxlike.lm.finetune.state import RunDirectory
from quaxlike.lm.finetune.tasks import NextToken
from quaxlike.lm.folders.companions import named_ends
from quaxlike.lm.generate.run import GenerateError
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.lm.text import TextTokenizer
from tests.fixtures import fixture
from tests.fuzz.mutations import SUFFIXES

#: The errors that a reader may end with.
OWN = (CheckpointError, UnsupportedConfigError, FinetuneError, GenerateError, FileNotFoundError)


class Reader(NamedTuple):
    """A reader, and the folders or files that it reads, one for each case; each may be a function that writes
    a folder."""

    read: Callable[[Path], Any]
    sources: tuple[str | Callable[[Path], None], ...]

    def prepare(self, case: int, folder: Path) -> Path:
        """A copy of what a case is about."""
        target = folder / "case"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        source = self.sources[case % len(self.sources)]
        if not isinstance(source, str):
            source(target)
            return target
        found = fixture(source)
        for path in [found] if found.is_file() else found.iterdir():
            if path.suffix in SUFFIXES and path.name != "cases.json":
                shutil.copyfile(path, target / path.name)
        return target


def _base() -> Mapping[str, Any]:
    return _tensors("peft_llama/base")


@functools.cache
def _tensors(name: str) -> Mapping[str, Any]:
    return {name: jnp.asarray(array) for name, array in open_tensors(fixture(name)).items()}


def _values() -> dict[str, Any]:
    w = jnp.arange(256.0).reshape(4, 64) / 256
    return {
        "nf4": ql.NF4Array.quantize(w),
        "int8": ql.Int8Array.quantize(w),
        "lora": ql.LoraArray(w, w[:1], w[:, :1]),
        "blocks": ql.BlockArray.quantize(w, codec="q4_0"),
        "plain": w,
    }


def _adapted() -> dict[str, Any]:
    """Adapters on two weights, each with a bias, and an array that is trained in full."""
    w = jnp.arange(256.0).reshape(4, 64) / 256
    base = {"a.weight": w, "a.bias": w[0, :4], "b.weight": w, "b.bias": w[1, :4], "c.weight": w}
    options = {"lora_bias": True, "modules_to_save": ["c"], "key": jax.random.key(0)}
    return ql.loraify(base, rank=2, where=["a", "b"], dora=True, **options)


def _write_adapters(folder: Path) -> None:
    safetensors.save_adapters(folder / "model.safetensors", _adapted())


def _bare() -> dict[str, Any]:
    bare = {name: x.w if isinstance(x, ql.AdaptedArray) else x for name, x in _adapted().items()}
    return {name: x for name, x in bare.items() if x is not None}


def _write_values(folder: Path) -> None:
    safetensors.save(folder / "model.safetensors", _values())


_LINES = (
    {"text": "Hello there."},
    {"prompt": "Hello", "completion": " there."},
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello there."}]},
    {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello there."}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"enable_thinking": True},
    },
)


def _write_data(kind: str, folder: Path) -> None:
    source = fixture(f"models/chat/{kind}")
    for path in source.iterdir():
        if path.suffix in SUFFIXES and path.name != "cases.json":
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": 2}))
    lines = [line for line in _LINES if kind != "gemma" or "tools" not in line]  # of which it takes none
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * 2))


def _read_data(folder: Path) -> None:
    train, data = TrainSettings(folder, batch_size=1), DataSettings(folder / "data.jsonl")
    tokens = Tokens(folder, read_json_file(folder / "config.json", "the configuration"), 64)
    read_data(train, data, NextToken(), tokens, Console(quiet=True))


def _run_settings(folder: Path) -> Settings:
    model = folder.parent / "model.json"
    if not model.exists():
        model.write_text("{}")
    return settings_of(model=model, data=model, output=folder)


def _write_run(folder: Path) -> None:
    directory = RunDirectory(_run_settings(folder))
    directory.note(step=1, loss=1.0)
    directory.note(step=2, loss=0.5)
    directory.save(2, {"a": jnp.ones(3)})
    directory.close()


def _read_run(folder: Path) -> None:
    directory = RunDirectory(_run_settings(folder))
    try:
        directory.restore({"a": jnp.ones(3)})
    finally:
        directory.close()


def _read_tokenizer(folder: Path) -> None:
    TextTokenizer(folder).encode("Hello there.")


def _generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "config.json").write_text('{"eos_token_id": 2}')


def _read_ends(folder: Path) -> None:
    named_ends(folder, read_json_file(folder / "config.json", "the configuration"))


def _read_configuration(folder: Path) -> None:
    config = read_json_file(folder / "config.json", "the configuration")
    if config.get("num_hidden_layers") in range(100):  # others are compared with the weights first
        eqx.filter_eval_shape(Decoder, DecoderConfig.from_json(config), key=jax.random.key(0))


def _of_format(name: str) -> Reader:
    folders = sorted(path.name for path in fixture(f"formats/{name}").iterdir() if path.is_dir())
    return Reader(lm.read, tuple(f"formats/{name}/{folder}" for folder in folders))


def _configurations() -> list[Path]:
    return sorted(fixture("models/qwen2").parent.glob("*/base/config.json"))


_GGUF = ("floats", "iq4_mxfp4", "kquants", "legacy")
_WHOLE = sorted(path.name for path in fixture("formats/whole").iterdir() if path.is_dir())
_FORMATS = (
    *("awq", "bnb_int8", "compressed_tensors", "compressed_tensors_legacy", "fp8", "gptq", "hqq", "mlx"),
    *("mxfp4", "torchao"),
)
_METHODS = (
    "ia3", "oft_cayley", "boft_butterfly3", "hra", "vera", "loha", "lokr", "shira", "hira_embedding",
    "miss_padded", "c3a_pattern", "delora", "adalora_pruned", "gralora_hybrid", "randlora", "fourierft",
    "lora_alora",
)  # fmt: skip
_CHAT = ("chatml", "gemma", "llama3", "mistral")

READERS = {
    "safetensors": Reader(lambda path: list(open_tensors(path).values()), ("peft_llama/base",)),
    "load": Reader(lm.read, ("peft_llama/base",)),
    "values": Reader(lambda path: safetensors.load(path, _values()), (_write_values,)),
    "adapters": Reader(lambda path: safetensors.load_adapters(path, _bare()), (_write_adapters,)),
    "bitsandbytes": Reader(bitsandbytes.load, ("qlora_llama_double/base4bit",)),
    "models": Reader(ql.lm.load, ("peft_llama/base", "peft_gpt2/base", "models/qwen2_moe/base")),
    "adapter": Reader(lambda path: peft.load_adapter(path, _base()), ("peft_llama/adapters/qv",)),
    "adapters of other methods": Reader(
        lambda path: peft.load_adapter(path, _tensors("peft_methods/llama/base")),
        tuple(f"peft_methods/llama/{name}" for name in _METHODS),
    ),
    **{name: _of_format(name) for name in _FORMATS},
    "gguf": Reader(lm.read, tuple(f"formats/gguf_tensors/{name}.gguf" for name in _GGUF)),
    "gguf models": Reader(ql.lm.load, ("formats/gguf_whole/qwen2_q4_0.gguf",)),
    "gguf tokenisers": Reader(
        _read_tokenizer,
        ("formats/gguf_whole/qwen2_q4_0.gguf", "formats/gguf_whole/llama31_ropefreqs_f16.gguf"),
    ),
    "quantised models": Reader(ql.lm.load, tuple(f"formats/whole/{name}" for name in _WHOLE)),
    "tokenisers": Reader(_read_tokenizer, tuple(f"models/chat/{name}" for name in _CHAT)),
    "configurations": Reader(
        _read_configuration,
        tuple(f"models/{path.parent.parent.name}/base/config.json" for path in _configurations()),
    ),
    "generation": Reader(_read_ends, (_generation,)),
    "data": Reader(_read_data, tuple(functools.partial(_write_data, name) for name in _CHAT)),
    "runs": Reader(_read_run, (_write_run,)),
}
