"""`--task classify`: labels of texts."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.lora import TrainableArray
from quaxlike.core.values import replace_fields
from quaxlike.files import CheckpointError
from quaxlike.lm import load, peft, save
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.data import Example, Tokens, collate
from quaxlike.lm.finetune.settings import FinetuneError
from quaxlike.lm.finetune.tasks import Classes, Rewards, begun
from quaxlike.lm.folders.labels import MULTI, REGRESSION, SINGLE, Labels
from quaxlike.lm.models import with_classifier
from quaxlike.surgery.trees import named_arrays
from tests.lm.finetune.test_finetune import checkpoint, count, write
from tests.lm.finetune.test_train import decoder

pytestmark = pytest.mark.usefixtures("default_promotion")

NAMED = [{"text": count(i % 10, 3), "label": "low" if i % 10 < 5 else "high"} for i in range(40)]


def rows(*labels):
    return [{"text": "one two", "label": label} for label in labels]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "options", "names", "problem"),
    [
        (["b", "a", "b"], {}, ("a", "b"), SINGLE),
        ([2, 0], {}, ("LABEL_0", "LABEL_1", "LABEL_2"), SINGLE),
        ([["a"], [], ["c", "b"]], {}, ("a", "b", "c"), MULTI),
        ([0.5, 1], {}, ("LABEL_0",), REGRESSION),
        ([1, 2], {"problem_type": REGRESSION}, ("LABEL_0",), REGRESSION),
        (["b"], {"labels": ("b", "c")}, ("b", "c"), SINGLE),
    ],
)
def test_labels_of_the_data(labels, options, names, problem, classify_settings, base):
    """They settle the new head; the settings with them need no data to make it again."""
    given = classify_settings(rows(*labels), **options)
    model, data = begun(*base, given.train, given.data)
    assert model.labels == Labels(names, problem)
    assert model.score.weight.shape == (len(names), 64)
    given.data.data.unlink()
    again, _ = begun(*base, given.train, data)
    np.testing.assert_array_equal(again.score.weight, model.score.weight)
    assert 0.01 < float(jnp.std(model.score.weight)) < 0.03


@pytest.mark.parametrize(
    ("special", "pad"), [({"pad_token": "seven"}, 11), ({"pad_token": {"content": "one"}}, 5), ({}, 3)]
)
def test_padding_of_a_checkpoint_that_names_none(special, pad, llama, base, classify_settings, tmp_path):
    """By the last token that is none of it, transformers finds the end of a text."""
    shutil.copytree(llama, tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer_config.json").write_text(json.dumps(special))
    given = classify_settings(NAMED, labels=("high", "low"))
    train = dataclasses.replace(given.train, model=tmp_path / "llama")
    model = replace_fields(base[0], config=dataclasses.replace(base[0].config, pad_token_id=-1))
    found, _ = begun(model, base[1] | {"pad_token_id": None}, train, given.data)
    assert found.entries()["pad_token_id"] == pad


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (rows("a", 1), {}, "labels of several kinds"),
        (rows("a", ["a"]), {}, "labels of several kinds"),
        (rows("a"), {}, "has one label, a: there must be two"),
        ([], {}, r"data.jsonl \(--data\) has no examples"),
        (rows(0, -1), {}, "labels from -1 to 0: .* use --problem-type regression"),
        (rows(0, 10**9), {}, "labels from 0 to 1000000000"),
        (rows(True), {}, r"data.jsonl:1: 'label' must be the name of a label, or a number; found True"),
        (rows([0.5], [1.5]), {}, "lists of numbers.*Name them by --labels"),
        (rows("a", "b"), {"labels": ("a", "a")}, "`labels` must be different names"),
    ],
)
def test_labels_that_settle_nothing(lines, options, message, classify_settings, base):
    given = classify_settings(lines, **options)
    with pytest.raises(FinetuneError, match=message):
        begun(*base, given.train, given.data)


def test_lines_of_data(llama):
    tokens = Tokens(llama, json.loads((llama / "config.json").read_text()), 4)
    encode = lambda task, **fields: task.encode({"text": "one two", **fields}, tokens)
    single, multi, number = (Classes(Labels(("a", "b"), kind)) for kind in (SINGLE, MULTI, REGRESSION))
    assert encode(single, label="b") == Example(([5, 6],), label=1)
    assert encode(single, label=0).label == 0
    assert encode(multi, label=["b", 0]).label == (1.0, 1.0)
    assert encode(multi, label=[]).label == (0.0, 0.0)
    assert encode(number, label=[0.5, 2]).label == (0.5, 2.0)
    assert encode(single, text=count(0, 9), label=0).was_cut
    for task, label, message in [
        (single, "c", "must be one of a, b, or a whole number from 0 to 1; found 'c'"),
        (single, 2, "from 0 to 1; found 2"),
        (multi, "a", "must be a list of labels; found 'a'"),
        (number, 1, "must be a list of 2 numbers; found 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            encode(task, label=label)
    with pytest.raises(ValueError, match="preferences, which --task reward learns"):
        single.encode({"chosen": "a", "rejected": "b"}, tokens)
    batch = collate([encode(multi, label=[1]), encode(multi, label=["a"])], 16)
    np.testing.assert_array_equal(batch.labels, np.float32([[0, 1], [1, 0]]))


@pytest.mark.slow
def test_losses_and_metrics():
    """As torch computes the losses of transformers."""
    outputs, n = np.float32([[1.0, -2.0], [0.5, 0.25]]), 2
    batch = lambda labels: collate([Example(([1],), label=x) for x in labels], 16)
    single, multi, number = (Classes(Labels(("a", "b"), kind)) for kind in (SINGLE, MULTI, REGRESSION))
    found = single.metrics(outputs, batch([0, 1]))
    wrong = np.log1p(np.exp([-3.0, 0.25]))
    assert found == {"accuracy": 0.5, "loss": pytest.approx(np.sum(wrong) / n, rel=1e-6)}
    found = multi.metrics(outputs, batch([(1.0, 0.0), (1.0, 0.0)]))
    wrong = np.log1p(np.exp([-1.0, -2.0, -0.5, 0.25]))
    assert found == {"accuracy": 0.75, "loss": pytest.approx(np.sum(wrong) / 4, rel=1e-6)}
    found = number.metrics(outputs, batch([(0.0, 0.0), (0.0, 0.0)]))
    assert found == {"loss": pytest.approx((1 + 4 + 0.25 + 0.0625) / 4)}


@pytest.mark.slow
def test_the_last_token_is_classified():
    """On whichever side padding is; as in transformers, a text may end with the token of padding."""
    model = with_classifier(decoder(pad_token_id=0), ["a", "b", "c"], key=jax.random.key(0), std=1.0)
    run = jax.jit(lambda ids, seen: (model(ids, seen), model.hidden(ids, seen)))
    ids, seen = np.array([5, 6, 7, 0, 0, 0]), np.array([1, 1, 1, 0, 0, 0], bool)
    found, hidden = run(ids, seen)
    np.testing.assert_allclose(found, model.score.weight @ hidden[2], atol=1e-6)
    np.testing.assert_allclose(run(np.roll(ids, 3), np.roll(seen, 3))[0], found, atol=1e-5)
    np.testing.assert_allclose(run(ids, seen | (np.arange(6) == 3))[0], found, atol=1e-6)


@pytest.mark.slow
def test_the_head_is_trained_and_kept(llama, base, tmp_path):
    """As PEFT does, without an option; `where` and `exclude` say otherwise."""
    model = with_classifier(base[0], ["a", "b", "c"], key=jax.random.key(0), std=1.0)
    adapted = ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(1))
    assert type(adapted.score.weight) is TrainableArray
    peft.save_adapter(tmp_path, adapted)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    other = with_classifier(base[0], ["a", "b", "c"], key=jax.random.key(2))
    again = peft.load_adapter(tmp_path, other)
    np.testing.assert_array_equal(again.score.weight.materialise(), model.score.weight)
    named = ql.loraify(model, rank=2, where=["q_proj", "score"], key=jax.random.key(1))
    assert type(named.score.weight) is ql.LoraArray
    frozen = ql.loraify(model, rank=2, exclude=["score"], key=jax.random.key(1))
    assert frozen.score.weight is model.score.weight
    causal = ql.loraify(base[0], rank=2, key=jax.random.key(1))
    for x, task in ((frozen, "SEQ_CLS"), (causal, "CAUSAL_LM")):
        peft.save_adapter(tmp_path / task, x)
        assert json.loads((tmp_path / task / "adapter_config.json").read_text())["task_type"] == task


@pytest.mark.quick("nf4")
@pytest.mark.parametrize("scheme", ["nf4", "q4_k_m"])
def test_the_head_is_not_quantised(base, scheme):
    """Nor is the embedding, to which it isn't tied."""
    model = with_classifier(base[0], ["a", "b", "c"], key=jax.random.key(0))
    paths = [row.path for row in ql.quantize.plan(model, scheme).rows]
    assert not [x for x in paths if "score" in x or "embed" in x]
    assert [row.path for row in ql.quantize.plan(model, {".*score.*": "nf4"}).rows] == ["score.weight"]
    with pytest.raises(ValueError, match="This one has neither; name its layer in `where`"):
        ql.quantize(model, "nf4", head=True)


