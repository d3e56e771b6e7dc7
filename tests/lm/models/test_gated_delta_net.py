"""Layers with a state, against a recurrence of single tokens in NumPy."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files.errors import CheckpointError
from quaxlike.lm import Conversation, generate
from quaxlike.lm.folders.model_config import UnsupportedConfigError
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.lm.models.gated_delta_net import gated_delta_rule
from quaxlike.surgery.trees import named_arrays
from tests.lm.models.fixtures import agree, check_adapters_on_quantised_weights
from tests.samples import random_key, tree_equal

_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "full_attention_interval": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "num_experts": 0}


@pytest.fixture(scope="module")
def model():
    """With weights that make tokens differ, and states last."""
    slow = lambda path, x: x - 3 if ql.path_of(path).endswith("A_log") else 2 * x
    make = lambda key: Decoder(DecoderConfig.from_json(_CONFIG), key=key)
    made = eqx.filter_jit(lambda key: jax.tree_util.tree_map_with_path(slow, make(key)))
    return made(random_key())


def _recurrence(query, key, value, decay, share, state, first):
    """One token after the other, of one head."""
    out = []
    for i in range(len(key)):
        state = np.zeros_like(state) if first[i] else np.exp(decay[i]) * state
        state = state + share[i] * np.outer(key[i], value[i] - key[i] @ state)
        out.append(query[i] @ state)
    return np.stack(out), state


def _case(rng, tokens, heads=2):
    query, key, value = (rng.normal(size=(tokens, heads, size)) for size in (5, 5, 3))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    decay, share = -3 * rng.random((tokens, heads)) ** 4, rng.random((tokens, heads))
    return query, key, value, decay, share, rng.normal(size=(heads, 5, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "begins"), [(1, ()), (7, (0, 4)), (150, ()), (150, (3, 64, 65, 140))])
def test_the_chunked_form_is_the_recurrence(tokens, begins):
    case = _case(np.random.default_rng(0), tokens)
    first = np.isin(np.arange(tokens), begins)
    with jax.enable_x64(True):
        run = jax.jit(lambda *case: gated_delta_rule(*case, first=jnp.asarray(first) if begins else None))
        out, state = map(np.asarray, run(*case))
    for head in range(2):
        own = [x[:, head] for x in case[:-1]]
        wanted, last = _recurrence(*own, case[-1][head], first)
        np.testing.assert_allclose(out[:, head], wanted, atol=1e-12)
        np.testing.assert_allclose(state[head], last, atol=1e-12)


@pytest.mark.slow
def test_derivatives_of_the_chunked_form():
    """They are finite where a text ends within a chunk and decay is strong, and agree with differences."""
    case = list(_case(np.random.default_rng(1), 70))
    case[3] *= 300
    first = np.isin(np.arange(70), [30])
    with jax.enable_x64(True):
        loss = lambda *case: jnp.sum(jnp.sin(gated_delta_rule(*case, first=jnp.asarray(first))[0]))
        loss = jax.jit(jax.value_and_grad(loss, argnums=range(6)))
        grads = [np.asarray(grad) for grad in loss(*case)[1]]
        assert all(np.isfinite(grad).all() for grad in grads)
        along = [np.random.default_rng(2).normal(size=x.shape) for x in case]
        moved = lambda step: [x + step * d for x, d in zip(case, along, strict=True)]
        ends = [loss(*moved(step))[0] for step in (1e-6, -1e-6)]
        slope = sum(np.sum(grad * d) for grad, d in zip(grads, along, strict=True))
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


@pytest.mark.slow
def test_padding_and_packing_change_nothing(model):
    ids = np.random.default_rng(0).integers(0, 40, 12).astype(np.int32)
    logits = jax.jit(lambda ids, seen, segments: model.logits(model.hidden(ids, seen, segments)))
    run = lambda *operands: np.asarray(logits(*operands))
    one = np.ones(12, np.int32)
    texts = ids[:5], ids[5:]
    padded = [np.concatenate([np.zeros(12 - len(text), np.int32), text]) for text in texts]
    alone = [
        run(row, np.arange(12) >= 12 - len(text), one)[-len(text) :]
        for row, text in zip(padded, texts, strict=True)
    ]
    behind = np.concatenate([texts[0], np.full(7, 9, np.int32)])
    agree(run(behind, np.arange(12) < 5, one)[:5], alone[0], 1e-5)
    packed = run(ids, one > 0, np.repeat(np.int32([1, 2]), [5, 7]))
    agree(packed, np.concatenate(alone), 1e-5)
    assert np.abs(run(ids, one > 0, one)[5:] - alone[1]).max() > 0.01


@eqx.filter_jit
def _next(model, ids, seen):
    return jnp.argmax(model(ids, seen)[jnp.sum(seen) - 1])


def _greedy(model, ids, new):
    for _ in range(new):
        row = np.pad(ids, (0, 24 - len(ids)))
        ids = [*ids, int(_next(model, row, np.arange(24) < len(ids)))]
    return ids[-new:]


@pytest.mark.slow
def test_generation_is_the_whole_prompt_step_by_step(model):
    prompts = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
    mask = np.ones((2, 9), bool)
    mask[0, :4] = False
    tokens = generate(model, prompts, mask=mask, max_new_tokens=8)
    wanted = [_greedy(model, list(row[seen]), 8) for row, seen in zip(prompts, mask, strict=True)]
    np.testing.assert_array_equal(tokens, wanted)


@pytest.mark.slow
def test_a_conversation_goes_on_from_its_state_or_begins_anew(model):
    """A state cannot go back: a text that leaves the one before it is read from its beginning."""
    talk = Conversation(model)
    text = [3, 1, 4, 1, 5]
    said = list(talk.answer(text, max_new_tokens=4))
    assert said == _greedy(model, text, 4)
    longer = [*text, *said, 7, 2]
    assert list(talk.answer(longer, max_new_tokens=4)) == _greedy(model, longer, 4)
    other = talk.fork(model)
    for again in (longer, [*longer[:6], 9]):
        wanted = _greedy(model, again, 3)
        assert list(talk.answer(again, max_new_tokens=3)) == wanted
        assert list(other.answer(again, max_new_tokens=3)) == wanted


@pytest.mark.parametrize("own", [{}, _NEXT], ids=["Qwen3.5", "Qwen3-Next"])
def test_all_products_are_linear_layers(own):
    shapes = eqx.filter_eval_shape(Decoder, DecoderConfig.from_json(_CONFIG | own), key=jax.random.key(0))
    names = [n for n in ql.select(shapes) if "linear_attn" in n]
    parts = "in_proj_qkvz in_proj_ba" if own else "in_proj_qkv in_proj_z in_proj_b in_proj_a"
    assert names == [f"model.layers.0.linear_attn.{part}.weight" for part in (*parts.split(), "out_proj")]


@pytest.mark.slow
def test_adapters_on_quantised_weights(tmp_path):
    model = Decoder(
        DecoderConfig.from_json(_CONFIG | _NEXT | {"num_hidden_layers": 1}), key=jax.random.key(0)
    )
    check_adapters_on_quantised_weights(model, tmp_path)


@pytest.mark.slow
def test_scanned_layers_keep_their_states():
    alike = _CONFIG | {"layer_types": ["linear_attention"] * 2}
    model = Decoder(DecoderConfig.from_json(alike), key=jax.random.key(0))
    prompts = np.arange(6, dtype=np.int32)[None]
    first, second = (generate(x, prompts, max_new_tokens=4) for x in (model, model.stacked()))
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_checkpoints(model, tmp_path):
    """Layers that predict several tokens are left out, as by transformers."""
    config = _CONFIG | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "attn_output_gate": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = named_arrays(model)
    lm.write(tmp_path / "model.safetensors", tensors | {"mtp.fc.weight": jnp.ones((2, 2))})
    read, _ = lm.load(tmp_path)
    assert tree_equal(read, model)
    lm.save(tmp_path / "out", read, tmp_path)
    assert lm.read(tmp_path / "out").keys() == tensors.keys()
    with pytest.raises(
        CheckpointError, match=r"linear_key_head_dim=4 and linear_value_head_dim=6; llama.cpp takes"
    ):
        lm.save(tmp_path / "out.gguf", read, tmp_path, format="gguf")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"layer_types": ["linear_attention"]}, "for each of 2 layers"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "full_attention or linear_attention"),
        ({"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads, which is 2"),
        ({"linear_conv_kernel_dim": 0}, "whole numbers from 1"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_configurations_that_are_refused(entries, said):
    with pytest.raises(UnsupportedConfigError, match=said):
        Decoder(DecoderConfig.from_json(_CONFIG | entries), key=jax.random.key(0))
