"""Embeddings and output layers in adapters of PEFT, in files of the layout that it writes.

`tests/lm/clients` compares the same with PEFT itself.
"""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import peft, resize_vocabulary
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.surgery.trees import named_arrays
from tests.samples import drawn, random_key

_N, _SIZE, _RANK = 22, 8, 2
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 20, "hidden_size": _SIZE, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
_DRAW = np.random.default_rng(0).standard_normal
E, H, TRAINED, OTHER = (_DRAW((_N, _SIZE)).astype(np.float32) for _ in range(4))
A, B = _DRAW((_RANK, _N)).astype(np.float32), _DRAW((_SIZE, _RANK)).astype(np.float32)
ROWS = _DRAW((2, _SIZE)).astype(np.float32)
TOKENS = [3, 21]
_LORA = {f"{_EMBEDDING}.lora_embedding_A": A, f"{_EMBEDDING}.lora_embedding_B": B}
_LORA_OF_HEAD = {f"{_HEAD}.lora_A.weight": B.T, f"{_HEAD}.lora_B.weight": A.T}
_DELTA = "token_adapter.trainable_tokens_delta"


def _with_rows(w):
    out = w.copy()
    out[TOKENS] = ROWS
    return out


def _beneath(between, w=E, head=H):
    return {f"{_EMBEDDING}{between}.weight": w, f"{_HEAD}{between}.weight": head}


def _copies(layer, w, base):
    """What PEFT writes of a resized module that is trained in full."""
    names = ("weight", "modules_to_save.weight", "original_module.weight")
    return {f"{layer}.{name}": x for name, x in zip(names, (w, w, base), strict=True)}


_CHANGE = 2 * (B @ A).T
# DoRA's magnitudes are of the columns of an embedding, and of the rows of an output layer.
_OF_COLUMNS, _OF_ROWS = (1 + _DRAW(n).astype(np.float32) ** 2 for n in (_SIZE, _N))
_DORA = {f"{_EMBEDDING}.lora_magnitude_vector": _OF_COLUMNS, f"{_HEAD}.lora_magnitude_vector": _OF_ROWS}
_UNIT_COLUMNS, _UNIT_ROWS = (
    (E + _CHANGE) / np.linalg.norm(E + _CHANGE, axis=axis, keepdims=True) for axis in (0, 1)
)
#: Tensors and options of a resized model, tied or not; its embedding and output layer.
UNTIED = {
    "resized": (_beneath(""), {}, E, H),
    "lora on embedding": ({**_LORA, **_beneath(".base_layer")}, {"target_modules": ["embed_tokens"]},
                          E + _CHANGE, H),
    "embedding saved": ({**_copies(_EMBEDDING, TRAINED, E), "lm_head.weight": H},
                        {"modules_to_save": ["embed_tokens"]}, TRAINED, H),
    "tokens of head": ({f"{_HEAD}.{_DELTA}": ROWS, f"{_HEAD}.token_adapter.base_layer.weight": H,
                        f"{_EMBEDDING}.weight": E}, {"trainable_token_indices": {"lm_head": TOKENS}},
                       E, _with_rows(H)),
}  # fmt: skip
TIED = {
    "resized": (_beneath("", E, E), {}, E, None),
    "lora on embedding": ({**_LORA, f"{_EMBEDDING}.base_layer.weight": E},
                          {"target_modules": ["embed_tokens"]}, E + _CHANGE, E),
    "lora on head": ({**_LORA_OF_HEAD, f"{_HEAD}.base_layer.weight": E}, {"target_modules": ["lm_head"]},
                     E, E + _CHANGE),
    "lora on both": ({**_LORA, **_LORA_OF_HEAD, **_beneath(".base_layer", E, E)},
                     {"target_modules": ["embed_tokens", "lm_head"]}, E + _CHANGE, E + _CHANGE),
    "lora on both alike": ({**_LORA, **_LORA_OF_HEAD, **_beneath(".base_layer", E, E)},
                           {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
                           E + _CHANGE, None),
    "dora on both alike": ({**_LORA, **_LORA_OF_HEAD, **_DORA, **_beneath(".base_layer", E, E)},
                           {"target_modules": ["embed_tokens"], "ensure_weight_tying": True,
                            "use_dora": True},
                           _OF_COLUMNS * _UNIT_COLUMNS, _OF_ROWS[:, None] * _UNIT_ROWS),
    "embedding saved": ({**_copies(_EMBEDDING, TRAINED, E), "lm_head.weight": E},
                        {"modules_to_save": ["embed_tokens"]}, TRAINED, E),
    "head saved": ({**_copies(_HEAD, TRAINED, E), f"{_EMBEDDING}.weight": E},
                   {"modules_to_save": ["lm_head"]}, E, TRAINED),
    "both saved": ({**_copies(_EMBEDDING, TRAINED, E), **_copies(_HEAD, OTHER, E)},
                   {"modules_to_save": ["embed_tokens", "lm_head"]}, TRAINED, OTHER),
    "both saved alike": ({**_copies(_EMBEDDING, TRAINED, E), **_copies(_HEAD, TRAINED, E)},
                         {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, TRAINED, None),
    "tokens": ({f"{_EMBEDDING}.{_DELTA}": ROWS, f"{_HEAD}.{_DELTA}": ROWS,
                **_beneath(".token_adapter.base_layer", E, E)},
               {"trainable_token_indices": TOKENS}, _with_rows(E), None),
    "tokens, by name": ({f"{_EMBEDDING}.{_DELTA}": ROWS, f"{_EMBEDDING}.weight": E},
                        {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}},
                        _with_rows(E), None),
    "tokens of head": ({f"{_HEAD}.{_DELTA}": ROWS, f"{_EMBEDDING}.weight": E},
                       {"trainable_token_indices": {"lm_head": TOKENS}}, E, _with_rows(E)),
    "other tokens of head": ({f"{_EMBEDDING}.{_DELTA}": ROWS, f"{_HEAD}.{_DELTA}": ROWS[:1],
                              **_beneath(".token_adapter.base_layer", E, E)},
                             {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS[:1]}},
                             _with_rows(E), np.where(np.arange(_N)[:, None] == TOKENS[0], ROWS[:1], E)),
    "another output layer": (_beneath(""), {}, E, H),
}  # fmt: skip