def test_written_and_read(llama, base, tmp_path):
    """With the architecture and the labels; GGUF is refused."""
    model = with_classifier(base[0], ["no", "yes"], key=jax.random.key(0), problem_type=SINGLE)
    save(tmp_path / "out", model, llama)
    again, config = load(tmp_path / "out")
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "no", "1": "yes"}
    assert config["label2id"] == {"no": 0, "yes": 1}
    assert again.labels == model.labels
    arrays = named_arrays(model)
    assert "lm_head.weight" not in arrays
    for name, x in named_arrays(again).items():
        np.testing.assert_array_equal(x, arrays[name])
    with pytest.raises(CheckpointError, match="written of models that write texts, and LlamaForSequenceCl"):
        save(tmp_path / "model.gguf", again, tmp_path / "out", format="gguf")


@pytest.mark.parametrize("config", [
    {"problem_type": "other"}, {"id2label": {"1": "a"}}, {"id2label": ["a"]}, {"num_labels": 0},
    {"num_labels": 1, "problem_type": SINGLE},
])  # fmt: skip
def test_labels_that_are_no_labels(config):
    with pytest.raises(ql.lm.UnsupportedConfigError, match="a classifier supports"):
        Labels.from_json(config)


def run_of(llama, tmp_path, lines, *options):
    data, out = write(tmp_path / "data.jsonl", lines), tmp_path / "out"
    command = [f"--model={llama}", f"--data={data}", f"--output={out}", "--task=classify", "--steps=15"]
    more = ["--batch-size=8", "--rank=4", "--learning-rate=0.01", "--held-out=0.2", "--quantize=none"]
    assert main([*command, *more, *options]) == 0
    return out, [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--quantize=nf4", "--scan-layers", "--remat"],
        ["--mesh=data=2,model=2", "--quantize=nf4", "--block-size=32"],
    ],
)
def test_a_run_learns_the_labels(more, llama, tmp_path, capsys):
    out, log = run_of(llama, tmp_path, NAMED, "--merge", *more)
    assert log[0]["held_out"].keys() == {"accuracy", "loss"}
    assert log[-1]["loss"] < 0.3
    assert "held-out accuracy: " in (told := " ".join(capsys.readouterr().out.split()))
    assert ", 1.0000 after held-out loss" in told
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert json.loads((out / "run.json").read_text())["labels"] == ["high", "low"]
    merged, written = load(out / "merged")
    assert written["id2label"] == {"0": "high", "1": "low"}
    base, _ = load(llama)
    adapted = peft.load_adapter(out, with_classifier(base, ["high", "low"], key=jax.random.key(5)))
    ids, seen = jnp.arange(4, 9), jnp.ones(5, bool)
    np.testing.assert_allclose(merged(ids, seen), ql.quaxify(adapted)(ids, seen), atol=2e-4)
    _, again = run_of(llama, tmp_path, NAMED, "--merge", *more)  # which finds all steps done
    assert again == log


