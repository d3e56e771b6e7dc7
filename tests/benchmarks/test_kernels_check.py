"""The compile check: its rows lower everywhere, and compile where the compilers are installed."""

import contextlib
import json
import re

import jax
import pytest

from benchmarks import compiled_rows, kernels_check
from benchmarks.targets import TARGETS
from tests.kernels.weights import tpu_at_hand

RECORD = json.loads(kernels_check.RECORD.read_text())


@pytest.mark.slow
def test_the_record_and_its_page_are_of_the_rows_of_today():
    for name, of_target in RECORD.items():
        rows = [row.name for row in compiled_rows.rows(TARGETS[name].platform)]
        assert [row["row"] for row in of_target["rows"]] == rows
    assert kernels_check.PAGE.read_text("utf-8") == kernels_check.page(RECORD)


@pytest.mark.quick("v5e")
@pytest.mark.parametrize("name", RECORD)
def test_no_recorded_row_spills_or_makes_a_dense_copy(name):
    """Nor the library more than it is allowed; and each row was compiled."""
    for row, figures in zip(compiled_rows.rows(TARGETS[name].platform), RECORD[name]["rows"], strict=True):
        assert "error" not in figures
        assert kernels_check.problems(name, figures, figures) == []
        assert figures.get("spills", 0) <= 24  # of adapters, for 64 rows
        most = row.dense_bytes if figures["fused"] else kernels_check._LIBRARY_BYTES
        assert figures["temporaries"] < most


@pytest.mark.parametrize("name", RECORD)
def test_block_sparse_rows_in_half_precision_are_kernels_without_temporaries(name):
    rows = [row for row in RECORD[name]["rows"] if row["row"].startswith("block-sparse")]
    rows = [row for row in rows if "float32" not in row["row"]]
    assert len(rows) >= 3
    assert all(row["fused"] and row["temporaries"] == 0 for row in rows)


def test_warpgroups_multiply_asynchronously():
    by_warpgroups = [row for row in RECORD["h100"]["rows"] if row["row"].startswith("block-sparse, 50%")]
    assert len(by_warpgroups) == 3
    assert not any(row["serialized"] for row in by_warpgroups)
    figures = by_warpgroups[0] | {"serialized": 1}
    assert "the assembler serializes them" in kernels_check.problems("h100", figures, by_warpgroups[0])[0]


@pytest.mark.parametrize(("name", "fp8"), [("h100", "f8e4m3fn"), ("a100", "f16")])
def test_codes_are_multiplied_as_they_are(name, fp8):
    """Forward and backward, by the recorded programs; an A100 has no units for float8."""
    found = {row["row"].partition(" 14336")[0]: row.get("multiplies") for row in RECORD[name]["rows"]}
    for way in ("forward", "gradient of x"):
        assert found[f"int8 × int8, {way}"] == "s8 × s8"
        assert found[f"fp8 × fp8, {way}"] == f"{fp8} × {fp8}"


def test_the_operands_of_products_are_found_in_a_program():
    text = """
%fused (p.1: s8[4,8], p.2: s8[2,8]) -> s32[4,2] {
  %p.1 = s8[4,8]{1,0} parameter(0)
  %p.2 = s8[2,8]{1,0} parameter(1)
  ROOT %dot.1 = s32[4,2]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (a: bf16[4,8]) -> f32[4,2] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = f16[8,2]{1,0} convert(%a)
  %c = (f32[4,2]{1,0}, s8[9]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
}
"""
    assert kernels_check.multiplied(text) == "bf16 × f16, s8 × s8"


@pytest.mark.parametrize("name", ["h100", "a100"])
def test_no_recorded_kernel_needs_a_copy_of_its_weight(name):
    fused = [row for row in RECORD[name]["rows"] if row["fused"]]
    assert max(row["of_the_weight"] for row in fused) < 0.05
    assert {"BlockArray mxfp4, x @ W 14336×4096, M = 16", "NF4, x @ W 14336×4096, M = 64"} <= {
        row["row"] for row in fused
    }


