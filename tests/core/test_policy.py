"""What happens where a Value has to be materialised."""

import asyncio
import inspect
import threading
import traceback
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.zero import Zero
from quaxlike.core.policy import policy_key
from tests.samples import array


class Plain(ql.ArrayValue):
    """Without rules."""

    array: jax.Array

    def materialise(self):
        return ql.materialise(self.array) * 2


class Strict(ql.ArrayValue):
    array: jax.Array
    on_materialise = "error"

    def materialise(self):
        return self.array


class Refusing(ql.ArrayValue):
    array: jax.Array

    def aval(self):
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self):
        raise RuntimeError("this is too large")


class Wrapper(ql.ArrayValue):
    inner: ql.Value

    def materialise(self):
        return ql.materialise(self.inner)


X = array(np.arange(6.0).reshape(2, 3))


def tanh(x):
    return jnp.tanh(x)


def _line_of(fn) -> str:
    """Where the body of a one-line function is, as messages write it."""
    return f"{inspect.getsourcefile(fn)}:{inspect.getsourcelines(fn)[1] + 1}"


class TestModes:
    def test_allowed_by_default(self):
        assert jnp.array_equal(ql.quaxify(tanh)(Plain(X)), jnp.tanh(2 * X))

    def test_error(self):
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match=r"^tanh: no rule"):
            ql.quaxify(tanh)(Plain(X))

    def test_nothing_to_materialise(self):
        with ql.on_materialise("error"):
            assert jnp.array_equal(ql.quaxify(tanh)(X), jnp.tanh(X))

    def test_innermost_wins(self):
        f = ql.quaxify(tanh)
        with ql.on_materialise("error"):
            with ql.on_materialise("allow"):
                f(Plain(X))
            with pytest.raises(ql.MaterialisationError):
                f(Plain(X))

    def test_decorator(self):
        @ql.on_materialise("error")
        def f(x, depth=0):
            return f(x, depth - 1) if depth else ql.quaxify(tanh)(x)

        with pytest.raises(ql.MaterialisationError):
            f(Plain(X), depth=2)
        ql.quaxify(tanh)(Plain(X))

    def test_class_attribute(self):
        with pytest.raises(ql.MaterialisationError, match="Strict"):
            ql.quaxify(tanh)(Strict(X))
        with ql.on_materialise("allow"):
            ql.quaxify(tanh)(Strict(X))

    def test_class_attribute_of_a_value_inside(self):
        with pytest.raises(ql.MaterialisationError, match="Wrapper"):
            ql.quaxify(tanh)(Wrapper(Wrapper(Strict(X))))

    def test_the_strictest_operand_decides(self):
        with pytest.raises(ql.MaterialisationError, match="Plain and Strict would be made dense, 48 bytes"):
            ql.quaxify(jax.lax.add)(Plain(X), Strict(X))

    def test_unknown_mode(self, unchecked):
        with pytest.raises(ValueError, match=r"takes one of \('allow', 'warn', 'error'\); found 'raise'"):
            ql.on_materialise("raise")

    def test_unknown_mode_of_a_class(self):
        class Misspelt(Plain):
            on_materialise = "eror"

        message = r"`on_materialise` of Misspelt must be None or one of \('allow', .*; found 'eror'"
        with pytest.raises(ValueError, match=message):
            ql.quaxify(tanh)(Misspelt(X))

    def test_what_the_caller_asks_for_is_allowed(self):
        with ql.on_materialise("error"):
            assert jnp.array_equal(ql.quaxify(ql.materialise)(Plain(X)), 2 * X)