@pytest.mark.slow
def test_the_merged_model_and_the_adapter_are_trained_on(llama, tmp_path, capsys):
    """With their own labels: of the checkpoint, or of the run that wrote the adapter."""
    out, _ = run_of(llama, tmp_path, NAMED, "--merge")
    (tmp_path / "second").mkdir()
    highs = [row for row in NAMED if row["label"] == "high"]
    data = write(tmp_path / "second" / "data.jsonl", highs)
    common = [f"--data={data}", "--steps=2", "--batch-size=8", "--quantize=none"]
    assert main([f"--model={out / 'merged'}", f"--output={tmp_path / 'a'}", *common]) == 0
    options = [f"--output={tmp_path / 'b'}", "--task=classify", f"--adapter={out}"]
    assert main([f"--model={llama}", *common, *options]) == 0
    assert json.loads((tmp_path / "b" / "run.json").read_text())["labels"] == ["high", "low"]
    options = [f"--output={tmp_path / 'c'}", "--task=classify", "--labels=x,y"]
    assert main([f"--model={out / 'merged'}", *common, *options]) == 2
    assert "tells high, low apart, and --labels names other ones" in capsys.readouterr().err


def test_messages(llama, tmp_path):
    """Are written by the chat template, without a prompt for an answer."""
    shutil.copytree(llama, tmp_path / "llama")
    (tmp_path / "llama" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}nine{% endif %}"
    )
    tokens = Tokens(tmp_path / "llama", json.loads((llama / "config.json").read_text()), 3)
    talk = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    task = Classes(Labels(("a", "b"), SINGLE))
    assert task.encode({"messages": talk, "label": "b"}, tokens) == Example(([5, 6, 7],), label=1)
    assert task.encode({"messages": [*talk, *talk], "label": "b"}, tokens).was_cut
    pair = {"prompt": talk[:1], "chosen": talk[1:], "rejected": [{"role": "assistant", "content": "six"}]}
    assert Rewards().encode(pair, tokens).texts == ([5, 6, 7], [5, 6, 10])
    with pytest.raises(ValueError, match="'text' is not used beside messages, label"):
        task.encode({"messages": talk, "label": "b", "text": "one"}, tokens)


