"""Encoders that `python -m quaxlike.lm.finetune` trained on pairs of texts, in transformers and in PEFT."""

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import load, peft
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.models import Decoder
from tests.lm.clients.suite import client
from tests.lm.finetune.test_finetune import LINES, checkpoint, write

pytestmark = client("torch", "transformers", "peft")

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
def test_vectors_of_what_was_trained(kind, entries, compare, tmp_path):
    """The adapter on the base, and the merged folder: the vectors of tokens are those of `AutoModel`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModel

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
    adapted = theirs(PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "out"))
    family = entries["model_type"]
    compare("PEFT", "adapters", family, "vectors", adapted, trained, 1e-5)
    merged = theirs(AutoModel.from_pretrained(tmp_path / "out" / "merged"))
    compare("transformers", "safetensors", family, "vectors of merged models", merged, trained, 1e-5)
