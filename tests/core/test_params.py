"""SamplingParams: what is refused and how, what is normalised, and what assignment does."""

import inspect
import math
import warnings

import numpy as np
import pytest

from decodekit.core.errors import ParameterTypeError, ValidationError
from decodekit.core.params import (
    RequestOutputKind,
    SamplingParams,
    SamplingType,
)

POSITIONAL = (
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed "
    "stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs "
    "logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output output_kind skip_clone output_text_buffer_length"
).split()
VLLM_KEYWORDS = (
    "structured_outputs logit_bias allowed_token_ids extra_args bad_words "
    "skip_reading_prefix_cache thinking_token_budget repetition_detection best_of use_beam_search "
    "length_penalty early_stopping logits_processors truncate_prompt_tokens"
).split()
OURS = (
    "chain profile preset picker plan_review on_dead_row logprobs_mode kept_set entropy "
    "output_tensors "
    "trace stops observers "
    "driver speculation"
).split()

# (arguments, the field that the error names)
OUT_OF_RANGE = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 16385}, "n"),
    ({"presence_penalty": 2.01}, "presence_penalty"),
    ({"presence_penalty": -2.01}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": 0.0, "temperature": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": -2.5}, "top_k"),
    ({"min_p": -0.01}, "min_p"),
    ({"min_p": 1.01}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"logprobs": -2}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"], "detokenize": False}, "stop"),
    ({"temperature": 0, "n": 2}, "n"),
    ({"temperature": 1e-6, "n": 2, "top_p": 0}, "top_p"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 1, "use_beam_search": True}, "best_of"),
    ({"use_beam_search": True}, "best_of"),
    ({"temperature": 0, "best_of": 2}, "best_of"),
    ({"use_beam_search": True, "best_of": 2, "early_stopping": "soon"}, "early_stopping"),
    ({"early_stopping": True}, "early_stopping"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ({"logit_bias": {1: math.inf}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [3, -3]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"on_dead_row": "ignore"}, "on_dead_row"),
    ({"logprobs_mode": "row"}, "logprobs_mode"),
    ({"logprobs_mode": ["raw", "raw"]}, "logprobs_mode"),
    ({"trace": "on"}, "trace"),
    ({"profile": ""}, "profile"),
    ({"output_kind": 3}, "output_kind"),
    ({"output_text_buffer_length": 4}, "output_text_buffer_length"),
    ({"chain": [{"p": 0.5}]}, "chain"),
    ({"chain": [""]}, "chain"),
    ({"chain": [{"stage": "top_k", "id": "a"}, {"stage": "top_p", "id": "a"}]}, "chain"),
    ({"speculation": ""}, "speculation"),
    ({"speculation": {}}, "speculation"),
]
WRONG_TYPE = [
    ({"n": 1.0}, "n"),
    ({"n": True}, "n"),
    ({"n": None}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": None}, "top_p"),
    ({"top_k": 3.5}, "top_k"),
    ({"top_k": True}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 16.0}, "max_tokens"),
    ({"logprobs": False}, "logprobs"),
    ({"logprobs": 1.5}, "logprobs"),
    ({"stop": 17}, "stop"),
    ({"stop": [17]}, "stop"),
    ({"stop_token_ids": ["2"]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": 2}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"detokenize": None}, "detokenize"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias"),
    ({"logit_bias": {3: "1"}}, "logit_bias"),
    ({"logit_bias": [3]}, "logit_bias"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": [1]}, "bad_words"),
    ({"extra_args": [1]}, "extra_args"),
    ({"extra_args": {1: 2}}, "extra_args"),
    ({"logits_processors": [3]}, "logits_processors"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"repetition_detection": 3}, "repetition_detection"),
    ({"chain": "top_k"}, "chain"),
    ({"chain": [3]}, "chain"),
    ({"stops": {"stop": "x"}}, "stops"),
    ({"driver": 3}, "driver"),
    ({"output_kind": "delta"}, "output_kind"),
    ({"speculation": True}, "speculation"),
    ({"speculation": {1: 2}}, "speculation"),
]
NOT_FINITE = [
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
    "length_penalty",
]


def test_fields_stand_in_the_documented_order() -> None:
    parameters = inspect.signature(SamplingParams).parameters

    assert list(parameters) == POSITIONAL + VLLM_KEYWORDS + OURS
    keyword_only = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == VLLM_KEYWORDS + OURS


def test_fields_may_be_given_by_position() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.3, 0.7, 0.9, 40, 0.05, 7, "end")

    assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.1, 0.2)
    assert (params.temperature, params.top_k, params.seed, params.stop) == (0.7, 40, 7, ["end"])
    assert params.fields_set == set(POSITIONAL[:10])


def test_defaults_are_vllms() -> None:
    params = SamplingParams()

    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.min_p) == (16, 0, 0.0)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert (params.logprobs, params.seed, params.best_of) == (None, None, None)
    assert params.skip_reading_prefix_cache is False
    assert params.fields_set == frozenset()


@pytest.mark.parametrize(("fields", "parameter"), OUT_OF_RANGE)
@pytest.mark.filterwarnings("ignore:temperature")
def test_out_of_range_is_refused_by_name(fields: dict[str, object], parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)

    assert caught.value.parameter == parameter
    assert str(caught.value).startswith(parameter)


@pytest.mark.parametrize(("fields", "parameter"), WRONG_TYPE)
def test_wrong_type_is_both_a_value_and_a_type_error(
    fields: dict[str, object], parameter: str
) -> None:
    with pytest.raises(ParameterTypeError) as caught:
        SamplingParams(**fields)

    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        SamplingParams(**{name: value})


