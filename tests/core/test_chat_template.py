"""The sandbox that templates run in, and what is read off their source."""

import pytest

from decodekit.core.chat_template import compile_template
from decodekit.core.errors import ValidationError

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__class__.__base__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.name }}",
        "{% include 'x' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_a_validation_error(source: str) -> None:
    try:
        template = compile_template(source)
        text = template.render(MESSAGES, {})
    except ValidationError:
        return
    assert text == ""  # the sandbox gives undefined in place of an unsafe attribute


def test_the_message_of_raise_exception_is_shown() -> None:
    with pytest.raises(ValidationError, match="roles must alternate"):
        compile_template("{{ raise_exception('roles must alternate') }}").render(MESSAGES, {})


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(ValidationError, match=r"line 2") as caught:
        compile_template("ok\n{% if %}")
    assert caught.value.parameter == "chat_template"


def test_variables_are_those_read_from_outside() -> None:
    template = compile_template(
        "{% set a = 1 %}{{ a }}{{ enable_thinking }}{% for m in messages %}{{ m }}{% endfor %}"
    )

    assert template.variables == {"enable_thinking", "messages"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% for d in documents %}{% for c in d.content %}{% endfor %}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", "openai"),
        ("{% for c in messages[0]['content'] %}{{ c.text }}{% endfor %}", "openai"),
        (
            "{% set rest = messages[1:] %}{% for m in rest | list %}{% set body = m.content %}"
            "{% for c in body | reject('none') %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(body) %}{% for c in body %}{{ c.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
            "{% else %}{% set loop_messages = messages %}{% endif %}"
            "{% for m in loop_messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
    ],
)
def test_content_format_is_read_off_the_loops(source: str, expected: str) -> None:
    assert compile_template(source).content_format == expected
