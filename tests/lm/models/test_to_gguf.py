"""Models as GGUF files: the metadata, the tokeniser and the tensors that llama.cpp needs.

`tests/lm/clients` has llama.cpp itself run such files.
"""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.lm import load, peft, save, to_gguf
from quaxlike.lm.chat import ChatTemplate
from quaxlike.lm.folders.model_config import UnsupportedConfigError
from quaxlike.lm.gguf.blocks import BLOCK_TYPES
from quaxlike.lm.gguf.config import config_of
from quaxlike.lm.gguf.container import open_gguf
from quaxlike.lm.marks import Marks
from quaxlike.lm.models import DecoderConfig
from quaxlike.lm.text import TextTokenizer
from quaxlike.surgery.quantize import quantizers
from quaxlike.surgery.trees import named_arrays
from tests.lm.gguf.test_gguf_metadata import ARRAY, BOOL, F32, I32, STRING, U32, types_of
from tests.lm.models.fixtures import MODELS
from tests.lm.models.made import LIKE, TEMPLATE, TEXTS, byte_level, checkpoint, sentencepiece
from tests.samples import random_key


@pytest.fixture(name="checkpoint")
def _checkpoint(tmp_path):
    """Makes a checkpoint; returns its folder and the model."""
    return lambda name, *options, **changes: (
        tmp_path / name,
        checkpoint(tmp_path / name, name, *options, **changes),
    )


@pytest.mark.quick("qwen2")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama_llama3", "gemma3"])
def test_a_file_is_the_model(name, checkpoint, tmp_path):
    """Read again: the arrays, the configuration, the tokens of texts, the conversations."""
    tokenizer = (
        sentencepiece(340)
        if name == "gemma3"
        else byte_level(290, "llama-bpe" if "llama" in name else "qwen2")
    )
    source, model = checkpoint(name, tokenizer)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    again, config = load(tmp_path / "m.gguf")
    for key, leaf in named_arrays(model).items():
        np.testing.assert_allclose(named_arrays(again)[key], leaf, atol=2e-7, err_msg=key)
    ids = jnp.arange(9)
    logits = [jax.jit(lambda m: m(ids, jnp.ones(9, bool)))(m) for m in (model, again)]
    np.testing.assert_allclose(*logits, atol=1e-4)
    found = Tokenizer.from_str(lm.read_tokenizer(tmp_path / "m.gguf"))
    for text in [*TEXTS, "漢字 🦙", "   x"]:
        assert found.encode(text).ids == tokenizer.encode(text).ids
    types = types_of(tmp_path / "m.gguf")
    assert types["tokenizer.ggml.tokens"] == (ARRAY, STRING)
    assert types["tokenizer.ggml.token_type"] == (ARRAY, I32)
    assert types["tokenizer.ggml.add_bos_token"] == BOOL
    assert types["tokenizer.ggml.eos_token_id"] == types["general.file_type"] == U32
    metadata = lm.open_checkpoint(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{config['vocab_size'] - 1}]"
    if name == "gemma3":
        assert types["tokenizer.ggml.scores"] == (ARRAY, F32)
        assert metadata["tokenizer.ggml.add_bos_token"]
        return
    assert config["eos_token_id"] == [2, 1]  # the tokeniser's first, then those of generation
    messages = [{"role": "user", "content": "Hi"}]
    rendered = [ChatTemplate(path).render(messages).text for path in (source, tmp_path / "m.gguf")]
    assert rendered[0] == rendered[1] == "<|im_start|>Hi<|im_end|>"


