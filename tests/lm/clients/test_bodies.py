"""Bodies of decoders and pretrained encoders, as `save_pretrained` of transformers writes them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import load, peft, save
from quaxlike.lm.families import bodies
from quaxlike.lm.models import Pooling
from tests.lm.clients.suite import client
from tests.lm.clients.test_transformers import CASES, made

pytestmark = client("torch", "transformers", "peft", "sentence_transformers")

IDS = [5, 8, 3, 40, 22, 9]
_SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip
_OF_GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def test_bodies_have_the_names_of_transformers():
    import transformers

    assert all(hasattr(transformers, name) for name in bodies())


def _vectors(model):
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([IDS])).last_hidden_state[0].numpy()


_DECODERS = {
    "LlamaModel": _SMALL,
    "Gemma3TextModel": _SMALL | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "MixtralModel": _SMALL | {"num_local_experts": 4, "num_key_value_heads": 2},
    "GPT2Model": _OF_GPT2,
    "Qwen3NextModel": CASES["qwen3_next"],
    "Gemma4TextModel": CASES["gemma4"],
    "Qwen3_5MoeTextModel": CASES["qwen3_5_moe"],
}


@pytest.mark.parametrize("name", _DECODERS)
def test_bodies_of_decoders(name, compare, tmp_path):
    """Their hidden states; those of what is written back; and an adapter of PEFT for them."""
    import torch
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModel

    base, options = tmp_path / "base", _DECODERS[name]
    if isinstance(options, tuple):
        made(*options, tmp_path / "whole")
        AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.float32).save_pretrained(base)
    else:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**options)
        getattr(transformers, name)(config).save_pretrained(base)
    read, family = partial(AutoModel.from_pretrained, dtype=torch.float32), name.removesuffix("Model").lower()
    model, config = load(base)
    assert config["architectures"] == [name]
    run = jax.jit(lambda model: ql.quaxify(model.hidden)(jnp.asarray(IDS)))
    check = partial(compare, "transformers", "safetensors", family)
    check("hidden states of bodies", run(model), _vectors(read(base)), 2e-4)
    save(tmp_path / "again", model, base)
    check("hidden states of bodies", _vectors(read(tmp_path / "again")), run(model), 2e-4)

    targets = ["c_attn"] if name == "GPT2Model" else ["q_proj", "v_proj"]
    lora = LoraConfig(r=2, init_lora_weights=False, target_modules=targets)
    theirs = get_peft_model(read(base), lora)
    theirs.save_pretrained(tmp_path / "adapter")
    adapted = peft.load_adapter(tmp_path / "adapter", model)
    compare("PEFT", "adapters", family, "hidden states of bodies", run(adapted), _vectors(theirs), 5e-4)
    peft.save_adapter(tmp_path / "ours", adapted, task_type="FEATURE_EXTRACTION")
    again = PeftModel.from_pretrained(read(base), tmp_path / "ours")
    compare("PEFT", "adapters", family, "hidden states of bodies", _vectors(again), run(adapted), 5e-4)


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "BertForPreTraining", "ModernBertForMaskedLM", "BertModel"]
)
def test_pretrained_encoders(name, compare, tmp_path):
    """The vectors of tokens are those of `AutoModel`, which leaves the same head out."""
    import torch
    import transformers
    from transformers import AutoModel

    torch.manual_seed(0)
    base, kind = tmp_path / "base", name.partition("For")[0].removesuffix("Model")
    options = {"add_pooling_layer": False} if name == "BertModel" else {}
    config = getattr(transformers, f"{kind}Config")(**_SMALL)
    getattr(transformers, name)(config, **options).save_pretrained(base)
    model, _ = load(base)
    run = jax.jit(lambda model: ql.quaxify(model)(jnp.asarray(IDS)))
    check = partial(compare, "transformers", "safetensors", kind.lower())
    check("vectors of pretrained encoders", run(model), _vectors(AutoModel.from_pretrained(base)), 2e-5)
    save(tmp_path / "again", model, base)
    again = AutoModel.from_pretrained(tmp_path / "again")
    check("vectors of pretrained encoders", _vectors(again), run(model), 2e-5)


def test_an_embedder_of_sentence_transformers(compare, tmp_path):
    """Which saves the body of Qwen3 and its pooling."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as modules
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    whole = tmp_path / "whole"
    Qwen3ForCausalLM(Qwen3Config(**_SMALL, num_key_value_heads=2, head_dim=8)).save_pretrained(whole)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "one": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<unk>"
    ).save_pretrained(whole)
    layers = [modules.Transformer(str(whole)), modules.Pooling(32, "lasttoken"), modules.Normalize()]
    SentenceTransformer(modules=layers, device="cpu").save(str(tmp_path / "base"))
    model, config = load(tmp_path / "base")
    assert config["architectures"] == ["Qwen3Model"]
    ids, seen = jnp.array([2]), jnp.ones(1, bool)
    found = Pooling.of(tmp_path / "base")(ql.quaxify(model.hidden)(ids), seen)
    wanted = SentenceTransformer(str(tmp_path / "base"), device="cpu").encode(["one"])[0]
    check = partial(compare, "sentence-transformers", "safetensors", "qwen3")
    check("vectors of texts", np.asarray(found), wanted, 1e-5)
