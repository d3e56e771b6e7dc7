"""PEFT on adapters that quaxlike writes, and quaxlike on those of PEFT."""

import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft
from tests.fixtures import fixture, has_fixture
from tests.lm.clients.suite import client, logits_of_transformers
from tests.lm.clients.test_transformers import CASES, TOWERS, made, tower_of
from tests.lm.models.fixtures import adapter, expected, family, folder, has_adapter, of_peft

pytestmark = client("torch", "transformers", "peft")

_ADAPTERS = [
    "qwen3_moe/all_linear", "gpt_oss/experts_rslora", "mixtral/legacy_per_expert", "qwen2/trainable_tokens",
    "gemma3/embed_lora", "qwen3/all_linear_rslora", "phi3/fused",
]  # fmt: skip


def _theirs(directory, z, adapter):
    """The logits of PEFT, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, **options)
    model = PeftModel.from_pretrained(model, adapter).eval()
    return logits_of_transformers(model, z["input_ids"], z["attention_mask"])[z["valid"]]


@pytest.mark.parametrize("case", [case for case in _ADAPTERS if has_adapter(case)])
def test_adapters_have_the_logits_of_peft(case, compare, tmp_path):
    """Routers, stacks of experts and trained tokens among them, in the files that we write."""
    name, _, which = case.partition("/")
    base, _ = load(folder(name))
    model = peft.load_adapter(adapter(case), base)
    peft.save_adapter(tmp_path, model, base_model="base", task_type="CAUSAL_LM")
    z = expected(name)
    wanted = of_peft(case)[f"{which}/logits"][z["valid"]]
    compare("PEFT", "adapters", family(name), "logits", _theirs(folder(name), z, tmp_path), wanted, 2e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2_moe", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
        ("qwen2", {"target_modules": ["lm_head"]}),
        ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("gemma3", {"target_modules": ["lm_head", "embed_tokens"]}),
        ("qwen2", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 3, 5]}),
        ("qwen2", {"target_modules": ["q_proj"], "layers_to_transform": []}),
        (
            "qwen2",
            {"target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"], "layers_to_transform": [1]},
        ),
        ("qwen2", {"target_modules": ["q_proj"], "velora_config": {"num_groups": 4}}),
    ],
)
def test_adapters_of_peft_have_its_logits(name, options, compare, tmp_path):
    """Layers beside experts, which are parameters; output layers that are tied to an embedding."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "modules_to_save" in key or "trainable_tokens" in key:
                weight += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(tmp_path)
    z = expected(name)
    adapted = peft.load_adapter(tmp_path, load(folder(name))[0])
    run = jax.jit(lambda model, ids, seen: jax.vmap(ql.quaxify(model))(ids, seen))
    ours = run(adapted, z["input_ids"], z["attention_mask"].astype(bool))[z["valid"]]
    assert np.abs(ours - z["logits"][z["valid"]]).max() > 0.01
    check = partial(compare, "PEFT", "adapters", family(name), "logits")
    check(_theirs(folder(name), z, tmp_path), ours, 5e-4)
    peft.save_adapter(tmp_path / "ours", adapted, task_type="CAUSAL_LM")
    check(_theirs(folder(name), z, tmp_path / "ours"), ours, 5e-4)


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTER = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
_TIED, _ALIKE = {"tie_word_embeddings": True}, {"ensure_weight_tying": True}
_GPT2 = {**_TIED, "head_dim": 12, "num_key_value_heads": 4}
_PISSA = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": "pissa"}
_QV = {"target_modules": ["q_proj", "v_proj"]}
#: The kind of a model and its options; the kind of a configuration and its options.
_CONFIGURATIONS = {
    "alpha of a router": ("Mixtral", _EXPERTS, "Lora", {**_ROUTER, "alpha_pattern": {"gate.weight": 64}}),
    "alpha of no router": ("Mixtral", _EXPERTS, "Lora", {**_ROUTER, "alpha_pattern": {"gate": 64}}),
    "rank of a router": ("Mixtral", _EXPERTS, "Lora", {**_ROUTER, "rank_pattern": {"0.mlp.gate.weight": 1}}),
    "alpha of a weight": ("Llama", {}, "Lora", {
        "target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"],
        "alpha_pattern": {"q_proj.weight": 64},
    }),
    "gpt2, lora alike": ("GPT2", _GPT2, "Lora", {"target_modules": ["wte", "c_attn"], **_ALIKE}),
    "gpt2, saved alike": ("GPT2", _GPT2, "Lora", {
        "target_modules": ["c_attn"], "modules_to_save": ["wte"], **_ALIKE,
    }),
    "pissa of an output layer": ("Llama", {}, "Lora", _PISSA),
    "pissa of a tied output layer": ("Llama", _TIED, "Lora", _PISSA),
    "olora of a tied output layer": ("Llama", _TIED, "Lora", {**_PISSA, "init_lora_weights": "olora"}),
    "weight of an embedding": ("Llama", {}, "Lora", {
        "target_modules": ["v_proj"], "target_parameters": ["embed_tokens.weight"],
    }),
    "frequencies": ("Llama", {}, "FourierFT", {
        **_QV, "n_frequency": 20, "n_frequency_pattern": {"layers.0.self_attn.q_proj": 40},
    }),
    "frequencies of alternatives": ("Llama", {}, "FourierFT", {
        **_QV, "n_frequency": 20, "n_frequency_pattern": {"q_proj|v_proj": 40},
    }),
    "blocks": ("Llama", {}, "C3A", {
        **_QV, "block_size": 16, "block_size_pattern": {"layers.0.self_attn.q_proj": 8},
    }),
    "module with layers": ("Qwen3Next", CASES["qwen3_next, dense"][1], "Lora", {
        "target_modules": ["q_proj"], "modules_to_save": ["linear_attn"],
    }),
    "gpt2, ia3": ("GPT2", _GPT2, "IA3", {}),
    **{f"{name}, {bias}": ("Qwen2", {}, name, {**_QV, "bias": bias, **options}) for name, bias, options in (
        ("Vera", "all", {"r": 8}), ("Vera", "vera_only", {"r": 8}), ("HRA", "hra_only", {}),
        ("BOFT", "all", {"boft_block_size": 4}), ("OFT", "oft_only", {"oft_block_size": 8}),
        ("AdaLora", "all", {"init_r": 4, "target_r": 2, "total_step": 100}), ("Delora", "delora_only", {}),
        ("FourierFT", "all", {"n_frequency": 20}), ("C3A", "c3a_only", {"block_size": 16}),
        ("Miss", "MiSS_only", {"r": 8}), ("Gralora", "all", {"r": 4}), ("RandLora", "all", {"r": 8}),
    )},
}  # fmt: skip


