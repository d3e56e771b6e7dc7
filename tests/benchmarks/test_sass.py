"""Loops of machine code, and what they do."""

import textwrap

import pytest

from benchmarks import sass
from benchmarks.targets import TARGETS


def listing(text: str) -> str:
    """As a disassembler prints it."""
    lines = [line.strip() for line in textwrap.dedent(text).strip().splitlines()]
    code = (
        line if line[-1] == ":" else f"  -:-:-:Y:01  /*{16 * i:04x}*/  {line} ;"
        for i, line in enumerate(lines)
    )
    return "\n".join(code)


# An inner loop that multiplies, in an outer one. It waits behind the end, from where it jumps back.
WAITING = """
    MOV R1, R2
    .L_outer:
    IADD3 R1, R1, R2
    .L_inner:
    SYNCS.TRYWAIT P1, [R2]
    @!P1 BRA `(.L_wait)
    .L_go:
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24
    LOP3.LUT R3, R3, R4, RZ
    @P2 BRA `(.L_inner)
    FADD R1, R1, R1
    @P3 BRA `(.L_outer)
    STG.E [R2], R1
    EXIT
    .L_wait:
    SYNCS.TRYWAIT P1, [R2]
    @!P1 BRA `(.L_wait)
    BRA `(.L_go)
    .L_end:
    BRA `(.L_end)
    NOP
"""


def test_the_innermost_loop_that_multiplies_is_the_main_one():
    (code,) = sass.read(listing(WAITING))
    assert sorted(map(len, sass.loops(code))) == [2, 8, 11]
    names = [one.name for one in sass.main_loop(code)]
    assert names.count("HGMMA.64x128x16.F32.BF16") == 1
    assert "STG.E" not in names
    assert "FADD" not in names
    assert sass.macs(sass.main_loop(code)) == 64 * 128 * 16 / 4
    kinds = sass.kinds(sass.main_loop(code))
    assert (kinds["tensor"], kinds["integer"], kinds["memory"], sum(kinds.values())) == (1, 1, 0, 8)


def test_of_several_loops_the_one_that_multiplies_the_most():
    (code,) = sass.read(
        listing("""
            .L_main:
            HMMA.16816.F32.BF16 R4, R8, R9, R4
            HMMA.16816.F32.BF16 R4, R8, R9, R4
            @P0 BRA `(.L_main)
            .L_rest:
            HMMA.1688.F32.BF16 R4, R8, R9, R4
            FFMA R1, R1, R1, R1
            IADD3 R1, R1, R1
            BRA.U UP0, `(.L_rest)
            .L_scale:
            FMUL R1, R1, R1
            FMUL R1, R1, R1
            FMUL R1, R1, R1
            FMUL R1, R1, R1
            @P0 BRA `(.L_scale)
            EXIT
        """)
    )
    assert sorted(map(len, sass.loops(code))) == [3, 4, 5]
    assert len(sass.main_loop(code)) == 3
    assert sass.macs(code) == 2 * 16 * 8 * 16 + 16 * 8 * 8


def test_code_without_tensor_cores_or_loops():
    (scaling,) = sass.read(listing("LDG.E R1, [R2]\n.L_x:\nFMUL R1, R1, R2\n@P0 BRA `(.L_x)\nEXIT"))
    assert [one.base for one in sass.main_loop(scaling)] == ["FMUL", "BRA"]
    (straight,) = sass.read(listing("LDG.E R1, [R2]\nFMUL R1, R1, R2\nSTG.E [R2], R1\nEXIT"))
    assert len(sass.main_loop(straight)) == 4
    assert sass.kinds(straight) == {"tensor": 0, "float": 1, "memory": 2, "integer": 0, "other": 1}


@pytest.mark.parametrize(
    ("name", "registers", "threads", "shared", "blocks"),
    [
        ("h100", 255, 256, 0, 1),  # registers: 65536 // (8 warps of 8192)
        ("h100", 128, 256, 0, 2),
        ("h100", 32, 128, 112 * 1024, 2),  # shared memory, of which each block costs a KiB more
        ("h100", 32, 128, 114 * 1024, 1),
        ("h100", 16, 1024, 0, 2),  # threads
        ("rtx5090", 16, 1024, 0, 1),
        ("h100", 16, 32, 0, 32),
    ],
)
def test_how_many_blocks_a_multiprocessor_holds(name, registers, threads, shared, blocks):
    assert sass.resident(registers, threads, shared, TARGETS[name].limits) == blocks