@pytest.mark.slow
def test_a_head_in_4_bits_is_trained(llama, base, tmp_path):
    """As a dense one: PEFT's files hold no other."""
    model = with_classifier(base[0], ["high", "low"], key=jax.random.key(0))
    save(tmp_path / "base", ql.quantize(model, "nf4", where=["score"]), llama)
    assert isinstance(load(tmp_path / "base")[0].score.weight, ql.NF4Array)
    out, _ = run_of(tmp_path / "base", tmp_path, NAMED)
    assert json.loads((out / "adapter_config.json").read_text())["modules_to_save"] == ["score"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", "modern", "gpt2", "mixtral"])
def test_other_models_get_a_head(kind, tmp_path):
    model = checkpoint(tmp_path / kind, kind, head_dim=None, eos_token_id=None)
    out, log = run_of(model, tmp_path, NAMED, "--merge", "--max-length=16")
    assert log[-1]["loss"] < log[1]["loss"]
    merged, _ = load(out / "merged")
    head = peft.load_adapter(out, with_classifier(load(model)[0], ["a", "b"], key=jax.random.key(0)))
    ids, seen = jnp.arange(4, 9), jnp.ones(5, bool)
    np.testing.assert_allclose(merged(ids, seen), ql.quaxify(head)(ids, seen), atol=2e-4)


@pytest.mark.slow
def test_what_does_not_start(llama, tmp_path, capsys):
    data = write(tmp_path / "data.jsonl", NAMED)
    command = [f"--model={llama}", f"--data={data}", f"--output={tmp_path / 'out'}", "--task=classify"]
    assert main([*command, "--merge", "--format=gguf"]) == 2
    assert "LlamaForSequenceClassification classifies them" in capsys.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()
