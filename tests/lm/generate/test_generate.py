"""`python -m quaxlike.lm.generate` on a tiny checkpoint, with a tokeniser of a few words."""

import importlib
import json
import os
import shutil
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import quaxlike as ql
from quaxlike.files import safetensors
from quaxlike.lm import generate, load, peft
from quaxlike.lm.convert import main as convert
from quaxlike.lm.generate.__main__ import main
from quaxlike.lm.generate.run import Stream
from tests.fixtures import fixture
from tests.lm.models.fixtures import folder
from tests.samples import tree_equal, use_cache


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


@pytest.mark.slow
def test_writes_what_the_model_goes_on_with(checkpoint, capsys):
    status, out, told = run(capsys, "--model", checkpoint, "--prompt", "w5 w6 w7", "--max-new-tokens", 6)
    assert status == 0
    model, _ = load(checkpoint)
    tokens = np.asarray(generate(model, np.array([[5, 6, 7]]), max_new_tokens=6, eos=2))[0]
    assert out.split() == [f"w{i}" for i in tokens.tolist()]
    assert "6 tokens in" in told
    assert "tokens per second, compilation apart" in told


@pytest.mark.slow
def test_with_an_adapter_that_peft_has_no_file_for(checkpoint, tmp_path, capsys, monkeypatch):
    """In our own file, of a type from the module that `run.json` names; also in `convert`."""
    module = "import quaxlike as ql\nclass Scaled(ql.AdaptedArray):\n    scale: object\n"
    module += "    def materialise(self):\n        return ql.materialise(self.base) * self.scale[:, None]\n"
    (tmp_path / "scaled_weights.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("scaled_weights").Scaled
    base, _ = load(checkpoint)
    model = ql.adapt(base, lambda w, **_: own(w, jnp.linspace(-1.0, 2.0, w.shape[0])), where=["o_proj"])
    (tmp_path / "adapter").mkdir()
    safetensors.save_adapters(tmp_path / "adapter" / "adapters.safetensors", model, types=[own])
    (tmp_path / "adapter" / "run.json").write_text('{"adapter": "scaled_weights:Scaled"}')
    with_it = ["--prompt", "w5 w6 w7", "--max-new-tokens", 6, "--adapter", tmp_path / "adapter"]
    with warnings.catch_warnings(action="ignore", category=ql.MaterialisationWarning):
        status, out, _ = run(capsys, "--model", checkpoint, *with_it)
    merged = ql.merge(model)
    wanted = np.asarray(generate(merged, np.array([[5, 6, 7]]), max_new_tokens=6, eos=2))[0]
    assert (status, out.split()) == (0, [f"w{i}" for i in wanted.tolist()])
    assert convert([str(checkpoint), str(tmp_path / "out"), f"--adapter={tmp_path / 'adapter'}"]) == 0
    assert tree_equal(load(tmp_path / "out")[0], merged)
    (tmp_path / "adapter" / "run.json").write_text('{"adapter": "no_such_weights:Scaled"}')
    status, _, told = run(capsys, "--model", checkpoint, *with_it)
    assert status == 2
    assert "names no_such_weights:Scaled, the type of the adapter, and there is no module" in told


def test_a_prompt_begins_once_and_does_not_end(checkpoint, capsys):
    """And where files differ about the end, the first of them counts, and a line says so."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("w1 $A w2", None, [("w1", 1), ("w2", 2)])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [99]}')
    (checkpoint / "tokenizer_config.json").write_text('{"eos_token": "w98"}')
    model, _ = load(checkpoint)
    tokens = np.asarray(generate(model, np.array([[1, 5, 6]]), max_new_tokens=6, eos=99))[0]
    for prompt in ("w5 w6", "w1 w5 w6"):
        status, out, told = run(capsys, "--model", checkpoint, "--prompt", prompt, "--max-new-tokens", 6)
        assert (status, out.split()) == (0, [f"w{i}" for i in tokens.tolist()])
        assert "name different tokens that end a text: generation_config.json [99], " in " ".join(
            told.split()
        )


@pytest.mark.slow
def test_with_adapter_in_4_bits_for_several_prompts(checkpoint, tmp_path, capsys, monkeypatch):
    # Native products are compiled by the command, which says so in a line.
    monkeypatch.delenv("QUAXLIKE_NATIVE")
    monkeypatch.setenv("PATH", "")
    use_cache(monkeypatch, tmp_path / "cache")
    model, _ = load(checkpoint)
    model = ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(0))
    peft.save_adapter(tmp_path / "adapter", model)
    status, out, told = run(
        capsys, "--model", checkpoint, "--adapter", tmp_path / "adapter", "--quantize", "nf4",
        "--prompt", "w5 w6", "w9", "--max-new-tokens", 3, "--temperature", 1, "--top-k", 5, "--seed", 3,
    )  # fmt: skip
    assert status == 0
    assert told.startswith("Native products are not compiled, and others take longer: No C++ compiler")
    assert [line.split(":")[0] for line in out.splitlines()] == ["'w5 w6'", "'w9'"]


@pytest.mark.slow
def test_with_a_cache_in_8_bits(checkpoint, capsys):
    status, out, told = run(
        capsys, "--model", checkpoint, "--prompt", "w5 w6 w7", "--max-new-tokens", 6, "--cache", "int8",
        "--compute-dtype", "bfloat16",
    )  # fmt: skip
    assert status == 0
    model, _ = load(checkpoint, dtype="bfloat16")
    tokens = np.asarray(generate(model, np.array([[5, 6, 7]]), max_new_tokens=6, eos=2, cache="int8"))[0]
    assert out.split() == [f"w{i}" for i in tokens.tolist()]
    c = model.config
    numbers = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    scales = 2 * c.num_hidden_layers * c.num_key_value_heads
    assert f"The cache takes {numbers + 4 * scales:,} bytes a token; {2 * numbers:,} in bfloat16." in told


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
    assert "which is no decoder that writes texts" in told


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def talker(checkpoint):
    """A checkpoint whose tokeniser knows the words of a template, of which `end` is special."""
    words = {f"w{i}": i for i in range(90)} | {"user": 90, "assistant": 91, "system": 92, "end": 93}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["end"])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return checkpoint


def typing(lines):
    """What `input` returns, one after the other, until the input ends."""
    lines = iter(lines)

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    return read


def answer(talker, ids, new):
    """The text that the model itself goes on with, up to the end of the turn."""
    model, _ = load(talker)
    tokens = np.asarray(generate(model, np.array([ids]), max_new_tokens=new, eos=[2, 93]))[0].tolist()
    ends = [i for i, token in enumerate(tokens) if token in (2, 93)]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.slow
def test_a_message_is_answered_by_the_template(talker, capsys):
    status, out, _ = run(
        capsys, "--model", talker, "--message", "w5 w6", "--system", "w7", "--max-new-tokens", 4
    )
    assert status == 0
    expected = answer(talker, [92, 7, 93, 90, 5, 6, 93, 91], 4)
    assert Tokenizer.from_file(str(talker / "tokenizer.json")).decode(expected) == out.strip()


@pytest.mark.slow
def test_a_chat_of_two_turns_and_a_new_one(talker, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", typing(["w5", "", "w6 w7", "/new", "w5"]))
    status, out, told = run(capsys, "--model", talker, "--chat", "--max-new-tokens", 3)
    assert status == 0
    assert "Ctrl-C stops an answer" in told
    first = answer(talker, [90, 5, 93, 91], 3)
    decode = Tokenizer.from_file(str(talker / "tokenizer.json")).decode
    # A chat keeps the text of an answer, and the template writes it again.
    again = [i for i in first if i < 94]
    second = answer(talker, [90, 5, 93, 91, *again, 93, 90, 6, 7, 93, 91], 3)
    assert out.splitlines()[:3] == [decode(first), decode(second), decode(first)]


@pytest.mark.slow
def test_an_answer_stops_where_the_context_ends(talker, capsys, monkeypatch):
    config = json.loads((talker / "config.json").read_text())
    (talker / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 7}))
    monkeypatch.setattr("builtins.input", typing(["w5", "w5 w5 w5 w5 w5"]))
    assert main(["--model", str(talker), "--chat", "--max-new-tokens", "9"]) == 0
    captured = capsys.readouterr()
    assert "[The context of 7 tokens is full.]" in captured.out
    assert "tokens; the model takes 7. Begin anew with /new." in captured.err
    status, _, told = run(capsys, "--model", talker, "--prompt", "w5 w6", "--max-new-tokens", 9)
    assert (status, "context of the model ends, at 7 tokens" in told) == (0, True)
    status, _, told = run(capsys, "--model", talker, "--prompt", "w5 " * 8)
    assert (status, "A prompt has 8 tokens; the model takes 7" in told) == (2, True)


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_chat(talker, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", typing(["w5", "w6"]))
    add, calls = Stream.add, []

    def interrupted(self, token):
        calls.append(token)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        add(self, token)

    monkeypatch.setattr(Stream, "add", interrupted)
    assert main(["--model", str(talker), "--chat", "--max-new-tokens", "5"]) == 0
    assert 3 < len(calls) < 10
    assert list(map(len, map(str.split, capsys.readouterr().out.splitlines()))) == [2, 5, 0]


def test_a_checkpoint_without_a_template(checkpoint, capsys):
    status, _, told = run(capsys, "--model", checkpoint, "--message", "w5")
    assert (status, "has no chat template" in told) == (2, True)