def _kinds(path):
    """llama.cpp's numbers of the tensors' types, by their names."""
    return {name: tensor.kind for name, tensor in open_gguf(path)._tensors.items()}


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.quick("changes1-gpt_oss")
@pytest.mark.parametrize("name", ["llama_yarn", "gpt_oss"])  # the latter's family has one of its own
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": _YARN | {"attention_factor": 2.0}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_the_factor_of_yarn_is_told(name, changes, checkpoint, tmp_path):
    source, model = checkpoint(name, **changes)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({k: x for k, x in config.items() if x is not None}))
    save(tmp_path / "m.gguf", model, source, format="gguf")
    again, _ = load(tmp_path / "m.gguf")
    for ours, theirs in zip(model.config.ropes, again.config.ropes, strict=True):
        np.testing.assert_allclose(theirs.scale, ours.scale, rtol=1e-6)
        np.testing.assert_allclose(theirs.frequencies, ours.frequencies, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "kind", "output"), [("f16", 1, 1), ("bf16", 30, 30), ("q8_0", 8, 8), ("q4_0", 2, 8)]
)
def test_types_of_tensors(quantize, kind, output, checkpoint, tmp_path):
    source, model = checkpoint("qwen2", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    save(tmp_path / "out", model, source, format="gguf", quantize=quantize)
    kinds = _kinds(tmp_path / "out" / "model.gguf")
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.2.ffn_down.weight"] == kind
    assert kinds["token_embd.weight"] == output  # tied
    assert kinds["blk.0.attn_q.bias"] == kinds["output_norm.weight"] == 0
    again, _ = load(tmp_path / "out")
    for key, leaf in named_arrays(model).items():
        found = ql.materialise(named_arrays(again)[key])
        np.testing.assert_allclose(found, leaf, atol=0.15 * float(jnp.abs(leaf).max()) + 1e-6, err_msg=key)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "kind", "number"),
    [
        ("q4_k_m", "Q4_K", 15),
        ("q5_k_m", "Q5_K", 17),
        ("q2_k", "Q2_K", 10),
        ("q3_k", "Q3_K", 12),
        ("iq4_xs", "IQ4_XS", 30),
        ({"all-linear": "q5_1", "model.embed_tokens.weight": "q5_0"}, "Q5_1", 9),
    ],
)
def test_block_types_and_recipes(quantize, kind, number, checkpoint, tmp_path):
    source, model = checkpoint("qwen2", **WIDE)
    save(tmp_path / "m.gguf", model, source, format="gguf", quantize=quantize)
    names = {n: name for n, (name, _) in BLOCK_TYPES.items()}
    kinds = {name: names.get(n, n) for name, n in _kinds(tmp_path / "m.gguf").items()}
    assert kinds["blk.0.attn_q.weight"] == kind
    assert kinds["token_embd.weight"] == ("Q6_K" if isinstance(quantize, str) else "Q5_0")  # tied
    most = {"q2_k": "Q3_K", "q4_k_m": "Q6_K", "q5_k_m": "Q6_K"}.get(str(quantize), kind)
    assert kinds["blk.2.ffn_down.weight"] == kinds["blk.2.attn_v.weight"] == most
    metadata = lm.open_checkpoint(tmp_path / "m.gguf").metadata
    assert metadata["general.file_type"] == number
    assert metadata["general.quantization_version"] == 2
    # Another program's file of the same types keeps its codes, and so does the model in memory.
    again, _ = load(tmp_path / "m.gguf")
    save(tmp_path / "again.gguf", again, tmp_path / "m.gguf", format="gguf")
    assert _kinds(tmp_path / "again.gguf") == _kinds(tmp_path / "m.gguf")
    for key, leaf in named_arrays(again).items():
        found = lm.open_checkpoint(tmp_path / "again.gguf")[key]
        np.testing.assert_array_equal(ql.materialise(found), ql.materialise(leaf), err_msg=key)


