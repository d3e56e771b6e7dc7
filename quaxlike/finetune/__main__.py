"""The command line of fine-tuning."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from .._arguments import importing_extra, number
from .settings import FinetuneError, Settings

_ABOUT = """\
QLoRA on a checkpoint directory of transformers (decoders of many families, or BERT; in full, or in 4 bits
by bitsandbytes). Writes an adapter that PEFT loads. The same command goes on with a run that was stopped.

data, one JSON object a line:
  decoders            {"text": ...}  or  {"prompt": ..., "completion": ...}  or
                      {"messages": [{"role": "user", "content": ...}, ...]}: by the checkpoint's chat template
  BertModel           {"anchor": ..., "positive": ...}: two texts that belong together
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
        told = default not in (None, False, (), dataclasses.MISSING)
        parser.add_argument(name, help=f"{help} (default: {default})" if told else help, **options)

    size, share = number(int, 1), number(float, 0, 1)
    add(
        "--model",
        "checkpoint directory: config.json, model.safetensors, tokenizer.json",
        type=Path,
        required=True,
        metavar="DIR",
    )
    add("--data", "what to train on", type=Path, required=True, metavar="FILE.jsonl")
    add(
        "--output",
        "where the adapter goes, beside log and checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
    )
    add("--eval-data", "what to measure on, in place of a share of --data", type=Path, metavar="FILE.jsonl")
    add("--held-out", "share of --data to measure on", type=share)
    add("--max-length", "tokens of a text; more are cut (default: 256, or what the model allows)", type=size)
    add(
        "--quantize",
        "how weights are stored, unless they are in 4 bits already",
        choices=["nf4", "fp4", "int8", "int4", "none"],
    )
    add(
        "--block-size",
        "how many weights share a scale: smaller blocks can be divided between more devices (default: 64)",
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
        "trains the embeddings of these tokens, too, and saves them alone",
        type=number(int, 0),
        nargs="+",
        metavar="ID",
    )
    add("--rank", "of the adapters", type=size)
    add("--alpha", "adapters are scaled with alpha / rank", type=number(float, 0))
    add("--dropout", "on the inputs of adapters", type=number(float, 0, 0.99))
    add("--rslora", "scale with alpha / sqrt(rank)", action="store_true")
    add("--dora", "train the norms of rows apart from their directions", action="store_true")
    add("--steps", "updates of the weights, in place of --epochs", type=size)
    add("--epochs", "how often the data is gone through", type=number(float, 0))
    add("--batch-size", "examples at a time", type=size)
    add("--accumulate", "batches a step", type=size)
    add("--learning-rate", "the highest", type=number(float, 0))
    add("--schedule", "how the learning rate falls", choices=["cosine", "linear", "constant"])
    add("--warmup", "share of steps in which it rises", type=share)
    add("--weight-decay", "of AdamW", type=number(float, 0))
    add("--clip", "largest norm of a gradient, 0 for any", type=number(float, 0))
    add("--seed", "of adapters, batches, dropout and what is held out", type=number(int, 0, 2**32 - 1))
    add("--checkpoint-every", "steps between checkpoints", type=size)
    add("--eval-every", "steps between evaluations (default: before and after only)", type=size, metavar="N")
    add(
        "--compute-dtype",
        "of activations, and of weights that stay as they are; adapters are in float32 (default: as stored)",
        choices=["bfloat16", "float16", "float32"],
    )
    add(
        "--remat",
        "computes layers again for the gradient, and keeps of them: nothing (the default if given alone), or "
        "the results of matrix products",
        nargs="?",
        const="nothing",
        choices=["nothing", "dots"],
    )
    add("--loss-chunk", "tokens of a batch that have logits at a time", type=size, metavar="N")
    add("--pack", "puts several texts into a row, which do not see each other", action="store_true")
    add(
        "--scan-layers",
        "trains equal layers as one, so that compiling does not take longer for more of them",
        action="store_true",
    )
    add(
        "--merge",
        "writes a checkpoint, too, to --output/merged: the weights as they were in the file, with what was "
        "trained (dense, the default if given alone); or as they are stored, which rounds anew (quantized)",
        nargs="?",
        const="dense",
        choices=["dense", "quantized"],
    )
    add("--tensorboard", "writes figures for TensorBoard to --output, too", action="store_true")
    add(
        "--mesh",
        "spreads the run over all devices: along an axis model, layers; along others, batches",
        metavar="data=2,model=4",
    )
    add(
        "--fsdp",
        "stores a part of each weight on each device, which gather them for use",
        action="store_true",
    )
    add("--coordinator", "of several processes: where the first one is reached", metavar="HOST:PORT")
    add("--process-id", "which of them this is, from 0 on", type=number(int, 0), metavar="I")
    add("--num-processes", "how many there are", type=size, metavar="N")
    return parser


def main(argv: list[str] | None = None, *, prog: str = "python -m quaxlike.finetune") -> int:
    """Runs the command; the exit status is 2 where it cannot start, 130 where it was interrupted."""
    # Arguments first: importing JAX takes seconds.
    parser = _parser(prog)
    arguments = vars(parser.parse_args(argv))
    for several in ("target", "train_tokens"):
        arguments[several] = tuple(arguments.get(several, ()))
    settings = Settings(**arguments)
    several = {settings.coordinator, settings.process_id, settings.num_processes}
    if None in several and len(several) > 1:
        parser.error("--coordinator, --process-id and --num-processes are given together")
    with importing_extra(parser):
        from rich.console import Console

        from ..interop import CheckpointError
        from ..models import UnsupportedConfigError
        from .devices import join, leads
        from .run import MERGED, finetune
    console = Console(soft_wrap=True)
    try:
        join(settings)
        console.quiet = not leads()
        metrics = finetune(settings, console)
    except (OSError, CheckpointError, FinetuneError, UnsupportedConfigError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print(f"Stopped. The same command goes on from the last checkpoint in {settings.output}.")
        return 130
    for name, before in metrics["before"].items():
        console.print(f"held-out {name}: {before:.4f} before, {metrics['after'][name]:.4f} after")
    console.print(f"Adapter: {settings.output}")
    if settings.merge:
        console.print(f"Merged: {settings.output / MERGED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
