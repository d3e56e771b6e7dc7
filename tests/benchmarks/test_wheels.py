"""What is carried to a machine that has JAX and no network."""

import subprocess
import sys

from benchmarks import wheels


def test_all_that_is_needed_beside_jax():
    needed = wheels.requirements("quaxlike", frozenset({"jax", "jaxlib", "numpy"}))
    assert {"plum-dispatch", "beartype", "equinox", "jaxtyping"} <= set(needed)
    assert not {"jax", "numpy", "pytest", "ruff"} & set(needed)
    assert "jaxtyping" not in wheels.requirements("quaxlike", frozenset({"jax", "jaxtyping"}))


def test_names_are_compared_as_registries_do():
    assert wheels.normalised("ML_dtypes") == wheels.normalised("ml.dtypes") == "ml-dtypes"


def test_a_folder_says_how_it_is_installed(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command))
    (tmp_path / "a.whl").write_bytes(b"1234")
    assert wheels.download(["beartype==0.1"], tmp_path, "3.12", "manylinux_2_28_x86_64") == 4
    assert asked[0][-1] == "beartype==0.1"
    assert "--only-binary=:all:" in asked[0]
    compile((tmp_path / "install.py").read_text(), "install.py", "exec")
    assert sys.executable == asked[0][0]
