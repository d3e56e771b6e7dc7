"""Where texts begin and end, for tokenisers × forms of rows, which may bring their own marks."""

import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quaxlike.files import CheckpointError
from quaxlike.lm.finetune.data import Tokens
from quaxlike.lm.finetune.tasks import NextToken, Preferences
from quaxlike.lm.marks import Marks
from quaxlike.lm.text import TextTokenizer

WORDS = ["<unk>", "<s>", "</s>", "<end>", "one", "two", "three"]
B, E, STOP, ONE, TWO, THREE = range(1, 7)


def tokeniser(folder, single, config=None, **files):
    """A folder with a tokeniser that puts these marks around a text."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if single is not None:
        made.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(mark, WORDS.index(mark)) for mark in WORDS[1:4]]
        )
    made.add_special_tokens(WORDS[:4])
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokens(folder, {"vocab_size": 7, **({"eos_token_id": E} if config is None else config)}, 64)


TOKENISERS = {
    "no marks": (None, []),
    "empty template": ("$A", []),
    "begins": ("<s> $A", [B]),
    "ends": ("$A </s>", []),
    "begins and ends": ("<s> $A </s>", [B]),
}
ROWS = {
    "text": ({"text": "one two"}, [ONE, TWO, E], 1),
    "text with an end": ({"text": "one two</s>"}, [ONE, TWO, E], 1),
    "prompt and completion": ({"prompt": "one", "completion": "two three"}, [ONE, TWO, THREE, E], 1),
    "completion with an end": ({"prompt": "one", "completion": "two </s>"}, [ONE, TWO, E], 1),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", TOKENISERS)
def test_tokenisers_and_forms_of_rows(kind, row, own, tmp_path):
    """`own`: the row brings its `<s>`, which is then the only one."""
    single, begin = TOKENISERS[kind]
    fields, expected, prompt = ROWS[row]
    if own:
        first = next(iter(fields))
        fields, begin = {**fields, first: "<s>" + fields[first]}, [B]
    example = NextToken().encode(fields, tokeniser(tmp_path, single))
    assert example.texts == (begin + expected,)
    if "prompt" in fields:
        assert example.learned == [i >= len(begin) + prompt for i in range(len(begin + expected))]


@pytest.mark.parametrize("own", ["", "<s>"])
@pytest.mark.parametrize("kind", TOKENISERS)
def test_prompts_and_preferences(kind, own, tmp_path):
    single, begin = TOKENISERS[kind]
    begin = [B] if own else begin
    tokens = tokeniser(tmp_path, single)
    assert tokens.marks.begun(tokens.ids(own + "one two")) == [*begin, ONE, TWO]
    example = Preferences().encode({"prompt": own + "one", "chosen": "two", "rejected": "three </s>"}, tokens)
    assert example.texts == ([*begin, ONE, TWO, E], [*begin, ONE, THREE, E])


GENERATION, SETTINGS = {"eos_token_id": [STOP, E]}, {"eos_token": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("single", "config", "files", "ends", "differ"),
    [
        ("<s> $A", {}, {}, [], False),
        ("<s> $A", {"eos_token_id": E}, {}, [E], False),
        ("<s> $A", {}, {"generation_config": GENERATION}, [STOP, E], False),
        ("<s> $A", {"eos_token_id": [STOP]}, {"generation_config": GENERATION}, [STOP, E], False),
        ("<s> $A", {"eos_token_id": E}, {"generation_config": GENERATION}, [STOP, E], True),
        ("<s> $A", {}, {"tokenizer_config": SETTINGS}, [E], False),
        ("<s> $A", {}, {"special_tokens_map": SETTINGS}, [E], False),
        ("<s> $A", {"eos_token_id": E}, {"tokenizer_config": SETTINGS}, [E], False),
        ("<s> $A", {"eos_token_id": STOP}, {"tokenizer_config": SETTINGS}, [STOP], True),
        ("<s> $A </s>", {}, {}, [E], False),
        ("<s> $A </s>", {"eos_token_id": STOP}, {}, [STOP], True),
    ],
)
def test_the_end_stands_in_one_of_several_files(single, config, files, ends, differ, tmp_path):
    tokens = tokeniser(tmp_path, single, config, **files)
    assert tokens.marks.ends == ends
    assert bool(tokens.marks.differ) == differ
    assert tokens.marks == Marks.of(TextTokenizer(tmp_path), tmp_path, config)  # of `generate`
    example = NextToken().encode({"prompt": "one", "completion": "two"}, tokens)
    assert example.texts == ([B, ONE, TWO, *ends[:1]],)


@pytest.mark.parametrize(
    ("template", "end", "of_answers"),
    [
        ("{% for m in messages %}{{ m.content }}<end>{% endfor %}", STOP, [STOP]),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", E, [E]),
        ("{% for m in messages %}{{ m.content }}<s>{% endfor %}", E, [B]),  # at which it does not stop
        ("{% for m in messages %}{{ m.content }} {% endfor %}", E, []),
        ("{{ raise_exception('no') }}", E, []),
    ],
)
def test_an_answer_ends_as_the_chat_template_ends_one(template, end, of_answers, tmp_path):
    """Of several ends, as Llama 3.1 has; a text ends at the first."""
    settings = {**SETTINGS, "chat_template": template}
    files = {"generation_config": {"eos_token_id": [E, 0, STOP]}, "tokenizer_config": settings}
    tokens = tokeniser(tmp_path, "<s> $A", {}, **files)
    assert tokens.marks.answer == of_answers
    learned = lambda **row: NextToken().encode(row, tokens).texts
    assert learned(prompt="one", completion="two") == ([B, ONE, TWO, end],)
    assert learned(prompt="one", completion="two <end>") == ([B, ONE, TWO, STOP],)
    assert learned(text="one two") == ([B, ONE, TWO, E],)
    pair = Preferences().encode({"prompt": "one", "chosen": "two", "rejected": "three"}, tokens)
    assert pair.texts == ([B, ONE, TWO, end], [B, ONE, THREE, end])


def test_a_chat_template_without_jinja2(tmp_path, monkeypatch):
    """Another end would be learned without it than with it."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for name in [name for name in sys.modules if name.startswith("quaxlike.lm.chat")]:
        monkeypatch.delitem(sys.modules, name)
    assert tokeniser(tmp_path, "$A").marks.answer == []  # which needs no templates
    with pytest.raises(ModuleNotFoundError, match="jinja2"):
        tokeniser(tmp_path, "$A", tokenizer_config={"chat_template": "{{ messages[1].content }}<end>"})


