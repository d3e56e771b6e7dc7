"""Models whose vocabulary grew or shrank: resized, and written with a configuration that fits."""

import json
import shutil

import equinox as eqx
import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError
from quaxlike.lm import load, resize_vocabulary, save
from quaxlike.lm.models import Bert, BertConfig, BertForSequenceClassification
from quaxlike.lm.models.vocabulary import with_new_embeddings
from quaxlike.surgery.trees import named_arrays
from tests.fixtures import fixture
from tests.lm.models.fixtures import folder
from tests.samples import array, normal

IDS, SEEN = array(np.arange(6)), array(np.ones(6, bool))


def logits(model):
    with ql.on_materialise("error"):
        return np.asarray(ql.quaxify(model)(IDS, SEEN))


def vocabulary(directory):
    return json.loads((directory / "config.json").read_text())["vocab_size"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("qwen2", 11), ("llama_llama3", 111)])
def test_what_is_resized_can_be_loaded(name, n, tmp_path):
    """With a tied output layer, and with one of its own. What is loaded is not marked as new."""
    base, _ = load(folder(name))
    before = logits(base)
    model = resize_vocabulary(base, n)
    save(tmp_path, model, folder(name))
    assert vocabulary(tmp_path) == n
    again, _ = load(tmp_path)
    assert model.config.new_embeddings
    assert not again.config.new_embeddings
    assert jax.tree.structure(with_new_embeddings(again, n)) == jax.tree.structure(model)
    kept = min(n, before.shape[1])
    np.testing.assert_array_equal(logits(again), logits(model))
    np.testing.assert_allclose(logits(model)[:, :kept], before[:, :kept], atol=1e-5)
    if n > kept:
        np.testing.assert_allclose(logits(model)[:, kept:].T, [before.mean(1)] * (n - kept), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama_llama3"])
def test_arrays_of_the_users_own_decide_the_size(name, tmp_path):
    base, _ = load(folder(name))
    new = {"model.embed_tokens.weight": normal(120, 48)}
    if "lm_head.weight" in named_arrays(base):
        new["lm_head.weight"] = normal(120, 48, seed=1)
    model = eqx.tree_at(
        lambda model: [model.embedding, *([model.lm_head.weight] if model.lm_head else [])],
        base,
        list(new.values()),
    )
    save(tmp_path, model, folder(name))
    assert vocabulary(tmp_path) == 120
    np.testing.assert_array_equal(load(tmp_path)[0].embedding, new["model.embed_tokens.weight"])


def test_arrays_that_contradict_each_other_are_refused(tmp_path):
    base, _ = load(folder("llama_llama3"))
    model = eqx.tree_at(lambda model: model.embedding, base, normal(120, 48))
    with pytest.raises(
        CheckpointError,
        match=r"lm_head\.weight is of shape \(96, 48\), .* has \(120, 48\).*resize_vocabulary",
    ):
        save(tmp_path / "out", model, folder("llama_llama3"))
    up = lambda model: model.layers[1].mlp.up_proj.weight
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is of shape \(3, 48\), .* has \(\d+, 48\)"):
        save(tmp_path / "out", eqx.tree_at(up, base, normal(3, 48)), folder("llama_llama3"))
    assert not (tmp_path / "out").exists()


def test_a_special_token_that_is_left_out_is_refused(tmp_path):
    base, _ = load(folder("qwen2"))
    with pytest.raises(CheckpointError, match=r"a vocabulary of 2 tokens, and .* has eos_token_id=2"):
        save(tmp_path / "out", resize_vocabulary(base, 2), folder("qwen2"))


@pytest.mark.slow
def test_an_output_layer_that_was_tied(tmp_path):
    base, _ = load(folder("llama_llama3"))
    tied = eqx.tree_at(lambda model: model.lm_head, base, None)
    save(tmp_path, tied, folder("llama_llama3"))
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    np.testing.assert_array_equal(logits(load(tmp_path)[0]), logits(tied))


@pytest.mark.slow
def test_encoders(tmp_path):
    """With other positions and classes, too."""
    source = tmp_path / "source"
    shutil.copytree(fixture("peft_bert/base"), source)
    config = json.loads((source / "config.json").read_text())
    size = config["hidden_size"]
    base, _ = load(source)
    model = resize_vocabulary(base, config["vocab_size"] + 5)
    where = lambda model: (
        model.bert.embeddings.position_embeddings.weight, model.classifier.weight, model.classifier.bias
    )  # fmt: skip
    model = eqx.tree_at(where, model, (normal(7, size), normal(5, size), normal(5)))
    save(tmp_path / "out", model, source)
    again, written = load(tmp_path / "out")
    assert written["vocab_size"] == config["vocab_size"] + 5
    assert written["max_position_embeddings"] == 7
    assert written["id2label"]["4"] == "LABEL_4"
    assert written["label2id"]["LABEL_4"] == 4
    seen = IDS < 6
    np.testing.assert_array_equal(again(IDS, seen), model(IDS, seen))


def _adapted(kind):
    key, options = jax.random.key(0), {"rank": 2, "init": "gaussian"}
    base, _ = load(folder("qwen2"))
    separate = base.with_separate_head()
    match kind:
        case "embedding":
            return ql.loraify(base, where=["embed_tokens"], key=key, **options)
        case "embedding, DoRA":
            return ql.loraify(base, where=["embed_tokens"], dora=True, key=key, **options)
        case "untied":
            return ql.loraify(separate, where=["embed_tokens", "lm_head"], key=key, **options)
        case "head, DoRA":
            return ql.loraify(separate, where=["lm_head"], dora=True, lora_bias=True, key=key, **options)
        case "in full":
            model = ql.loraify(base, where=["q_proj"], modules_to_save=["embed_tokens"], key=key, **options)
        case "rows":
            model = ql.loraify(base, where=["q_proj"], trainable_token_indices=[3, 90], key=key, **options)
    return model


def _moved(x):
    """Adapters that add something."""
    match x:
        case ql.LoraArray():
            return x.replace(b=normal(*x.b.shape, seed=1))
        case ql.arrays.lora.TrainableRows():
            return ql.arrays.lora.TrainableRows(x.w, x.rows + 1, x.indices)
        case ql.arrays.lora.LoraBias():
            return ql.arrays.lora.LoraBias(x.w, x.b + 1, x.scaling)
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("rows", "in full"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("embedding", "embedding, DoRA", "untied", "head, DoRA")
        ),
    ],
)
def test_adapters_change_along(kind):
    model = jax.tree.map(_moved, _adapted(kind), is_leaf=ql.is_value)
    before, merged = logits(model), named_arrays(ql.merge(model))
    for n in (93, 103):
        resized = resize_vocabulary(model, n)
        kinds = lambda model: {name: type(x) for name, x in named_arrays(model).items()}
        assert kinds(resized) == kinds(model)
        now = named_arrays(ql.merge(resized))
        kept = min(n, 100)
        for name in now:
            np.testing.assert_allclose(now[name][:kept], merged[name][:kept], atol=1e-4)
        np.testing.assert_allclose(logits(resized)[:, :kept], before[:, :kept], atol=2e-3)
        mean = merged["model.embed_tokens.weight"].mean(0, keepdims=True)
        assert np.abs(now["model.embed_tokens.weight"][kept:] - mean).max(initial=0) < 1e-4
        if "lm_head.weight" in now and kind == "untied":  # one array
            np.testing.assert_array_equal(now["lm_head.weight"], now["model.embed_tokens.weight"])


