"""`python -m quaxlike.lm.finetune` on tiny checkpoints, whose tokenisers are made here."""

import io
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import quaxlike as ql
from quaxlike.files import CheckpointError, safetensors
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.kernels import native
from quaxlike.lm import load as load_model
from quaxlike.lm import peft
from quaxlike.lm.finetune import data, report
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.options import settings_of
from quaxlike.lm.finetune.run import read_data
from quaxlike.lm.finetune.settings import DataSettings, FinetuneError, TrainSettings
from quaxlike.lm.finetune.state import RunDirectory
from quaxlike.lm.finetune.tasks import NextToken
from quaxlike.lm.finetune.train import MemoryUse, TrainingStep
from quaxlike.lm.models import Bert, Decoder, DecoderConfig, ModernBert, ModernBertConfig
from quaxlike.lm.models.bert import BertConfig
from quaxlike.surgery.trees import named_arrays
from tests.fixtures import fixture
from tests.lm.models.made import checkpoint as checkpoint_with_tokeniser

pytestmark = pytest.mark.usefixtures("default_promotion")

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
RNG = np.random.default_rng(0)


def count(start, n):
    """Counting on from a number: what a model can learn in a few steps."""
    return " ".join(WORDS[(start + i) % 10] for i in range(n))


LINES = {
    "text": [{"text": count(*RNG.integers(2, 10, 2))} for _ in range(40)],
    "completion": [{"prompt": count(i, 3), "completion": count(i + 3, 4)} for i in RNG.integers(0, 10, 40)],
    "label": [{"text": count(i, 3), "label": int(i < 5)} for i in RNG.integers(0, 10, 40)],
    "pairs": [{"a": count(i % 10, 1 + i // 10), "b": count(i % 10 + 3, 1 + i // 10)} for i in range(40)],
}
CHECKPOINTS = {
    "llama": "peft_llama/base",
    "llama4bit": "qlora_llama_double/base4bit",
    "llama16bit": "peft_llama/base",
    "gpt2": "peft_gpt2/base",
    "bert": "peft_bert/base",
    "mixtral": "models/mixtral/base",
}


def checkpoint(folder, kind, **changes):
    """A copy of a fixture with a tokeniser of the words above, and changes to its configuration."""
    if kind in ENCODERS:
        random_encoder(folder, kind)
    else:
        shutil.copytree(fixture(CHECKPOINTS[kind]), folder)
    if kind == "llama16bit":
        file = folder / "model.safetensors"
        write_tensors(
            file, {k: v.astype(jnp.bfloat16) for k, v in open_tensors(file).items()}, {"format": "pt"}
        )
    words = [*SPECIAL, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind in ("bert", *ENCODERS):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.enable_truncation(3)  # settings for other uses, which must not count
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


ENCODERS = {
    "encoder": ("BertModel", Bert, BertConfig),
    "modern": ("ModernBertModel", ModernBert, ModernBertConfig),
    "embedder": ("Qwen3ForCausalLM", Decoder, DecoderConfig),
}


def random_encoder(folder, kind):
    """Like published ones, a decoder that embeds has no output layer, and its tensors no common prefix."""
    architecture, make, read = ENCODERS[kind]
    sizes = {
        "vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 20, "architectures": [architecture],
        **({"head_dim": 8} if kind == "embedder" else {}),
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    arrays = named_arrays(make(read.from_json(sizes), key=jax.random.key(0)))
    arrays = {name.removeprefix("model."): x for name, x in arrays.items() if "lm_head" not in name}
    safetensors.save(folder / "model.safetensors", arrays)
    if kind == "embedder":
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        listed = [{"type": f"sentence_transformers.models.{x}", "path": path} for x, path in modules]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        settings = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def run(run_command):
    return lambda kind="llama", lines="text", *options, **others: run_command(
        kind, LINES[lines], "--rank=4", *options, **others
    )


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_adapter_that_no_file_could_hold(run, tmp_path):
    """Is refused before it is trained."""
    status, told = run("mixtral", "text", "--steps=2", "--dora", "--quantize=none")
    assert status == 2
    assert "PEFT's files have one low-rank adapter for each matrix of a parameter" in told
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lines", "better", "options"),
    [
        ("llama", "text", "loss", ["--dropout=0.1", "--rslora", "--weight-decay=0.01"]),
        ("llama4bit", "completion", "perplexity", ["--schedule=linear", "--target", "q_proj", "v_proj"]),
        ("llama16bit", "text", "loss", ["--quantize=int4"]),
        ("gpt2", "text", "loss", ["--quantize=int8", "--schedule=constant", "--clip=0"]),
        ("bert", "label", "loss", ["--quantize=none", "--dora"]),
        ("encoder", "pairs", "mrr", ["--quantize=fp4"]),
        ("modern", "pairs", "mrr", ["--remat"]),
        ("embedder", "pairs", "mrr", ["--quantize=nf4", "--scan-layers"]),
    ],
)
def test_learns_and_writes_an_adapter(kind, lines, better, options, run, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(native, "prepare", compiled.append)
    status, told = run(kind, lines, "--steps=12", *options)
    assert status == 0, told
    assert len(compiled) == ("--quantize=none" not in options)
    log = log_of(tmp_path / "out")
    assert [entry["step"] for entry in log] == list(range(13))
    before, after = map(float, re.search(rf"held-out {better}: (\S+) before, (\S+) after", told).groups())
    assert before == pytest.approx(log[0]["held_out"][better], abs=1e-4)
    assert (after > 1.2 * before) if better == "mrr" else (after < 0.8 * before)
    assert f"{sum(v.size for v in adapter(tmp_path / 'out').values()):,} trained" in told
    # It fits the base that it was trained on.
    base, _ = load_model(tmp_path / kind)
    model = peft.load_adapter(tmp_path / "out", base)
    assert ql.summary(model).trainable == sum(v.size for v in adapter(tmp_path / "out").values())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["task_type"] is not None
    if kind == "embedder":  # as in the model without its head, which PEFT puts it on
        assert any(key.startswith("base_model.model.layers.0.") for key in adapter(tmp_path / "out"))
    assert re.search(r"12/12 loss \d\.\d+ [\d,]+ tokens/s", told)


@pytest.mark.slow
def test_what_saves_time_and_memory_together(run, tmp_path):
    options = ["--steps=3", "--merge", "--compute-dtype=bfloat16", "--remat", "--pack"]
    more = ["--max-length=24", "--eval-every=1", "--tensorboard", "--batch-size=4", "--loss-chunk=32"]
    more += ["--train-tokens", "4", "5"]
    status, told = run("llama", "text", *options, *more)
    assert status == 0
    assert matches(r"32 training texts are packed into \d+ rows", told)
    assert matches(
        r"A step takes weights [\d.]+ MiB, adapters .* optimiser .* activations .* compiled in", told
    )
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    assert lines[0]["memory"]["adapters"] > 0
    assert [line["step"] for line in lines if line.get("held_out")] == [0, 1, 2, 3]
    assert all(line["tokens_per_second"] > 0 for line in lines[1:4])
    assert len(list((tmp_path / "out").glob("events.out.tfevents.*"))) == 1
    # The adapter is one for the model with a list of layers, and was added to the weights of the file.
    base, _ = load_model(tmp_path / "llama")
    adapted = peft.load_adapter(tmp_path / "out", base)
    assert ql.summary(adapted).trainable == sum(v.size for v in adapter(tmp_path / "out").values())
    assert adapted.model.embed_tokens.weight.indices == (4, 5)
    merged, _ = load_model(tmp_path / "out" / "merged")
    for (name, found), wanted in zip(
        named_arrays(merged).items(), named_arrays(ql.merge(adapted)).values(), strict=True
    ):
        np.testing.assert_array_equal(found, wanted, err_msg=name)
    assert (tmp_path / "out" / "merged" / "tokenizer.json").exists()
    # Once more there is nothing to train; what is merged may be chosen anew.
    with pytest.warns(UserWarning, match="which rounds them"):
        assert run("llama", "text", *options, *more, "--merge=quantized")[0] == 0
    settings = json.loads((tmp_path / "out" / "merged" / "config.json").read_text())["quantization_config"]
    assert settings["bnb_4bit_quant_type"] == "nf4"


@pytest.mark.slow
def test_scanned_layers_write_the_same_files(run, tmp_path):
    """They are the default, but for layers that differ."""
    written = []
    for option in ("--scan-layers", "--no-scan-layers"):
        status, told = run("llama", "text", "--steps=2", option, output=option)
        assert status == 0, told
        assert json.loads((tmp_path / option / "run.json").read_text())["scan_layers"] is ("no" not in option)
        written.append(adapter(tmp_path / option))
    assert written[0].keys() == written[1].keys()
    for name, found in written[0].items():
        np.testing.assert_allclose(found, written[1][name], atol=2e-3, err_msg=name)  # Adam enlarges rounding
    status, told = run("llama", "text", "--steps=2", output="--scan-layers")
    assert "All 2 steps are done" in told  # the default is the same run


@pytest.mark.slow
def test_a_merged_file_of_gguf(tmp_path, capsys):
    """The trained model with its tokeniser; the same run may write another type."""
    checkpoint_with_tokeniser(tmp_path / "base", "llama_llama3", hidden_size=64, num_attention_heads=4)
    data = write(tmp_path / "data.jsonl", LINES["text"][:8])
    command = [f"--model={tmp_path / 'base'}", f"--data={data}", f"--output={tmp_path / 'out'}", "--steps=1"]
    command += ["--batch-size=2", "--merge", "--format=gguf", "--quantize=none"]
    assert main(command) == 0
    file = tmp_path / "out" / "merged.gguf"
    assert f"Merged: {file}" in capsys.readouterr().out.replace("\n", "")
    base, _ = load_model(tmp_path / "base")
    wanted = ql.merge(peft.load_adapter(tmp_path / "out", base))
    for key, leaf in named_arrays(load_model(file)[0]).items():
        np.testing.assert_allclose(leaf, named_arrays(wanted)[key], atol=1e-6, err_msg=key)
    assert main([*command, "--outtype=q8_0"]) == 0
    found = load_model(file)[0].model.layers[0].mlp.gate_proj.weight
    assert isinstance(found, ql.BlockArray)
    np.testing.assert_allclose(ql.materialise(found), wanted.model.layers[0].mlp.gate_proj.weight, atol=0.01)


def test_what_gguf_cannot_hold_is_refused_before_the_training(run, tmp_path):
    status, told = run("llama", "text", "--merge", "--format=gguf")
    assert status == 2
    assert "'model': GGUF is written for 'BPE'; found 'WordLevel'" in told
    assert not (tmp_path / "out" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format=gguf"], "--format gguf must be used with --merge"),
        (["--format=gguf", "--merge=quantized"], "--format gguf must be used with --merge"),
        (["--merge", "--outtype=q8_0"], "--outtype must be used with --format gguf"),
    ],
)
def test_options_of_gguf_that_contradict_each_other(options, message, capsys):
    with pytest.raises(SystemExit):
        main(["--model=m", "--data=d", "--output=o", *options])
    assert message in capsys.readouterr().err


def adapter(folder):
    return open_tensors(folder / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The rank is above both sizes")  # of which states take blocks
@pytest.mark.parametrize("more", [["--accumulate=2"], ["--optimizer-bits=8", "--rank=128"]])
def test_stopped_and_resumed_is_uninterrupted(more, run, tmp_path, monkeypatch):
    options = ["--steps=9", "--dropout=0.1", "--checkpoint-every=3", "--quantize=none", *more]
    assert run("bert", "label", *options, output="whole")[0] == 0
    note = RunDirectory.note

    def stop(self, **entry):
        note(self, **entry)
        if entry["step"] == 5:
            with open(self.log, "ab") as file:
                file.write(b'{"step": 6, "lo')  # it was being written
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "note", stop)
    status, told = run("bert", "label", *options)
    assert status == 130
    assert "The same command resumes from the last checkpoint" in told
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    kept = open_tensors(tmp_path / "out" / "checkpoint.safetensors")
    assert any(".nu." in name and name.endswith(".codes") for name in kept) == (len(more) == 2)
    monkeypatch.undo()
    status, told = run("bert", "label", *options)
    assert status == 0
    assert "Resumes after step 3 of 9." in told
    for name in ("log.jsonl", "adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Once more, there is nothing left to do.
    assert run("bert", "label", *options)[0] == 0
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


@pytest.mark.slow
def test_one_matrix_is_trained_with_a_rate_of_its_own(run, tmp_path):
    options = ["--quantize=none", "--target", "q_proj", "--freeze-a", "--lora-plus=8"]
    trained = []
    for steps, more in [(1, options[:3]), (1, options), (2, options)]:
        status, told = run("llama", "text", f"--steps={steps}", *more, output=f"out{len(trained)}")
        assert status == 0
        trained.append(int(re.search(r"([0-9,]+) trained", told)[1].replace(",", "")))
    assert trained[0] > trained[1] == trained[2] > 0
    files = [adapter(tmp_path / f"out{i}") for i in range(3)]
    for name in files[0]:
        plain, one, two = (np.asarray(x[name]) for x in files)
        if "lora_A" in name:
            np.testing.assert_array_equal(one, two)
        else:
            np.testing.assert_allclose(one, 8 * plain, rtol=1e-5)
            assert not np.array_equal(one, two)


@pytest.mark.slow
def test_few_examples_make_up_one_batch(run, tmp_path):
    other = write(tmp_path / "other.jsonl", LINES["label"][:3])
    options = ["--batch-size=64", "--epochs=2", "--quantize=none", f"--eval-data={other}"]
    status, told = run("bert", "label", *options)
    assert status == 0
    assert "each batch holds all 40 training examples" in told
    log = log_of(tmp_path / "out")
    assert len(log) == 3
    assert log[0]["held_out"]["accuracy"] in (0, 1 / 3, 2 / 3, 1)


@pytest.mark.slow
def test_accumulation_is_one_large_batch(run, tmp_path):
    """However the tokens are spread over its parts."""
    common = ["--steps=3", "--learning-rate=0.001", "--quantize=none"]
    run("llama", "text", *common, output="large")
    run("llama", "text", *common, "--batch-size=4", "--accumulate=2", output="parts")
    large, parts = (log_of(tmp_path / name) for name in ("large", "parts"))
    np.testing.assert_allclose([x["loss"] for x in parts[1:]], [x["loss"] for x in large[1:]], rtol=1e-5)
    for key, value in adapter(tmp_path / "large").items():
        np.testing.assert_allclose(adapter(tmp_path / "parts")[key], value, atol=2e-5)


@pytest.mark.slow
def test_too_long_texts_are_counted(run):
    status, told = run("llama", "text", "--steps=1", "--max-length=6", "--quantize=none")
    longer = sum(len(line["text"].split()) + 1 > 6 for line in LINES["text"])
    assert status == 0
    assert f"{longer} of 40 examples are longer than 6 tokens and were cut." in told


def test_conversations_without_an_answer_are_counted(tmp_path, capsys):
    """And not taken for long ones."""
    model = checkpoint(tmp_path / "llama", "llama")
    roles = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant {% endif %}"
    (model / "chat_template.jinja").write_text(roles + prompt)
    asked = {"role": "user", "content": "one two"}
    long = {"role": "assistant", "content": count(0, 60)}
    rows = [[asked]] * 3 + [[asked, {"role": "assistant", "content": "three"}]] * 4 + [[asked, long]]
    lines = [*({"messages": row} for row in rows), {"prompt": count(0, 40), "completion": "one"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = json.loads((model / "config.json").read_text())
    console = report.console_on()
    settings = TrainSettings(model), DataSettings(tmp_path / "data.jsonl")
    read_data(*settings, NextToken(), data.Tokens(model, config, 32), console)
    told = capsys.readouterr().out
    assert "3 of 9 examples have nothing to learn, such as an answer of the assistant, and were left" in told
    assert "2 of 9 examples are longer than 32 tokens and were cut, 1 of them left out, since nothing" in told


def test_progress_says_what_it_is():
    """Nothing of a loss before there is one; no number is broken at the end of a line."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def steps():
        first.append(terminal.getvalue())
        yield TrainingStep(1, 2.5, 0.1, 100, 0.5, None)

    terminal, first = Terminal(), []
    console = report.console_on(terminal)
    console.width = 60
    list(report.shown(steps(), console, 0, 1))
    told = re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", terminal.getvalue())
    assert "nan" not in told
    assert "loss" not in first[0]
    assert re.search(r"1/1 loss 2\.5000 +200 tokens/s 0:00:00 left", told)
    memory = str(MemoryUse(weights=10**7, adapters=10**6, optimiser=10**6, activations=5 * 10**6))
    console.print(f"A step takes {memory}")
    lines = re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", terminal.getvalue())
    assert "activations 4.8 MiB" in " ".join(lines.split())


# -------------------------------------------------------------------------------------------------
# What it cannot start with
# -------------------------------------------------------------------------------------------------

BAD_LINES = {
    "not JSON": ('{"text": "one"', "not JSON: Expecting"),
    "not UTF-8": (b'{"text": "\xff"}', "not JSON: .*utf-8"),
    "no object": ("[1, 2]", r"expected a JSON object; found '\[1, 2\]"),
    "another entry": ('{"txt": "one"}', "'text' must be a text; there are txt"),
    "a number": ('{"text": 1}', "'text' must be a text; found 1"),
    "an empty text": ('{"text": " "}', "'text' must be a text; found ' '"),
    "no completion": ('{"prompt": "one"}', "'completion' must be a text; there are prompt"),
    "messages as a prompt": (
        '{"prompt": [{"role": "user", "content": "one"}], "completion": "two"}',
        "has no chat template, which turns messages into text",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_are_named(name, tmp_path, capsys):
    line, message = BAD_LINES[name]
    line = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "one two"}\n\n' + line + b"\n")
    model = checkpoint(tmp_path / "llama", "llama")
    assert main([f"--model={model}", f"--data={path}", f"--output={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert f"{path}:3: " in error
    assert error.startswith("python -m quaxlike.lm.finetune: error: ")
    assert matches(message, error)
    assert not (tmp_path / "out").exists()


def test_a_list_in_utf_16_is_named(tmp_path):
    (tmp_path / "data.jsonl").write_bytes('["é"]'.encode("utf-16-le"))
    with pytest.raises(FinetuneError, match=r"data\.jsonl, row 1: expected a JSON object; found"):
        data.read_examples(tmp_path / "data.jsonl", lambda fields: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lines", "options", "message"),
    [
        ("encoder", "pairs", ["--pack"], "--pack is for decoders"),
        ("bert", "label", ["--scan-layers"], "--scan-layers is for decoders; .* holds BertForS"),
        ("encoder", "pairs", ["--batch-size=1"], "--batch-size is 1; a batch must have at least 2"),
        ("llama", "text", ["--held-out=0", "--eval-every=1"], "--eval-every has nothing to evaluate: set"),
        ("llama", "text", ["--max-length=100000"], "--max-length 100000 is more than the model's"),
        ("llama", "text", ["--target", "qq_proj"], r"'qq_proj' matches none .* Did you mean .*q_proj"),
        ("llama", "text", ["--eval-data=nowhere.jsonl"], r"There is no file nowhere\.jsonl"),
        ("encoder", "text", [], r"data\.jsonl:1: expected two texts that belong together; found text"),
        ("bert", "text", [], r"data\.jsonl:1: 'label' must be a whole number from 0 to \d; found None"),
    ],
)
def test_options_that_do_not_fit(kind, lines, options, message, run, tmp_path):
    status, told = run(kind, lines, *options)
    assert status == 2
    assert matches(message, told)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"is of the architecture \['MambaForCausalLM'\]; of transformers, BertModel, ",
        ),
        ({"hidden_act": "relu"}, "config.json has hidden_act='relu'; LlamaConfig supports 'silu'"),
        (
            {"rms_norm_eps": float("nan")},
            "config.json has rms_norm_eps=nan; LlamaConfig needs a finite number",
        ),
        ({"hidden_size": "64"}, "config.json has hidden_size='64'; LlamaConfig needs a whole number"),
        ({"mlp_bias": 1}, "config.json has mlp_bias=1; LlamaConfig needs true or false"),
        ({"num_hidden_layers": 5}, r"does not fit the model of its config.json. Missing: model\.layers\.2"),
    ],
)
def test_checkpoints_of_other_kinds(changes, message, run):
    status, told = run("llama", "text", **changes)
    assert status == 2
    assert matches(message, told)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float64", "float8_e4m3fn"])
def test_weights_that_no_model_computes_with(dtype, tmp_path):
    shutil.copytree(fixture("peft_bert") / "base", tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    write_tensors(path, {k: x.astype(jnp.dtype(dtype)) for k, x in open_tensors(path).items()}, {})
    with pytest.raises(CheckpointError, match=f"must be of float32, bfloat16 or float16 .*found {dtype}"):
        load_model(tmp_path / "base")


@pytest.mark.slow
def test_files_that_differ_about_the_end(run, tmp_path):
    model = checkpoint(tmp_path / "llama", "llama", eos_token_id=3)
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')
    status, told = run("llama", "text", "--target", "qq_proj")
    assert status == 2
    assert matches(r"generation_config\.json \[2\], config\.json \[3\]\. Those of .* 2 is the one", told)


def test_missing_and_damaged_files(run, tmp_path):
    model = checkpoint(tmp_path / "llama", "llama")
    (model / "tokenizer.json").write_text("{}")
    assert matches(r"tokenizer\.json: is not a tokeniser: ", run()[1])
    (model / "tokenizer.json").unlink()
    assert matches(r"There is no .*tokenizer\.json", run()[1])
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert matches(r"model\.safetensors: ", run()[1])
    weights.unlink()
    assert run()[0] == 2
    (model / "config.json").unlink()
    assert matches(r"There is no .*config\.json", run()[1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fields", [{"text": "one {}"}, {"prompt": "one", "completion": "{}"}])
def test_a_token_that_the_model_has_no_row_for(fields, tmp_path):
    """It is an error where a text has it. Published tokenisers have such tokens, as Gemma 3's for images."""
    model = checkpoint(tmp_path / "llama", "llama")
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "last": size - 1, "image": size}, "one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    tokens = data.Tokens(model, {"vocab_size": size}, 10)
    filled = lambda word: {name: text.format(word) for name, text in fields.items()}
    assert NextToken().encode(filled("last"), tokens).texts == ([0, size - 1],)
    with pytest.raises(ValueError, match=rf"the token 'image', number {size}, and the model's vocab_size is"):
        NextToken().encode(filled("image"), tokens)


@pytest.mark.slow
def test_sizes_that_are_those_of_the_family(tmp_path):
    """As published by Gemma 3, without the size of its vocabulary."""
    model = tmp_path / "model"
    checkpoint_with_tokeniser(model, "gemma3")
    tensors = dict(open_tensors(model / "model.safetensors"))
    embedding = tensors["model.embed_tokens.weight"]
    more = np.zeros((262_208 - len(embedding), embedding.shape[1]), embedding.dtype)
    tensors["model.embed_tokens.weight"] = np.concatenate([embedding, more])
    write_tensors(model / "model.safetensors", tensors, {})
    config = json.loads((model / "config.json").read_text())
    del config["vocab_size"], config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    lines = write(tmp_path / "data.jsonl", [{"text": "the cat sat"}] * 4)
    files = [f"--model={model}", f"--data={lines}", f"--output={tmp_path / 'out'}"]
    assert main([*files, "--steps=1", "--max-length=3000", "--quantize=none", "--held-out=0"]) == 0


@pytest.mark.slow
def test_it_trains_without_evaluation(run, tmp_path):
    status, told = run("bert", "label", "--held-out=0", "--steps=1", "--quantize=none", "--target", "query")
    assert status == 0, told
    assert "held-out" not in told
    assert [entry["step"] for entry in log_of(tmp_path / "out")] == [0, 1]
    assert (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.slow
def test_directories_of_other_runs(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    assert matches("There is an adapter already", run()[1])
    write(tmp_path / "out" / "run.json", [{"rank": 7}])
    assert matches(r"run\.json is from a run with .*rank 7 \(now 4\).* or choose another --output", run()[1])


@pytest.mark.slow
def test_other_weights_in_the_same_place(run, tmp_path):
    assert run("llama", "text", "--steps=1")[0] == 0
    file = tmp_path / "llama" / "model.safetensors"
    write_tensors(file, {name: 2 * x for name, x in open_tensors(file).items()}, {"format": "pt"})
    assert matches(r"a run with sha256 of model '\w+' \(now '\w+'\)", run("llama", "text", "--steps=1")[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank=0"], "argument --rank: expected a whole number of at least 1, found '0'"),
        (["--rank=1.5"], "expected a whole number of at least 1, found '1.5'"),
        (["--held-out=2"], "argument --held-out: expected a number from 0 to 1, found '2'"),
        (["--learning-rate=nan"], "argument --learning-rate: expected a number of at least 0, found 'nan'"),
        ([], "the following arguments are required: --model, --data, --output"),
    ],
)
def test_options_of_other_kinds(options, message, capsys):
    required = ["--model=m", "--data=d", "--output=o"] if options else []
    with pytest.raises(SystemExit) as stop:
        main([*required, *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------
# Data
# -------------------------------------------------------------------------------------------------


def matches(message, text):
    return re.search(message, text) or pytest.fail(text)


def test_a_directory_is_for_one_run_at_a_time(tmp_path):
    model = checkpoint(tmp_path / "llama", "llama")
    data = write(tmp_path / "data.jsonl", LINES["text"])
    settings = settings_of(model=model, data=data, output=tmp_path / "out")
    first = RunDirectory(settings)
    with pytest.raises(FinetuneError, match="Another run is active"):
        RunDirectory(settings)
    first.close()
    RunDirectory(settings).close()


@pytest.mark.parametrize("line", [b"{]", b"3", b"{}", b'{"step": "1"}', b"\xff", b"[" * 100_000])
def test_a_damaged_log_is_told(line, tmp_path):
    model = checkpoint(tmp_path / "llama", "llama")
    data = write(tmp_path / "data.jsonl", LINES["text"])
    directory = RunDirectory(settings_of(model=model, data=data, output=tmp_path / "out"))
    directory.note(step=1)
    with open(directory.log, "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(FinetuneError, match=r"log.jsonl:2: expected an object with the number of a step"):
        directory.entries()
    directory.close()


@pytest.mark.slow
def test_options_are_listed_without_the_extra():
    code = (
        "import sys; sys.modules |= dict.fromkeys(['optax', 'rich', 'tokenizers'])\n"
        "from quaxlike.lm.finetune.__main__ import main; main(['--help'])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "  ... --task dpo      {" in told
    assert "--teacher-share" in told
