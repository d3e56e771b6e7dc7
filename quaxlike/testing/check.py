"""`check_type`: tests a value under all transforms."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.inspect.coverage import rules_for
from ..core.inspect.explain import explain
from ..core.jaxprs.linearity import is_linear
from ..core.jaxprs.unify import OperandMismatch, StructureError
from ..core.policy import on_materialise, policy_key
from ..core.values import Value, is_value
from .compare import disagreement, size_of
from .hooks import Subject, Wrong, check_hooks
from .layers import LAYERS
from .modes import ON_VALUE, Results, on_array, run_all
from .operations import operations
from .programs import LINEAR, MODES, Program, mesh_for
from .refusing import reveal
from .report import Check, TypeReport
from .watch import hook_in, watch

Programs = Mapping[str, Callable[[Any], Any]] | Iterable[Callable[[Any], Any]]


def check_type(value: Value, *, programs: Programs | None = None) -> TypeReport:
    """Tests a value under all transforms, by comparing it with its materialised array.

    This starts by checking the type's hooks: `aval`, static fields, flattening, pickling, stacking, `linear`,
    `leading_axis`, `promote`, `widen`, `cotangent` and `shard_spec`. It then runs each program both on the
    Value and on its materialised array: eagerly, under `jax.jit`, under `jax.vmap` over a stack of two, and
    under `jax.grad` with respect to every inexact leaf. If the results differ, then each step of the program
    is compared with its primitive, so the report can point to the first incorrect rule.

    Materialising a value for lack of a rule isn't a failure, though the table shows where this happens. (It
    *is* a failure inside `with quaxlike.on_materialise("error")`, and for types from
    [`quaxlike.testing.refuses`][].) Running all programs takes about half a minute.

    **Arguments:**

    - `value`: a small Value, with just a few elements along each axis.
    - `programs`: functions of one array, either as a dict keyed by name or as a sequence. Defaults to
        programs for about sixty transforms in JAX and Equinox, layers with the value as their weight (if it
        is a square matrix), and a few programs for each primitive with a rule for this type.

    **Returns:** a [`TypeReport`][quaxlike.testing.TypeReport], which prints as a table. If the type is
    correct, then it has no `failures`.

    **Raises:** `TypeError` if `value` isn't a Value. If `materialise` raises an error then so does this:
    there is nothing to compare with.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql
        from quaxlike.testing import check_type

        class Doubled(ql.ArrayValue):
            array: jax.Array

            def materialise(self):
                return 2 * self.array

        @ql.register("neg")
        def _(x: Doubled, **params):
            return Doubled(x.array)  # forgets the sign

        report = check_type(Doubled(jnp.arange(3.0)), programs={"minus": lambda x: -x})
        assert "neg" in report.failures[0].culprit
        ```
    """
    if not is_value(value):
        raise TypeError(f"check_type takes a quaxlike.Value; found {type(value).__name__}.")
    subject = Subject(value, jnp.asarray(reveal(value)))
    hooks = check_hooks(subject)
    checks = [Check(name, {"eager": result}, message=message) for name, (result, message) in hooks.items()]
    wrong = next((dataclasses.replace(c, culprit=c.name) for c in checks if c.failed), None)
    if wrong is not None:  # this may also cause any further failures
        checks = [dataclasses.replace(c, culprit=wrong.name) if c.failed else c for c in checks]
    runner = _Runner(subject, wrong)
    rules = rules_for(type(value))
    if programs is None:
        table = LINEAR | LAYERS | operations(r.primitive.name for r in rules)
    else:
        table = _named(programs)
    aval, splits = jax.typeof(subject.dense), _splits_rows(subject)
    taken = {name: p for name, p in table.items() if p.takes(aval) and (splits or not p.splits_rows)}
    with contextlib.nullcontext() if policy_key() else on_materialise("allow"):
        checks += runner.checks(taken)
    never = [] if programs is not None else [str(r) for r in rules if r.source not in runner.met]
    return TypeReport(f"{type(value).__name__} {jax.typeof(subject.dense).str_short()}", checks, never)


def _splits_rows(subject: Subject) -> bool:
    """Returns whether the rows of the value can be sharded over as many devices as those of the array."""
    try:
        split = subject.split(0) if subject.dense.ndim else None
    except Wrong:
        return True
    return split is not None and split[1] == mesh_for(subject.dense).size


def _named(programs: Programs) -> dict[str, Program]:
    if not isinstance(programs, Mapping):
        functions: list[Any] = list(programs)
        names = [getattr(f, "__name__", repr(f)) for f in functions]
        programs = {
            str(n) if names.count(n) == 1 else f"{n} ({i})": f
            for i, (n, f) in enumerate(zip(names, functions, strict=True))
        }
    return {str(name): f if isinstance(f, Program) else Program(f) for name, f in programs.items()}


class _Runner:
    """Runs programs on both the value and its materialised array, then compares the results."""

    def __init__(self, subject: Subject, wrong: Check | None) -> None:
        self.subject = subject
        self.wrong = wrong  # the first incorrect hook
        self.met: set[str] = set()  # the source locations of all rules used so far
        self.linear = is_linear(subject.value)
        self.dtypes = not type(subject.value).own_dtypes
        size = size_of(subject.dense)
        self.scale = dict.fromkeys(MODES, size) | {"grad": max(1.0, size)}

    def checks(self, table: Mapping[str, Program]) -> list[Check]:
        found = run_all(table, self._on_value, self.subject.value)
        expected = on_array(table, self.subject)
        return [self._check(name, program, found, expected) for name, program in table.items()]

    def _allowing(self, program: Program) -> contextlib.AbstractContextManager[Any]:
        allowed = program.dense_unless_linear and not self.linear
        return on_materialise("allow") if allowed else contextlib.nullcontext()

    def _on_value(self, mode: str, program: Program, value: Any) -> Any:
        with self._allowing(program):
            return ON_VALUE[mode](program.run, Subject(value, None))

    def _check(self, name: str, program: Program, found: Results, expected: Results) -> Check:
        results: dict[str, str] = dict.fromkeys(MODES, "")
        messages: dict[str, str] = {}
        errors: list[Exception] = []
        for mode in program.modes:
            want, got = expected[name, mode], found[name, mode]
            if isinstance(want, Exception):  # plain JAX doesn't support this either
                results[mode] = "-"
            elif isinstance(got, OperandMismatch | StructureError):
                results[mode], messages["declined"] = "declined", str(got)
            else:
                raised = isinstance(got, Exception)
                difference = (
                    f"{type(got).__name__}: {got}"
                    if raised
                    else disagreement(got, want, dtypes=self.dtypes, scale=self.scale[mode])
                )
                errors += [got] if raised else []
                results[mode] = "failed" if difference else "ok"
                if difference:
                    messages.setdefault("failed", f"{name}, {mode}: {difference}")
        with self._allowing(program):
            dense_at = self._explain(program) if {"ok", "failed"} & {*results.values()} else ""
            message = messages.get("failed", messages.get("declined", ""))
            check = Check(name, results, message=message, dense_at=dense_at)
            return self._blamed(check, program, errors) if check.failed else check

    def _explain(self, program: Program) -> str:
        """Returns the first primitive to materialise the value. This also records which rules were used."""
        try:
            report = explain(program.run)(self.subject.value)
        except Exception:  # the program's error has already been reported
            return ""
        self.met |= {row.rule for row in report.rules if row.rule}
        return "" if report.first_loss is None else report.first_loss.primitive

    def _blamed(self, check: Check, program: Program, errors: list[Exception]) -> Check:
        culprit, detail = watch(program.run, self.subject.value)
        if not culprit.startswith("rule") and self.wrong is not None:
            culprit, detail = self.wrong.culprit, self.wrong.message
        culprit = culprit or next(filter(None, (hook_in(e, type(self.subject.value)) for e in errors)), "")
        message = check.message + (f"\n{detail}" if detail and detail not in check.message else "")
        return dataclasses.replace(check, culprit=culprit, message=message)
