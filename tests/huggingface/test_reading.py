"""Checkpoints and adapters that quaxlike writes, read by transformers and PEFT."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.interop import peft
from quaxlike.models import Pooling, load, save
from quaxlike.models.pooling import MODES
from tests.models.fixtures import MODELS, adapter, agree, expected, folder, has_adapter, of_peft

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]
ADAPTERS = [
    *(
        "qwen3_moe/all_linear",
        "gpt_oss/experts_rslora",
        "mixtral/legacy_per_expert",
        "qwen2/trainable_tokens",
    ),
    *("gemma3/embed_lora", "qwen3/all_linear_rslora", "phi3/fused"),
]


def theirs(directory, z, adapter=None):
    """The logits of transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    mask = torch.tensor(z["attention_mask"])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        ids = torch.tensor(z["input_ids"])
        return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.numpy()[z["valid"]]


@pytest.mark.parametrize("name", [name for name in MODELS if "mxfp4" not in name])
def test_a_merged_model_has_the_logits_of_transformers(name, tmp_path):
    z = expected(name)
    base, _ = load(folder(name))
    adapted = ql.loraify(base, rank=2, key=jax.random.key(0))
    move = lambda x: x.replace(b=x.b + 0.05) if isinstance(x, ql.LoraArray) else x
    merged = ql.merge(jax.tree.map(move, adapted, is_leaf=ql.is_value))
    save(tmp_path, merged, folder(name))
    run = jax.jit(lambda model: jax.vmap(model)(z["input_ids"], z["attention_mask"].astype(bool)))
    ours = np.asarray(run(merged))[z["valid"]]
    assert np.abs(ours - z["logits"][z["valid"]]).max() > 0.01
    agree(theirs(tmp_path, z), ours, 5e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model, _ = load(folder("qwen3"))
    save(tmp_path, jax.tree.map(lambda x: x.astype(dtype), model), folder("qwen3"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    weight = read.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == getattr(torch, dtype)
    wanted = model.model.layers[0].mlp.up_proj.weight.astype(dtype).astype(jnp.float32)
    np.testing.assert_array_equal(weight.detach().float().numpy(), wanted)


@pytest.mark.parametrize("case", [case for case in ADAPTERS if has_adapter(case)])
def test_adapters_have_the_logits_of_peft(case, tmp_path):
    """Routers, stacks of experts and trained tokens among them, in the files that we write."""
    name, _, which = case.partition("/")
    base, _ = load(folder(name))
    model = peft.load_adapter(adapter(case), base)
    peft.save_adapter(tmp_path, model, base_model="base", task_type="CAUSAL_LM")
    z = expected(name)
    wanted = of_peft(case)[f"{which}/logits"][z["valid"]]
    agree(theirs(folder(name), z, adapter=tmp_path), wanted, 2e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2_moe", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
        ("qwen2", {"target_modules": ["lm_head"]}),
        ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("gemma3", {"target_modules": ["lm_head", "embed_tokens"]}),
    ],
)
def test_adapters_of_peft_have_its_logits(name, options, tmp_path):
    """Layers beside experts, which are parameters; output layers that are tied to an embedding."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "modules_to_save" in key:
                weight += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(tmp_path)
    z = expected(name)
    adapted = peft.load_adapter(tmp_path, load(folder(name))[0])
    run = jax.jit(lambda model, ids, seen: jax.vmap(ql.quaxify(model))(ids, seen))
    ours = run(adapted, z["input_ids"], z["attention_mask"].astype(bool))[z["valid"]]
    assert np.abs(ours - z["logits"][z["valid"]]).max() > 0.01
    agree(theirs(folder(name), z, adapter=tmp_path), ours, 5e-4)
    peft.save_adapter(tmp_path / "ours", adapted, task_type="CAUSAL_LM")
    agree(theirs(folder(name), z, adapter=tmp_path / "ours"), ours, 5e-4)


def test_recurrent_cells_have_the_weights_of_peft(tmp_path):
    import torch
    from peft import PeftModel

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = torch.nn.GRUCell(5, 4)

    net = Net()
    base = {name: jnp.asarray(x.numpy()) for name, x in net.state_dict().items()}
    model = ql.loraify(base, rank=2, where=["weight_ih", "weight_hh"], key=jax.random.key(0))
    move = lambda x: x.replace(b=x.b + 0.5) if isinstance(x, ql.LoraArray) else x
    model = jax.tree.map(move, model, is_leaf=ql.is_value)
    peft.save_adapter(tmp_path, model)
    merged = PeftModel.from_pretrained(net, tmp_path).merge_and_unload().state_dict()
    for name, x in ql.merge(model).items():
        agree(merged[name].numpy(), x, 1e-6)


@pytest.mark.parametrize("modes", [*MODES, ("mean", "cls")])
def test_sentences_are_pooled_as_by_sentence_transformers(modes, tmp_path):
    import torch

    modules = pytest.importorskip("sentence_transformers.models")
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
    agree(theirs["sentence_embedding"].numpy(), ours, 1e-6)


def test_a_merged_encoder_has_the_vectors_of_sentence_transformers(tmp_path):
    """Which takes the pooling, and the modules after it, from folders beside the weights."""
    modules = pytest.importorskip("sentence_transformers.models")
    from sentence_transformers import SentenceTransformer
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
    agree(vectors[1], vectors[0], 1e-6)
    assert np.abs(vectors[2] - vectors[0]).max() > 0.01