def _write(folder, tensors, options):
    """An adapter with a LoRA on one layer besides."""
    layer, zeros = "model.layers.0.self_attn.q_proj", np.zeros((_RANK, _SIZE), np.float32)
    tensors = {**tensors, f"{layer}.lora_A.weight": zeros, f"{layer}.lora_B.weight": zeros.T}
    tensors |= {f"{layer}.lora_magnitude_vector": np.ones(_SIZE, np.float32)} if "use_dora" in options else {}
    folder.mkdir(exist_ok=True)
    write_tensors(
        folder / "adapter_model.safetensors", {f"base_model.model.{k}": x for k, x in tensors.items()}, {}
    )
    options = {"target_modules": [], **options}
    options["target_modules"] = ["q_proj", *options["target_modules"]]
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _base(n=_N, **options):
    model = drawn(Decoder, DecoderConfig.from_json({**_CONFIG, **options}), key=random_key())
    return resize_vocabulary(model, n) if n != 20 else model


def _weights(model):
    """The embedding and the output layer; None where it is tied to the embedding."""
    arrays = named_arrays(ql.merge(model))
    return arrays[f"{_EMBEDDING}.weight"], arrays.get(f"{_HEAD}.weight")


@pytest.mark.quick("True-dora on both alike", "True-other tokens of head", "False-tokens of head")
@pytest.mark.parametrize(
    ("tied", "case"), [*((True, case) for case in TIED), *((False, case) for case in UNTIED)]
)
def test_embeddings_of_a_resized_model(tied, case, tmp_path):
    """On a base whose new rows differ, and in the file that we write for another such base."""
    tensors, options, *wanted = (TIED if tied else UNTIED)[case]
    base = _base(tie_word_embeddings=tied)
    model = peft.load_adapter(_write(tmp_path / "in", tensors, options), base)
    peft.save_adapter(tmp_path / "out", model)
    again = peft.load_adapter(tmp_path / "out", jax.tree.map(lambda x: x + 1, base))
    for found in (_weights(model), _weights(again)):
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None)
            if y is not None:
                np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_file_is_written_as_it_was_read(tmp_path):
    """With the resized embeddings, and without them for a base that has the same."""
    tensors, options, *_ = UNTIED["lora on embedding"]
    file = "adapter_model.safetensors"
    model = peft.load_adapter(_write(tmp_path / "in", tensors, options), _base())
    peft.save_adapter(tmp_path / "out", model)
    found, before = ({*open_tensors(tmp_path / x / file)} for x in ("out", "in"))
    assert found == {x.replace("lm_head.base_layer.", "lm_head.") for x in before}
    plain = _base(20)
    peft.save_adapter(tmp_path / "out", ql.loraify(plain, rank=2, where=["q_proj"], key=jax.random.key(0)))
    assert not any("weight" in x and "lora" not in x for x in open_tensors(tmp_path / "out" / file))


