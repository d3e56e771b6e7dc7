"""The command line of conversion: a checkpoint of any known format to safetensors or GGUF."""

import sys
from pathlib import Path

from .._arguments import Parser, importing_extra

_ABOUT = """\
Reads a checkpoint of any known format, and writes a directory of safetensors for transformers, or a GGUF file
for llama.cpp if OUT ends in .gguf. Weights keep the format that they are stored in, unless --quantize says
another.
"""


def main(argv: list[str] | None = None, prog: str = "python -m quaxlike.lm.convert") -> int:
    """Runs the command; the exit status is 2 if it cannot read, convert or write."""
    parser = Parser(prog=prog, description=_ABOUT)
    parser.add_argument("source", type=Path, metavar="IN", help="a checkpoint directory or a GGUF file")
    parser.add_argument("target", type=Path, metavar="OUT", help="a directory, or a file that ends in .gguf")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="an adapter to merge, which PEFT or quaxlike wrote"
    )
    parser.add_argument(
        "--quantize",
        metavar="FORMAT",
        help="of a GGUF file: f32, f16, bf16, q8_0 or q4_0; of safetensors: a scheme of quaxlike.quantize",
    )
    arguments = parser.parse_args(argv)
    with importing_extra(parser, "lm"):
        from ..files.errors import CheckpointError
        from ..surgery.merge import merge
        from ..surgery.quantize import quantize
        from .adapter_folder import read_adapter
        from .folders.model_config import UnsupportedConfigError
        from .loading import load, save
    to_gguf = arguments.target.suffix == ".gguf"
    try:
        model, _ = load(arguments.source)
        if arguments.adapter is not None:
            model = merge(read_adapter(arguments.adapter, model))
        if arguments.quantize is not None and not to_gguf:
            model = quantize(model, arguments.quantize)
        save(
            arguments.target,
            model,
            arguments.source,
            format="gguf" if to_gguf else "safetensors",
            quantize=arguments.quantize if to_gguf else None,
        )
    except (OSError, ValueError, CheckpointError, UnsupportedConfigError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(f"Written: {arguments.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
