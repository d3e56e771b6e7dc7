"""`python -m quaxlike.lm.finetune --adapter DIR`: an adapter that is trained further."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.adapters import METHODS
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load as load_model
from quaxlike.lm import peft
from quaxlike.lm.finetune.__main__ import main
from tests.lm.finetune.test_finetune import LINES, checkpoint, log_of, write
from tests.samples import some_of

pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.fixture
def run(run_command):
    return lambda kind, lines, *options, **others: run_command(kind, LINES[lines], *options, **others)


def tensors(folder):
    return {
        name: np.asarray(x, np.float32)
        for name, x in open_tensors(folder / "adapter_model.safetensors").items()
    }


@pytest.mark.slow
def test_it_goes_on_where_the_adapter_stood(run, tmp_path):
    """With its settings, in a run of its own that is resumed as others are."""
    options = ["bert", "label", "--quantize=none", "--steps=4"]
    first = [*options, "--rank=4", "--alpha=4", "--dropout=0.1", "--target", "query"]
    assert run(*first, output="first")[0] == 0
    goes_on = [*options, f"--adapter={tmp_path / 'first'}"]
    status, told = run(*goes_on)
    assert status == 0, told
    assert f"Goes on with the adapter in {tmp_path / 'first'}; the optimiser starts anew." in told
    before, after = (log_of(tmp_path / name) for name in ("first", "out"))
    assert after[0]["held_out"]["loss"] < before[0]["held_out"]["loss"]
    configs = [json.loads((tmp_path / x / "adapter_config.json").read_text()) for x in ("first", "out")]
    assert configs[0] == configs[1]
    old, new = tensors(tmp_path / "first"), tensors(tmp_path / "out")
    assert old.keys() == new.keys()
    assert not any(np.array_equal(old[name], new[name]) for name in old)
    assert "All 4 steps are done." in run(*goes_on)[1]
    status, told = run(*options)
    assert status == 2
    assert "run.json is from a run with adapter" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(METHODS, "goes on", 3))
def test_adapters_of_several_methods(name, run, tmp_path, monkeypatch):
    """The model is the one that was written, and it is trained further, in the same files."""
    small = {"shira": {"rank": 4}, "c3a": {"block_size": 16}}.get(name, {})  # others are small by default
    start = functools.partial(METHODS[name].start, **small)
    monkeypatch.setitem(METHODS, name, METHODS[name]._replace(start=start))
    options = ["llama", "text", "--steps=2", "--quantize=none"]
    assert run(*options, f"--adapter={name}", output="first")[0] == 0
    status, told = run(*options, "--merge", f"--adapter={tmp_path / 'first'}")
    assert status == 0, told
    assert not (tmp_path / "out" / "adapters.safetensors").exists()
    configs = [json.loads((tmp_path / x / "adapter_config.json").read_text()) for x in ("first", "out")]
    assert configs[0] == configs[1]
    old, new = tensors(tmp_path / "first"), tensors(tmp_path / "out")
    assert old.keys() == new.keys()
    assert any(not np.array_equal(old[key], new[key]) for key in old)
    _, first = run(*options, f"--adapter={name}", output="first")
    end = first.partition("held-out loss: ")[2].split()[2]
    assert f"held-out loss: {end} before" in told


@pytest.mark.slow
def test_one_that_peft_wrote_in_half_precision(run, tmp_path):
    """On a quantised base; what is trained is in float32."""
    folder = tmp_path / "first"
    assert run("llama16bit", "text", "--steps=2", "--train-tokens", "4", "5", output="first")[0] == 0
    file = folder / "adapter_model.safetensors"
    write_tensors(file, {k: x.astype(jnp.bfloat16) for k, x in open_tensors(file).items()}, {"format": "pt"})
    status, told = run("llama16bit", "text", "--steps=2", "--lora-plus=4", "--merge", f"--adapter={folder}")
    assert status == 0, told
    assert {x.dtype for x in open_tensors(tmp_path / "out" / "adapter_model.safetensors").values()} == {
        jnp.dtype("float32")
    }
    assert ql.summary(peft.load_adapter(tmp_path / "out", load_model(tmp_path / "llama16bit")[0])).trainable


@pytest.mark.slow
def test_one_that_is_invoked(run, tmp_path):
    options = ["llama", "text", "--steps=2", "--quantize=none"]
    assert run(*options, "--invocation=five", output="first")[0] == 0
    goes_on = [*options, f"--adapter={tmp_path / 'first'}"]
    status, told = run(*goes_on)
    assert status == 0, told
    assert "examples do not have the tokens of --invocation" in told
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == [4 + 5]
    status, told = run(*goes_on, "--merge", output="merged")
    assert status == 2
    assert "--merge cannot be used with the adapter in" in told


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [[], ["--scan-layers"]])
def test_preferences_are_over_the_adapter_as_it_was(scanned, run, tmp_path):
    """As in TRL, where the reference of an adapter that is continued is a frozen copy of it."""
    rows = [
        {"prompt": "one two", "chosen": f"three {x}", "rejected": f"{x} one"}
        for x in ("two", "four", "five", "six")
    ]
    data = write(tmp_path / "preferences.jsonl", rows * 5)
    base, _ = load_model(checkpoint(tmp_path / "llama", "llama", eos_token_id=3))
    model = ql.loraify(base, rank=2, dropout=0.1, where=["q_proj", "v_proj"], key=jax.random.key(0))
    params, rest = eqx.partition(model, ql.trainable(model))
    model = eqx.combine(jax.tree.map(lambda x: x + 0.3, params), rest)
    peft.save_adapter(tmp_path / "first", model)
    options = [f"--data={data}", "--task=dpo", f"--adapter={tmp_path / 'first'}", "--steps=2", *scanned]
    assert run("llama", "text", "--quantize=none", *options)[0] == 0
    log = log_of(tmp_path / "out")
    assert log[0]["held_out"] == {"loss": pytest.approx(np.log(2)), "accuracy": 0.5, "margin": 0.0}
    assert log[-1]["loss"] < log[1]["loss"]


def test_what_is_no_adapter_to_go_on_with(run, tmp_path):
    (tmp_path / "empty").mkdir()
    status, told = run("llama", "text", f"--adapter={tmp_path / 'empty'}")
    assert status == 2
    assert "adapter_config.json, so it is no adapter to go on with." in told
    (tmp_path / "empty" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    status, told = run("llama", "text", f"--adapter={tmp_path / 'empty'}", "--freeze-a")
    assert status == 2
    assert "--freeze-a cannot be used with the adapter in" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_biases_that_a_merged_model_has_no_place_for(run, tmp_path):
    """They are refused before hours of training."""
    base = checkpoint(tmp_path / "llama", "llama", eos_token_id=3)
    model = ql.loraify(load_model(base)[0], rank=2, where=["q_proj"], lora_bias=True, key=jax.random.key(0))
    peft.save_adapter(tmp_path / "first", model)
    status, told = run("llama", "text", f"--adapter={tmp_path / 'first'}", "--merge")
    assert status == 2
    assert f"--adapter {tmp_path / 'first'}, which adds model.layers.0.self_attn.q_proj.bias" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--rank=4", "--target=q_proj", "--train-tokens=4", "--dora"])
def test_what_the_folder_settles(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--model=m", "--data=d", "--output=o", f"--adapter={tmp_path}", option])
    assert (
        f"{option.partition('=')[0]} cannot be used with the adapter in {tmp_path}" in capsys.readouterr().err
    )
