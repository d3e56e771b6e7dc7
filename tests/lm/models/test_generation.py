"""Generation with a cache against transformers' greedy tokens, and the ways to draw tokens."""

import functools
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import load
from quaxlike.lm.generate import generation
from quaxlike.lm.generate.generation import Conversation, generate
from quaxlike.lm.models import attention, attention_blocks
from quaxlike.surgery.adapters import activated
from tests.lm.models.fixtures import MODELS, expected, folder, in_float32
from tests.samples import normal, wrong_types

_OTHERS = ("gemma3", "phi3_longrope", "gpt_oss")
FEW = ["phi3_longrope"]  # the others take long


@pytest.fixture(scope="module")
def qwen2():
    return load(folder("qwen2"))[0], expected("qwen2")["greedy_prompt_ids"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_adapters_with_other_scalings_run_the_same_program(qwen2):
    model, ids = qwen2
    adapted = functools.partial(ql.loraify, model, rank=2, where=["q_proj"], key=jax.random.key(0))
    compiled = lambda: generation._next._cache_size()
    found = []
    for alpha in (2, 8, 0.5):
        generate(adapted(alpha=alpha), ids, max_new_tokens=3)
        found.append(compiled())
    assert len({*found}) == 1


@pytest.mark.slow
def test_all_is_compiled_before_the_first_token(qwen2):
    """By `generate`, and by a conversation whose text grew beyond its room."""
    model, ids = qwen2
    seen = []
    watch = lambda event, seconds, **about: seen.append(str(about.get("fun_name", event)))
    jax.monitoring.register_event_duration_secs_listener(watch)
    try:
        options = {"max_new_tokens": 4, "cache": "bfloat16"}
        generate(model, ids, **options, on_token=lambda token: seen.append("token"))
        for _ in Conversation(model, cache="bfloat16").answer(range(40), max_new_tokens=4):
            seen.append("token")
    finally:
        jax.monitoring.unregister_event_duration_listener(watch)
    compiled = [i for i, event in enumerate(seen) if event == "jit(_next)"]
    first, last = seen.index("token"), len(seen) - 4
    assert sum(i < first for i in compiled) >= 2
    assert not [i for i in compiled if first < i < first + 4 or i > last]
    assert len(compiled) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("form", ["list", pytest.param("stacked", marks=pytest.mark.slow)])
def test_the_cache_is_written_in_place(form, qwen2):
    model, _ = qwen2
    model = model if form == "list" else model.stacked()
    memory = model.memory(1024)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    sampling = generation._Sampling(None, None, None, None)
    ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    rest = number, number, number, ids, sampling, number, None
    step = generation._next.lower(generation._Leaves(model), ids, None, memory, *rest)
    needed, size = step.compile().memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(memory))
    assert needed.alias_size_in_bytes == size
    # Nothing is converted or turned for its products; of a stack, the part of a layer is taken out.
    most = {"list": 0.7, "stacked": 2.5}[form]
    assert needed.temp_size_in_bytes < most * size / model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_single_text_costs_what_the_decoder_does(cache, qwen2):
    """A token of a conversation: no axis of a batch, no array of what is seen."""
    model, _ = qwen2
    memory, number = model.memory(64, cache), jax.ShapeDtypeStruct((), jnp.int32)
    ids, sampling = jax.ShapeDtypeStruct((1,), jnp.int32), generation._Sampling(None, None, None, None)

    @functools.partial(jax.jit, donate_argnames="memory")
    @ql.quaxify
    def plain(model, ids, memory, start, length):
        hidden, memory = model.body(ids, jnp.ones(64, bool), memory, start, length)
        return generation._likeliest(model.logits(hidden)), memory

    rest = number, number, number, ids, sampling, number, cache
    step = generation._next.lower(generation._Leaves(model), ids, None, memory, *rest)
    found, wanted = (
        lowered.compile().cost_analysis()
        for lowered in (step, plain.lower(model, ids, memory, number, number))
    )
    for figure in ("flops", "bytes accessed"):
        assert found[figure] == pytest.approx(wanted[figure], rel=1e-3)


