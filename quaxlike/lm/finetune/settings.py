"""The settings of a fine-tuning run, which are the options of the command line."""

# ruff: noqa: RUF009 (calls that make fields)

import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from ..._arguments import COMPILATION_CACHE, number
from ...files.errors import ErrorAboutFiles


class FinetuneError(ErrorAboutFiles):
    """A run cannot start or continue, for the reason in the message."""


def _option(help: str, default: Any = dataclasses.MISSING, **of_argument: Any) -> Any:
    """A setting, with the options of its command-line argument: those of `argparse`."""
    return dataclasses.field(default=default, metadata={"help": help, **of_argument})


_SIZE, _SHARE = number(int, 1), number(float, 0, 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the command line; `python -m quaxlike.lm.finetune --help` describes them."""

    model: Path = _option(
        "checkpoint directory: config.json, model.safetensors, tokenizer.json", type=Path, metavar="DIR"
    )
    data: Path = _option("training data", type=Path, metavar="FILE.jsonl")
    output: Path = _option(
        "directory for the adapter, the log and the checkpoint of the run", type=Path, metavar="DIR"
    )
    eval_data: Path | None = _option(
        "evaluation data, instead of a share of --data", None, type=Path, metavar="FILE.jsonl"
    )
    held_out: float | int = _option("share of --data held out for evaluation", 0.1, type=_SHARE)
    task: str | None = _option(
        "dpo: prefer one of two texts; distill: learn a teacher's probabilities (default: what it is made "
        "for)", None, choices=["dpo", "distill"],
    )  # fmt: skip
    beta: float | int = _option(
        "of --task dpo: how close the model stays to the one without adapters", 0.1, type=number(float, 0)
    )
    teacher: Path | None = _option(
        "of --task distill: checkpoint directory of the teacher, with the same tokeniser (default: --model, "
        "before it is quantised)", None, type=Path, metavar="DIR",
    )  # fmt: skip
    temperature: float | int = _option(
        "of --task distill: what both models' logits are divided by", 1.0, type=number(float, 1e-3)
    )
    teacher_share: float | int = _option(
        "of --task distill: share of the loss that is the teacher's; the rest is that of the data", 0.5,
        type=_SHARE,
    )  # fmt: skip
    max_length: int | None = _option(
        "tokens per text; more are cut (default: 256, or the model's limit)", None, type=_SIZE
    )
    quantize: str = _option(
        "how to quantise weights, unless they are in 4 bits already", "nf4",
        choices=["nf4", "fp4", "int8", "int4", "none"],
    )  # fmt: skip
    block_size: int | None = _option(
        "weights that share a scale; smaller blocks can be split across more devices (default: 64)", None,
        type=_SIZE, metavar="N",
    )  # fmt: skip
    target: tuple[str, ...] = _option(
        "layers to adapt, by the ends of their names (default: all linear layers)",
        (),
        nargs="+",
        metavar="NAME",
    )
    train_tokens: tuple[int, ...] = _option(
        "train the embeddings of these tokens too, and save only these rows", (),
        type=number(int, 0), nargs="+", metavar="ID",
    )  # fmt: skip
    adapter: str | None = _option(
        "adapt weights with a type of your own instead of LoRA: a class with a class method `make`, or a "
        "function, that is called as make(w, key=..., layout=...); or by another method, such as ia3", None,
        metavar="MODULE:NAME",
    )  # fmt: skip
    rank: int = _option("of the adapters", 8, type=_SIZE)
    alpha: float | int = _option("adapters are scaled with alpha / rank", 16, type=number(float, 0))
    dropout: float | int = _option("on the inputs of adapters", 0.0, type=number(float, 0, 0.99))
    rslora: bool = _option("scale with alpha / sqrt(rank)", False)
    dora: bool = _option("train the norms of rows separately from their directions", False)
    freeze_a: bool = _option("train only the second matrix of each adapter (LoRA-FA)", False)
    invocation: str | None = _option(
        "adapters act on each text from the last place on where this one stands in it, so that what the "
        "model without them has cached of the text before stays valid (activated LoRA)", None, metavar="TEXT",
    )  # fmt: skip
    lora_plus: float | int | None = _option(
        "the learning rate of the second matrix, divided by --learning-rate (LoRA+; default: the same)", None,
        type=number(float, 1), metavar="RATIO",
    )  # fmt: skip
    steps: int | None = _option("updates of the weights, instead of --epochs", None, type=_SIZE)
    epochs: float | int = _option("passes over the data", 3, type=number(float, 0))
    batch_size: int = _option("examples per batch", 16, type=_SIZE)
    accumulate: int = _option("batches per step", 1, type=_SIZE)
    learning_rate: float | int = _option("the peak learning rate", 2e-4, type=number(float, 0))
    schedule: str = _option(
        "how the learning rate decays", "cosine", choices=["cosine", "linear", "constant"]
    )
    warmup: float | int = _option("share of steps in which the learning rate rises", 0.1, type=_SHARE)
    weight_decay: float | int = _option("of AdamW", 0.0, type=number(float, 0))
    clip: float | int = _option("maximum norm of the gradient, 0 for no limit", 1.0, type=number(float, 0))
    optimizer_bits: int | None = _option(
        "of the moments that AdamW keeps; those of small arrays stay in float32 (default: float32)", None,
        type=int, choices=[8, 4],
    )  # fmt: skip
    seed: int = _option("of adapters, batches, dropout and held-out data", 0, type=number(int, 0, 2**32 - 1))
    checkpoint_every: int = _option("steps between checkpoints", 50, type=_SIZE)
    eval_every: int | None = _option(
        "steps between evaluations (default: before and after only)", None, type=_SIZE, metavar="N"
    )
    compute_dtype: str | None = _option(
        "of activations and frozen weights; adapters are in float32 (default: as stored)", None,
        choices=["bfloat16", "float16", "float32"],
    )  # fmt: skip
    attention: str | None = _option(
        "compute attention by a library's kernel where it takes the case: cudnn on NVIDIA's GPUs, splash on "
        "TPUs (default: by blocks)", None,
        choices=["cudnn", "splash"],
    )  # fmt: skip
    remat: str | None = _option(
        "recompute layers for the gradient, and keep nothing of them (the default without a value), or only "
        "the results of matrix products (dots)", None,
        nargs="?", const="nothing", choices=["nothing", "dots"],
    )  # fmt: skip
    loss_chunk: int = _option("tokens whose logits are computed at a time", 1024, type=_SIZE, metavar="N")
    pack: bool = _option("pack several texts into a row; they do not see each other", False)
    scan_layers: bool | None = _option(
        "scan over equal layers, so that compile time does not grow with their number (default: if the model "
        "is a decoder with equal layers)", None, action=argparse.BooleanOptionalAction,
    )  # fmt: skip
    merge: str | None = _option(
        "also write a merged checkpoint to --output/merged (or merged.gguf): the file's weights with the "
        "trained changes (dense, the default without a value), or the quantised weights, rounded again "
        "(quantized)", None,
        nargs="?", const="dense", choices=["dense", "quantized"],
    )  # fmt: skip
    format: str = _option(
        "of the merged checkpoint: a folder that transformers loads, or a file with the tokeniser in it that "
        "llama.cpp runs", "safetensors",
        choices=["safetensors", "gguf"],
    )  # fmt: skip
    outtype: str | None = _option(
        "how the weights of a GGUF file are stored (default: as the merged model has them)", None,
        choices=["f32", "f16", "bf16", "q8_0", "q4_0"],
    )  # fmt: skip
    tensorboard: bool = _option("also write metrics for TensorBoard to --output", False)
    compilation_cache: str | None = _option(COMPILATION_CACHE, None, metavar="DIR|off")
    mesh: str | None = _option(
        "spread the run over all devices: layers along an axis model, the tokens of each text along an axis "
        "seq, batches along others", None,
        metavar="data=2,model=4",
    )  # fmt: skip
    fsdp: bool = _option("store a part of each weight on each device, and gather the weights for use", False)
    coordinator: str | None = _option(
        "for several processes: the address of the first one", None, metavar="HOST:PORT"
    )
    process_id: int | None = _option(
        "the number of this process, from 0", None, type=number(int, 0), metavar="I"
    )
    num_processes: int | None = _option("the number of processes", None, type=_SIZE, metavar="N")

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the result depends on, as JSON: runs with equal fingerprints are the same run."""
        free = {
            *("output", "checkpoint_every", "eval_every", "tensorboard", "merge", "format", "outtype"),
            "compilation_cache",
            *("attention", "mesh", "fsdp", "coordinator", "process_id", "num_processes"),
        }
        options = {name: value for name, value in dataclasses.asdict(self).items() if name not in free}
        of_tasks = {"dpo": ("beta",), "distill": ("teacher", "temperature", "teacher_share")}
        for name in (name for task, names in of_tasks.items() if task != self.task for name in names):
            del options[name]
        files = {name: path for name, path in options.items() if isinstance(path, Path)}
        options |= {name: str(path.resolve()) for name, path in files.items()}
        digests = {f"sha256 of {name}": _digest(path) for name, path in files.items()}
        return options | digests | {"target": list(self.target), "train_tokens": list(self.train_tokens)}


def _digest(path: Path) -> str:
    """The SHA-256 of a file, or of the names and contents of a checkpoint's files."""
    if not path.is_dir():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    parts = sorted(part for part in path.iterdir() if part.suffix in (".json", ".safetensors"))
    return hashlib.sha256("".join(f"{x.name} {_digest(x)}\n" for x in parts).encode()).hexdigest()
