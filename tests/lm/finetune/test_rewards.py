"""`--task reward`: rewards of preferred texts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import load, peft
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.data import Example, Tokens, collate
from quaxlike.lm.finetune.options import settings_of
from quaxlike.lm.finetune.settings import FinetuneError
from quaxlike.lm.finetune.tasks import Rewards, RewardSettings, begun
from quaxlike.lm.models import with_classifier
from tests.lm.finetune.test_finetune import count, write
from tests.lm.finetune.test_train import decoder

pytestmark = pytest.mark.usefixtures("default_promotion")


def test_lines_of_data(llama):
    """Texts are the prompt with what follows it, as one, and end."""
    tokens = Tokens(llama, json.loads((llama / "config.json").read_text()), 5)
    encode = lambda **fields: Rewards().encode(fields, tokens)
    example = encode(prompt="one ", chosen="two", rejected="six")
    assert example == Example(([5, 6, 3], [5, 10, 3]))
    assert encode(chosen="one two", rejected="one six").texts == example.texts
    assert encode(prompt=count(0, 8), chosen=" one", rejected=" two") is None
    with pytest.raises(ValueError, match="'chosen' and 'rejected' are the same text"):
        encode(prompt="one", chosen=" two", rejected=" two")


def test_loss_and_metrics():
    """As TRL computes them."""
    outputs, batch = np.float32([[2.0, 0.5], [0.0, 1.0]]), collate([Example(([1], [2]))] * 2, 16)
    found = Rewards().metrics(outputs, batch)
    losses = np.log1p(np.exp([-1.5, 1.0]))
    assert found == {"loss": pytest.approx(np.mean(losses), rel=1e-6), "accuracy": 0.5, "margin": 0.25}
    centred = Rewards(RewardSettings(center_rewards=0.1)).metrics(outputs, batch)["loss"]
    assert centred == pytest.approx(np.mean(losses + 0.1 * np.array([6.25, 1.0])), rel=1e-6)


@pytest.mark.slow
def test_models_with_several_labels(tmp_path):
    model = with_classifier(decoder(), ["a", "b"], key=jax.random.key(0))
    (tmp_path / "data").touch()
    given = settings_of(model=tmp_path, data=tmp_path / "data", output=tmp_path / "out", task="reward")
    with pytest.raises(
        FinetuneError, match=r"--task reward is for decoders, .* with one label; found Decoder"
    ):
        begun(model, {}, given.train, given.data)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--quantize=nf4", "--scan-layers", "--center-rewards=0.01"]])
def test_a_run_prefers_what_was_chosen(more, llama, tmp_path, capsys):
    lines = [
        {
            "prompt": count(i % 10, 2),
            "chosen": f" {count(i % 10 + 2, 2)}",
            "rejected": f" {count(i % 10 + 5, 3)}",
        }
        for i in range(40)
    ]
    data, out = write(tmp_path / "data.jsonl", lines), tmp_path / "out"
    command = [f"--model={llama}", f"--data={data}", f"--output={out}", "--task=reward", "--steps=25"]
    options = ["--batch-size=8", "--rank=4", "--learning-rate=0.01", "--quantize=none", "--merge", *more]
    assert main([*command, *options]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert ", 1.0000 after held-out margin" in told
    merged, config = load(out / "merged")
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    base, _ = load(llama)
    adapted = peft.load_adapter(out, with_classifier(base, ["reward"], key=jax.random.key(5)))
    ids, seen = jnp.arange(4, 9), jnp.ones(5, bool)
    np.testing.assert_allclose(merged(ids, seen), ql.quaxify(adapted)(ids, seen), atol=2e-4)
    # The reward model is trained on.
    again = [f"--model={out / 'merged'}", f"--data={data}", f"--output={tmp_path / 'again'}"]
    assert main([*again, "--task=reward", "--steps=2", "--quantize=none", "--batch-size=8"]) == 0
