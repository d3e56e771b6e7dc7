"""`python -m quaxlike.lm.finetune --adapter`, with a type that a module of the user's defines."""

import importlib
import json
import sys
from typing import ClassVar

import equinox as eqx
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import safetensors
from quaxlike.lm import load as load_model
from quaxlike.lm import peft
from quaxlike.lm.finetune import run as running
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.adapter import make_of
from quaxlike.lm.finetune.settings import FinetuneError
from quaxlike.lm.finetune.state import RunDirectory
from quaxlike.surgery.trees import named_arrays
from tests.lm.finetune.test_finetune import LINES, log_of

pytestmark = pytest.mark.usefixtures("default_promotion")

MODULE = '''
import jax, jax.numpy as jnp, quaxlike as ql
from jaxtyping import ArrayLike


class MyAdapter(ql.AdaptedArray):
    """Rows of a weight, each times a trained number."""

    scale: jax.Array
    part_axes = {"scale": "out"}

    @classmethod
    def make(cls, w, *, key, layout):
        return cls(w, 1 + 0.01 * jax.random.normal(key, layout.out_shape(tuple(w.shape))))

    def materialise(self):
        return ql.materialise(self.base) * self.scale[..., None].astype(self.w.dtype)


@ql.register("dot_general")
def _product(w: MyAdapter, x: ArrayLike, *, dimension_numbers, **params):
    of_w, _ = ql.dot_axes(w, x, dimension_numbers)
    if of_w.contracting != (1,) or of_w.batch:
        return NotImplemented
    y = ql.quaxify(jax.lax.dot_general)(w.base, x, dimension_numbers, **params)
    return y * jnp.expand_dims(w.scale, range(1, y.ndim)).astype(y.dtype)


@ql.register("dot_general")
def _product_from_the_left(x: ArrayLike, w: MyAdapter, *, dimension_numbers, **params):
    of_w, _ = ql.dot_axes(w, x, dimension_numbers, on_left=False)
    if of_w.contracting != (1,) or of_w.batch:
        return NotImplemented
    return ql.quaxify(jax.lax.dot_general)(x, w.base, dimension_numbers, **params) * w.scale.astype(x.dtype)


def make_adapter(w, *, key, layout):
    return MyAdapter.make(w, key=key, layout=layout)


class Without(ql.AdaptedArray):
    def materialise(self):
        return ql.materialise(self.base)


class Plain:
    pass


def of_two(w, key):
    return w


def the_weight(w, *, key, layout):
    return w


number = 3
'''


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "own_adapter.py").write_text(MODULE)
    (folder / "broken_adapter.py").write_text("import no_such_package")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("own_adapter")
    sys.path.remove(str(folder))