@pytest.mark.slow
def test_tokens_are_told_as_they_come(qwen2, monkeypatch):
    """Each while the step behind it runs."""
    model, ids = qwen2
    monkeypatch.setattr(generation, "_next", step := mock.Mock(wraps=generation._next))
    told, started = [], []
    watch = lambda token: (told.append(token), started.append(step.call_count))
    tokens = generate(model, ids, max_new_tokens=5, on_token=watch)
    np.testing.assert_array_equal(np.stack(told, axis=1), tokens)
    assert started == [2, 3, 4, 5, 5]


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
            {"model": None}, "takes a Decoder of `quaxlike.lm.models`; found NoneType", marks=wrong_types
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
    for start in (text[:10], text):  # a shorter text, and back
        expected = np.asarray(generate(model, np.array([start]), max_new_tokens=3))[0].tolist()
        assert list(conversation.answer(start, max_new_tokens=3)) == expected
    anew = list(Conversation(model).answer([3], max_new_tokens=1))
    assert list(conversation.answer([3], max_new_tokens=1)) == anew


def _activated(model):
    adapted = ql.loraify(
        model, rank=4, alpha=64, init="gaussian", invocation_tokens=(7, 9), key=jax.random.key(1)
    )
    move = lambda x: x.replace(b=normal(*x.b.shape, seed=x.b.size)) if isinstance(x, ql.AdaptedArray) else x
    return jax.tree.map(move, adapted, is_leaf=ql.is_value)


@pytest.mark.slow
def test_an_activated_lora_acts_from_the_prompt_on(qwen2):
    """Greedy tokens of whole passes: of prompts that invoke it, one twice, and of one that does not."""
    model = _activated(qwen2[0])
    prompts = [[3, 7, 9, 4, 2], [7, 9, 5, 7, 9, 1], [8, 2, 7, 4]]
    width, n = max(map(len, prompts)), 9
    ids = np.array([[7] * (width - len(row)) + row for row in prompts])  # the padding looks like a token
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    with ql.on_materialise("error"):
        found = np.asarray(generate(model, ids, mask=mask, max_new_tokens=n))
    for row, tokens, start in zip(prompts, found, (1, 3, None), strict=True):
        whole, acts = np.array([*row, *tokens[:-1]]), np.zeros(len(row) + n - 1, bool)
        acts[len(whole) if start is None else start :] = True
        logits = ql.quaxify(activated(model, lambda _, acts=acts: jnp.asarray(acts)))(whole, whole >= 0)
        np.testing.assert_array_equal(np.argmax(logits, -1)[len(row) - 1 :], tokens)
    base = np.asarray(generate(qwen2[0], ids, mask=mask, max_new_tokens=n))
    assert [np.array_equal(x, y) for x, y in zip(found, base, strict=True)] == [False, False, True]


@pytest.fixture
def widths(monkeypatch):
    """How many tokens each step of a conversation runs, as they come."""
    step, found = generation._next, []

    def watched(leaves, ids, *rest):
        found.append(ids.size)
        return step(leaves, ids, *rest)

    watched.lower = step.lower
    monkeypatch.setattr(generation, "_next", watched)
    return found


@pytest.mark.slow
def test_a_conversation_keeps_the_cache_of_the_base_up_to_the_invocation(widths, qwen2):
    model = _activated(qwen2[0])
    conversation, text = Conversation(model), list(range(10, 50))
    for new, width in [([], 64), ([7, 9, 3], 8), ([4], 8), ([7, 9], 16)]:
        text += new
        wanted = np.asarray(generate(model, np.array([text]), max_new_tokens=2))[0].tolist()
        widths.clear()
        found = list(conversation.answer(text, max_new_tokens=2))
        assert (found, widths) == (wanted, [width, 1])
        text += found


@pytest.mark.slow
def test_forks_read_a_text_once(widths, qwen2):
    """Of the base, and of a conversation in which an adapter acted; with adapters, and without."""
    base, model = qwen2[0], _activated(qwen2[0])
    text = list(range(10, 50))
    reader = Conversation(base, cache="bfloat16")
    next(reader.answer(text, max_new_tokens=1))
    acted = Conversation(model, cache="bfloat16")
    list(acted.answer([*text, 7, 9, 4], max_new_tokens=3))
    for conversation in (reader, acted):
        for other, question in [(model, [7, 9, 4]), (model, [3, 7, 9]), (base, [7, 9, 4])]:
            fork, ids = conversation.fork(other), [*text, *question]
            widths.clear()
            found = list(fork.answer(ids, max_new_tokens=3))
            assert widths == [8, 1, 1]
            wanted = np.asarray(generate(other, np.array([ids]), max_new_tokens=3, cache="bfloat16"))
            assert found == wanted[0].tolist()


