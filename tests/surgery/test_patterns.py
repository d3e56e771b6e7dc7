import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaxlike._patterns import PatternError, compiled, fullmatch, startmatch

_ATOMS = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a.]", "[a-c1]", "^", "$", r"\b", r"\B", "(?=a)", "(?!b)",
     "(?<=a)", "(?<!b.)", "layers", r"\A", r"\Z", r"\s", r"\D", r"\W"]
)  # fmt: skip
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{0,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda p: f"(?={p})"),
        inner.map(lambda p: f"(?!{p})"),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(_PATTERNS, st.text(alphabet="ab.1\n_", min_size=1, max_size=6))
def test_same_as_re(pattern: str, text: str):
    assert fullmatch(pattern, text) == (re.fullmatch(pattern, text) is not None)
    assert startmatch(pattern, text) == (re.match(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern", [r".*(?<=attn\.)q_proj", r".*(?<!vision\.)q_proj", r"(?<=a)b", r"a(?<=a)b"]
)
@pytest.mark.parametrize("text", ["attn.q_proj", "vision.q_proj", "q_proj", "b", "ab"])
def test_what_stands_before(pattern: str, text: str):
    assert fullmatch(pattern, text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["(.*)*!", "((((a*)*)*)*)*b", r"(a|a)*b", r"(?=(a*)*b)a", "(.*.*.*)*,"])
def test_steps_are_linear(pattern: str):
    """Otherwise they would be more than are allowed."""
    assert not fullmatch(pattern, "a" * 200)


EMPTY = ["(?:){2000000000}x", "((?:){2000}){2000000}x", "(|){9999}x", "(?:(?:)*){1000000}x"]


@pytest.mark.parametrize("pattern", EMPTY)
def test_empty_expressions_add_nothing(pattern: str):
    try:
        assert not fullmatch(pattern, "a" * 50)
    except PatternError:
        assert pattern not in EMPTY[:2]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [".*" * 900 + "x", "a?" * 900 + "x", "(?=.*.*.*.*x)*" * 20 + "a" * 41])
def test_steps_are_limited(pattern: str):
    with pytest.raises(PatternError, match="takes more than 50,000 steps on 'aaa"):
        fullmatch(pattern, "a" * 400)


@pytest.mark.parametrize(
    "pattern",
    ["(", "[", "a)", "a{999999999999}", r"(a)\1", "(?i)a", "a*+", "(?>a)", "a" * 20_000, "(" * 5000],
)
def test_refused(pattern: str):
    with pytest.raises(PatternError):
        compiled(pattern)


@pytest.mark.quick("10", "600", "900")
@pytest.mark.parametrize("depth", [10, 100, 300, 600, 900])
def test_deep_groups(depth: int):
    """Reading them takes fewer calls within each other than matching them."""
    with contextlib.nullcontext() if depth <= 100 else contextlib.suppress(PatternError):
        assert fullmatch("(" * depth + "a" + ")" * depth, "a")


def test_patterns_that_users_have():
    unsloth = r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)|"
    unsloth += r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"
    assert fullmatch(unsloth, "model.layers.11.self_attn.q_proj")
    assert not fullmatch(unsloth, "model.layers.11.self_attn.o_proj")
    assert fullmatch(r"^(?!.*vision).*\.(q|v)_proj$", "model.layers.0.q_proj")
    assert not fullmatch(r"^(?!.*vision).*\.(q|v)_proj$", "vision.layers.0.q_proj")
