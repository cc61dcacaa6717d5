"""Chat templates as programs: compiled in a sandbox, and read to see what they do with content.

Templates come with models and requests, so they are foreign code: they run in jinja2's immutable
sandbox, and everything they get is made of plain JSON types (`chat_messages.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .errors import ValidationError
from .param_rules import shown


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template ready to run, and what its source tells about it."""

    source: str
    variables: frozenset[str]  # names that it reads from outside
    content_format: Literal["string", "openai"]  # openai: it loops over the parts of a content
    tests_strings: bool  # it tells strings from lists, so both can be given
    program: jinja2.Template

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Run the template; whatever it raises is a ValidationError."""
        try:
            return self.program.render({**variables, "messages": messages})
        except Exception as error:  # foreign code may raise anything
            raise ValidationError(
                f"the chat template cannot render these messages: {_reason(error)}",
                parameter="messages",
            ) from error


@lru_cache(maxsize=64)
def compile_template(source: str) -> CompiledTemplate:
    """Compile a template's source; a syntax error is a ValidationError."""
    environment = _environment()
    try:
        tree = environment.parse(source)
        program = environment.from_string(source)
    except Exception as error:  # beside syntax errors, its constants are computed here
        raise ValidationError(
            f"chat_template must be a Jinja template, got {shown(source)}: {_reason(error)}",
            parameter="chat_template",
            value=source,
        ) from error
    return CompiledTemplate(
        source=source,
        variables=frozenset(meta.find_undeclared_variables(tree)),
        content_format="openai" if _loops_over_content(tree) else "string",
        tests_strings=any(test.name == "string" for test in tree.find_all(nodes.Test)),
        program=program,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_PlainDict(),
        namespace=_PlainNamespace,
    )
    return environment


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks training text; renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what is set inside does not leak out.
        call = self.call_method("_body", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


class _PlainDict:
    """`dict(...)` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """`namespace(...)` for templates; names that begin with an underscore cannot be set."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no "self", so that it may be a keyword
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name!r}: names must not begin with an underscore"
        )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: no HTML escapes, Unicode kept."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _reason(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    line = getattr(error, "lineno", None)
    return f"{text} (line {line})" if line else text


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content, directly or through names given to it.

    Names are not scoped: a template that uses one name for two things is read generously.
    """
    message_lists, messages, contents = {"messages"}, set[str](), set[str]()

    def is_list(node: nodes.Node | None) -> bool:
        return _name_under(node) in message_lists

    def is_message(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in messages

    def is_content(node: nodes.Node | None) -> bool:
        node = _without_filters(node)
        if isinstance(node, nodes.Name):
            return node.name in contents
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" and is_message(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return node.arg.value == "content" and is_message(node.node)
        return False

    kinds = ((is_list, message_lists), (is_message, messages), (is_content, contents))
    bindings = list(_bindings(tree))
    for _ in range(len(bindings) + 1):  # each round finds at least one further name, or ends
        known = len(message_lists) + len(messages) + len(contents)
        for name, value in bindings:
            for is_kind, names in kinds:
                if is_kind(value):
                    names.add(name)
        for loop in tree.find_all(nodes.For):
            if is_list(loop.iter) and isinstance(loop.target, nodes.Name):
                messages.add(loop.target.name)
        if len(message_lists) + len(messages) + len(contents) == known:
            break
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Every (name, value) that an assignment or the call of a macro ties together."""
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
            if isinstance(assign.node, nodes.CondExpr):
                yield assign.target.name, assign.node.expr1
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            for parameter, argument in zip(macros[call.node.name].args, call.args, strict=False):
                yield parameter.name, argument


def _without_filters(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


def _name_under(node: nodes.Node | None) -> str | None:
    """The name at the bottom of filters, slices and tests like `messages[1:] | list`."""
    node = _without_filters(node)
    while isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node = _without_filters(node.node)
    return node.name if isinstance(node, nodes.Name) else None