@pytest.mark.parametrize("transpose", [False, True])
def test_int8_multiplies_no_dense_weight_by_scales(transpose):
    """What XLA fuses is the cast of the codes alone."""
    row = compiled_rows.int8((4096, 1024), 16, transpose)
    text = jax.jit(row.fn).trace(*row.operands).lower(lowering_platforms=("cuda",)).as_text()
    made = re.findall(r"stablehlo\.(\w+).*-> tensor<4096x1024xbf16>", text)
    assert made == ["convert"]
    assert not re.search(r"stablehlo\.multiply.*tensor<4096x1024x", text)


def test_float32_is_not_rounded_to_tensorfloat32():
    row = compiled_rows.nf4((64, 128), 16, dtype="float32")
    text = jax.jit(row.fn).trace(*row.operands).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"dot_general.*precision = \[(.*?)\]", text) == ["HIGHEST, HIGHEST"]
    with jax.default_matmul_precision("tensorfloat32"):
        text = jax.jit(row.fn).trace(*row.operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "HIGHEST" not in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::quaxlike.kernels.KernelFallbackWarning")  # block-sparse in float32
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_every_kind_of_row_lowers(platform):
    kinds = {row.operation: row for row in compiled_rows.rows(platform)}
    for row in kinds.values():
        with tpu_at_hand() if row.for_a_device else contextlib.nullcontext():
            assert jax.jit(row.fn).trace(*row.operands).lower(lowering_platforms=(platform,)) is not None


@pytest.mark.slow
def test_what_counts_as_worse():
    row = {"row": "NF4", "fused": True, "registers": 80, "spills": 0, "temporaries": 0}
    assert kernels_check.problems("h100", row, row) == []
    assert kernels_check.problems("h100", row | {"spills": 8}, None) == ["h100, NF4: spills 8 bytes"]
    worse = row | {"fused": False, "registers": 128, "temporaries": 2**27}
    said = "\n".join(kernels_check.problems("h100", worse, row))
    assert "registers 128, recorded were 80" in said
    assert "temporaries 134217728, recorded were 0" in said
    assert "no kernel of ours runs" in said
    dense = 2 * 14336 * 4096
    for operation, fused, most in (("NF4", True, dense), ("int8", False, 2**28)):
        name = next(row for row in compiled_rows.rows("cuda") if row.operation == operation).name
        copied = {"row": name, "fused": fused, "temporaries": most}
        assert kernels_check.problems("a100", copied, copied) == [
            f"a100, {name}: temporaries {most}, allowed are less than {most}"
        ]
    decoded = {"row": "int8 × int8", "fused": False, "temporaries": 0, "multiplies": "bf16 × bf16"}
    assert kernels_check.problems("h100", decoded, decoded | {"multiplies": "s8 × s8"}) == [
        "h100, int8 × int8: multiplies bf16 × bf16, recorded was s8 × s8"
    ]
    failed = {"row": "NF4", "error": "LLVM ERROR"}
    assert kernels_check.problems("a100", failed, row) == ["a100, NF4: LLVM ERROR"]
    assert kernels_check.problems("a100", failed, failed) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_compiles_for_a_machine_that_is_not_at_hand(name):
    if missing := TARGETS[name].missing():
        pytest.skip(f"{', '.join(missing)} missing: pip install '.[kernels-check]'")
    (figures,) = kernels_check.run(name, "NF4 4096×4096, M = 16")
    recorded = {row["row"]: row for row in RECORD[name]["rows"]}
    assert kernels_check.problems(name, figures, recorded[figures["row"]]) == []


def test_the_loop_in_which_tensor_cores_multiply_is_counted(tmp_path):
    sass = tmp_path / "a.sass_ctrl"
    loop = lambda name, *body: [f".{name}:", *body, f"@P0 BRA `(.{name})"]
    lines = [
        "MOV R1, R2",
        *loop("L_x_0", *["FADD R1, R1, R2"] * 9),
        *loop("L_x_1", "HMMA.16816.F32 R4, R8", "NOP"),
    ]
    lines += [*loop("L_x_2", "HGMMA.64x128x16.F32.BF16 R24, R16"), "@P1 BRA `(.L_x_3)", ".L_x_3:", "EXIT"]
    text = (line if line[-1] == ":" else f"  /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))
    sass.write_text("\n".join(text))
    assert kernels_check._loop(sass) == 3
