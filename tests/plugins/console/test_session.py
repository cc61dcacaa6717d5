"""One streamed answer: its text, its line, and Ctrl-C."""

import os
import signal

import pytest

from decodekit.core.engine import LLMEngine
from decodekit.core.errors import ValidationError
from decodekit.core.outputs import PlanReport, PlanStep
from decodekit.core.params import SamplingParams
from decodekit.plugins.console.session import Answer, steps_of, stream

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_the_pieces_are_the_answer_of_the_same_request_unstreamed(engine: LLMEngine) -> None:
    answer = Answer()
    pieces = list(stream(engine, "abc", LONG, answer))

    whole = Answer()
    for _ in stream(engine, "abc", LONG, whole):
        pass
    assert "".join(pieces) == answer.text == whole.text
    assert len(answer.token_ids) == 40
    assert answer.token_ids == whole.token_ids
    assert answer.finish_reason == "length"


def test_the_caller_keeps_its_parameters(engine: LLMEngine) -> None:
    before = LONG.clone()

    list(stream(engine, "abc", LONG, Answer()))

    assert before == LONG


def test_ctrl_c_ends_the_answer_and_not_the_program(engine: LLMEngine) -> None:
    answer = Answer()

    for count, _ in enumerate(stream(engine, "abc", LONG, answer), start=1):
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)

    assert len(answer.token_ids) == 3
    assert answer.finish_reason == "stopped by Ctrl-C"
    assert not engine.has_unfinished_requests()
    assert len(list(stream(engine, "abc", LONG, Answer()))) == 40


def test_a_second_ctrl_c_interrupts_at_once(engine: LLMEngine) -> None:
    with pytest.raises(KeyboardInterrupt):
        for _ in stream(engine, "abc", LONG, Answer()):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    assert not engine.has_unfinished_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_leaving_early_ends_the_request(engine: LLMEngine) -> None:
    pieces = stream(engine, "abc", LONG, Answer())
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]

    assert not engine.has_unfinished_requests()


def test_a_bad_request_is_refused_and_leaves_nothing_behind(engine: LLMEngine) -> None:
    with pytest.raises(ValidationError):
        list(stream(engine, [10**6], LONG, Answer()))

    assert not engine.has_unfinished_requests()


def test_the_line_under_an_answer_says_chain_tokens_speed_and_end() -> None:
    steps = (
        PlanStep("temperature", "temperature", "SHAPE", {"t": 0.7}, {"t": "request"}),
        PlanStep(
            "top_p",
            "top_p#2",
            "CUT",
            {"p": 0.9, "min_keep": 2, "ties": "index"},
            {"p": "chain", "min_keep": "chain", "ties": "default"},
        ),
        PlanStep("race", "race", "PICK"),
    )
    answer = Answer(
        token_ids=[1, 2, 3],
        finish_reason="stop",
        plan=PlanReport("abc", steps),
        first=10.0,
        last=10.5,
    )

    assert answer.summary() == (
        "temperature 0.7 > top_p#2(p=0.9, min_keep=2) > race | 3 tokens | 4.0 tokens/s | stop"
    )


def test_one_token_has_no_speed() -> None:
    answer = Answer(token_ids=[1], finish_reason="length", first=1.0, last=1.0)

    assert answer.summary() == "no chain | 1 token | length"


def test_long_values_are_cut() -> None:
    step = PlanStep("logit_bias", "logit_bias", "BIAS", {"bias": list(range(100))}, {})

    (shown,) = steps_of(PlanReport("abc", (step,)))

    assert len(shown) < 60
    assert shown.endswith("...")
