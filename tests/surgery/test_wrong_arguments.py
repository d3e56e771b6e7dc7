"""Wrong arguments of public functions: errors of the library's own."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.samples import array, wrong_types

_MODEL = {"q_proj.weight": array(np.ones((2, 64)))}
_W = array(np.ones((2, 64)))
_WRONG = [5, -1, None, 2.5, float("nan"), object()]


def _loraify(**options):
    return ql.loraify(_MODEL, **({"rank": 2, "where": ["q_proj"], "key": jax.random.key(0)} | options))


_CALLS = {
    "loraify where": lambda x: _loraify(where=x),
    "loraify init": lambda x: _loraify(init=x),
    "loraify rank_pattern": lambda x: _loraify(rank_pattern=x),
    "loraify alpha_pattern": lambda x: _loraify(alpha_pattern=x),
    "loraify modules_to_save": lambda x: _loraify(modules_to_save=x),
    "loraify bias": lambda x: _loraify(bias=x),
    "loraify invocation_tokens": lambda x: _loraify(invocation_tokens=x),
    "activate": lambda x: ql.activate(_loraify(invocation_tokens=[1]), x),
    "quantize scheme": lambda x: ql.quantize(_MODEL, x, where=["q_proj"]),
    "quantize where": lambda x: ql.quantize(_MODEL, "nf4", where=x),
    "select": lambda x: ql.select(_MODEL, x),
    "combine_adapters models": lambda x: ql.combine_adapters(x, [1.0]),
    "combine_adapters weights": lambda x: ql.combine_adapters([_MODEL], x),
    "stack_adapters": ql.stack_adapters,
    "stack_layers": ql.stack_layers,
    "eva_ranks": lambda x: ql.eva_ranks(x, rank=2),
    "NF4Array block_size": lambda x: ql.NF4Array.quantize(_W, block_size=7 if x is None else x),
    "BlockArray codec": lambda x: ql.BlockArray.quantize(_W, codec=7 if x is None else x),
    "LoraArray w": lambda x: ql.LoraArray(x, jnp.ones((1, 64)), jnp.ones((2, 1))),
    "LoraArray a": lambda x: ql.LoraArray(_W, x, jnp.ones((2, 1))),
    "BlockSparseArray block_size": lambda x: ql.BlockSparseArray.from_dense(_W, block_size=x),
    "quaxify": ql.quaxify,
    "quaxify rules": lambda x: ql.quaxify(jnp.sin, rules=x) if x is not None else ql.quaxify(None),
    "register": ql.register,
    "rules_for": ql.rules_for,
    "check_ambiguities": ql.check_ambiguities,
    "on_materialise": ql.on_materialise,
}


@wrong_types
@pytest.mark.parametrize("wrong", _WRONG, ids=lambda x: repr(x)[:12])
@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_errors_are_our_own(call, wrong):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(wrong)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    lines = Path(frame.filename).read_text(encoding="utf-8").splitlines()
    assert "quaxlike" in frame.filename
    assert lines[frame.lineno - 1].lstrip().startswith("raise ")


@wrong_types
@pytest.mark.parametrize("call", ["loraify where", "loraify modules_to_save", "quantize where", "select"])
def test_numbers_are_no_names(call):
    with pytest.raises(TypeError, match=r"takes a sequence of names as \w+; found \[3\]"):
        _CALLS[call]([3])


@pytest.mark.parametrize("cls", [ql.NF4Array, ql.Int8Array])
def test_the_class_that_was_asked_is_named(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__}\.quantize: `axis` must be int; found None"):
        cls.quantize(_W, axis=None)
