"""A template's run time, memory and output are limited, without an effect on ordinary templates."""

from __future__ import annotations

import time

import pytest

from lockstep.engine.chat_template import MAX_MESSAGES
from lockstep.engine.template_budget import MAX_WORK
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ChatTemplateError
from tests.engine.chat_templates import FAMILIES
from tests.engine.text_models import byte_level, parts

FOREVER = "range(100000)"
UNMETERED_S = 60.0
"""The budget is about a second of a processor; uncounted work would take minutes to centuries."""
DOUBLED_LIST = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
DOUBLED_TUPLE = DOUBLED_LIST.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("[1]", "(1, 2)")
LONG = "{% set s = 'x' * 100000 %}{% set s = s * 100 %}"


def doubled(step: str) -> str:
    return "{% set ns = namespace(s='x') %}{% for i in range(60) %}" + step + "{% endfor %}"


def forever_in(inner: str) -> str:
    return f"{{% for a in {FOREVER} %}}{inner}{{% endfor %}}"


HOSTILE = {
    "nested loops": forever_in(forever_in("")),
    "a huge range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "loops over what loops made": forever_in(f"{{% for b in {FOREVER}|map('string')|list %}}{{% endfor %}}"),
    "loops that filter all away": forever_in(f"{{% for b in {FOREVER} if b < 0 %}}{{% endfor %}}"),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% set x = [1, 2] %}{% for i in x recursive %}{{ loop(x) }}{% endfor %}",
    "doubled text by ~": doubled("{% set ns.s = ns.s ~ ns.s %}"),
    "doubled text by +": doubled("{% set ns.s = ns.s + ns.s %}"),
    "doubled text by join": doubled("{% set ns.s = [ns.s, ns.s]|join %}"),
    "doubled text by a block": doubled("{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}"),
    "a doubled list, printed": DOUBLED_LIST + "{{ ns.a }}",
    "a doubled list as JSON": DOUBLED_LIST + "{{ ns.a|tojson }}",
    "a doubled list, compared": DOUBLED_LIST + "{% set a = ns.a %}" + DOUBLED_LIST + "{{ a == ns.a }}",
    "a doubled list, joined": DOUBLED_LIST + "{{ '' ~ ns.a }}",
    "a doubled list in a format": DOUBLED_LIST + "{{ '%s' % ns.a }}{{ '{}'.format(ns.a) }}",
    "a doubled tuple as a key": DOUBLED_TUPLE + "{{ {ns.a: 1} }}",
    "a doubled tuple, looked up": DOUBLED_TUPLE + "{{ {}[ns.a] }}",
    "powers": "{% set ns = namespace(n=10**300) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "a power of a power": "{{ (10**100000)**100000 }}",
    "a division of giants": "{% set a = ('f' * 100000)|int(base=16) %}{{ a // 3 }}",
    "padding": "{{ 'x'.center(10**9) }}",
    "padding by a filter": "{{ 'x'|center(1000000000) }}",
    "padding in a format": "{{ '{:>1000000000}'.format(1) }}",
    "padding in a format's argument": "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "padding by %": "{{ '%1000000000d' % 1 }}",
    "padding by % and *": "{{ '%*d' % (1000000000, 1) }}",
    "padding by a filter of format": "{{ '%1000000000d'|format(1) }}",
    "repeated arguments": LONG + "{{ ('{0}' * 100000).format(s) }}",
    "replacing": LONG + "{{ s.replace('x', 'y' * 100000) }}",
    "replacing by a filter": LONG + "{{ s|replace('x', 'y' * 100000) }}",
    "replacing nothing": LONG + "{{ s.replace('', 'y' * 100000) }}",
    "joining": LONG + f"{{{{ s.join({FOREVER}|map('string')) }}}}",
    "joining by a filter": LONG + f"{{{{ {FOREVER}|join(s) }}}}",
    "indenting": "{{ ('\\n' * 100000)|indent(100000) }}",
    "indented JSON": f"{{{{ {FOREVER}|list|tojson(indent=100000) }}}}",
    "tabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "translating": LONG + "{{ s.translate({120: 'y' * 100000}) }}",
    "long literals in a block": f"{{% set s %}}{{% for i in {FOREVER} %}}{'x' * 100000}{{% endfor %}}{{% endset %}}",
    "searching": LONG + f"{{% for i in {FOREVER} %}}{{{{ 'y' in s }}}}{{{{ s.count('y') }}}}{{% endfor %}}",
    "slicing": LONG + f"{{% for i in {FOREVER} %}}{{% set t = s[1:] %}}{{% endfor %}}",
    "adding lists": f"{{% set x = {FOREVER}|list|batch(2)|list %}}{{{{ x|sum(start=[]) }}}}",
    "filler": "{{ lipsum(n=1000000) }}",
    "output": f"{{% for i in {FOREVER} %}}{{{{ 'x' * 1000 }}}}{{% endfor %}}",
}


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(parts(byte_level(), template))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tenth of the budget as by all of it. Since work is counted, an early end is the same on any machine; the
    time limit detects uncounted work."""
    monkeypatch.setattr("lockstep.engine.template_budget.MAX_WORK", MAX_WORK // 10)
    start = time.thread_time()
    with pytest.raises(ChatTemplateError) as caught:
        tokenizer(HOSTILE[name]).encode_chat([{"role": "user", "content": "hi"}])
    assert time.thread_time() - start < UNMETERED_S
    assert "\n" not in str(caught.value)


def test_a_template_is_stopped_at_the_same_point_every_time() -> None:
    """Work is counted, not timed."""
    text = "{% set ns = namespace(n=0) %}{% for a in range(N) %}{% for b in range(1000) %}{% endfor %}{% endfor %}ok"
    assert tokenizer(text.replace("N", "900")).render_chat([{"role": "user", "content": "x"}]) == "ok"
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=r"exceeds the work limit .*--chat-template FILE"):
            tokenizer(text.replace("N", "1000")).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_conversation_is_within_the_budget(family: str) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 20} for i in range(MAX_MESSAGES)]
    assert tokenizer(FAMILIES[family]).render_chat(messages).count("word") == 20 * MAX_MESSAGES


def test_the_longest_message_is_within_the_budget() -> None:
    text = "word " * 2_000_000
    for family in FAMILIES.values():
        assert text.strip() in tokenizer(family).render_chat([{"role": "user", "content": text}])


def test_metering_changes_no_value() -> None:
    template = (
        "{{ messages|length }}{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
        "{{ 'a' ~ 1 ~ none ~ 2.5 ~ [1] }}|{{ 1 < 2 < 3 }}|{{ 'x' in {'x': 1} }}|{{ {'a': 1}|tojson(indent=2) }}|"
        "{% for k, v in {'b': 1}.items() %}{{ k }}{{ v }}{% endfor %}|{{ [3, 1]|sort|join(',') }}|{{ undefined_name }}|"
        "{{ '%s-%d' % ('a', 3) }}{{ '{:>3}'.format(1) }}|{{ messages|map(attribute='role')|list }}|{{ 'abc'[::-1] }}|"
        "{{ range(3)|select('odd')|list }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -1 + 3 }}"
    )
    rendered = tokenizer(template).render_chat([{"role": "user", "content": "x"}])
    assert rendered == ("11/1True a1None2.5[1]|True|True|{\n  \"a\": 1\n}|b1|1,3||a-3  1|['user']|cba|[1]3310242")
