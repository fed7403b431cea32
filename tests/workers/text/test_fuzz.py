"""Any chat template: text, or one of the two errors that are declared, in bounded work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError
from penstock.workers.request import RequestError
from penstock.workers.text.chat_template import MAX_OUTPUT_CHARS, ChatTemplate
from tests.fuzzing import ODD_TEXTS

PIECES = st.sampled_from(
    [
        *("{{ ", " }}", "{% ", " %}", "{# ", " #}", "{%- ", " -%}", "\n", " ", "text", "'", '"'),
        *("for m in messages", "endfor", "if m", "elif x", "else", "endif", "set x = 1", "endset"),
        *("macro f(a)", "endmacro", "f(f)", "generation", "endgeneration", "break", "continue"),
        *("m.content", "m['role']", "messages[0]", "messages | tojson", "range(10**9)", "x * 9**9"),
        *(
            "'a' * 10**8",
            "loop.index",
            "namespace(a=1)",
            "raise_exception('no')",
            "strftime_now(x)",
        ),
        *("().__class__", "''.format", "m.__init__", "x.y.z", "tools", "add_generation_prompt"),
        *("| join", "| length", "| trim", "| map('upper')", "| sort", "is defined", "not", "in"),
        *("filter upper", "endfilter", "block b", "endblock", "include 'x'", "import 'x' as y"),
        *("extends 'x'", "recursive", "loop(m)", "1 // 0", "-x", "x % 0", "[[[", ")))", "{}"),
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": ODD_TEXTS}
    ),
    min_size=1,
    max_size=3,
)


def check(source: str, messages: list[dict[str, str]]) -> None:
    try:
        template = ChatTemplate(source, {"bos_token": "<s>"})
    except ConfigError as error:
        assert "chat template" in str(error)
        return
    try:
        assert len(template.render(messages)) <= MAX_OUTPUT_CHARS
    except RequestError as error:
        assert error.code == "chat_template_error"


@settings(max_examples=300)
@given(pieces=st.lists(PIECES, max_size=14), messages=MESSAGES)
def test_any_pieces_of_templates(pieces, messages):
    check("".join(pieces), messages)


@settings(max_examples=150)
@given(bodies=st.lists(st.lists(PIECES, min_size=1, max_size=4), max_size=4), messages=MESSAGES)
def test_any_pieces_in_a_loop(bodies, messages):
    inner = "".join("{{ " + " ".join(body) + " }}" for body in bodies)
    check("{% for m in messages %}" + inner + "{% endfor %}", messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in b %}" * 40 + "{% endfor %}" * 40,
        "{% if a %}" * 2000 + "{% endif %}" * 2000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 20_000 + "1 }}",
        "{{ " + "1" * 10_000 + " }}",
        "{{ x" + "[0]" * 5000 + " }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{% set x = range(100000) | list %}"
        "{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "\ud800",
        "{{ '\ud800' }}",
        "{% set café = 1 %}{{ café }}",
        "{{ 1.e999 }}",
    ],
    ids=lambda source: ascii(source[:20]),
)
def test_templates_that_go_to_the_limits(source):
    check(source, [{"role": "user", "content": "hi"}])