@pytest.fixture
def run(run_command):
    own = "--learning-rate=0.05", "--adapter=own_adapter:MyAdapter"
    return lambda kind="llama", lines="text", *options, **others: run_command(
        kind, LINES[lines], *own, *options, **others
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lines", "options"),
    [
        ("llama", "text", ["--quantize=none", "--train-tokens", "4", "5"]),
        ("llama", "text", ["--scan-layers", "--target", "q_proj", "down_proj"]),
        ("bert", "label", ["--adapter=own_adapter:make_adapter"]),
    ],
    ids=["rows", "scanned", "classifier"],
)
def test_it_learns_and_is_loaded_and_merged(kind, lines, options, own_module, run, tmp_path):
    status, told = run(kind, lines, "--steps=12", "--merge", *options)
    assert status == 0, told
    log = log_of(tmp_path / "out")
    assert log[-1]["loss"] < log[1]["loss"]
    file = tmp_path / "out" / "adapters.safetensors"
    assert f"load_adapters('{file}', model, types=[own_adapter.MyAdapter])" in told
    assert f"Adapter: {file}" in told
    base, _ = load_model(tmp_path / kind)
    model = safetensors.load_adapters(file, base, types=[own_module.MyAdapter])
    assert f"{ql.summary(model).trainable:,} trained" in told
    kinds = {type(x).__name__ for x in named_arrays(model).values() if ql.is_value(x)}
    assert kinds == {"MyAdapter"} | {"rows": {"TrainableRows"}, "classifier": {"TrainableArray"}}.get(
        "rows" if "--train-tokens" in options else "classifier" if kind == "bert" else "", set()
    )
    merged, _ = load_model(tmp_path / "out" / "merged")
    for (name, found), wanted in zip(
        named_arrays(merged).items(), named_arrays(ql.merge(model)).values(), strict=True
    ):
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "file"),
    [("own_adapter:MyAdapter", "adapters.safetensors"), ("vera", "adapter_model.safetensors")],
)
def test_stopped_and_resumed_it_has_the_same_bytes(kind, file, run, tmp_path, monkeypatch):
    options = ["--steps=6", "--checkpoint-every=2", "--quantize=nf4", f"--adapter={kind}"]
    assert run("llama", "text", *options, output="whole")[0] == 0
    note = RunDirectory.note

    def interrupted(self, **entry):
        note(self, **entry)
        if entry["step"] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "note", interrupted)
    assert run("llama", "text", *options, output="parts")[0] == 130
    monkeypatch.undo()
    status, told = run("llama", "text", *options, output="parts")
    assert status == 0
    assert "Resumes after step 2 of 6" in told
    for name in ("checkpoint.safetensors", file, "log.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    status, told = run("llama", "text", *options, "--adapter=own_adapter:make_adapter", output="parts")
    assert status == 2
    assert f"adapter {kind!r} (now 'own_adapter:make_adapter')" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "lines"),
    [
        *((name, "llama", "text") for name in ("hra", "vera", "randlora", "fourierft")),
        ("ia3", "bert", "label"),
    ],
)
def test_another_method_of_peft(method, kind, lines, run, tmp_path):
    """By its name; the files are PEFT's."""
    options = [f"--adapter={method}", "--steps=6", "--merge", "--learning-rate=0.02"]
    status, told = run(kind, lines, *options, "--quantize=nf4")
    assert status == 0, told
    log = log_of(tmp_path / "out")
    assert log[-1]["loss"] < log[1]["loss"]
    assert f"Adapter: {tmp_path / 'out'} Merged" in told
    base, _ = load_model(tmp_path / kind)
    model = peft.load_adapter(tmp_path / "out", base)
    assert f"{ql.summary(model).trainable:,} trained" in told
    merged, _ = load_model(tmp_path / "out" / "merged")
    for (name, found), wanted in zip(
        named_arrays(merged).items(), named_arrays(ql.merge(model)).values(), strict=True
    ):
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.slow
def test_what_files_of_peft_do_not_hold(run, tmp_path):
    """DeLoRA of GPT-2's layers; nothing that was trained is lost."""
    status, told = run("gpt2", "text", "--adapter=delora", "--steps=1", "--quantize=none", "--merge")
    assert status == 0, told
    assert "PEFT's files do not hold this adapter: PEFT's DELORA is for" in told
    file = tmp_path / "out" / "adapters.safetensors"
    assert f"Adapter: {file}" in told
    base, _ = load_model(tmp_path / "gpt2")
    wanted = named_arrays(ql.merge(safetensors.load_adapters(file, base)))
    for name, found in named_arrays(load_model(tmp_path / "out" / "merged")[0]).items():
        np.testing.assert_array_equal(found, wanted[name], err_msg=name)


