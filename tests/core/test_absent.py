"""The table of what this version lacks: complete, one sentence a row, neutral values accepted."""

from dataclasses import fields
from typing import Any

import pytest

from decodekit.core.absent import (
    ALL,
    CALL_ARGUMENTS,
    ENGINE_ARGUMENTS,
    METHODS,
    PROMPT_KEYS,
    REQUEST_FIELDS,
    Absent,
    check_call,
    check_engine_args,
    check_params,
    check_prompt,
    refuse,
)
from decodekit.core.config import EngineArgs
from decodekit.core.errors import NotInThisVersion
from decodekit.core.params import RepetitionDetectionParams, SamplingParams

# One asking value for each engine argument of the table.
ENGINE_ASKS: dict[str, Any] = {
    "runner": "pooling",
    "convert": "embed",
    "tokenizer_mode": "mistral",
    "allowed_local_media_path": "/media",
    "allowed_media_domains": ["example.org"],
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "distributed_executor_backend": "ray",
    "disable_custom_all_reduce": True,
    "quantization": "awq",
    "cpu_offload_gb": 1,
    "offload_group_size": 4,
    "offload_num_in_group": 2,
    "offload_prefetch_step": 2,
    "offload_params": {"w13_weight"},
    "enable_return_routed_experts": True,
    "mm_processor_kwargs": {"a": 1},
    "limit_mm_per_prompt": {"image": 1},
    "mm_processor_cache_gb": 1,
    "pooler_config": {"task": "embed"},
    "attention_config": {"backend": "x"},
    "compilation_config": 3,
    "kv_cache_dtype": "fp8",
    "async_scheduling": True,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 32,
    "max_cpu_loras": 2,
    "lora_dtype": "float16",
    "fully_sharded_loras": True,
    "default_mm_loras": {"image": "/a"},
    "weight_transfer_config": {"backend": "nccl"},
    "kv_transfer_config": {"kv_connector": "x"},
    "batch_invariant": True,
}
# One set of asking fields for each request field of the table.
FIELD_ASKS: dict[str, dict[str, Any]] = {}
# What works in this version, together.
WORKING: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "seed": 3,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "stop": ["a"],
    "stop_token_ids": [1],
    "max_tokens": 5,
    "min_tokens": 2,
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "logit_bias": {1: 1.0},
    "logprobs": -1,
    "prompt_logprobs": 1,
    "extra_args": {"a": 1},
    "logits_processors": [lambda output, row: row],
    "flat_logprobs": True,
    "chain": ["top_k"],
    "profile": "default",
    "on_dead_row": "relax",
    "logprobs_mode": ["final", "raw"],
    "logprob_token_ids": [1],
    "kept_set": True,
    "entropy": True,
    "output_tensors": True,
    "trace": "tokens",
    "observers": ["confidence"],
    "truncate_prompt_tokens": 4,
    "thinking_token_budget": 0,
    "repetition_detection": RepetitionDetectionParams(2, 1, 2),
}


def test_the_asking_values_cover_the_table() -> None:
    assert [row.name for row in ENGINE_ARGUMENTS] == list(ENGINE_ASKS)
    assert {row.name for row in REQUEST_FIELDS} == set(FIELD_ASKS)


def test_rows_name_real_arguments_and_fields() -> None:
    arguments = {item.name for item in fields(EngineArgs)}

    assert {row.name for row in ENGINE_ARGUMENTS} <= arguments
    assert set(FIELD_ASKS) <= set(vars(SamplingParams()))


@pytest.mark.parametrize("name", ENGINE_ASKS)
@pytest.mark.filterwarnings("ignore")
def test_an_engine_argument_is_refused_by_name_and_value(name: str) -> None:
    args = EngineArgs()
    setattr(args, name, ENGINE_ASKS[name])

    with pytest.raises(NotInThisVersion) as caught:
        check_engine_args(args)

    assert caught.value.parameter == name
    assert str(caught.value).startswith(f"the engine argument {name}=")
    assert "not in this version" in str(caught.value)


@pytest.mark.parametrize("name", FIELD_ASKS)
def test_a_request_field_is_refused_at_admission_not_at_construction(name: str) -> None:
    params = SamplingParams(**FIELD_ASKS[name])

    for form in (params, params.snapshot()):
        with pytest.raises(NotInThisVersion) as caught:
            check_params(form)
        assert caught.value.parameter == name
        assert str(caught.value).startswith(f"the request field {name}=")


def test_what_works_is_not_refused() -> None:
    check_engine_args(EngineArgs())
    check_engine_args(EngineArgs(runner="generate", convert="none", enable_prefix_caching=False))
    check_params(SamplingParams())
    check_params(SamplingParams().snapshot())
    check_params(SamplingParams(**WORKING))
    check_params(SamplingParams(**WORKING).snapshot())
    check_call(lora_request=None, priority=3, reasoning_ended=False)
    check_prompt({"prompt": "a", "multi_modal_data": None, "mm_processor_kwargs": {}})


def test_call_arguments_and_prompt_keys_are_refused() -> None:
    for row in CALL_ARGUMENTS:
        with pytest.raises(NotInThisVersion, match=row.name):
            check_call(**{row.name: "something"})
    for row in PROMPT_KEYS:
        with pytest.raises(NotInThisVersion, match=row.name):
            check_prompt({"prompt": "a", row.name: "something"})


@pytest.mark.parametrize("row", ALL, ids=lambda row: f"{row.what}-{row.name}")
def test_every_row_is_one_sentence_of_its_own(row: Absent) -> None:
    sentence = row.sentence("x")

    assert row.name in sentence
    assert sentence.startswith(f"the {row.what} ")
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    assert [other for other in ALL if (other.what, other.name) == (row.what, row.name)] == [row]


@pytest.mark.parametrize(
    "name",
    ["enable_lora", "embed", "classify", "score", "reward", "encode",
     "update_weights", "tool_server",
     "run-batch", "tensor_parallel_size"],
)  # fmt: skip
def test_refuse_knows_what_the_references_name(name: str) -> None:
    with pytest.raises(NotInThisVersion, match=name):
        refuse(name)


def test_refuse_tells_a_method_from_a_task() -> None:
    with pytest.raises(NotInThisVersion, match="the method embed "):
        refuse("embed")
    with pytest.raises(NotInThisVersion, match="the pooling task embed "):
        refuse("embed", "pooling task")
    with pytest.raises(LookupError):
        refuse("generate")


def test_a_method_of_the_table_is_not_an_attribute_of_llm_that_works() -> None:
    from decodekit.core.llm import LLM

    for row in METHODS:
        method = getattr(LLM, row.name, None)
        if method is not None:
            with pytest.raises(NotInThisVersion, match=row.name):
                method(object.__new__(LLM))
