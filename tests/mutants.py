"""`python -m tests.mutants --number 60 --jobs 2`: which small changes of the library no test notices.

Each mutant is one change of an operator, a comparison or a constant, in a copy of the package. The tests of
its folder run on it, then random programs of `tests.differential`; survivors are printed for a person to
judge: some change nothing that can be seen.
"""

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  (the settings of JAX under test)
from tests.array_types import TYPES
from tests.differential.program import classes_of
from tests.fixtures import FIXTURES

ROOT = Path(__file__).parents[1]
FOLDERS = ("quaxlike/arrays", "quaxlike/core", "quaxlike/surgery")

PYTEST = ("pytest", "-x", "-q", "-n0", "-m", "", "-p", "no:cacheprovider")

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.And: ast.Or, ast.Or: ast.And},
}


class _Mutator(ast.NodeTransformer):
    """Finds what can be changed, and changes number `target` of it."""

    def __init__(self, target: int | None = None) -> None:
        self.target, self.sites = target, []

    def change(self, node: Any, new: ast.AST) -> ast.AST:
        self.sites.append((node.lineno, ast.unparse(node), ast.unparse(new)))
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
# The tests of a file
# -------------------------------------------------------------------------------------------------


GENERAL = {
    "arrays": [
        *(f"tests/arrays/test_{name}.py" for name in ("bounds", "annotated", "pairs", "every_pair")),
        *("tests/conformance/test_weights.py", "tests/conformance/test_kept.py"),
    ],
    "core": [
        *("tests/core", "tests/conformance/test_strict.py", "tests/primitives", "tests/test_programs.py"),
        "tests/sharding/test_explicit.py",
        *("tests/arrays/test_pairs.py", "tests/arrays/test_forms.py"),
    ],
    "surgery": ["tests/surgery"],
}
# Of folders of types, what tests elsewhere hold them to.
BESIDE = {
    "lora": ["tests/surgery/test_adapters.py"],
    "quantized": [
        *(f"tests/kernels/test_{name}.py" for name in ("block_matmul", "reached")),
        "tests/files/test_safetensors.py",
    ],
}


def tests_of(file: str) -> list[str]:
    """Arguments of pytest: the tests beside which the file is named, quick and close ones first."""
    room, *rest = Path(file).with_suffix("").parts[1:]
    folder = ROOT / "tests" / room
    if room == "arrays" and len(rest) == 1:  # what the folders of types share
        users = (ROOT / "quaxlike" / room).glob("*/*.py")
        rest += sorted({user.parent.name for user in users if f"from ..{rest[0]} import" in user.read_text()})
    close = sorted(path for part in rest for path in folder.glob(f"test_{part}*.py"))
    close += [folder / part for part in rest if (folder / part).is_dir()]
    beside = [test for part in rest for test in BESIDE.get(part, ())]
    paths = dict.fromkeys([*(str(path.relative_to(ROOT)) for path in close), *beside, *GENERAL[room]])
    package = _package(file)
    names = {cls.__name__ for name in types_of(file) for cls in classes_of(name) if package in str(cls)}
    if not names:
        return [*paths]
    of_all_types = "test_weights or test_every_pair or test_kept"
    return [*paths, "-k", f"not ({of_all_types}) or {' or '.join(sorted(names))}"]


def types_of(file: str) -> list[str]:
    """The rows of the table of types of which a part is defined in the folder of the file."""
    package = _package(file)
    return [name for name in TYPES if package and any(package in str(cls) for cls in classes_of(name))]


def _package(file: str) -> str:
    """`quaxlike.arrays.lora.` for its files; empty if that is not where types are defined."""
    parts = Path(file).parts
    return ".".join(parts[:3]) + "." if parts[1] == "arrays" and len(parts) > 3 else ""


def commands(file: str, examples: int) -> list[list[str]]:
    """Each fails if the file is wrong."""
    names = types_of(file)
    options = ["--seed", "0", "--rounds", "2", "--examples", str(examples), "--jobs", "1", "--minutes", "10"]
    tests = [*PYTEST, *tests_of(file)]
    if not examples or "/surgery/" in file:  # random programs are of arrays
        return [tests]
    return [tests, ["tests.differential", *options, *(["--types", *names] if names else [])]]


_COMPLAINT = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$|^--- finding \d+, seed \d+: (.*)"


def complaints(output: str) -> set[str]:
    """The tests that failed, and the findings."""
    lines = re.finditer(_COMPLAINT, output, re.MULTILINE)
    return {line[1] or line[2] for line in lines}


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
            "PYTHONDONTWRITEBYTECODE": "1",
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


def judge(mutant: Mutant, original: Copy, args: argparse.Namespace) -> tuple[str, str]:
    """How the mutant ended, and by what. A complaint that is made of the original, too, does not count."""
    changed = original.again(mutant.name)
    mutant.apply(changed.path)
    try:
        for command in commands(mutant.file, args.examples):
            status, output = changed.run(command, args.timeout)
            if status == "timeout":
                return "killed", "by a timeout"
            if status == "failed":
                found = complaints(output)
                if not found:
                    return "killed", f"by an error: {output[-200:]}"
                if command[0] == "pytest":
                    command = [*PYTEST, *found]
                if found := found - complaints(original.run(command, args.timeout)[1]):
                    return "killed", f"by {' '.join(sorted(found))}"
        return "survived", ""
    finally:
        shutil.rmtree(changed.path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="so many of the mutants of the seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--examples", type=int, default=100, help="random programs in each of two rounds")
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds for a command; it counts as killed"
    )
    parser.add_argument("--survivors", type=int, default=6, help="exits with an error if there are more")
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    args = parser.parse_args()
    everything = mutants(tuple(args.folders))
    chosen = random.Random(args.seed).sample(everything, args.skip + args.number)[args.skip :]
    print(f"{len(chosen)} of {len(everything)} mutants, seed {args.seed}", flush=True)
    counts: collections.Counter[str] = collections.Counter()

    def run(mutant: Mutant) -> None:
        start = time.monotonic()
        status, reason = judge(mutant, original, args)
        counts[status] += 1
        print(f"{status} {mutant}\n    {time.monotonic() - start:.0f} s {reason}", flush=True)

    with tempfile.TemporaryDirectory() as path:
        original = copy(Path(path))
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, chosen))
    print(f"seed {args.seed}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    return counts["survived"] > args.survivors


if __name__ == "__main__":
    sys.exit(main())