def test_a_model_that_was_not_resized(tmp_path):
    message = r"lm_head\.weight': expected shape \(20, 8\); found \(22, 8\).*resize_vocabulary\(model, 22\)"
    with pytest.raises(CheckpointError, match=message):
        peft.load_adapter(_write(tmp_path, _beneath(""), {}), _base(20))
    with pytest.raises(CheckpointError, match=r"resize_vocabulary\(model, 22\)"):
        peft.load_adapter(
            _write(tmp_path, {f"{_EMBEDDING}.weight": E}, {"modules_to_save": ["embed_tokens"]}), _base(20)
        )


def test_tokens_beside_another_change_of_the_output_layer(tmp_path):
    """PEFT computes such an adapter on the rows that the two share."""
    tensors = {**_LORA_OF_HEAD, f"{_EMBEDDING}.{_DELTA}": ROWS}
    options = {"target_modules": ["lm_head"], "trainable_token_indices": TOKENS}
    _write(tmp_path, tensors, options)
    peft.load_adapter(tmp_path, _base(tie_word_embeddings=False))
    base = _base(tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="tokens of the embedding and of the output layer that is tied"):
        peft.load_adapter(tmp_path, base)
    model = ql.loraify(base, rank=2, where=["lm_head"], trainable_token_indices=TOKENS, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"tokens of model\.embed_tokens\.weight that are trained for"):
        peft.save_adapter(tmp_path, model)


def test_tokens_of_a_tied_output_layer_of_its_own():
    """They were left out without a word."""
    tokens = {"embed_tokens": TOKENS, "lm_head": [4]}
    options = {"rank": 2, "where": ["q_proj"], "key": jax.random.key(0)}
    base = _base(tie_word_embeddings=True)
    model = named_arrays(ql.loraify(base, trainable_token_indices=tokens, **options))
    assert model["lm_head.weight"].indices == (4,)
    tokens["lm_head"] = TOKENS
    assert "lm_head.weight" not in named_arrays(ql.loraify(base, trainable_token_indices=tokens, **options))


def test_modules_whose_names_end_alike(tmp_path):
    """`norm` names all norms, as in PEFT; ours names one."""
    base = _base(20)
    norms = {name: x for name, x in named_arrays(base).items() if "norm" in name}
    trained = {name: np.full(x.shape, i, np.float32) for i, (name, x) in enumerate(norms.items())}
    assert len(norms) == 3
    model = named_arrays(peft.load_adapter(_write(tmp_path, trained, {"modules_to_save": ["norm"]}), base))
    for name, x in trained.items():
        np.testing.assert_array_equal(ql.materialise(model[name]), x)
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight': is missing: modules_to_save"):
        peft.load_adapter(_write(tmp_path, {"model.norm.weight": E[0]}, {"modules_to_save": ["norm"]}), base)
    one = ql.loraify(base, rank=2, where=["q_proj"], modules_to_save=["norm"], key=jax.random.key(0))
    for task, written in (("CAUSAL_LM", "model.norm"), ("FEATURE_EXTRACTION", "base_model.model.norm")):
        peft.save_adapter(tmp_path, one, task_type=task)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == [written]
        again = peft.load_adapter(tmp_path, base)
        assert jax.tree.structure(again) == jax.tree.structure(one)


def test_dtype_and_trees_stay(tmp_path):
    """Embeddings from a file have the dtype of the model, as in PEFT."""
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _base())
    model = peft.load_adapter(_write(tmp_path, _beneath(""), {}), base)
    assert {x.dtype for x in _weights(model)} == {jnp.dtype(jnp.bfloat16)}
    assert model.config.new_embeddings
    assert not resize_vocabulary(_base(20), 20).config.new_embeddings


@pytest.mark.slow
def test_tokens_that_are_named_twice(tmp_path):
    """Of the rows of such a token, the last one counts, as in PEFT."""
    rows = np.stack([ROWS[0], ROWS[1], ROWS[1] + 1])
    tensors = {f"{_EMBEDDING}.{_DELTA}": rows}
    folder = _write(tmp_path, tensors, {"trainable_token_indices": [5, 3, 5]})
    model = peft.load_adapter(folder, _base(20))
    found = ql.materialise(named_arrays(model)[f"{_EMBEDDING}.weight"])
    np.testing.assert_array_equal(found[jnp.array([5, 3])], rows[::-1][:2])


