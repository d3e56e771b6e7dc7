"""The compile check: its rows lower everywhere, and compile where the compilers are installed."""

import contextlib
import json
import re

import jax
import pytest

from benchmarks import compiled_rows, gpu_record, kernels_check
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
        assert figures.get("spills", 0) == 0
        most = row.dense_bytes if figures["fused"] else kernels_check._LIBRARY_BYTES
        assert figures["temporaries"] < most


def test_for_compute_capability_12_there_is_the_library_alone():
    assert not any(row["fused"] for row in RECORD["rtx5090"]["rows"])


@pytest.mark.parametrize("name", sorted(RECORD.keys() - {"rtx5090"}))
def test_block_sparse_rows_in_half_precision_are_kernels_without_temporaries(name):
    rows = [row for row in RECORD[name]["rows"] if row["row"].startswith("block-sparse")]
    rows = [row for row in rows if "float32" not in row["row"]]
    assert len(rows) >= 3
    assert all(row["fused"] and row["temporaries"] == 0 for row in rows)


@pytest.mark.slow
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
        copied = {"row": name, "fused": fused, "temporaries": most, "registers": 80}
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
def test_a_program_that_equals_one_before_it_has_figures_too():
    """FP4's is NF4's, with another codebook as an argument."""
    if missing := TARGETS["h100"].missing():
        pytest.skip(f"{', '.join(missing)} missing: pip install '.[kernels-check]'")
    found = {row["row"]: row for row in kernels_check.run("h100", "4 14336×4096, M = 16")}
    nf4, fp4 = (found[f"{name} 14336×4096, M = 16"] for name in ("NF4", "FP4"))
    assert fp4["registers"] == nf4["registers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_compiles_for_a_machine_that_is_not_at_hand(name):
    if missing := TARGETS[name].missing():
        pytest.skip(f"{', '.join(missing)} missing: pip install '.[kernels-check]'")
    (figures,) = kernels_check.run(name, "NF4 4096×4096, M = 16")
    recorded = {row["row"]: row for row in RECORD[name]["rows"]}
    assert kernels_check.problems(name, figures, recorded[figures["row"]]) == []


def test_a_kernel_without_figures_is_a_problem():
    """One that was compiled before in the process, for instance."""
    row = {"row": "FP4", "fused": True, "temporaries": 0}
    unknown = "h100, FP4: nothing is known about the kernel"
    assert kernels_check.problems("h100", row, None) == [unknown]
    known = row | {"registers": 80, "loop": 9, "resident": 3}
    assert kernels_check.problems("h100", row, known) == [
        unknown,
        "h100, FP4: registers unknown, recorded were 80",
        "h100, FP4: loop unknown, recorded were 9",
    ]
    decoding = {"row": "NF4", "fused": False, "decodes": True, "temporaries": 0}
    assert kernels_check.problems("h100", decoding, None) == ["h100, NF4: nothing is known about the kernel"]
    fewer = known | {"resident": 2}
    assert kernels_check.problems("h100", fewer, known) == [
        "h100, FP4: a multiprocessor holds 2 blocks, recorded were 3"
    ]


def test_every_recorded_kernel_has_figures():
    for name, of_target in RECORD.items():
        for row in of_target["rows"]:
            assert not kernels_check._lacks_figures(row), (name, row["row"])
            if row["fused"]:
                assert row["issue_us"] > 0
            if "registers" in row:
                assert row["resident"] > 0
                assert sum(row["mix"].values()) == row["loop"] > 0


def test_predictions_are_marked_and_agree_with_what_was_measured():
    calibration = kernels_check.Calibration(RECORD)
    assert len(calibration.factors) >= 10
    assert all(factor > 1 for factor in calibration.factors.values())  # nothing is faster than a bound
    (row,) = (row for row in RECORD["h100"]["rows"] if row["row"] == "NF4 14336×4096, M = 64")
    faster = gpu_record.H200_BYTES_PER_SECOND / TARGETS["h100"].bytes_per_second
    on_h200, _ = kernels_check.bound(row, faster)
    assert on_h200 * calibration.factors[row["row"]] == pytest.approx(51.8)
    assert kernels_check.table([row], calibration).splitlines()[-1].endswith("| ≈ 51.8 |")
    assert "≈" not in kernels_check.table([row])
    assert calibration.predicted({"row": "int8", "fused": False, "least_us": 1.0}) is None


def test_the_blocks_of_a_grid_are_those_of_the_launch(tmp_path):
    log = tmp_path / "a.mlir-passes.log"
    launch = "gpu.launch async [%t] blocks(%x, %y) in (%u = %map_1, %v = %map_2) threads(%i) in (%j = %c)"
    constants = "%map_1 = arith.constant 56 : index\n%map_2 = arith.constant 4 : index\n"
    log.write_text(constants + launch + "\n%map_1 = arith.constant 9 : index\n" + launch)
    assert kernels_check._blocks(log) == 224
