"""Prompts read from lines."""

from pathlib import Path

import pytest

from decodekit.core.errors import ValidationError
from decodekit.plugins.console.prompt_file import of_file, of_lines, of_texts


def test_a_text_line_is_a_prompt_and_blank_lines_are_left_out() -> None:
    records = of_lines(["one\n", "\n", "  two \r\n"], "text")

    assert [(r.index, r.id, r.line, r.prompt) for r in records] == [
        (0, 0, 1, {"prompt": "one"}),
        (1, 1, 3, {"prompt": "  two "}),
    ]


def test_an_object_gives_prompt_params_and_id() -> None:
    line = '{"prompt": "a", "params": {"top_p": 0.5}, "id": "x"}'

    (record,) = of_lines([line], "jsonl")

    assert (record.id, record.prompt, record.params) == ("x", {"prompt": "a"}, {"top_p": 0.5})
    assert record.error is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "line 1: not valid JSON"),
        ("[1]", "line 1: expected a JSON object, got [1]"),
        ("{}", "expected one of prompt, messages, prompt_token_ids, got none"),
        ('{"prompt": "a", "messages": []}', "got prompt and messages"),
        ('{"prompt": "a", "parms": {}}', "unknown key 'parms'"),
        ('{"prompt": "a", "parms": {}}', "did you mean 'params'?"),
        ('{"prompt": "a", "params": [1]}', "params must be a JSON object"),
        ('{"prompt": "a", "id": true}', "id must be a string or an integer"),
        ('{"prompt": "a", "id": [1]}', "id must be a string or an integer"),
    ],
)
def test_a_bad_line_becomes_a_record_that_says_why(line: str, said: str) -> None:
    bad, good = of_lines([line, '{"prompt": "b"}'], "jsonl")

    assert bad.error is not None
    assert bad.error.startswith("line 1: ")
    assert said in bad.error
    assert good.error is None


def test_an_id_that_repeats_is_an_error_of_the_later_line() -> None:
    records = of_lines(['{"prompt": "a", "id": 1}', '{"prompt": "b"}', '{"prompt": "c"}'], "jsonl")

    assert [record.error for record in records] == [
        None,
        "line 2: id 1 was used by line 1",
        None,
    ]


def test_the_name_tells_the_kind_of_a_file(tmp_path: Path) -> None:
    text, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    for path in (text, objects):
        path.write_text('{"prompt": "a"}\n')

    assert of_file(text, "auto")[0].prompt == {"prompt": '{"prompt": "a"}'}
    assert of_file(objects, "auto")[0].prompt == {"prompt": "a"}
    assert of_file(text, "jsonl")[0].prompt == {"prompt": "a"}


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")

    with pytest.raises(ValidationError, match="nosuch.*No such file"):
        of_file(tmp_path / "nosuch.txt", "auto")
    with pytest.raises(ValidationError, match="not UTF-8"):
        of_file(tmp_path / "latin.txt", "auto")


def test_texts_are_numbered() -> None:
    assert [(r.id, r.line) for r in of_texts(["a", "b"])] == [(0, None), (1, None)]
