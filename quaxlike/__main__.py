"""The command-line interface. Use it as `quaxlike COMMAND …` or `python -m quaxlike COMMAND …`."""

import importlib
import sys
from typing import NamedTuple

from ._checked import did_you_mean


class _Command(NamedTuple):
    module: str  # defines `main(arguments, prog)`
    about: str
    first: tuple[str, ...] = ()  # passed before any arguments from the user


#: Import only the module of the command being run: importing JAX takes seconds.
COMMANDS = {
    "finetune": _Command("quaxlike.lm.finetune.__main__", "trains an adapter of a checkpoint"),
    "generate": _Command("quaxlike.lm.generate.__main__", "continues texts with a checkpoint"),
    "chat": _Command("quaxlike.lm.generate.__main__", "talks with a checkpoint", ("--chat",)),
    "convert": _Command("quaxlike.lm.convert", "writes a checkpoint in another format"),
    "native": _Command("quaxlike.kernels.native.__main__", "compiles products for this machine's processor"),
    "demo": _Command("quaxlike.demo.__main__", "trains a small model on adapters over 4-bit weights"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status: 2 if there is no such command."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: quaxlike COMMAND …\n")
        for command, (_, about, _) in COMMANDS.items():
            print(f"  {command:10}{about}")
        print("\n`quaxlike COMMAND --help` lists its options.")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, n=1, show=str)
        print(
            f"quaxlike: error: there is no command {name!r}.{hint} `quaxlike --help` lists them.",
            file=sys.stderr,
        )
        return 2
    module, _, first = COMMANDS[name]
    return importlib.import_module(module).main([*first, *arguments], prog=f"quaxlike {name}")


if __name__ == "__main__":
    sys.exit(main())
