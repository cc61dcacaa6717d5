"""What a request says of tools: which the model may call, and what holds its arguments to form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.param_rules import shown
from ...core.parsers import ToolParser, find_parser
from .errors import bad
from .parsers.forced import ForcedCalls, NamedCall
from .protocol import ChatFields
from .state import ServerState

MODES = ("none", "auto", "required")
MOST_TOOLS = 512


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools of one request: how its answers are read and what constrains them."""

    parser: type[ToolParser] | None = None  # None: an answer is text
    names: tuple[str, ...] = ()
    shown: list[dict[str, Any]] | None = None  # to the chat template
    constraint: dict[str, Any] | None = None  # fields of StructuredOutputsParams
    reason: str | None = "tool_calls"  # reported after calls; None: the engine's own
    most_calls: int | None = None
    notes: list[str] = field(default_factory=list)

    def reader(self, *, stream: bool) -> ToolParser | None:
        """Return a parser for one choice."""
        return None if self.parser is None else self.parser(self.names, stream=stream)


def tooling(state: ServerState, body: ChatFields) -> Tooling:
    """Check `tools` and `tool_choice`; a 400 names what does not fit."""
    functions = [_function(tool, place) for place, tool in enumerate(body.tools or ())]
    names = tuple(each["name"] for each in functions)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise bad(f"tools must have one function a name, got {shown(twice)} twice", "tools")
    choice: Any = body.tool_choice
    if choice is None:
        choice = "auto" if body.tools else "none"
    if choice == "none" or (choice == "required" and body.tools == []):
        is_hidden = state.settings.exclude_tools_when_tool_choice_none
        return Tooling(shown=None if is_hidden else body.tools)
    if isinstance(choice, str) and choice not in MODES:
        raise bad(
            f"tool_choice must be 'none', 'auto', 'required' or a named tool, got {choice!r}",
            "tool_choice",
        )
    if not body.tools:
        raise bad("tool_choice needs tools", "tool_choice")
    most = 1 if body.parallel_tool_calls is False else None
    if choice == "auto":
        return _auto(state, body, functions, most)
    _check_free(body)
    if choice == "required":
        constraint = {"json": _calls_schema(functions, most), "strict": _is_strict(functions)}
        return Tooling(ForcedCalls, names, body.tools, constraint, most_calls=most)
    name = _named(choice, names)
    [chosen] = [each for each in functions if each["name"] == name]
    constraint = {"json": chosen["parameters"], "strict": chosen["strict"]}
    return Tooling(NamedCall, (name,), body.tools, constraint, reason=None)


def _auto(
    state: ServerState, body: ChatFields, functions: Sequence[dict[str, Any]], most: int | None
) -> Tooling:
    settings = state.settings
    if not settings.enable_auto_tool_choice or settings.tool_call_parser is None:
        raise bad(
            "tool_choice is 'auto', but this server has no parser for tool calls "
            "(--enable-auto-tool-choice and --tool-call-parser); send tool_choice='none' to show "
            "the tools to the model alone, or 'required'",
            "tool_choice",
        )
    parser = parser_named(state, settings.tool_call_parser)
    names = tuple(each["name"] for each in functions)
    found = Tooling(parser, names, body.tools, most_calls=most)
    if not _is_strict(functions):
        return found
    if _is_constrained(body):
        found.notes.append("strict functions are not enforced: the request has a constraint")
        return found
    # A marker leads to one of these, so that those that are not strict are listed too.
    listed = [
        each if each["strict"] else {**each, "parameters": {"type": "object"}} for each in functions
    ]
    tag = parser.structural_tag(listed)
    if tag is None:
        found.notes.append(f"strict functions are not enforced by the parser {parser.name!r}")
        return found
    constraint = {"structural_tag": json.dumps(tag)}
    return Tooling(parser, names, body.tools, constraint, most_calls=most)


def parser_named(state: ServerState, name: str) -> type[ToolParser]:
    """Return the parser of a name; ValidationError for an unknown one."""
    return find_parser("tool_call_parser", name, state.engine.engine.parts.registry.tool_parsers)


def _function(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return name, parameters and strict of one tool."""
    where = f"tools[{place}]"
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise bad(f"{where} must be of type 'function' and have a function, got {shown(tool)}",
                  "tools")  # fmt: skip
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise bad(f"{where}.function.name must be a non-empty string, got {shown(name)}", "tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise bad(
            f"{where}.function.parameters must be a JSON schema, got {shown(parameters)}", "tools"
        )
    if place >= MOST_TOOLS:
        raise bad(f"tools must have at most {MOST_TOOLS} entries", "tools")
    schema = dict(parameters) if parameters else {"type": "object", "properties": {}}
    return {"name": name, "parameters": schema, "strict": function.get("strict") is True}


def _named(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise bad(
            "tool_choice must be {'type': 'function', 'function': {'name': ...}}, "
            f"got {shown(dict(choice))}",
            "tool_choice",
        )
    if name not in names:
        raise bad(
            f"tool_choice names {shown(name)}, which is none of tools: {', '.join(names)}",
            "tool_choice",
        )
    return name


def _is_strict(functions: Sequence[Mapping[str, Any]]) -> bool:
    return any(each["strict"] for each in functions)


def _is_constrained(body: ChatFields) -> bool:
    has_format = body.response_format is not None and body.response_format.get("type") != "text"
    return has_format or bool(body.structured_outputs)


def _check_free(body: ChatFields) -> None:
    """A forced call is a constraint by itself, and there can be one."""
    for name in ("structured_outputs", "response_format"):
        if _is_constrained(body) and getattr(body, name):
            raise bad(f"{name} must be absent when tool_choice forces a call", name)


# --- schemas --------------------------------------------------------------------------------------


def _calls_schema(functions: Sequence[Mapping[str, Any]], most: int | None) -> dict[str, Any]:
    """Return the schema of a list of calls: each the name of a function with its parameters."""
    definitions: dict[str, Any] = {}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": each["name"]},
                "parameters": _hoisted(each["name"], each["parameters"], definitions),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if most is not None:
        schema["maxItems"] = most
    if definitions:
        schema["$defs"] = definitions
    return schema


def _hoisted(name: str, schema: Mapping[str, Any], into: dict[str, Any]) -> Any:
    """Move what `schema` refers to into the definitions of the whole, under its own names."""
    if "$ref" not in json.dumps(schema):
        return schema
    prefix = "".join(letter if letter.isalnum() else "_" for letter in name)

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(item) for item in part]
        if not isinstance(part, Mapping):
            return part
        told = {key: moved(value) for key, value in part.items()}
        target = told.get("$ref")
        if target == "#":
            told["$ref"] = f"#/$defs/{prefix}"
        for place in ("#/$defs/", "#/definitions/"):
            if isinstance(target, str) and target.startswith(place):
                told["$ref"] = f"#/$defs/{prefix}.{target.removeprefix(place)}"
        return told

    own = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    for key in ("$defs", "definitions"):
        for label, part in schema.get(key, {}).items():
            into[f"{prefix}.{label}"] = moved(part)
    into[prefix] = moved(own)
    return {"$ref": f"#/$defs/{prefix}"}
