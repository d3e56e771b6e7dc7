"""`check_program`: tests a user-provided function on many kinds of Values."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..core.policy import on_materialise, policy_key
from ..core.quaxify import quaxify
from ..core.values import is_value
from .compare import Disagreement, disagreement, is_inexact, size_of, tolerance_of, weighted_sum
from .lines import first_difference, line_of
from .modes import Results, run_all
from .programs import Program
from .refusing import reveal
from .report import Check, ProgramReport
from .zoo import ZOO, is_plain

TRANSFORMS = ("eager", "jit", "jit inside", "two levels", "vmap", "jvp", "grad")

Zoo = Mapping[str, Callable[[Any], Any]]


def check_program(
    fn: Callable[..., Any],
    /,
    *arrays: Any,
    which: Iterable[str] | Zoo | None = None,
    transforms: Iterable[str] = TRANSFORMS,
    rtol: float | int | None = None,
    atol: float | int = 0.0,
) -> ProgramReport:
    """Tests whether a function works with any kind of array.

    This calls the function with several kinds of Values in place of its arrays (first for one argument at a
    time and then for all of them), and compares the results with those for arrays. If the function requires
    something that other kinds of arrays don't have (e.g. concrete elements for NumPy or `if`), or treats them
    differently, then the report includes the line at which this happens. The counterpart for testing a type
    is [`quaxlike.testing.check_type`][].

    The available kinds are:

    - `"passes through"`: wraps an array. Primitives are applied to the array, and their results are wrapped
        again.
    - `"refuses"`: as above, but raises an error if it (or anything computed from it) is materialised.
    - `"metadata"`: like `"passes through"`, with additional metadata stored as a module with static fields.
    - `"non-linear"`: the product of two leaves. This has no rules, so primitives materialise it.
    - `"stacked"`: the sum of two arrays stored as one leaf, with a shape different from the array's. This has
        no rules either.
    - `"half precision"`: wraps a bfloat16 array. This is compared with an array of the same dtype. It is also
        a failure if a different code path makes the function return other values than for the original array.

    **Arguments:**

    - `fn`: the function. It should return a pytree of arrays, and must be deterministic.
    - `arrays`: its arguments, as pytrees of small arrays. Random keys and non-array leaves are passed through
        unchanged.
    - `which`: which kinds to try, by name. Alternatively, a dict of functions converting an array to a Value,
        or to None if this isn't possible. Defaults to all kinds.
    - `transforms`: the transforms to try. `"eager"`, `"jit"`, `"vmap"` (over a stack of two), `"jvp"` and
        `"grad"` (with respect to all inexact leaves) are applied to `quaxify(fn)`; `"jit inside"` is
        `quaxify(jax.jit(fn))`; and `"two levels"` is two nested `quaxify`s, each dispatching on every other
        Value. A string is one transform. Defaults to all of these. Any transform raising an error even on
        arrays is skipped.
    - `rtol`: the allowed difference, relative to the largest element. By default, this depends on the dtypes.
    - `atol`: the allowed absolute difference.

    **Returns:** a [`ProgramReport`][quaxlike.testing.ProgramReport], which prints as a table. If the function
    works with any kind of array, then it has no `failures`.

    **Raises:** any error that `fn` raises on the arrays themselves. `ValueError` if no argument contains any
    arrays, or if a name is unknown.

    !!! example

        ```python
        import jax.numpy as jnp, numpy as np
        from quaxlike.testing import check_program

        def normalised(x):
            scale = np.linalg.norm(x)  # NumPy
            return x / scale

        report = check_program(normalised, jnp.arange(3.0))
        print(report.failures[0].culprit)  # file, line and function
        assert "NumPy" in report.failures[0].message
        ```
    """
    makers = _named(which)
    modes = (transforms,) if isinstance(transforms, str) else tuple(transforms)
    if unknown := set(modes) - {*TRANSFORMS}:
        raise ValueError(f"transforms of check_program are among {TRANSFORMS}; found {sorted(unknown)}.")
    tester = _Tester(fn, arrays, modes, rtol, atol)
    with contextlib.nullcontext() if policy_key() else on_materialise("allow"):
        checks = tester.checks(makers)
    if not checks:
        raise ValueError(
            "check_program needs an array among the arguments that Values can take the place of."
        )
    return ProgramReport(_name(fn), modes, checks)


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", getattr(fn, "__name__", type(fn).__name__)).rpartition("<locals>.")[2]


def _named(which: Iterable[str] | Zoo | None) -> Zoo:
    if which is None:
        return ZOO
    if isinstance(which, Mapping):
        return which
    names = [which] if isinstance(which, str) else [*which]
    if unknown := set(names) - {*ZOO}:
        raise ValueError(f"which of check_program is among {tuple(ZOO)}; found {sorted(unknown)}.")
    return {name: ZOO[name] for name in names}


@dataclasses.dataclass(frozen=True)
class _Case(Program):
    """The function along with its arguments, some replaced by a kind of Value."""

    args: tuple[Any, ...] = ()

    @functools.cached_property
    def _parts(self) -> Any:
        return eqx.partition(jtu.tree_flatten(self.args)[0], _is_array)

    @property
    def leaves(self) -> list[Any]:
        """All arrays, including arrays inside Values. Any other leaves are replaced by None."""
        return self._parts[0]

    def build(self, leaves: list[Any]) -> tuple[Any, ...]:
        return jtu.tree_structure(self.args).unflatten(eqx.combine(leaves, self._parts[1]))

    def varied(self, leaves: list[Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Returns the differentiable arrays, together with a function rebuilding the arguments from them."""
        varied, rest = eqx.partition(leaves, is_inexact)
        return varied, lambda varied: self.build(eqx.combine(varied, rest))


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, np.ndarray)


