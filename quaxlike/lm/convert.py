"""The command for converting a checkpoint, either to safetensors or to GGUF."""

import sys
from pathlib import Path
from typing import Any

from .._arguments import Parser, importing_extra

_ABOUT = """\
Reads a checkpoint of any known format, and writes a directory of safetensors for transformers, or a GGUF file
for llama.cpp if OUT ends in .gguf. Weights keep the format that they are stored in, unless --quantize says
another. Weights that no format of transformers holds are written in quaxlike's own, which quaxlike reads.
"""


def _dense_where_rounded(model: Any, scheme: Any) -> Any:
    """Materialises the arrays about to be quantised again.

    Without this, an adapter is merged into quantised weights, and the result is rounded twice.
    """
    from ..core.values import is_value, materialise
    from ..surgery.quantize import choices_of, is_recipe
    from ..surgery.trees import named_arrays, replace

    arrays = named_arrays(model)
    chosen = choices_of(model, scheme) if is_recipe(scheme) else arrays
    return replace(model, {name: materialise(arrays[name]) for name in chosen if is_value(arrays[name])})


def main(argv: list[str] | None = None, prog: str = "python -m quaxlike.lm.convert") -> int:
    """Runs the command. Returns 2 if anything goes wrong when reading, converting or writing."""
    parser = Parser(prog=prog, description=_ABOUT)
    parser.add_argument("source", type=Path, metavar="IN", help="a checkpoint directory or a GGUF file")
    parser.add_argument("target", type=Path, metavar="OUT", help="a directory, or a file that ends in .gguf")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="an adapter to merge, which PEFT or quaxlike wrote"
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help="write the adapter without the model, as a GGUF file for llama.cpp's --lora",
    )
    parser.add_argument(
        "--quantize",
        metavar="SCHEME|RECIPE|FILE",
        help="of a GGUF file: f32, f16, bf16, or one of llama.cpp's types, such as q8_0 or q4_k; of "
        "safetensors: a scheme of quaxlike.quantize; of both: a recipe, such as q4_k_m, or a JSON or TOML "
        "file with one",
    )
    arguments = parser.parse_args(argv)
    with importing_extra(parser, "lm"):
        from ..files.errors import CheckpointError
        from ..surgery.merge import merge
        from ..surgery.quantize import quantize, scheme_of
        from ..surgery.trees import named_arrays
        from .adapter_folder import other_tokenizer, read_adapter
        from .checkpoints.saving import is_published
        from .folders.model_config import UnsupportedConfigError
        from .gguf.mixtures import type_of
        from .loading import load, save
        from .peft import save_gguf_adapter
    target, text = arguments.target, arguments.quantize
    to_gguf, own = target.suffix.lower() == ".gguf", False
    if arguments.adapter_only and (arguments.adapter is None or text is not None or not to_gguf):
        parser.error("--adapter-only must be used with --adapter and a file OUT.gguf, and without --quantize")
    try:
        scheme = text if text is None else (type_of if to_gguf else scheme_of)(text)
        model, _ = load(arguments.source)
        if scheme is not None and (arguments.adapter is not None or not to_gguf):
            model = _dense_where_rounded(model, scheme)
        if arguments.adapter is not None:
            if warning := other_tokenizer(arguments.adapter, arguments.source):
                print(warning, file=sys.stderr)
            model = read_adapter(arguments.adapter, model)
        if arguments.adapter_only:
            save_gguf_adapter(target, model, arguments.source)
            print(f"Written: {target}")
            return 0
        if arguments.adapter is not None:
            model = merge(model)
        if to_gguf:
            save(target, model, arguments.source, format="gguf", quantize=scheme)
        else:
            model = model if scheme is None else quantize(model, scheme)
            own = not is_published(named_arrays(model))
            save(target, model, arguments.source, format="quaxlike" if own else "safetensors")
    except (OSError, ValueError, CheckpointError, UnsupportedConfigError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    of_ours = " in quaxlike's own format, since no other holds its weights" if own else ""
    print(f"Written: {target}{of_ours}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