def test_an_end_that_is_no_token(tmp_path):
    with pytest.raises(CheckpointError, match="eos_token='<over>', which is no token of its tokeniser"):
        tokeniser(tmp_path, "$A", {}, tokenizer_config={"eos_token": "<over>"})


@pytest.mark.parametrize("splits", [False, True])
def test_special_tokens_within_a_text(splits, tmp_path):
    """They are pieces of text if the settings of the tokeniser say so; marks around it stay."""
    settings = {"split_special_tokens": splits, "eos_token": "</s>"}
    tokens = tokeniser(tmp_path, "<s> $A", tokenizer_config=settings)
    inside = [0, 0, 0] if splits else [E]
    (text,) = NextToken().encode({"text": "one </s> two"}, tokens).texts
    assert text == [B, ONE, *inside, TWO, E]
    assert TextTokenizer(tmp_path).encode("one </s>").ids == [B, ONE, *inside]


def test_a_setting_that_is_no_boolean(tmp_path):
    with pytest.raises(CheckpointError, match=r"'split_special_tokens': expected true or false; found 'yes'"):
        tokeniser(tmp_path, "$A", tokenizer_config={"split_special_tokens": "yes"})


def test_texts_between_marks_are_cut_before_the_end(tmp_path):
    tokens = tokeniser(tmp_path, "<s> $A </s>")
    for text in ("one two three", "<s> one two three", "<s> one two three </s>"):
        assert tokens.cut(text) == ([B, ONE, TWO, THREE, E], False)
        assert tokens.marks.around(tokens.ids(text), 4) == ([B, ONE, TWO, E], True)