@pytest.mark.slow
def test_dropout_of_the_users_own(run, own_module, monkeypatch):
    """Types that drop get a key for each example, without an option, and for each of scanned layers."""
    seen = []

    class Dropping(own_module.MyAdapter):
        key: object = None
        dropout: float = eqx.field(static=True, default=0.1)

        def materialise(self):
            seen.append(self.key)
            return super().materialise()

    class Scanned(Dropping):
        part_axes: ClassVar = {**own_module.MyAdapter.part_axes, "key": ""}

    for cls in (Dropping, Scanned):
        monkeypatch.setattr(own_module, "Own", cls, raising=False)
        options = ["--steps=1", "--adapter=own_adapter:Own", "--quantize=none"]
        status, told = run("llama", "text", *options, output=cls.__name__)
        assert status == 0
        assert ("Layers are compiled one by one: " in told) == (cls is Dropping)
        assert any(key is not None for key in seen)
        seen.clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "own_adapter",
            r"takes MODULE:NAME, such as mymodule:MyAdapter, or one of .*, hra, .*; found 'own_ad",
        ),
        ("no_module_here:A", r"there is no module 'no_module_here'\. Run the command in its folder"),
        ("own_adapter.deeper:A", r"there is no module 'own_adapter.deeper'"),
        ("own_adapter:MyAdaptor", r"has no 'MyAdaptor'\. Did you mean 'MyAdapter'"),
        ("own_adapter:Plain", r"Plain is a class, but no AdaptedArray"),
        (
            "own_adapter:Without",
            r"give Without a class method `make\(w, \*, key, layout\)`, which returns an",
        ),
        ("own_adapter:of_two", r"this cannot be called so: got an unexpected keyword argument 'layout'"),
        ("own_adapter:number", r"this cannot be called so: 3 is not a callable object"),
    ],
)
def test_what_cannot_make_adapters(text, message):
    with pytest.raises(FinetuneError, match=message):
        make_of(text)


def test_errors_within_the_users_module_are_its_own():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        make_of("broken_adapter:A")


def test_what_make_returns_is_checked_before_the_training(run, tmp_path, monkeypatch):
    status, told = run("llama", "text", "--adapter=own_adapter:the_weight", "--quantize=none")
    assert status == 2
    assert "`make` must return an AdaptedArray of the shape of model.layers.0" in told
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(running, "load", lambda path: pytest.fail("the checkpoint was read"))
    assert run("llama", "text", "--adapter=own_adapter:of_two")[0] == 2


def test_options_of_lora_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--model=m", "--data=d", "--output=o", "--adapter=a:B", "--rank=4", "--dora"])
    assert (
        "--rank, --dora cannot be used with --adapter: these are options of LoRA" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):  # for another reason
        main(["--model=m", "--data=d", "--output=o", "--adapter=lora", "--invocation=x", "--dora"])
    assert "--dora cannot be used with --invocation" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("llama", "own_adapter:MyAdapter"), ("llama", "own_adapter:make_adapter"), ("gpt2", "delora")],
)
def test_it_goes_on_with_our_own_file(kind, adapter, run, tmp_path):
    """From where it stood, twice; also what was made by a function, or by a method that PEFT's files lack."""
    common = [kind, "text", "--quantize=none", "--steps=2"]
    assert run(*common, f"--adapter={adapter}", output="0")[0] == 0
    for before, after in ((0, 1), (1, 2)):
        status, told = run(*common, f"--adapter={tmp_path / str(before)}", "--merge", output=str(after))
        assert status == 0, told
        assert f"Goes on with the adapter in {tmp_path / str(before)}; the optimiser starts anew." in told
        assert f"Adapter: {tmp_path / str(after) / 'adapters.safetensors'}" in told
        lines = (tmp_path / str(before) / "metrics.jsonl").read_text().splitlines()
        ended, begins = json.loads(lines[-1])["held_out"], log_of(tmp_path / str(after))[0]["held_out"]
        assert begins["loss"] == pytest.approx(ended["loss"], rel=1e-5)
    status, told = run(*common, f"--adapter={tmp_path / '2'}", "--freeze-a", output="3")
    assert status == 2
    assert "which is of another type: these are options of LoRA" in told
