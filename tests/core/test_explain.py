"""What `explain` reports, and how the report reads."""

import html.parser
import inspect
import itertools
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.core.recording import note
from tests.samples import array


class Scaled(ql.ArrayValue):
    array: jax.Array
    scale: float = eqx.field(static=True, default=2.0)

    def materialise(self):
        return self.array * self.scale


class Refusing(ql.ArrayValue):
    array: jax.Array
    on_materialise = "error"

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self):
        raise RuntimeError("this is too large")


RULES = ql.RuleSet()


@ql.register("mul", rules=RULES)
def mul_rule(x: Scaled, y: jax.Array, **params):
    return Scaled(x.array * y, x.scale)


@ql.register("neg", rules=RULES)
def neg_rule(x: Scaled, **params):
    note("by its scale")
    return Scaled(x.array, -x.scale)


@ql.register("sub", rules=RULES)
def sub_rule(x: Scaled, y: jax.Array, **params):
    return ql.quaxify(lambda x: -x)(x)


X = array(np.arange(6.0).reshape(2, 3))


def explain(f, *args, **kwargs):
    return ql.explain(f, rules=RULES)(*args, **kwargs)


def _line(fn) -> str:
    """Where a rule was written: the line of its decorator."""
    return f"{inspect.getsourcefile(fn)}:{inspect.getsourcelines(fn)[1]}"


def _outline(report):
    return [(row.primitive, row.outcome, row.where) for row in report.rows]


class TestRows:
    def test_a_rule(self):
        (row,) = explain(lambda x: x * 3.0, Scaled(X)).rows
        assert row.primitive == "mul"
        assert row.operands == ("Scaled f32[2,3]", "f32[]")
        assert row.results == ("Scaled f32[2,3]",)
        assert row.outcome == "rule"
        assert row.rule == _line(mul_rule)
        assert row.source.startswith(f"{__file__}:")
        assert (row.count, row.bytes, row.where, row.hint) == (1, 0, (), "")

    def test_a_loss(self):
        report = explain(lambda x: jnp.tanh(-x), Scaled(X))
        assert _outline(report) == [("neg", "rule", ()), ("tanh", "materialised", ())]
        loss = report.first_loss
        assert report.materialised == (loss,)
        assert report.rules == report.rows[:1]
        assert (loss.primitive, loss.bytes, loss.results) == ("tanh", 24, ("f32[2,3]",))
        assert '@quaxlike.register("tanh")' in loss.hint

    def test_the_hint_fixes_it(self):
        rules = ql.RuleSet()
        hint = ql.explain(jnp.tanh, rules=rules)(Scaled(X)).first_loss.hint
        code = "\n".join(line[2:] for line in hint.splitlines()[1:]).replace(
            "...", "return Scaled(x.array, 1.0)"
        )
        names = {"quaxlike": ql, "Scaled": Scaled, "jax": jax}
        exec(code.replace('("tanh")', '("tanh", rules=rules)'), names | {"rules": rules})
        assert ql.explain(jnp.tanh, rules=rules)(Scaled(X)).first_loss is None

    def test_nothing(self):
        report = explain(jnp.sin, X)
        assert report.rows == ()
        assert report.first_loss is None
        assert "none of them was materialised" in report.summary

    def test_alike_events_are_counted(self):
        def f(x):
            for _ in range(3):
                x = -x
            return x

        (row,) = explain(f, Scaled(X)).rows
        assert row.count == 3

    def test_a_default(self):
        class Wild(ql.ArrayValue):
            array: jax.Array

            def materialise(self):
                return self.array

            @staticmethod
            def default(primitive, values, params):
                return primitive.bind(*(v.array if ql.is_value(v) else v for v in values), **params)

        (row,) = explain(jnp.sin, Wild(X)).rows
        assert row.outcome == "default"
        assert row.notes == ("Wild.default",)

    def test_notes_of_rules(self):
        (row,) = explain(lambda x: -x, Scaled(X)).rows
        assert row.notes == ("by its scale",)
        note("outside, where nothing records")

    def test_a_rule_that_declines_leaves_no_row(self):
        rules = ql.RuleSet()

        @ql.register("neg", rules=rules)
        def _(x: Scaled, **params):
            ql.quaxify(jnp.sin)(x)
            return NotImplemented

        assert _outline(ql.explain(lambda x: -x, rules=rules)(Scaled(X))) == [("neg", "materialised", ())]

    def test_all_operands_together(self):
        (row,) = explain(lambda x, y: jax.lax.add(x, y), Scaled(X), Scaled(X)).rows
        assert (row.outcome, row.bytes) == ("materialised", 48)

    def test_the_filter_spec(self):
        f = lambda x, y: (-x, -y)
        rows = ql.explain(f, (False, (True, False), False), rules=RULES)(Scaled(X), X).rows
        assert len(rows) == 1

    def test_what_is_quaxified_inside(self):
        report = ql.explain(lambda x: ql.quaxify(jnp.sin)(x), False)(Scaled(X))
        assert _outline(report) == [("sin", "materialised", ())]


