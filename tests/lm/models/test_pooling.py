"""The vectors of sentences; `pytest -m clients` compares fine-tuned ones with sentence-transformers."""

import json

import numpy as np
import pytest

from quaxlike.files import CheckpointError
from quaxlike.lm.finetune.tasks import Pairs
from quaxlike.lm.models import Pooling, mean_pooled
from tests.samples import array, normal

X = normal(5, 3)
SEEN = array([False, True, True, True, False])
_OURS = np.asarray(X)[1:4]
EXPECTED = {
    "cls": _OURS[0],
    "lasttoken": _OURS[-1],
    "max": _OURS.max(0),
    "mean": _OURS.mean(0),
    "mean_sqrt_len_tokens": _OURS.sum(0) / np.sqrt(3),
    "weightedmean": (_OURS * [[1], [2], [3]]).sum(0) / 6,
}


@pytest.mark.quick("weightedmean")
@pytest.mark.parametrize("mode", EXPECTED)
def test_each_mode(mode):
    found = Pooling((mode,), normalize=False)(X, SEEN)
    np.testing.assert_allclose(found, EXPECTED[mode], rtol=1e-6)
    unit = Pooling((mode,))(X, SEEN)
    np.testing.assert_allclose(unit, found / np.linalg.norm(found), rtol=1e-6)


def test_several_are_joined():
    found = Pooling(("mean", "cls"), normalize=False)(X, SEEN)
    np.testing.assert_allclose(found, np.concatenate([EXPECTED["mean"], EXPECTED["cls"]]), rtol=1e-6)
    np.testing.assert_array_equal(mean_pooled(X, SEEN), Pooling()(X, SEEN))


def test_a_mode_that_is_not_known():
    with pytest.raises(ValueError, match=r"takes modes of cls, max, .*; found \('middle',\)"):
        Pooling(("middle",))


def checkpoint(folder, settings, *others):
    kinds = ["Transformer", "Pooling", *others]
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    paths = ["", "1_Pooling", *(f"{i}_{kind}" for i, kind in enumerate(others, 2))]
    (folder / "modules.json").write_text(
        json.dumps([{**module, "path": path} for module, path in zip(modules, paths, strict=True)])
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"word_embedding_dimension": 3}, ("mean",)),
    ],
)
def test_that_of_a_checkpoint(settings, modes, tmp_path):
    assert Pooling.of(checkpoint(tmp_path, settings)) == Pooling(modes, normalize=False)


def test_normalised_or_not(tmp_path):
    assert Pooling.of(tmp_path) == Pooling(normalize=False)
    checkpoint(tmp_path, {"pooling_mode": "cls"}, "Normalize")
    assert Pooling.of(tmp_path) == Pooling(("cls",))
    task = Pairs(Pooling.of(tmp_path))
    assert task.pooling.modes == ("cls",)


def test_what_cannot_be_followed(tmp_path):
    checkpoint(tmp_path, {"pooling_mode": "middle"}, "Dense")
    with pytest.raises(CheckpointError, match=r"pooling_mode must be of cls, max, .*; found 'middle'"):
        Pooling.of(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"modules after the model must be Pooling or Normalize; found 'Dense'"
    ):
        Pooling.of(tmp_path)
