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
from quaxlike.lm.families import classifiers
from quaxlike.lm.finetune.data import Tokens, collate
from quaxlike.lm.finetune.tasks import WordClasses
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
_DELTA_NET = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_OPTIONS = {
    "Gemma3Text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Mixtral": {"num_local_experts": 4}, "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": _EXPERTS, "Qwen3_5Text": _DELTA_NET,
    "Qwen3Next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
}  # fmt: skip
ENCODERS = [
    f"{kind}For{what}Classification" for kind in ("Bert", "ModernBert") for what in ("Sequence", "Token")
]
ARCHITECTURES = [*classifiers(), *ENCODERS]


def made(architecture, folder, kind, **more):
    """A model of transformers with random weights, written to a folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = _SIZES if kind in ("Bert", "ModernBert", "GPT2") else {**_SIZES, **_OF_DECODERS}
    options = {**sizes, **_OPTIONS.get(kind, {}), "num_labels": 3, **more}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight * 3 + 0.05 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    return model


def texts(padding):
    """Tokens, and which are none of padding."""
    ids, seen = np.random.default_rng(0).integers(3, 97, (2, 9)).astype(np.int32), np.ones((2, 9), bool)
    seen[0, slice(0, 4) if padding == "left" else slice(5, 9)] = False
    return np.where(seen, ids, 0), seen


def of_transformers(model, ids, seen):
    """Logits; positions count tokens only, as in generation, but for encoders, which count padding, too."""
    import torch

    mask = torch.tensor(seen).long()
    options = {"input_ids": torch.tensor(ids), "attention_mask": mask}
    if "bert" not in model.config.model_type:
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return model(**options).logits


def ours(model, ids, seen):
    return jax.jit(jax.vmap(ql.quaxify(model)))(ids, seen)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(architecture, padding, compare, tmp_path):
    kind = architecture.partition("For")[0]
    theirs = made(architecture, tmp_path / "base", kind, problem_type="multi_label_classification")
    ids, seen = texts(padding)
    model, _ = load(tmp_path / "base")
    assert model.labels.problem_type == "multi_label_classification"
    keep = seen if model.of_tokens else slice(None)
    family = theirs.config.model_type
    compare = partial(compare, "transformers", "safetensors", family)
    what = "logits of tokens' labels" if model.of_tokens else "logits of labels"
    wanted = of_transformers(theirs, ids, seen).detach().numpy()
    compare(what, ours(model, ids, seen)[keep], wanted[keep], 5e-4)
    save(tmp_path / "again", model, tmp_path / "base")
    again = type(theirs).from_pretrained(tmp_path / "again")
    for (name, x), y in zip(theirs.state_dict().items(), again.state_dict().values(), strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy(), err_msg=name)
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("base", "again")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", ["pieces", "metaspace"])
def test_labels_of_words(kind, compare, tmp_path):
    """Rows of words become what transformers' `run_ner.py` makes of them, with the same loss."""
    import torch
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers import models as vocabularies
    from transformers import BertForTokenClassification, PreTrainedTokenizerFast

    theirs = made("BertForTokenClassification", tmp_path, "Bert")
    words = {"pieces": ["one", "##ty", "two", "##s", "."], "metaspace": ["▁one", "ty", "▁two", "s", "▁."]}[
        kind
    ]
    numbers = {x: i for i, x in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    if kind == "pieces":
        tokenizer = Tokenizer(vocabularies.WordPiece(numbers, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        scores = [(x, -1.0) for x in numbers]
        tokenizer = Tokenizer(vocabularies.Unigram(scores, unk_id=0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    rows = [(["onety", "twos", ".", "one"], [2, 0, 1, 2]), (["two", "onetys"], [1, -100])]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[UNK]")
    batch = fast([row for row, _ in rows], is_split_into_words=True, padding=True, return_tensors="pt")
    aligned = []
    for i, (_, tags) in enumerate(rows):
        ids = batch.word_ids(i)
        firsts = [
            word is not None and word != before for word, before in zip(ids, [None, *ids], strict=False)
        ]
        aligned.append([tags[w] if first else -100 for w, first in zip(ids, firsts, strict=True)])
    wanted = theirs(**batch, labels=torch.tensor(aligned)).loss.item()
    assert isinstance(theirs, BertForTokenClassification)

    model, config = load(tmp_path)
    task, tokens = WordClasses(model.labels), Tokens(tmp_path, config, 32)
    examples = [task.encode({"tokens": row, "labels": tags}, tokens) for row, tags in rows]
    for i, example in enumerate(examples):
        n = len(example.texts[0])
        assert example.texts[0] == batch["input_ids"][i][:n].tolist()
        assert example.label == aligned[i][:n]
    ours_of = collate(examples, 32)
    found = task.total(jax.vmap(task.output, (None, 0))(model, ours_of), ours_of) / task.weight(ours_of)
    compare("transformers", "safetensors", "bert", "losses of words' labels", float(found), wanted, 1e-5)


BASES = {
    "LlamaForSequenceClassification": "LlamaForCausalLM", "Qwen3ForTokenClassification": "Qwen3ForCausalLM",
    "GPT2ForSequenceClassification": "GPT2LMHeadModel", "GPT2ForTokenClassification": "GPT2LMHeadModel",
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
    "MixtralForSequenceClassification": "MixtralForCausalLM",
    "Qwen3NextForTokenClassification": "Qwen3NextForCausalLM",
    "BertForSequenceClassification": "BertModel", "BertForTokenClassification": "BertModel",
    "ModernBertForSequenceClassification": "ModernBertModel",
    "ModernBertForTokenClassification": "ModernBertModel",
}  # fmt: skip


@pytest.mark.parametrize("architecture", BASES)
def test_adapters_of_a_base_without_a_head(architecture, compare, tmp_path):
    """Ours with a new head in PEFT, PEFT's on ours, and ours merged in transformers; gradients of both."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    of_tokens = "Token" in architecture
    made(BASES[architecture], tmp_path / "base", architecture.partition("For")[0])
    auto = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    fresh = lambda: auto.from_pretrained(tmp_path / "base", num_labels=3, dtype=torch.float32).eval()
    kind, task = type(fresh()).__name__, "TOKEN_CLS" if of_tokens else "SEQ_CLS"
    assert kind == architecture
    compare = partial(compare, "PEFT", "adapters", fresh().config.model_type)
    ids, seen = texts("right")
    keep = seen if of_tokens else slice(None)
    check = lambda what, theirs, mine: compare(
        what, of_transformers(theirs, ids, seen).detach().numpy()[keep], mine[keep], 5e-4
    )
    what = "logits of tokens' labels" if of_tokens else "logits of labels"

    base, _ = load(tmp_path / "base")
    model = models.with_classifier(base, ["a", "b", "c"], of_tokens=of_tokens, key=jax.random.key(0), std=1.0)
    adapted = ql.loraify(
        model, rank=2, init="gaussian", modules_to_save=model.head_parts, key=jax.random.key(1)
    )
    move = lambda x: x.replace(b=x.b + 0.1) if isinstance(x, ql.LoraArray) else x
    adapted = jax.tree.map(move, adapted, is_leaf=ql.is_value)
    mine = ours(adapted, ids, seen)
    assert np.abs(mine - ours(model, ids, seen)).max() > 0.01
    peft.save_adapter(tmp_path / "ours", adapted, task_type=task)
    theirs = PeftModel.from_pretrained(fresh(), tmp_path / "ours", is_trainable=True).eval()
    assert type(theirs).__name__ == f"PeftModelFor{'Token' if of_tokens else 'Sequence'}Classification"
    check(what, theirs, mine)
    again = peft.load_adapter(tmp_path / "ours", model)
    np.testing.assert_array_equal(ours(again, ids, seen), mine)
    save(tmp_path / "merged", ql.merge(adapted), tmp_path / "base")
    merged = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert merged.config.id2label == {0: "a", 1: "b", 2: "c"}
    check(f"{what} of merged models", merged, mine)

    labels = np.where(seen, 1, -100) if of_tokens else np.array([2, 0])
    options = {"labels": torch.tensor(labels), "input_ids": torch.tensor(ids)}
    loss = theirs(**options, attention_mask=torch.tensor(seen).long()).loss
    loss.backward()
    params, frozen = eqx.partition(adapted, ql.trainable(adapted))

    @jax.jit
    @jax.value_and_grad
    def ours_of(params):
        logits = jax.vmap(ql.quaxify(eqx.combine(params, frozen)))(ids, seen)
        own = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(labels >= 0, own, 0)) / np.sum(labels >= 0)

    value, gradient = ours_of(params)
    compare("losses", float(value), loss.item(), 1e-4)
    of_head = {name: x for name, x in named_arrays(gradient).items() if model.head_parts[-1] in name}
    of_theirs = {name: x for name, x in theirs.named_parameters() if "modules_to_save" in name}
    for name, x in of_head.items():
        ends = f"{model.head_parts[-1]}.modules_to_save.default.{name.split('.')[1]}"
        (wanted,) = (y.grad.numpy() for key, y in of_theirs.items() if key.endswith(ends))
        compare("gradients", getattr(x, "array", x), wanted, 1e-4)

    torch.manual_seed(0)
    # PEFT would adapt the head of tokens as well, and then cannot train it in full.
    target = ["q_proj", "c_attn", "query", "Wqkv"] if of_tokens else "all-linear"
    config = LoraConfig(r=2, init_lora_weights=False, task_type=task, target_modules=target)
    if architecture.startswith("ModernBert"):
        config.modules_to_save = ["head"]
    theirs = get_peft_model(fresh(), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    read = peft.load_adapter(tmp_path / "theirs", model)
    check(what, theirs, ours(read, ids, seen))
