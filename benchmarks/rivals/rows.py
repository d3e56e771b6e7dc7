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
    - `why`: why ours takes longer, for a row that stays above its limit.
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
_PRODUCT = (
    "llama.cpp rounds the inputs of a product to 8 bits. Here three bytes of each are multiplied, or two in "
    "bfloat16. On several cores, its threads spin between products, and ours sleep"
)
_PROMPT = "inputs of products stay in float32 or bfloat16. llama.cpp rounds them to 8 bits"
_ROUNDED = (
    "products round as llama.cpp's do, but are only about half of a token's time. XLA's work between them is "
    "the rest. A prompt is padded to at least 16 tokens"
)
_STEP = "products of many rows in bfloat16 are left to XLA's library"

ROWS: tuple[Row, ...] = (
    *_token("bf16", "transformers", (0.95, 1.0)),
    *_token("bf16 at 450 tokens", "transformers", (0.95, 1.0), length=450),
    *_token(
        "float32", "transformers", (0.47, 0.48), dtype="float32",
        why="memory is the bound. Both sides read all weights, 4 bytes each, for each token",
    ),
    *_token("NF4, dense head", "bitsandbytes", (0.7, 0.95), quantize="nf4"),
    *_token("NF4, our head, too", "bitsandbytes", (0.45, 0.85), quantize="nf4", head=True),
    *(
        Row(
            f"GGUF {kind}{form}, a token", "llama.cpp", "token", "llama_token", limit, options, of_ours,
            why=_ROUNDED if "compute" in of_ours else why,
        )
        for kind, options, why in (
            *((kind, {"file": kind}, _PRODUCT) for kind in ("Q4_0", "Q8_0", "Q4_K_M")),
            (
                "Q4_0 at 450 tokens", {"file": "Q4_0", "length": 450},
                f"{_PRODUCT}. Its cache of keys and values is float16, ours the model's dtype",
            ),
        )
        for form, of_ours, limit in _FORMS
    ),
    *(
        Row(
            f"GGUF {kind}{form}, a prompt of {length}", "llama.cpp", "prefill", "llama_prefill", 0.9,
            {"file": kind, "length": length}, of_ours,
            why=_ROUNDED if "compute" in of_ours else _PROMPT,
        )
        for length in (8, 128, 512)
        for kind in GGUF
        for form, of_ours, _ in _FORMS
    ),
    Row("load and 32 tokens, bf16", "transformers", "start", "start", 1.0, starts=True),
    Row("load and 32 tokens, NF4", "bitsandbytes", "start", "start", 0.5, {"quantize": "nf4"}, starts=True),
    Row("prefill of 128 tokens, bf16", "transformers", "prefill", "prefill", 1.0),
    Row("prefill of 128 tokens, NF4", "bitsandbytes", "prefill", "prefill", 1.0, {"quantize": "nf4"}),
    Row("QLoRA, a step", "PEFT", "step", "step", 0.85, {"quantize": "nf4"}, why=_STEP),
    Row(
        "QLoRA, compilation of a step", "our LoRA", "compilation", "ours.compilation", 1.1,
        of_ours={"quantize": "nf4"}, why="the program also decodes weights, so it is longer",
    ),
    *(
        Row(
            f"QLoRA, load to the end of the first step{start}", "PEFT", "first_step", "first_step", 1.0,
            {"quantize": "nf4"}, {"kept": kept}, starts=True, why=why,
        )
        for start, kept, why in (
            ("", False, "the step is compiled first"),
            (", second start", True, ""),
        )
    ),
    Row("LoRA in bf16, a step", "PEFT", "step", "step", 0.9, why=_STEP),
    Row("10 % unstructured, one row", "scipy", "sparse", "sparse", 1.2),
    *(
        Row(f"{scheme}, 256 rows", "dense", "product", "ours.product", 1.1, of_ours={"scheme": scheme})
        for scheme in ("int8", "q8_0")
    ),
    *(
        Row(
            f"tracing a decoder with {name}", "by hand", "trace", "ours.trace", 1.1,
            {"quantised": quantised}, of_theirs={"by_hand": True},
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
