"""The command line of fine-tuning."""

import argparse
import dataclasses
import sys

from ..._arguments import importing_extra
from .._allocator import keep_memory
from .._interrupts import interrupts_deferred, take_interrupt
from .settings import FinetuneError, Settings

_ABOUT = """\
QLoRA on a transformers checkpoint directory (decoders of many families, BERT, ModernBERT; full precision, or
4-bit from bitsandbytes). Writes an adapter that PEFT loads, or one of a type of your own (--adapter). Run the
same command again to resume a run.

data, one JSON object per line:
  decoders            {"text": ...}  or  {"prompt": ..., "completion": ...}  or
                      {"messages": [{"role": "user", "content": ...}, ...]}, with its chat template
  ... --task dpo      {"prompt": ..., "chosen": ..., "rejected": ...}
  ... --task distill  as without it; a --teacher's probabilities are learned, too
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
    for field in dataclasses.fields(Settings):
        options = {**field.metadata}
        if field.default is False:
            options["action"] = "store_true"
        elif field.default is dataclasses.MISSING:
            options["required"] = True
        elif field.default not in (None, False, ()):
            options["help"] += f" (default: {field.default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", **options)
    return parser


def main(argv: list[str] | None = None, prog: str = "python -m quaxlike.lm.finetune") -> int:
    """Runs the command; the exit status is 2 if it cannot start, 130 if it was interrupted."""
    # Arguments first: importing JAX takes seconds.
    parser = _parser(prog)
    arguments = vars(parser.parse_args(argv))
    for several in ("target", "train_tokens"):
        arguments[several] = tuple(arguments.get(several, ()))
    if arguments.get("adapter") == "lora":  # which is what it trains without one, with options of its own
        del arguments["adapter"]
    settings = Settings(**arguments)
    options = ("rank", "alpha", "dropout", "rslora", "dora", "invocation", "freeze_a", "lora_plus")
    of_lora = [f"--{name.replace('_', '-')}" for name in options if name in arguments]
    if settings.adapter is not None and of_lora:
        parser.error(f"{', '.join(of_lora)} cannot be used with --adapter: these are options of LoRA")
    if settings.invocation is not None:
        for option in ("dora", "merge"):  # they need one weight for all tokens
            if getattr(settings, option):
                parser.error(f"--{option} cannot be used with --invocation")
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
    keep_memory()
    with importing_extra(parser, "lm"):
        from ..._cache import keep_programs
        from ...files.errors import CheckpointError
        from ..folders.model_config import UnsupportedConfigError
        from .devices import is_main_process, join
        from .report import console_on
        from .run import adapter_file, finetune, merged
    console = console_on()
    try:
        take_interrupt()
        join(settings)
        console.quiet = not is_main_process()
        keep_programs(settings.compilation_cache, console.print)
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
    console.print(f"Adapter: {adapter_file(settings)}")
    if settings.merge:
        console.print(f"Merged: {merged(settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