def test_the_sentence_names_field_range_and_value() -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(top_p=1.5)

    assert str(caught.value) == "top_p must be a number in (0, 1], got 1.5"
    assert (caught.value.parameter, caught.value.value) == ("top_p", 1.5)


def test_checks_run_in_the_documented_order() -> None:
    wrong = {"logprobs": -9, "min_tokens": 99, "top_p": 2, "temperature": -1, "n": 0}
    expected = ["n", "temperature", "top_p", "min_tokens", "logprobs"]
    seen = []

    for _ in expected:
        with pytest.raises(ValidationError) as caught:
            SamplingParams(**wrong)
        seen.append(caught.value.parameter)
        del wrong[seen[-1]]

    assert seen == expected


def test_unknown_keyword_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ParameterTypeError, match="did you mean 'temperature'"):
        SamplingParams(temprature=0.5)


def test_too_many_positional_values_are_refused() -> None:
    with pytest.raises(TypeError, match="at most 25"):
        SamplingParams(*[1] * 26)


def test_n_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "4")

    assert SamplingParams(n=4).n == 4
    with pytest.raises(ValidationError, match="at most 4"):
        SamplingParams(n=5)


def test_tiny_temperature_is_raised_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="raised to 0.01") as record:
        params = SamplingParams(temperature=1e-6)

    assert params.temperature == 0.01
    assert params.sampling_type is SamplingType.RANDOM
    assert record[0].filename == __file__


def test_temperature_zero_switches_truncations_off() -> None:
    params = SamplingParams(temperature=0, top_k=50, top_p=0.5, min_p=0.1, repetition_penalty=1.2)

    assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
    assert params.repetition_penalty == 1.2
    assert params.sampling_type is SamplingType.GREEDY


def test_beams_may_be_greedy_and_return_several() -> None:
    params = SamplingParams(n=2, best_of=4, use_beam_search=True, temperature=0)

    assert params.sampling_type is SamplingType.GREEDY
    assert (
        SamplingParams(
            best_of=3, use_beam_search=True, early_stopping="never", length_penalty=0.6
        ).early_stopping
        == "never"
    )


def test_seed_minus_one_is_none_and_64_bits_are_allowed() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1
    assert SamplingParams(seed=-(2**63)).seed == -(2**63)
    assert SamplingParams(seed=3).sampling_type is SamplingType.RANDOM_SEED


def test_stop_is_normalised_and_held_back() -> None:
    assert SamplingParams(stop="five").stop == ["five"]
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == []
    assert SamplingParams(stop=["five", "five"]).stop == ["five", "five"]
    assert SamplingParams(stop=["END"]).output_text_buffer_length == 2
    assert SamplingParams(stop=["a", "abcd"]).output_text_buffer_length == 3
    included = SamplingParams(stop=["END"], include_stop_str_in_output=True)
    assert included.output_text_buffer_length == 0


def test_true_means_one_logprob() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)

    assert params.logprobs is not True
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)


def test_prompt_logprobs_skip_the_prefix_cache() -> None:
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache is True

    params = SamplingParams()
    params.prompt_logprobs = 2
    assert params.skip_reading_prefix_cache is True
    params.prompt_logprobs = None
    assert params.skip_reading_prefix_cache is False


def test_bias_is_clamped_with_one_warning_and_minus_infinity_is_a_ban() -> None:
    with pytest.warns(UserWarning, match="clamped") as record:
        params = SamplingParams(logit_bias={1: 1e9, 2: -200.0, 3: -math.inf, 4: 0.5})

    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: -math.inf, 4: 0.5}
    assert len(record) == 1


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(
        seed=np.int64(5), temperature=np.float32(0.5), logit_bias={np.int32(3): np.float64(1.0)}
    )

    assert type(params.seed) is int
    assert type(params.temperature) is float
    assert [type(key) for key in params.logit_bias or {}] == [int]


def test_assignment_is_checked_and_leaves_the_object_whole_on_refusal() -> None:
    params = SamplingParams(temperature=0.7, top_k=5)
    before = repr(params), params.fields_set

    with pytest.raises(ValidationError, match="temperature"):
        params.temperature = -1
    with pytest.raises(ValidationError, match="min_tokens"):
        params.min_tokens = 17

    assert (repr(params), params.fields_set) == before


def test_assignment_normalises_and_marks_the_field_as_set() -> None:
    params = SamplingParams()

    params.stop = "END"  # type: ignore[assignment]
    params.max_tokens = 16

    assert params.stop == ["END"]
    assert params.output_text_buffer_length == 2
    assert params.fields_set == {"stop", "max_tokens"}


def test_unknown_or_derived_attributes_cannot_be_assigned() -> None:
    params = SamplingParams()

    with pytest.raises(AttributeError, match="did you mean 'top_p'"):
        params.topp = 0.5  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="read-only"):
        params.output_text_buffer_length = 3


def test_the_callers_lists_are_copied() -> None:
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)

    stop.append("")
    ids.append(-1)
    bias[-4] = 1.0

    assert (params.stop, params.stop_token_ids, params.logit_bias) == (["a"], [1], {1: 2.0})


def test_an_explicit_value_equal_to_the_default_is_set() -> None:
    assert SamplingParams(top_k=-1, top_p=1.0, max_tokens=None).fields_set == {
        "top_k",
        "top_p",
        "max_tokens",
    }


def test_chain_takes_names_dicts_stages_and_classes() -> None:
    class Step:
        name = "step"

        def __init__(self) -> None:
            self.id = "s1"

    chain = ["top_k", {"stage": "top_p", "id": "p", "p": 0.5}, Step(), Step]

    assert SamplingParams(chain=chain).chain == chain
    assert SamplingParams(chain=[]).chain == []


def test_valid_parameters_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams.for_sampler_warmup()
        SamplingParams(temperature=0.01, logit_bias={1: 100.0})