@pytest.mark.slow
def test_rows_that_no_large_blocks_make_up(checkpoint, tmp_path):
    """llama.cpp's types in place of those of 256: the nearest in blocks of 32."""
    source, model = checkpoint("qwen2", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    save(tmp_path / "m.gguf", model, source, format="gguf", quantize="q4_k_m")
    kinds = _kinds(tmp_path / "m.gguf")
    assert {kinds["blk.0.attn_q.weight"], kinds["blk.2.ffn_down.weight"]} == {6, 8}  # Q5_0, Q8_0


@pytest.mark.slow
def test_codes_that_were_chosen_by_importance_are_written(checkpoint, tmp_path):
    source, model = checkpoint("qwen2", **WIDE)
    importance = {name: jnp.arange(1.0, 257) for name in quantizers(model, "q4_k_m")}
    model = ql.quantize(model, "q4_k_m", calibrate=importance)
    save(tmp_path / "m.gguf", model, source, format="gguf", quantize="q4_k_m")
    again, _ = load(tmp_path / "m.gguf")
    for i in (0, 2):
        found, wanted = (x.model.layers[i].mlp.down_proj.weight for x in (again, model))
        np.testing.assert_array_equal(found.materialise(), wanted.materialise())


@pytest.mark.parametrize(
    ("quantize", "message"),
    [
        ("q4_k_n", "GGUF has no type 'q4_k_n'. Did you mean 'q4_k_m'"),
        (
            "nf4_qlora",
            "The rule 'all-linear': GGUF has no type for 'nf4' with double_quant. Its types are f32",
        ),
        ({"all-linear": "nf4"}, "The rule 'all-linear': GGUF has no type for nf4"),
        ({"layerz.*": "q4_k"}, "'layerz.*' matches none of the arrays"),
    ],
)
def test_types_that_gguf_does_not_have(quantize, message, checkpoint, tmp_path):
    source, model = checkpoint("qwen2")
    with pytest.raises(ValueError, match=re.escape(message)):
        save(tmp_path / "m.gguf", model, source, format="gguf", quantize=quantize)
    assert not (tmp_path / "m.gguf").exists()


def _adapted(model, **options):
    model = ql.loraify(model, rank=2, alpha=3, key=jax.random.key(0), **options)
    is_lora = lambda x: isinstance(x, ql.LoraArray)
    drawn = lambda x: x.replace(b=jax.random.normal(jax.random.key(1), x.b.shape)) if is_lora(x) else x
    return jax.tree.map(drawn, model, is_leaf=is_lora)


def _in_file(path, name):
    """A tensor of float32 with its rows in the order of the file."""
    tensor = open_gguf(path)._tensors[name]
    raw = tensor.file.read(tensor.start, tensor.nbytes, name)
    return np.frombuffer(raw, np.float32).reshape(tensor.shape)


@pytest.mark.slow
def test_an_adapter_as_a_file_of_its_own(checkpoint, tmp_path):
    """In llama.cpp's order of rows; the same for a folder and a GGUF file of the base."""
    source, model = checkpoint("llama_llama3")
    adapted = _adapted(model, where=["q_proj", "down_proj"])
    save(tmp_path / "base.gguf", model, source, format="gguf")
    for base in (source, tmp_path / "base.gguf"):
        peft.save_gguf_adapter(tmp_path / "lora.gguf", adapted, base)
        file = open_gguf(tmp_path / "lora.gguf")
        about = {key: file.metadata[key] for key in ("general.type", "adapter.type", "adapter.lora.alpha")}
        assert about == {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 2.0}
        a, b = (np.asarray(file[f"blk.0.attn_q.weight.lora_{x}"]) for x in "ab")
        save(tmp_path / "merged.gguf", ql.merge(adapted), source, format="gguf")
        delta = lambda name: _in_file(tmp_path / name, "blk.0.attn_q.weight")
        np.testing.assert_allclose(b @ a, delta("merged.gguf") - delta("base.gguf"), atol=1e-5)
    with pytest.raises(CheckpointError, match="is a GGUF file of type 'adapter' rather than a model"):
        load(tmp_path / "lora.gguf")


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_adapters_of_experts_are_cut_as_their_weights_are(name, checkpoint, tmp_path):
    """Those of GPT-OSS alternate, and are transposed."""
    source, model = checkpoint(name, **({"sliding_window": None} if name == "mixtral" else {}))
    adapted = _adapted(model, where=["gate_up_proj"])
    peft.save_gguf_adapter(tmp_path / "lora.gguf", adapted, source)
    file, x = open_gguf(tmp_path / "lora.gguf"), adapted.model.layers[0].mlp.experts.gate_up_proj
    parts = [
        [np.asarray(file[f"blk.0.ffn_{name}_exps.weight.lora_{x}"]) for x in "ab"] for name in ("gate", "up")
    ]
    found = [b @ a for a, b in parts]
    if name == "gpt_oss":
        found = np.stack(found, axis=2).reshape(*x.shape[::2], -1).swapaxes(1, 2)
    else:
        found = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found, x.delta(), rtol=1e-4, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("adapt", "message"),
    [
        (lambda model: model, "no adapters to save"),
        (
            lambda model: ql.loraify(model, rank=2, dora=True, where=["q_proj"], key=random_key()),
            "it is a DoRA. A GGUF adapter",
        ),
        (
            lambda model: ql.loraify(model, rank=2, where=["embed_tokens"], key=jax.random.key(0)),
            "model.embed_tokens.weight: it is an embedding",
        ),
        (
            lambda model: ql.loraify(model, rank=2, init="pissa", where=["q_proj"], key=random_key()),
            "took a part of the weight",
        ),
        (
            lambda model: ql.loraify(model, rank=2, modules_to_save=["norm"], key=jax.random.key(0)),
            "model.norm.weight: it has an adapter of type TrainableArray",
        ),
    ],
)
def test_adapters_that_gguf_does_not_have(adapt, message, checkpoint, tmp_path):
    source, model = checkpoint("qwen2")
    with pytest.raises(ValueError, match=message):
        peft.save_gguf_adapter(tmp_path / "lora.gguf", adapt(model), source)
    assert not (tmp_path / "lora.gguf").exists()


