"""A small embedded language for per-thread GPU programs, emitting MLIR.

Usually kernels are written in terms of arrays. This gets in the way when data must be kept in registers, in
exactly the layout expected by an instruction. For this purpose, Mosaic GPU accepts code written directly as
MLIR (using `inline_mgpu`), and this module makes it readable. Only import it whilst tracing a kernel.

A `Reg` represents a value in every thread, and all Python control flow happens at trace time. A Python `if`
on a `Reg` would select the same branch for all threads: use `select` or `when` instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf


def _types() -> dict[str, ir.Type]:
    return {
        # MLIR integers are signless. Operations on them are always unsigned.
        "u1": ir.IntegerType.get_signless(1),
        "u8": ir.IntegerType.get_signless(8),
        "u16": ir.IntegerType.get_signless(16),
        "u32": ir.IntegerType.get_signless(32),
        "u64": ir.IntegerType.get_signless(64),
        "float32": ir.F32Type.get(),
        "bfloat16": ir.BF16Type.get(),
        "float16": ir.F16Type.get(),
    }


_BYTES = {"u8": 1, "u16": 2, "u32": 4, "float32": 4, "bfloat16": 2, "float16": 2}


class Reg:
    """A value held in a register by each thread, either an unsigned integer or a float."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: "Reg | int | float") -> "Reg":
        return self._binary(arith.addi, arith.addf, other)

    def __mul__(self, other: "Reg | int | float") -> "Reg":
        return self._binary(arith.muli, arith.mulf, other)

    def __sub__(self, other: "Reg | int | float") -> "Reg":
        return self._binary(arith.subi, arith.subf, other)

    def __floordiv__(self, other: "Reg | int") -> "Reg":
        return self._binary(arith.divui, None, other)

    def __mod__(self, other: "Reg | int") -> "Reg":
        return self._binary(arith.remui, None, other)

    def __rshift__(self, other: "Reg | int") -> "Reg":
        return self._binary(arith.shrui, None, other)

    def __lshift__(self, other: "Reg | int") -> "Reg":
        return self._binary(arith.shli, None, other)

    def __and__(self, other: "Reg | int") -> "Reg":
        return self._binary(arith.andi, None, other)

    def __or__(self, other: "Reg | int") -> "Reg":
        return self._binary(arith.ori, None, other)

    def __xor__(self, other: "Reg | int") -> "Reg":
        return self._binary(arith.xori, None, other)

    def __lt__(self, other: "Reg | int") -> "Reg":
        return self._binary(lambda a, b: arith.cmpi(arith.CmpIPredicate.ult, a, b), None, other)

    def _binary(self, of_ints: Any, of_floats: Any, other: "Reg | int | float") -> "Reg":
        op = of_ints if isinstance(self.value.type, ir.IntegerType) else of_floats
        return Reg(op(self.value, _like(self, other).value))


def _like(reg: Reg, other: Reg | int | float) -> Reg:
    return other if isinstance(other, Reg) else Reg(utils.c(other, reg.value.type))


def number(value: int | float, dtype: str) -> Reg:
    """Returns a constant, the same in every thread."""
    return Reg(utils.c(value, _types()[dtype]))


def minimum(a: Reg, b: Reg | int) -> Reg:
    return Reg(arith.minui(a.value, _like(a, b).value))


def select(condition: Reg, a: Reg, b: Reg | int | float) -> Reg:
    return Reg(arith.select(condition.value, a.value, _like(a, b).value))


def fma(a: Reg, b: Reg, c: Reg) -> Reg:
    """Computes `a * b + c` in floating point, with a single rounding."""
    # Whether LLVM contracts `a * b + c` isn't specified, so use an explicit instruction.
    return Reg(llvm.intr_fma(a.value, b.value, c.value))


def round_to(x: Reg, dtype: str) -> Reg:
    """Rounds a float32 to a narrower dtype, with ties to even."""
    return x if dtype == "float32" else Reg(arith.truncf(_types()[dtype], x.value))


def widen(x: Reg) -> Reg:
    """Zero-extends a narrow value's bits to an unsigned 32-bit integer."""
    if not isinstance(x.value.type, ir.IntegerType):
        width = ir.IntegerType.get_signless(x.value.type.width)
        x = Reg(arith.bitcast(width, x.value))
    return Reg(arith.extui(_types()["u32"], x.value))


