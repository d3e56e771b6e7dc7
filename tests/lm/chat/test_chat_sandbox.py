"""Chat templates that are damaged, or made to fill the memory."""

import pytest

from quaxlike.files import CheckpointError
from quaxlike.lm.chat import ChatTemplate

resource = pytest.importorskip("resource")
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def render(tmp_path):
    def render(text):
        (tmp_path / "chat_template.jinja").write_text(text)
        return ChatTemplate(tmp_path).render(MESSAGES).text

    return render


DAMAGED = {
    "parentheses": "{{ " + "(" * 150 + "1" + ")" * 150 + " }}",
    "sums": "{{ " + "1+" * 5_000 + "1 }}",
    "loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "break": "{% break %}",
    "keywords": "{{ raise_exception(a=1, a=2) }}",
    "conditions": "{% if 1 %}" * 120 + "{% endif %}" * 120,
    "digits": "{{ " + "9" * 5_000 + " }}",
    "syntax": "{% if %}",
    "a long name": "{% " + "x" * 10**5 + " %}",
    "a filter": "{{ 1|" + "x" * 10**5 + " }}",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged(name, render):
    with pytest.raises(CheckpointError, match=r"The chat template in .* is damaged: ") as error:
        render(DAMAGED[name])
    assert len(str(error.value)) < 1_000


_DOUBLING = "{{% set n = namespace(x={}) %}}{{% for i in range(60) %}}{{% set n.x = {} %}}{{% endfor %}}"
TOO_LARGE = [
    "{{ 'a' * 2**30 }}",
    "{{ 2**30 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ (9**9)**(9**9) }}",
    _DOUBLING.format("'a'", "n.x ~ n.x"),
    _DOUBLING.format("'a'", "n.x + n.x"),
    _DOUBLING.format("9", "n.x * n.x"),
    _DOUBLING.format("'a'", "[n.x, n.x]|join"),
    _DOUBLING.format("'a'", "n.x.join(['', n.x, ''])"),
    _DOUBLING.format("'a'", "n.x.replace('a', 'aa')"),
    _DOUBLING.format("'a'", "n.x|replace('a', 'aa')"),
    _DOUBLING.format("'a'", "'%s%s' % (n.x, n.x)"),
    _DOUBLING.format("'a'", "'{0}{0}'.format(n.x)"),
    _DOUBLING.format("'a'", "'%s%s'|format(n.x, n.x)"),
    "{{ '%0999999999d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ ('%' ~ '9' * 9 ~ 'd') % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ '%999999999s'|format('a') }}",
    "{{ 'a'.zfill(3 * 10**9) }}",
    "{{ 'a'.center(width=10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.rjust(10**9) }}",
    "{{ ('\\t' * 10**5).expandtabs(10**6) }}",
    "{{ 'a'|center(3 * 10**9) }}",
    "{{ ('\\n' * 10**5)|indent(10**6) }}",
    "{{ ('\\n' * 10**5)|indent('b' * 10**5) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ [1]|batch(10**9, 'a')|list }}",
    "{{ ['a']|map('center', 10**9)|list }}",
    "{% filter center(10**9) %}a{% endfilter %}",
    "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "{% autoescape 'a' * 2**30 %}{% endautoescape %}",
    "{% autoescape 'a'|center(2**30) %}{% endautoescape %}",
    "{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}{% endset %}",
    "{% macro m() %}{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}{% endmacro %}{{ m() }}",
    "{{ range(10**9)|list }}",
    "{{ lipsum(n=10**6) }}",
    "{{ 'a'.translate({97: 'b'}) }}",
]


@pytest.mark.quick(4)
@pytest.mark.parametrize("text", TOO_LARGE)
def test_too_large(text, render):
    most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = most()
    with pytest.raises(
        ValueError, match=r"rejects this conversation: (it makes|.*too big|.*undefined|.*supported)"
    ):
        render(text)
    assert most() - before < 400 << 10  # kibibytes, on Linux


def test_what_templates_do_is_as_before(render):
    pieces = {
        "{% set ns = namespace(x='') %}{% for m in messages * 2 %}": "",
        "{% set ns.x = ns.x ~ m.role ~ ': ' + m.content|trim %}": "",
        "{% endfor %}{{ ns.x }}": "user: hellouser: hello",
        "{{ '%5.2f' % 1.5 }}": " 1.50",
        "{{ '{:>6}'.format('ab') }}": "    ab",
        "{{ 'a'.center(5) }}": "  a  ",
        "{{ [1, 2]|join('-') }}": "1-2",
        "{{ {'a': [1]}|tojson(indent=2) }}": '{\n  "a": [\n    1\n  ]\n}',
        "{{ 7 * 6 + 2**5 % 3 }}": "44",
        "{{ [1] + [2] }}": "[1, 2]",
        "{{ 'x\\ny'|indent(2) }}": "x\n  y",
        "{% set kept %}<{{ ns.x[:4] }}>{% endset %}{{ kept.replace('<', '&lt;') }}": "&lt;user>",
        "{{ 1.5 * 2 }}": "3.0",
        "{{ true ~ none ~ nothing }}": "TrueNone",
        "{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(1) %}!{% endcall %}": "1!",
        "{{ 'a,b'.split(',') }}": "['a', 'b']",
        "{{ 'ab' | upper | replace('A', 'c') }}": "cB",
        "{{ 123456789012 }}{{ '{}'.format(123456789012) }}": "123456789012123456789012",
    }
    assert render("".join(pieces)) == "".join(pieces.values())
