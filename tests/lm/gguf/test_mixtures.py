"""The types that presets choose, as `llama-quantize` does. (`tests/lm/clients` runs it on small models.)"""

import pytest

from quaxlike.lm.gguf.mixtures import mixture_of

_LLAMA = {"architecture": "llama", "layers": 16, "heads": 8, "shared": 4}
_PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")


def _types(preset, *, architecture, layers, heads, shared, experts=0, parts=_PARTS):
    keys = {
        "block_count": layers, "attention.head_count": heads, "attention.head_count_kv": heads // shared,
        "expert_count": experts,
    }  # fmt: skip
    metadata = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": x for key, x in keys.items()},
    }
    names = [f"blk.{i}.{part}.weight" for i in range(layers) for part in parts]
    mixture = mixture_of(None, preset)
    chosen = mixture.by_tensor(["token_embd.weight", "blk.0.ffn_down.bias", *names], metadata)
    assert chosen.keys() <= {*names}
    return [
        {part: chosen.get(f"blk.{i}.{part}.weight", mixture.rest) for part in parts} for i in range(layers)
    ]


@pytest.mark.parametrize("preset", ["iq4_nl", "iq4_xs"])
def test_values_that_four_heads_share_have_more_bits(preset):
    layers = _types(preset, **_LLAMA)
    most = dict.fromkeys(_PARTS, preset)
    first = {**most, "attn_v": "q5_k", "ffn_down": "q5_k"}
    assert layers == [first] * 2 + [{**most, "attn_v": "q5_k"}] * 14
    assert _types(preset, **_LLAMA | {"shared": 2})[-1] == most


def test_two_bits():
    wanted = {
        "attn_q": "q2_k", "attn_k": "q2_k", "attn_v": "q4_k", "attn_output": "q3_k", "ffn_down": "q3_k",
    }  # fmt: skip
    assert _types("q2_k", **_LLAMA) == [wanted] * 16
    assert _types("q2_k", **_LLAMA | {"shared": 2}) == [wanted | {"attn_v": "q3_k"}] * 16


@pytest.mark.parametrize(
    ("preset", "output"), [("q4_0", "q4_0"), ("q5_k_m", "q5_k"), ("q4_k_m", "q5_k"), ("iq4_nl", "q5_k")]
)
def test_a_mixture_of_eight_experts(preset, output):
    layers = _types(preset, **_LLAMA, experts=8)
    kept = {(x["attn_k"], x["attn_v"], x["attn_output"]) for x in layers}
    assert kept == {("q8_0", "q8_0", output)}


def test_layers_without_values_are_not_counted():
    """As in those of Gemma 4 whose values are their keys."""
    metadata = {"general.architecture": "gemma4", "gemma4.block_count": 16}
    names = [f"blk.{i}.attn_v.weight" for i in range(16) if i % 2 == 0]
    chosen = mixture_of(None, "q4_k_m").by_tensor(names, metadata)
    assert [i for i, name in enumerate(names) if chosen[name] == "q6_k"] == [0, 3, 6, 7]


@pytest.mark.parametrize(("architecture", "shared", "wanted"), [
    ("llama", 8, "q5_k"), ("llama", 1, "q4_k"), ("qwen2", 1, "q5_k"), ("qwen3", 8, "q4_k"),
])  # fmt: skip
def test_values_of_the_models_with_80_layers(architecture, shared, wanted):
    layers = _types("q4_k_m", architecture=architecture, layers=80, heads=8, shared=shared)
    assert {x["attn_v"] for x in layers} == {"q6_k", wanted}


def test_only_experts_have_four_bits():
    parts = ("attn_v", "ffn_down_shexp", "ffn_down_exps", "ffn_gate_up_exps")
    layers = _types("mxfp4_moe", **_LLAMA, experts=8, parts=parts)
    assert layers == [dict(zip(parts, ("q8_0", "q8_0", "mxfp4", "mxfp4"), strict=True))] * 16