def test_what_is_trained_in_full_has_the_dtype_of_the_model(tmp_path):
    """As in PEFT. Layers that differ in dtype could not be scanned over."""
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _base(20))
    parts = ("norm.weight", "o_proj.weight")
    trained = {
        name: np.ones(x.shape, np.float32) for name, x in named_arrays(base).items() if name.endswith(parts)
    }
    folder = _write(tmp_path, trained, {"modules_to_save": ["norm", "o_proj"]})
    model = peft.load_adapter(folder, base)
    assert {x.dtype for x in named_arrays(model).values()} == {jnp.dtype(jnp.bfloat16)}
    out = eqx.filter_eval_shape(ql.quaxify(model.stacked()), jnp.arange(3))
    assert out.dtype == jnp.bfloat16


_GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2}


def _config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.quick("options1-modules_to_save-names1")
@pytest.mark.parametrize(
    ("options", "entry", "names"),
    [
        ({"where": ["wte", "c_attn"], "alpha_pattern": {"wte": 8}}, "target_modules",
         ["c_attn", "lm_head", "wte"]),
        ({"where": ["c_attn"], "modules_to_save": ["wte"]}, "modules_to_save",
         ["lm_head", "transformer.wte"]),
    ],
)  # fmt: skip
def test_embeddings_that_peft_does_not_tie(options, entry, names, tmp_path):
    """It knows `embed_tokens` and `lm_head`, so `ensure_weight_tying` does nothing for the `wte` of GPT-2."""
    base = drawn(Decoder, DecoderConfig.from_json(_GPT2), key=random_key())
    model = ql.loraify(base, rank=2, init="gaussian", key=jax.random.key(0), **options)
    peft.save_adapter(tmp_path, model)
    config = _config(tmp_path)
    assert config[entry] == names
    assert "ensure_weight_tying" not in config
    if "alpha_pattern" in options:
        assert (config["lora_alpha"], config["alpha_pattern"]) == (8, {"c_attn": 2})
    again = ql.merge(peft.load_adapter(tmp_path, base))
    wanted = named_arrays(ql.merge(model))["transformer.wte.weight"]
    np.testing.assert_allclose(again.embedding, wanted, atol=1e-6)
    np.testing.assert_allclose(named_arrays(again)["lm_head.weight"], wanted, atol=1e-6)

    # A file of PEFT, which has the change of the embedding alone.
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(
            config | {entry: [x for x in config[entry] if x != "lm_head"], "ensure_weight_tying": True}
        )
    )
    tensors = {key: np.asarray(x) for key, x in open_tensors(tmp_path / "adapter_model.safetensors").items()}
    kept = {key: x for key, x in tensors.items() if "lm_head" not in key}
    write_tensors(tmp_path / "adapter_model.safetensors", kept, {})
    again = ql.merge(peft.load_adapter(tmp_path, base))
    np.testing.assert_allclose(again.embedding, wanted, atol=1e-6)
    np.testing.assert_array_equal(named_arrays(again)["lm_head.weight"], base.embedding)


@pytest.mark.parametrize("pattern", [".*embed_tokens", r"model\.embed_tokens"])
def test_expressions_by_which_peft_ties(pattern, tmp_path):
    """It matches them with `embed_tokens` alone, whatever precedes this name in the model."""
    options = {"target_modules": f"{pattern}|.*q_proj", "ensure_weight_tying": True}
    _write(tmp_path, _LORA, {})
    (tmp_path / "adapter_config.json").write_text(json.dumps(_config(tmp_path) | options))
    base = resize_vocabulary(_base(20, tie_word_embeddings=True), _N)
    embedding, head = _weights(peft.load_adapter(tmp_path, base))
    np.testing.assert_allclose(embedding, base.embedding + _CHANGE, atol=1e-5)
    if pattern == ".*embed_tokens":
        assert head is None
    else:
        np.testing.assert_array_equal(head, base.embedding)


def test_a_tied_output_layer_has_the_numbers_of_the_embedding(tmp_path):
    """PEFT looks up its rank and alpha by its own name."""
    options = {"rank": 2, "where": ["embed_tokens", "q_proj", "v_proj"], "key": jax.random.key(0)}
    base = _base(tie_word_embeddings=True)
    model = ql.loraify(base, alpha_pattern={"embed_tokens": 8}, **options)
    peft.save_adapter(tmp_path, model)
    config = _config(tmp_path)
    assert config["ensure_weight_tying"] is True
    assert config["target_modules"] == ["embed_tokens", "q_proj", "v_proj"]
    assert config["alpha_pattern"] == {"embed_tokens": 8, "lm_head": 8}
    with pytest.raises(ValueError, match="no DoRA that lm_head shares with the embedding"):
        peft.save_adapter(tmp_path, ql.loraify(base, dora=True, **options))


