"""`--task classify` for rows of words: labels of each."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import quaxlike as ql
from quaxlike.lm import load, peft
from quaxlike.lm.finetune.__main__ import main
from quaxlike.lm.finetune.data import Example, Tokens, collate
from quaxlike.lm.finetune.rows import words_of
from quaxlike.lm.finetune.settings import FinetuneError
from quaxlike.lm.finetune.tasks import WordClasses, begun, task_for
from quaxlike.lm.folders.labels import Labels
from quaxlike.lm.models import with_classifier
from tests.lm.finetune.test_finetune import WORDS, checkpoint, count, write
from tests.lm.finetune.test_train import decoder

pytestmark = pytest.mark.usefixtures("default_promotion")

ROWS = [
    {"tokens": count(i % 10, 4).split(), "ner_tags": ["odd" if (i + j) % 2 else "even" for j in range(4)]}
    for i in range(40)
]


@pytest.fixture
def pieces(tmp_path):
    """A tokeniser with pieces of words, and a token before and after each text."""
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "one", "##ty", "two", "##s", "##x", "."]
    tokenizer = Tokenizer(models.WordPiece({x: i for i, x in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return lambda most: Tokens(tmp_path, {"vocab_size": 9}, most)


def test_the_first_piece_of_a_word_is_learned(pieces):
    task = WordClasses(Labels(("O", "B")))
    row = {"tokens": ["onety", "twosx", "", ".", "two.one"], "ner_tags": ["B", 0, "B", -100, "O"]}
    found = task.encode(row, pieces(32))
    assert found.texts == ([1, 3, 4, 5, 6, 7, 8, 5, 8, 3, 2],)
    assert found.learned == [x == "1" for x in "01010001000"]
    assert [x for x, is_learned in zip(found.label, found.learned, strict=True) if is_learned] == [1, 0, 0]
    cut = task.encode(row, pieces(5))
    assert (cut.texts, cut.learned, cut.was_cut) == (([1, 3, 4, 5, 2],), [x == "1" for x in "01010"], True)
    assert task.encode({"tokens": ["", "one", "two"], "tags": [1, -100, 1]}, pieces(3)) is None
    assert not any(task.encode({"tokens": ["one"], "tags": [-100]}, pieces(8)).learned)


@pytest.mark.slow
def test_losses_and_metrics():
    """Of the learned tokens of a padded batch, as transformers computes them."""
    task = WordClasses(Labels(("a", "b")))
    examples = [
        Example(([1, 2, 3],), [True, False, True], [0, -100, 1]), Example(([1],), [True], [1])
    ]  # fmt: skip
    batch = collate(examples, 16)
    assert batch.labels.shape == (2, 16)
    outputs = np.zeros((2, 16, 2), np.float32)
    outputs[0, 0], outputs[0, 2], outputs[1, 0] = [1.0, -2.0], [0.5, 0.25], [3.0, 0.0]
    wrong = np.sum(np.log1p(np.exp([-3.0, 0.25, 3.0]))) / 3
    assert task.weight(batch) == 3
    assert task.metrics(outputs, batch) == {
        "accuracy": pytest.approx(1 / 3),
        "loss": pytest.approx(wrong, rel=1e-6),
    }


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"words": ["a"], "labels": [1], "ner_tags": [2]}, [1]),
        ({"id": "0", "tokens": ["a"], "pos_tags": [1], "chunk_tags": [2], "ner_tags": [3]}, [3]),
        ({"tokens": ["a"], "pos_tags": ["NN"], "ner_tags": None}, ["NN"]),
    ],
)
def test_rows(row, labels):
    assert words_of(row) == (["a"], labels)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"tokens": ["a"], "pos_tags": [1], "chunk_tags": [2]},
            "pos_tags and chunk_tags are labels: keep",
        ),
        ({"tokens": ["a"]}, "there must be 'labels' for 'tokens', or entries like 'ner_tags'; found tokens"),
        ({"tokens": ["a"], "labels": [1, 2]}, "'labels' must be a label for each of 1 words; found 2 labels"),
        ({"tokens": ["a", 3], "labels": [1, 2]}, "'tokens' must be a list of words; found"),
        ({"tokens": ["a"], "labels": [1], "lemmas": ["a"]}, "'lemmas' is not used beside tokens, labels"),
        ({"text": "a", "labels": [1]}, "there is no list of words 'tokens'; there are text, labels"),
    ],
)
def test_rows_that_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        words_of(row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tags", "options", "names"),
    [
        ([["b", "a"], ["a", "b"]], {}, ("a", "b")),
        ([[2, 0], [0, -100]], {}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ([["b", "b"]], {"labels": ("b", "c")}, ("b", "c")),
    ],
)
def test_labels_of_the_data(tags, options, names, classify_settings, base):
    """They settle the new head; the settings with them need no data to make it again."""
    given = classify_settings([{"tokens": ["one", "two"], "tags": x} for x in tags], **options)
    model, data = begun(*base, given.train, given.data)
    assert model.labels == Labels(names)
    assert model.of_tokens
    assert data.task.label_words
    assert isinstance(task_for(model, given.train, data), WordClasses)
    given.data.data.unlink()
    again, _ = begun(*base, given.train, data)
    np.testing.assert_array_equal(again.score.weight, model.score.weight)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([ROWS[0], {"text": "a", "label": "odd"}], {}, "rows of words and rows of texts"),
        (ROWS, {"label_words": False}, "rows of words: leave out --no-label-words"),
        ([{"text": "a", "label": "b"}] * 2, {"label_words": True}, "rows of texts: leave out --label-words"),
        (ROWS, {"problem_type": "regression"}, "A word has one label; found --problem-type regression"),
        ([{"tokens": ["a"], "tags": [0.5]}], {}, "must be the name of a label; found 0.5"),
        ([{"tokens": ["a"], "tags": ["x"]}], {}, "has one label, x: there must be two"),
    ],
)
def test_what_settles_nothing(lines, options, message, classify_settings, base):
    given = classify_settings(lines, **options)
    with pytest.raises(FinetuneError, match=message):
        begun(*base, given.train, given.data)


def test_models_that_classify_already(classify_settings, pieces):
    """Take their own kind of rows alone."""
    of_words, of_texts = (
        with_classifier(decoder(), ["a", "b"], of_tokens=x, key=jax.random.key(0)) for x in (True, False)
    )
    assert jax.eval_shape(of_words, jnp.arange(4), jnp.ones(4, bool)).shape == (4, 2)
    given = classify_settings(ROWS, label_words=True)
    with pytest.raises(FinetuneError, match="classifies texts: leave out --label-words"):
        begun(of_texts, {}, given.train, given.data)
    given = classify_settings(ROWS, labels=("x", "y"))
    with pytest.raises(FinetuneError, match="tells a, b apart, and --labels names other ones"):
        begun(of_words, {}, given.train, given.data)
    data = dataclasses.replace(given.data, task=None)
    assert isinstance(task_for(of_words, given.train, data), WordClasses)
    with pytest.raises(ValueError, match="a row of words is for a model that classifies tokens"):
        task_for(of_texts, given.train, data).encode(ROWS[0], pieces(9))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "encoder", "modern"])
def test_a_run_learns_the_labels(kind, tmp_path):
    model = checkpoint(tmp_path / kind, kind, head_dim=None, eos_token_id=None)
    data, out = write(tmp_path / "data.jsonl", ROWS), tmp_path / "out"
    command = [f"--model={model}", f"--data={data}", f"--output={out}", "--task=classify", "--steps=15"]
    more = ["--batch-size=8", "--rank=4", "--learning-rate=0.01", "--held-out=0.2", "--quantize=none"]
    assert main([*command, *more, "--merge", "--max-length=16"]) == 0
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log[0]["held_out"].keys() == {"accuracy", "loss"}
    assert log[-1]["loss"] < 0.6 * log[1]["loss"]
    config = json.loads((out / "adapter_config.json").read_text())
    merged, written = load(out / "merged")
    assert config["task_type"] == "TOKEN_CLS"
    assert {x.split(".")[0] for x in config["modules_to_save"]} == {*merged.head_parts}
    about = json.loads((out / "run.json").read_text())
    assert (about["labels"], about["label_words"]) == (["even", "odd"], True)
    assert written["architectures"][0].endswith("ForTokenClassification")
    assert written["id2label"] == {"0": "even", "1": "odd"}
    new = with_classifier(load(model)[0], ["even", "odd"], of_tokens=True, key=jax.random.key(5))
    adapted = peft.load_adapter(out, new)
    ids, seen = jnp.arange(4, 4 + len(WORDS)), jnp.ones(len(WORDS), bool)
    np.testing.assert_allclose(merged(ids, seen), ql.quaxify(adapted)(ids, seen), atol=2e-4)
    second = [f"--data={data}", "--steps=2", "--batch-size=8", "--quantize=none", "--max-length=16"]
    goes_on = [f"--model={model}", f"--output={tmp_path / 'a'}", "--task=classify", f"--adapter={out}"]
    assert main([*second, *goes_on]) == 0
    assert main([*second, f"--model={out / 'merged'}", f"--output={tmp_path / 'b'}"]) == 0
