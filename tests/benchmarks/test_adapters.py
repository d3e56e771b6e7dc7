import jax
import pytest

import quaxlike as ql
from quaxlike.demo.model import VisionTransformer


@pytest.fixture(scope="module")
def adapters():
    """Imports scikit-learn, which takes a second."""
    pytest.importorskip("sklearn")
    from benchmarks import adapters

    return adapters


def _model():
    return VisionTransformer(width=16, depth=1, heads=2, key=jax.random.key(0))


@pytest.mark.slow
def test_sizes_are_those_of_nearly_equal_bytes(adapters):
    model, make = _model(), adapters.METHODS["LoRA"]
    size, trained = adapters.chosen_size(make, model, 1000)
    counts = {n: ql.summary(make(model, n, jax.random.key(0))).trainable for n in (size - 1, size, size + 1)}
    assert trained == counts[size]
    assert abs(trained - 1000) == min(abs(n - 1000) for n in counts.values())
    size, _ = adapters.chosen_size(adapters.METHODS["OFT"], model, 100)
    assert model.blocks[0].down.in_features % size == 0 == 16 % size


@pytest.mark.slow
def test_a_way_is_measured_and_shown(adapters, monkeypatch, default_promotion):
    monkeypatch.setattr(adapters, "RATES", (1e-2,))
    monkeypatch.setattr(adapters, "WIDTH", 16)
    monkeypatch.setattr(adapters, "DEPTH", 1)
    base, train, test = adapters.base_and_task(steps=20)
    rows = [adapters.measure(name, base, train, test, 1000, steps=8, seeds=2) for name in ("LoRA", "VeRA")]
    for row in rows:
        assert 0 <= row.accuracy <= 1
        assert row.milliseconds > 0 < row.temporaries
    page = adapters.page(rows, 0.1, "JAX 1")
    assert page.count("\n| ") == 4


def test_the_recorded_page_is_what_the_program_writes(adapters):
    record = adapters.json.loads(adapters.RECORD.read_text())
    rows = [adapters.Figures(**row) for row in record["rows"]]
    assert adapters.PAGE.read_text() == adapters.page(rows, record["without"], record["versions"])
    assert {row.name for row in rows} == {*adapters.METHODS}
