"""The rows of the comparison: one entry each."""

import dataclasses
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from .files import GGUF


@dataclasses.dataclass(frozen=True)
class Row:
    """One piece of work that both sides do.

    **Attributes:**

    - `name`: as on the command line and in the table.
    - `rival`: who else does it.
    - `ours`, `theirs`: functions of `ours.py` and of `theirs.py`; `"ours.…"` names one of ours that is
        compared with.
    - `limit`: what ours ÷ theirs should be at most.
    - `options`: of both functions.
    - `of_ours`, `of_theirs`: of one of them alone.
    - `starts`: whether each run is a process of its own, from its start to its end. The first of each side
        is not counted.
    - `why`: why ours takes longer, for rows that stay above their limit: a sentence about all of them.
    """

    name: str
    rival: str
    ours: str
    theirs: str
    limit: float
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_theirs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    starts: bool = False
    why: str = ""

    @property
    def models(self) -> tuple[str | None, str | None]:
        """What our side and the other one load: rows that load the same share a process. None is a row of
        which nothing is kept."""

        def loaded(function: str, own: Mapping[str, Any]) -> str | None:
            if not function.endswith(("token", "prefill")):
                return None
            options = {**self.options, **own}
            kept = {name: options[name] for name in sorted(options) if name not in ("batch", "length")}
            return json.dumps([function.removesuffix("token").removesuffix("prefill"), kept])

        return loaded(self.ours, self.of_ours), loaded(self.theirs, self.of_theirs)

    @property
    def gguf(self) -> str | None:
        """The work with a GGUF file, whatever its form. None for other rows."""
        if "file" not in self.options:
            return None
        return (
            self.name.removeprefix("GGUF ")
            .replace(" in bfloat16", "")
            .replace(" in int8", "")
            .replace(", a ", ", ")
        )

    def shows_the_rival(self, processor: str) -> bool:
        """Whether a ratio tells how slow the rival is there, and little of ours: PyTorch has no products in
        bfloat16 for AVX2, and converts element by element."""
        in_bfloat16 = self.options.get("dtype", "bfloat16") == "bfloat16"
        by_torch = self.rival in ("transformers", "bitsandbytes", "PEFT")
        return by_torch and in_bfloat16 and "AVX2" in processor and "AVX-512" not in processor


def _token(
    name: str, rival: str, limits: tuple[float, float], *, head: bool = False, why: str = "", **options: Any
) -> list[Row]:
    """The time of a token, of one sequence and of eight."""
    return [
        Row(
            f"{name}, a token, {count}", rival, "token", "token", limit, options | {"batch": batch},
            {"head": True} if head else {}, why=why,
        )
        for count, batch, limit in zip(("one sequence", "eight"), (1, 8), limits, strict=True)
    ]  # fmt: skip


#: How a GGUF model computes, and what its tokens should take beside llama.cpp at most.
_FORMS: tuple[tuple[str, dict[str, str], float], ...] = (
    ("", {}, 1.3),
    (" in bfloat16", {"dtype": "bfloat16"}, 1.3),
    (" in int8", {"compute": "int8"}, 1.0),
)
# Shares of the time are those of a profile on one core.
_PRODUCT = (
    "A token from a GGUF file: products are 89 % of it. llama.cpp rounds their inputs to 8 bits; here they "
    "have three bytes, or two in bfloat16. On several cores, its threads spin between them, and ours sleep"
)
_ROUNDED = (
    "A token or a prompt of 8, in 8 bits: 86 to 88 % are products, which unpack codes in the order of the "
    "file. llama.cpp packs several rows together as it loads"
)
_CACHED = "At 450 tokens: llama.cpp's cache of keys and values is float16, ours the model's dtype"
_SHORT = "A prompt of 8, other than in 8 bits: products are 90 % of it, of two bytes for each input, not one"
_LONG = (
    "A longer prompt, other than in 8 bits: XLA's products of decoded weights are 70 % of 128 tokens, and "
    "61 % of 512"
)
_ROUNDED_LONG = "A longer prompt in 8 bits: products are 55 % of 512 tokens, and attention in float32 30 %"
_DECODED = "256 rows of q8_0: decoding is 4 % of the time, and zeros to which parts are added are 5 %"
_NOISE = (
    "Prefill in bf16 and tracing, on two cores: medians of seven runs varied, 0.87 and 0.89, 1.00 and 1.17"
)
_STEP = "A training step: products of many rows in bfloat16 are left to XLA's library"