@pytest.mark.quick("True")
@pytest.mark.parametrize("tied", [False, True])
def test_initialisations_of_a_saved_output_layer(tied, tmp_path):
    """PEFT saves its weight after PiSSA has taken a part; if it is tied, this is the embedding, too."""
    base = _base(20, tie_word_embeddings=tied)
    left = np.ones((20, _SIZE), np.float32)
    tensors = {f"{_HEAD}.lora_A.weight": B.T, f"{_HEAD}.lora_B.weight": A[:, :20].T}
    options = {"target_modules": ["lm_head"], "init_lora_weights": "pissa"}
    _write(tmp_path / "in", {**tensors, f"{_HEAD}.base_layer.weight": left}, options)
    model = peft.load_adapter(tmp_path / "in", base)
    peft.save_adapter(tmp_path / "out", model)
    for found in (model, peft.load_adapter(tmp_path / "out", base)):
        embedding, head = _weights(found)
        np.testing.assert_allclose(head, left + _CHANGE[:20], atol=1e-5)
        np.testing.assert_array_equal(embedding, left if tied else base.embedding)
    _write(tmp_path / "in", tensors, options)
    if tied:
        with pytest.raises(CheckpointError, match=r"lm_head\.lora.*'pissa' takes a part of its weight"):
            peft.load_adapter(tmp_path / "in", base)
    else:
        peft.load_adapter(tmp_path / "in", base)


def test_an_initialisation_of_a_tied_output_layer_alone(tmp_path):
    base = _base(20, tie_word_embeddings=True)
    model = ql.loraify(base, rank=2, where=["lm_head"], init="pissa", key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"lm_head\.weight \(pissa\) changed this weight alone"):
        peft.save_adapter(tmp_path, model)
    peft.save_adapter(tmp_path, model, base=base)
    embedding, head = _weights(peft.load_adapter(tmp_path, base))
    np.testing.assert_array_equal(embedding, base.embedding)
    np.testing.assert_allclose(head, base.embedding, atol=1e-5)


def test_the_weight_of_an_embedding_as_a_parameter(tmp_path):
    """PEFT's adapter of it is that of a matrix, where that of the layer is of a table."""
    base = _base(20)
    tensors = {f"{_EMBEDDING}.lora_A.weight": B.T, f"{_EMBEDDING}.lora_B.weight": A[:, :20].T}
    _write(tmp_path / "in", tensors, {"target_parameters": ["embed_tokens.weight"]})
    model = peft.load_adapter(tmp_path / "in", base)
    np.testing.assert_allclose(_weights(model)[0], base.embedding + _CHANGE[:20], atol=1e-5)
    peft.save_adapter(tmp_path / "out", model)
    assert _config(tmp_path / "out")["target_parameters"] == [f"{_EMBEDDING}.weight"]
    assert _config(tmp_path / "out")["target_modules"] == ["q_proj"]
    file = "adapter_model.safetensors"
    written, read = (open_tensors(tmp_path / x / file) for x in ("out", "in"))
    assert {*written} == {*read}
    for key in read:
        np.testing.assert_array_equal(written[key], read[key])


def test_a_module_with_parameters_and_layers(tmp_path):
    """PEFT saves all that is inside a module, and finds nothing inside it to save again."""
    sizes = {
        **_CONFIG, "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 2, "head_dim": 4,
        "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "full_attention_interval": 2, "num_experts": 0,
    }  # fmt: skip
    base = drawn(Decoder, DecoderConfig.from_json(sizes), key=random_key())
    options = {"rank": 2, "where": ["q_proj"], "key": jax.random.key(0)}
    model = ql.loraify(base, modules_to_save=["linear_attn"], **options)
    peft.save_adapter(tmp_path, model)
    assert _config(tmp_path)["modules_to_save"] == ["model.layers.0.linear_attn"]
    again = peft.load_adapter(tmp_path, base)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    some = ql.loraify(base, modules_to_save=["A_log"], **options)
    with pytest.raises(ValueError, match=r"linear_attn\.\S+ is not trained, and other arrays of its module"):
        peft.save_adapter(tmp_path, some)
