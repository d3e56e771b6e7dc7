import contextlib
import importlib.util
import itertools

import pytest

from benchmarks.rivals.rows import ROWS, Row, by_model
from tests.samples import Late

rivals, files = Late("benchmarks.rivals.__main__"), Late("benchmarks.rivals.files")
ours, theirs = Late("benchmarks.rivals.ours"), Late("benchmarks.rivals.theirs")


def found(row, cores, **figures):
    about = {"row": row.name, "rival": row.rival, "cores": cores, "at most": row.limit}
    return about | figures


def test_every_row_names_what_both_sides_do():
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert callable(getattr(ours, row.ours))
        side, _, function = row.theirs.rpartition(".")
        assert callable(getattr(ours if side else theirs, function))


@pytest.mark.slow
def test_the_page_and_the_picture(tmp_path):
    measured = {"ratio": 0.5, "range": [0.4, 0.8], "seconds": [0.01, 0.02], "repeats": 3, "load": [1.0, 2.0]}
    rows = [found(ROWS[0], cores, **measured) for cores in (1, 2)]
    rows.append(found(ROWS[-1], 1, missing="torch is not installed"))
    (slow,) = (row for row in ROWS if row.name == "GGUF Q8_0, a token")
    rows.append(found(slow, 2, **measured | {"ratio": 1.5}))
    of_each = {"date": "2026-11-28", "versions": "torch 2", "rows": rows}
    records = {"a processor": of_each, "another": of_each}
    page = rivals.page(records)
    heads = [f"{on}: on {cores}" for on in records for cores in (1, 2)]
    assert f"| work ÷ beside | at most | {' | '.join(heads)} |\n" in page
    assert f"| {ROWS[0].name} ÷ transformers | 0.95 | 0.50 | 0.50 | 0.50 | 0.50 |" in page
    assert "| Q8_0, token | **1.50**, –, – | **1.50**, –, – |" in page
    assert page.count("not run: torch is not installed") == 2
    assert page.count("\n- A token from a GGUF file: products are") == 1
    assert "134 million (12 layers of 768)" in page
    assert "at a commit that was not noted" in page
    rivals.draw(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size


@pytest.mark.slow
def test_what_shows_a_rivals_weakness_stands_apart(monkeypatch, tmp_path):
    """PyTorch in bfloat16 with AVX2 alone: not in the table, nor in the picture."""
    measured = {"ratio": 0.04, "range": [0.03, 0.05], "seconds": [0.01, 0.25], "commit": "abc"}
    by_name = {row.name: row for row in ROWS}
    names = ("QLoRA, a step", "float32, a token, eight", "GGUF Q8_0, a token")
    rows = [found(by_name[name], 1, **measured) for name in names]
    of_each = {"date": "2026-11-28", "versions": "torch 2", "rows": rows}
    records = {"EPYC (AVX2)": of_each, "EPYC (AVX2, AVX-512)": of_each}
    first, apart = rivals.page(records).split("## Where the other is slow")
    assert "| QLoRA, a step ÷ PEFT | 0.85 |  | 0.04 |" in first
    assert "| float32, a token, eight ÷ transformers | 0.48 | 0.04 | 0.04 |" in first
    assert first.count("2026-11-28, at commit abc.") == 2
    assert first.count("\nAll with torch 2.\n") == 1
    records["another"] = of_each | {"versions": "torch 3"}
    assert "2026-11-28, at commit abc, with torch 2." in rivals.page(records)
    del records["another"]
    assert apart.count("\n| QLoRA, a step ÷ PEFT | 0.85 | 0.04 |\n") == 1
    assert "float32" not in apart
    assert "llama.cpp" not in apart
    assert "Where the other" not in rivals.page({"EPYC (AVX2, AVX-512)": of_each})

    import matplotlib.axes
    import matplotlib.figure

    drawn, widths = [], []
    errorbar, save = matplotlib.axes.Axes.errorbar, matplotlib.figure.Figure.savefig

    def recorded(self, x, *rest, label, **options):
        drawn.append((label, len(x)))
        return errorbar(self, x, *rest, label=label, **options)

    def saved(self, *rest, **options):
        widths.append(self.get_size_inches()[0])
        return save(self, *rest, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "errorbar", recorded)
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", saved)
    rivals.draw(records, tmp_path / "picture.png")
    assert drawn == [("EPYC (AVX2)", 2), ("EPYC (AVX2, AVX-512)", 3)]
    assert widths == [4.6]  # letters of 8 points are read on a phone


def test_prompts_are_compared_in_each_form_of_gguf():
    prompts = [row for row in ROWS if ", a prompt of " in row.name]
    assert {(row.options["file"], row.options["length"]) for row in prompts} == {
        (kind, length) for kind in files.GGUF for length in (8, 128, 512)
    }
    assert {row.theirs for row in prompts} == {"llama_prefill"}
    for form, option in (("bfloat16", {"dtype": "bfloat16"}), ("int8", {"compute": "int8"})):
        of_form = [row for row in prompts if f" in {form}, " in row.name]
        assert len(of_form) == len(files.GGUF) * 3
        assert all(row.of_ours == option for row in of_form)


def test_rows_that_load_the_same_models_follow_one_another():
    rows = by_model(ROWS)
    assert sorted(row.name for row in rows) == sorted(row.name for row in ROWS)
    for side in (0, 1):
        loaded = [row.models[side] for row in rows if row.models[side]]
        assert len([*itertools.groupby(loaded)]) == len({*loaded})
    assert sum(row.models == (None, None) for row in rows) == 12


@pytest.mark.slow
def test_rows_share_the_process_of_a_model(tmp_path):
    job = {"folder": str(tmp_path), "size": files.QUICK, "side": "ours", "function": "product", "options": {}}
    with contextlib.closing(rivals.Sides()) as sides:
        first = sides.prepared("ours", job, 1, "a model")
        assert first.run() > 0
        assert sides.prepared("ours", job, 1, "a model") is first
        assert len({first, sides.prepared("ours", job, 1, None), sides.prepared("ours", job, 1, None)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tracing a decoder with LoRA", "int8, 256 rows"])
def test_rows_of_ours_alone(name, tmp_path):
    (row,) = (row for row in ROWS if row.name == name)
    measured = rivals.measure(row, 1, tmp_path, files.QUICK, 2)
    assert measured["repeats"] == 2
    assert measured["range"][0] <= measured["ratio"] <= measured["range"][1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="The rival is installed.")
def test_a_rival_that_is_missing_is_told(tmp_path):
    (row,) = (row for row in ROWS if row.name == "prefill of 128 tokens, bf16")
    assert rivals.measure(row, 1, tmp_path, files.QUICK, 2)["missing"].startswith("torch is not installed")


@pytest.mark.slow
def test_a_side_that_fails_says_why(tmp_path):
    row = Row("nothing", "nobody", "none", "ours.none", 1.0)
    assert "has no attribute 'none'" in rivals.measure(row, 1, tmp_path, files.QUICK, 1)["missing"]
