"""`python -m tests.numpy_api`: writes into docs/numpy.md which functions of jax.numpy are tested."""

import re
from collections import defaultdict
from pathlib import Path

import jax

from .arguments import MODULES, UNTESTED, functions

PAGE = Path(__file__).parents[2] / "docs" / "numpy.md"
_TABLE = re.compile(r"(?<=<!-- functions -->\n).*(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """The part of the page that depends on the installed JAX."""
    names = list(functions())
    tested = [name for name in names if name not in UNTESTED]
    lines = [f"JAX {jax.__version__}: {len(tested)} of {len(names)} functions are compared.", ""]
    lines += ["| module | compared | not compared |", "| --- | --- | --- |"]
    for prefix, module in MODULES.items():
        own = [n for n in names if n.rpartition(".")[0] == prefix.rstrip(".")]
        compared = sum(name in tested for name in own)
        lines.append(f"| `{module.__name__}` | {compared} | {len(own) - compared} |")
    reasons: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if name in UNTESTED:
            reasons[UNTESTED[name]].append(name)
    lines += ["", "Not compared:", ""]
    lines += [f"- {_listed(of)}: {reason}." for reason, of in reasons.items()]
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page_with(new: str) -> str:
    return _TABLE.sub(lambda _: new, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")