class TestWhere:
    def test_nesting(self):
        @jax.jit
        def inner(x):
            return jnp.tanh(x).sum()

        def f(x):
            return jax.lax.scan(lambda c, _: (c + inner(x), None), 0.0, None, length=3)[0]

        report = explain(f, Scaled(X))
        assert report.first_loss.where == ("scan", "jit of inner")
        assert report.first_loss.count == 1

    def test_inside_a_rule(self):
        report = explain(lambda x: jax.lax.sub(x, X), Scaled(X))
        assert _outline(report) == [("sub", "rule", ()), ("neg", "rule", ("rule of sub",))]

    def test_operators_are_not_shown_as_jits(self):
        assert _outline(explain(lambda x: x * X, Scaled(X))) == [("mul", "rule", ())]

    @pytest.mark.parametrize(
        ("transform", "where"),
        [
            (lambda f: lambda x: jax.lax.cond(True, f, f, x), "cond"),
            (
                lambda f: (
                    lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(x)), (0, X))
                ),
                "while_loop",
            ),
            (jax.jit, "jit"),
            (jax.checkpoint, "checkpoint"),
        ],
    )
    def test_control_flow(self, transform, where):
        (loss,) = explain(transform(lambda x: jnp.sin(x)), Scaled(X)).materialised
        assert len(loss.where) == 1
        assert loss.where[0].startswith(where)

    @pytest.mark.parametrize("where", ["custom_jvp", "custom_vjp"])
    def test_custom_derivatives(self, where):
        f = getattr(jax, where)(lambda x: jnp.sin(x))
        if where == "custom_jvp":
            f.defjvp(lambda p, t: (f(*p), t[0]))
        else:
            f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
        (loss,) = explain(f, Scaled(X)).materialised
        assert loss.where == (where,)

    def test_a_body_that_is_traced_several_times_is_counted_once(self):
        def f(x):
            step = lambda c, _: (jnp.sin(x).sum() + c * 1.0, None)
            return jax.lax.scan(step, jnp.zeros(()), None, length=2)[0]

        carried = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) + X, jnp.cos(x)), x, None, length=2)[0]
        assert [row.count for row in explain(f, Scaled(X)).materialised] == [1]
        rows = explain(carried, Scaled(X)).materialised
        assert sorted((row.primitive, row.count) for row in rows if row.where) == [("cos", 1)]

    def test_what_is_called_twice_is_counted_twice(self):
        f = jax.jit(lambda x: jnp.sin(x))
        (loss,) = explain(lambda x: (f(x), f(x)), Scaled(X)).materialised
        assert (loss.count, loss.bytes) == (2, 48)

    @pytest.mark.quick("filter_jit")
    @pytest.mark.parametrize("transform", [jax.jit, eqx.filter_jit, jax.grad])
    def test_caches_hide_nothing(self, transform):
        inner = transform(lambda x: jnp.sin(x).sum())
        outer = jax.jit(ql.quaxify(inner))
        outer(Scaled(X))
        for _ in range(2):
            assert explain(inner, Scaled(X)).first_loss is not None
            assert ql.explain(lambda x: outer(x), False)(Scaled(X)).first_loss is not None

    def test_nothing_of_it_remains(self):
        f = ql.quaxify(jax.jit(lambda x: jnp.sin(x)))
        before = f(Scaled(X))
        explain(f, Scaled(X))
        np.testing.assert_array_equal(f(Scaled(X)), before)
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError):
            f(Scaled(X))


