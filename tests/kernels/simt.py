"""Runs a GPU program, emitted by `quaxlike.kernels.lanes` as MLIR, for all threads of a block in NumPy.

Every thread's registers are one NumPy array, with the threads on its first axis; operations are
executed one after the other for all threads. Accesses out of bounds or misaligned are errors, and so
is reading from shared memory what another thread wrote since the last barrier.
"""

import dataclasses
import re

import ml_dtypes
import numpy as np
from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

_DTYPES = {
    "i1": np.bool_,
    "i8": np.uint8,
    "i16": np.uint16,
    "i32": np.uint32,
    "i64": np.uint64,
    "index": np.uint64,
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
}


_MANY = 2**31  # in place of the number of a thread


@dataclasses.dataclass
class Buffer:
    """Bytes of global or shared memory."""

    data: np.ndarray
    shared: bool = False
    base: int = 1024  # where it begins in shared memory

    def __post_init__(self):
        self.writer = np.full(self.data.size, -1)  # of each byte, since the last barrier
        self.in_warp = np.zeros(self.data.size, bool)  # bytes that the writer's warp may read
        self.reader = np.full(self.data.size, -1)  # of each byte, since the last barrier of a warp; or many
        self.pending = np.zeros(self.data.size, bool)  # bytes that a copy is still to write

    def write(self, at, data, threads):
        self.data[at], self.writer[at], self.in_warp[at] = data, threads, False


@dataclasses.dataclass
class Pointer:
    buffer: Buffer
    offset: np.ndarray | int = 0


@dataclasses.dataclass
class Stats:
    """What an execution met: the most threads that a bank kept waiting, of shared memory where each loads a
    word, and of the L1 cache where each loads 16 bytes."""

    load_conflicts: int = 0
    cache_conflicts: int = 0


def run(emit, arrays, out, shared, *, blocks, threads) -> tuple[np.ndarray, Stats]:
    """Runs `emit(refs)` on every block of a grid.

    `arrays` are inputs; `out` and `shared`, pairs of shape and dtype; the result is first NaNs.
    """
    result = np.full(*out[:1], np.nan, dtype=out[1])
    of_global = [np.array(a) for a in arrays] + [result]
    types = [(a.shape, a.dtype, "") for a in of_global]
    types += [(*s, ", #gpu.address_space<workgroup>") for s in shared]
    stats = Stats()
    with make_ir_context(), ir.Location.unknown():
        function = _function(emit, types)
        buffers = [Buffer(a.reshape(-1).view(np.uint8)) for a in of_global]
        for block in range(blocks):
            scratch = [
                Buffer(np.full(np.prod(s) * np.dtype(d).itemsize, 0xFF, np.uint8), shared=True)
                for s, d in shared
            ]
            _Block(block, threads, stats).run(function, buffers + scratch)
    return result, stats


def _function(emit, types):
    names = {np.dtype(v): k for k, v in _DTYPES.items() if k not in ("i64", "index")}
    refs = [
        ir.Type.parse(f"memref<{'x'.join(map(str, shape))}x{names[np.dtype(dtype)]}{space}>")
        for shape, dtype, space in types
    ]
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        function = func.FuncOp("program", (refs, []))
        with ir.InsertionPoint(function.add_entry_block()):
            emit(list(function.arguments))
            func.ReturnOp([])
    assert module.operation.verify()
    function.module = module  # kept alive
    return function


def _dtype(type_):
    match = re.fullmatch(r"vector<\d+x(\w+)>", str(type_))
    return np.dtype(_DTYPES[match[1] if match else str(type_)])