@pytest.mark.slow
def test_forks_of_another_base(qwen2):
    lora = ql.loraify(qwen2[0], rank=1, where=["q_proj"], key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"the adapter of model\.layers\.0\.\S+ acts on all tokens"):
        Conversation(qwen2[0]).fork(lora)
    other = eqx.tree_at(lambda m: m.model.norm.weight, qwen2[0], replace_fn=lambda w: w + 1)
    with pytest.raises(ValueError, match=r"on the same base: model\.norm\.weight has other values"):
        Conversation(_activated(other)).fork(qwen2[0])


def test_texts_with_adapters_that_other_tokens_invoke(qwen2):
    model = ql.loraify(qwen2[0], rank=1, where=["q_proj"], invocation_tokens=[7], key=jax.random.key(0))
    model = ql.loraify(model, rank=1, where=["k_proj"], invocation_tokens=[8], key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"that the same tokens invoke; .* are invoked by \[7\] and \[8\]"):
        generate(model, np.array([[1, 2]]), max_new_tokens=1)


@pytest.mark.slow
def test_a_conversation_runs_only_what_is_new(widths):
    model, _ = load(folder("qwen2"))
    conversation, text = Conversation(model), list(range(40))
    text += conversation.answer(text, max_new_tokens=2)
    list(conversation.answer([*text, 5, 6], max_new_tokens=2))
    assert widths == [64, 1, 8, 1]


@pytest.mark.slow
def test_an_interrupted_conversation_goes_on(monkeypatch):
    model, _ = load(folder("qwen2"))
    conversation = Conversation(model)
    expected = list(Conversation(model).answer([5, 6], max_new_tokens=4))
    list(conversation.answer([5], max_new_tokens=2))

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(generation, "_next", interrupted)
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


