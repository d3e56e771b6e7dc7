"""Examples and batches of a fine-tuning run."""

import gzip
import io
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from quaxlike.lm.finetune import data, report
from quaxlike.lm.finetune.run import read_data
from quaxlike.lm.finetune.settings import DataSettings, FinetuneError, TrainSettings
from quaxlike.lm.finetune.tasks import NextToken, Preferences
from tests.lm.finetune.test_finetune import LINES, checkpoint, count, write
from tests.lm.test_marks import E, tokeniser

pytestmark = pytest.mark.usefixtures("default_promotion")


@pytest.mark.parametrize("option", ["--data", "--eval-data"])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"has no examples. Add examples."),
        (
            [{"prompt": count(0, 40), "completion": "one"}] * 2,
            r"has no examples: its 2 lines were left out, .* Add examples, or raise --max-length.",
        ),
    ],
)
def test_a_file_without_examples_is_named(option, lines, message, tmp_path):
    model = checkpoint(tmp_path / "llama", "llama")
    tokens = data.Tokens(model, json.loads((model / "config.json").read_text()), 32)
    good, bad = write(tmp_path / "good.jsonl", LINES["text"]), write(tmp_path / "bad.jsonl", lines)
    files = DataSettings(bad) if option == "--data" else DataSettings(good, eval_data=bad)
    with pytest.raises(FinetuneError, match=rf"bad\.jsonl \({option}\) {message}$"):
        read_data(TrainSettings(model), files, NextToken(), tokens, report.console_on(io.StringIO()))


def read(path, lines):
    path.write_bytes(lines)
    return data.read_examples(path, lambda fields: data.Example(([fields["x"]],))).examples


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("start", [b"", b"\n ", b"\xef\xbb\xbf"])
def test_a_file_that_is_one_array(start, indent, tmp_path):
    """As those of Alpaca and ShareGPT."""
    rows = start + json.dumps([{"x": 1}, {"x": 2}], indent=indent).encode()
    assert [x.texts for x in read(tmp_path / "data.json", rows)] == [([1],), ([2],)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"x": 1},\n{"x": }]', r"data: not JSON: Expecting value, at line 2, column 7$"),
        (b'[{"x": 1}, 5]', r"data, row 2: expected a JSON object; found '5'"),
        (b"PAR1\x00", "the file is Parquet, which `datasets"),
        (gzip.compress(b"{}", mtime=0), "the file is compressed by gzip: use the output of `zcat`"),
    ],
)
def test_files_of_other_kinds(content, message, tmp_path):
    with pytest.raises(FinetuneError, match=message):
        read(tmp_path / "data", content)


@pytest.mark.parametrize("answer", ["\N{GRINNING FACE}", "a \N{GRINNING FACE}", "\u4f60\u597d", "abc"])
def test_every_token_of_a_character_is_learned(answer, tmp_path):
    """Tokenisers of bytes have several tokens for a character, and a span can end behind it."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / "tokenizer.json"))
    tokens = data.Tokens(tmp_path, {"vocab_size": len(letters)}, 64)
    text = f"\u4f60{answer}\u597d"
    ids, learned = tokens.spans(text, [(1, 1 + len(answer))])
    before, size = 3, len(answer.encode())
    assert len(ids) == before + size + 3
    assert learned == [before <= i < before + size for i in range(len(ids))]


def talk(answer):
    return [{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("task", "rows", "ends", "told"),
    [
        (NextToken(), [{"text": "one two"}, {"prompt": "one", "completion": "two"}], [], "2 of 2"),
        (NextToken(), [{"text": "one two"}, {"prompt": "one", "completion": "two"}], [E], ""),
        (NextToken(), [{"text": count(0, 80)}], [], ""),  # it is cut
        (NextToken(), [{"messages": talk(x)} for x in ("two", "two </s>")], [E], "1 of 2"),
        (Preferences(), [{"chosen": talk("two"), "rejected": talk("three")}], [E], "1 of 1"),
        (Preferences(), [{"chosen": talk("two </s>"), "rejected": talk("three </s>")}], [E], ""),
    ],
)
def test_texts_without_an_end_are_told(task, rows, ends, told, tmp_path):
    """A model that learns none does not stop."""
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokens = tokeniser(tmp_path, "$A", {"eos_token_id": ends}, tokenizer_config={"chat_template": template})
    console, path = report.console_on(io.StringIO()), write(tmp_path / "data.jsonl", rows)
    read_data(TrainSettings(tmp_path), DataSettings(path, held_out=0.0), task, tokens, console)
    warned = console.file.getvalue()
    assert ("are learned without an end" in warned) == bool(told)
    assert f"Warning: {path}: {told}" in warned or not told


def test_batches_go_through_each_epoch_once():
    order = [data.chosen_for(i, 10, 3, seed=1) for i in range(6)]
    for epoch in (order[:3], order[3:]):
        assert len(set(np.concatenate(epoch).tolist())) == 9
    assert not np.array_equal(np.concatenate(order[:3]), np.concatenate(order[3:]))
    np.testing.assert_array_equal(data.chosen_for(4, 10, 3, seed=1), order[4])


def test_prompts_are_not_learned(tmp_path):
    model = checkpoint(tmp_path / "llama", "llama", eos_token_id=3)
    config = json.loads((model / "config.json").read_text())
    fields = {"prompt": "one two", "completion": "three four"}
    tokens = data.Tokens(model, config, 6)
    example = NextToken().encode(fields, tokens)
    batch = data.collate([example], 6)
    np.testing.assert_array_equal(batch.ids[0, 0], [5, 6, 7, 8, 3, 0])
    np.testing.assert_array_equal(batch.learned[0, 0], [0, 0, 1, 1, 1, 0])
    assert NextToken().encode(fields, data.Tokens(model, config, 2)) is None


def test_cut_texts_keep_their_ends(tmp_path):
    model = checkpoint(tmp_path / "bert", "bert")
    tokens = data.Tokens(model, json.loads((model / "config.json").read_text()), 5)
    assert tokens.cut("one two three four") == ([2, 5, 6, 7, 3], True)
    assert tokens.cut("one two three") == ([2, 5, 6, 7, 3], False)
