"""The command-line interface for fine-tuning."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._arguments import Parser, importing_extra
from .._allocator import keep_memory
from .._interrupts import interrupts_deferred, status_of, take_interrupt
from .options import TASK_SETTINGS, options, settings_of
from .settings import FinetuneError, Settings
from .state import Saved
from .tasks import TASKS

_ABOUT = f"""\
QLoRA on a transformers checkpoint directory (decoders of many families, BERT, ModernBERT; full precision, or
4-bit from bitsandbytes). Writes an adapter that PEFT loads, or one of a type of your own (--adapter). Run the
same command again to resume a run.

data, one JSON object per line:
{"".join(task.help for task in TASKS)}"""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    for option in options():
        of_argument: dict[str, Any] = {**option.metadata}
        if option.name == "task":
            about = [f"{name}: {task.about}" for name, task in TASK_SETTINGS.items()]
            of_argument["help"] = f"{'; '.join(about)} {of_argument['help']}"
            of_argument["choices"] = list(TASK_SETTINGS)
        if option.default is False:
            of_argument["action"] = "store_true"
        elif option.default is dataclasses.MISSING:
            of_argument["required"] = True
        elif option.default not in (None, False, ()):
            of_argument["help"] += f" (default: {option.default})"
        parser.add_argument(_flag(option.name), **of_argument)
    return parser


def main(argv: list[str] | None = None, prog: str = "python -m quaxlike.lm.finetune") -> int:
    """Runs the command. Exits with status 2 if it can't start, 130 after Ctrl-C, or 143 after SIGTERM."""
    parser = _parser(prog)
    arguments = vars(parser.parse_args(argv))
    for several in ("target", "train_tokens"):
        arguments[several] = tuple(arguments.get(several, ()))
    if arguments.get("adapter") == "lora":  # the default, with more options
        del arguments["adapter"]
    try:
        settings = settings_of(**arguments)
    except FinetuneError as error:
        return _fail(parser, error)
    _check_together(parser, arguments, settings)
    saved = Saved(settings.run.output)
    with interrupts_deferred(saved, signals=[signal.SIGINT, signal.SIGTERM]):
        return _run(parser, settings, saved)


def _check_together(
    parser: argparse.ArgumentParser, arguments: Mapping[str, Any], settings: Settings
) -> None:
    """Exits with an error if two options don't go together."""
    train, run = settings.train, settings.run
    made = ("rank", "alpha", "dropout", "rslora", "dora", "invocation")

    def given(names: Any) -> Any:
        return ", ".join(_flag(x) for x in names if arguments.get(x, ()) != ())

    of_lora = given((*made, "freeze_a", "lora_plus"))
    if isinstance(train.adapter, Path):
        if settled := given((*made, "target", "train_tokens")):
            parser.error(f"{settled} cannot be used with the adapter in {train.adapter}, which settles this")
    elif train.adapter is not None and of_lora:
        parser.error(f"{of_lora} cannot be used with --adapter: these are options of LoRA")
    if train.invocation is not None:
        for option, value in {"dora": train.dora, "merge": run.merge}.items():
            if value:  # these only work if all tokens use the same weights
                parser.error(f"--{option} cannot be used with --invocation")
    several = {run.coordinator, run.process_id, run.num_processes}
    if None in several and len(several) > 1:
        parser.error("--coordinator, --process-id and --num-processes must be used together")
    if run.format == "gguf" and run.merge != "dense":
        parser.error("--format gguf must be used with --merge, which makes the weights that it holds")
    if run.outtype is not None and run.format != "gguf":
        parser.error("--outtype must be used with --format gguf")


def _run(parser: argparse.ArgumentParser, settings: Settings, saved: Saved) -> int:
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
        join(settings.run)
        console.quiet = not is_main_process()
        saved.here = is_main_process()
        keep_programs(settings.run.compilation_cache, console.print)
        metrics = finetune(settings, console, saved)
        take_interrupt()
    except (OSError, CheckpointError, FinetuneError, UnsupportedConfigError) as error:
        return _fail(parser, error)
    except KeyboardInterrupt as error:
        console.print(f"{saved}", markup=False)
        return status_of(error)
    except (RuntimeError, ValueError) as error:  # XLA raises various types if a connection breaks
        if settings.run.coordinator is not None:
            error.add_note(
                "If another process is gone, start all of them again with the same commands: they resume "
                "from the last checkpoint."
            )
        raise
    for name, before in metrics["before"].items():
        console.print(f"held-out {name}: {before:.4f} before, {metrics['after'][name]:.4f} after")
    console.print(f"Adapter: {adapter_file(settings.train, settings.run)}")
    if settings.run.merge:
        console.print(f"Merged: {merged(settings.run)}")
    return 0


def _fail(parser: argparse.ArgumentParser, error: Exception) -> int:
    print(f"{parser.prog}: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
