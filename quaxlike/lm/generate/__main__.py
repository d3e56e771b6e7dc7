"""The command-line interface for text generation."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ..._arguments import COMPILATION_CACHE, Parser, importing_extra, number
from .._interrupts import interrupts_deferred

_ABOUT = """\
Continues texts, or talks, with a transformers checkpoint directory or a GGUF file. A single text is streamed;
several, which --prompt takes at once, are written when they are complete.
"""


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description=_ABOUT)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a directory with config.json, weights and tokenizer.json, or a GGUF file",
    )
    add("--adapter", type=Path, metavar="DIR", help="an adapter that PEFT or quaxlike.lm.finetune wrote")
    add("--quantize", choices=["nf4", "fp4", "int8", "int4"], help="how to quantise weights")
    add(
        "--compute-dtype",
        choices=["bfloat16", "float16", "float32"],
        help="of activations and weights (default: as stored; float32 for GGUF files)",
    )
    add(
        "--compute",
        choices=["int8", "bfloat16"],
        help="round the inputs of quantised weights: int8, on a CPU, as llama.cpp does",
    )
    add("--cache", choices=["bfloat16", "int8", "q8_0", "q4_0", "nf4"], help="how to store keys and values")
    add("--mesh", metavar="model=4", help="split layers across all devices, along an axis model")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", nargs="+", metavar="TEXT", help="texts to continue")
    what.add_argument("--chat", action="store_true", help="talk to the model, by its chat template")
    what.add_argument("--message", metavar="TEXT", help="a single message to answer, by the chat template")
    add("--system", metavar="TEXT", help="what the system tells the model before a chat or a message")
    add("--max-new-tokens", type=number(int, 1), default=128, help="default: 128")
    add("--temperature", type=number(float, 0), default=0.0, help="0, the default, takes the likeliest token")
    add("--top-k", type=number(int, 1), help="sample from only this many of the likeliest tokens")
    add("--top-p", type=number(float, 1e-9, 1), help="sample from the likeliest of this total probability")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of the sampling (default: 0)")
    add("--compilation-cache", metavar="DIR|off", help=COMPILATION_CACHE)
    return parser


def main(argv: list[str] | None = None, prog: str = "python -m quaxlike.lm.generate") -> int:
    """Runs the command. The exit status is 2 if it can't start, and 130 after Ctrl-C."""
    # Importing JAX takes seconds, so parse the arguments first to report mistakes immediately.
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    if arguments.prompt is not None and arguments.system is not None:
        parser.error("--system goes with --chat or --message")
    if arguments.chat:  # a chat handles interrupts itself
        return _run(parser, arguments)
    with interrupts_deferred("", patience=0):
        return _run(parser, arguments)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    with importing_extra(parser, "lm"):
        from ..._cache import keep_programs
        from ...files.errors import CheckpointError
        from ..folders.model_config import UnsupportedConfigError
        from .run import GenerateError, run
    start = time.perf_counter()
    try:
        keep_programs(arguments.compilation_cache, _say)
        clock = run(arguments, sys.stdout, _say)
    except (OSError, CheckpointError, GenerateError, UnsupportedConfigError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    _tell(clock, time.perf_counter() - start)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tell(clock: Any, seconds: float) -> None:
    report = f"{clock.tokens} tokens in {seconds:.1f} s"
    if clock.timed and clock.seconds:
        report += f"; {clock.timed / clock.seconds:.1f} tokens per second, compilation apart"
    _say(report)


if __name__ == "__main__":
    sys.exit(main())
