"""Presets, pins, the picker and the advisor in an engine: values, provenance, and the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ChainError, ValidationError
from decodekit.plugins.author.table_model import flat_table

Maker = Callable[..., LLM]
HOUSE = """
    [house]
    temperature = 0.4
    top_p = 0.8
    max_tokens = 3
    pinned = ["max_tokens"]

    [free]
    top_k = 5
    max_tokens = 6
"""


@pytest.fixture
def preset_file(tmp_path: Path) -> str:
    path = tmp_path / "house.toml"
    path.write_text(HOUSE)
    return str(path)


def sources(llm: LLM, params: SamplingParams) -> dict[str, str]:
    """Stage and parameter -> the layer, for what is not a stage's default."""
    return {
        f"{step.stage}.{name}": source
        for step in llm.explain(params).order
        for name, source in step.provenance.items()
        if source not in ("default", "profile")
    }


def test_a_preset_by_name_is_the_preset_in_python(flat_llm: LLM) -> None:
    prompt = {"prompt_token_ids": [1, 2]}
    named = SamplingParams(preset="creative", max_tokens=12, seed=7)
    made = SamplingParams.from_preset("creative", max_tokens=12, seed=7)
    for params in (named, made):  # the table model has no tokenizer for DRY's breakers
        params.chain = [{"stage": "min_p", "p": 0.001}, {"stage": "xtc", "probability": 0.5}]

    one, two = flat_llm.generate([prompt, prompt], [named, made], use_tqdm=False)

    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert named.sources == {}  # the caller's object is untouched


def test_provenance_names_the_preset(flat_llm: LLM) -> None:
    params = SamplingParams(preset="chat", top_p=0.5)

    assert sources(flat_llm, params) == {"temperature.t": "preset chat", "top_p.p": "request"}


def test_a_chain_of_a_preset_says_so(flat_llm: LLM) -> None:
    params = SamplingParams(preset="long_form")
    params.stop = []
    chain = SamplingParams.from_preset("long_form").chain
    assert chain is not None
    chain = [item for item in chain if not isinstance(item, dict) or item["stage"] != "dry"]

    mine = sources(flat_llm, SamplingParams(preset="long_form", chain=chain))

    assert mine == {"temperature.t": "preset long_form", "top_p.p": "preset long_form"}


def test_an_unknown_preset_is_refused_at_admission(flat_llm: LLM) -> None:
    with pytest.raises(ValidationError, match="preset must be one of"):
        flat_llm.explain(SamplingParams(preset="chta"))


def test_the_engines_own_preset_lies_under_every_request(make_llm: Maker, preset_file: str) -> None:
    llm = make_llm(flat_table(97), preset="house", preset_file=preset_file)
    prompt = {"prompt_token_ids": [1]}

    assert llm.get_default_sampling_params().temperature == 0.4
    [bare] = llm.generate(prompt, use_tqdm=False)
    [asked] = llm.generate(prompt, SamplingParams(temperature=1.0), use_tqdm=False)
    [other] = llm.generate(prompt, SamplingParams(preset="free"), use_tqdm=False)

    assert [len(out.outputs[0].token_ids) for out in (bare, asked, other)] == [3, 3, 3]
    assert [step.stage for step in bare.plan.order] == ["temperature", "top_p", "race"]
    assert [step.stage for step in asked.plan.order] == ["top_p", "race"]
    assert [step.stage for step in other.plan.order] == ["top_k", "race"]
    with pytest.raises(ValidationError, match="max_tokens is pinned to 3 by the preset 'house'"):
        llm.generate(prompt, SamplingParams(max_tokens=9), use_tqdm=False)


def test_an_unknown_preset_of_the_engine_is_refused(make_llm: Maker) -> None:
    with pytest.raises(ValidationError, match="preset must be one of"):
        make_llm(flat_table(97), preset="house")


# --- the picker -----------------------------------------------------------------------------------


def test_a_picker_can_be_named_without_a_chain(flat_llm: LLM) -> None:
    params = SamplingParams(top_k=9, picker={"picker": "mirostat", "tau": 2.0})
    report = flat_llm.explain(params)

    assert [step.stage for step in report.order] == ["top_k", "mirostat"]
    assert report.order[1].provenance["tau"] == "request"
    named = flat_llm.explain(SamplingParams(picker="gumbel")).order
    assert [step.stage for step in named] == ["race"]
    assert flat_llm.explain(SamplingParams(picker="icdf")).order[0].stage == "icdf"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"picker": "top_k"}, "picker must name one of greedy, race"),
        ({"picker": "rase"}, "unknown stage 'rase'"),
        ({"picker": "icdf", "chain": ["race"]}, "the chain has the picker 'race'"),
        ({"picker": "icdf", "temperature": 0}, "temperature 0 asks for the picker 'greedy'"),
        ({"picker": {"picker": "mirostat", "tua": 1}}, "did you mean 'tau'"),
    ],
)
def test_a_picker_that_cannot_be_is_refused(
    flat_llm: LLM, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ChainError, match=told):
        flat_llm.explain(SamplingParams(**fields))


# --- advice ---------------------------------------------------------------------------------------


def test_advice_is_in_the_plan_of_every_request_and_in_the_log_once_a_rule(
    make_llm: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(flat_table(97))
    caplog.set_level(logging.WARNING, logger="decodekit")
    hot = SamplingParams(temperature=1.9, max_tokens=1)

    outputs = llm.generate([{"prompt_token_ids": [1]}] * 3, hot, use_tqdm=False)

    assert all(any("[too_hot]" in note for note in out.plan.notes) for out in outputs)
    assert caplog.text.count("[too_hot]") == 1
    llm.generate({"prompt_token_ids": [1]}, SamplingParams(top_k=3, top_p=0.5), use_tqdm=False)
    assert caplog.text.count("[top_k_and_top_p]") == 1


def test_an_engine_without_review_says_nothing(
    make_llm: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(flat_table(97), plan_review=False)

    report = llm.explain(SamplingParams(temperature=1.9))

    assert not any("advice" in note for note in report.notes)
    assert "too_hot" not in caplog.text