def pack(low: Reg, high: Reg, dtype: str) -> Reg:
    """Rounds two float32 values to a 16-bit dtype and packs them into a single register."""
    short = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    operands = [(high.value, "f"), (low.value, "f")]  # PTX expects the upper half first.
    return inline_ptx(f"cvt.rn.{short}.f32 $0, $1, $2;", [_types()["u32"]], "=r", operands)[0]


def as_float32(bits: Reg) -> Reg:
    """Bitcasts an unsigned 32-bit integer to float32."""
    return Reg(arith.bitcast(_types()["float32"], bits.value))


def from_float16(bits: Reg) -> Reg:
    """Converts the float16 in the lower half of an unsigned 32-bit integer to float32."""
    half = arith.trunci(_types()["u16"], bits.value)
    return Reg(arith.extf(_types()["float32"], arith.bitcast(_types()["float16"], half)))


def to_float32(x: Reg) -> Reg:
    """Converts an unsigned integer to float32."""
    return Reg(arith.uitofp(_types()["float32"], x.value))


def thread_index() -> Reg:
    """Returns this thread's index within its block."""
    return _index(gpu.thread_id(gpu.Dimension.x))


def block_index() -> Reg:
    """Returns this block's index within a one-dimensional grid."""
    return _index(gpu.block_id(gpu.Dimension.x))


def _index(value: Any) -> Reg:
    return Reg(arith.index_cast(_types()["u32"], value))


def barrier() -> None:
    """Waits for all threads in the block. After this, their stores are visible to one another."""
    gpu.barrier()


def warp_barrier() -> None:
    """As `barrier`, but only for the threads in a warp."""
    _effect("bar.warp.sync 0xffffffff;")


class MemoryRegion:
    """An array in global or shared memory, with offsets given in bytes."""

    def __init__(self, ref: Any) -> None:
        self.pointer = utils.memref_ptr(ref)

    def load(self, offset: Reg, dtype: str, count: int = 1) -> list[Reg]:
        """Loads `count` consecutive values in a single access.

        The offset must be a multiple of the whole access size, not just the size of a single value.
        """
        dtype_ = _types()[dtype]
        size = _BYTES[dtype] * count
        if count == 1:
            return [Reg(llvm.load(dtype_, self._at(offset), alignment=size))]
        vector = llvm.load(ir.VectorType.get((count,), dtype_), self._at(offset), alignment=size)
        return [Reg(llvm.extractelement(vector, utils.c(i, _types()["u32"]))) for i in range(count)]

    def copy_to(self, offset: Reg, shared: "MemoryRegion", at: Reg, size: int, present: Reg) -> None:
        """Starts an asynchronous copy of 4, 8 or 16 bytes from global to shared memory.

        If not `present`, the destination is filled with zeros instead. Both offsets must be multiples of the
        size. To wait for the copy to complete, use `commit_copies` and `wait_for_copies`. It is then only
        visible to this thread: an additional barrier makes it visible to others.
        """
        # Bypass L1 if possible, i.e. for 16-byte copies.
        cache = "cg" if size == 16 else "ca"
        read = select(present, number(size, "u32"), 0)
        operands = [(shared.address(at).value, "r"), (self._at(offset), "l"), (read.value, "r")]
        _effect(f"cp.async.{cache}.shared.global [$0], [$1], {size}, $2;", operands)

    def address(self, offset: Reg) -> Reg:
        """Returns the 32-bit address of an offset in shared memory."""
        return Reg(llvm.ptrtoint(_types()["u32"], self._at(offset)))

    def store(self, offset: Reg, *numbers: Reg) -> None:
        """Stores consecutive values, all with the same dtype, using a single access."""
        first, *others = (n.value for n in numbers)
        if others:
            vector_type = ir.VectorType.get((len(numbers),), first.type)
            vector = llvm.mlir_undef(vector_type)
            for i, value in enumerate((first, *others)):
                vector = llvm.insertelement(vector, value, utils.c(i, _types()["u32"]))
            first = vector
        bits = utils.bitwidth(numbers[0].value.type) * len(numbers)
        llvm.store(first, self._at(offset), alignment=bits // 8)

    def _at(self, offset: Reg) -> Any:
        return utils.getelementptr(self.pointer, [offset.value], _types()["u8"])  # i.e. in bytes


def inline_ptx(
    ptx: str, results: Sequence[ir.Type], constraint: str, operands: Sequence[tuple[Any, str]]
) -> list[Reg]:
    """Emits a PTX instruction without side effects.

    In the instruction text, `$0`, `$1` etc. refer first to the results and then to the operands.
    """
    constraints = ",".join([constraint] * len(results) + [c for _, c in operands])
    values = [value for value, _ in operands]
    if len(results) == 1:
        return [Reg(llvm.inline_asm(results[0], values, ptx, constraints, has_side_effects=False))]
    struct = llvm.StructType.get_literal(list(results))
    out = llvm.inline_asm(struct, values, ptx, constraints, has_side_effects=False)
    return [Reg(llvm.extractvalue(type_, out, [i])) for i, type_ in enumerate(results)]


def _effect(ptx: str, operands: Sequence[tuple[Any, str]] = ()) -> None:
    """Emits a PTX instruction without results. Memory accesses can't be reordered across this instruction."""
    constraints = ",".join([*(c for _, c in operands), "~{memory}"])
    values = [value for value, _ in operands]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), values, ptx, constraints, has_side_effects=True)


