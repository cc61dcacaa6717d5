"""Control tokens in structural tags are written by id, and nowhere else."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from decodekit.core.constraint import Matcher, Vocabulary
from decodekit.core.errors import ValidationError
from decodekit.structured.token_tags import with_token_ids

Legal = Callable[[Matcher], set[int]]
END, TURN, TOOL = 1, 2, 3
ARGUMENTS = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "max_whitespace_cnt": 1,
}


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def walk(compile_with: Any, form: dict[str, Any], legal: Legal, path: list[int]) -> Matcher:
    """Accept a path, looking at each step for control tokens that are not named by the tag."""
    matcher = compile_with("xgrammar", "structural_tag", tag(form)).matcher([END])
    for token in path:
        allowed = legal(matcher)
        assert token in allowed and allowed.isdisjoint({0, TURN})
        assert matcher.accept(token)
    return matcher


def test_a_tag_that_begins_with_a_control_token_begins_with_its_id(
    compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    form = {"type": "tag", "begin": "<tool>\n", "content": ARGUMENTS, "end": "\n<tool>"}
    path = [TOOL, *tiny.encode('\n{"x":1}'), *tiny.encode("\n"), TOOL]

    matcher = walk(compile_with, form, legal, path)

    assert matcher.is_completed and legal(matcher) == {END}


def test_triggers_that_are_control_tokens_trigger_by_id(
    compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    call = {"type": "tag", "begin": "<tool>", "content": ARGUMENTS, "end": ";"}
    form = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [call]}
    path = [*tiny.encode("red "), TOOL, *tiny.encode('{"x":1};'), *tiny.encode("a")]

    matcher = walk(compile_with, form, legal, path)

    assert matcher.is_completed and TOOL in legal(matcher)


def test_free_text_of_a_tag_has_no_control_tokens(
    compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    call = {"type": "tag", "begin": "<t>", "content": ARGUMENTS, "end": "</t>"}
    for form in (
        {"type": "triggered_tags", "triggers": ["<t"], "tags": [call]},
        {"type": "any_text"},
        {"type": "any_tokens"},
    ):
        matcher = walk(compile_with, form, legal, tiny.encode("red a"))
        assert legal(matcher).isdisjoint({0, TURN, TOOL})


def test_names_of_tokens_become_ids(tiny: Vocabulary) -> None:
    form = {
        "type": "sequence",
        "elements": [
            {"type": "token", "token": "<tool>"},
            {"type": "token", "token": "red"},
            {"type": "exclude_token", "exclude_tokens": ["a"]},
            {"type": "const_string", "value": "x<turn>y"},
        ],
    }

    text, named = with_token_ids(tag(form), tiny)

    first, second, third, fourth = json.loads(text)["format"]["elements"]
    assert (first["token"], second["token"]) == (TOOL, tiny.encode("red")[0])
    assert set(third["exclude_tokens"]) == {0, END, TURN, TOOL, tiny.encode("a")[0]}
    assert [part["type"] for part in fourth["elements"]] == ["const_string", "token"] + [
        "const_string"
    ]
    assert named >= {TOOL, TURN}


def test_a_token_that_is_not_in_the_vocabulary_is_refused(tiny: Vocabulary) -> None:
    for token in ("<missing>", 10_000):
        with pytest.raises(ValidationError, match="which the vocabulary does not have"):
            with_token_ids(tag({"type": "token", "token": token}), tiny)


def test_triggers_of_both_sorts_in_one_tag_are_refused(tiny: Vocabulary) -> None:
    calls = [
        {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": ";"}
        for begin in ("<tool>", "call:")
    ]
    form = {"type": "triggered_tags", "triggers": ["<tool>", "call:"], "tags": calls}

    with pytest.raises(ValidationError, match="mixes triggers"):
        with_token_ids(tag(form), tiny)
