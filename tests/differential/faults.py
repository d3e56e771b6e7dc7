"""`python -m tests.differential.faults`: do the programs of the tests find faults that were put in?

Each fault is put into a copy of the package. It is found if a test fails there that passes without it.
"""

import argparse
import concurrent.futures
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants import PYTEST, complaints, copy

PROGRAMS = ("tests/differential/test_differential.py", "-k", "test_every_rule or test_programs")
WITH_SLOW = (*PYTEST, "-m", "")


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    file: str
    """In `quaxlike/arrays`."""
    before: str
    after: str

    def apply(self, root: Path) -> None:
        path = root / "quaxlike" / "arrays" / self.file
        source = path.read_text()
        if source.count(self.before) != 1:
            raise ValueError(f"{self.file} has {source.count(self.before)} times, not once: {self.before}")
        path.write_text(source.replace(self.before, self.after))


FAULTS = (
    Fault(
        "a gradient has the wrong sign",
        "quantized/dot.py",
        "y = mapped(matmul, len(plan.batch))(x, parts)",
        "y = mapped(matmul, len(plan.batch))(2 * lax.stop_gradient(x) - x, parts)",
    ),
    Fault(
        "axes of a product are swapped",
        "dot_axes.py",
        "return [*own, *other] if on_left else [*other, *own]",
        "return [*other, *own] if on_left else [*own, *other]",
    ),
    Fault(
        "a scale is dropped",
        "lora/shape.py",
        "arrange(*contract(b, own_b, a, own_a, out), out) * arrange(scaling, own, out))",
        "arrange(*contract(b, own_b, a, own_a, out), out))",
    ),
    Fault(
        "a start is not clamped",
        "bounds.py",
        "return lax.clamp(zero, start, jnp.asarray(last, start.dtype)).astype(jnp.int32)",
        "return start.astype(jnp.int32)",
    ),
    Fault(
        "elements at different places are added",
        "sparse/elementwise.py",
        "    if x.has_pattern_of(y):\n        return x.with_elements(_bind(primitive, x.elements, y",
        "    if x.data.shape == y.data.shape:\n        return x.with_elements(_bind(primitive, x.elements, y",
    ),
    Fault(
        "padding is not masked",
        "sparse/unstructured.py",
        "return jnp.where(self.is_stored, self.data, jnp.zeros_like(self.data))",
        "return self.data",
    ),
    Fault(
        "what is promoted is frozen",
        "adapted.py",
        'return out.with_base(w).replace(gradients=strongest("pass", like.gradients))',
        'return out.with_base(w).replace(gradients="none")',
    ),
    Fault(
        "the fill value is another one",
        "bounds.py",
        "        return np.asarray(fill_value).astype(dtype).item()\n",
        "        return 0\n",
    ),
    Fault(
        "a transpose is missing",
        "structured/tridiagonal.py",
        "return replace_fields(self, lower=self.upper, upper=self.lower)",
        "return self",
    ),
    Fault(
        "a stop_gradient is missing",
        "lora/dot.py",
        "*row_scale(lora))\n    return quaxify(product)(lora.base, lora.a, lora.b, x)",
        "*row_scale(lora))\n    return quaxify(product)(lora.w, lora.a, lora.b, x)",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential.faults", description=__doc__)
    parser.add_argument(
        "--only", default=[""], nargs="*", help="only faults whose names contain one of these"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all tests")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()

    def test(fault: Fault) -> bool:
        changed, start = original.again(fault.name), time.monotonic()
        fault.apply(changed.path)
        status, output = changed.run([*WITH_SLOW, *PROGRAMS], args.timeout)
        if found := complaints(output):  # of the fault, if not of the original, too
            found -= complaints(original.run([*WITH_SLOW, *found], args.timeout)[1])
        by = " ".join(sorted(found)) or f"not found, {status}"
        print(f"{fault.name}: {time.monotonic() - start:.0f} s, {by}", flush=True)
        return bool(found)

    faults = [fault for fault in FAULTS if any(part in fault.name for part in args.only)]
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
    ):
        original = copy(Path(folder))
        missed = [*pool.map(test, faults)].count(False)
    print(f"{missed} faults are not found")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
