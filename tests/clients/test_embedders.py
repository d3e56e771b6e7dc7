"""Encoders that `python -m quaxlike.finetune` trained on pairs of texts, in transformers and in PEFT."""

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.finetune.__main__ import main
from quaxlike.interop import peft
from quaxlike.models import Decoder, load
from tests.finetune.test_finetune import LINES, checkpoint, write

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("default_promotion"),
]

IDS = [2, 5, 6, 7, 3]


def _ours(model):
    vectors = model.hidden if isinstance(model, Decoder) else model
    return np.asarray(ql.quaxify(vectors)(jnp.asarray(IDS), jnp.ones(len(IDS), bool)))


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("encoder", {"model_type": "bert"}),
        ("modern", {"model_type": "modernbert"}),
        ("embedder", {"model_type": "qwen3", "num_key_value_heads": 4}),
    ],
)
def test_vectors_of_what_was_trained(kind, entries, tmp_path):
    """The adapter on the base, and the merged folder: the vectors of tokens are those of `AutoModel`."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    auto = pytest.importorskip("transformers", reason="transformers is not installed").AutoModel
    others = pytest.importorskip("peft", reason="PEFT is not installed").PeftModel

    def theirs(model):
        with torch.no_grad():
            return model.eval()(input_ids=torch.tensor([IDS])).last_hidden_state[0].numpy()

    base = checkpoint(tmp_path / "base", kind, **entries, eos_token_id=3, pad_token_id=0)
    data = write(tmp_path / "data.jsonl", LINES["pairs"])
    command = [f"--model={base}", f"--data={data}", f"--output={tmp_path / 'out'}", "--batch-size=8"]
    assert (
        main([*command, "--learning-rate=0.02", "--rank=4", "--steps=5", "--quantize=none", "--merge"]) == 0
    )
    untrained, _ = load(base)
    trained = _ours(peft.load_adapter(tmp_path / "out", untrained))
    assert np.abs(trained - _ours(untrained)).max() > 0.05
    adapted = others.from_pretrained(auto.from_pretrained(base), tmp_path / "out")
    np.testing.assert_allclose(theirs(adapted), trained, atol=1e-5)
    np.testing.assert_allclose(theirs(auto.from_pretrained(tmp_path / "out" / "merged")), trained, atol=1e-5)
