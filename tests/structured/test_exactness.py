"""What the table of exactness says, tried against the libraries: no wrong text, no lost one."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from decodekit.core.constraint import FillState, Vocabulary
from decodekit.core.structured_params import StructuredOutputsParams
from decodekit.structured.exactness import HONOURED, KINDS
from decodekit.structured.guidance import GuidanceBackend
from decodekit.structured.outlines import OutlinesBackend
from decodekit.structured.schema_document import Document
from decodekit.structured.spec import spec_of
from decodekit.structured.validate import Validator
from decodekit.structured.xgrammar import XGrammarBackend

CORPUS = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "structured_corpus.json").read_text()
)
BACKENDS = {one.name: one for one in (GuidanceBackend, XGrammarBackend, OutlinesBackend)}
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# One schema for each row of the table: what it needs, and texts on either side.
PROBES: dict[str, tuple[Any, list[str], list[str]]] = {
    "type": ({"type": ["integer", "null"]}, ["1", "null"], ['"1"', "[]"]),
    "enum": ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
    "const": ({"const": {"a": [1]}}, ['{"a":[1]}', '{ "a": [1] }'], ['{"a":[2]}', "{}"]),
    "properties": (closed(a={"type": "null"}), ['{"a":null}'], ['{"a":1}', '{"a":null,"b":1}']),
    "required": (closed(a={"type": "null"}, b={"type": "null"}), ['{"a":null,"b":null}'], ["{}"]),
    "additionalProperties": (
        {"type": "object", "additionalProperties": {"type": "null"}},
        ["{}", '{"x":null,"y":null}'],
        ['{"x":1}'],
    ),
    "any value": ({"type": "array"}, ["[]", '[{"a":[1,"b"]}]'], ["{}", "[,]"]),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^x-": {"type": "null"}},
            "additionalProperties": False,
        },
        ['{"x-a":null}', "{}"],
        ['{"y":null}', '{"x-a":1}'],
    ),
    "patternProperties beside others": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "null"}},
            "additionalProperties": {"type": "boolean"},
        },
        ['{"x":null,"y":true}'],
        ['{"x":true}', '{"y":null}'],
    ),
    "minProperties": (
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
        ['{"a":null}'],
        ["{}"],
    ),
    "maxProperties": (
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
        ["{}", '{"a":null}'],
        ['{"a":null,"b":null}'],
    ),
    "recursion": (
        {"type": "array", "items": {"$ref": "#"}},
        ["[]", "[[],[[[[[[]]]]]]]"],
        ["[1]", "[[[[[[1]]]]]]"],
    ),
    "items": ({"type": "array", "items": {"type": "null"}}, ["[]", "[null,null]"], ["[1]"]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}},
        ["[]", "[null]", "[null,true]"],
        ["[true]", "[null,null]"],
    ),
    "minItems": ({"type": "array", "items": {"enum": [0]}, "minItems": 2}, ["[0,0]"], ["[0]"]),
    "maxItems": ({"type": "array", "items": {"enum": [0]}, "maxItems": 1}, ["[0]"], ["[0,0]"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"😀\\n"', '"abc"'], ['"\\n"', '"😀"']),
    "maxLength": ({"type": "string", "maxLength": 1}, ['"\\""', '"é"'], ['"ab"', '"\\n\\n"']),
    "pattern": (
        {"type": "string", "pattern": '^[^"]*$'},
        ['"a b"', '"é\\n"'],
        ['"a\\"b"'],
    ),
    "pattern with a length": (
        {"type": "string", "pattern": "^[a-z]+-[a-z]+$", "maxLength": 4},
        ['"a-b"'],
        ['"ab-cd"', '"ab"'],
    ),
    "several patterns": (
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
        ['"ab"', '"a b"'],
        ['"a"', '"b"'],
    ),
    "Unicode class": (
        {"type": "string", "pattern": "^\\p{L}+$"},
        ['"é"', '"abc"'],
        ['"1"', '"a b"'],
    ),
    "format": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"'],
        ['"2023-02-29"', '"2024-13-01"', '"2024-04-31"'],
    ),
    "minimum": ({"type": "integer", "minimum": -12}, ["-12", "-3", "0", "40"], ["-13", "-20"]),
    "maximum": ({"type": "integer", "maximum": 105}, ["105", "99", "-7"], ["106", "200"]),
    "minimum with a fraction": (
        {"type": "number", "minimum": 0.25},
        ["0.25", "0.3", "7"],
        ["0.2", "-1", "0"],
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.05}, ["0.15", "3"], ["0.12"]),
}


@pytest.fixture(scope="module")
def backends(tiny: Vocabulary) -> Any:
    made = {name: kind(tiny, {}) for name, kind in BACKENDS.items()}
    yield made
    made["outlines"].close()


def walk_in(program: Any, vocabulary: Vocabulary, text: str) -> bool:
    """Whether the text, in the tokenizer's spelling or byte by byte, is legal and may end."""
    single = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    for ids in (vocabulary.encode(text), [single[bytes([b])] for b in text.encode()]):
        matcher = program.matcher(vocabulary.eos_ids)
        if all(matcher.accept(token) for token in ids) and matcher.is_completed:
            return True
    return False