ROWS: tuple[Row, ...] = (
    *_token("bf16", "transformers", (0.95, 1.0)),
    *_token("bf16 at 450 tokens", "transformers", (0.95, 1.0), length=450),
    *_token(
        "float32", "transformers", (0.47, 0.48), dtype="float32",
        why="A token in float32: memory is the bound, since both sides read all weights",
    ),
    *_token("NF4, dense head", "bitsandbytes", (0.7, 0.95), quantize="nf4"),
    *_token("NF4, our head, too", "bitsandbytes", (0.45, 0.85), quantize="nf4", head=True),
    *(
        Row(
            f"GGUF {kind}{form}, a token", "llama.cpp", "token", "llama_token", limit, options, of_ours,
            why=why or (_ROUNDED if "compute" in of_ours else _PRODUCT),
        )
        for kind, options, why in (
            *((kind, {"file": kind}, "") for kind in ("Q4_0", "Q8_0", "Q4_K_M")),
            ("Q4_0 at 450 tokens", {"file": "Q4_0", "length": 450}, _CACHED),
        )
        for form, of_ours, limit in _FORMS
    ),
    *(
        Row(
            f"GGUF {kind}{form}, a prompt of {length}", "llama.cpp", "prefill", "llama_prefill", 0.9,
            {"file": kind, "length": length}, of_ours,
            why=rounded if "compute" in of_ours else why,
        )
        for length, why, rounded in (
            (8, _SHORT, _ROUNDED),
            (128, _LONG, _ROUNDED_LONG),
            (512, _LONG, _ROUNDED_LONG),
        )
        for kind in GGUF
        for form, of_ours, _ in _FORMS
    ),
    Row("load and 32 tokens, bf16", "transformers", "start", "start", 1.0, starts=True),
    Row("load and 32 tokens, NF4", "bitsandbytes", "start", "start", 0.5, {"quantize": "nf4"}, starts=True),
    Row("prefill of 128 tokens, bf16", "transformers", "prefill", "prefill", 1.0, why=_NOISE),
    Row("prefill of 128 tokens, NF4", "bitsandbytes", "prefill", "prefill", 1.0, {"quantize": "nf4"}),
    Row("QLoRA, a step", "PEFT", "step", "step", 0.85, {"quantize": "nf4"}, why=_STEP),
    Row(
        "QLoRA, compilation of a step", "our LoRA", "compilation", "ours.compilation", 1.1,
        of_ours={"quantize": "nf4"}, why="Compilation of a QLoRA step: the program also decodes weights",
    ),
    *(
        Row(
            f"QLoRA, load to the end of the first step{start}", "PEFT", "first_step", "first_step", 1.0,
            {"quantize": "nf4"}, {"kept": kept}, starts=True, why=why,
        )
        for start, kept, why in (
            ("", False, "Load to the end of the first step: the step is compiled first"),
            (", second start", True, ""),
        )
    ),
    Row("LoRA in bf16, a step", "PEFT", "step", "step", 0.9, why=_STEP),
    Row("10 % unstructured, one row", "scipy", "sparse", "sparse", 1.2),
    *(
        Row(
            f"{scheme}, 256 rows", "dense", "product", "ours.product", 1.1, of_ours={"scheme": scheme},
            why=_DECODED,
        )
        for scheme in ("int8", "q8_0")
    ),
    *(
        Row(
            f"tracing a decoder with {name}", "by hand", "trace", "ours.trace", 1.1,
            {"quantised": quantised}, of_theirs={"by_hand": True}, why=_NOISE,
        )
        for name, quantised in (("LoRA", False), ("QLoRA", True))
    ),
)  # fmt: skip


def by_model(rows: Sequence[Row]) -> list[Row]:
    """The rows in an order in which those that load the same models follow one another."""
    first: dict[Hashable, int] = {}

    def place(i: int) -> tuple[int, int]:
        ours, theirs = rows[i].models
        if ours is None or theirs is None:
            return i, i
        return first.setdefault(theirs, i), first.setdefault((theirs, ours), i)

    places = [place(i) for i in range(len(rows))]
    return [rows[i] for i in sorted(range(len(rows)), key=places.__getitem__)]
