"""`--task dpo`: of two texts one is preferred."""

import json
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.data import Example, Tokens, collate
from quaxlike.lm.finetune.options import settings_of
from quaxlike.lm.finetune.settings import DataSettings, FinetuneError
from quaxlike.lm.finetune.tasks import Preferences, PreferenceSettings, task_for
from quaxlike.lm.finetune.train import outputs_of, prepared
from tests.lm.finetune.test_finetune import checkpoint, count, write
from tests.lm.finetune.test_train import SETTINGS, decoder
from tests.samples import normal

pytestmark = pytest.mark.usefixtures("default_promotion")

PAIRS = [
    Example(([1, 2, 3, 4, 5], [1, 2, 6]), [False, False, True, True, True]),
    Example(([7, 8], [7, 9, 10, 11]), [False, True, True, True]),
]


def log_probability(model, ids, start):
    """Of the tokens from `start` on, by NumPy."""
    logits = np.asarray(ql.quaxify(model)(np.asarray(ids), np.ones(len(ids), bool)), np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(logs[i - 1, ids[i]] for i in range(start, len(ids)))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 2])
def test_the_loss_compares_with_the_model_without_adapters(chunk):
    """And its gradient reaches the adapters alone."""
    base = ql.quantize(decoder(), "nf4")
    model = ql.loraify(base, rank=2, init="gaussian", key=jax.random.key(1))
    q = lambda m: m.model.layers[0].self_attn.q_proj.weight.b
    model = eqx.tree_at(q, model, normal(*q(model).shape, seed=2))
    task, batch = Preferences(chunk, PreferenceSettings(beta=0.5)), collate(PAIRS, 16)
    params, frozen = eqx.partition(model, ql.trainable(model))

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        whole = prepared(eqx.combine(params, frozen), SETTINGS)
        return task.total(outputs_of(task, whole, batch, None), batch)

    with ql.on_materialise("error"):
        value, gradient = loss(params)
    margins = []
    for example in PAIRS:
        start = example.learned.index(True)
        gains = [
            log_probability(model, ids, start) - log_probability(base, ids, start) for ids in example.texts
        ]
        margins.append(gains[0] - gains[1])
    assert np.max(np.abs(margins)) > 0.01
    assert float(value) == pytest.approx(np.sum(np.log1p(np.exp(-0.5 * np.array(margins)))), rel=1e-5)
    assert max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(gradient)) > 1e-4
    metrics = task.metrics(np.stack([np.array(margins), np.zeros(2)], axis=1), batch)
    assert metrics["accuracy"] == np.mean(np.array(margins) > 0)
    assert metrics["margin"] == pytest.approx(0.5 * np.mean(margins))
    assert task.metrics(np.zeros((len(margins), 2)), batch)["accuracy"] == 0.5  # as before training


@pytest.fixture
def llama(tmp_path):
    return checkpoint(tmp_path / "llama", "llama", eos_token_id=3)


def test_lines_of_data(llama):
    tokens = Tokens(llama, json.loads((llama / "config.json").read_text()), 8)
    encode = lambda **fields: Preferences().encode(fields, tokens)
    example = encode(prompt="one two", chosen="three four", rejected="six")
    assert example.texts == ([5, 6, 7, 8, 3], [5, 6, 10, 3])
    assert example.learned == [False, False, True, True, True]
    cut = encode(prompt="one two", chosen=count(0, 9), rejected="six")
    assert cut.was_cut
    assert [len(ids) for ids in cut.texts] == [8, 4]
    assert encode(prompt=count(0, 8), chosen="one", rejected="two") is None
    with pytest.raises(ValueError, match="'chosen' and 'rejected' are the same text"):
        encode(prompt="one", chosen="two", rejected="two")
    with pytest.raises(ValueError, match="'rejected' must be a text; there are prompt, chosen"):
        encode(prompt="one", chosen="two")


@pytest.mark.slow
def test_a_run_prefers_what_was_chosen(llama, tmp_path, capsys):
    lines = [
        {"prompt": count(i % 10, 2), "chosen": count(i % 10 + 2, 2), "rejected": count(i % 10 + 5, 3)}
        for i in range(40)
    ]
    data, out = write(tmp_path / "data.jsonl", lines), tmp_path / "out"
    command = [f"--model={llama}", f"--data={data}", f"--output={out}", "--task=dpo", "--steps=15"]
    assert main([*command, "--batch-size=8", "--rank=4", "--learning-rate=0.01", "--held-out=0.2"]) == 0
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log[0]["held_out"] == {"loss": pytest.approx(np.log(2)), "accuracy": 0.5, "margin": 0.0}
    assert log[1]["loss"] == pytest.approx(np.log(2))
    assert log[-1]["loss"] < 0.4
    assert "held-out accuracy: 0.5000 before, 1.0000 after" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_models_that_write_no_texts():
    data = DataSettings(Path(), task=PreferenceSettings())
    with pytest.raises(FinetuneError, match="--task dpo is for decoders that write texts; found MLP"):
        task_for(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), SETTINGS, data)


def test_beta_belongs_to_its_task(llama, tmp_path):
    """A run of another task is resumed whatever it is."""
    data = write(tmp_path / "data.jsonl", [{"text": "one"}])
    given = {"model": llama, "data": data, "output": tmp_path / "out", "beta": 0.3}
    assert "beta" not in settings_of(**given).fingerprint()
    assert settings_of(**given, task="dpo").fingerprint()["beta"] == 0.3
