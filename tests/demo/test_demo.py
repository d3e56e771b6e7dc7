"""The demonstration itself, in a few steps."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from quaxlike.demo.__main__ import main
from quaxlike.demo.data import load_tasks


def test_tasks_hold_out_the_same_digits():
    upright, rotated = load_tasks(3)
    for of_upright, of_rotated in zip(upright, rotated, strict=True):
        np.testing.assert_array_equal(of_upright.labels, of_rotated.labels)
        # A quarter turn to the left takes the right edge to the top.
        np.testing.assert_array_equal(of_upright.images[:, :, -1], of_rotated.images[:, 0, :])
    assert len(upright.test.labels) == 539
    assert len(upright.train.labels) == 1258
    assert upright.train.images.max() == 1.0


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], default_promotion: None):
    assert main(["--steps=5", "--seed=1", f"--output={tmp_path / 'new' / 'folder'}"]) == 0
    shown = capsys.readouterr().out
    rows = {
        name.strip(): [cell.strip() for cell in cells.split("│")]
        for name, cells in re.findall(r"^│ (.+?)│(.+%.+)│$", shown, re.MULTILINE)
    }
    full, lora, qlora = rows["full fine-tuning"], rows["LoRA"], rows["QLoRA (NF4)"]
    assert full[0] == lora[0]  # an adapter adds nothing at first
    assert lora[2] == qlora[2]
    assert (full[4], lora[4]) == ("1.00", "1.11")
    assert float(qlora[4]) <= 0.30
    rules = re.findall(r"│ ([^│]+?) +│ dot_general │ (\w+) +│ (\S+):\d+ +│ +(\d+) │", shown)
    assert rules == [
        ("LoRA", "LoraArray", "lora/dot.py", "18"),  # six weights in each of three blocks
        ("QLoRA (NF4)", "LoraArray", "arrays/pairs.py", "18"),
    ]
    assert "materialised: nothing" in shown
    png = image.imread(tmp_path / "new" / "folder" / "demo.png")
    assert png.shape[:2] == (806, 1430)
    assert png.std() > 0.1