@pytest.mark.slow
def test_the_dtype_that_a_model_computes_in(checkpoint, tmp_path):
    source, model = checkpoint("qwen2", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    save(tmp_path / "m.gguf", model, source, format="gguf", quantize="q8_0")
    run = jax.jit(ql.quaxify(lambda model: model(jnp.arange(9), jnp.ones(9, bool))))
    models = [load(tmp_path / "m.gguf", dtype=dtype)[0] for dtype in (None, "bfloat16")]
    for model, dtype in zip(models, (jnp.float32, jnp.bfloat16), strict=True):
        assert {leaf.dtype for leaf in named_arrays(model).values()} == {jnp.dtype(dtype)}
    wide, narrow = map(run, models)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=0.03 * float(jnp.abs(wide).max()))
    # The weights are rounded to blocks before they are to bfloat16.
    codes, of_narrow = (load(source, quantize="nf4", dtype=dtype)[0] for dtype in (None, "bfloat16"))
    for a, b in zip(jax.tree.leaves(codes), jax.tree.leaves(of_narrow), strict=True):
        if a.dtype == b.dtype:
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"bfloat16, float16, float32, .* float64; found dtype='int8'"):
        load(source, dtype="int8")


def test_rows_that_no_blocks_make_up_are_of_float16(checkpoint, tmp_path):
    source, model = checkpoint("qwen2")
    save(tmp_path / "m.gguf", model, source, format="gguf", quantize="q8_0")
    assert _kinds(tmp_path / "m.gguf")["blk.0.attn_q.weight"] == 1  # 48 inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_stacks_of_experts_are_cut_in_two(name, checkpoint, tmp_path):
    source, model = checkpoint(name, sliding_window=None)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    kinds = _kinds(tmp_path / "m.gguf")
    assert "blk.1.ffn_gate_exps.weight" in kinds
    assert "blk.1.ffn_up_exps.weight" in kinds
    again, config = load(tmp_path / "m.gguf")
    wanted = named_arrays(model.with_separate_head() if not config["tie_word_embeddings"] else model)
    for key, leaf in named_arrays(again).items():
        np.testing.assert_allclose(leaf, wanted[key], atol=2e-7, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", *LIKE])
def test_the_configuration_is_the_same(name, checkpoint, tmp_path):
    """Read again: every option that computations depend on, and all arrays."""
    source, model = checkpoint(name, byte_level(290, "gpt-4o"))
    save(tmp_path / "m.gguf", model, source, format="gguf")
    again, config = load(tmp_path / "m.gguf")
    wanted, found = (dict(vars(m.config)) for m in (model, again))
    ropes = [config.pop("ropes") for config in (wanted, found)]
    assert found | {"pad_token_id": 0, "original_max_position_embeddings": 0} == wanted
    numbers = lambda rope: [*rope.frequencies, rope.scale, rope.growth, rope.step]
    for ours, theirs in zip(*ropes, strict=True):
        np.testing.assert_allclose(numbers(theirs), numbers(ours), rtol=1e-6)
    arrays = named_arrays(model.with_separate_head() if not config["tie_word_embeddings"] else model)
    for key, leaf in named_arrays(again).items():
        np.testing.assert_allclose(leaf, arrays.pop(key), atol=2e-7, err_msg=key)
    assert not arrays


@pytest.mark.slow
def test_experts_of_mxfp4_keep_their_codes(checkpoint, tmp_path):
    """From GPT-OSS's own format to GGUF, and from there to another file, to the bit."""
    source, model = checkpoint("gpt_oss", hidden_size=64)
    save(tmp_path / "mxfp4", ql.quantize(model, "mxfp4", where=["gate_up_proj", "down_proj"]), source)
    stored, _ = load(tmp_path / "mxfp4")
    save(tmp_path / "m.gguf", stored, tmp_path / "mxfp4", format="gguf")
    kinds = _kinds(tmp_path / "m.gguf")
    for part in ("gate", "up", "down"):
        assert kinds[f"blk.1.ffn_{part}_exps.weight"] == 39
        assert kinds[f"blk.1.ffn_{part}_exps.bias"] == 0
    again, _ = load(tmp_path / "m.gguf")
    for ours, theirs in zip(stored.layers, again.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            a, b = (getattr(layer.mlp.experts, name) for layer in (ours, theirs))
            assert isinstance(b, ql.BlockArray)
            np.testing.assert_array_equal(a.codes, b.codes)
            np.testing.assert_array_equal(a.scale.scale, b.scale.scale)
    save(tmp_path / "again.gguf", again, tmp_path / "m.gguf", format="gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


@pytest.mark.slow
def test_quantised_models(checkpoint, tmp_path):
    """Weights of other types are rounded to the file's; its own stay as they are; adapters are refused."""
    source, model = checkpoint("qwen2", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    nf4 = ql.quantize(model, "nf4")
    with pytest.raises(CheckpointError, match=r"NF4Array has no place in the file"):
        save(tmp_path / "new" / "m.gguf", nf4, source, format="gguf")
    adapted = ql.loraify(model, rank=2, key=jax.random.key(0))
    with pytest.raises(CheckpointError, match=r"LoraArray has no place in the file: merge adapters"):
        save(tmp_path / "new" / "m.gguf", adapted, source, format="gguf", quantize="q8_0")
    assert not (tmp_path / "new").exists()
    save(tmp_path / "m.gguf", nf4, source, format="gguf", quantize="q8_0")
    dense = ql.materialise(nf4).model.layers[0].mlp.up_proj.weight
    found = ql.materialise(load(tmp_path / "m.gguf")[0].model.layers[0].mlp.up_proj.weight)
    np.testing.assert_allclose(found, dense, atol=0.01 * float(jnp.abs(dense).max()))
    # From a GGUF file to a GGUF file, to the bit.
    again, _ = load(tmp_path / "m.gguf")
    save(tmp_path / "again.gguf", again, tmp_path / "m.gguf", format="gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


_SPLIT = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3",
            {"use_sliding_window": True},
            "GGUF cannot say sliding_window=7, windows=.* 'qwen3'",
        ),
        ("gemma3", {"query_pre_attn_scalar": 20}, "has query_pre_attn_scalar=20; GGUF has no key for it"),
        ("qwen2", {"model_type": "gpt2"}, "has model_type='gpt2'; metadata of GGUF is known for llama, "),
        ("gpt_oss", {"swiglu_limit": 2.0}, "GGUF cannot say swiglu_limit=2.0 .* would take swiglu_limit=7.0"),
        ("gpt_oss", {"attention_bias": False}, "GGUF cannot say attention_bias=False"),
        ("llama_yarn", {"rope_parameters": _YARN | {"beta_fast": 4.0}}, "has beta_fast=4.0 .* takes 32"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 1]}, "GGUF cannot say windows="),
        ("smollm3", {"attention_bias": True}, "GGUF cannot say attention_bias=True"),
        *(
            (name, {entry: True}, f"GGUF cannot say {entry}=True of a model of the architecture")
            for name, entry in (
                ("qwen3", "attention_bias"),
                ("gemma3", "attention_bias"),
                ("smollm3", "mlp_bias"),
            )
        ),
        ("ministral3", {"sliding_window": 4}, "GGUF cannot say sliding_window=4, windows="),
        *(
            (name, {"head_dim": 64}, "has heads of .* numbers together, for hidden_size=.* to be equal")
            for name in ("qwen2", "qwen2_moe", "phi3")
        ),
        *(
            ("qwen3_5_text", changes, message)
            for changes, message in (
                ({"linear_value_head_dim": 8}, "linear_value_head_dim=8; llama.cpp takes these to be equal"),
                ({"rms_norm_eps": 0.1}, "rms_norm_eps=0.1; above 1e-05, llama.cpp computes something else"),
                ({"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "GGUF cannot say mixers="),
            )
        ),
        *(
            ("gemma4_text", changes, message)
            for changes, message in (
                (
                    {"num_kv_shared_layers": 2},
                    r"the two layers before these have a window, and none; found .*True",
                ),
                ({"layer_types": ["full_attention"] * 5}, "no layer with a window; llama.cpp needs one"),
                ({"vocab_size_per_layer_input": 300}, "GGUF cannot say vocab_size_per_layer_input=300"),
                ({"attention_bias": True}, "GGUF cannot say attention_bias=True"),
                (
                    {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
                    "rope_type='yarn'",
                ),
                (
                    {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
                    "GGUF cannot say ropes=",
                ),
            )
        ),
    ],
)
def test_architectures_and_options_that_gguf_cannot_hold(name, changes, message, checkpoint, tmp_path):
    source, model = checkpoint(name, **changes)
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "new" / "m.gguf", model, source, format="gguf")
    assert not (tmp_path / "new").exists()


# What llama.cpp has a place for, by the name of the fixture: src/llama-model.cpp.
_PLACES = {
    "attention_bias": ["llama_llama3", "granite"],
    "mlp_bias": ["llama_llama3", "granite"],
}


@pytest.mark.quick("llama_llama3", "smollm3")
@pytest.mark.parametrize(
    "name",
    [x for x in MODELS if x in ("llama_llama3", "phi3") or not x.startswith(("llama", "phi3", "gpt"))]
    + ["gpt_oss", *LIKE],
)
def test_biases_that_llama_cpp_has_no_place_for(name, checkpoint):
    own = {
        "gemma2": {"query_pre_attn_scalar": 16},
        "mistral": {"sliding_window": None},
        "phi3": {"sliding_window": None},
    }
    source, _ = checkpoint(name, **own.get(name, {}))
    plain = json.loads((source / "config.json").read_text())
    for entry, takers in _PLACES.items():
        config = plain | {entry: not plain.get(entry)}
        parsed = DecoderConfig.from_json(config)
        arrays = named_arrays(eqx.filter_eval_shape(lm.models.Decoder, parsed, key=jax.random.key(0)))
        if name in takers or entry not in parsed.family.entries:  # and so without effect
            to_gguf.described(arrays, config, source)
            assert (parsed == DecoderConfig.from_json(plain)) == (entry not in parsed.family.entries)
        else:
            with pytest.raises(CheckpointError, match=entry):
                to_gguf.described(arrays, config, source)


_BY_EOS = TEMPLATE.replace("<|im_end|>", "{{ eos_token }}")


@pytest.mark.filterwarnings("ignore:.*name different tokens")
@pytest.mark.parametrize(
    ("generation", "config", "eos_token", "template", "ends"),
    [
        ([0, 2], 1, "<|im_end|>", TEMPLATE, {"eos": 2, "eot": 0}),
        ([0, 1, 2], 0, "<|endoftext|>", TEMPLATE, {"eos": 0, "eot": 2, "eom": 1}),  # as of Llama 3.1
        ([0], 0, "<|im_end|>", TEMPLATE, {"eos": 0, "eot": 2}),
        ([0], 0, "<|im_end|>", _BY_EOS, {"eos": 2, "eot": 0}),
        (None, None, "<|im_end|>", None, {"eos": 2}),
        (None, 1, "<|im_end|>", None, {"eos": 1}),
        ([0, 2], 1, None, None, {"eos": 0, "eot": 2}),
    ],
)
def test_the_ends_of_a_file_are_those_of_the_checkpoint(
    generation, config, eos_token, template, ends, checkpoint
):
    """Those at which `generate` stops; that of answers is `eot`, unless it is `eos`."""
    source, model = checkpoint("qwen2", eos_token_id=config)
    (source / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": eos_token, "chat_template": template})
    )
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    described = json.loads((source / "config.json").read_text())
    _, metadata = to_gguf.described(named_arrays(model), described, source)
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    assert {name: token for name, token in found.items() if token is not None} == ends
    marks = Marks.of(TextTokenizer(source), source, described)
    assert {*marks.ends, *marks.answer} <= {*ends.values()}
    assert [metadata[f"tokenizer.ggml.add_{x}_token"] for x in ("bos", "eos")] == [False, False]


def test_templates_of_a_file_define_the_tokens_that_they_use(checkpoint):
    """llama.cpp only defines `bos_token` and `eos_token`."""
    source, model = checkpoint("qwen2")
    template = "\n{{ user_token }}{{ messages[0].content }}{{ eos_token }}"
    settings = {"eos_token": "<|im_end|>", "user_token": "<|im_start|>", "chat_template": template}
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "image_token": "<|im_end|>"}))
    described = json.loads((source / "config.json").read_text())
    _, metadata = to_gguf.described(named_arrays(model), described, source)
    written = metadata["tokenizer.chat_template"]
    assert written == '{% set user_token = "<|im_start|>" %}\n' + template
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": written}))
    text = ChatTemplate(source).render([{"role": "user", "content": "a"}]).text
    assert text == "\n<|im_start|>a<|im_end|>"