@pytest.mark.parametrize("case", _CONFIGURATIONS)
def test_configurations_of_peft(case, compare, tmp_path):
    """Its adapters read here, and read there again from the files that we write."""
    import peft as theirs
    import torch
    from transformers import AutoModelForCausalLM

    kind, sizes, method, options = _CONFIGURATIONS[case]
    made(kind, {"num_hidden_layers": 2, **sizes}, tmp_path / "base")
    fresh = lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    logits = lambda model: logits_of_transformers(model, ids, np.ones_like(ids, bool))
    reread = lambda name: logits(theirs.PeftModel.from_pretrained(fresh(), tmp_path / name).eval())
    ids = np.random.default_rng(0).integers(3, 97, (2, 11)).astype(np.int32)
    torch.manual_seed(0)
    if method == "Lora":
        options = {"r": 2, "lora_alpha": 4, **options}
    config = getattr(theirs, f"{method}Config")(task_type="CAUSAL_LM", **options)
    model = theirs.get_peft_model(fresh(), config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(tmp_path / "theirs")
    wanted = reread("theirs")
    assert np.abs(wanted - logits(fresh())).max() > 0.01
    adapted = peft.load_adapter(tmp_path / "theirs", load(tmp_path / "base")[0])
    found = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, np.ones_like(ids, bool)))(adapted)
    check = partial(compare, "PEFT", "adapters", kind.lower(), "logits")
    check(found, wanted, 5e-4)
    peft.save_adapter(tmp_path / "ours", adapted, task_type="CAUSAL_LM")
    check(reread("ours"), wanted, 5e-4)


