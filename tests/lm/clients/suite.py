"""The marks of the suite, the table of what it compared, and what its tests share."""

import math
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "interop.md"
_START, _END = "<!-- the table of `pytest -m clients` -->\n", "<!-- its end -->\n"
#: The distributions of the programs.
_PROGRAMS = {
    "llama.cpp": "llama-cpp-python", "gguf": "gguf", "transformers": "transformers", "PEFT": "peft",
    "sentence-transformers": "sentence-transformers", "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors", "Orbax": "orbax-checkpoint",
}  # fmt: skip

Row = tuple[str, str, str, str, float]
"""The program, the format, the family, what was compared, and the largest difference."""


def client(*packages: str) -> list[pytest.MarkDecorator]:
    """The marks of the tests of a program, which need these packages."""
    missing = [package for package in packages if find_spec(package) is None]
    return [
        pytest.mark.clients,
        pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.usefixtures("default_promotion"),
    ]


def report(rows: Iterable[Row], write: bool) -> Iterator[str]:
    """The lines of the table; they are written into the page, if every program has run."""
    rows = list(rows)
    lines = list(_table(rows))
    yield from lines
    if not write:
        return
    if missing := set(_PROGRAMS) - {program for program, *_ in rows}:
        yield f"The table is not written: {', '.join(sorted(missing))} did not run, or failed."
        return
    versions = ", ".join(f"{program} {version(package)}" for program, package in _PROGRAMS.items())
    versions = versions.replace("llama.cpp", "llama.cpp (llama-cpp-python)", 1)
    before, _, rest = _PAGE.read_text("utf-8").partition(_START)
    _, _, after = rest.partition(_END)
    made = "\n".join([*lines, "", f"The versions: {versions}.", ""])
    _PAGE.write_text(before + _START + "\n" + made + "\n" + _END + after, "utf-8")


def _table(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each program, format and set of families."""
    families: dict[tuple[str, str, str], set[str]] = {}
    most: dict[tuple[str, str, str], float] = {}
    for program, form, family, what, difference in rows:
        key = program, form, what
        families.setdefault(key, set()).add(family)
        most[key] = max(most.get(key, 0.0), difference)
    together: dict[tuple[str, str, str], list[str]] = {}
    for program, form, what in sorted(families, key=lambda key: (list(_PROGRAMS).index(key[0]), key)):
        told = what + (f" ({_rounded_up(x)})" if (x := most[program, form, what]) else "")
        named = ", ".join(sorted(families[program, form, what]))
        together.setdefault((program, form, named), []).append(told)
    yield "| program | files | families | compared |"
    yield "| --- | --- | --- | --- |"
    for (program, form, named), told in together.items():
        yield f"| {program} | {form} | {named} | {', '.join(told)} |"


def _rounded_up(x: float) -> str:
    exponent = math.floor(math.log10(x))
    return f"{math.ceil(round(x / 10.0**exponent, 9)) * 10.0**exponent:.0e}".replace("e-0", "e-")


def logits_of_transformers(model: Any, ids: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The logits of texts that are padded on either side."""
    import torch

    mask = torch.tensor(seen).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=torch.tensor(ids), attention_mask=mask, position_ids=positions)
    return out.logits.float().numpy()


def logits_of_llama_cpp(path: Path, ids: np.ndarray) -> np.ndarray:
    """The logits of a text, with keys and values in float32, as ours are."""
    from llama_cpp import Llama

    model = Llama(
        str(path), n_ctx=64, n_threads=2, verbose=False, logits_all=True, type_k=0, type_v=0,
        flash_attn=False, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0,
    )  # fmt: skip
    model.eval(ids.tolist())
    logits = np.array(model.scores[: len(ids)])
    model.close()
    return logits
