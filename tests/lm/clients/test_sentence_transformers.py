"""sentence-transformers on encoders that quaxlike writes, and its pooling of vectors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike.lm import load, save
from quaxlike.lm.models import Pooling
from quaxlike.lm.models.pooling import MODES
from tests.lm.clients.suite import client

pytestmark = client("torch", "transformers", "sentence_transformers")


@pytest.mark.parametrize("modes", [*MODES, ("mean", "cls")])
def test_sentences_are_pooled_as_by_sentence_transformers(modes, compare, tmp_path):
    import torch
    from sentence_transformers import models as modules

    pooling = modules.Pooling(16, modes)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    described = [{"type": f"sentence_transformers.models.{kind}", "path": p} for p, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(described))
    (tmp_path / "1_Pooling").mkdir()
    pooling.save(str(tmp_path / "1_Pooling"))
    x = np.random.default_rng(0).standard_normal((2, 7, 16), np.float32)
    seen = np.array([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
    theirs = pooling({"token_embeddings": torch.tensor(x), "attention_mask": torch.tensor(seen)})
    ours = jax.vmap(Pooling.of(tmp_path))(jnp.asarray(x), jnp.asarray(seen, bool))
    found = theirs["sentence_embedding"].numpy()
    compare("sentence-transformers", "safetensors", "bert", "pooled vectors", ours, found, 1e-6)


def test_a_merged_encoder_has_the_vectors_of_sentence_transformers(compare, tmp_path):
    """Which takes the pooling, and the modules after it, from folders beside the weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as modules
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "small", "text", "another"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path / "bert")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    bert = modules.Transformer(str(tmp_path / "bert"))
    layers = [bert, modules.Pooling(16, "cls"), modules.Dense(16, 8), modules.Normalize()]
    SentenceTransformer(modules=layers).save(str(tmp_path / "base"))
    base, _ = load(tmp_path / "base")
    save(tmp_path / "same", base, tmp_path / "base")
    changed = jax.tree.map(lambda x: 1.5 * x, base)
    save(tmp_path / "changed", changed, tmp_path / "base")
    texts = ["a small text", "another"]
    vectors = [
        SentenceTransformer(str(tmp_path / name), device="cpu").encode(texts)
        for name in ("base", "same", "changed")
    ]
    assert vectors[0].shape == (2, 8)
    compare("sentence-transformers", "safetensors", "bert", "vectors of texts", vectors[1], vectors[0], 1e-6)
    assert np.abs(vectors[2] - vectors[0]).max() > 0.01
