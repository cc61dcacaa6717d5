"""Prompts in, lines of JSON out, and going on after an interruption."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from decodekit.core.engine import LLMEngine
from decodekit.core.params import SamplingParams

from .conftest import Decodekit

GREEDY = ("--temperature", "0", "--max-tokens", "4")
GOOD = '{"prompt": "abc"}\n'


def results(text: str) -> list[dict[str, Any]]:
    """Parse lines strictly: no NaN or Infinity, which are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def run(decodekit: Decodekit, tmp_path: Path) -> Callable[..., Result]:
    """Write `lines` to a file and generate from it to out.jsonl."""

    def call(lines: str, *options: str) -> Result:
        (tmp_path / "in.jsonl").write_text(lines)
        files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
        return decodekit("generate", "TINY", *files, *GREEDY, *options)

    return call


@pytest.fixture
def written(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    return lambda: results((tmp_path / "out.jsonl").read_text())


def test_a_result_has_the_text_and_how_it_came_about(
    decodekit: Decodekit, engine: LLMEngine
) -> None:
    result = decodekit("generate", "TINY", "--prompt", "abc", "--token-ids", *GREEDY)

    (record,) = results(result.stdout)
    assert result.exit_code == 0
    assert (record["index"], record["id"], record["prompt"]) == (0, 0, "abc")
    (output,) = record["outputs"]
    assert len(output["token_ids"]) == 4
    assert output["text"] == engine.parts.tokenizer.decode(output["token_ids"])  # type: ignore[union-attr]
    assert (output["finish_reason"], output["error"]) == ("length", None)
    assert record["chain"] == [{"stage": "greedy"}]
    plan = engine.explain(SamplingParams(temperature=0))
    assert record["fingerprint"] == plan.fingerprint


def test_the_chain_of_a_result_can_be_asked_for_again(decodekit: Decodekit) -> None:
    options = ("--top-k", "5", "--temperature", "0.7", "--request-seed", "1", "--max-tokens", "8")
    first = results(decodekit("generate", "TINY", "--prompt", "abc", *options).stdout)[0]

    chain = json.dumps(first["chain"])
    again = decodekit(
        *("generate", "TINY", "--prompt", "abc", "--chain", chain),
        *("--request-seed", "1", "--max-tokens", "8"),
    )

    assert results(again.stdout)[0] == first


def test_standard_input_is_one_prompt_a_line(decodekit: Decodekit) -> None:
    result = decodekit("generate", "TINY", *GREEDY, input="one\n\ntwo\n")

    assert sorted(record["prompt"] for record in results(result.stdout)) == ["one", "two"]


def test_every_form_of_prompt_is_run(run: Callable[..., Result], written: Any) -> None:
    lines = (
        '{"prompt": "abc", "params": {"max_tokens": 2}}\n'
        '{"prompt_token_ids": [1, 2, 3]}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "id": "talk"}\n'
    )

    assert run(lines, "--token-ids").exit_code == 0

    by_id = {record["id"]: record for record in written()}
    assert set(by_id) == {0, 1, "talk"}
    assert len(by_id[0]["outputs"][0]["token_ids"]) == 2
    assert by_id[1]["prompt_token_ids"] == [1, 2, 3]
    assert by_id["talk"]["messages"][0]["content"] == "hi"


def test_a_bad_line_fails_alone_with_its_number(run: Callable[..., Result], written: Any) -> None:
    lines = GOOD + '{"prompt": \n' + '{"prompt": "a", "params": {"top_p": 7}}\n' + GOOD

    result = run(lines)

    by_index = {record["index"]: record for record in written()}
    assert result.exit_code == 1
    assert "2 of 4 failed" in result.stderr
    assert by_index[1]["error"].startswith("line 2: not valid JSON")
    assert by_index[2]["error"].startswith("line 3: top_p")
    assert [len(by_index[i]["outputs"]) for i in range(4)] == [1, 0, 0, 1]


def test_chat_wraps_prompts_in_the_template(decodekit: Decodekit, engine: LLMEngine) -> None:
    wrapped = decodekit("generate", "TINY", "--chat", "--prompt", "hi", "--token-ids", *GREEDY)
    plain = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    by_hand = decodekit("generate", "TINY", "--prompt", plain, "--token-ids", *GREEDY)

    (one,), (other,) = results(wrapped.stdout), results(by_hand.stdout)
    assert one["messages"] == [{"role": "user", "content": "hi"}]
    assert one["outputs"] == other["outputs"]


def test_log_probs_are_written_as_json_numbers(decodekit: Decodekit) -> None:
    result = decodekit(
        *("generate", "TINY", "--prompt", "abc", "--logprobs", "2", "--token-ids", *GREEDY),
        *("--params", '{"allowed_token_ids": [5, 6], "logprobs_mode": "masked"}'),
        *("--logit-bias", '{"5": 1}'),
    )

    (output,) = results(result.stdout)[0]["outputs"]
    assert len(output["logprobs"]) == 4
    first = output["logprobs"][0]
    assert first[0]["token_id"] == output["token_ids"][0]
    assert sum(position[0]["logprob"] for position in output["logprobs"]) == pytest.approx(
        output["cumulative_logprob"]
    )


def test_results_are_not_overwritten_unasked(run: Callable[..., Result], written: Any) -> None:
    run(GOOD)
    before = written()

    refused = run(GOOD)
    assert refused.exit_code == 2
    assert "--resume goes on with it" in refused.stderr
    assert written() == before

    assert run(GOOD * 2, "--overwrite").exit_code == 0
    assert len(written()) == 2


def test_resume_runs_what_is_missing_and_mends_a_half_written_line(
    run: Callable[..., Result], written: Any, tmp_path: Path
) -> None:
    lines = "".join(f'{{"prompt": "{word}"}}\n' for word in ("a", "b", "c"))
    run(lines)
    whole = written()
    output = tmp_path / "out.jsonl"
    kept = output.read_text().splitlines(keepends=True)
    output.write_text(kept[0] + kept[1] + kept[2][:30])

    result = run(lines, "--resume")

    assert result.exit_code == 0
    assert output.read_text().startswith(kept[0] + kept[1])
    assert sorted(written(), key=lambda r: r["index"]) == sorted(whole, key=lambda r: r["index"])


def test_resume_runs_failures_again_and_leaves_the_rest(
    run: Callable[..., Result], written: Any
) -> None:
    run(GOOD + '{"prompt": "b", "params": {"top_p": 7}}\n')
    fixed = GOOD + '{"prompt": "b", "params": {"top_p": 0.7}}\n'

    assert run(fixed, "--resume").exit_code == 0
    assert [(r["id"], len(r["outputs"])) for r in written()] == [(0, 1), (1, 1)]
    assert "nothing to do" in run(fixed, "--resume").stderr


def test_resume_tells_of_a_repeated_id_again(run: Callable[..., Result], written: Any) -> None:
    lines = '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n'
    run(lines)

    result = run(lines, "--resume")

    assert result.exit_code == 1
    assert [record.get("error") for record in written()] == [
        None,
        "line 2: id 'x' was used by line 1",
    ]


def test_resume_refuses_another_input_and_another_file(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    run(GOOD)
    other = run('{"prompt": "xyz"}\n', "--resume")
    assert other.exit_code == 2
    assert "has another prompt for id 0" in other.stderr

    (tmp_path / "out.jsonl").write_text("notes of mine\n")
    strange = run(GOOD, "--resume")
    assert strange.exit_code == 2
    assert "is no result of `generate`" in strange.stderr
    assert (tmp_path / "out.jsonl").read_text() == "notes of mine\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompt", "a", "--resume"), "--resume needs an output file"),
        (("--prompt", "a", "-i", "b"), "not from both"),
        (("-i", "nosuch.txt"), "No such file"),
        (("--prompt", "a", "-o", "/nosuch/out"), "cannot be written"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: tuple[str, ...], said: str, decodekit: Decodekit
) -> None:
    result = decodekit("generate", "TINY", *options)

    assert result.exit_code == 2
    assert said in result.stderr


def test_a_request_that_fails_while_it_runs_is_told_in_its_record(
    decodekit: Decodekit, tmp_path: Path
) -> None:
    plugin = tmp_path / "breaks.py"
    plugin.write_text(
        "from decodekit import Kind, Stage\n"
        "class Breaks(Stage):\n"
        "    name = 'local.breaks'\n"
        "    kind = Kind.BIAS\n"
        "    def transform(self, logits, rows):\n"
        "        raise RuntimeError('boom')\n"
    )
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "a", "params": {"chain": ["local.breaks"]}}\n' + GOOD)

    result = decodekit("generate", "TINY", "-p", str(plugin), "-i", str(lines), *GREEDY)

    by_index = {record["index"]: record for record in results(result.stdout)}
    assert result.exit_code == 1
    assert "boom" in by_index[0]["outputs"][0]["error"]
    assert by_index[1]["outputs"][0]["error"] is None
