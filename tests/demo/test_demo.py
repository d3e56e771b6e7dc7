"""The demonstration itself, in a few steps."""

import re
from pathlib import Path

import numpy as np
import pytest

from quaxlike.demo.__main__ import main
from tests.samples import Late

# They import scikit-learn and Matplotlib.
experiment = Late("quaxlike.demo.experiment")
image = Late("matplotlib.image")


def test_tasks_hold_out_the_same_digits():
    upright, rotated = experiment.load_tasks(3)
    for of_upright, of_rotated in zip(upright, rotated, strict=True):
        np.testing.assert_array_equal(of_upright.labels, of_rotated.labels)
        # A quarter turn to the left takes the right edge to the top.
        np.testing.assert_array_equal(of_upright.images[:, :, -1], of_rotated.images[:, 0, :])
    assert len(upright.test.labels) == 539
    assert len(upright.train.labels) == 1258
    assert upright.train.images.max() == 1.0


@pytest.mark.slow
def test_the_figure_shows_a_mistake_and_nine_successes():
    from quaxlike.demo.report import _shown  # pyright: ignore[reportPrivateUsage]

    labels = np.arange(30) % 10
    right, wrong = labels.copy(), labels.copy()
    wrong[[3, 17, 29]] += 1
    result = lambda after: experiment.Result("QLoRA", None, 0, 0, labels, labels, after)
    assert _shown(result(wrong), 10) == [3, 0, 1, 2, 13, 4, 5, 6, 7, 8]
    assert _shown(result(right), 10) == list(range(10))
    assert _shown(result(labels + 1), 10) == [0]


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
    assert (full[3:5], lora[3:5]) == (["1,599 kB", "6,394 kB"], ["1,771 kB", "2,287 kB"])
    assert qlora[3:5] == ["419 kB", "935 kB"]
    rules = re.findall(r"│ ([^│]+?) +│ dot_general │ (\w+) +│ (\S+):\d+ +│ +(\d+) │", shown)
    assert rules == [
        ("LoRA", "LoraArray", "arrays/lora/dot.py", "18"),  # six weights in each of three blocks
        ("QLoRA (NF4)", "LoraArray", "arrays/pairs.py", "18"),
    ]
    assert "Weights that became dense: none" in shown
    png = image.imread(tmp_path / "new" / "folder" / "demo.png")
    assert png.shape[:2] == (936, 1430)
    assert png.std() > 0.1