def _outputs(tree: Any) -> Any:
    """Returns the arrays in the function's output, keyed by path.

    Any functions in the output can't be compared.
    """
    found = jtu.tree_leaves_with_path(reveal(tree))
    arrays = {jtu.keystr(path): x for path, x in found if eqx.is_array_like(x)}
    return arrays[""] if [*arrays] == [""] else arrays


def _two_levels(fn: Callable[..., Any], *args: Any) -> Any:
    outer = [x for x in jtu.tree_leaves(args, is_leaf=is_value) if is_value(x)][::2]

    def chosen(x: Any) -> Any:
        return not is_value(x) or any(x is value for value in outer)

    return quaxify(quaxify(fn), filter_spec=chosen)(*args)


def _stack(leaves: list[Any]) -> list[Any]:
    return jtu.tree_map(lambda x: jnp.stack([x, x]), leaves)


def _tangents(varied: list[Any]) -> list[Any]:
    def waves(x: Any) -> Any:
        return jnp.cos(jnp.arange(jnp.size(x))).reshape(jnp.shape(x)).astype(x.dtype)

    return jtu.tree_map(waves, varied)


def _call(run: Callable[..., Any], case: _Case, leaves: list[Any]) -> Any:
    return _outputs(run(*case.build(leaves)))


def _vmap(run: Callable[..., Any], case: _Case, leaves: list[Any]) -> Any:
    return jax.vmap(lambda leaves: _outputs(run(*case.build(leaves))))(_stack(leaves))


def _jvp(run: Callable[..., Any], case: _Case, leaves: list[Any], tangents: list[Any] | None = None) -> Any:
    varied, build = case.varied(leaves)
    tangents = _tangents(varied) if tangents is None else tangents
    return jax.jvp(lambda varied: _outputs(run(*build(varied))), (varied,), (tangents,))


def _grad(run: Callable[..., Any], case: _Case, leaves: list[Any]) -> Any:
    varied, build = case.varied(leaves)
    return jax.grad(lambda varied: weighted_sum(_outputs(run(*build(varied)))))(varied)


# All other transforms call the function as it is. (For the two that jit it, this has already happened.)
_TRANSFORMED: dict[str, Callable[..., Any]] = {"vmap": _vmap, "jvp": _jvp, "grad": _grad}


def _on_values(mode: str, fn: Callable[..., Any], case: _Case, leaves: list[Any]) -> Any:
    run = functools.partial(_two_levels, fn) if mode == "two levels" else quaxify(fn)
    return _TRANSFORMED.get(mode, _call)(run, case, leaves)


