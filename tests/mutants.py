"""`python -m tests.mutants --number 60 --jobs 2`: which small changes of the library no test notices.

Each mutant is one change of an operator, a comparison or a constant, in a copy of the package. The default
tests run first, and coverage tells which lines each of them reaches. On a mutant, those run that reach its
line. Survivors are printed for a person to judge: some change nothing that can be seen.
"""

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.fixtures import FIXTURES

ROOT = Path(__file__).parents[1]
FOLDERS = ("quaxlike/arrays", "quaxlike/core", "quaxlike/surgery")

PYTEST = ("pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider")

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.And: ast.Or, ast.Or: ast.And},
}


class _Mutator(ast.NodeTransformer):
    """Finds what can be changed, and changes number `target` of it."""

    def __init__(self, target: int | None = None) -> None:
        self.target, self.sites, self.statement = target, [], 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        return super().visit(node)

    def change(self, node: Any, new: ast.AST) -> ast.AST:
        self.sites.append((node.lineno, self.statement, ast.unparse(node), ast.unparse(new)))
        return new if len(self.sites) - 1 == self.target else node

    def operator(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        swap = SWAPS.get(type(node.op))
        return self.change(node, type(node)(**vars(node) | {"op": swap()})) if swap else node

    visit_BinOp = visit_BoolOp = visit_AugAssign = operator

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        return self.change(node, ast.Compare(node.left, ops, node.comparators))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self.change(node, node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        flips = isinstance(node.value, bool) or (isinstance(node.value, int | float) and node.value in (0, 1))
        return self.change(node, ast.Constant(type(node.value)(1 - node.value))) if flips else node

    # Messages and annotations are left alone.
    def visit_Raise(self, node: ast.AST) -> ast.AST:
        return node

    visit_JoinedStr = visit_arg = visit_Raise

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg == "strict" else self.generic_visit(node)  # of `zip`, which nothing reaches

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.test = self.visit(node.test)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    statement: int
    """The line where its statement begins."""
    before: str
    after: str
    site: int

    def apply(self, root: Path) -> None:
        """Changes the file in the copy of the checkout."""
        tree = _Mutator(self.site).visit(ast.parse((root / self.file).read_text()))
        (root / self.file).write_text(ast.unparse(ast.fix_missing_locations(tree)))

    @property
    def name(self) -> str:
        return f"{self.file.replace('/', '.')}.{self.site}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}\n    - {self.before}\n    + {self.after}"


def mutants(folders: tuple[str, ...] = FOLDERS) -> list[Mutant]:
    """All of the folders, in the order of the source."""
    found = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        (finder := _Mutator()).visit(ast.parse(path.read_text()))
        file = str(path.relative_to(ROOT))
        found += [Mutant(file, *site, number) for number, site in enumerate(finder.sites)]
    return found


# -------------------------------------------------------------------------------------------------
# The tests that reach a line
# -------------------------------------------------------------------------------------------------


class Reached:
    """Which tests run which lines, as coverage recorded it."""

    def __init__(self, database: Path, without: set[str]) -> None:
        import coverage  # of the extra for developers; tests of other hunts import this module, too

        self._data = coverage.CoverageData(str(database))
        self._data.read()
        self._without = without

    def tests(self, mutant: Mutant, number: int) -> list[list[str]]:
        """Those that run the line of the mutant, then others that run its file, since what is cached runs in
        one test and is seen by many: at most so many of each, of as many functions as there are."""
        files = [path for path in self._data.measured_files() if Path(path).match(mutant.file)]
        lines = self._data.contexts_by_lineno(files[0]) if files else {}
        of_file = self._names(itertools.chain(*lines.values()))
        of_line = self._names(itertools.chain(*(lines.get(n, ()) for n in (mutant.line, mutant.statement))))
        return [_of_many_functions(tests, number) for tests in (of_line, of_file - of_line) if tests]

    def _names(self, contexts: Iterable[str]) -> set[str]:
        return {context.rpartition("|")[0] for context in contexts} - self._without - {""}


def _of_many_functions(tests: Iterable[str], number: int) -> list[str]:
    functions: dict[str, list[str]] = {}
    for test in sorted(tests):
        functions.setdefault(test.split("[")[0], []).append(test)
    turns = filter(None, itertools.chain(*itertools.zip_longest(*functions.values())))
    return sorted(itertools.islice(turns, number))  # tests of a file are collected at once


_COMPLAINT = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$"


def complaints(output: str) -> set[str]:
    """The tests that failed."""
    return {line[1] for line in re.finditer(_COMPLAINT, output, re.MULTILINE)}


# -------------------------------------------------------------------------------------------------
# Running them on a copy
# -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of the checkout."""

    path: Path
    compiled: Path
    """Programs that were compiled for any of the copies: most are the same."""

    def again(self, name: str) -> "Copy":
        path = self.path.with_name(name)
        return Copy(Path(shutil.copytree(self.path, path)), self.compiled)

    def run(self, command: list[str], timeout: float) -> tuple[str, str]:
        """How the command ended, and what it printed."""
        environment = os.environ | {
            "PYTHONPATH": str(self.path),
            "QUAXLIKE_FIXTURES": str(FIXTURES),
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output = process.communicate(timeout=timeout)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return "timeout", ""
        return "failed" if process.returncode else "passed", output


def copy(folder: Path) -> Copy:
    """The checkout without what git ignores."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", folder / "compiled")
    out = Copy(folder / "original", Path(compiled))
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).exists():
            (out.path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, out.path / file)
    return out


def reached(original: Copy, timeout: float) -> Reached:
    """What the default tests reach in the copy. Those that fail in it, which has no history, do not count."""
    options = ["--cov=quaxlike", "--cov-branch", "--cov-context=test", "--cov-report="]
    status, output = original.run(["pytest", "-q", "-p", "no:cacheprovider", *options], timeout)
    database = original.path / ".coverage"
    if status == "timeout" or not database.exists():
        raise SystemExit(f"The tests did not end on the package as it is ({status}):\n{output[-2000:]}")
    failed = complaints(output)
    print(f"{len(failed)} tests fail before any change, and do not count", *sorted(failed), sep="\n    ")
    return Reached(database, failed)


def judge(mutant: Mutant, original: Copy, tests: list[list[str]], timeout: float) -> tuple[str, str]:
    """How the mutant ended, and by what."""
    changed = original.again(mutant.name)
    try:
        mutant.apply(changed.path)
        for some in tests:
            (listed := changed.path / "reached.txt").write_text("\n".join(some))
            status, output = changed.run([*PYTEST, f"@{listed}"], timeout)
            if status == "timeout":
                return "killed", "by a timeout"
            if status == "failed":
                return "killed", f"by {' '.join(sorted(complaints(output))) or output[-200:]}"
    finally:
        shutil.rmtree(changed.path)
    return "survived", f"{sum(map(len, tests))} tests"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="so many of the mutants of the seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="after which no other mutant is begun")
    parser.add_argument("--tests", type=int, default=300, help="of the line, and of the file, at most")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for these; it counts as killed")
    parser.add_argument("--survivors", type=int, default=6, help="exits with an error if there are more")
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    args = parser.parse_args()
    everything = mutants(tuple(args.folders))
    chosen = random.Random(args.seed).sample(everything, args.skip + args.number)[args.skip :]
    print(f"{len(chosen)} of {len(everything)} mutants, seed {args.seed}", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    until = time.monotonic() + 60 * args.minutes

    def run(mutant: Mutant) -> None:
        start = time.monotonic()
        if start > until:
            counts["not begun"] += 1
            return
        status, reason = judge(mutant, original, which.tests(mutant, args.tests), args.timeout)
        counts[status] += 1
        print(f"{status} {mutant}\n    {time.monotonic() - start:.0f} s {reason}", flush=True)

    with tempfile.TemporaryDirectory() as path:
        original = copy(Path(path))
        which = reached(original, 3600)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, chosen))
    print(f"seed {args.seed}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    return counts["survived"] > args.survivors


if __name__ == "__main__":
    sys.exit(main())