def test_a_part_of_heads_is_rotated_where_transformers_does(checkpoint, tmp_path):
    source, model = checkpoint("qwen2", partial_rotary_factor=0.5)
    with pytest.warns(
        UserWarning, match=r"partial_rotary_factor=0\.5 has no effect: such models rotate whole"
    ):
        assert load(source)[0].config.ropes == model.config.ropes
    assert len(model.config.ropes[0].frequencies) == model.config.head_dim // 2
    save(tmp_path / "m.gguf", model, source, format="gguf")
    assert load(tmp_path / "m.gguf")[0].config.ropes == model.config.ropes
    whole = json.loads((checkpoint("llama_yarn")[0] / "config.json").read_text())
    with pytest.raises(UnsupportedConfigError, match="supports whole heads beside rope_type='yarn'"):
        DecoderConfig.from_json(whole | {"partial_rotary_factor": 0.5})
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.embedding_length": 64,
        "qwen2.attention.head_count": 4,
    }
    with pytest.raises(CheckpointError, match="expected 16: 'qwen2' rotates whole heads; found 8"):
        config_of(tmp_path, metadata | {"qwen2.rope.dimension_count": 8}, {}, lambda name: None)


@pytest.mark.slow
def test_the_ramp_of_yarn_is_rounded_with_a_warning(checkpoint, tmp_path):
    """As in every GGUF file of GPT-OSS; the file that results is read as llama.cpp reads it."""
    source, model = checkpoint("gpt_oss", rope_parameters=_YARN | {"truncate": False})
    with pytest.warns(UserWarning, match=r"rounds the bounds of YaRN's ramp.*truncate=False"):
        save(tmp_path / "m.gguf", model, source, format="gguf")
    found, rounded = load(tmp_path / "m.gguf")[0].config.ropes, {**_YARN, "truncate": True}
    config = json.loads((source / "config.json").read_text()) | {"rope_parameters": rounded}
    for rope, wanted in zip(found, DecoderConfig.from_json(config).ropes, strict=True):
        np.testing.assert_allclose(rope.frequencies, wanted.frequencies, rtol=1e-6)