def _jitted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Jits `fn`. The result accepts arbitrary pytrees, but only returns the arrays in the output."""
    return eqx.filter_jit(lambda *args: eqx.filter(fn(*args), eqx.is_array_like))


class _Plain:
    """The results on plain arrays, each computed just once and then cached."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.case = _Case(fn, args=args)
        self.fn = fn
        self._known: dict[str, Any] = {}

    @property
    def dtypes(self) -> set[Any]:
        return _dtypes(self.case.leaves)

    def __call__(self, mode: str) -> Any:
        mode = "jit" if mode in ("jit inside", "two levels") else mode
        if mode not in self._known:
            try:
                self._known[mode] = self._run(mode)
            except Exception as error:
                self._known[mode] = error
        return self._known[mode]

    def _run(self, mode: str) -> Any:
        if mode == "eager":
            return self.eagerly()
        if mode in ("jvp", "grad") and not self._differentiable():
            raise TypeError("nothing to differentiate")
        if mode == "jvp":
            varied, _ = self.case.varied(self.case.leaves)
            return self.pushed(_tangents(varied))
        out = self._compiled[mode]
        if isinstance(out, Exception):
            raise out
        return out

    @functools.cached_property
    def _compiled(self) -> dict[str, Any]:
        run = {"jit": _call, "vmap": _vmap, "grad": _grad}
        table = {mode: Program(self.fn, modes=(mode,)) for mode in run}
        found = run_all(
            table, lambda mode, _, leaves: run[mode](self.fn, self.case, leaves), self.case.leaves
        )
        return {mode: found[mode, mode] for mode in run}

    def pushed(self, tangents: list[Any]) -> Any:
        """Returns the output and its tangents, given tangents for the differentiable arrays."""
        return self._jitted_jvp(self.case.leaves, tangents)

    @functools.cached_property
    def _jitted_jvp(self) -> Callable[..., Any]:
        return jax.jit(functools.partial(_jvp, self.fn, self.case))

    def eagerly(self) -> Any:
        """Calls the function with any NumPy arrays copied, as it may modify these in-place."""
        copied = [x.copy() if isinstance(x, np.ndarray) else x for x in self.case.leaves]
        return _outputs(self.fn(*self.case.build(copied)))

    def _differentiable(self) -> bool:
        out = self("jit")
        outputs = [] if isinstance(out, Exception) else jtu.tree_leaves(out)
        return any(map(is_inexact, outputs)) and any(map(is_inexact, jtu.tree_leaves(self.case.leaves)))


