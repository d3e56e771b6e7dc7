"""Adapters of any type as low-rank ones: NumPy's SVD in float64 says which are closest."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.adapters import METHODS
from quaxlike.adapters.ia3 import ScaledBias
from quaxlike.lm import peft
from tests.samples import drawn, normal, random_key

KEY = random_key(0)
MLP = drawn(eqx.nn.MLP, 12, 6, 10, depth=2, key=KEY)


class Mixed(ql.AdaptedArray):
    """A weight plus a dense change, each of its rows scaled: a change of full rank."""

    shift: jax.Array
    scale: jax.Array

    def materialise(self):
        base = ql.materialise(self.base)
        return ((base + self.shift) * self.scale[..., None]).astype(base.dtype)


def _mixed(w, *, key, layout):
    shift, scale = jax.random.split(key)
    shape = tuple(w.shape)
    return Mixed(w, 0.1 * jax.random.normal(shift, shape), 1 + 0.1 * jax.random.normal(scale, shape[:-1]))


def _adapted(base=MLP, **options):
    return ql.adapt(base, _mixed, key=KEY, **options)


def _weights(model):
    return [layer.weight for layer in model.layers]


def _double(x):
    return np.asarray(ql.materialise(x), np.float64)


def _expected(x, rank, inputs_first=False):
    """The change of a weight that is closest, how much of it is lost, and how large it is to the weight."""
    turned = lambda change: np.swapaxes(change, -1, -2) if inputs_first else change
    change = np.asarray(x.merged(), np.float64) - _double(x.w)
    u, s, vt = np.linalg.svd(turned(change), full_matrices=False)
    best = turned((u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :])
    lost = np.linalg.norm(s[..., rank:]) / np.linalg.norm(s)
    return best, lost, np.linalg.norm(s) / np.linalg.norm(_double(x.w))


def _check(lora, x, rank, error, inputs_first=False):
    best, lost, change = _expected(x, rank, inputs_first)
    assert type(lora) is ql.LoraArray
    assert lora.rank == rank
    assert np.all(lora.scaling == 1)
    assert lora.w is x.w
    np.testing.assert_allclose(lora.delta(), best, atol=1e-5)
    np.testing.assert_allclose(error, (lost, change), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_closest_change_of_a_rank_and_what_it_loses():
    model = _adapted()
    lora, errors = ql.to_lora(model, 3, rank_pattern={"layers.2": 5})
    assert list(errors) == [f"layers.{i}.weight" for i in range(3)]
    for x, y, error, rank in zip(_weights(model), _weights(lora), errors.values(), (3, 3, 5), strict=True):
        _check(y, x, rank, error)
    for i in range(3):
        np.testing.assert_array_equal(lora.layers[i].bias, MLP.layers[i].bias)


@pytest.mark.slow
def test_the_change_in_full():
    model = _adapted(where=["layers.2"])
    lora, errors = ql.to_lora(model, 6)
    assert errors["layers.2.weight"].lost == 0
    np.testing.assert_allclose(ql.merge(lora).layers[2].weight, ql.merge(model).layers[2].weight, atol=1e-6)


@pytest.mark.slow
def test_it_is_saved_as_a_lora(tmp_path):
    lora, _ = ql.to_lora(_adapted(), 4, rank_pattern={"layers.0": 2})
    peft.save_adapter(tmp_path, lora)
    again = peft.load_adapter(tmp_path, MLP)
    for x, y in zip(_weights(ql.merge(again)), _weights(ql.merge(lora)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "shape"),
    [("dense.kernel", None, (7, 5)), ("h.0.c_attn.weight", "io", (7, 5)), ("stack.kernel", "io", (3, 7, 5))],
    ids=["kernel", "Conv1D", "stack"],
)
def test_inputs_first(name, layout, shape):
    layout = None if layout is None else {name: layout}
    model = ql.adapt({name: normal(*shape)}, _mixed, key=KEY, where=[name], layout=layout)
    lora, errors = ql.to_lora(model, 2, layout=layout)
    assert lora[name].a.shape == (*shape[:-2], 2, 7)
    _check(lora[name], model[name], 2, errors[name], inputs_first=True)


@pytest.mark.slow
def test_convolutions():
    conv = eqx.nn.Conv2d(3, 6, 3, key=KEY)
    model = ql.adapt(conv, lambda w, **_: Shifted(w, normal(*w.shape)), where=["weight"])
    lora, errors = ql.to_lora(model, 4)
    assert lora.weight.a.shape == (4, 3, 3, 3)
    u, s, vt = np.linalg.svd(np.asarray(model.weight.shift, np.float64).reshape(6, 27), full_matrices=False)
    best = ((u[:, :4] * s[:4]) @ vt[:4]).reshape(6, 3, 3, 3)
    np.testing.assert_allclose(lora.weight.delta(), best, atol=1e-5)
    np.testing.assert_allclose(errors["weight"].lost, np.linalg.norm(s[4:]) / np.linalg.norm(s), rtol=1e-5)


class Shifted(ql.AdaptedArray):
    shift: jax.Array
    part_axes = {"shift": "out in"}  # noqa: RUF012

    def materialise(self):
        return jax.lax.add(*jnp.broadcast_arrays(ql.materialise(self.base), self.shift.astype(self.w.dtype)))


@pytest.mark.slow
def test_several_adapters_on_one_base():
    models = [ql.adapt(MLP, lambda w, i=i, **_: Shifted(w, normal(*w.shape, seed=i))) for i in range(3)]
    lora, _ = ql.to_lora(ql.stack_adapters(models), 4)
    for i, model in enumerate(models):
        alone, _ = ql.to_lora(model, 4)
        for x, y in zip(_weights(ql.choose_adapter(lora, i)), _weights(alone), strict=True):
            assert x.w is y.w
            np.testing.assert_allclose(x.delta(), y.delta(), atol=1e-5)


@pytest.mark.slow
def test_a_quantised_base_stays_as_it_is():
    model = ql.quantize(_adapted(eqx.nn.MLP(32, 32, 32, depth=1, key=KEY)), "nf4", block_size=32)
    lora, errors = ql.to_lora(model, 3)
    for x, y, error in zip(_weights(model), _weights(lora), errors.values(), strict=True):
        assert isinstance(y.w, ql.NF4Array)
        _check(y, x, 3, error)


@pytest.mark.slow
def test_a_small_change_of_a_bfloat16_weight_is_not_rounded_away():
    w = normal(8, 8).astype(jnp.bfloat16)
    shift = 1e-4 * normal(8, 8, seed=1)
    lora, errors = ql.to_lora({"a.weight": Shifted(w, shift)}, 8)
    np.testing.assert_allclose(lora["a.weight"].delta(), shift, atol=1e-6)
    assert lora["a.weight"].w.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        errors["a.weight"].change, np.linalg.norm(shift) / np.linalg.norm(_double(w)), rtol=1e-3
    )


def _lora(**options):
    model = ql.loraify(MLP, rank=4, alpha=6, key=KEY, init="gaussian", **options)
    leaf = lambda x: x.replace(b=normal(*x.b.shape, seed=3)) if isinstance(x, ql.LoraArray) else x
    return jax.tree.map(leaf, model, is_leaf=ql.is_value)


@pytest.mark.slow
@pytest.mark.parametrize("rslora", [False, True])
def test_a_lora_of_at_most_the_rank_keeps_its_factors(rslora):
    model = _lora(rslora=rslora, dropout=0.1)
    lora, errors = ql.to_lora(model, 5)
    for x, y in zip(_weights(model), _weights(lora), strict=True):
        assert (y.a is x.a, y.b is x.b, y.w is x.w, y.dropout, y.rslora) == (True, True, True, 0, False)
        np.testing.assert_allclose(y.scaling, x.scaling, rtol=1e-7)
    assert [error.lost for error in errors.values()] == [0, 0, 0]
    _, _, change = _expected(_weights(model)[0], 4)
    np.testing.assert_allclose(errors["layers.0.weight"].change, change, rtol=1e-5)


@pytest.mark.slow
def test_a_lora_of_a_larger_rank_is_cut_without_its_sum(monkeypatch):
    def formed(self):
        raise AssertionError("the change was formed")

    model = _lora()
    monkeypatch.setattr(ql.LoraArray, "delta", formed)
    lora, errors = ql.to_lora(model, 2)
    monkeypatch.undo()
    for x, y, error in zip(_weights(model), _weights(lora), errors.values(), strict=True):
        _check(y, x, 2, error)


@pytest.mark.slow
def test_stacked_factors_are_cut_where_some_lack_the_stack():
    lora = ql.LoraArray(normal(6, 5), normal(3, 4, 5, seed=1), normal(6, 4, seed=2), alpha=8)
    found, errors = ql.to_lora({"a.weight": lora}, 2)
    change = np.einsum("or,nri->noi", 2 * _double(lora.b), _double(lora.a))
    u, s, vt = np.linalg.svd(change, full_matrices=False)
    best = (u[..., :2] * s[:, None, :2]) @ vt[:, :2]
    np.testing.assert_allclose(found["a.weight"].delta(), best, atol=1e-5)
    np.testing.assert_allclose(
        errors["a.weight"].lost, np.linalg.norm(s[:, 2:]) / np.linalg.norm(s), rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adalora", "gralora"])
def test_methods_that_are_a_lora_lose_nothing(name, monkeypatch, tmp_path):
    def formed(self):
        raise AssertionError("the change was formed")

    start = functools.partial(METHODS[name].start, rank=4)
    model = ql.adapt(eqx.nn.MLP(12, 6, 8, depth=1, key=KEY), start, key=KEY)
    moved = lambda x: x.replace(**{part: normal(*getattr(x, part).shape, seed=4) for part in x.trained()})
    model = jax.tree.map(lambda x: moved(x) if ql.is_value(x) else x, model, is_leaf=ql.is_value)
    expected = [x.merged() for x in _weights(model)]
    with monkeypatch.context() as patch:
        patch.setattr(ql.LoraArray, "delta", formed)
        patch.setattr(ql.LoraArray, "merged", formed)
        lora, errors = ql.to_lora(model, 8)
    assert [error.lost for error in errors.values()] == [0, 0]
    for x, y in zip(_weights(lora), expected, strict=True):
        np.testing.assert_allclose(x.merged(), y, atol=1e-5)
    peft.save_adapter(tmp_path, lora)


@pytest.mark.slow
def test_a_dora_is_approximated():
    model = _lora(dora=True)
    lora, errors = ql.to_lora(model, 4)
    for x, y, error in zip(_weights(model), _weights(lora), errors.values(), strict=True):
        assert y.magnitude is None
        _check(y, x, 4, error)


@pytest.mark.slow
def test_what_an_initialisation_took_out_of_the_base_is_remembered(tmp_path):
    model = ql.loraify(MLP, rank=4, key=KEY, init="pissa")
    lora, _ = ql.to_lora(model, 2)
    with pytest.raises(ValueError, match="Pass `base`"):
        peft.save_adapter(tmp_path, lora)
    peft.save_adapter(tmp_path, lora, base=lora)
    kept, _ = ql.to_lora(model, 4)
    peft.save_adapter(tmp_path / "kept", kept)  # as a PiSSA


@pytest.mark.slow
def test_what_is_trained_in_full_is_kept():
    base = {
        "embed.weight": normal(9, 6),
        "a.weight": normal(6, 6),
        "a.bias": normal(6),
        "b.weight": normal(4, 6),
    }
    model = ql.loraify(base, rank=2, key=KEY, where=["a"], bias="all", lora_bias=True, modules_to_save=["b"],
                       trainable_token_indices={"embed": [1, 3]})  # fmt: skip
    model["a.weight"] = _mixed(base["a.weight"], key=KEY, layout=None)
    lora, errors = ql.to_lora(model, 2)
    assert list(errors) == ["a.weight"]
    assert {name: type(x).__name__ for name, x in lora.items()} == {
        "embed.weight": "TrainableRows", "a.weight": "LoraArray", "a.bias": "LoraBias",
        "b.weight": "TrainableArray",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"only arrays trained in full: b\.weight"):
        ql.to_lora({"b.weight": model["b.weight"]}, 2)


@pytest.mark.slow
def test_adapted_biases_become_those_of_the_adapters(tmp_path):
    """Of one layer with such a bias, one with a bias, and one without."""
    base = {
        "a.weight": normal(6, 6), "a.bias": normal(6), "b.weight": normal(6, 6), "b.bias": normal(6, seed=1),
        "c.weight": normal(4, 6), "c.bias": None,
    }  # fmt: skip
    model = _adapted({name: x for name, x in base.items() if x is not None}) | {"c.bias": None}
    model["a.bias"] = ScaledBias(base["a.bias"], normal(6, seed=2))
    lora, errors = ql.to_lora(model, 4)
    assert list(errors) == ["a.weight", "b.weight", "c.weight"]
    np.testing.assert_allclose(lora["a.bias"].merged(), base["a.bias"] * normal(6, seed=2), atol=1e-6)
    np.testing.assert_array_equal(lora["b.bias"].merged(), base["b.bias"])
    assert not np.any(lora["c.bias"].merged())
    peft.save_adapter(tmp_path, lora)
    again = ql.merge(peft.load_adapter(tmp_path, base))
    for name, x in ql.merge(lora).items():
        np.testing.assert_array_equal(again[name], x)


@pytest.mark.slow
def test_the_adapted_bias_of_a_layer_on_its_own():
    model = _adapted({"weight": normal(6, 6), "bias": normal(6)})
    model["bias"] = ScaledBias(model["bias"], normal(6, seed=2))
    lora, _ = ql.to_lora(model, 4)
    assert isinstance(lora["bias"], ql.LoraBias)
    np.testing.assert_allclose(lora["bias"].merged(), model["bias"].merged(), atol=1e-6)


@pytest.mark.slow
def test_tied_weights_stay_tied():
    w = normal(5, 5)
    model = ql.adapt({"a.weight": w, "b.weight": w}, _mixed, key=KEY)
    lora, errors = ql.to_lora(model, 2)
    assert lora["a.weight"] is lora["b.weight"]
    assert errors["a.weight"] == errors["b.weight"]


@pytest.mark.slow
def test_no_change_at_all():
    lora, errors = ql.to_lora({"a.weight": Shifted(normal(4, 4), jnp.zeros((4, 4)))}, 2)
    assert errors["a.weight"] == (0, 0)
    assert not np.any(lora["a.weight"].delta())


def test_what_it_refuses():
    with pytest.raises(ValueError, match="The model has no adapters"):
        ql.to_lora(MLP, 2)
    model = _adapted(where=["layers.2"])
    with pytest.raises(ValueError, match=r"a rank of at least 1; found 0"):
        ql.to_lora(model, 0)
    with pytest.raises(
        ValueError, match=r"layers\.2\.weight has a rank of at most min\(out, in\) = 6; found 8"
    ):
        ql.to_lora(model, 8)
    with pytest.raises(ValueError, match=r"'layers\.7' in rank_pattern matches none"):
        ql.to_lora(model, 2, rank_pattern={"layers.7": 1})
    with pytest.raises(ValueError, match=r"It cannot be told which axes of x\.mixer"):
        ql.to_lora({"x.mixer": Shifted(normal(3, 4, 5), normal(3, 4, 5))}, 2)
