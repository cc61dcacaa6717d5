"""The normal form means what the schema means: jsonschema says so, and it knows neither."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from decodekit.core.errors import ValidationError
from decodekit.structured.regex_syntax import found_in
from decodekit.structured.regex_tree import printed
from decodekit.structured.schema_document import Document
from decodekit.structured.schema_normal import normal_form
from decodekit.structured.schema_print import printed_schema
from decodekit.structured.validate import Validator, loads

CORPUS = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "structured_corpus.json").read_text()
)
NAMES = ["a", "b", "cc", "kind", 'é"x']
STRINGS = ["", "a", "ab", "kind", 'x"y', "12", "x-1", "foo", "é\n"]
PATTERNS = ["^a", "b$", "^[a-z]+$", "[0-9]{2}", "^x-", "^(foo|bar)$", '^[^"]*$', "^.{2,3}$"]
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def scalar(rng: random.Random) -> Any:
    return rng.choice([None, True, False, 0, 1, -3, 7, 2.5, *STRINGS])


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.random() if depth else 0.0
    if kind < 0.5:
        return scalar(rng)
    if kind < 0.7:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {name: value(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 3))}


def simple(rng: random.Random) -> Any:
    return rng.choice(
        [
            lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 4},
            lambda: {"type": "string", "pattern": rng.choice(PATTERNS)},
            lambda: {"type": "integer", "minimum": rng.choice([-4, 0, 1.5])},
            lambda: {"type": "number", "exclusiveMaximum": 5},
            lambda: {"enum": [scalar(rng) for _ in range(3)]},
            lambda: {"const": value(rng, 1)},
            lambda: {"type": rng.sample(["string", "null", "boolean", "integer", "array"], 2)},
            lambda: True,
        ]
    )()


def schema(rng: random.Random, depth: int, defs: list[str]) -> Any:
    if depth <= 0 or rng.random() < 0.2:
        return simple(rng)

    def inner() -> Any:
        return schema(rng, depth - 1, defs)

    made: dict[str, Any] = {}
    if rng.random() < 0.5:
        made |= {"type": "object", "properties": {name: inner() for name in NAMES[:3]}}
        made |= rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": inner()}])
        made |= rng.choice([{}, {"required": rng.sample(NAMES, 2)}])
        made |= rng.choice([{}, {}, {"minProperties": 1}, {"dependentRequired": {"a": ["b"]}}])
        made |= rng.choice([{}, {}, {"propertyNames": {"maxLength": 2}}])
        made |= rng.choice([{}, {}, {"unevaluatedProperties": False}])
    elif rng.random() < 0.4:
        made |= {"type": "array", "items": inner(), "maxItems": rng.randint(1, 3)}
        made |= rng.choice([{}, {"prefixItems": [inner()]}, {"minItems": 1}])
        made |= rng.choice([{}, {}, {"uniqueItems": True}, {"contains": simple(rng)}])
    elif defs:
        made |= {"$ref": f"#/$defs/{rng.choice(defs)}"}
    if not made or rng.random() < 0.4:
        word = rng.choice(["anyOf", "oneOf", "allOf", "if", "not"])
        if word == "if":
            made |= {"if": inner(), "then": inner(), "else": inner()}
        else:
            made[word] = inner() if word == "not" else [inner() for _ in range(rng.randint(1, 3))]
    return made


def root(rng: random.Random) -> Any:
    defs = ["n", "m"][: rng.randint(0, 2)]
    made = schema(rng, rng.randint(1, 3), defs)
    made = made if isinstance(made, dict) else {"anyOf": [made]}
    return {**({"$defs": {name: schema(rng, 2, defs) for name in defs}} if defs else {}), **made}


def pythonic(made: Any) -> Any:
    """The same schema for Python's `re`, whose `$` also stands before a last line end."""
    return json.loads(json.dumps(made).replace(')$"', ')\\\\Z"'))


def both(made: Any) -> tuple[Any, Any, bool] | None:
    """A validator of the schema, one of its normal form, and whether that is all of it."""
    try:
        normal = normal_form(json.dumps(made))
    except ValidationError:
        return None
    one = jsonschema.Draft202012Validator(made, format_checker=FORMATS)
    other = jsonschema.Draft202012Validator(pythonic(printed_schema(normal)))
    return one, other, not normal.refusals


@pytest.mark.parametrize("part", range(4))
def test_a_random_schema_keeps_its_documents(part: int) -> None:
    exact = 0
    for seed in range(part * 60, part * 60 + 60):
        rng = random.Random(seed)
        pair = both(made := root(rng))
        if pair is None:
            continue
        asked, normal, is_exact = pair
        exact += is_exact
        for _ in range(60):
            document = value(rng)
            wanted, got = asked.is_valid(document), normal.is_valid(document)
            assert not wanted or got, (seed, made, document)
            assert not is_exact or wanted is got, (seed, made, document)
    assert exact >= 15


def test_a_schema_without_a_value_has_none() -> None:
    rng = random.Random(7)
    for seed in range(150):
        made = root(random.Random(seed))
        try:
            normal_form(json.dumps(made))
        except ValidationError as error:
            if "no value" in str(error):
                validator = jsonschema.Draft202012Validator(made)
                assert not any(validator.is_valid(value(rng)) for _ in range(100)), made


@pytest.mark.parametrize("name", CORPUS)
def test_a_real_schema_keeps_its_documents(name: str) -> None:
    entry = CORPUS[name]
    document = Document(entry["schema"])
    normal = normal_form(json.dumps(entry["schema"]))
    printed_again = Validator(Document(pythonic(printed_schema(normal))))

    for text in entry["valid"]:
        assert Validator(document).valid(loads(text)), text
        assert printed_again.valid(loads(text)), text
    for text in entry["invalid"]:
        assert not Validator(document).valid(loads(text)), text
        assert normal.refusals or not printed_again.valid(loads(text)), text


@pytest.mark.parametrize(
    ("made", "pointer", "what"),
    [
        ({"items": {"type": "string"}, "uniqueItems": True}, "/uniqueItems", "uniqueItems"),
        ({"properties": {"a/b": {"pattern": "(?=x)"}}}, "/properties/a~1b/pattern", "pattern"),
        ({"not": {"items": {"type": "null"}}}, "/not/items", "items"),
        ({"type": "array", "contains": {"const": 1}}, "/contains", "contains"),
        ({"type": "object", "minProperties": 2}, "/minProperties", "minProperties"),
        ({"allOf": [{"not": {"pattern": "a"}}]}, "/allOf/0/not/pattern", "pattern"),
    ],
)
def test_what_cannot_be_said_is_named_by_its_pointer(made: Any, pointer: str, what: str) -> None:
    refusals = normal_form(json.dumps(made)).refusals

    assert [(item.pointer, item.what) for item in refusals] == [(pointer, what)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_searched_for(pattern: str) -> None:
    import re

    whole = re.compile(printed(found_in(pattern)))

    for text in [*STRINGS, "xfoo", "foobar", "bar", "ba\n", "12a", "xab"]:
        if not text.endswith("\n"):  # where Python's `$` also matches before the last line end
            assert bool(whole.fullmatch(text)) == bool(re.search(pattern, text)), text


def test_members_come_in_the_order_of_the_schema() -> None:
    made = {
        "$defs": {"base": {"properties": {"id": {}, "at": {}}}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"name": {}}, "required": ["more"]}],
    }

    printed_again = printed_schema(normal_form(json.dumps({"type": "object", **made})))

    assert list(printed_again["properties"]) == ["id", "at", "name", "more"]
