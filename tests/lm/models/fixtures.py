"""The reference models: checkpoints of every architecture, and what transformers and PEFT make of them."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

import quaxlike as ql
from quaxlike.lm import load, peft
from tests.fixtures import DATA, FIXTURES, fixture, has_fixture

_ALL = [
    "llama_llama3", "llama_linear", "llama_yarn", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3",
    "phi3_longrope", "mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "gpt_oss_mxfp4", "olmo2", "gpt2",
]  # fmt: skip
#: Most travel with the repository; where the full collection is, the tests run on all of it.
MODELS = [name for name in _ALL if any((root / "models" / name).exists() for root in (DATA, FIXTURES))]


def folder(name):
    return fixture(f"models/{name}/base")


def family(name):
    """The type of the model, by its name in transformers."""
    return json.loads((folder(name) / "config.json").read_text())["model_type"]


def expected(name, file="io.npz"):
    return np.load(fixture(f"models/{name}/{file}"))


def adapter(case):
    """The adapter of PEFT, "qwen2/embed_lora"."""
    return fixture(f"models/{case.replace('/', '/adapters/')}")


def has_adapter(case):
    return has_fixture(f"models/{case.replace('/', '/adapters/')}")


def of_peft(case):
    """What PEFT makes of the adapter: the file beside it, where it is in the full collection alone."""
    return np.load(adapter(case).parents[1] / "peft.npz")


def legacy(name, tmp_path):
    """The same checkpoint with the configuration that transformers 4 writes."""
    shutil.copytree(folder(name), tmp_path / name)
    text = fixture(f"models/{name}/config_legacy.json").read_text()
    (tmp_path / name / "config.json").chmod(0o644)
    (tmp_path / name / "config.json").write_text(json.dumps(json.loads(text)))
    return tmp_path / name


def in_float32(name):
    """The model; weights of 16 bits, and what quantised ones stand for, in float32, as the references are."""
    model, _ = load(folder(name))
    return jax.tree.map(lambda x: x.astype(jnp.float32), model, is_leaf=ql.is_value)


def agree(found, wanted, atol=1e-4):
    np.testing.assert_allclose(np.asarray(found), wanted, atol=atol, rtol=0)


def check_adapters_on_quantised_weights(model, tmp_path):
    """They compute what the dense arrays do, materialise nothing, and go through PEFT's files. Returns the
    adapted model."""
    small = ql.quantize(model, "nf4")
    adapted = ql.loraify(small, rank=2, init="gaussian", key=jax.random.key(1))
    move = lambda x: x.replace(b=x.b + 0.05) if isinstance(x, ql.LoraArray) else x
    adapted = jax.tree.map(move, adapted, is_leaf=ql.is_value)
    run = jax.jit(lambda model: ql.quaxify(model)(jnp.arange(6), jnp.ones(6, bool)))
    with ql.on_materialise("error"):
        out = run(adapted)
    dense = jax.tree.map(lambda x: x.materialise() if ql.is_value(x) else x, adapted, is_leaf=ql.is_value)
    agree(out, run(dense), 1e-4)
    peft.save_adapter(tmp_path, adapted)
    agree(run(peft.load_adapter(tmp_path, small)), out, 1e-5)
    return adapted
