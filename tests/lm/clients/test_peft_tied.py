"""Embeddings and output layers, tied or not, resized or not, in adapters of PEFT: read, merged, written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft, resize_vocabulary, save
from quaxlike.surgery.trees import named_arrays, replace
from tests.lm.clients.suite import client, logits_of_llama_cpp, logits_of_transformers
from tests.lm.models.made import checkpoint

pytestmark = client("torch", "transformers", "peft", "llama_cpp")

_TOKENS = [5, 9, 280]
_HEAD = {"lm_head": _TOKENS}
CASES = {
    "neither": {},
    "lora on embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora on head": {"target_modules": ["q_proj", "lm_head"]},
    "lora on both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "lora on both alike": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "dora on embedding": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "dora on both alike": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
        "use_dora": True,
    },
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "head saved": {"modules_to_save": ["lm_head"]},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both saved alike": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "lora on embedding, head saved": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    "lora on head, embedding saved": {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "tokens of embedding": {"trainable_token_indices": _TOKENS},
    "tokens of head": {"trainable_token_indices": _HEAD},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": _TOKENS, **_HEAD}},
    "other tokens of head": {"trainable_token_indices": {"embed_tokens": [7, 1], **_HEAD}},
    "norms saved": {"modules_to_save": ["norm"]},
}
_NEW = 6
#: Of a tied checkpoint: its one tensor has the name of the output layer.
_BY_HEAD = "tied by the name of the head"


def _base(folder, tied):
    """Makes a checkpoint."""
    model = checkpoint(folder, "qwen2", tie_word_embeddings=bool(tied))
    if tied == _BY_HEAD:
        found = {key: np.asarray(x) for key, x in open_tensors(folder).items()}
        found = {key.replace("model.embed_tokens", "lm_head"): x for key, x in found.items()}
        write_tensors(folder / "model.safetensors", found, {"format": "pt"})
    return model


def _theirs(folder, resized, seed):
    """The model in transformers, perhaps with new tokens, whose rows are drawn from this seed."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if resized:
        n = model.config.vocab_size
        model.resize_token_embeddings(n + _NEW, mean_resizing=False)
        draw = torch.Generator().manual_seed(seed)
        for layer in (model.get_output_embeddings(), model.get_input_embeddings()):
            layer.weight.data[n:] = 0.5 * torch.randn(_NEW, layer.weight.shape[1], generator=draw)
    return model


def _ours(folder, resized, seed):
    """The same model in quaxlike."""
    model = load(folder)[0]
    if not resized:
        return model
    model = resize_vocabulary(model, model.config.vocab_size + _NEW)
    weights = _theirs(folder, resized, seed).state_dict()
    rows = [name for name in named_arrays(model) if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    return replace(model, {name: jnp.asarray(weights[name].numpy()) for name in rows})


def _trained(model, options):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    options = {"target_modules": ["q_proj"], "r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape)
    return model.eval()


def _logits(model, ids):
    return logits_of_transformers(model, ids, np.ones_like(ids, bool))


@jax.jit
def _run(model, ids):
    return jax.vmap(ql.quaxify(model))(ids, jnp.ones_like(ids, bool))


@pytest.mark.parametrize("resized", [False, True], ids=["", "resized"])
@pytest.mark.parametrize("tied", [False, True, _BY_HEAD], ids=["untied", "tied", "by head"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case, tied, resized, compare, tmp_path):
    """On a base whose new rows differ, where the file brings its own."""
    from peft import PeftModel

    base, files, again, merged = (tmp_path / name for name in ("base", "peft", "again", "merged"))
    n = _base(base, tied).config.vocab_size
    ids = np.asarray([[5, 9, 3, 280, 5, 17, 7, n + resized * _NEW - 1, n - 1]])
    check = lambda what, found: compare("PEFT", "embeddings", "qwen2", what, found, wanted, 2e-4)

    model = _trained(_theirs(base, resized, 1), CASES[case])
    model.save_pretrained(files)
    wanted = _logits(PeftModel.from_pretrained(_theirs(base, resized, 2), files).eval(), ids)
    assert np.abs(wanted - _logits(_theirs(base, resized, 2), ids)).max() > 0.01
    adapted = peft.load_adapter(files, _ours(base, resized, 2))
    check("logits", _run(adapted, ids))
    check("logits, merged", _run(ql.merge(adapted), ids))
    peft.save_adapter(again, adapted, task_type="CAUSAL_LM")
    reread = PeftModel.from_pretrained(_theirs(base, resized, 3), again).eval()
    check("logits, saved again", _logits(reread, ids))
    check("logits, saved again", _run(peft.load_adapter(again, _ours(base, resized, 3)), ids))
    for format, path in (("safetensors", merged), ("gguf", tmp_path / "m.gguf")):
        save(path, ql.merge(adapted), base, format=format)
        check(f"logits, merged in {format}", _run(load(path)[0], ids))
    check("logits, merged in safetensors", _logits(_theirs(merged, False, 0), ids))
    compare(
        "llama.cpp",
        "GGUF f32",
        "qwen2",
        "logits",
        logits_of_llama_cpp(tmp_path / "m.gguf", ids[0]),
        wanted[0],
        2e-3,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "options",
    [
        {"where": ["embed_tokens"]},
        {"where": ["embed_tokens", "q_proj"], "alpha_pattern": {"embed_tokens": 16}},
        {"where": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": _TOKENS},
        {"trainable_token_indices": _HEAD},
        {"trainable_token_indices": {"embed_tokens": [1], **_HEAD}},
    ],
)
def test_peft_reads_what_is_resized_and_adapted_here(options, tied, compare, tmp_path):
    """The new rows are in the file."""
    from peft import PeftModel

    n = checkpoint(tmp_path / "base", "qwen2", tie_word_embeddings=tied).config.vocab_size
    model = resize_vocabulary(load(tmp_path / "base")[0], n + _NEW)
    options = {"where": ["q_proj"], **options}
    model = ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(0), **options)
    move = lambda x, on: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape) if on else x
    model = jax.tree.map(move, model, ql.trainable(model))
    peft.save_adapter(tmp_path / "out", model, task_type="CAUSAL_LM")
    ids = np.asarray([[5, 9, 3, 280, 1, n + 2, n - 1]])
    theirs = PeftModel.from_pretrained(_theirs(tmp_path / "base", True, 3), tmp_path / "out").eval()
    compare("PEFT", "embeddings", "qwen2", "logits", _logits(theirs, ids), _run(model, ids), 2e-4)


def test_the_body_alone(compare, tmp_path):
    """Its last norm is called `norm`, as the names of all others end."""
    import torch
    from peft import PeftModel
    from transformers import AutoModel

    checkpoint(tmp_path / "base", "qwen2")
    model, ids = load(tmp_path / "base")[0], np.arange(9)[None]
    model = ql.loraify(model, rank=2, where=["q_proj"], modules_to_save=["norm"], key=jax.random.key(0))
    model = jax.tree.map(lambda x, on: x + 0.1 if on else x, model, ql.trainable(model))
    peft.save_adapter(tmp_path / "out", model, task_type="FEATURE_EXTRACTION")
    theirs = AutoModel.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        found = PeftModel.from_pretrained(theirs, tmp_path / "out").eval()(torch.tensor(ids))[0].numpy()
    hidden = ql.quaxify(lambda ids: model.hidden(ids, jnp.ones_like(ids, bool)))
    ours = jax.vmap(hidden)(jnp.asarray(ids))
    compare("PEFT", "embeddings", "qwen2", "vectors", found, ours, 2e-4)
