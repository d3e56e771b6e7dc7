"""Generation with a cache against transformers' greedy tokens, and the ways to draw tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.models import generation, load
from quaxlike.models.generation import Conversation, generate
from tests.models.fixtures import MODELS, expected, folder, in_float32
from tests.samples import wrong_types

_OTHERS = ("gemma3", "phi3_longrope", "gpt_oss")
FEW = ["phi3_longrope"]  # the others take long


@pytest.fixture(scope="module")
def qwen2():
    return load(folder("qwen2"))[0], expected("qwen2")["greedy_prompt_ids"]


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_greedy_tokens(name):
    """Of prompts padded on the left; by LongRoPE beyond the length at which frequencies switch."""
    z = expected(name)
    model = in_float32(name)
    options = {"mask": z["greedy_prompt_mask"], "max_new_tokens": 48, "eos": int(z["eos_token_id"])}
    with ql.on_materialise("error"):
        tokens = np.asarray(generate(model, z["greedy_prompt_ids"], **options | {"eos": None}))
        ended = np.asarray(generate(model, z["greedy_prompt_ids"], **options))
    np.testing.assert_array_equal(tokens, z["greedy_tokens"])
    width = z["eos_tokens"].shape[1]
    np.testing.assert_array_equal(ended[:, :width], z["eos_tokens"])
    np.testing.assert_array_equal(ended[:, width:], z["eos_pad_token_id"])


@pytest.mark.slow
def test_greedy_tokens_without_a_cache(qwen2):
    """One whole pass for each token, texts of growing length."""
    model, ids = qwen2
    whole = jax.jit(lambda ids, seen: jnp.argmax(model(ids, seen)[jnp.sum(seen) - 1]))
    row, n = np.zeros(64, np.int32), ids.shape[1]
    row[:n] = ids[1]
    for i in range(n, n + 12):
        row[i] = whole(row, np.arange(64) < i)
    np.testing.assert_array_equal(row[n : n + 12], generate(model, ids[1:], max_new_tokens=12)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_cache_changes_a_token(name):
    """Each of the 48 tokens is the likeliest after those before it, in whole passes over padded rows."""
    z = expected(name)
    model, tokens = in_float32(name), z["greedy_tokens"]
    ids = np.concatenate([z["greedy_prompt_ids"], tokens], axis=1)
    seen = np.concatenate([z["greedy_prompt_mask"], np.ones_like(tokens)], axis=1).astype(bool)
    run = jax.jit(lambda ids, seen: jnp.argmax(jax.vmap(ql.quaxify(model))(ids, seen), axis=-1))
    width = z["greedy_prompt_ids"].shape[1]
    if "longrope" not in name:
        np.testing.assert_array_equal(np.asarray(run(ids, seen))[:, width - 1 : -1], tokens)
        return
    for length in range(width, ids.shape[1]):  # which decides the frequencies
        found = np.asarray(run(ids, seen & (np.arange(ids.shape[1]) < length)))
        np.testing.assert_array_equal(found[:, length - 1], ids[:, length])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_llama3", "qwen2"])
def test_greedy_tokens_of_quantised_weights(name):
    z = expected(name)
    model, _ = load(folder(name), quantize={"scheme": "nf4", "double_quant": True})
    with ql.on_materialise("error"):
        tokens = generate(model, z["greedy_prompt_ids"], mask=z["greedy_prompt_mask"], max_new_tokens=48)
    np.testing.assert_array_equal(tokens, expected(name, "nf4.npz")["greedy_tokens"])


@pytest.mark.slow
def test_programs_are_compiled_once(qwen2):
    model, ids = qwen2
    generate(model, ids, max_new_tokens=3)
    compiled = lambda: generation._next._cache_size()
    before = compiled()
    generate(model, ids[:, 3:], max_new_tokens=9)
    assert compiled() == before


def test_tokens_are_told_as_they_come(qwen2):
    model, ids = qwen2
    told = []
    tokens = generate(model, ids, max_new_tokens=5, on_token=told.append)
    np.testing.assert_array_equal(np.stack(told, axis=1), tokens)


@pytest.mark.slow
def test_tokens_that_are_drawn(qwen2):
    model, ids = qwen2
    draw = lambda **options: generate(model, ids, max_new_tokens=6, key=jax.random.key(1), **options)
    greedy = generate(model, ids, max_new_tokens=6)
    np.testing.assert_array_equal(draw(temperature=1.0, top_k=1), greedy)
    np.testing.assert_array_equal(draw(temperature=5.0, top_p=1e-6), greedy)
    hot = draw(temperature=5.0)
    np.testing.assert_array_equal(draw(temperature=5.0), hot)
    assert np.any(np.asarray(hot) != np.asarray(greedy))


@pytest.mark.slow
def test_an_adapter_for_each_text(qwen2):
    model, ids = qwen2
    keys = jax.random.split(jax.random.key(0), 2)
    adapted = [ql.loraify(model, rank=2, init="gaussian", key=key, where=["q_proj"]) for key in keys]
    adapted = [
        jax.tree.map(lambda x: x + 0.3 if isinstance(x, ql.LoraArray) else x, each, is_leaf=ql.is_value)
        for each in adapted
    ]
    apart = [generate(each, ids[i : i + 1], max_new_tokens=6)[0] for i, each in enumerate(adapted)]
    together = generate(ql.stack_adapters(adapted), ids, max_new_tokens=6)
    np.testing.assert_array_equal(together, np.stack(apart))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": np.array([[True, False]])}, r"padding on the left only.* rows \[0\] end with padding"),
        ({"ids": np.array([[1, 100]])}, "`ids` must be from 0 to 99; found 1 to 100"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1; found 0"),
        ({"temperature": 1.0}, "pass a `key`"),
        ({"top_p": 2}, "`top_p` above 0 and at most 1; found 0.0, None and 2"),
        pytest.param(
            {"ids": np.zeros(3, int)},
            r"integers of shape \(batch, tokens\); found int64 of shape \(3,\)",
            marks=wrong_types,
        ),
        pytest.param(
            {"model": None}, "takes a Decoder of `quaxlike.models`; found NoneType", marks=wrong_types
        ),
    ],
)
def test_arguments_that_do_not_fit(changes, message, qwen2):
    options = {"model": qwen2[0], "ids": np.array([[1, 2]]), "max_new_tokens": 1} | changes
    with pytest.raises(ValueError, match=message):
        generate(options.pop("model"), options.pop("ids"), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3", "phi3_longrope", "gpt_oss"))],
)
def test_a_conversation_continues_as_generate_does(name):
    """Turns that go on with the text, begin anew, change its middle, and are left early."""
    model, _ = load(folder(name))
    model = model.stacked() if name == "qwen2" else model
    conversation, text = Conversation(model), [5, 6, 7]
    turns = [([9, 4], 5), ([8], 20), (list(range(3, 14)), 3)]
    for new, count in turns:
        expected = np.asarray(generate(model, np.array([text]), max_new_tokens=count))[0]
        found = list(conversation.answer(text, max_new_tokens=count))
        assert found == expected.tolist()
        text = [*text, *found, *new]
    text[2] = 11
    next(conversation.answer(text, max_new_tokens=9))
    expected = np.asarray(generate(model, np.array([text]), max_new_tokens=9))[0].tolist()
    assert list(conversation.answer(text, max_new_tokens=9)) == expected
    before_end = expected[: expected.index(expected[4])]
    assert list(conversation.answer(text, max_new_tokens=9, eos=[expected[4]])) == before_end
    anew = list(Conversation(model).answer([3], max_new_tokens=1))
    assert list(conversation.answer([3], max_new_tokens=1)) == anew


@pytest.mark.slow
def test_a_conversation_runs_only_what_is_new(monkeypatch):
    model, _ = load(folder("qwen2"))
    widths = []
    step = generation._next_of_one

    def watched(model, ids, *rest):
        widths.append(len(ids))
        return step(model, ids, *rest)

    monkeypatch.setattr(generation, "_next_of_one", watched)
    conversation, text = Conversation(model), list(range(40))
    text += conversation.answer(text, max_new_tokens=2)
    list(conversation.answer([*text, 5, 6], max_new_tokens=2))
    assert widths == [64, 1, 16, 1]


def test_an_interrupted_conversation_goes_on(monkeypatch):
    model, _ = load(folder("qwen2"))
    conversation = Conversation(model)
    expected = list(Conversation(model).answer([5, 6], max_new_tokens=4))
    list(conversation.answer([5], max_new_tokens=2))

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(generation, "_next_of_one", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(conversation.answer([5, 6], max_new_tokens=4))
    assert list(conversation.answer([5, 6], max_new_tokens=4)) == expected


def test_conversations_that_do_not_fit():
    model, _ = load(folder("qwen2"))
    with pytest.raises(ValueError, match="`ids` must be from 0 to"):
        Conversation(model).answer([10**6], max_new_tokens=1)


@wrong_types
def test_conversations_with_what_is_no_decoder():
    with pytest.raises(ValueError, match=r"Conversation takes a Decoder .*; found dict"):
        Conversation({})
