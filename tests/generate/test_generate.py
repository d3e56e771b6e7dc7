"""`python -m quaxlike.generate` on a tiny checkpoint, with a tokeniser of a few words."""

import shutil

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import quaxlike as ql
from quaxlike.generate.__main__ import main
from quaxlike.interop import peft
from quaxlike.models import generate, load
from tests.fixtures import fixture
from tests.models.fixtures import folder


@pytest.fixture
def checkpoint(tmp_path):
    shutil.copytree(folder("qwen2"), tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_writes_what_the_model_goes_on_with(checkpoint, capsys):
    status, out, told = run(capsys, "--model", checkpoint, "--prompt", "w5 w6 w7", "--max-new-tokens", 6)
    assert status == 0
    model, _ = load(checkpoint)
    tokens = np.asarray(generate(model, np.array([[5, 6, 7]]), max_new_tokens=6, eos=2))[0]
    assert out.split() == [f"w{i}" for i in tokens.tolist()]
    assert "6 tokens in" in told
    assert "tokens per second after the first" in told


@pytest.mark.slow
def test_with_adapter_in_4_bits_for_several_prompts(checkpoint, tmp_path, capsys):
    model, _ = load(checkpoint)
    model = ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(0))
    peft.save_adapter(tmp_path / "adapter", model)
    status, out, _ = run(
        capsys, "--model", checkpoint, "--adapter", tmp_path / "adapter", "--quantize", "nf4",
        "--prompt", "w5 w6", "w9", "--max-new-tokens", 3, "--temperature", 1, "--top-k", 5, "--seed", 3,
    )  # fmt: skip
    assert status == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["'w5 w6'", "'w9'"]


def test_what_it_cannot_start_with(checkpoint, tmp_path, capsys):
    status, _, told = run(capsys, "--model", tmp_path, "--prompt", "a")
    assert status == 2
    assert "There is no" in told
    status, _, told = run(capsys, "--model", checkpoint, "--prompt", "")
    assert status == 2
    assert "A prompt has no tokens: ''" in told
    (tmp_path / "bert").mkdir()
    shutil.copytree(fixture("peft_bert/base"), tmp_path / "bert", dirs_exist_ok=True)
    shutil.copy(checkpoint / "tokenizer.json", tmp_path / "bert")
    status, _, told = run(capsys, "--model", tmp_path / "bert", "--prompt", "w1")
    assert status == 2
    assert "which is not a decoder" in told