CACHES = ["int8", "q8_0", "q4_0", "nf4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_an_int8_cache(name):
    """Those of a dense cache, up to one that wins by less than what the rounding changes."""
    z = expected(name)
    model, mask, width = in_float32(name), z["greedy_prompt_mask"], z["greedy_prompt_ids"].shape[1]
    with ql.on_materialise("error"):
        found = generate(model, z["greedy_prompt_ids"], mask=mask, max_new_tokens=48, cache="int8")
    wanted = z["greedy_tokens"]
    ids = np.concatenate([z["greedy_prompt_ids"], wanted], axis=1)
    seen = np.concatenate([mask, np.ones_like(wanted)], axis=1).astype(bool)

    @functools.partial(jax.jit, static_argnames="cache")
    def logits(ids, seen, length, cache):
        def run(model, memory):
            return model.logits(model.body(ids, seen, memory, 0, length)[0])

        return ql.quaxify(run)(model, model.memory(len(ids), cache))

    for row, (ours, theirs) in enumerate(zip(np.asarray(found), wanted, strict=True)):
        if (same := ours == theirs).all():
            continue
        first = int(np.argmin(same))
        at = width - 1 + first
        now = seen[row] & (np.arange(ids.shape[1]) <= at)
        length = seen[:, : at + 1].sum(1).max()  # decides the frequencies of LongRoPE
        dense, rounded = (np.asarray(logits(ids[row], now, length, cache)) for cache in (None, "int8"))
        error = np.sqrt(np.mean((rounded - dense) ** 2, axis=-1))
        assert np.median(error[now]) < 0.05 * np.std(dense)  # a token with another expert has more
        assert dense[at, theirs[first]] - dense[at, ours[first]] < 4 * error[at], (row, first)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bfloat16", *CACHES])
def test_logits_of_each_cache(cache, qwen2):
    """After a prompt and a few tokens, in a list of layers and in a stack, with what is told of the bytes."""
    model, ids = qwen2
    bits = {"bfloat16": 16, "int8": 8, "q8_0": 8, "q4_0": 4, "nf4": 4}[cache]

    def logits(model, memory):
        hidden, memory = model.body(ids[1, :9], jnp.ones(16, bool), memory, 0, 9)
        hidden, memory = model.body(ids[1, 9:12], jnp.ones(16, bool), memory, 9, 12)
        return model.logits(hidden), memory

    outs = []
    for each in (model, model.stacked()):
        for kind in (None, cache):
            with ql.on_materialise("error"):
                out, memory = jax.jit(ql.quaxify(logits))(each, each.memory(16, kind))
            outs.append(np.asarray(out))
        c, found = model.config, ql.summary(memory)
        scales = {"int8": 4 / c.head_dim, "q8_0": 2 / 32, "q4_0": 2 / 32, "nf4": 4 / 64}.get(cache, 0)
        size = 2 * c.num_hidden_layers * 16 * c.num_key_value_heads * c.head_dim
        least = size * bits // 8
        assert least <= found.stored_bytes <= least + size * max(scales, 4 / c.head_dim)
    np.testing.assert_allclose(outs[3], outs[1], atol=1e-4)
    error = np.sqrt(np.mean((outs[1] - outs[0]) ** 2)) / np.std(outs[0])
    assert 0 < error < {16: 0.02, 8: 0.03, 4: 0.5}[bits]  # by 18 from 8 to 4 bits


@pytest.mark.slow
def test_caches_of_few_bits_of_texts_with_adapters_and_of_conversations(qwen2):
    model, ids = qwen2
    keys = jax.random.split(jax.random.key(0), 2)
    adapted = [ql.loraify(model, rank=2, init="gaussian", key=key, where=["q_proj"]) for key in keys]
    options = {"max_new_tokens": 6, "cache": "q4_0"}
    apart = [generate(each, ids[i : i + 1], **options)[0] for i, each in enumerate(adapted)]
    np.testing.assert_array_equal(generate(ql.stack_adapters(adapted), ids, **options), np.stack(apart))
    conversation, text = Conversation(model, cache="int8"), [5, 6, 7]
    for new, count in [([9, 4], 5), ([8], 20)]:
        expected = np.asarray(generate(model, np.array([text]), max_new_tokens=count, cache="int8"))[0]
        found = list(conversation.answer(text, max_new_tokens=count))
        assert found == expected.tolist()
        text = [*text, *found, *new]


@pytest.mark.slow
def test_long_texts_in_a_cache_of_few_bits(qwen2, monkeypatch):
    """Blocks of the cache are read one by one."""
    model, ids = qwen2
    once = generate(model, ids, max_new_tokens=6, cache="int8")
    monkeypatch.setattr(attention_blocks, "_ALL_AT_ONCE", 64)
    monkeypatch.setattr(attention_blocks, "_BLOCK", 16)
    jax.clear_caches()
    with ql.on_materialise("error"):
        np.testing.assert_array_equal(generate(model, ids, max_new_tokens=6, cache="int8"), once)
    jax.clear_caches()


def test_caches_that_do_not_exist(qwen2):
    with pytest.raises(ValueError, match=r"`cache` must be None or one of bfloat16, .*; found 'int9'"):
        generate(*qwen2, max_new_tokens=1, cache="int9")


@pytest.mark.quick("96")
@pytest.mark.parametrize("size", [64, 96, 7])
def test_rotated_keys(size):
    """Products stay the same, and an element that is much larger than the others is spread over all."""
    key, query = normal(5, size, seed=1), normal(4, size, seed=2)
    rotate = attention.hadamard
    np.testing.assert_allclose(rotate(query) @ rotate(key).T, query @ key.T, rtol=1e-5, atol=1e-5)
    if size > 7:
        large = jnp.zeros((1, size)).at[0, 3].set(1.0)
        assert float(jnp.max(jnp.abs(rotate(large)))) == pytest.approx((size & -size) ** -0.5)


@pytest.mark.slow
def test_rotated_keys_lose_less():
    """If one element of all keys is large, as in models."""
    key, query = normal(32, 64, seed=1).at[:, 3].mul(30), normal(8, 64, seed=2)
    rounded = lambda x: ql.BlockArray.quantize(x, codec="q4_0").materialise()
    errors = [
        float(jnp.linalg.norm(of(query) @ rounded(of(key)).T - query @ key.T))
        for of in (lambda x: x, attention.hadamard)
    ]
    assert errors[1] < 0.75 * errors[0]
