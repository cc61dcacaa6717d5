"""Values out of constrained requests: many grammars together, pydantic objects, streams, notes."""

import asyncio
import json
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from pydantic import BaseModel, Field, field_validator

from decodekit import LLM, AsyncLLM, SamplingParams
from decodekit.core.errors import NotInThisVersion, ValidationError
from decodekit.core.outputs import CompletionOutput
from decodekit.core.params import RequestOutputKind, StructuredOutputsParams
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table, write_table_model

Maker = Callable[..., LLM]
EXTRA = ('{"', '":', '","', "true", "false", "null", '"}', "red", "green", "1", "23")
EOS = 256 + len(EXTRA)
NUM = EOS + 1
MODEL: dict[str, Any] = {"tokenizer": byte_tokenizer(EXTRA, ("<eos>",), eos="<eos>")}
MODEL["eos_token_id"] = EOS


class Color(StrEnum):
    RED = "red"
    GREEN = "green"


class Spot(BaseModel, extra="forbid"):
    x: int = Field(ge=0, le=99)
    color: Color
    note: str | None = Field(default=None, max_length=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table_model(tmp_path_factory.mktemp("values"), flat_table(NUM, NUM), **MODEL)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=64)


def one(llm: LLM, constraint: Any, **more: Any) -> CompletionOutput:
    params = SamplingParams(structured_outputs=constraint, **{"max_tokens": 200, "seed": 1, **more})
    (output,) = llm.generate([[65]], params, use_tqdm=False)
    return output.outputs[0]


# --- many grammars in one batch -------------------------------------------------------------------


def schema(number: int) -> dict[str, Any]:
    names = [f"k{number}_{i}" for i in range(1 + number % 3)]
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": number, "maximum": number + 9},
        {"type": "boolean"},
        {"enum": ["red", number, None]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        {"type": "string", "maxLength": 2 + number % 4},
    ]
    return {
        "type": "object",
        "properties": {name: kinds[(number + i) % len(kinds)] for i, name in enumerate(names)},
        "required": names,
        "additionalProperties": False,
    }


def constraint(number: int) -> dict[str, Any]:
    if number % 3 == 0:
        return {"json": schema(number)}
    if number % 3 == 1:
        return {
            "regex": rf"[a-{chr(99 + number % 20)}]{{{1 + number % 5},8}}(-\d{{{1 + number % 3}}})?"
        }
    return {"choice": [f"option {number}", f"other{number * 7}", "x" * (1 + number % 6)]}


CHAINS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.02},
    {"chain": ["temperature", {"stage": "top_a", "a": 0.1}, "icdf"]},
    {"chain": [{"stage": "typical_p", "p": 0.9}, {"stage": "xtc", "probability": 0.5}]},
    {"repetition_penalty": 1.1, "logprobs": 1},
    {"min_tokens": 4, "logit_bias": {97: 1.5}},
)


def crowd() -> list[SamplingParams]:
    return [
        SamplingParams(
            structured_outputs=constraint(number),
            seed=number,
            max_tokens=70,
            **CHAINS[(number * 5) % len(CHAINS)],
        )
        for number in range(32)
    ]


def is_right(number: int, text: str) -> bool:
    wanted = constraint(number)
    if "json" in wanted:
        jsonschema.validate(json.loads(text), wanted["json"])
        return True
    if "regex" in wanted:
        return re.fullmatch(wanted["regex"], text) is not None
    return text in wanted["choice"]


def test_32_grammars_with_32_chains_under_preemption_equal_their_solo_results(
    llm: LLM, folder: Path
) -> None:
    wanted = crowd()
    small = LLM(
        str(folder), max_num_seqs=12, block_size=4, kv_cache_memory_bytes=30 * 2**15,
        max_num_batched_tokens=64,
    )  # fmt: skip
    outputs = small.generate([[65 + i] for i in range(32)], wanted, use_tqdm=False)
    whole = 0
    for number, (params, output) in enumerate(zip(wanted, outputs, strict=True)):
        crowded = output.outputs[0]
        (alone,) = llm.generate([[65 + number]], params, use_tqdm=False)
        assert crowded.token_ids == alone.outputs[0].token_ids
        assert crowded.error is None
        if crowded.complete:
            whole += 1
            assert is_right(number, crowded.text), (number, crowded.text)
    assert whole >= 28
    assert small.llm_engine.parts.scheduler.num_preemptions > 5


def test_fusion_changes_no_token(llm: LLM, folder: Path) -> None:
    plain = LLM(str(folder), fusion=False)
    wanted = crowd()[:8]
    prompts = [[65]] * len(wanted)
    fused = llm.generate(prompts, wanted, use_tqdm=False)
    stepwise = plain.generate(prompts, wanted, use_tqdm=False)

    assert [o.outputs[0].token_ids for o in fused] == [o.outputs[0].token_ids for o in stepwise]


# --- objects --------------------------------------------------------------------------------------


def test_a_model_class_gives_an_object_of_the_model(llm: LLM) -> None:
    output = one(llm, Spot)

    assert isinstance(output.parsed, Spot)
    assert output.parsed == Spot.model_validate_json(output.text)
    assert (output.complete, output.parse_error, output.finish_reason) == (True, None, "stop")


def test_the_model_may_be_the_whole_field_or_its_json(llm: LLM) -> None:
    wanted = StructuredOutputsParams(json=Spot, disable_any_whitespace=True)
    output = one(llm, wanted)

    assert isinstance(output.parsed, Spot)
    assert ": " not in output.text