def _reads_ours(theirs, folder, model, base, run, check, ids, seen):
    """PEFT computes what our model with an adapter does, on a model of its own."""
    from peft import PeftModel

    peft.save_adapter(folder, model, task_type="CAUSAL_LM")
    assert np.abs(run(model) - run(base)).max() > 0.01
    read = PeftModel.from_pretrained(theirs, folder).eval()
    check(logits_of_transformers(read, ids, seen), run(model), 5e-4)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, r".*linear_attn\.\w+_proj\w*\.weight") for name in ("qwen3_next", "qwen3_5")),
        ("gemma4", r".*\.per_layer_\w+\.weight"),
        ("gemma4, experts", r".*\.(router\.proj\.weight|experts\.\w+)"),
    ],
)
def test_adapters_of_other_layers(name, where, compare, tmp_path):
    """Ours, and those of PEFT on all linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made(*CASES[name], tmp_path / "base")
    ids, seen = np.random.default_rng(0).integers(3, 97, (2, 11)).astype(np.int32), np.ones((2, 11), bool)
    fresh = lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    check = partial(compare, "PEFT", "adapters", name.partition(",")[0], "logits")
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))
    base, _ = load(tmp_path / "base")
    model = ql.loraify(base, rank=2, where=where, key=jax.random.key(0))
    move = lambda x: x.replace(b=x.b + 0.03) if isinstance(x, ql.LoraArray) else x
    model = jax.tree.map(move, model, is_leaf=ql.is_value)
    _reads_ours(fresh(), tmp_path / "ours", model, base, run, check, ids, seen)
    # Experts, and layers beside them that PEFT takes for experts, too.
    model = ql.loraify(base, rank=2, key=jax.random.key(0))
    model = jax.tree.map(move, model, is_leaf=ql.is_value)
    _reads_ours(fresh(), tmp_path / "all", model, base, run, check, ids, seen)
    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    config = LoraConfig(r=2, lora_alpha=1, init_lora_weights=False, **options)
    read = get_peft_model(fresh(), config).eval()
    read.save_pretrained(tmp_path / "theirs")
    again = peft.load_adapter(tmp_path / "theirs", base)
    check(logits_of_transformers(read, ids, seen), run(again), 5e-4)


@pytest.mark.parametrize("name", TOWERS)
def test_adapters_of_models_that_read_images(name, compare, tmp_path):
    """Ours on the whole model, and PEFT's, which adapts layers of the other parts too, on the decoder."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    theirs, ids, seen = tower_of(name)
    theirs.save_pretrained(tmp_path / "base")
    made = AutoModelForCausalLM if name.startswith("gemma") else AutoModelForImageTextToText
    fresh = lambda: made.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    check = partial(compare, "PEFT", "adapters", name, "logits")
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))
    base, _ = load(tmp_path / "base")
    model = ql.loraify(base, rank=2, where=["q_proj", "down_proj"], key=jax.random.key(0))
    move = lambda x: x.replace(b=x.b + 0.1) if isinstance(x, ql.LoraArray) else x
    model = jax.tree.map(move, model, is_leaf=ql.is_value)
    _reads_ours(fresh(), tmp_path / "ours", model, base, run, check, ids, seen)
    torch.manual_seed(0)
    # The layers of Gemma 4 that read images have another layer in them.
    layers = r".*(language_model.*\.q_proj|\.q_proj\.linear)" if name == "gemma4" else ".*(q_proj|qkv)"
    config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=layers)
    read = get_peft_model(fresh(), config).eval()
    read.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match=r"\d tensors of (vision_tower|visual) are left out"):
        again = peft.load_adapter(tmp_path / "theirs", base)
    check(logits_of_transformers(read, ids, seen), run(again), 5e-4)


