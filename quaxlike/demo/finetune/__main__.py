"""An older name of `python -m quaxlike.finetune`, kept for one release."""

import functools
import sys

from ...finetune.__main__ import main as _main

main = functools.partial(_main, prog="python -m quaxlike.demo.finetune")

if __name__ == "__main__":
    sys.exit(main())
