"""Bad input is refused before any work, in one sentence that names the field; nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table

Maker = Callable[..., LLM]

CONTEXT = 64


@pytest.fixture(scope="module")
def llm(make_llm: Maker) -> LLM:
    """A small model with a tokenizer and a context of 64 tokens."""
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    return make_llm(flat_table(260), model={"tokenizer": tokenizer, "context": CONTEXT})


def generate(llm: LLM, prompts: Any, params: Any = None, **call: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **call)


def is_idle(llm: LLM) -> bool:
    """Whether nothing is queued or held, and a plain request gives its known answer."""
    engine = llm.llm_engine
    if engine.has_unfinished_requests() or engine.parts.pool.num_used:
        return False
    [output] = generate(llm, [[7]], SamplingParams(temperature=0, max_tokens=3))
    return list(output.outputs[0].token_ids) == [0, 0, 0]


def check_sentence(error: ValidationError, name: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert name in text
    assert len(text) < 300
    assert isinstance(error, ValueError)


NAN = float("nan")
PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NAN}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"stop": ""}, "stop"),
    ({"stop": ["ok", ""]}, "stop"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {3: NAN}}, "logit_bias"),
    ({"logit_bias": {-3: 1.0}}, "logit_bias"),
    ({"logprobs": -2}, "logprobs"),
    ({"n": 0}, "n"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"temperature": 0, "n": 2}, "n must be 1"),
    ({"tempertaure": 0.5}, "did you mean 'temperature'"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"on_dead_row": "shrug"}, "on_dead_row"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["x"], "detokenize": False}, "stop"),
    ({"logits_processors": [3]}, "logits_processors"),
]


@pytest.mark.parametrize(("fields", "name"), PARAMETERS, ids=str)
def test_bad_parameters_are_refused_when_they_are_made(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)

    check_sentence(caught.value, name)


REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ("x", {"logit_bias": {260: 1.0}}, "logit_bias"),
    ("x", {"allowed_token_ids": [260]}, "allowed_token_ids"),
    ("x", {"stop_token_ids": [260]}, "stop_token_ids"),
    ("x", {"logprobs": 1000}, "logprobs"),
    ("x", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("x", {"chain": ["topk"]}, "did you mean 'top_k'"),
    ("x", {"chain": ["temperature"], "top_k": 5}, "top_k"),
    ("x", {"chain": [{"stage": "top_p", "q": 0.5}]}, "'q'"),
    ("x", {"profile": "lama.cpp"}, "profile"),
    ("x" * CONTEXT, {}, str(CONTEXT)),
    ("", {}, "prompt"),
    ([], {}, "prompts"),
    (["ok", ""], {}, "prompt"),
    ([1, 260], {}, "prompt_token_ids"),
    ([1, -1], {}, "prompt_token_ids"),
    ([1, 2.5], {}, "prompts"),
    ({"prompt_token_ids": [1, "2"]}, {}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": []}, {}, "prompt"),
    ({"prompt": 5}, {}, "prompt"),
    ({"promtp": "x"}, {}, "promtp"),
    (5, {}, "prompts"),
    (["x", 5], {}, "prompts[1]"),
    ([[1], [True]], {}, "prompt_token_ids[0]"),
]


@pytest.mark.parametrize(("prompt", "fields", "name"), REQUESTS, ids=str)
def test_bad_requests_are_refused_before_any_work(
    prompt: Any, fields: dict[str, Any], name: str, llm: LLM
) -> None:
    params = SamplingParams(max_tokens=3, **fields)

    with pytest.raises(ValidationError) as caught:
        generate(llm, prompt, params)

    check_sentence(caught.value, name)
    assert is_idle(llm)


def test_an_illegal_order_is_refused_with_both_names(llm: LLM) -> None:
    params = SamplingParams(chain=["top_k", "allowed_tokens"], top_k=3, allowed_token_ids=[1])

    with pytest.raises(ValidationError) as caught:
        generate(llm, "x", params)

    check_sentence(caught.value, "top_k")
    check_sentence(caught.value, "allowed_tokens")
    assert is_idle(llm)


def test_legal_swaps_change_the_kept_set_as_the_formulas_say(make_llm: Maker) -> None:
    table = flat_table(97)
    table[:, 4:] = -30.0
    table[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    llm = make_llm(table)
    fields: dict[str, Any] = {"temperature": 2.0, "top_p": 0.65, "max_tokens": 100, "seed": 1}

    def seen(chain: list[str]) -> set[int]:
        params = SamplingParams(chain=chain, **fields)
        return set(generate(llm, [[0]], params)[0].outputs[0].token_ids)

    # At temperature 2 the probabilities are 0.33, 0.28, 0.23, 0.16, and two do not reach 0.65.
    assert seen(["top_p", "temperature"]) == {0, 1}
    assert seen(["temperature", "top_p"]) == {0, 1, 2}


@pytest.mark.parametrize("given", [2, 4])
def test_a_list_of_params_must_have_one_a_prompt(given: int, llm: LLM) -> None:
    with pytest.raises(ValidationError) as caught:
        generate(llm, ["a", "b", "c"], [SamplingParams()] * given)

    check_sentence(caught.value, f"sampling_params has {given} entries, but there are 3 prompts")
    assert is_idle(llm)


@pytest.mark.parametrize("given", ["greedy", {"temperature": 0}, 3, [None], [{"n": 1}]])
def test_params_of_another_type_are_refused(given: Any, llm: LLM) -> None:
    with pytest.raises(ValidationError) as caught:
        generate(llm, ["a"], given)

    check_sentence(caught.value, "sampling_params")
    assert isinstance(caught.value, TypeError)
    assert is_idle(llm)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_bad_prompt_in_a_batch_leaves_nothing_behind(place: int, llm: LLM) -> None:
    prompts: list[Any] = [[1, 2], [3], [4], [5]]
    prompts.insert(place, [999])

    with pytest.raises(ValidationError):
        generate(llm, prompts, SamplingParams(max_tokens=3))

    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert is_idle(llm)


def test_bad_params_in_a_list_leave_nothing_behind(llm: LLM) -> None:
    params = [SamplingParams(), SamplingParams(logit_bias={999: 1.0}), SamplingParams()]

    with pytest.raises(ValidationError):
        generate(llm, [[1], [2], [3]], params)

    assert is_idle(llm)


def test_a_refused_batch_does_not_touch_what_is_queued(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    llm.enqueue([[1], [2]], params, use_tqdm=False)
    with pytest.raises(ValidationError):
        generate(llm, [[1], [999]], params)
    with pytest.raises(ValidationError):
        llm.enqueue([[1], [999]], params, use_tqdm=False)

    outputs = llm.wait_for_completion(use_tqdm=False)

    assert [list(output.prompt_token_ids) for output in outputs] == [[1], [2]]
    assert is_idle(llm)


def test_an_id_in_use_is_refused(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", [1], SamplingParams(max_tokens=2))

    with pytest.raises(ValidationError, match="'a' is already running"):
        engine.add_request("a", [1], SamplingParams(max_tokens=2))
    with pytest.raises(ValidationError, match="request_id must be a string"):
        engine.add_request(7, [1], SamplingParams(max_tokens=2))  # type: ignore[arg-type]

    engine.abort_request("a")
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["abort"]
    assert is_idle(llm)


def test_the_callers_objects_come_back_unchanged(llm: LLM) -> None:
    ids = [1, 2, 3]
    params = SamplingParams(max_tokens=3, stop=["zz"], stop_token_ids=[9], logit_bias={1: 2.0})
    before = repr(params)

    generate(llm, [ids, {"prompt_token_ids": ids}], params)

    assert ids == [1, 2, 3]
    assert repr(params) == before
