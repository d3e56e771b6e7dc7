"""The command line of fine-tuning."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from .._arguments import importing_extra, number
from .._interrupts import interrupts_deferred, take_interrupt
from .settings import FinetuneError, Settings

_ABOUT = """\
QLoRA on a transformers checkpoint directory (decoders of many families, BERT, ModernBERT; full precision, or
4-bit from bitsandbytes). Writes an adapter that PEFT loads. Run the same command again to resume a run.

data, one JSON object per line:
  decoders            {"text": ...}  or  {"prompt": ..., "completion": ...}  or
                      {"messages": [{"role": "user", "content": ...}, ...]}, with its chat template
  encoders            {"anchor": ..., "positive": ...}: two texts that belong together; for decoders with
                      sentence-transformers' modules.json, too
  ...Classification   {"text": ..., "label": 0}
"""


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}

    def add(name: str, help: str, **options: Any) -> None:
        default = defaults[name.removeprefix("--").replace("-", "_")]
        is_shown = default not in (None, False, (), dataclasses.MISSING)
        parser.add_argument(name, help=f"{help} (default: {default})" if is_shown else help, **options)

    size, share = number(int, 1), number(float, 0, 1)
    add(
        "--model",
        "checkpoint directory: config.json, model.safetensors, tokenizer.json",
        type=Path,
        required=True,
        metavar="DIR",
    )
    add("--data", "training data", type=Path, required=True, metavar="FILE.jsonl")
    add(
        "--output",
        "directory for the adapter, the log and the checkpoint of the run",
        type=Path,
        required=True,
        metavar="DIR",
    )
    add("--eval-data", "evaluation data, instead of a share of --data", type=Path, metavar="FILE.jsonl")
    add("--held-out", "share of --data held out for evaluation", type=share)
    add("--max-length", "tokens per text; more are cut (default: 256, or the model's limit)", type=size)
    add(
        "--quantize",
        "how to quantise weights, unless they are in 4 bits already",
        choices=["nf4", "fp4", "int8", "int4", "none"],
    )
    add(
        "--block-size",
        "weights that share a scale; smaller blocks can be split across more devices (default: 64)",
        type=size,
        metavar="N",
    )
    add(
        "--target",
        "layers to adapt, by the ends of their names (default: all linear layers)",
        nargs="+",
        metavar="NAME",
    )
    add(
        "--train-tokens",
        "train the embeddings of these tokens too, and save only these rows",
        type=number(int, 0),
        nargs="+",
        metavar="ID",
    )
    add("--rank", "of the adapters", type=size)
    add("--alpha", "adapters are scaled with alpha / rank", type=number(float, 0))
    add("--dropout", "on the inputs of adapters", type=number(float, 0, 0.99))
    add("--rslora", "scale with alpha / sqrt(rank)", action="store_true")
    add("--dora", "train the norms of rows separately from their directions", action="store_true")
    add("--steps", "updates of the weights, instead of --epochs", type=size)
    add("--epochs", "passes over the data", type=number(float, 0))
    add("--batch-size", "examples per batch", type=size)
    add("--accumulate", "batches per step", type=size)
    add("--learning-rate", "the peak learning rate", type=number(float, 0))
    add("--schedule", "how the learning rate decays", choices=["cosine", "linear", "constant"])
    add("--warmup", "share of steps in which the learning rate rises", type=share)
    add("--weight-decay", "of AdamW", type=number(float, 0))
    add("--clip", "maximum norm of the gradient, 0 for no limit", type=number(float, 0))
    add("--seed", "of adapters, batches, dropout and held-out data", type=number(int, 0, 2**32 - 1))
    add("--checkpoint-every", "steps between checkpoints", type=size)
    add("--eval-every", "steps between evaluations (default: before and after only)", type=size, metavar="N")
    add(
        "--compute-dtype",
        "of activations and frozen weights; adapters are in float32 (default: as stored)",
        choices=["bfloat16", "float16", "float32"],
    )
    add(
        "--remat",
        "recompute layers for the gradient, and keep nothing of them (the default without a value), or only "
        "the results of matrix products (dots)",
        nargs="?",
        const="nothing",
        choices=["nothing", "dots"],
    )
    add("--loss-chunk", "tokens whose logits are computed at a time", type=size, metavar="N")
    add("--pack", "pack several texts into a row; they do not see each other", action="store_true")
    add(
        "--scan-layers",
        "scan over equal layers, so that compile time does not grow with their number",
        action="store_true",
    )
    add(
        "--merge",
        "also write a merged checkpoint to --output/merged (or merged.gguf): the file's weights with the "
        "trained changes (dense, the default without a value), or the quantised weights, rounded again "
        "(quantized)",
        nargs="?",
        const="dense",
        choices=["dense", "quantized"],
    )
    add(
        "--format",
        "of the merged checkpoint: a folder that transformers loads, or a file with the tokeniser in it that "
        "llama.cpp runs",
        choices=["safetensors", "gguf"],
    )
    add(
        "--outtype",
        "how the weights of a GGUF file are stored (default: as the merged model has them)",
        choices=["f32", "f16", "bf16", "q8_0", "q4_0"],
    )
    add("--tensorboard", "also write metrics for TensorBoard to --output", action="store_true")
    add(
        "--mesh",
        "spread the run over all devices: layers along an axis model, batches along others",
        metavar="data=2,model=4",
    )
    add(
        "--fsdp",
        "store a part of each weight on each device, and gather the weights for use",
        action="store_true",
    )
    add("--coordinator", "for several processes: the address of the first one", metavar="HOST:PORT")
    add("--process-id", "the number of this process, from 0", type=number(int, 0), metavar="I")
    add("--num-processes", "the number of processes", type=size, metavar="N")
    return parser


def main(argv: list[str] | None = None, *, prog: str = "python -m quaxlike.finetune") -> int:
    """Runs the command; the exit status is 2 if it cannot start, 130 if it was interrupted."""
    # Arguments first: importing JAX takes seconds.
    parser = _parser(prog)
    arguments = vars(parser.parse_args(argv))
    for several in ("target", "train_tokens"):
        arguments[several] = tuple(arguments.get(several, ()))
    settings = Settings(**arguments)
    several = {settings.coordinator, settings.process_id, settings.num_processes}
    if None in several and len(several) > 1:
        parser.error("--coordinator, --process-id and --num-processes must be used together")
    if settings.format == "gguf" and settings.merge != "dense":
        parser.error("--format gguf must be used with --merge, which makes the weights that it holds")
    if settings.outtype is not None and settings.format != "gguf":
        parser.error("--outtype must be used with --format gguf")
    stopped = f"Stopped. The same command resumes from the last checkpoint in {settings.output}."
    with interrupts_deferred(stopped):
        return _run(parser, settings, stopped)


def _run(parser: argparse.ArgumentParser, settings: Settings, stopped: str) -> int:
    with importing_extra(parser):
        from ..interop import CheckpointError
        from ..models import UnsupportedConfigError
        from .devices import is_main_process, join
        from .report import console_on
        from .run import finetune, merged
    console = console_on()
    try:
        take_interrupt()
        join(settings)
        console.quiet = not is_main_process()
        metrics = finetune(settings, console)
        take_interrupt()
    except (OSError, CheckpointError, FinetuneError, UnsupportedConfigError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print(stopped)
        return 130
    except (RuntimeError, ValueError) as error:  # XLA has several types for a lost connection
        if settings.coordinator is not None:
            error.add_note(
                "If another process is gone, start all of them again with the same commands: they resume "
                "from the last checkpoint."
            )
        raise
    for name, before in metrics["before"].items():
        console.print(f"held-out {name}: {before:.4f} before, {metrics['after'][name]:.4f} after")
    console.print(f"Adapter: {settings.output}")
    if settings.merge:
        console.print(f"Merged: {merged(settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
