"""What else is in the folder of an adapter."""

import json
import shutil

import jax
import pytest

import quaxlike as ql
from quaxlike.lm import load, peft, resize_vocabulary
from quaxlike.lm.adapter_folder import other_tokenizer
from quaxlike.lm.convert import main as convert
from quaxlike.lm.finetune.__main__ import main as finetune
from quaxlike.surgery.trees import named_arrays
from tests.lm.models.made import checkpoint
from tests.lm.test_marks import tokeniser
from tests.samples import tree_equal


@pytest.fixture
def folders(tmp_path):
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
    tokeniser(tmp_path / "model", "$A", tokenizer_config={"chat_template": "{{ messages }}"})
    return tmp_path / "adapter", tmp_path / "model"


def test_the_tokeniser_of_the_model(folders):
    """It is used without a word if the adapter has none, or the same."""
    adapter, model = folders
    assert other_tokenizer(adapter, model) == ""
    shutil.copytree(model, adapter, dirs_exist_ok=True)
    assert other_tokenizer(adapter, model) == ""
    (adapter / "tokenizer_config.json").write_text("{}")
    (adapter / "chat_template.jinja").write_text("{{ messages }}\n")
    assert other_tokenizer(adapter, model) == ""


def test_another_template(folders):
    adapter, model = folders
    (adapter / "chat_template.jinja").write_text("{{ messages[0] }}")
    warning = other_tokenizer(adapter, model)
    assert f"{adapter} has a chat template of its own" in warning
    assert f"Those of {model} are used" in warning


def test_tokens_that_were_added(folders):
    adapter, model = folders
    tokeniser(adapter, "$A")
    described = json.loads((adapter / "tokenizer.json").read_text())
    described["added_tokens"].append({**described["added_tokens"][0], "id": 7, "content": "<new>"})
    (adapter / "tokenizer.json").write_text(json.dumps(described))
    assert "has a tokeniser of its own" in other_tokenizer(adapter, model)


@pytest.mark.parametrize("has_own", [True, False])
def test_conversion_warns(has_own, tmp_path, capsys):
    """As `finetune` and `generate` do; the model need not have a tokeniser."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    checkpoint(base, "qwen2")
    model = ql.loraify(load(base)[0], rank=2, where=["q_proj"], key=jax.random.key(0))
    peft.save_adapter(adapter, model)
    assert convert([str(base), str(tmp_path / "out"), f"--adapter={adapter}"]) == 0
    assert "Warning" not in capsys.readouterr().err
    tokeniser(adapter, "$A")
    if not has_own:
        (base / "tokenizer.json").unlink()
    assert convert([str(base), str(tmp_path / "out"), f"--adapter={adapter}"]) == 0
    assert f"Warning: {adapter} has a tokeniser of its own" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("more", [3, -60])
def test_a_vocabulary_that_was_resized(more, tmp_path, capsys):
    """Its embeddings are in the file, and commands give the model as many rows."""
    base, adapter, out = (tmp_path / x for x in ("base", "adapter", "out"))
    checkpoint(base, "qwen2")
    model, config = load(base)
    n = config["vocab_size"] + more
    model = ql.loraify(resize_vocabulary(model, n), rank=2, where=["q_proj"], key=jax.random.key(0))
    peft.save_adapter(adapter, model)
    assert convert([str(base), str(out), f"--adapter={adapter}"]) == 0
    found, config = load(out)
    assert config["vocab_size"] == n
    assert tree_equal(named_arrays(found), named_arrays(ql.merge(model)))
    if more < 0:
        data = tmp_path / "data.jsonl"
        data.write_text('{"text": "a text that ends in ÿ"}\n' * 4)
        run = [f"--model={base}", f"--data={data}", f"--output={tmp_path / 'run'}", f"--adapter={adapter}"]
        assert finetune(run) == 2
        assert f"was trained with {n} tokens, and the data has the token" in capsys.readouterr().err
