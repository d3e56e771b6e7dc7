"""Models that classify, beside transformers and PEFT: logits, gradients, files and adapters in both
directions."""

import json
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import load, models, peft, save
from quaxlike.lm.families import CLASSIFIERS
from quaxlike.surgery.trees import named_arrays
from tests.lm.clients.suite import client

pytestmark = client("torch", "transformers", "peft")

_SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_OF_DECODERS = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OPTIONS = {
    "Gemma3Text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Mixtral": {"num_local_experts": 4}, "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": _EXPERTS, "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}, "GPT2": {},
}  # fmt: skip
ENCODERS = [
    f"{kind}For{what}Classification" for kind in ("Bert", "ModernBert") for what in ("Sequence", "Token")
]
ARCHITECTURES = [*CLASSIFIERS, *ENCODERS]


def made(architecture, folder=None, labels=3, seed=0, **more):
    """A model of transformers with random weights, written to a folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = architecture.partition("For")[0]
    sizes = _SIZES if kind in ("Bert", "ModernBert", "GPT2") else {**_SIZES, **_OF_DECODERS}
    options = {**sizes, **_OPTIONS.get(kind, {}), "num_labels": labels, **more}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weight * 3 + 0.05 * torch.randn(weight.shape))
    if folder is not None:
        model.save_pretrained(folder)
    return model


def texts(padding):
    """Tokens, and which are none of padding."""
    ids, seen = np.random.default_rng(0).integers(3, 97, (2, 9)).astype(np.int32), np.ones((2, 9), bool)
    seen[0, slice(0, 4) if padding == "left" else slice(5, 9)] = False
    return np.where(seen, ids, 0), seen


def of_transformers(model, ids, seen, train=False):
    import torch

    mask = torch.tensor(seen).long()
    # As in generation: positions of texts that are padded in front count tokens.
    places = {} if "Bert" in type(model).__name__ + type(getattr(model, "base_model", 0)).__name__ else {
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0)
    }  # fmt: skip
    with torch.set_grad_enabled(train):
        return model(input_ids=torch.tensor(ids), attention_mask=mask, **places).logits


def ours(model, ids, seen):
    return jax.jit(jax.vmap(ql.quaxify(model)))(ids, seen)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(architecture, padding, compare, tmp_path):
    theirs = made(architecture, tmp_path / "base", problem_type="multi_label_classification")
    ids, seen = texts(padding)
    model, _ = load(tmp_path / "base")
    assert model.labels.problem_type == "multi_label_classification"
    keep = seen if model.of_tokens else slice(None)
    family = theirs.config.model_type
    compare = partial(compare, "transformers", "safetensors", family)
    what = "logits of tokens' labels" if model.of_tokens else "logits of labels"
    wanted = of_transformers(theirs, ids, seen).numpy()
    compare(what, ours(model, ids, seen)[keep], wanted[keep], 5e-4)
    save(tmp_path / "again", model, tmp_path / "base")
    again, _ = type(theirs).from_pretrained(tmp_path / "again"), 0
    for (name, x), y in zip(theirs.state_dict().items(), again.state_dict().values(), strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy(), err_msg=name)
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("base", "again")]
    assert configs[0] == configs[1]
