"""What is made of SamplingParams: copies, pickles, text, the engine's additions, the snapshot."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.errors import ValidationError
from decodekit.core.params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    RequestParams,
    SamplingParams,
    StructuredOutputsParams,
)
from decodekit.core.request_checks import check_prompt, check_request
from decodekit.core.request_params import FrozenDict

NAMES_FOR_EVAL = {
    "SamplingParams": SamplingParams,
    "RequestOutputKind": RequestOutputKind,
    "StructuredOutputsParams": StructuredOutputsParams,
    "RepetitionDetectionParams": RepetitionDetectionParams,
    "inf": math.inf,
}

words = st.text(min_size=1, max_size=6)
ids = st.integers(0, 200_000)
valid = st.fixed_dictionaries(
    {},
    optional={
        "n": st.just(1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 10),
        "temperature": st.just(0) | st.floats(0.01, 5),
        "top_p": st.floats(0.001, 1),
        "top_k": st.integers(-1, 300_000),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "stop": st.none() | words | st.lists(words, max_size=3),
        "stop_token_ids": st.none() | st.lists(ids, max_size=3),
        "ignore_eos": st.booleans(),
        "max_tokens": st.none() | st.integers(50, 5000),
        "min_tokens": st.integers(0, 16),
        "logprobs": st.none() | st.booleans().filter(bool) | st.integers(-1, 30),
        "prompt_logprobs": st.none() | st.integers(-1, 30),
        "flat_logprobs": st.booleans(),
        "output_kind": st.sampled_from(RequestOutputKind),
        "logit_bias": st.none()
        | st.dictionaries(ids, st.floats(-100, 100) | st.just(-math.inf), max_size=3),
        "allowed_token_ids": st.none() | st.lists(ids, min_size=1, max_size=3),
        "bad_words": st.none() | st.lists(words, max_size=3),
        "extra_args": st.none() | st.dictionaries(words, st.integers() | st.lists(ids), max_size=2),
        "repetition_detection": st.none()
        | st.builds(RepetitionDetectionParams, st.integers(1, 5), st.just(1), st.integers(2, 4)),
        "structured_outputs": st.none() | st.builds(StructuredOutputsParams, regex=words),
        "truncate_prompt_tokens": st.none() | st.just(-1) | st.integers(1, 100),
        "chain": st.none()
        | st.lists(st.sampled_from(["top_k", "top_p"]) | st.just({"stage": "min_p", "p": 0.1})),
        "logprobs_mode": st.none() | st.sampled_from(["raw", "final"]) | st.just(["raw", "masked"]),
        "on_dead_row": st.sampled_from(["error", "eos", "relax"]),
    },
)


@given(valid)
def test_valid_values_survive_repr_pickle_and_clone(given_fields: dict[str, Any]) -> None:
    params = SamplingParams(**given_fields)

    assert eval(repr(params), dict(NAMES_FOR_EVAL)) == params
    for twin in (pickle.loads(pickle.dumps(params)), params.clone(), copy.deepcopy(params)):
        assert twin == params
        assert twin.fields_set == params.fields_set
        assert twin.snapshot() == params.snapshot()


@given(valid)
def test_snapshot_holds_no_neutral_value(given_fields: dict[str, Any]) -> None:
    snapshot = SamplingParams(**given_fields).snapshot()

    assert snapshot.top_k is None or snapshot.top_k >= 1
    assert snapshot.top_p is None or 0 < snapshot.top_p < 1
    assert snapshot.min_p is None or snapshot.min_p > 0
    assert snapshot.min_tokens is None or snapshot.min_tokens > 0
    assert snapshot.temperature not in (0, 1)
    assert snapshot.temperature is None or not snapshot.greedy
    assert snapshot.repetition_penalty != 1
    assert snapshot.presence_penalty != 0
    assert snapshot.frequency_penalty != 0
    for name in ("logit_bias", "bad_words", "allowed_token_ids"):
        assert getattr(snapshot, name) is None or len(getattr(snapshot, name)) > 0


@given(valid)
def test_snapshot_keeps_what_is_not_neutral(given_fields: dict[str, Any]) -> None:
    params = SamplingParams(**given_fields)

    snapshot = params.snapshot()

    if params.top_k > 0:
        assert snapshot.top_k == params.top_k
    if params.temperature not in (0, 1):
        assert snapshot.temperature == params.temperature
    assert snapshot.greedy == (params.temperature == 0)
    assert snapshot.seed == params.seed
    assert snapshot.max_tokens == params.max_tokens
    assert snapshot.stop == tuple(params.stop)
    assert dict(snapshot.logit_bias or {}) == (params.logit_bias or {})
    assert snapshot.fields_set == params.fields_set


def test_a_snapshot_has_every_field_and_the_constructor_agrees() -> None:
    snapshot = SamplingParams(top_k=4, best_of=None, n=3).snapshot()

    values = {item.name: getattr(snapshot, item.name) for item in fields(RequestParams)}
    assert RequestParams(**values) == snapshot
    assert snapshot.best_of == 3


def test_a_snapshot_is_frozen_all_the_way_down() -> None:
    snapshot = SamplingParams(
        chain=[{"stage": "top_p", "list": [1, {"a": [2]}]}], extra_args={"k": [1]}
    ).snapshot()

    assert snapshot.chain == ({"stage": "top_p", "list": (1, {"a": (2,)})},)
    assert isinstance(hash(snapshot.chain), int)
    with pytest.raises(FrozenInstanceError):
        snapshot.top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="frozen"):
        snapshot.extra_args["k"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(a=1),
        lambda d: d.pop("k"),
        lambda d: d.clear(),
        lambda d: d.setdefault("z", 1),
        lambda d: d.popitem(),
        lambda d: d.__delitem__("k"),
        lambda d: d.__ior__({"a": 1}),
    ],
)
def test_a_frozen_dict_refuses_every_change(change: Any) -> None:
    frozen = FrozenDict(k=1)

    with pytest.raises(TypeError):
        change(frozen)

    assert frozen == {"k": 1} == pickle.loads(pickle.dumps(frozen))


def test_later_changes_do_not_reach_a_snapshot() -> None:
    params = SamplingParams(
        stop=["a"],
        logit_bias={1: 1.0},
        extra_args={"k": [1]},
        structured_outputs={"choice": ["x"]},
    )
    snapshot, before = params.snapshot(), repr(params.snapshot())

    params.stop.append("b")
    params.logit_bias[2] = 3.0  # type: ignore[index]
    params.extra_args["k"].append(2)  # type: ignore[index]
    params.structured_outputs.choice.append("y")  # type: ignore[union-attr]
    params.temperature = 0

    assert repr(snapshot) == before


def test_a_snapshot_leaves_its_parameters_unchanged() -> None:
    params = SamplingParams(stop=["a"], top_k=-1, bad_words=["w"], stop_token_ids=[3])
    before = repr(params)

    params.snapshot()

    assert repr(params) == before


def test_lists_edited_in_place_are_checked_by_the_snapshot() -> None:
    params = SamplingParams()
    params.stop.append("")

    with pytest.raises(ValidationError, match="stop"):
        params.snapshot()


def test_a_clone_has_its_own_lists_unless_told_otherwise() -> None:
    params = SamplingParams(stop=["a"])
    shallow = SamplingParams(stop=["a"], skip_clone=True)

    params.clone().stop.append("b")
    shallow.clone().stop.append("b")

    assert params.stop == ["a"]
    assert shallow.stop == ["a", "b"]


def test_from_optional_reads_none_as_default_and_text_keys() -> None:
    params = SamplingParams.from_optional(
        temperature=None, max_tokens=None, top_p=0.5, logit_bias={"3": 5}
    )

    assert (params.temperature, params.max_tokens, params.logit_bias) == (1.0, 16, {3: 5.0})
    assert params.fields_set == {"top_p", "logit_bias"}


@pytest.mark.parametrize("key", ["AI", "-1", "2.5", ""])
def test_from_optional_refuses_a_bias_key_that_is_no_id(key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.from_optional(logit_bias={key: 5})

    assert caught.value.parameter == "logit_bias"
    assert repr(key) in str(caught.value) or key in str(caught.value)


def test_generation_config_adds_end_ids_only() -> None:
    params = SamplingParams(stop_token_ids=[7, 2])

    params.update_from_generation_config({"eos_token_id": [1, 2, 9], "temperature": 0.3}, 1)

    assert params.eos_token_id == 1
    assert params.stop_token_ids == [7, 2, 9]
    assert params.all_stop_token_ids == {1, 2, 7, 9}
    assert params.temperature == 1.0
    assert params.snapshot().eos_token_id == 1


def test_ignore_eos_keeps_end_ids_for_the_mask_only() -> None:
    params = SamplingParams(stop_token_ids=[7], ignore_eos=True)

    params.update_from_generation_config({"eos_token_id": 2}, 1)

    assert params.eos_token_id is None
    assert params.stop_token_ids == [7]
    assert params.snapshot().all_stop_token_ids == {1, 2, 7}


class WordTokenizer:
    """Ids are code points; spaces are token 0, and "zz" cannot be written."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return [] if text.strip() == "zz" else [0 if c == " " else ord(c) for c in text]

    def __len__(self) -> int:
        return 128


