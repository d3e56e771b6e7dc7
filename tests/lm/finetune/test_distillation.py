"""`--task distill`: the probabilities of a teacher are learned."""

import json
import re
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.data import collate
from quaxlike.lm.finetune.options import settings_of
from quaxlike.lm.finetune.settings import DataSettings, FinetuneError
from quaxlike.lm.finetune.tasks import Distillation, DistillationSettings, NextToken, task_for
from quaxlike.lm.finetune.train import outputs_of, prepared
from tests.lm.finetune.test_finetune import LINES, checkpoint, write
from tests.lm.finetune.test_train import SETTINGS, TEXTS, decoder

pytestmark = pytest.mark.usefixtures("default_promotion")


run_padded = eqx.filter_jit(ql.quaxify(lambda model, ids, seen: model(ids, seen)))


def logs(model, ids, temperature=1):
    """Logarithms of probabilities, by NumPy."""
    n, width = len(ids), 16
    logits = run_padded(model, jnp.asarray([*ids, *[0] * (width - n)]), jnp.arange(width) < n)[:n]
    logits = np.asarray(logits, np.float64) / temperature
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 2])
def test_the_loss_is_of_data_and_teacher(chunk):
    teacher = decoder()
    model = ql.loraify(ql.quantize(teacher, "nf4"), rank=2, key=jax.random.key(1))
    task = Distillation(NextToken(chunk), DistillationSettings(temperature=2.0, teacher_share=0.75))
    batch = collate(TEXTS, 16)
    params, frozen = eqx.partition(model, ql.trainable(model))

    @jax.jit
    def run(params, teacher):
        def loss(params):
            whole = prepared(eqx.combine(params, frozen), SETTINGS)
            outputs = outputs_of(task, whole, batch, None, teacher)
            return task.total(outputs, batch), outputs

        return jax.value_and_grad(loss, has_aux=True)(params)

    with ql.on_materialise("error"):
        (value, outputs), gradient = run(params, teacher)
    of_data = apart = 0.0
    for (ids,) in (example.texts for example in TEXTS):
        of_data -= np.sum(logs(model, ids)[np.arange(len(ids) - 1), ids[1:]])
        own, wanted = (logs(m, ids, 2)[:-1] for m in (model, teacher))
        apart += 4 * np.sum(np.exp(wanted) * (wanted - own))
    assert apart > 1e-4
    assert float(value) == pytest.approx(0.25 * of_data + 0.75 * apart, rel=1e-5)
    assert max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(gradient)) > 1e-4
    count = sum(len(example.texts[0]) - 1 for example in TEXTS)
    metrics = task.metrics(np.asarray(outputs), batch)
    assert metrics["perplexity"] == pytest.approx(np.exp(of_data / count), rel=1e-5)
    assert metrics["divergence"] == pytest.approx(apart / count, rel=1e-3)


@pytest.fixture
def command(tmp_path):
    model = checkpoint(tmp_path / "model", "llama")
    write(tmp_path / "data.jsonl", LINES["text"])
    options = ["--task=distill", "--steps=12", "--batch-size=8", "--rank=4", "--learning-rate=0.01"]
    return [f"--model={model}", f"--data={tmp_path / 'data.jsonl'}", "--max-length=16", *options]


def held_out(folder):
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [entry["held_out"] for entry in log if "held_out" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--pack", "--scan-layers", "--remat"], ["--mesh=data=2,seq=2"]])
def test_adapters_make_up_for_rounding(command, tmp_path, more):
    """The teacher is the model before it was quantised."""
    out = tmp_path / "out"
    assert main([*command, "--quantize=fp4", "--teacher-share=1", f"--output={out}", *more]) == 0
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert held_out(out)[0]["divergence"] > 0


@pytest.mark.slow
def test_another_teacher_and_what_cannot_start(command, tmp_path, capsys):
    teacher = checkpoint(tmp_path / "teacher", "mixtral")
    out = [f"--output={tmp_path / 'out'}"]
    sizes = [
        json.loads((tmp_path / x / "config.json").read_text())["vocab_size"] for x in ("model", "teacher")
    ]
    more = [] if sizes[0] == sizes[1] else [f"--teacher={tmp_path / 'model'}"]
    assert main([*command, *out, *(more or [f"--teacher={teacher}"]), "--quantize=none"]) == 0
    fails = {
        "--quantize=none": "nothing to learn from a teacher that is the same model",
        f"--teacher={checkpoint(tmp_path / 'bert', 'bert')}": "must be a decoder",
        f"--teacher={tmp_path / 'gone'}": "gone",
    }
    for option, told in fails.items():
        assert main([*command, f"--output={tmp_path / 'other'}", option]) == 2
        assert told in capsys.readouterr().err
    file = teacher / "tokenizer.json"
    text = json.loads(file.read_text())
    text["model"]["vocab"]["more"] = len(text["model"]["vocab"])
    file.write_text(json.dumps(text))
    assert main([*command, f"--output={tmp_path / 'other'}", f"--teacher={teacher}"]) == 2
    assert "must have the tokens of" in capsys.readouterr().err
    shutil.copytree(tmp_path / "model", tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    assert main([*command, f"--output={tmp_path / 'other'}", f"--teacher={tmp_path / 'damaged'}"]) == 2
    assert re.search(r"damaged.tokenizer.json.* is not a tokeniser", capsys.readouterr().err)
    command.remove("--task=distill")
    assert main([*command, f"--output={tmp_path / 'other'}", f"--teacher={teacher}"]) == 2
    assert "--teacher is for --task distill" in capsys.readouterr().err
    assert not (tmp_path / "other" / "run.json").exists()


def test_models_that_write_no_texts():
    data = DataSettings(Path(), task=DistillationSettings())
    with pytest.raises(FinetuneError, match="--task distill is for decoders that write texts; found MLP"):
        task_for(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)), SETTINGS, data)


def test_settings_belong_to_their_task(tmp_path):
    model, data = tmp_path / "model", write(tmp_path / "data.jsonl", [{"text": "one"}])
    model.mkdir()
    given = {"model": model, "data": data, "output": tmp_path / "out", "temperature": 2.0}
    of_task = {"teacher", "temperature", "teacher_share"}
    assert not of_task & settings_of(**given).fingerprint().keys()
    found = settings_of(**given, task="distill").fingerprint()
    assert of_task <= found.keys()
    assert found["temperature"] == 2.0
    assert "beta" not in found
