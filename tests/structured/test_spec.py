"""Six spellings become one spec, and a malformed one is refused in a sentence with its place."""

import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from decodekit import SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.core.structured_params import StructuredOutputsConfig, StructuredOutputsParams
from decodekit.structured.spec import spec_of


class Person(BaseModel):
    name: str
    age: int | None = None


def made(**fields: Any) -> Any:
    return spec_of(StructuredOutputsParams(**fields))


def test_a_model_a_dict_and_a_text_are_one_grammar() -> None:
    schema = Person.model_json_schema()

    specs = {made(json=Person), made(json=schema), made(json=json.dumps(schema, indent=2))}

    assert len(specs) == 1
    assert len({spec.key for spec in specs}) == 1


def test_the_order_of_properties_is_part_of_the_grammar() -> None:
    one = {"properties": {"a": {}, "b": {}}}
    other = {"properties": {"b": {}, "a": {}}}

    assert made(json=one).key != made(json=other).key


def test_duplicate_choices_are_kept_once_and_the_empty_text_is_one() -> None:
    assert json.loads(made(choice=["a", "", "a"]).text) == ["a", ""]


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("^a$|^b$", "a|b"),
        ("(?i)ab[c-e]", "[Aa][Bb][C-Ec-e]"),
        ("a{,2}", "a{0,2}"),
        (r"\d+.", r"[0-9]+[^\n]"),
        (r"(?P<x>a)(?:b)*?", "ab*"),
        (r"[^\d\s]", r"[^\t-\r 0-9]"),
    ],
)
def test_a_regex_is_spelled_alike_for_all(pattern: str, whole: str) -> None:
    assert made(regex=pattern).text == whole


def test_dialects_of_grammar_are_told_apart() -> None:
    assert made(grammar='root ::= "a" root | "b"').kind == "grammar"
    assert made(grammar='start: "a" | "b"').kind == "lark"


def test_a_legacy_structural_tag_becomes_a_current_one() -> None:
    legacy = {
        "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
        "triggers": ["<f"],
    }

    tag = json.loads(made(structural_tag=json.dumps(legacy)).text)

    assert tag["format"]["type"] == "triggered_tags"
    assert tag["format"]["tags"][0]["content"]["json_schema"] == {"type": "object"}


def test_options_of_the_engine_hold_where_the_request_is_silent() -> None:
    config = StructuredOutputsConfig(
        disable_any_whitespace=True, disable_additional_properties=True
    )

    spec = spec_of(StructuredOutputsParams(json={"properties": {"a": {}}}), config)

    assert spec.option("whitespace") == "compact"
    assert json.loads(spec.text)["additionalProperties"] is False


def test_closing_leaves_joined_parts_their_names() -> None:
    base = {"type": "object", "properties": {"id": {}}}
    schema = {"allOf": [base, {"properties": {"name": {}}}]}

    text = made(json=schema, disable_additional_properties=True).text

    assert json.loads(text) == {**schema, "unevaluatedProperties": False}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json": '{"a": 1,}'}, "line 1 column"),
        ({"json": "[1]"}, "must be an object, true or false"),
        ({"json": {"type": "strin"}}, "did you mean 'string'.*at /type"),
        ({"json": {"properties": {"a": {"type": 3}}}}, "at /properties/a/type"),
        ({"json": {"required": "a"}}, "list of names, got 'a' at /required"),
        ({"json": {"items": {"enum": []}}}, "empty enum at /items/enum"),
        ({"json": {"properties": {"a/b": {"minimum": 5, "maximum": 3}}}}, "5 .* 3 at .*a~1b"),
        ({"json": {"$ref": "#/$defs/x"}}, "'#/\\$defs/x' has no target"),
        ({"json": {"$ref": "https://example.com/x"}}, "remote references are not fetched"),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "only to itself"),
        ({"json": {"pattern": "(a"}}, "position 0"),
        ({"json": "false"}, "no value can satisfy"),
        ({"regex": "([a-z]+"}, "position 0"),
        ({"regex": r"\bfoo"}, r"word boundary .*position 0"),
        ({"regex": "a(?=b)"}, "lookaround.*position 1"),
        ({"regex": r"(a)\1"}, "back-reference.*position 3"),
        ({"regex": "a^b"}, "anchor.*position 1"),
        ({"regex": "a++"}, "possessive"),
        ({"regex": "(a{1000}){1000}"}, "limit of 10,000 nested repetitions, got 1,000,000"),
        ({"regex": ""}, "must not be empty"),
        ({"regex": "a" * 20_001}, "limit of 20,000 characters"),
        ({"choice": ["a\ud800"]}, r"choice\[0\]"),
        ({"choice": [str(i) for i in range(10_001)]}, "limit of 10,000 choices"),
        ({"grammar": "hello"}, "EBNF.*Lark"),
        ({"grammar": 'rot ::= "a"'}, "no start rule 'root'; did you mean 'rot'"),
        ({"grammar": "root ::= x"}, "'x' in 'root' at line 1 column 10"),
        ({"grammar": 'root ::= root "a"'}, "has no sentence"),
        ({"grammar": "start: a\na: b"}, "'b' in 'a' at line 2"),
        ({"structural_tag": "{"}, "not valid JSON"),
        ({"structural_tag": '{"type": "structural_tag"}'}, "needs a 'format'"),
        ({"json": {}, "whitespace_pattern": "[a-z]"}, "only spaces, tabs and line ends"),
    ],
)
def test_a_malformed_grammar_is_refused_at_its_place(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        made(**fields)

    assert re.search(said, str(caught.value), re.S)
    assert caught.value.parameter in fields


def test_a_trigger_that_begins_no_tag_is_named() -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<a", "<"],
            "tags": [{"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "x"}],
        },
    }

    with pytest.raises(ValidationError, match="/format/tags/0/begin .*starts with 2"):
        made(structural_tag=json.dumps(tag))


def test_a_deep_schema_is_over_the_limit() -> None:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"items": schema}

    with pytest.raises(ValidationError, match="limit of 64"):
        made(json=schema)


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("Regex", {"pattern": "[0-9]+"}, ("regex", "[0-9]+")),
        ("CFG", {"definition": 'start: "a"'}, ("grammar", 'start: "a"')),
        ("JsonSchema", {"schema": "{}", "whitespace_pattern": None}, ("json", "{}")),
        ("Choice", {"items": ["a", "b"]}, ("choice", ["a", "b"])),
        ("Sequence", {"terms": ["x", "y"]}, ("regex", "xy")),
    ],
)
def test_a_type_of_outlines_is_read(
    kind: str, fields: dict[str, Any], field: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same names and fields as outlines 1.3 gives its types; the package itself is optional.
    module = ModuleType("outlines.types.dsl")
    module.to_regex = lambda term: "".join(term.terms)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    term = type(kind, (), {"__module__": module.__name__, **fields})()

    params = SamplingParams(structured_outputs=term)

    assert getattr(params.structured_outputs, field[0]) == field[1]