def test_recurrent_cells_have_the_weights_of_peft(compare, tmp_path):
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
        compare("PEFT", "adapters", "recurrent cells", "merged weights", merged[name].numpy(), x, 1e-6)


_METHODS = [
    "ia3", "oft_cayley", "hra", "vera", "loha", "lokr", "shira", "hira", "miss", "c3a", "delora", "adalora",
    "gralora", "randlora", "boft_block_size", "fourierft",
]  # fmt: skip


@pytest.mark.parametrize("case", [x for x in _METHODS if has_fixture(f"peft_methods/llama/{x}")])
def test_methods_have_the_logits_of_peft(case, compare, tmp_path):
    """Adapters other than LoRA, in the files that we write."""
    of_methods = fixture("peft_methods") / "llama"
    base, _ = load(of_methods / "base")
    of_case = fixture(f"peft_methods/llama/{case}")
    peft.save_adapter(tmp_path, peft.load_adapter(of_case, base), task_type="CAUSAL_LM")
    io = np.load(of_methods / "io.npz")
    z = {name: io[name] for name in ("input_ids", "attention_mask")} | {"valid": io["attention_mask"] > 0}
    wanted = np.load(of_case / "ref.npz")["logits"][z["valid"]]
    compare("PEFT", "adapters", case, "logits", _theirs(of_methods / "base", z, tmp_path), wanted, 2e-5)


@pytest.mark.parametrize("case", ["randlora", "fourierft", "delora", "hra"])
def test_adapters_of_16_bits_have_the_logits_of_peft(case, compare, tmp_path):
    """Which casts them to float32."""
    of_methods = fixture("peft_methods") / "llama"
    io, of_case = np.load(of_methods / "io.npz"), fixture(f"peft_methods/llama/{case}")
    shutil.copytree(of_case, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_model.safetensors"
    halves = {key: np.asarray(x).astype(jnp.bfloat16) for key, x in open_tensors(file).items()}
    write_tensors(file, halves, {"format": "pt"})
    ids, seen = io["input_ids"].astype(np.int32), io["attention_mask"] > 0
    adapted = peft.load_adapter(tmp_path, load(of_methods / "base")[0])
    found = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))(adapted)
    z = {"input_ids": io["input_ids"], "attention_mask": io["attention_mask"], "valid": seen}
    wanted = _theirs(of_methods / "base", z, tmp_path)
    compare("PEFT", "adapters", case, "logits of 16 bits", found[seen], wanted, 2e-5)


def test_activated_lora_continues_texts_as_peft_does(compare, tmp_path):
    """Logits and greedy tokens of texts that invoke it, with a cache, in the files that we write."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    of_methods = fixture("peft_methods") / "llama"
    adapted = peft.load_adapter(of_methods / "lora_alora", load(of_methods / "base")[0])
    peft.save_adapter(tmp_path, adapted, task_type="CAUSAL_LM")
    theirs = AutoModelForCausalLM.from_pretrained(of_methods / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(theirs, tmp_path).eval()
    io = np.load(of_methods / "io.npz")
    ids, seen = io["input_ids_alora"].astype(np.int32), io["attention_mask"] > 0
    wanted = np.load(of_methods / "lora_alora" / "ref.npz")["logits"][seen]
    found = logits_of_transformers(theirs, ids, seen)[seen]
    compare("PEFT", "adapters", "lora_alora", "logits", found, wanted, 2e-5)

    for row in ([34, 5, 9, 42, 5, 9, 39], [47, 7, 5, 9], [5, 8, 9, 20]):  # the last one does not invoke it
        prompt = torch.tensor([row])
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            tokens = theirs.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
        ours = ql.lm.generate(adapted, np.array([row]), max_new_tokens=12)
        compare("PEFT", "adapters", "lora_alora", "greedy tokens", tokens[:, len(row) :].numpy(), ours)
