"""The settings of a fine-tuning run, in three parts: the model, the data, and the output."""

# ruff: noqa: RUF009 (calls that make fields)

import argparse
import dataclasses
import functools
import hashlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from ..._arguments import COMPILATION_CACHE, number
from ...files.errors import ErrorAboutFiles


class FinetuneError(ErrorAboutFiles):
    """Raised if a run can't start or continue. The message gives the reason."""


def option(help: str, default: Any = dataclasses.MISSING, **of_argument: Any) -> Any:
    """Declares a setting along with its command-line argument. `of_argument` is passed to `argparse`."""
    return dataclasses.field(default=default, metadata={"help": help, **of_argument})


SIZE, SHARE = number(int, 1), number(float, 0, 1)


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Base class for a task's settings. Declare the fields of a subclass using `option`."""

    name: ClassVar[str]
    """The task's name, for `--task`."""
    about: ClassVar[str]
    """A short description, as shown by `--help`."""


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """The model, its adapters, and how to train them."""

    model: Path = option(
        "checkpoint directory: config.json, model.safetensors, tokenizer.json", type=Path, metavar="DIR"
    )
    quantize: str | Path = option(
        "how to quantise weights, unless they are in 4 bits already: a scheme of quaxlike.quantize, such as "
        "nf4, int8 or q4_k; a recipe, such as q4_k_m or nf4_qlora, or a JSON or TOML file with one; or none",
        "nf4",
        metavar="SCHEME|RECIPE|FILE",
    )
    block_size: int | None = option(
        "weights that share a scale; smaller blocks can be split across more devices (default: 64)", None,
        type=SIZE, metavar="N",
    )  # fmt: skip
    target: tuple[str, ...] = option(
        "layers to adapt, by the ends of their names (default: all linear layers)",
        (),
        nargs="+",
        metavar="NAME",
    )
    train_tokens: tuple[int, ...] = option(
        "train the embeddings of these tokens too, and save only these rows", (),
        type=number(int, 0), nargs="+", metavar="ID",
    )  # fmt: skip
    adapter: str | Path | None = option(
        "adapt weights with a type of your own instead of LoRA: a class with a class method `make`, or a "
        "function, that is called as make(w, key=..., layout=...); or by another method, such as ia3; or go "
        "on with the adapter in a folder that PEFT or this command wrote, with a new optimiser", None,
        metavar="MODULE:NAME|DIR",
    )  # fmt: skip
    rank: int = option("of the adapters", 8, type=SIZE)
    alpha: float | int = option("adapters are scaled with alpha / rank", 16, type=number(float, 0))
    dropout: float | int = option("on the inputs of adapters", 0.0, type=number(float, 0, 0.99))
    rslora: bool = option("scale with alpha / sqrt(rank)", False)
    dora: bool = option("train the norms of rows separately from their directions", False)
    freeze_a: bool = option("train only the second matrix of each adapter (LoRA-FA)", False)
    invocation: str | None = option(
        "adapters act on each text from the last place on where this one stands in it, so that what the "
        "model without them has cached of the text before stays valid (activated LoRA)", None, metavar="TEXT",
    )  # fmt: skip
    lora_plus: float | int | None = option(
        "the learning rate of the second matrix, divided by --learning-rate (LoRA+; default: the same)", None,
        type=number(float, 1), metavar="RATIO",
    )  # fmt: skip
    steps: int | None = option("updates of the weights, instead of --epochs", None, type=SIZE)
    epochs: float | int = option("passes over the data", 3, type=number(float, 0))
    batch_size: int = option("examples per batch", 16, type=SIZE)
    accumulate: int = option("batches per step", 1, type=SIZE)
    learning_rate: float | int = option("the peak learning rate", 2e-4, type=number(float, 0))
    schedule: str = option("how the learning rate decays", "cosine", choices=["cosine", "linear", "constant"])
    warmup: float | int = option("share of steps in which the learning rate rises", 0.1, type=SHARE)
    weight_decay: float | int = option("of AdamW", 0.0, type=number(float, 0))
    clip: float | int = option("maximum norm of the gradient, 0 for no limit", 1.0, type=number(float, 0))
    optimizer_bits: int | None = option(
        "of the moments that AdamW keeps; those of small arrays stay in float32 (default: float32)", None,
        type=int, choices=[8, 4],
    )  # fmt: skip
    seed: int = option("of adapters, batches, dropout and held-out data", 0, type=number(int, 0, 2**32 - 1))
    compute_dtype: str | None = option(
        "of activations and frozen weights; adapters are in float32 (default: as stored)", None,
        choices=["bfloat16", "float16", "float32"],
    )  # fmt: skip
    remat: str | None = option(
        "recompute layers for the gradient, and keep nothing of them (the default without a value), or only "
        "the results of matrix products (dots)", None,
        nargs="?", const="nothing", choices=["nothing", "dots"],
    )  # fmt: skip
    loss_chunk: int = option("tokens whose logits are computed at a time", 1024, type=SIZE, metavar="N")
    scan_layers: bool | None = option(
        "scan over equal layers, so that compile time does not grow with their number (default: if the model "
        "is a decoder with equal layers)", None, action=argparse.BooleanOptionalAction,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The training data, along with which parts of it contribute to the loss."""

    data: Path = option("training data; - is the standard input", type=Path, metavar="FILE.jsonl")
    eval_data: Path | None = option(
        "evaluation data, instead of a share of --data", None, type=Path, metavar="FILE.jsonl"
    )
    held_out: float | int = option("share of --data held out for evaluation, 0 for none", 0.1, type=SHARE)
    task: TaskSettings | None = option("(default: what it is made for)", None)
    """The settings of the chosen task. If None then the task depends on the model."""
    max_length: int | None = option(
        "tokens per text; more are cut (default: 256, or the model's limit)", None, type=SIZE
    )
    pack: bool = option("pack several texts into a row; they do not see each other", False)


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The output and the devices of a run. Nothing in here affects the trained weights."""

    output: Path = option(
        "directory for the adapter, the log and the checkpoint of the run", type=Path, metavar="DIR"
    )
    checkpoint_every: int = option("steps between checkpoints", 50, type=SIZE)
    eval_every: int | None = option(
        "steps between evaluations (default: before and after only)", None, type=SIZE, metavar="N"
    )
    attention: str | None = option(
        "compute attention by a library's kernel where it takes the case: cudnn on NVIDIA's GPUs, splash on "
        "TPUs (default: by blocks)", None,
        choices=["cudnn", "splash"],
    )  # fmt: skip
    merge: str | None = option(
        "also write a merged checkpoint to --output/merged (or merged.gguf): the file's weights with the "
        "trained changes (dense, the default without a value), or the quantised weights, rounded again "
        "(quantized)", None,
        nargs="?", const="dense", choices=["dense", "quantized"],
    )  # fmt: skip
    format: str = option(
        "of the merged checkpoint: a folder that transformers loads, or a file with the tokeniser in it that "
        "llama.cpp runs", "safetensors",
        choices=["safetensors", "gguf"],
    )  # fmt: skip
    outtype: str | Path | None = option(
        "how the weights of a GGUF file are stored: f32, f16, bf16, or one of llama.cpp's types, such as "
        "q8_0 or q4_k; or a recipe, such as q4_k_m, or a JSON or TOML file with one (default: as the merged "
        "model has them)", None,
        metavar="TYPE|RECIPE|FILE",
    )  # fmt: skip
    tensorboard: bool = option("also write metrics for TensorBoard to --output", False)
    compilation_cache: str | None = option(COMPILATION_CACHE, None, metavar="DIR|off")
    mesh: str | None = option(
        "spread the run over all devices: layers along an axis model, the tokens of each text along an axis "
        "seq, batches along others", None,
        metavar="data=2,model=4",
    )  # fmt: skip
    fsdp: bool = option("store a part of each weight on each device, and gather the weights for use", False)
    coordinator: str | None = option(
        "for several processes: the address of the first one", None, metavar="HOST:PORT"
    )
    process_id: int | None = option(
        "the number of this process, from 0", None, type=number(int, 0), metavar="I"
    )
    num_processes: int | None = option("the number of processes", None, type=SIZE, metavar="N")


# The order of settings, both in `--help` and in `run.json`. Task options come directly after `task`, and
# anything not listed here comes last.
_ORDER = """
    model data output eval_data held_out task max_length quantize block_size target train_tokens adapter
    rank alpha dropout rslora dora freeze_a invocation lora_plus steps epochs batch_size accumulate
    learning_rate schedule warmup weight_decay clip optimizer_bits seed checkpoint_every eval_every
    compute_dtype attention remat loss_chunk pack scan_layers merge format outtype tensorboard
    compilation_cache mesh fsdp coordinator process_id num_processes
"""


def in_order(parts: Iterable[Any], tasks: Iterable[Any]) -> list[dataclasses.Field[Any]]:
    """Sorts all options of settings and tasks into command-line order."""
    places = {name: place for place, name in enumerate(_ORDER.split())}
    fields = [field for part in parts for field in dataclasses.fields(part)]
    fields.sort(key=lambda field: places.get(field.name, len(places)))
    last = 1 + [field.name for field in fields].index("task")
    return [*fields[:last], *(field for task in tasks for field in dataclasses.fields(task)), *fields[last:]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    train: TrainSettings
    data: DataSettings
    run: RunSettings

    def fingerprint(self) -> dict[str, Any]:
        """Returns all settings affecting the result. This can be saved as JSON.

        A run can only be resumed if these are the same as before. Files also have a digest, in case they have
        been modified.
        """
        task, parts = self.data.task, [self.train, self.data]
        tasks = [] if task is None else [task]
        values = {name: value for part in (*parts, *tasks) for name, value in vars(part).items()}
        options = {field.name: values[field.name] for field in in_order(parts, tasks)}
        options["task"] = None if task is None else task.name
        files = {name: path for name, path in options.items() if isinstance(path, Path)}
        options |= {name: "-" if is_stream(path) else str(path.resolve()) for name, path in files.items()}
        digests = {f"sha256 of {name}": _digest(path) for name, path in files.items()}
        return options | digests | {name: list(x) for name, x in options.items() if isinstance(x, tuple)}


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file, or of all file names and contents for a checkpoint folder."""
    if not path.is_dir():
        with open_data(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    parts = sorted(part for part in path.iterdir() if part.suffix in (".json", ".safetensors"))
    return hashlib.sha256("".join(f"{x.name} {_digest(x)}\n" for x in parts).encode()).hexdigest()


def is_stream(path: Path) -> bool:
    """Returns whether a file can only be read once, i.e. a pipe, a device, or `-` for standard input."""
    return path == Path("-") or (path.exists() and not path.is_file() and not path.is_dir())


def open_data(path: Path) -> io.BufferedIOBase:
    """Opens a data file. Runs read data twice, so streams are kept in memory until `forget_streams`.

    **Raises:** `FileNotFoundError` if the file doesn't exist.
    """
    if not is_stream(path):
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}: it must have a JSON object on each line.")
        return open(path, "rb")
    return io.BytesIO(_contents(path))


@functools.cache
def _contents(path: Path) -> bytes:
    return sys.stdin.buffer.read() if path == Path("-") else path.read_bytes()


forget_streams = _contents.cache_clear
