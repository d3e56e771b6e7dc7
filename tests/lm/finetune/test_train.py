"""Steps of training on a tiny decoder: what changes memory and time must not change the results."""

import dataclasses
import json
import struct
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm.finetune.data import Example, collate, pack
from quaxlike.lm.finetune.devices import Devices
from quaxlike.lm.finetune.report import Metrics
from quaxlike.lm.finetune.settings import RunSettings, TrainSettings
from quaxlike.lm.finetune.tasks import NextToken
from quaxlike.lm.finetune.train import State, TrainingProgram, optimiser_for, outputs_of, prepared, stored_for
from quaxlike.lm.models import Decoder, DecoderConfig

pytestmark = pytest.mark.usefixtures("default_promotion")
SETTINGS = TrainSettings(Path(), batch_size=2)


def decoder(layers=1, vocabulary=13, **more):
    config = DecoderConfig.from_json({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": layers, "num_attention_heads": 2, "vocab_size": vocabulary, **more,
    })  # fmt: skip
    return Decoder(config, key=jax.random.key(0))


def text(*ids, learned=None):
    return Example((list(ids),), [i > 0 for i in range(len(ids))] if learned is None else learned)


TEXTS = [text(1, 2, 3, 4, 5), text(6, 7, 8), text(9, 10), text(1, 3, 5, 7, 9, 11, 2, 4)]


def loss_and_gradient(model, task, batch, settings=SETTINGS):
    params, frozen = eqx.partition(model, ql.trainable(model))

    @jax.jit
    def run(params, frozen):
        def loss(params):
            whole = prepared(eqx.combine(params, frozen), settings)
            return task.total(outputs_of(task, whole, batch, None), batch)

        return jax.value_and_grad(loss)(params)

    with ql.on_materialise("error"):
        value, grads = run(params, frozen)
    return float(value), [np.asarray(g) for g in jax.tree.leaves(grads)]


@pytest.fixture(scope="module")
def adapted():
    return ql.loraify(ql.quantize(decoder(), "nf4"), rank=2, init="gaussian", key=jax.random.key(1))


def agree(found, wanted, rtol=1e-4):
    np.testing.assert_allclose(found[0], wanted[0], rtol=rtol)
    for x, y in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-5)


@pytest.fixture(scope="module")
def plain(adapted):
    return loss_and_gradient(adapted, NextToken(), collate(TEXTS, 16))


@pytest.mark.slow
def test_texts_of_a_row_do_not_see_each_other(adapted, plain):
    rows = pack(TEXTS, 10)
    assert [len(row.texts[0]) for row in rows] == [10, 8]
    assert sorted(row.segments.count(1) for row in rows) == [5, 8]
    agree(loss_and_gradient(adapted, NextToken(packed=True), collate(rows, 10)), plain)


@pytest.mark.slow
def test_logits_in_chunks(adapted, plain):
    agree(loss_and_gradient(adapted, NextToken(chunk=4), collate(TEXTS, 16)), plain)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_layers_that_are_computed_again(policy, adapted, plain):
    settings = dataclasses.replace(SETTINGS, remat=policy)
    agree(loss_and_gradient(adapted, NextToken(), collate(TEXTS, 16), settings), plain)


@pytest.mark.slow
def test_attention_by_a_kernel(adapted):
    """In the step, computed again for the gradient, too; interpreted here."""
    batch, task, losses = collate([text(*np.arange(100) % 13), TEXTS[0]], 128), NextToken(), []
    params, frozen = eqx.partition(adapted, ql.trainable(adapted))
    for attention in (None, "splash"):
        settings = dataclasses.replace(SETTINGS, remat="nothing", learning_rate=0.1)
        optimiser, _ = optimiser_for(settings, 3)
        program = TrainingProgram(
            task, optimiser, settings, Devices(RunSettings(Path(), attention=attention))
        )
        state = jax.tree.map(jnp.copy, State(params, optimiser.init(params)))
        for _ in range(3):
            state, loss = program(frozen, state, batch, jnp.float32(103), None)
        losses.append(float(loss))
        compiled = program.compiled(frozen, state, batch, jnp.float32(103), None).as_text()
        assert ("splash" in compiled) == (attention is not None)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_arrays_beside_adapters_in_another_dtype():
    model = ql.loraify(
        decoder(), rank=2, trainable_token_indices=[3], modules_to_save=["norm"], key=jax.random.key(0)
    )
    model = stored_for(model, "bfloat16")
    embedding, norm = model.model.embed_tokens.weight, model.model.norm.weight
    assert (embedding.w.dtype, embedding.rows.dtype) == (jnp.bfloat16, jnp.float32)
    assert norm.array.dtype == jnp.float32