def test_every_row_of_the_table_has_a_probe() -> None:
    assert PROBES.keys() == HONOURED.keys()
    assert KINDS.keys() == BACKENDS.keys()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("row", PROBES)
def test_a_backend_is_exact_where_the_table_says_so(
    name: str, row: str, backends: Any, tiny: Vocabulary
) -> None:
    schema, right, wrong = PROBES[row]
    suited = backends[name].suit(spec_of(StructuredOutputsParams(json=schema)))

    assert bool(suited.refusals) is (name not in HONOURED[row])
    if not suited.refusals:
        program = backends[name].compile(suited.spec)
        assert [text for text in right if not walk_in(program, tiny, text)] == []
        assert [text for text in wrong if walk_in(program, tiny, text)] == []


def random_text(program: Any, vocabulary: Vocabulary, rng: random.Random) -> bytes | None:
    """Uniformly random legal tokens to the end; short ones every other time, so that it comes."""
    mask = torch.zeros(1, -(-vocabulary.size // 32), dtype=torch.int32)
    matcher = program.matcher(vocabulary.eos_ids)
    closing = {i for i, token in enumerate(vocabulary.tokens) if token in (b'"', b"}", b"]")}
    made: list[int] = []
    while len(made) < 1500:
        fill = matcher.fill(mask, 0)
        assert fill.state is not FillState.DEAD, made
        legal = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
        ids = [int(token) for token in legal if token not in vocabulary.eos_ids]
        if not ids or (len(ids) < len(legal) and rng.random() < 0.5):
            return b"".join(vocabulary.tokens[token] for token in made)
        if rng.random() < 0.5 or len(made) > 100:
            ids = [token for token in ids if token in closing] or ids
        made.append(rng.choice(ids))
        assert matcher.accept(made[-1])
    return None


def is_small(text: str) -> bool:
    return len(text) < 1_500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stride", "walks", "schemas"),
    [("guidance", 3, 19, 60), ("xgrammar", 7, 6, 20), ("outlines", 9, 4, 5)],
)
def test_random_walks_end_in_valid_documents(
    name: str, stride: int, walks: int, schemas: int, backends: Any, tiny: Vocabulary
) -> None:
    tried, ended = 0, 0
    for title, entry in list(CORPUS.items())[::stride]:
        schema = entry["schema"]
        asked = schema if isinstance(schema, dict) else json.dumps(schema)
        suited = backends[name].suit(spec_of(StructuredOutputsParams(json=asked)))
        if suited.refusals or (name == "outlines" and not is_small(suited.spec.text)):
            continue  # outlines takes seconds for a long expression
        program = backends[name].compile(suited.spec)
        validator = Validator(Document(schema))
        tried += 1
        for number in range(walks):
            text = random_text(program, tiny, random.Random(f"{title} {number}"))
            if text is not None:
                ended += 1
                assert is_valid(schema, text), (title, text)
                assert validator.valid(json.loads(text)), (title, text)
    assert tried >= schemas
    assert ended >= 0.9 * tried * walks


def is_valid(schema: Any, text: bytes) -> bool:
    """What jsonschema says; it divides floats, so multiples are left to the exact validator."""
    if "multipleOf" in json.dumps(schema):
        return True
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(kind(schema, format_checker=FORMATS).is_valid(json.loads(text)))
