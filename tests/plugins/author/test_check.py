"""Every built-in stage, picker, stop and observer keeps the contract that authors are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from decodekit.core.errors import ValidationError
from decodekit.core.params import SamplingParams
from decodekit.core.reasoning import ReasoningMarkers
from decodekit.core.registry import Registry
from decodekit.core.stage import JointStage, Kind, Observer, Stage, Stop, Verdict
from decodekit.plugins.author.check import check_observer, check_stage, check_stop, law_names
from decodekit.plugins.author.hostile import Ask, Event, HostileEngine, built_ins, script
from decodekit.plugins.author.report import ContractError, merged

INF = float("inf")
SIZES = (1, 5, 65)
Examples = list[dict[str, Any]]

EXAMPLES: dict[str, Examples] = {
    "allowed_tokens": [{"ids": [0, 2, 4]}, {"ids": [0]}],
    "suppress_tokens": [{"ids": [1, 4]}, {"ids": [1, 4], "begin_only": True}],
    "bad_words": [{"words": [[1], [2, 3], [4, 4]]}, {"words": [[3, 2]], "scope": "both"}],
    "min_tokens": [{"n": 3}],
    "no_repeat_ngram": [{"n": 2, "window": 4}, {"n": 3, "whitelist": [3]}],
    "forced_tokens": [{"prefix": [2, 1, 2]}],
    "logit_bias": [{"bias": {0: 1.25, 3: -4.0, 4: -INF}}],
    "sequence_bias": [{"bias": [[[1], 2.5], [[2, 3], -7.0], [[4, 2, 0], -INF]]}],
    "repetition_penalty": [{"penalty": 1.3}, {"penalty": 1.3, "sustain": 1, "decay": 3}],
    "frequency_penalty": [{"penalty": 0.7}, {"penalty": 0.7, "scope": "both", "last_n": 4}],
    "presence_penalty": [{"penalty": 1.1, "scope": "prompt"}],
    "dry": [{"multiplier": 0.8, "allowed_length": 1, "breakers": [[4], [3, 0]]}],
    "length_decay": [{"start": 1, "factor": 1.5}],
    "temperature": [{"t": 0.3}],
    "dynamic_temperature": [{"low": 0.0, "high": 2.5, "exponent": 0.7}],
    "temperature_schedule": [{"points": [(0, 0.4), (3, 2.0, "cosine"), (9, 1)]}],
    "quadratic": [{"factor": 0.3}, {"factor": 2.0, "curve": 3.0}],
    "top_k": [{"k": 3}, {"k": 3, "ties": "index", "min_keep": 2}],
    "top_p": [{"p": 0.6}, {"p": 0.6, "ties": "value"}],
    "min_p": [{"p": 0.2}],
    "top_k_top_p": [{"k": 4, "p": 0.7}],
    "typical_p": [{"p": 0.4}],
    "epsilon": [{"epsilon": 0.05}],
    "eta": [{"epsilon": 0.2}],
    "top_a": [{"a": 0.6}],
    "top_n_sigma": [{"n": 0.8}],
    "tail_free": [{"z": 0.6}],
    "top_h": [{"alpha": 0.4}, {"alpha": 0.7, "window": 5}],
    "p_less": [{}],
    "xtc": [{"probability": 0.7, "threshold": 0.05, "protect": [0]}],
    "green_list": [{"context": 2, "scheme": "selfhash", "key": 17}],
    "synthid": [{"keys": [7, 90, -3], "ngram": 3}],
    "greedy": [{}],
    "race": [{}],
    "flat_race": [{}],
    "icdf": [{"skew": 0.3}, {}],
    "mirostat": [{"tau": 1.5, "eta": 0.9}, {"mode": 1, "tau": 1.5, "eta": 0.9}],
    "adaptive_p": [{"target": 0.4, "decay": 0.5}],
    "keyed_gumbel": [{"key": 11, "context": 2}],
}
# The formula of mirostat 1 holds the size of the vocabulary.
EXCEPT = {"mirostat": ["alive_only"]}
# Tried by their own tests: what they need is no row.
ELSEWHERE = {
    "vocab_padding": "tests/logits_processors/mask: acts on a head wider than the tokenizer",
    "per_request": "tests/logits_processors/test_per_request.py: runs a request's own callables",
    "thinking_budget": "below, with marks of reasoning",
}


def registry() -> Registry:
    return built_ins()


def is_tried(stage: type[Stage]) -> bool:
    return not issubclass(stage, JointStage) and stage.kind is not Kind.FORWARD


def test_every_built_in_stage_and_picker_is_tried() -> None:
    known = {name for name, stage in registry().stages.items() if is_tried(stage)}
    # A grammar's mask is tried with its backends.
    assert known - {"grammar"} == EXAMPLES.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_built_in_keeps_every_law(name: str) -> None:
    report = check_stage(
        registry().stage(name), examples=EXAMPLES[name], sizes=SIZES, without=EXCEPT.get(name, ())
    )

    report.raise_if_broken()
    assert report.of("runs").state == "kept"
    assert report.of("hostile_engine").state == "kept"


def test_the_thinking_budget_keeps_every_law() -> None:
    markers = ReasoningMarkers(start=(1,), end=(2,), closing=(2,))
    report = check_stage(
        registry().stage("thinking_budget"),
        examples=[{"budget": 1}, {"budget": 2, "message": [3]}],
        sizes=SIZES,
        histories=[((1,), (3, 3)), ((0, 1), (3,)), ((1, 2, 1), (4, 4, 4))],
        context={"reasoning": markers},
    )

    report.raise_if_broken()


def test_vocab_padding_keeps_every_law_on_a_padded_head() -> None:
    report = check_stage(
        registry().stage("vocab_padding"),
        sizes=(5, 8),
        context={"tokenizer_size": 4},
        without=["alive_only", "hostile_engine"],
    )

    report.raise_if_broken()


STOPS: dict[str, Mapping[str, Any]] = {
    "eos": {},
    "stop_ids": {"stop_token_ids": [1]},
    "length": {"max_tokens": 5},
    "repetition": {
        "repetition_detection": {"max_pattern_size": 3, "min_count": 3, "min_pattern_size": 1}
    },
}


def test_every_built_in_stop_keeps_its_laws() -> None:
    for stop in registry().stops:
        if stop.name in STOPS:
            check_stop(stop, request=STOPS[stop.name]).raise_if_broken()
    assert {stop.name for stop in registry().stops} >= STOPS.keys()


OBSERVERS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "logprobs": ({"logprobs": 3}, None),
    "kept_set": ({"kept_set": True}, None),
    "entropy": ({"entropy": True}, None),
    "output_tensors": ({"output_tensors": True}, None),
    "confidence": ({}, {"threshold": -2.0}),
}


def test_every_built_in_observer_keeps_its_laws() -> None:
    found = {observer.name: observer for observer in registry().observers}
    for name, (request, wish) in OBSERVERS.items():
        check_observer(found[name], request=request, wish=wish).raise_if_broken()


class Counting(Stop):
    """Ends after it was asked five times: by whom does not matter to it."""

    name = "counting"

    def bind(self, ctx: Any) -> Any:
        calls = []

        def check(sequence: Any) -> Verdict | None:
            calls.append(1)
            return Verdict("stop") if len(calls) >= 5 else None

        return check


class Talkative(Stop):
    """Says True."""

    name = "talkative"

    def bind(self, ctx: Any) -> Any:
        return lambda sequence: len(sequence.output_ids) > 3


def test_a_stop_with_a_memory_is_caught() -> None:
    report = check_stop(Counting())

    assert "it counts its calls" in report.of("asks_twice").sentence
    assert "it remembers what it was asked before" in report.of("branches").sentence
    assert "read sequence.output_ids, remember nothing" in report.of("tokens_only").sentence


def test_a_stop_that_returns_no_verdict_is_caught() -> None:
    sentence = check_stop(Talkative()).of("verdicts").sentence
    assert "neither a Verdict nor None" in sentence


class Meddling(Observer):
    """Writes into its tap, averages over the batch, and feeds a field that is not there."""

    name = "meddling"

    def bind(self, ctx: Any) -> Any:
        return "order"

    def taps(self, order: Any) -> Any:
        from decodekit.core.stage import Tap

        return frozenset({Tap.RAW})

    def measure(self, order: Any, taps: Any, tokens: torch.Tensor) -> Any:
        [view] = taps.values()
        mean = view.logits.masked_fill(view.logits == -INF, 0).mean()
        return {"mean": mean.expand(len(tokens))}

    def open(self, order: Any, tokenizer: Any) -> Any:
        return []

    def record(self, record: Any, token: int, values: Any) -> None:
        record.append(float(values["mean"]))

    def result(self, record: Any) -> Any:
        return {"mean_logit": record}


def test_an_observer_that_mixes_rows_or_feeds_unknown_fields_is_caught() -> None:
    report = check_observer(Meddling())

    assert "'mean' of a row is" in report.of("rows_apart").sentence
    assert "CompletionOutput has no such field" in report.of("records").sentence


# --- the hostile engine ---------------------------------------------------------------------------


def asks() -> list[Ask]:
    chains = [
        [{"stage": "no_repeat_ngram", "n": 2}, {"stage": "mirostat", "tau": 3.0}],
        [{"stage": "frequency_penalty", "penalty": 0.9}, {"stage": "top_p", "p": 0.8}],
        [{"stage": "xtc", "probability": 0.5}, {"stage": "synthid", "keys": [1, 2], "ngram": 2}],
    ]
    return [Ask(tuple(chain), (number, 1), 10 + number) for number, chain in enumerate(chains)]


@pytest.mark.parametrize("seed", range(4))
def test_built_in_chains_survive_long_scripts(seed: int) -> None:
    engine = HostileEngine(asks(), seed=seed, fusion=seed % 2 == 0)

    assert engine.differences(script(seed, 3, 30)) == []


def test_every_deed_of_a_script_happens() -> None:
    events = [
        Event(2, "wait", 0, 2),
        Event(3, "preempt", 1, 3),
        Event(4, "rewind", 2, 2),
        Event(5, "draft", 2, 3),
        Event(6, "fork", 0, 3),
    ]
    engine = HostileEngine(asks())

    answers = engine.run(events)

    assert set(answers) == {"0", "1", "2", "0+3"}
    assert answers["0+3"].tokens[:6] == answers["0"].tokens[:6]
    assert answers["0+3"].tokens != answers["0"].tokens
    assert all(len(answer.tokens) == 14 for answer in answers.values())


# --- reports --------------------------------------------------------------------------------------


def test_a_report_is_an_assertion_that_lists_each_breach() -> None:
    report = merged("two stops", [check_stop(Counting()), check_stop(Talkative())])

    with pytest.raises(ContractError, match="asks_twice: asked twice after each") as failure:
        report.raise_if_broken()
    assert str(failure.value).count("\n- ") == len(report.broken)


def test_laws_can_be_named_and_unknown_ones_are_refused() -> None:
    stage = registry().stage("top_k")

    assert [each.law for each in check_stage(stage, {"k": 3}, only=["ties"]).outcomes] == ["ties"]
    with pytest.raises(ValidationError, match="there is no law 'tie'; known: declarations"):
        check_stage(stage, {"k": 3}, only=["tie"])
    assert len(law_names()) == len(set(law_names()))


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(ValidationError, match="takes a Stage class"):
        check_stage(SamplingParams)  # type: ignore[arg-type]


def test_a_stage_that_no_example_makes_act_is_told_so() -> None:
    report = check_stage(registry().stage("top_k"))

    assert "none of the examples can be tried" in report.of("runs").sentence