def test_a_schema_gives_plain_data(llm: LLM) -> None:
    for form in (Spot.model_json_schema(), json.dumps(Spot.model_json_schema())):
        output = one(llm, {"json": form})
        assert output.parsed == json.loads(output.text)


def test_other_constraints_have_no_value_but_say_whether_they_are_whole(llm: LLM) -> None:
    output = one(llm, {"regex": "[ab]{3}"})

    assert (output.parsed, output.complete) == (None, True)
    assert re.fullmatch("[ab]{3}", output.text)


def test_a_text_that_max_tokens_cut_keeps_the_reason(llm: LLM) -> None:
    output = one(llm, Spot, max_tokens=5)

    assert (output.finish_reason, output.complete, output.parsed) == ("length", False, None)
    assert str(output.parse_error).startswith("the text was cut after 5 tokens: 1 validation error")


class Even(BaseModel):
    x: int = Field(ge=1, le=1)

    @field_validator("x")
    @classmethod
    def _is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("x must be even")
        return value


def test_what_only_the_model_can_check_is_in_parse_error(llm: LLM) -> None:
    output = one(llm, Even)

    assert output.parsed is None and output.complete is True
    assert "x must be even" in str(output.parse_error)


def test_json_object_gives_an_object(llm: LLM) -> None:
    output = one(llm, {"json_object": True}, max_tokens=400, logit_bias={ord("}"): 6.0})

    assert output.error is None
    assert output.text.startswith("{")
    if output.complete:
        assert isinstance(output.parsed, dict)


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_a_stream_shows_the_value_so_far(folder: Path, kind: RequestOutputKind) -> None:
    async def main() -> list[Any]:
        engine = AsyncLLM(str(folder))
        params = SamplingParams(
            structured_outputs=Spot, output_kind=kind, seed=4, max_tokens=200, temperature=0.8
        )
        prompt = {"prompt_token_ids": [65]}
        seen = [out.outputs[0].parsed async for out in engine.generate(prompt, params)]
        engine.shutdown()
        return seen

    seen = asyncio.run(main())
    assert isinstance(seen[-1], Spot)
    partial = [value for value in seen[:-1] if value is not None]
    assert partial and all(isinstance(value, dict) for value in partial)
    for before, after in zip(partial, partial[1:], strict=False):
        assert before.keys() <= after.keys()


# --- exactness and notes --------------------------------------------------------------------------

UNSURE = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": 2},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 2,
}


def test_what_cannot_be_exact_is_refused_by_place_or_approximated_and_told(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="uniqueItems"):
        one(llm, {"json": UNSURE})
    found = [one(llm, {"json": UNSURE, "strict": False}, seed=seed) for seed in range(12)]

    for output in found:
        assert output.approximate
        if output.complete:
            assert len(set(output.parsed)) == 2
        else:
            assert "does not fit the schema" in str(output.parse_error)
    assert {output.complete for output in found} == {True, False}


def test_the_plan_says_who_enforces_it_and_whether_it_is_exact(llm: LLM) -> None:
    exact = llm.explain(SamplingParams(structured_outputs={"choice": ["a", "b"]}))
    loose = llm.explain(SamplingParams(structured_outputs={"json": UNSURE, "strict": False}))

    assert "grammar: choice, trie, exact" in exact.notes
    (note,) = [note for note in loose.notes if "approximate (strict=False)" in note]
    assert "uniqueItems" in note
    assert [step.stage for step in exact.order][:2] == ["vocab_padding", "grammar"]


def test_the_engine_sets_what_requests_leave_open(folder: Path) -> None:
    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    for given in (config, json.dumps(config)):
        engine = LLM(str(folder), structured_outputs_config=given)
        report = engine.explain(SamplingParams(structured_outputs=Spot))
        assert any("json, xgrammar" in note for note in report.notes)
        assert not re.search(r"[:,]\s", one(engine, Spot).text)


def test_a_config_with_what_is_not_here_is_refused() -> None:
    with pytest.raises(NotInThisVersion, match="reasoning_config"):
        LLM(structured_outputs_config={"reasoning_parser": "qwen3"})
    with pytest.raises(ValidationError, match="structured_outputs_config"):
        LLM(structured_outputs_config="nonsense")
    with pytest.raises(ValidationError, match="one of auto, .*xgrammar.*lm-format-enforcer"):
        LLM(structured_outputs_config={"backend": "lm-format-enforcer"})


def test_an_engine_without_a_tokenizer_refuses(make_llm: Maker) -> None:
    with pytest.raises(ValidationError, match="tokenizer"):
        one(make_llm(flat_table(8)), {"regex": "a"})


# --- transformers ---------------------------------------------------------------------------------


def test_the_processor_constrains_transformers_generate(folder: Path) -> None:
    import transformers

    from decodekit import GrammarProcessor

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[65, 66], [67, 68], [69, 70]])
    options: list[dict[str, Any]] = [
        {"do_sample": True},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
    ]
    for option in options:
        torch.manual_seed(0)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[GrammarProcessor(tokenizer, {"json": schema(3)})],
            max_new_tokens=120,
            pad_token_id=EOS,
            **option,
        )
        for row in made[:, 2:]:
            text = tokenizer.decode(row, skip_special_tokens=True)
            jsonschema.validate(json.loads(text), schema(3))
