"""A template that would make, loop or call without end is told as one sentence; honest ones keep their text."""

import pytest

from medusa_cli.data.conversations import BadRow, Message
from medusa_cli.data.template import render
from tests.tiny_folders import tiny_tokenizer

SAID = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEN = "{% for i in range(100000) %}"
FORTY = "{% set ns = namespace(x='ab') %}{% for i in range(40) %}"
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
BOMBS = {
    "doubled by +": FORTY + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "doubled by ~": FORTY + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "doubled by a block": FORTY + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}{{ ns.x|length }}",
    "times": "{{ 'a' * 10**10 }}",
    "times a list": "{{ ([messages[0].content] * 10**9)|length }}",
    "doubled list": FORTY.replace("'ab'", "[1, 2]") + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "joined": "{% set a = 'a' * 1000000 %}{{ ([a] * 100000)|join }}",
    "joined by a method": "{% set a = 'a' * 1000000 %}{{ a.join(['b'] * 100000) }}",
    "replaced": "{% set a = 'a' * 1000000 %}{{ a|replace('a', a)|length }}",
    "replaced by a method": "{% set a = 'a' * 1000000 %}{{ a.replace('a', a)|length }}",
    "centred": "{{ 'a'|center(10000000000) }}",
    "adjusted": "{{ 'a'.ljust(10000000000) }}",
    "formatted": "{{ '%10000000000d' % 1 }}",
    "formatted by a method": "{{ '{:>10000000000}'.format('a') }}",
    "formatted by a filter": "{{ '%10000000000d'|format(1) }}",
    "a power": "{{ 10 ** 100000 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "nested loops": f"{TEN}{TEN}{{% set a = 1 %}}{{% endfor %}}{{% endfor %}}",
    "two macros a call": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "many texts": f"{{% set ns = namespace(x=[]) %}}{TEN}{{% set ns.x = ns.x + ['a' * 900000] %}}{{% endfor %}}",
    "filling text": "{{ lipsum(n=100000) }}",
    "doubled by %": FORTY + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}{{ ns.x|length }}",
    "doubled by a format": FORTY + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}{{ ns.x|length }}",
    "doubled by a map": FORTY + "{% set ns.x = '{a}{a}'.format_map({'a': ns.x}) %}{% endfor %}{{ ns.x|length }}",
    "doubled bytes": FORTY.replace("'ab'", "'ab'.encode()")
    + "{% set ns.x = ns.x.replace('a'.encode(), 'aab'.encode()) %}{% endfor %}{{ ns.x|length }}",
    "joined with itself": "{% set a = 'a' * 900000 %}{{ a.join(a)|length }}",
    "translated": "{{ ('a' * 900000).translate({97: 'b' * 900000})|length }}",
    "indented by a text": "{{ ('a\n' * 1000)|indent('a' * 900000)|length }}",
    "wrapped": "{{ ('a' * 900000)|wordwrap(1)|length }}",
    "as wide as told": "{{ '%*d' % (1000000000, 1) }}",
    "as wide as a text": "{{ '{:{w}}'.format('a', w='99' ~ '99999999') }}",
    "summed lists": "{{ ([[1] * 1000] * 1000)|sum(start=[])|length }}",
    "lists in lists, shown": NESTED + "{{ ns.x }}",
    "lists in lists, as JSON": NESTED + "{{ ns.x|tojson|length }}",
    "lists in lists, compared": NESTED + NESTED.replace("ns", "other") + "{{ ns.x == other.x }}",
    "lists in lists, formatted": NESTED + "{{ ('%s' % ns.x)|length }}",
    "searched over and over": f"{{% set a = 'a' * 900000 %}}{TEN}{{% set b = a.count('aab') %}}{{% endfor %}}",
    "cut over and over": f"{{% set a = 'a' * 900000 %}}{TEN}{{% set b = a[1:] %}}{{% endfor %}}",
    "compared over and over": f"{{% set a = 'a' * 900000 %}}{{% set b = 'a' * 900000 ~ '' %}}"
    f"{TEN}{{% set c = a == b %}}{{% endfor %}}",
    "tested over and over": f"{{% set a = 'a' * 900000 %}}{TEN}{{% set c = a is lower %}}{{% endfor %}}",
    "listed over and over": f"{TEN}{{{{ range(99999)|map('string')|list|length }}}}{{% endfor %}}",
    "written by a loop": f"{TEN}{{{{ 'abcdefghijklmnop' * 10 }}}}{{% endfor %}}",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_template_without_end_is_stopped_before_it_takes_time_or_memory(bomb: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SAID + bomb
    with pytest.raises(BadRow, match="the chat template (makes|loops|asks|works)") as caught:
        render(tokenizer, [Message("user", "hello")], opening=True, parts=False)
    assert "chat template" in (caught.value.hint or "")


HONEST = {
    "loop": SAID,
    "loop variables": "{% for m in messages %}"
    "{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.nextitem }}{% endfor %}",
    "filters": "{{ messages|map(attribute='content')|join(', ')|upper|replace('L', 'l') }}{{ messages|tojson }}",
    "operators": "{{ 'a' ~ 1 ~ none }}{{ 'b' + 'c' }}{{ 'd' * 3 }}{{ '%s|%3d' % ('e', 4) }}{{ 7 % 4 }}{{ 2 ** 10 }}",
    "macro": "{% macro said(m) %}<{{ m.content|trim }}>{% endmacro %}{% for m in messages %}{{ said(m) }}{% endfor %}",
    "else and filter of a loop": "{% for m in messages if m.role == 'x' %}{{ m }}{% else %}nobody{% endfor %}",
    "recursion": "{% for x in [[1, [2]], [3]] recursive %}({{ loop(x) if x is sequence else x }}){% endfor %}",
    "break": "{% for m in messages %}{% break %}{% endfor %}{% for k, v in {'a': 1}.items() %}"
    "{{ k }}{{ v }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "formats": "{{ '{0}: {1:>6}'.format('a', 3) }}{{ '%s%%' % 5 }}{{ '{{\"a\": {x}}}'.format(x=messages[0].content) }}",
    "slices and tests": "{{ messages[1:]|length }}{{ messages[0].content[:3] }}{% if messages is iterable and 'role' "
    "in messages[0] and messages[0].content is not mapping %}yes{% endif %}{{ missing is defined }}",
    "lists and dictionaries": "{{ [1, 'a', {'b': (2, none)}] }}{{ {'a': [1]}|tojson(indent=2) }}{{ [[2], [1]]|sort }}",
    "one by one": "{{ messages|map(attribute='role')|unique|list }}{{ messages|selectattr('role', 'equalto', 'user')"
    "|map(attribute='content')|join(' ') }}{{ messages|groupby('role')|length }}{{ [[1], [2]]|sum(start=[]) }}",
    "dates and namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
}


@pytest.mark.parametrize("template", HONEST.values(), ids=HONEST.keys())
def test_an_honest_template_gives_the_library_s_own_text(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    messages = [Message("user", "hello"), Message("assistant", " hi "), Message("user", "well")]
    own = tokenizer.apply_chat_template(
        [{"role": one.role, "content": one.content} for one in messages], tokenize=False, add_generation_prompt=True
    )
    assert render(tokenizer, messages, opening=True, parts=False) == own


def test_what_is_given_may_be_long() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}{{ ns.x }}"
    )
    messages = [Message("user", "word " * 20_000)] * 20
    assert len(render(tokenizer, messages, opening=True, parts=False)) == 20 * 100_000