def commit_copies() -> None:
    """Groups together all copies started by this thread since it last committed a group."""
    _effect("cp.async.commit_group;")


def wait_for_copies(pending: int) -> None:
    """Waits until at most `pending` copy groups by this thread are still in flight."""
    _effect(f"cp.async.wait_group {pending};")


def mma(acc: Sequence[Reg], a: Sequence[Reg], b: Sequence[Reg], dtype: str) -> list[Reg]:
    """Computes `acc + a @ b` collectively across a warp, with shapes (16, 16) and (16, 8), and float32 `acc`.

    Each thread holds a fragment of every matrix. Let group = lane // 4 and quad = lane % 4. The fragments of
    `a` and `b` have two adjacent elements per register, and contain:

    - for `a`: (group, 2·quad …), (group + 8, 2·quad …), (group, 2·quad + 8 …), (group + 8, …);
    - for `b`: (2·quad …, group), (2·quad + 8 …, group).

    The fragment of `acc` has one element per register, and contains (group, 2·quad), (group, 2·quad + 1),
    (group + 8, 2·quad), (group + 8, 2·quad + 1).
    """
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]

    def registers(*numbers: Any) -> Any:
        return "{" + ", ".join(f"${i}" for i in numbers) + "}"

    return inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 {registers(0, 1, 2, 3)}, "
        f"{registers(4, 5, 6, 7)}, {registers(8, 9)}, {registers(10, 11, 12, 13)};",
        [_types()["float32"]] * 4,
        "=f",
        [(r.value, "r") for r in (*a, *b)] + [(r.value, "f") for r in acc],
    )


def loop(steps: int | Reg, carry: list[Reg], body: Callable[[Reg, list[Reg]], list[Reg]]) -> list[Reg]:
    """Emits `for step in range(steps): carry = body(step, carry)`."""
    bounds = [i.value if isinstance(i, Reg) else utils.c(i, _types()["u32"]) for i in (0, steps, 1)]
    # If unrolled in Python, the size of the program would depend on the shapes.
    for_op = scf.ForOp(bounds[0], bounds[1], bounds[2], [r.value for r in carry])
    with ir.InsertionPoint(for_op.body):
        out = body(Reg(for_op.induction_variable), [Reg(v) for v in for_op.inner_iter_args])
        scf.yield_([r.value for r in out])
    return [Reg(v) for v in for_op.results]


def when(condition: Reg, body: Callable[[], None]) -> None:
    """Emits `body`, executed only by threads for which the condition holds."""
    if_op = scf.IfOp(condition.value)
    with ir.InsertionPoint(if_op.then_block):
        body()
        scf.yield_([])


def kernel(
    emit: Callable[[Any], None], *, name: str, out: Any, shared_words: int, blocks: int, threads: int
) -> Callable[..., jax.Array]:
    """Wraps the program emitted by `emit` as a function of arrays.

    `emit` is called with references to the operands and the result in global memory, and then to
    `shared_words` words in shared memory.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def program(context: Any, *refs: Any) -> None:
            emit(refs)

        program(*refs)

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[plgpu.SMEM((shared_words,), jnp.uint32)],
        grid=(blocks,),  # One-dimensional: programs derive their tiles from the index.
        grid_names=("block",),
        num_threads=threads // 128,  # in warpgroups
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