class Model(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class TestShapes:
    @pytest.mark.slow
    def test_a_large_model_needs_no_memory(self):
        """80 layers of 32k × 32k: 320 GiB of weights."""
        n = 2**15
        make = lambda: Model([eqx.nn.Linear(n, n, use_bias=False, key=jax.random.key(0)) for _ in range(80)])
        shapes = eqx.filter_eval_shape(make)
        weights = lambda m: [layer.weight for layer in m.layers]
        model = eqx.tree_at(weights, shapes, [Scaled(w) for w in weights(shapes)])
        report = explain(model, jax.ShapeDtypeStruct((n,), jnp.float32))
        assert report.first_loss.primitive == "dot_general"
        assert "_linear.py" in report.first_loss.through
        assert sum(row.bytes for row in report.rows) == 80 * 4 * n * n

    def test_a_type_that_refuses_does_not_stop_it(self):
        report = explain(lambda x: (jnp.sin(x), jnp.cos(x)), Refusing(X))
        assert [row.primitive for row in report.materialised] == ["sin", "cos"]
        (_, refusal) = report.first_loss.notes
        assert refusal == "Refusing.materialise raises RuntimeError: this is too large"
        assert report.first_loss.notes[0] == 'on_materialise "error"'

    def test_under_error_it_reports(self):
        with ql.on_materialise("error"):
            assert explain(jnp.sin, Scaled(X)).first_loss.notes == ('on_materialise "error"',)

    def test_under_warn_it_is_silent(self):
        with ql.on_materialise("warn"):
            assert explain(jnp.sin, Scaled(X)).first_loss is not None

    def test_static_arguments_stay(self):
        def f(x, power, *, flag):
            return x**power if flag else x

        assert explain(f, Scaled(X), 2, flag=True).first_loss.primitive in ("integer_pow", "square")

    def test_keys(self):
        class Keys(ql.ArrayValue):
            key: jax.Array

            def materialise(self):
                return self.key

        (loss,) = explain(jax.random.bits, Keys(jax.random.key(0))).materialised
        assert loss.primitive == "random_bits"


class TestTable:
    report = staticmethod(lambda: explain(lambda x: jnp.tanh(-x), Scaled(X)))

    def test_rich(self):
        text = str(self.report())
        assert "┃" in text
        for expected in (
            "primitive",
            "tanh",
            "materialised",
            "rule at core/test_explain.py:",
            "First loss: tanh",
        ):
            assert expected in text

    def test_without_rich(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich", None)
        head, neg, tanh, *_ = str(self.report()).splitlines()
        assert head.split()[:3] == ["primitive", "operands", "→"]
        assert neg.split()[0] == "neg"
        assert "Scaled f32[2,3] → f32[2,3]" in tanh
        assert tanh.index("materialised") == head.index("outcome")

    def test_narrow(self, monkeypatch):
        """Words are whole, a note that several rows share is written once, and a row has few lines."""
        monkeypatch.setenv("COLUMNS", "80")

        @ql.register("exp", rules=RULES)
        def noted(x: Scaled, **params):
            ql.note("there is no kernel for this platform, as far as anybody knows")
            return jnp.exp(x.materialise())

        def f(x):
            return jnp.exp(x), jnp.exp(-x), jnp.tanh(x)

        text = str(explain(f, Scaled(X)))
        assert max(map(len, text.splitlines())) <= 80
        assert text.count("there is no kernel for this platform, as far as anybody knows") == 1
        for word in ("primitive", "materialised", "rule at core/test_explain.py:", " at core/test_explain"):
            assert word in text
        bounds = [i for i, line in enumerate(text.splitlines()) if re.match("│ \\w", line)]
        assert max(end - start for start, end in itertools.pairwise(bounds)) <= 5

    def test_repr_is_the_table(self):
        report = self.report()
        assert repr(report) == str(report)

    def test_columns_that_say_nothing_are_left_out(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich", None)
        head = str(explain(jnp.tanh, Scaled(X))).splitlines()[0]
        assert "inside" not in head
        assert "notes" not in head


class _Page(html.parser.HTMLParser):
    """Checks that tags are closed in order; collects texts and what the page refers to."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


class TestPage:
    def test_stands_by_itself(self, tmp_path):
        class Odd(Scaled):
            pass

        Odd.__name__ = "Odd<script>"
        report = explain(lambda x: jnp.tanh(x), Odd(X))
        report.to_html(tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        page = _Page()
        page.feed(text)
        assert page.open == []
        assert page.links == []
        assert "<script" not in text
        assert "Odd<script> f32[2,3] → f32[2,3]" in page.text
        assert report.summary in page.text
        assert [p.name for p in tmp_path.iterdir()] == ["report.html"]

    def test_replaced_whole_or_not_at_all(self, tmp_path, monkeypatch):
        path = tmp_path / "report.html"
        path.write_text("before")
        monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            explain(jnp.tanh, Scaled(X)).to_html(str(path))
        assert path.read_text() == "before"
        assert [p.name for p in tmp_path.iterdir()] == ["report.html"]

    def test_in_notebooks(self):
        fragment = explain(jnp.tanh, Scaled(X))._repr_html_()
        assert fragment.startswith('<div class="quaxlike">')
        assert "<html" not in fragment