class TestWhere:
    """The mode reaches every way to a materialisation."""

    @pytest.mark.quick(7)
    @pytest.mark.parametrize(
        "f",
        [
            tanh,
            jax.jit(tanh),
            jax.vmap(tanh),
            jax.grad(lambda x: tanh(x).sum()),
            jax.checkpoint(tanh),
            lambda x: jax.lax.cond(True, tanh, tanh, x),
            lambda x: jax.lax.scan(lambda c, _: (tanh(x) + c, None), jnp.zeros((2, 3)), None, length=2),
            lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + tanh(x), jnp.zeros((2, 3))),
            lambda x: x.tolist(),
        ],
    )
    def test_inside(self, f):
        ql.quaxify(f)(Plain(X))
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError):
            ql.quaxify(f)(Plain(X))
        ql.quaxify(f)(Plain(X))

    @pytest.mark.parametrize("transform", [jax.jit, eqx.filter_jit, lambda f: jax.jit(jax.vmap(f))])
    def test_outside_and_cached(self, transform):
        f = transform(ql.quaxify(tanh))
        f(Plain(X))
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError):
            f(Plain(X))
        with ql.on_materialise("warn"), pytest.warns(ql.MaterialisationWarning):
            f(Plain(X))
        f(Plain(X))

    def test_inside_a_compiled_function(self):
        inner = jax.jit(tanh)
        f = jax.jit(lambda x: ql.quaxify(inner)(x))
        f(Plain(X))
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError):
            f(Plain(X))

    def test_threads_have_their_own(self):
        found = []
        with ql.on_materialise("error"):
            thread = threading.Thread(target=lambda: found.append(ql.quaxify(tanh)(Plain(X))))
            thread.start()
            thread.join()
        assert jnp.array_equal(found[0], jnp.tanh(2 * X))

    def test_tasks_have_their_own(self):
        async def strict(entered, leave):
            with ql.on_materialise("error"):
                entered.set()
                await leave.wait()
                with pytest.raises(ql.MaterialisationError):
                    ql.quaxify(tanh)(Plain(X))

        async def lax(entered, leave):
            await entered.wait()
            ql.quaxify(tanh)(Plain(X))
            leave.set()

        async def both():
            events = asyncio.Event(), asyncio.Event()
            await asyncio.gather(strict(*events), lax(*events))

        asyncio.run(both())
        ql.quaxify(tanh)(Plain(X))

    def test_tasks_that_overlap(self):
        async def task(mode, enter, entered, leave):
            await enter.wait()
            with ql.on_materialise(mode):
                entered.set()
                await leave.wait()

        async def both():
            go, first, second, done = (asyncio.Event() for _ in range(4))
            go.set()
            tasks = asyncio.gather(task("error", go, first, second), task("allow", first, second, done))
            await second.wait()
            done.set()
            await tasks

        asyncio.run(both())
        f = jax.jit(ql.quaxify(tanh))
        f(Plain(X))
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError):
            f(Plain(X))

    @pytest.mark.slow
    def test_jitted_functions_in_tasks_that_overlap(self):
        lossy, kept = jax.jit(ql.quaxify(tanh)), jax.jit(ql.quaxify(lambda x: x))
        kept_at = []

        async def task(mode):
            with ql.on_materialise(mode):
                for _ in range(3):
                    await asyncio.sleep(0)
                    if mode == "error":
                        with pytest.raises(ql.MaterialisationError):
                            lossy(Plain(X))
                    else:
                        lossy(Plain(X))
                    kept_at.append(kept(Plain(X)))

        async def all_of_them():
            await asyncio.gather(*map(task, ["error", "allow", "allow", "error"]))

        asyncio.run(all_of_them())
        lossy(Plain(X))
        assert len(kept_at) == 12
        assert kept._cache_size() <= 2  # at most one for each mode, however many tasks there are

    def test_an_abandoned_generator_leaves_its_own_mode(self):
        def lax():
            with ql.on_materialise("allow"):
                yield

        generator = lax()
        next(generator)
        with ql.on_materialise("error"):
            generator.close()
            with pytest.raises(ql.MaterialisationError):
                ql.quaxify(tanh)(Plain(X))
            with pytest.raises(ql.MaterialisationError):
                jax.jit(ql.quaxify(tanh))(Plain(X))
        ql.quaxify(tanh)(Plain(X))

    @pytest.mark.slow
    def test_one_object_in_several_threads(self):
        strict = ql.on_materialise("error")
        barrier = threading.Barrier(4)
        raised = []

        def run():
            with strict:
                barrier.wait()
                with pytest.raises(ql.MaterialisationError):
                    ql.quaxify(tanh)(Plain(X))
                barrier.wait()
            ql.quaxify(tanh)(Plain(X))
            raised.append(True)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert raised == [True] * 4


class TestWarnings:
    @pytest.mark.slow
    def test_once_per_call_site(self):
        f = ql.quaxify(tanh)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ql.on_materialise("warn"):
                for _ in range(3):
                    f(Plain(X))
                ql.quaxify(lambda x: -x)(Plain(X))
        assert [str(w.message).split(":")[0] for w in caught] == ["tanh", "neg"]
        assert all(w.category is ql.MaterialisationWarning for w in caught)

    def test_shown_at_the_user_s_line(self):
        with ql.on_materialise("warn"), pytest.warns(ql.MaterialisationWarning) as caught:
            ql.quaxify(tanh)(Plain(X))
        assert f"{caught[0].filename}:{caught[0].lineno}" == _line_of(tanh)

    def test_again_in_another_block(self):
        for _ in range(2):
            with ql.on_materialise("warn"), pytest.warns(ql.MaterialisationWarning):
                ql.quaxify(tanh)(Plain(X))

    def test_once_for_a_decorated_function(self):
        f = ql.on_materialise("warn")(ql.quaxify(tanh))
        with pytest.warns(ql.MaterialisationWarning):
            f(Plain(X))
        f(Plain(X))  # a second warning would be an error

    def test_as_errors(self):
        with ql.on_materialise("warn"), pytest.raises(ql.MaterialisationWarning):
            ql.quaxify(tanh)(Plain(X))