def test_a_trained_token_that_is_left_out_is_refused():
    with pytest.raises(ValueError, match=r"embed_tokens\.weight cannot have 50 rows: its rows \[3, 90\] are"):
        resize_vocabulary(_adapted("rows"), 50)


@pytest.mark.slow
def test_adapters_of_other_types_say_how_they_change():
    class Shifted(ql.AdaptedArray):
        shift: jax.Array

        def materialise(self):
            return ql.materialise(self.base) + self.shift[:, None]

    class Resized(Shifted):
        def resized(self, axis, resize):
            return self.replace(w=resize(self.w, axis), shift=resize(self.shift, axis))

    x = Resized(normal(7, 4), normal(7, seed=1))
    for n in (5, 9):
        (y,) = resize_vocabulary({"embed_tokens.weight": x}, n).values()
        assert (type(y), y.shape) == (Resized, (n, 4))
        np.testing.assert_array_equal(y.merged()[:5], x.merged()[:5])
        np.testing.assert_allclose(y.shift[7:], np.broadcast_to(np.mean(x.shift), max(n - 7, 0)), rtol=1e-6)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: Shifted gets no new rows"):
        resize_vocabulary({"embed_tokens.weight": Shifted(x.w, x.shift)}, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "options"),
    [("nf4", {"block_size": 32}), ("nf4", {"double_quant": True}), ("q8_0", {}), ("int8", {})],
)
def test_rows_of_quantised_embeddings_keep_their_codes(scheme, options):
    """NF4 in whole rows, and in blocks that reach over rows of 48."""
    table = normal(96, 32 if "block_size" in options else 48)
    model = ql.quantize({"model.embed_tokens.weight": table}, scheme, where=["embed_tokens"], **options)
    (was,) = model.values()
    dense, mean = ql.materialise(was), ql.materialise(was).mean(0, keepdims=True)
    for n in (90, 99):
        (x,) = resize_vocabulary(model, n).values()
        assert type(x) is type(was)
        assert x.shape == (n, table.shape[1])
        kept = min(n, 93 if scheme == "nf4" else 96)
        allowed = 0.02 if "double_quant" in options else 0  # their scales are rounded again
        np.testing.assert_allclose(ql.materialise(x)[:kept], dense[:kept], rtol=allowed)
        assert np.abs(ql.materialise(x)[96:] - mean).max(initial=0) <= 0.2 * np.abs(mean).max()


@pytest.mark.slow
def test_stacked_layers_and_encoders():
    base, _ = load(folder("qwen2"))
    model = resize_vocabulary(base.stacked(), 110)
    assert jax.tree.structure(model) == jax.tree.structure(resize_vocabulary(base, 110).stacked())
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, vocab_size=9, max_position_embeddings=8)
    for kind in (Bert, BertForSequenceClassification):
        encoder = resize_vocabulary(kind(config, key=jax.random.key(0)), 12)
        (embedding,) = (x for name, x in named_arrays(encoder).items() if "word_embeddings" in name)
        assert embedding.shape == (12, 8)


def test_models_without_a_vocabulary():
    mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"no embedding of tokens to resize: it has layers\.0\.weight"):
        resize_vocabulary(mlp, 10)
    with pytest.raises(ValueError, match="resize_vocabulary takes a n of at least 1; found 0"):
        resize_vocabulary(mlp, 0)
