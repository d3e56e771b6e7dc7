"""The machine code of NVIDIA's GPUs: the main loop of a kernel, and how many blocks of it are resident."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_TENSOR = re.compile(r"(?:[HIQ]|BF|UTC\w*)G?MMA$")
_MULTIPLY = re.compile(r"(?:F|H|D)(?:MUL|FMA)2?$")
# By the first letters of an instruction's name; those of no kind are barriers, branches and the like.
_KINDS = {
    "tensor": _TENSOR,
    "float": re.compile(r"(?:[FHDM]U?(?:ADD|MUL|FMA|FFMA|SETP|SEL|MNMX|NMX)|F2|I2F|HADD|HSET|FSWZ|MUFU)"),
    "memory": re.compile(r"(?:LD|ST|ATOM|RED|UTMA|UBLK)"),
    "integer": re.compile(
        r"U?(?:I(?!2F)|LOP|LEA|SHF|SHL|SHR|SEL|PRMT|PLOP|VIADD|VI|MOV|R2UR|BREV|POPC|FLO|BMSK|SGXT|CS2R|S2)"
    ),
}


class Instruction(NamedTuple):
    """An instruction: its name with modifiers, whether it is predicated, and where it may jump to."""

    name: str
    predicated: bool
    target: str | None

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def macs(self) -> float:
        """How many numbers tensor cores multiply for a warp."""
        if not _TENSOR.match(self.base):
            return 0
        if sizes := re.search(r"\.(\d+)x(\d+)x(\d+)", self.name):  # of four warps
            m, n, k = map(int, sizes.groups())
            return m * n * k / 4
        sizes = re.search(r"\.(16|8)(8)(\d+)", self.name)
        return int(sizes[1]) * int(sizes[2]) * int(sizes[3]) if sizes else 0


def macs(code: Sequence[Instruction]) -> float:
    """How many numbers a warp multiplies by tensor cores."""
    return sum(one.macs for one in code)


def read(text: str) -> list[list[Instruction]]:
    """The kernels of a listing, as `nvdisasm` and Mosaic write it; targets are positions within a kernel."""
    kernels: list[list[Instruction]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if line.lstrip().startswith(".text.") or not kernels:
            kernels.append([])
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(kernels[-1])
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)(.*)", line):
            jump = re.search(r"`\((\.L_\w+)\)", found[3]) if found[2].startswith("BRA") else None
            predicated = found[1] is not None or bool(re.match(r"\s*!?U?P\d", found[3]) and jump)
            kernels[-1].append(Instruction(found[2], predicated, jump[1] if jump else None))
    kernels = [kernel for kernel in kernels if kernel]
    at = lambda one: one._replace(target=str(labels[one.target])) if one.target in labels else one
    return [[at(one) for one in kernel] for kernel in kernels]


def loops(code: Sequence[Instruction]) -> list[set[int]]:
    """The natural loops: of an edge to an instruction that all paths to its origin go through.

    Waits are moved behind the end of a kernel, and jump back: no loop is closed by that.
    """
    after = [_after(code, i) for i in range(len(code))]
    before: dict[int, list[int]] = collections.defaultdict(list)
    for i, nexts in enumerate(after):
        for j in nexts:
            before[j].append(i)
    found: dict[int, set[int]] = {}
    for i, one in enumerate(code):
        head = int(one.target) if one.target is not None else None
        if head is not None and head < len(code) and i not in _reached(after, 0, without=head):
            found[head] = found.get(head, {head}) | _reached(before, i, without=head)
    # A block that nothing leads to, such as the jump to itself behind the end, is not executed.
    return [body for head, body in found.items() if head in _reached(after, 0)]


def _after(code: Sequence[Instruction], i: int) -> list[int]:
    one = code[i]
    jumps = [] if one.target is None else [int(one.target)]
    ends = one.base in ("EXIT", "BRA", "RET", "BRX") and not one.predicated
    return jumps if ends else [*jumps, i + 1]


def _reached(edges: Sequence[list[int]] | Mapping[int, list[int]], start: int, without: int = -1) -> set[int]:
    found, left = set[int](), [start]
    while left:
        i = left.pop()
        if i != without and i not in found and (isinstance(edges, Mapping) or i < len(edges)):
            found.add(i)
            left += edges[i]
    return found


def main_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The innermost loop in which tensor cores multiply, or scalar units if there is none; without either the
    whole code, each instruction of which is executed once."""
    for multiplies in (lambda one: one.macs, lambda one: float(bool(_MULTIPLY.match(one.base)))):
        bodies = [body for body in loops(code) if any(multiplies(code[i]) for i in body)]
        innermost = [body for body in bodies if not any(other < body for other in bodies)]
        if innermost:
            most = max(innermost, key=lambda body: sum(multiplies(code[i]) for i in body))
            return [code[i] for i in sorted(most)]
        if any(map(multiplies, code)):
            break
    return list(code)


def kinds(code: Sequence[Instruction]) -> dict[str, int]:
    """How many instructions there are of each kind."""
    of = lambda one: next((kind for kind, names in _KINDS.items() if names.match(one.base)), "other")
    found = collections.Counter(map(of, code))
    return {kind: found[kind] for kind in (*_KINDS, "other")}


def resident(registers: int, threads: int, shared: int, limits: Mapping[str, int]) -> int:
    """How many blocks a multiprocessor holds at a time; `limits` are its properties by XLA's names."""
    warps = -(-threads // 32)
    of_a_warp = -(-32 * registers // 256) * 256  # registers are given out in units of 256
    return min(
        limits["registers_per_core_limit"] // (warps * of_a_warp),
        limits["shared_memory_per_core"] // (shared + 1024),  # CUDA takes a KiB of each block
        limits["threads_per_core_limit"] // (32 * warps),
        32,
    )
