"""An adapter that is written over another: what is found is one of them, whenever the writing stops."""

import os

import equinox as eqx
import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import peft

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def adapted(rank, alpha):
    mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
    return mlp, ql.loraify(mlp, rank=rank, alpha=alpha, key=jax.random.key(rank))


class Killed(BaseException):
    pass


@pytest.fixture
def stopping(monkeypatch):
    """Lets `os.replace` fail after n calls."""

    def stop_at(n):
        calls = iter(range(n))
        replace = os.replace

        def fails(*args):
            if next(calls, None) is None:
                raise Killed
            replace(*args)

        monkeypatch.setattr(os, "replace", fails)

    return stop_at


@pytest.mark.quick("1-4.0", "2-64.0")
@pytest.mark.parametrize(("n", "found"), [(0, 4.0), (1, 4.0), (2, 64.0)])
def test_the_adapter_is_the_old_one_or_the_new_one(n, found, tmp_path, stopping, monkeypatch):
    mlp, old = adapted(2, 4.0)
    _, new = adapted(2, 64.0)  # of the same shapes, so that nothing else tells them apart
    new = eqx.tree_at(lambda m: m.layers[0].weight.a, new, replace_fn=lambda a: a + 1)
    peft.save_adapter(tmp_path, old)
    stopping(n)
    with pytest.raises(Killed):
        peft.save_adapter(tmp_path, new)
    monkeypatch.undo()
    lora = peft.load_adapter(tmp_path, mlp).layers[0].weight
    expected = (old if found == 4.0 else new).layers[0].weight
    assert lora.alpha == found
    np.testing.assert_array_equal(lora.a, expected.a)

    # Whatever a kill has left, the next one is written in full.
    peft.save_adapter(tmp_path, old)
    assert peft.load_adapter(tmp_path, mlp).layers[0].weight.alpha == 4.0
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


@pytest.mark.slow
def test_an_adapter_that_others_write_afterwards(tmp_path, stopping, monkeypatch):
    mlp, old = adapted(2, 4.0)
    _, new = adapted(3, 64.0)
    stopping(2)
    with pytest.raises(Killed):
        peft.save_adapter(tmp_path, new)
    monkeypatch.undo()
    peft.save_adapter(tmp_path / "other", old)
    for name in FILES:
        (tmp_path / name).write_bytes((tmp_path / "other" / name).read_bytes())
    assert peft.load_adapter(tmp_path, mlp).layers[0].weight.alpha == 4.0