def _changed(**changes):
    return lambda described: described | changes


def _deep(key, **changes):
    return lambda described: described | {key: described[key] | changes}


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_deep("model", type="WordPiece"), "'model': GGUF is written for 'BPE'; found 'WordPiece'"),
        (_deep("model", merges=[["a"]]), "'merges': expected pairs of tokens"),
        (_deep("model", vocab={"a": 10**6}), "the token 'a' is number 1000000: the embedding has"),
        (_deep("model", dropout=0.1), "'dropout': llama.cpp does without; found 0.1"),
        (_changed(normalizer={"type": "Lowercase"}), "'normalizer': llama.cpp does without any but NFC"),
        (_changed(pre_tokenizer={"type": "Whitespace"}), "'pre_tokenizer': llama.cpp has nothing like"),
        (_changed(pre_tokenizer=_SPLIT), r"known are those of .*qwen2.* Found \['x'\]"),
        (_changed(post_processor={"type": "BertProcessing"}), "'post_processor': llama.cpp has nothing like"),
        (
            _changed(added_tokens=[{"id": 0, "content": "<|endoftext|>", "lstrip": True}]),
            "'<|endoftext|>' has lstrip=true",
        ),
        (
            _changed(added_tokens=[{"id": 0, "content": "<|endoftext|>", "rstrip": True}]),
            "tokens have rstrip=true; llama.cpp keeps",
        ),
        (_changed(added_tokens=[{"id": 5, "content": "new"}]), "'new' is number 5, which is another token's"),
    ],
)  # fmt: skip
def test_tokenisers_that_llama_cpp_would_not_follow(change, message, checkpoint, tmp_path):
    source, model = checkpoint("qwen2")
    path = source / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=message.replace("|", r"\|")):
        save(tmp_path / "new" / "m.gguf", model, source, format="gguf")
    assert not (tmp_path / "new").exists()