class _Tester:
    """Runs the function on each kind of Value in turn, then compares the results."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        modes: tuple[str, ...],
        rtol: float | int | None,
        atol: float | int,
    ) -> None:
        self.fn, self.modes, self.rtol, self.atol = fn, modes, rtol, atol
        self.args = reveal(args)
        self.full = _Plain(fn, self.args)
        self.full.eagerly()  # propagates any error that the function itself raises
        self._plain = [self.full]
        # The Value for a weakly typed array isn't necessarily weakly typed as well, so it may promote other
        # arrays.
        self.strong = not any(getattr(x, "weak_type", False) for x in jtu.tree_leaves(self.args))

    def checks(self, makers: Zoo) -> list[Check]:
        """Returns the checks for every kind of Value, both in each argument alone and in all together."""
        table: dict[str, _Case] = {}
        for kind, make in makers.items():
            made = {i: new for i, x in enumerate(self.args) if (new := _with_values(x, make)) is not None}
            chosen = {f"argument {i}": [i] for i in made}
            if len(made) > 1:
                chosen["all arguments"] = [*made]
            for where, positions in chosen.items():
                args = tuple(made[i] if i in positions else x for i, x in enumerate(self.args))
                case = _Case(self.fn, args=args)
                plain = self._plain_for(case)
                modes = [mode for mode in self.modes if not isinstance(plain(mode), Exception)]
                table[f"{kind}, {where}"] = dataclasses.replace(case, modes=tuple(modes))
        # Kinds that don't modify the array share it as an operand, so XLA can notice that most of these
        # programs are identical.
        shared = {id(x): x for case in table.values() for x in case.leaves}
        at = {key: i for i, key in enumerate(shared)}
        jitted = _jitted(self.fn)  # use a single function for all, to trace it only once

        def on(mode: str, case: Any, given: list[Any]) -> Any:
            fn = jitted if mode == "jit inside" else self.fn
            return _on_values(mode, fn, case, [given[at[id(x)]] for x in case.leaves])

        found = run_all(table, on, [*shared.values()])
        return [self._check(name, case, found) for name, case in table.items()]

    def _plain_for(self, case: _Case) -> _Plain:
        """Returns the results on the materialised Values. (These can differ from the original arguments.)"""
        dense = reveal(case.args)
        leaves = _leaves(dense)
        for plain in self._plain:
            if all(map(_are_alike, plain.case.leaves, leaves)):
                return plain
        self._plain.append(_Plain(self.fn, dense))
        return self._plain[-1]

    def _check(self, name: str, case: _Case, found: Results) -> Check:
        plain = self._plain_for(case)
        results = dict.fromkeys(self.modes, "-")  # for any transforms that plain JAX doesn't support
        culprit = message = ""
        for mode in case.modes:
            expected, got = plain(mode), found[name, mode]
            if isinstance(got, Exception):
                difference, line = f"{type(got).__name__}: {got}", line_of(got)
            else:
                difference, line = str(self._disagreement(mode, case, plain, got, expected) or ""), ""
            results[mode] = "failed" if difference else "ok"
            if difference and not message:
                detail = ""
                if not line:
                    line, detail = self._other_line(plain, case)
                message = f"{mode}: {difference}" + (f"\n{detail}" if detail else "")
                culprit = line
        if not message and results.get("eager") == "ok" and plain.dtypes != self.full.dtypes:
            culprit, message = self._goes_another_way(plain)
            if message:
                results["eager"] = "failed"
        return Check(name, results, culprit, message)

    def _disagreement(
        self, mode: str, case: _Case, plain: _Plain, got: Any, expected: Any
    ) -> Disagreement | None:
        scale = size_of(plain.case.leaves)
        if mode in ("jvp", "grad"):
            scale = max(1.0, scale)
            varied, dense = _densifying(case, plain)
            if mode == "grad":
                expected = jax.vjp(dense, varied)[1](expected)[0]
            else:
                expected = plain.pushed(jax.jvp(dense, (varied,), (_tangents(varied),))[1])
        # Even if no results are low-precision arrays, some of the operands may be.
        rtol = max(map(tolerance_of, plain.dtypes | _dtypes(expected))) if self.rtol is None else self.rtol
        return disagreement(got, expected, dtypes=self.strong, tolerance=rtol, atol=self.atol, scale=scale)

    def _other_line(self, plain: _Plain, case: _Case) -> tuple[str, str]:
        """Returns the first line at which an eager call with Values differs from one with arrays."""
        return first_difference(self.fn, plain.eagerly, lambda: quaxify(self.fn)(*case.args))

    def _goes_another_way(self, plain: _Plain) -> tuple[str, str]:
        """Returns the line at which the code path depends on the precision, if this changes the results."""
        out, full = plain("eager"), self.full("eager")
        difference = disagreement(out, full, dtypes=False, tolerance=0.1, scale=size_of(full))
        if difference is None:
            return "", ""
        line, detail = first_difference(self.fn, self.full.eagerly, plain.eagerly, numbers=False)
        return (line, f"eager: {difference}, in another precision\n{detail}") if line else ("", "")


def _densifying(case: _Case, plain: _Plain) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    """Returns a case's differentiable arrays, and a function mapping these to the materialised Values."""
    varied, build = case.varied(case.leaves)
    return varied, lambda varied: plain.case.varied(_leaves(reveal(build(varied))))[0]


def _dtypes(tree: Any) -> set[Any]:
    return {jnp.result_type(x) for x in jtu.tree_leaves(tree)}


def _are_alike(x: Any, y: Any) -> bool:
    """Returns whether two leaves (arrays or None) are equal."""
    if x is None or y is None or not is_plain(jnp.asarray(y)):
        return x is y
    return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=is_inexact(x))


def _leaves(tree: Any) -> list[Any]:
    return eqx.filter(jtu.tree_leaves(tree), _is_array)


def _with_values(tree: Any, make: Callable[[Any], Any]) -> Any:
    """Replaces the arrays in `tree` by Values. Returns None if no array is suitable."""
    leaves, treedef = jtu.tree_flatten(tree)
    made = [make(jnp.asarray(x)) if _is_array(x) and is_plain(jnp.asarray(x)) else None for x in leaves]
    if all(x is None for x in made):
        return None
    return treedef.unflatten([x if value is None else value for x, value in zip(leaves, made, strict=True)])