class _Block:
    """One block of threads: its place in the grid, its registers, which threads are active."""

    def __init__(self, block, threads, stats):
        self.block, self.threads, self.stats = block, threads, stats
        self.values = {}
        self.copies, self.groups = [], []  # begun since the last group; in groups that are not done
        self.active = np.ones(threads, bool)
        self.buffers = []

    def run(self, function, buffers):
        self.buffers = buffers
        for argument, buffer in zip(function.arguments, buffers, strict=True):
            self.values[argument] = buffer
        self._ops(function.entry_block)
        assert not self.copies + self.groups, "copies that nobody waited for"

    def _ops(self, block):
        for op in block.operations:
            op = op.operation
            operands = [self.values[v] for v in op.operands]
            handler = getattr(self, "_" + op.name.replace(".", "_"), None)
            if op.name in ("scf.yield", "func.return"):
                return operands
            if handler is None:
                raise NotImplementedError(f"an operation that the model lacks: {op}")
            results = handler(op, *operands)
            results = results if isinstance(results, list) else [results]
            self.values.update(zip(op.results, results, strict=False))
        return []

    def _full(self, value, dtype):
        return np.full(self.threads, value, dtype)

    # Indices and constants ------------------------------------------------------------------------

    def _gpu_thread_id(self, op):
        return np.arange(self.threads, dtype=np.uint64)

    def _gpu_block_id(self, op):
        return self._full(self.block, np.uint64)

    def _arith_index_cast(self, op, x):
        return x.astype(_dtype(op.results[0].type))

    def _arith_constant(self, op):
        return self._full(op.attributes["value"].value, _dtype(op.results[0].type))

    # Arithmetic -----------------------------------------------------------------------------------

    def _binary(fn):
        def handler(self, op, a, b):
            with np.errstate(over="ignore"):
                return fn(a, b)

        return handler

    _arith_addi = _arith_addf = _binary(np.add)
    _arith_subi = _arith_subf = _binary(np.subtract)
    _arith_muli = _arith_mulf = _binary(np.multiply)
    _arith_divui = _binary(np.floor_divide)
    _arith_remui = _binary(np.remainder)
    _arith_shrui = _binary(np.right_shift)
    _arith_shli = _binary(np.left_shift)
    _arith_andi = _binary(np.bitwise_and)
    _arith_ori = _binary(np.bitwise_or)
    _arith_xori = _binary(np.bitwise_xor)
    _arith_minui = _binary(np.minimum)

    def _arith_cmpi(self, op, a, b):
        assert op.attributes["predicate"].value == 6, "only `ult` is modelled"
        return a < b

    def _arith_select(self, op, condition, a, b):
        return np.where(condition, a, b)

    def _llvm_intr_fma(self, op, a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def _arith_truncf(self, op, x):
        return x.astype(_dtype(op.results[0].type))

    def _arith_bitcast(self, op, x):
        return x.view(_dtype(op.results[0].type))

    def _arith_trunci(self, op, x):
        return x.astype(_dtype(op.results[0].type))

    _arith_extf = _arith_uitofp = _arith_trunci

    def _arith_extui(self, op, x):
        return x.astype(_dtype(op.results[0].type))

    # Control flow ---------------------------------------------------------------------------------

    def _scf_for(self, op, lower, upper, step, *carry):
        body = op.regions[0].blocks[0]
        carry = list(carry)
        assert (upper == upper[0]).all()
        for i in range(lower[0], upper[0], step[0]):
            self.values[body.arguments[0]] = self._full(i, np.uint32)
            self.values.update(zip(list(body.arguments)[1:], carry, strict=True))
            carry = self._ops(body)
        return carry

    def _scf_if(self, op, condition):
        outer = self.active
        self.active = outer & condition
        self._ops(op.regions[0].blocks[0])
        self.active = outer
        return []

    def _gpu_barrier(self, op):
        assert self.active.all()
        for buffer in self.buffers:
            buffer.writer[:] = buffer.reader[:] = -1
        return []

    # Memory ---------------------------------------------------------------------------------------

    def _builtin_unrealized_conversion_cast(self, op, buffer):
        return [[Pointer(buffer), Pointer(buffer), self._full(0, np.uint64)]]

    def _llvm_extractvalue(self, op, struct):
        (position,) = op.attributes["position"]
        return [struct[position]]

    def _llvm_ptrtoint(self, op, pointer):
        if str(op.results[0].type) == "i64":  # on the way to another pointer
            return pointer
        return (pointer.buffer.base + pointer.offset).astype(np.uint32)

    def _llvm_inttoptr(self, op, pointer):
        return pointer

    def _at_address(self, address):
        (buffer,) = (b for b in self.buffers if b.shared)
        return Pointer(buffer, address.astype(np.int64) - buffer.base)

    def _llvm_mul(self, op, a, b):
        return a * b

    def _llvm_add(self, op, pointer, offset):
        return Pointer(pointer.buffer, pointer.offset + offset)

    def _llvm_getelementptr(self, op, pointer, index):
        assert str(op.attributes["elem_type"]) == "i8"
        assert (index < 2**31).all(), "an index is sign-extended"
        return Pointer(pointer.buffer, pointer.offset + index)

    def _bytes(self, pointer, size, count):
        """Where the bytes of an access are, by active thread."""
        offset = pointer.offset[self.active].astype(np.int64)
        assert (offset % (size * count) == 0).all(), "a misaligned access"
        assert (offset + size * count <= pointer.buffer.data.size).all(), "out of bounds"
        return offset[:, None] + np.arange(size * count)

    def _load(self, pointer, dtype, count):
        at = self._bytes(pointer, dtype.itemsize, count)
        buffer = pointer.buffer
        if buffer.shared:
            writer, reader = buffer.writer[at], np.flatnonzero(self.active)[:, None]
            seen = (writer < 0) | (writer == reader) | (buffer.in_warp[at] & (writer // 32 == reader // 32))
            assert seen.all(), "a race: no barrier before a load"
            others = (buffer.reader[at] >= 0) & (buffer.reader[at] != reader)
            buffer.reader[at] = np.where(others, _MANY, reader)
            assert not buffer.pending[at].any(), "a race: no waiting for a copy"
            if dtype.itemsize * count == 4:
                self.stats.load_conflicts = max(self.stats.load_conflicts, _conflicts(at[:, ::4] // 4))
        elif dtype.itemsize * count == 16:
            self.stats.cache_conflicts = max(self.stats.cache_conflicts, _conflicts(at[:, ::4] // 4))
        out = np.zeros((self.threads, count), dtype)
        out[self.active] = buffer.data[at].view(dtype)
        return out

    def _llvm_load(self, op, pointer):
        type_ = op.results[0].type
        match = re.fullmatch(r"vector<(\d+)x\w+>", str(type_))
        out = self._load(pointer, _dtype(type_), int(match[1]) if match else 1)
        return out if match else out[:, 0]

    def _llvm_store(self, op, value, pointer):
        value = value if value.ndim == 2 else value[:, None]
        at = self._bytes(pointer, value.dtype.itemsize, value.shape[1])
        data = np.ascontiguousarray(value[self.active]).view(np.uint8)
        assert np.unique(at).size == at.size, "two threads store to one place"
        assert not pointer.buffer.pending[at].any(), "a copy that is not done stores there"
        pointer.buffer.write(at, data, np.flatnonzero(self.active)[:, None])
        return []

    def _llvm_mlir_undef(self, op):
        count = int(re.match(r"vector<(\d+)x", str(op.results[0].type))[1])
        return np.zeros((self.threads, count), _dtype(op.results[0].type))

    def _llvm_extractelement(self, op, vector, index):
        return vector[:, index[0]]

    def _llvm_insertelement(self, op, vector, value, index):
        vector = vector.copy()
        vector[:, index[0]] = value
        return vector

    # PTX ------------------------------------------------------------------------------------------

    def _llvm_inline_asm(self, op, *operands):
        ptx = op.attributes["asm_string"].value
        if match := re.match(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.", ptx):
            return [_mma(operands, np.dtype(_DTYPES[match[1]]))]
        if match := re.match(r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16 ", ptx):
            return [self._load_matrices(self._at_address(operands[0]), transposed=match[1] is not None)]
        if match := re.match(r"cvt\.rn\.(b?f16)x2\.f32 ", ptx):
            high, low = (x.astype(_DTYPES[match[1]]).view(np.uint16).astype(np.uint32) for x in operands)
            return [low | high << np.uint32(16)]
        if match := re.match(r"cp\.async\.(?:ca|cg)\.shared\.global \[\$0\], \[\$1\], (\d+), \$2;", ptx):
            return self._begin_copy(self._at_address(operands[0]), *operands[1:], int(match[1]))
        if ptx == "bar.warp.sync 0xffffffff;":
            assert self.active.all()
            for buffer in self.buffers:
                buffer.in_warp[buffer.writer >= 0] = True
                buffer.reader[:] = -1
            return []
        if ptx == "cp.async.commit_group;":
            self.groups, self.copies = [*self.groups, self.copies], []
            return []
        if match := re.match(r"cp\.async\.wait_group (\d+);", ptx):
            while len(self.groups) > int(match[1]):
                for copy in self.groups.pop(0):
                    copy()
            return []
        raise NotImplementedError(f"an instruction that the model lacks: {ptx}")

    def _load_matrices(self, pointer, transposed):
        """The PTX ISA's `ldmatrix`: eight lanes name the rows of each of four matrices."""
        assert self.active.all()
        rows = self._load(pointer, np.dtype(np.uint16), 8)
        banks = pointer.offset.reshape(-1, 8).astype(np.int64) // 16 % 8
        worst = max(np.bincount(of_matrix).max() for of_matrix in banks)
        self.stats.load_conflicts = max(self.stats.load_conflicts, int(worst) - 1)
        matrices = rows.reshape(-1, 4, 8, 8)
        matrices = matrices.swapaxes(2, 3) if transposed else matrices
        pairs = np.ascontiguousarray(matrices).view(np.uint32)  # lane = 4 · row + pair
        return [*np.moveaxis(pairs, 1, 0).reshape(4, -1)]

    def _begin_copy(self, to, source, read, size):
        assert self.active.all()
        assert to.buffer.shared
        at = self._bytes(to, size, 1)
        assert np.unique(at).size == at.size, "two threads copy to one place"
        assert not to.buffer.pending[at].any(), "a copy that is not done writes there"
        reader = to.buffer.reader[at]
        own = (reader < 0) | (reader == np.arange(self.threads)[:, None])
        assert own.all(), "a race: no barrier between a load and a copy"
        to.buffer.pending[at] = True
        present = read > 0
        assert (source.offset % size == 0).all(), "a misaligned access"
        start = source.offset[present].astype(np.int64)
        assert (start + size <= source.buffer.data.size).all(), "out of bounds"

        def copy():
            data = np.zeros(at.shape, np.uint8)
            data[present] = source.buffer.data[start[:, None] + np.arange(size)]
            to.buffer.write(at, data, np.arange(self.threads)[:, None])
            to.buffer.pending[at] = False

        self.copies.append(copy)
        return []


def _conflicts(words):
    """The most threads that wait for a bank. As many are served at a time as load 128 bytes."""
    together = words.reshape(-1, 32)
    return max(int(np.bincount(np.unique(of_some) % 32).max()) for of_some in together) - 1


def _mma(operands, dtype):
    """The PTX ISA's `mma.m16n8k16`: fragments to matrices, their product, back to fragments."""
    a, b, c = operands[:4], operands[4:6], operands[6:]
    lane = np.arange(32)
    group, quad = lane // 4, lane % 4
    warps = a[0].size // 32
    pairs = lambda reg: np.ascontiguousarray(reg).reshape(warps, 32, 1).view(dtype).astype(np.float64)
    left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
    for i, reg in enumerate(a):
        row, column = group + 8 * (i % 2), 2 * quad + 8 * (i // 2)
        for j in range(2):
            left[:, row, column + j] = pairs(reg)[:, :, j]
    for i, reg in enumerate(b):
        for j in range(2):
            right[:, 2 * quad + 8 * i + j, group] = pairs(reg)[:, :, j]
    product = left @ right
    places = [(group + 8 * (i // 2), 2 * quad + i % 2) for i in range(4)]
    return [
        (reg.reshape(warps, 32) + product[:, row, column]).astype(np.float32).reshape(-1)
        for reg, (row, column) in zip(c, places, strict=True)
    ]
