"""ModernBERT; `pytest -m clients` compares it with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import UnsupportedConfigError, resize_vocabulary
from quaxlike.lm.models import ModernBert, ModernBertConfig

_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "vocab_size": 11, "local_attention": 4,
}  # fmt: skip


def test_configurations_of_transformers_4_say_the_same():
    kinds = ["full_attention", "sliding_attention"]
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 100.0}
    ropes = dict(zip(kinds, ({"rope_theta": 160000.0}, {"rope_theta": 100.0}), strict=True))
    new = {"layer_types": [kinds[0], kinds[1], kinds[1], kinds[0]], "rope_parameters": ropes}
    config = ModernBertConfig.from_json({**_SIZES, **old})
    assert config == ModernBertConfig.from_json({**_SIZES, **new})
    assert config.windows == (False, True, True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation='relu'; ModernBertConfig supports 'gelu'"),
        ({"layer_types": ["full_attention"]}, "supports full_attention or sliding_attention for each of 4"),
        ({"layer_types": [["full_attention"]] * 4}, "for each of 4 layers"),
        ({"rope_parameters": {"full_attention": 1}}, "supports an object for each kind of attention"),
    ],
)
def test_options_that_are_not_supported(changes, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        ModernBertConfig.from_json({**_SIZES, **changes})


@pytest.mark.slow
def test_padding_is_not_seen_and_weights_may_be_values():
    model = ModernBert(ModernBertConfig.from_json(_SIZES), key=jax.random.key(0))
    model = resize_vocabulary(ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(1)), 12)
    assert model.config.vocab_size == 12
    run = jax.jit(lambda ids, seen: ql.quaxify(model)(ids, seen))
    ids, seen = jnp.arange(9), jnp.arange(9) < 6
    with ql.on_materialise("error"):
        out, other = run(ids, seen), run(jnp.where(seen, ids, 11), seen)
    np.testing.assert_array_equal(out[:6], other[:6])
    assert np.abs(out[:6] - run(ids, ids < 9)[:6]).max() > 1e-4