@pytest.mark.slow
def test_another_dtype(adapted, plain):
    """What is frozen is stored in it; adapters, and their gradients, are in float32."""
    settings = dataclasses.replace(SETTINGS, compute_dtype="bfloat16")
    model = stored_for(adapted, "bfloat16")
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(eqx.filter(model, ql.trainable(model)))}
    assert dtypes == {"float32"}
    assert model.lm_head.weight.dtype == model.model.layers[0].mlp.up_proj.weight.dtype == jnp.bfloat16
    found = loss_and_gradient(model, NextToken(), collate(TEXTS, 16), settings)
    assert {g.dtype.name for g in found[1]} == {"float32"}
    assert found[0] == pytest.approx(plain[0], rel=0.02)


def memory_of(model, task, settings):
    params, frozen = eqx.partition(model, ql.trainable(model))
    optimiser, _ = optimiser_for(settings, 10)
    program = TrainingProgram(task, optimiser, settings, Devices(RunSettings(Path())))
    state = State(params, optimiser.init(params))
    batch = collate([text(*range(60))] * settings.batch_size, 64)
    return program.memory(frozen, state, batch, jnp.float32(1), None), state


@pytest.mark.slow
def test_what_saves_memory():
    model = ql.loraify(decoder(layers=3, vocabulary=2000), rank=2, key=jax.random.key(0))
    plain, state = memory_of(model, NextToken(), SETTINGS)
    assert plain.adapters == sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert 2 * plain.adapters < plain.optimiser < 2.1 * plain.adapters
    # Each adapter also brings its `alpha`, four bytes that are not trained.
    alphas = 4 * sum(isinstance(x, ql.LoraArray) for x in jax.tree.leaves(model, is_leaf=ql.is_value))
    assert plain.weights == alphas + sum(x.nbytes for x in jax.tree.leaves(decoder(3, 2000)))
    chunks, _ = memory_of(model, NextToken(chunk=4), SETTINGS)
    assert chunks.activations < 0.5 * plain.activations
    again, _ = memory_of(model, NextToken(chunk=4), dataclasses.replace(SETTINGS, remat="nothing"))
    assert again.activations < chunks.activations
    assert "activations" in str(again)


@pytest.mark.slow
def test_moments_in_few_bits():
    model = ql.loraify(decoder(hidden_size=64), rank=64, where=["v_proj", "o_proj"], key=jax.random.key(0))
    plain, _ = memory_of(model, NextToken(), SETTINGS)
    for bits, share in {8: 0.29, 4: 0.165}.items():
        fewer, _ = memory_of(model, NextToken(), dataclasses.replace(SETTINGS, optimizer_bits=bits))
        assert fewer.adapters == plain.adapters
        assert fewer.optimiser < share * plain.optimiser


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
    Metrics(tmp_path, tensorboard=False).note(1, loss=0.5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    Metrics(tmp_path, tensorboard=False).note(2, loss=0.25)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def test_figures_for_programs_that_draw_them(tmp_path):
    metrics = Metrics(tmp_path, tensorboard=True)
    metrics.note(1, loss=0.5, held_out={"perplexity": 300.0})
    metrics.note(300, loss=0.25, held_out={})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.5), (300, 0.25)]
    (file,) = tmp_path.glob("events.out.tfevents.*")
    data, records = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    # A tag and a float: fields 1 and 2 of a value, which is field 1 of a summary, field 5 of an event.
    scalar = lambda tag, x: b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", x)
    assert records[0].endswith(b"\x1a\x0dbrain.Event:2")
    assert scalar("loss", 0.5) in records[1]
    assert scalar("held_out/perplexity", 300.0) in records[1]
    assert b"\x10\xac\x02" in records[2]  # step 300