class Model(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return jnp.sin(self.layer(x))


def _model() -> Model:
    return Model(eqx.nn.Linear(3, 3, key=jax.random.key(0)))


class TestMessage:
    def test_our_rules_for_other_types_are_left_out(self):
        """Which there are depends on what the program has loaded."""
        assert any(rule.primitive.name == "asinh" for rule in ql.rules_for(Zero))
        with pytest.raises(ql.MaterialisationError) as caught, ql.on_materialise("error"):
            ql.quaxify(jnp.arcsinh)(Plain(X))
        assert "nearest" not in str(caught.value)

    def test_whole(self):
        @ql.register("lgamma", rules=(rules := ql.RuleSet()))
        def _(x: Strict, **params):
            return NotImplemented

        def lgamma(x):
            return jax.lax.lgamma(x)

        with pytest.raises(ql.MaterialisationError) as caught, ql.on_materialise("error"):
            ql.quaxify(lgamma, rules=rules)(Plain(X))
        (rule,) = rules
        lines = str(caught.value).splitlines()
        assert f"  nearest rule: lgamma(Strict) at {rule.source}" in lines
        assert [line for line in lines if "nearest" not in line] == [
            "lgamma: no rule for (Plain f32[2,3]); Plain would be made dense, 24 bytes,",
            f"  at {_line_of(lgamma)} (lgamma)",
            "  To keep the type, write a rule:",
            '    @quaxlike.register("lgamma")',
            "    def _(x: Plain, **params): ...",
            '  To let it happen: `with quaxlike.on_materialise("allow")`.',
        ]

    def test_a_rule_that_declined(self):
        @ql.register("lgamma", rules=(rules := ql.RuleSet()))
        def _(x: Plain, **params):
            return NotImplemented

        with pytest.raises(ql.MaterialisationError) as caught, ql.on_materialise("error"):
            ql.quaxify(jax.lax.lgamma, rules=rules)(Plain(X))
        (rule,) = rules
        assert str(caught.value).splitlines()[2:] == [
            "  To keep the type, have the rule that declined return a result for these operands:",
            f"    lgamma(Plain) at {rule.source}",
            "  or write one in a `quaxlike.RuleSet`, whose rules are tried first.",
            '  To let it happen: `with quaxlike.on_materialise("allow")`.',
        ]

    @pytest.mark.slow
    def test_a_warning_is_about_what_happened(self):
        with pytest.warns(ql.MaterialisationWarning) as caught, ql.on_materialise("warn"):
            ql.quaxify(jax.lax.lgamma)(Plain(X))
        first, *_, last = str(caught[0].message).splitlines()
        assert first == "lgamma: no rule for (Plain f32[2,3]); Plain was made dense, 24 bytes,"
        assert last == '  To silence this: `with quaxlike.on_materialise("allow")`.'

    @pytest.mark.parametrize("around", [lambda x: x, Plain])
    def test_what_would_be_lost(self, around):
        """A type that knows how its arrays are taken out says so, also where another one holds it."""

        class Guarded(Plain):
            on_materialise = "error"
            to_materialise = "Open it first."

        with pytest.raises(ql.MaterialisationError, match=r"\n  Open it first\.(\n-|$)"):
            ql.quaxify(tanh)(around(Guarded(X)))
        with pytest.raises(ql.MaterialisationError, match=r"To let it happen"), ql.on_materialise("error"):
            ql.quaxify(tanh)(Plain(X))

    def test_logical_bytes(self):
        big = Plain(jax.ShapeDtypeStruct((1024, 1024, 3), jnp.bfloat16))
        with pytest.raises(ql.MaterialisationError, match=r"6,291,456 bytes \(6.0 MiB\)"):
            jax.eval_shape(ql.on_materialise("error")(ql.quaxify(tanh)), big)

    @pytest.mark.parametrize(
        "transform",
        [
            lambda f: f,
            jax.jit,
            jax.grad,
            lambda f: jax.jit(jax.grad(f)),
            lambda f: jax.grad(jax.jit(f)),
            lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2),
        ],
    )
    def test_names_the_line_inside_transforms(self, transform):
        def f(x):
            return jnp.tanh(x).sum()

        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as caught:
            ql.quaxify(transform(f))(Plain(X))
        assert f"at {_line_of(f)} " in str(caught.value)

    def test_names_the_line_that_a_jitted_function_of_jax_was_called_from(self):
        """The equations inside `jnp.where` were made on no line of the user's."""

        def f(x):
            return jnp.where(x > 0, 1.0, x)

        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as caught:
            ql.quaxify(jax.jit(f))(Plain(X))
        assert f"at {_line_of(f)} " in str(caught.value)

    def test_names_the_line_under_several_jits(self):
        def f(x):
            return jnp.where(x > 0, 1.0, x)

        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as caught:
            ql.quaxify(jax.jit(lambda x: jax.jit(f)(x)))(Plain(X))
        assert f"at {_line_of(f)} " in str(caught.value)

    def test_in_the_backward_pass(self):
        @jax.custom_vjp
        def f(x):
            return x

        f.defvjp(lambda x: (x, x), lambda res, ct: (jnp.tanh(res) * ct,))

        class Kept(Plain):
            pass

        @ql.register("mul", rules=(rules := ql.RuleSet()))
        def _(x: Kept, y: jax.Array, **params):
            return Kept(x.array * y)

        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as caught:
            ql.quaxify(lambda x: jax.grad(lambda y: f(y).sum())(x), rules=rules)(Kept(X))
        assert f"at {__file__}:" in str(caught.value)

    @pytest.mark.slow
    def test_names_the_library_that_was_called(self):
        model = eqx.tree_at(lambda m: m.layer.weight, _model(), Plain(jnp.ones((3, 3))))
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as caught:
            ql.quaxify(model)(jnp.ones(3))
        assert f"at {_line_of(Model.__call__)} (Model.__call__), which calls " in str(caught.value)
        assert "_linear.py" in str(caught.value)

    def test_a_type_that_raises(self):
        with pytest.raises(RuntimeError, match="too large") as caught:
            ql.quaxify(tanh)(Refusing(X))
        note = "\n".join(caught.value.__notes__)
        assert "tanh: no rule for (Refusing f32[2,3])" in note

    def test_a_primitive_of_any_number_of_operands(self):
        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError) as caught:
            ql.quaxify(lambda x: jnp.concatenate([x, x, X]))(Plain(X))
        assert "def _(*xs: Plain | jax.Array, **params): ..." in str(caught.value)

    def test_keys(self):
        class Keys(ql.ArrayValue):
            key: jax.Array

            def materialise(self):
                return self.key

        with ql.on_materialise("error"), pytest.raises(ql.MaterialisationError, match="random_bits"):
            ql.quaxify(lambda k: jax.random.bits(k))(Keys(jax.random.key(0)))


