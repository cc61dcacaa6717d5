"""The advisor's rules, each with what it finds and what it leaves alone."""

from typing import Any

import pytest
import torch

from decodekit import SamplingParams
from decodekit.core.plan import Planner
from decodekit.core.presets import Presets
from decodekit.core.registry import Registry
from decodekit.core.stage import Finding, Reviewer
from decodekit.plugins.review import decodekit_reviewers

REGISTRY = Registry.load(autoload=False)
RULES = [rule.name for rule in decodekit_reviewers()]


def make_planner(registry: Registry = REGISTRY, **settings: Any) -> Planner:
    return Planner(
        registry,
        vocab_size=300,
        tokenizer_size=300,
        max_model_len=512,
        eos_ids=(0,),
        device=torch.device("cpu"),
        plan_review=True,
        **settings,
    )


PLANNER = make_planner()


def found(params: SamplingParams, planner: Planner = PLANNER) -> list[str]:
    """The rules that found something, each of which is in the notes too."""
    plan = planner.admit(params.snapshot())
    for advice in plan.advice:
        assert f"advice: {advice}" in plan.report.notes
        assert advice.finding.remedy and "\n" not in str(advice)
    return [advice.rule for advice in plan.advice]


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"temperature": 0.7, "top_p": 0.9}, []),
    ({"temperature": 1.3, "top_p": 0.1}, ["hot_tiny_top_p"]),
    ({"temperature": 1.3, "top_p": 0.5}, []),
    ({"temperature": 0.7, "top_p": 0.1}, []),
    ({"chain": ["top_p", "temperature"], "temperature": 1.4, "top_p": 0.15}, ["hot_tiny_top_p"]),
    ({"temperature": 1.5}, []),
    ({"temperature": 1.6}, ["too_hot"]),
    ({"chain": [{"stage": "dynatemp", "low": 0.5, "high": 2.0}]}, ["too_hot"]),
    ({"chain": [{"stage": "temperature_schedule", "points": [[0, 1.0], [5, 3.0]]}]}, ["too_hot"]),
    ({"top_k": 40, "top_p": 0.9}, ["top_k_and_top_p"]),
    ({"top_k": 40, "top_p": 1.0}, []),
    ({"profile": "sglang", "top_k": 40, "top_p": 0.9}, ["top_k_and_top_p"]),
    ({"repetition_penalty": 1.1}, []),
    ({"repetition_penalty": 1.1, "presence_penalty": 0.2}, ["stacked_penalties"]),
    ({"repetition_penalty": 1.1, "frequency_penalty": 0.2}, ["stacked_penalties"]),
    ({"frequency_penalty": 0.1, "presence_penalty": 0.2}, []),
    ({"n": 5}, []),
    ({"best_of": 3}, []),
    ({"best_of": 4}, ["many_candidates"]),
    ({"n": 5, "best_of": 5}, []),
    ({"temperature": 0}, []),
    ({"temperature": 0, "top_p": 1.0, "top_k": -1}, []),
    ({"temperature": 0, "top_p": 0.9}, ["idle_cuts"]),
    ({"temperature": 0, "chain": [{"stage": "top_k", "k": 5}]}, ["idle_cuts"]),
    ({"temperature": 0, "chain": ["temperature"]}, []),
]


@pytest.mark.parametrize(("fields", "expected"), CASES)
def test_what_a_request_is_told(fields: dict[str, Any], expected: list[str]) -> None:
    assert found(SamplingParams(**fields)) == expected


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_doc_line(rule: str) -> None:
    assert next(item for item in decodekit_reviewers() if item.name == rule).__doc__


def test_cuts_at_temperature_0_are_told_whenever_they_are_set() -> None:
    params = SamplingParams(temperature=0)
    params.min_p = 0.1
    assert found(params) == ["idle_cuts"]

    params.temperature = 1.0
    assert found(params) == []

    params = SamplingParams(top_k=5)
    params.temperature = 0
    assert found(params) == ["idle_cuts"]


def test_penalties_with_the_code_preset_or_its_heirs() -> None:
    assert found(SamplingParams.from_preset("code")) == []
    assert found(SamplingParams.from_preset("code", repetition_penalty=1.1)) == ["penalised_syntax"]
    assert found(SamplingParams.from_preset("chat", repetition_penalty=1.1)) == []


@pytest.mark.parametrize("name", Presets.load())
def test_a_shipped_preset_needs_no_advice(name: str) -> None:
    params = SamplingParams.from_preset(name)
    for item in params.chain or []:
        if isinstance(item, dict) and item["stage"] == "dry":
            item["breakers"] = []  # this planner has no tokenizer to read them with

    assert found(params) == []


def test_a_cut_of_the_preset_is_no_fault_of_a_greedy_request() -> None:
    assert found(SamplingParams.from_preset("chat", temperature=0)) == []


def test_both_cuts_of_the_model_are_the_models_choice() -> None:
    params = SamplingParams(top_k=20, top_p=0.8)
    params.note_layer(["top_k", "top_p"], "generation_config")
    plan = PLANNER.admit(params.snapshot(), provenance=params.sources)
    assert plan.advice == ()


def test_advice_differs_where_the_chain_is_shared() -> None:
    planner = make_planner()
    plain, many = SamplingParams(temperature=0.5), SamplingParams(temperature=0.5, best_of=8)

    first, second = planner.admit(plain.snapshot()), planner.admit(many.snapshot())

    assert first.key == second.key
    assert first.report.notes != second.report.notes
    assert [advice.rule for advice in second.advice] == ["many_candidates"]
    assert planner.admit(plain.snapshot()).advice == ()


def test_a_request_and_an_engine_can_do_without() -> None:
    assert found(SamplingParams(temperature=1.9, plan_review=False)) == []
    silent = Planner(
        REGISTRY,
        vocab_size=300,
        tokenizer_size=300,
        max_model_len=512,
        device=torch.device("cpu"),
        plan_review=False,
    )
    assert found(SamplingParams(temperature=1.9), silent) == []


def test_one_rule_can_be_blocked_by_name() -> None:
    planner = make_planner(Registry.load(plugins=["no:too_hot"], autoload=False))

    assert found(SamplingParams(temperature=1.9, top_p=0.1), planner) == ["hot_tiny_top_p"]


class NoSeed(Reviewer):
    """Runs without a seed cannot be repeated."""

    name = "acme_no_seed"

    def review(self, report: Any, request: Any) -> list[Finding]:
        return [] if request.seed is not None else [Finding("info", "no seed", "set one")]


class Broken(Reviewer):
    """Fails."""

    name = "acme_broken"
    calls = 0

    def review(self, report: Any, request: Any) -> list[Finding]:
        type(self).calls += 1
        raise RuntimeError("oh")


def test_a_stranger_adds_a_rule() -> None:
    registry = Registry.load(autoload=False)
    registry.register(NoSeed())

    assert found(SamplingParams(), make_planner(registry)) == ["acme_no_seed"]
    assert found(SamplingParams(seed=1), make_planner(registry)) == []


def test_a_rule_that_fails_is_told_of_once_and_costs_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry.load(autoload=False)
    registry.register(Broken)
    planner = make_planner(registry)
    Broken.calls = 0

    for _ in range(3):
        assert found(SamplingParams(temperature=1.9), planner) == ["too_hot"]

    assert Broken.calls == 1
    assert caplog.text.count("acme_broken") == 1
