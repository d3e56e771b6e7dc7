"""`models.save` over another checkpoint, and what it copies."""

import json
import os
import shutil

import jax
import pytest

from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.lm import load, save
from tests.fixtures import fixture

_MINE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tools.jinja")


@pytest.fixture(scope="module")
def model():
    return load(fixture("peft_llama/base"))[0]


def _source(folder, label, names):
    """A checkpoint whose files say whose they are."""
    shutil.copytree(fixture("peft_llama/base"), folder)
    (folder / "config.json").chmod(0o644)
    config = json.loads((folder / "config.json").read_text()) | {"of": label}
    (folder / "config.json").write_text(json.dumps(config))
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(label))
    return folder


def _owners(folder):
    """By name, whose the files of a folder are."""
    texts = {str(p.relative_to(folder)): p for p in folder.rglob("*.*") if p.suffix in (".json", ".jinja")}
    found = {name: json.loads(path.read_text()) for name, path in texts.items()}
    return {name: x["of"] if isinstance(x, dict) else x for name, x in found.items()}


@pytest.mark.slow
def test_nothing_of_another_model_stays(model, tmp_path):
    a = _source(tmp_path / "a", "a", [*_MINE, *_TEMPLATES])
    b = _source(tmp_path / "b", "b", _MINE[:2])
    save(tmp_path / "out", model, a)
    (tmp_path / "out" / "quantize_config.json").write_text('{"bits": 4, "of": "a"}')
    (tmp_path / "out" / "notes.txt").write_text("of the user")
    assert set(_owners(tmp_path / "out").values()) == {"a"}
    save(tmp_path / "out", model, b)
    assert _owners(tmp_path / "out") == dict.fromkeys(["config.json", *_MINE[:2]], "b")
    assert (tmp_path / "out" / "notes.txt").exists()
    save(tmp_path / "out", model, tmp_path / "out")  # over itself
    assert _owners(tmp_path / "out") == dict.fromkeys(["config.json", *_MINE[:2]], "b")


_MODULES = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "3_Normalize"}]
_OF_MODULES = (
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
)


def test_modules_of_sentence_transformers(model, tmp_path):
    """With the folders that the list names, those without files too; nothing of them stays beside others."""
    a = _source(tmp_path / "a", "a", ["tokenizer.json", *_OF_MODULES, "unnamed/config.json"])
    (a / "modules.json").write_text(json.dumps(_MODULES))
    (a / "3_Normalize").mkdir()
    save(tmp_path / "out", model, a)
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", *_OF_MODULES}
    assert (tmp_path / "out" / "3_Normalize").is_dir()
    assert json.loads((tmp_path / "out" / "modules.json").read_text()) == _MODULES
    b = _source(tmp_path / "b", "b", ["tokenizer.json"])
    save(tmp_path / "out", model, b)
    assert _owners(tmp_path / "out") == dict.fromkeys(["config.json", "tokenizer.json"], "b")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"path": "../b"}]', "modules must name folders inside of this one; found .*b"),
        ('[{"path": "/etc"}]', "modules must name folders inside of this one; found .*etc"),
        ('[{"name": "0"}]', "modules must name folders inside of this one; found .*name"),
        ('{"path": "1_Pooling"}', "the list of modules must be a JSON list, found dict"),
        ("[", "the list of modules is not JSON"),
    ],
)
def test_modules_outside_of_the_folder_are_refused(text, problem, model, tmp_path):
    source = _source(tmp_path / "source", "a", ["tokenizer.json"])
    (source / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"modules\.json: {problem}"):
        save(tmp_path / "out", model, source)
    assert not (tmp_path / "out").exists()


def _stop_at(monkeypatch, n):
    """From now on, the n-th change of a folder's names stops the process, as far as a test can."""
    left = iter(range(n))

    def stopping(change):
        def changed(*args, **kwargs):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return change(*args, **kwargs)

        return changed

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, stopping(getattr(os, name)))


@pytest.mark.slow
def test_weights_never_lie_beside_the_tokeniser_of_others(model, tmp_path, monkeypatch):
    a = _source(tmp_path / "a", "a", [*_MINE, *_TEMPLATES])
    b = _source(tmp_path / "b", "b", [*_MINE, "merges.txt"])
    other, seen = jax.tree.map(lambda x: 2 * x, model), set()
    for n in range(100):
        out = tmp_path / f"out{n}"
        save(out, model, a)
        _stop_at(monkeypatch, n)
        try:
            save(out, other, b)
        except KeyboardInterrupt:
            monkeypatch.undo()
        else:
            monkeypatch.undo()
            break
        config = lm.open_checkpoint(out).config["of"]
        owners = {name: x for name, x in _owners(out).items() if name not in ("config.json", *_hidden(out))}
        assert set(owners.values()) <= {config}, n
        seen.add((config, "tokenizer.json" in owners))
    assert {("a", True), ("a", False), ("b", False)} <= seen
    assert set(_owners(out).values()) == {"b"}


def _hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_full_disk_leaves_the_old_model(model, tmp_path, monkeypatch):
    a, b = _source(tmp_path / "a", "a", _MINE), _source(tmp_path / "b", "b", _MINE)
    save(tmp_path / "out", model, a)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*config\.json"):
        save(tmp_path / "out", model, b)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_only_the_names_of_transformers_are_copied(model, tmp_path):
    names = ["adapter_config.json", "trainer_state.json", "quantize_config.json", "index.json", "x.jinja"]
    source = _source(tmp_path / "source", "a", ["tokenizer.json"])
    for name in names:
        (source / name).write_text("{}")
    (source / "extra.json").mkdir()
    os.mkfifo(source / "notes.txt")
    save(tmp_path / "out", model, source)
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("kind", ["link", "broken", "loop", "fifo", "folder", "template"])
def test_what_is_no_file_of_the_folder_is_refused(kind, model, tmp_path):
    source = _source(tmp_path / "source", "a", ["tokenizer.json", _TEMPLATES[1]])
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = source / (_TEMPLATES[1] if kind == "template" else "vocab.json")
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to({"broken": source / "none", "loop": path}.get(kind, secret))
    with pytest.raises(
        CheckpointError, match=rf"{path.name}: (links to .* outside of|is not a regular file)"
    ):
        save(tmp_path / "out", model, source)
    assert not (tmp_path / "out").exists()


def test_links_within_the_folder_and_into_a_cache(model, tmp_path):
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/0"
    blobs.mkdir(parents=True)
    _source(snapshot, "a", [])
    (blobs / "1234").write_text('"a"')
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1234")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    save(tmp_path / "out", model, snapshot)
    for name in ("tokenizer.json", "vocab.json"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_text() == '"a"'


def test_a_folder_that_links_to_another(model, tmp_path):
    source = _source(tmp_path / "source", "a", ["tokenizer.json"])
    (tmp_path / "link").symlink_to(source)
    save(tmp_path / "out", model, tmp_path / "link")
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_target_that_is_a_link(model, tmp_path):
    """What it points to is replaced, as with weights."""
    a, b = (_source(tmp_path / x, x, ["tokenizer.json"]) for x in "ab")
    save(tmp_path / "out", model, a)
    os.rename(tmp_path / "out" / "tokenizer.json", tmp_path / "elsewhere.json")
    (tmp_path / "out" / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    save(tmp_path / "out", model, b)
    assert (tmp_path / "elsewhere.json").read_text() == '"b"'