class TestTraceback:
    """Below the user's own frames there are at most 12 lines, the first of which names the primitive."""

    @pytest.mark.parametrize(
        "run",
        [
            lambda x: ql.quaxify(tanh)(x),
            lambda x: ql.quaxify(jax.jit(tanh))(x),
            lambda x: jax.jit(ql.quaxify(tanh))(x),
            lambda x: ql.quaxify(jax.grad(lambda y: tanh(y).sum()))(x),
            lambda x: jax.grad(lambda y: ql.quaxify(tanh)(y).sum())(x),
            lambda x: ql.quaxify(jax.vmap(_model()))(x),
            lambda x: ql.quaxify(lambda x: jax.lax.scan(lambda c, _: (c + tanh(x), None), X, None, length=2))(
                x
            ),
        ],
    )
    def test_short(self, run):
        def call():
            with ql.on_materialise("error"):
                return run(Plain(X))

        with pytest.raises(ql.MaterialisationError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value)).splitlines()
        (last,) = [i for i, line in enumerate(shown) if line.startswith("quaxlike.MaterialisationError: ")]
        own = max(i for i, line in enumerate(shown) if line.startswith(f'  File "{__file__}"'))
        below = shown[own:]
        markers = [line for line in below if set(line.strip()) <= set("^~")]
        frame = 2 + len(markers)  # the user's own last frame: the place, the code, the marks under it
        assert last == own + frame
        assert len(below) - frame <= 12
        assert shown[0] == "Traceback (most recent call last):"
        assert "The above exception" not in "\n".join(shown)

    def test_whole_if_asked_for(self):
        def call():
            with ql.on_materialise("error"):
                return ql.quaxify(tanh)(Plain(X))

        before = jax.config.jax_traceback_filtering
        jax.config.update("jax_traceback_filtering", "off")
        try:
            with pytest.raises(ql.MaterialisationError) as caught:
                call()
        finally:
            jax.config.update("jax_traceback_filtering", before)
        assert "process_primitive" in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
def test_none_is_left_behind_at_the_limit_of_recursion():
    """Wherever the error comes: while a policy is entered, inside of it, or while it is left."""

    def deeper():
        with ql.on_materialise("error"):
            deeper()

    for _ in range(3):
        with pytest.raises(RecursionError):
            deeper()
        assert policy_key() is None
