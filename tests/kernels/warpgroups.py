"""Products of warpgroups (`wgmma`) in the model of a GPU: their values, and what they forbid meanwhile.

Layouts of registers, descriptors of tiles and the swizzle are those of the PTX ISA.
"""

import re

import numpy as np

INSTRUCTION = re.compile(
    r"\{ \.reg \.pred adds; setp\.ne\.b32 adds, 1, 0; wgmma\.mma_async\.sync\.aligned\."
    r"m64n(\d+)k16\.f32\.(b?f16)\.\2 \{[$\d,]+\}, \{\$\d+,\$\d+,\$\d+,\$\d+\}, \$\d+, adds, 1, 1, 0; \}"
)


class Products:
    """The products of warpgroups that are not done, or that not all warpgroups know to be done."""

    def __init__(self):
        self.begun, self.groups, self.done = [], [], []
        self.sums = {}  # arrays of sums in flight, by identity
        self.usable = {}  # arrays that may be operands, by identity
        self.read = {}  # registers in flight, and how often

    @property
    def in_flight(self):
        return self.begun or any(self.groups)

    def check(self, op, operands):
        """That an operation leaves alone what products in flight read and write."""
        ptx = op.attributes["asm_string"].value if op.name == "llvm.inline_asm" else ""
        touched = [] if "wgmma.mma_async" in ptx else [id(v) for v in operands if isinstance(v, np.ndarray)]
        assert not self.sums.keys() & touched, f"sums of a product that is not done are read: {op}"
        assert not any(self.read.get(v) for v in op.results), f"a product in flight reads this register: {op}"

    def fence(self, registers):
        """The registers as copies, which products may take."""
        registers = [reg.copy() for reg in registers]
        self.usable |= {id(reg): reg for reg in registers}
        return registers

    def begin(self, op, operands, sums, read):
        acc, a = operands
        for reg in (*acc, *a):
            assert id(reg) in self.usable, "no fence between a register that is written and a product"
        sources = list(op.operands)[len(acc) : len(acc) + 4]
        for value in sources[:]:
            # The fence and what it is a fence of are one register.
            extract = value.owner
            fence = extract.operands[0].owner
            sources.append(fence.operands[extract.attributes["position"][0]])
        for value in sources:
            self.read[value] = self.read.get(value, 0) + 1
        for old, new in zip(acc, sums, strict=True):
            self.sums.pop(id(old), None)
            self.sums[id(new)] = self.usable[id(new)] = new
        buffer, at = read
        np.add.at(buffer.readers, at, 1)
        self.begun.append((sources, sums, read))

    def commit(self):
        self.groups, self.begun = [*self.groups, self.begun], []

    def wait(self, pending):
        while len(self.groups) > pending:
            for sources, sums, read in self.groups.pop(0):
                for value in sources:
                    self.read[value] -= 1
                for reg in sums:
                    self.sums.pop(id(reg), None)
                self.done.append(read)

    def barrier(self):
        for buffer, at in self.done:
            np.subtract.at(buffer.readers, at, 1)
        self.done = []


def product(acc, a, b):
    """`acc + a @ b.T` for (64, 16) fragments `a`, and for each warpgroup a (tokens, 16) `b`."""
    groups, thread = len(b), np.arange(128)
    row, quad = thread // 32 * 16 + thread % 32 // 4, thread % 4
    left = np.zeros((groups, 64, 16))
    for i, reg in enumerate(a):
        pairs = np.ascontiguousarray(reg).reshape(groups, 128, 1).view(b.dtype)
        for j in range(2):
            left[:, row + 8 * (i % 2), 2 * quad + 8 * (i // 2) + j] = pairs[:, :, j]
    with np.errstate(invalid="ignore"):
        sums = left @ b.astype(np.float64).swapaxes(1, 2)
    out = []
    for i, reg in enumerate(acc):
        own = sums[:, row + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * quad + i % 2]
        out.append((reg.reshape(groups, 128) + own).astype(np.float32).reshape(-1))
    return out


def addresses(descriptor, rows):
    """For each warpgroup, where the numbers of the (rows, 16) tile that its threads describe are."""
    of_groups = descriptor.reshape(-1, 128)
    assert (of_groups == of_groups[:, :1]).all(), "a warpgroup has one tile"
    return np.stack([_of_tile(int(of_group[0]), rows) for of_group in of_groups])


def _of_tile(descriptor, rows):
    field = lambda start, width: descriptor >> start & (1 << width) - 1
    start, rows_apart = field(0, 14) * 16, field(32, 14) * 16
    assert field(62, 2) == 1, "only the swizzle of 128 bytes is modelled"
    assert field(49, 3) == 0
    assert start % 1024 + 32 <= 128, (
        "rows begin at multiples of 1,024 bytes, and 16 columns are in one of them"
    )
    row, column = np.arange(rows)[:, None], np.arange(16)
    address = start + row // 8 * rows_apart + row % 8 * 128 + 2 * column
    return address ^ (address >> 7 & 7) << 4