def test_bad_words_are_tokenised_bare_and_spaced() -> None:
    params = SamplingParams(bad_words=["  ab", "c", "c"])

    params.update_from_tokenizer(WordTokenizer())

    assert params.bad_words_token_ids == [[97, 98], [0, 97, 98], [99], [0, 99]]
    assert params.snapshot().bad_words_token_ids == ((97, 98), (0, 97, 98), (99,), (0, 99))


def test_a_bad_word_of_blanks_is_itself() -> None:
    params = SamplingParams(bad_words=["\n"])

    params.update_from_tokenizer(WordTokenizer())

    assert params.bad_words_token_ids == [[10]]


def test_a_bad_word_that_cannot_be_written_is_refused() -> None:
    params = SamplingParams(bad_words=["zz"])

    with pytest.raises(ValidationError, match="bad_words"):
        params.update_from_tokenizer(WordTokenizer())


class Model:
    """A model config in vLLM's manner."""

    max_logprobs = 20

    def get_vocab_size(self) -> int:
        return 130


@pytest.mark.parametrize(
    ("given_fields", "parameter"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {130: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [128]}, "allowed_token_ids"),
        ({"stop_token_ids": [130]}, "stop_token_ids"),
        ({"logprob_token_ids": [130]}, "logprob_token_ids"),
    ],
)
def test_verify_checks_against_the_model(given_fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**given_fields).verify(Model(), None, None, WordTokenizer())

    assert caught.value.parameter == parameter


def test_verify_passes_at_the_limits() -> None:
    params = SamplingParams(
        logprobs=20, logit_bias={129: 1.0}, allowed_token_ids=[127], stop_token_ids=[129]
    )

    params.verify(Model(), None, None, WordTokenizer())

    check_request(SamplingParams(logprobs=-1), vocab_size=130, max_logprobs=-1)
    check_request(SamplingParams(logprobs=-1).snapshot(), vocab_size=130, max_logprobs=130)


def test_constraints_need_a_tokenizer() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})

    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        check_request(params, vocab_size=10, max_logprobs=20)


@pytest.mark.parametrize("prompt", [[], [-1], [10], [1, 2, 3, 4]])
def test_prompts_are_checked(prompt: list[int]) -> None:
    with pytest.raises(ValidationError, match="prompt"):
        check_prompt(prompt, vocab_size=10, max_model_len=4)

    check_prompt([1, 2, 9], vocab_size=10, max_model_len=4)


def test_a_pickle_leaves_unset_fields_out() -> None:
    assert b"repetition_penalty" not in pickle.dumps(SamplingParams(top_k=4))


def test_parameters_are_mutable_and_therefore_not_hashable() -> None:
    with pytest.raises(TypeError):
        hash(SamplingParams())