def test_special_tokens_that_are_split(checkpoint, tmp_path):
    source, model = checkpoint("qwen2")
    (source / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    with pytest.raises(CheckpointError, match=r"split_special_tokens=true, which GGUF cannot say"):
        save(tmp_path / "m.gguf", model, source, format="gguf")


def test_pairs_that_llama_cpp_would_merge_and_the_tokeniser_does_not(checkpoint, tmp_path):
    source, model = checkpoint("gemma3", sentencepiece(340))
    path = source / "tokenizer.json"
    described = json.loads(path.read_text())
    del described["model"]["merges"][-1]
    path.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"are not merged, and llama\.cpp would merge them to a token"):
        save(tmp_path / "m.gguf", model, source, format="gguf")


def test_arguments(checkpoint, tmp_path):
    source, model = checkpoint("qwen2")
    with pytest.raises(
        ValueError, match=r"models\.save writes format='safetensors', 'gguf' or 'quaxlike'; found 'onnx'"
    ):
        save(tmp_path / "m", model, source, format="onnx")
    with pytest.raises(ValueError, match=r"quantize='q8_0' is for format='gguf'; call `quaxlike\.quantize`"):
        save(tmp_path / "m", model, source, quantize="q8_0")
    with pytest.raises(ValueError, match=r"GGUF has no type 'q4_kk'. Did you mean 'q4_k"):
        save(tmp_path / "m", model, source, format="gguf", quantize="q4_kk")
    with pytest.raises(CheckpointError, match=r"holds safetensors, which readers prefer"):
        save(source, model, source, format="gguf")
    large = jax.tree.map(lambda x: 1e7 * x, model)
    with pytest.raises(CheckpointError, match=r"has numbers that float16 has no place for; choose 'bf16'"):
        save(tmp_path / "m.gguf", large, source, format="gguf", quantize="f16")
    save(tmp_path / "M.GGUF", model, source, format="gguf")
    assert lm.load(tmp_path / "M.GGUF")[1]["model_type"] == "qwen2"
    with pytest.raises(CheckpointError, match="GGUF file, whose tokeniser and settings are only written to"):
        save(tmp_path / "folder", model, tmp_path / "M.GGUF")
    (source / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"which GGUF takes the tokeniser from"):
        save(tmp_path / "m.gguf", model, source, format="gguf")
    assert not list(tmp_path.glob("*.gguf"))
