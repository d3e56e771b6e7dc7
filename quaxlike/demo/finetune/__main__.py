"""An older name of `python -m quaxlike.finetune`."""

import sys
import warnings

from ...finetune.__main__ import main as _main


def main(argv: list[str] | None = None) -> int:
    new = "python -m quaxlike.finetune"
    message = (
        f"{new} is the name of python -m quaxlike.demo.finetune now; quaxlike 0.2 will not have the old one."
    )
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return _main(argv, prog="python -m quaxlike.demo.finetune")


if __name__ == "__main__":
    sys.exit(main())
