"""Settings of other systems: every name has a fate, values mean what they meant, notes tell."""

import json
from typing import Any

import pytest
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

from decodekit.core.dialects import tables
from decodekit.core.errors import ParameterTypeError, ValidationError
from decodekit.core.params import FIELDS, SamplingParams
from decodekit.core.porting import RULES, STAGE_OF
from decodekit.core.registry import Registry

REGISTRY = Registry.load(autoload=False)
TABLES = tables()
ROWS = [(name, key, row) for name, table in TABLES.items() for key, row in table["keys"].items()]


def port(dialect: str, _defaults: bool = False, **settings: Any) -> SamplingParams:
    return SamplingParams.from_dialect(dialect, settings, defaults=_defaults)


def given(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.fields_set - {"profile"}}


# --- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "key", "row"), ROWS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_row_leads_somewhere(dialect: str, key: str, row: Any) -> None:
    row = {"to": row} if isinstance(row, str) else row
    fates = [fate for fate in ("to", "by", "refuse", "drop") if fate in row]
    assert len(fates) == 1
    assert set(row) <= {"to", "by", "refuse", "drop", "off", "per", "note", "sampling"}
    if "by" in row:
        name, *rest = row["by"].split(":")
        assert name in RULES
        row = {"to": rest[-1]} if rest and "." in rest[-1] else {}
    stage, dot, parameter = row.get("to", "n").partition(".")
    if dot:
        assert parameter in REGISTRY.stage(stage).Params.model_fields
        assert stage in TABLES[dialect]["order"]
    else:
        assert stage in FIELDS


@pytest.mark.parametrize("dialect", TABLES)
def test_a_dialect_has_its_profile_and_that_profiles_order(dialect: str) -> None:
    table = TABLES[dialect]
    profile = REGISTRY.profiles[table.get("profile", "default")]
    order = [name for name in table["order"] if name in profile.order]

    assert order == sorted(order, key=profile.order.index)
    assert all(REGISTRY.stage(name) for name in table["order"])
    for names in table.get("samplers", {}).values():
        assert all(name in table["order"] or name == "encoder_repetition"
                   or name in REGISTRY.pickers for name in names)  # fmt: skip
    assert set(table.get("defaults", {})) <= set(table["keys"])
    assert set(table.get("aliases", {}).values()) <= set(table["keys"])


def test_flat_fields_fill_the_stages_that_a_written_chain_names() -> None:
    for field, stage in STAGE_OF.items():
        assert REGISTRY.fields[field][0].name == stage


@pytest.mark.parametrize("dialect", [name for name in TABLES if name != "vllm"])
def test_the_documented_defaults_can_be_assumed(dialect: str) -> None:
    params = SamplingParams.from_dialect(dialect, {}, defaults=True)

    assert params.profile == TABLES[dialect].get("profile")
    assert SamplingParams.from_dialect(dialect, {}).fields_set <= {"profile"}


def test_every_setting_of_generation_config_is_known() -> None:
    theirs = {key for key in GenerationConfig().to_dict() if not key.startswith("_")}

    assert theirs <= set(TABLES["transformers"]["keys"])


def test_none_is_not_given() -> None:
    for dialect, table in TABLES.items():
        params = SamplingParams.from_dialect(dialect, dict.fromkeys(table["keys"]))
        assert params.fields_set <= {"profile"}
        assert params.porting_notes == ()


@pytest.mark.parametrize(
    ("dialect", "key", "off"),
    [
        (dialect, key, off)
        for dialect, key, row in ROWS
        if isinstance(row, dict)
        for off in row.get("off", ())
    ],
)
def test_a_value_that_asks_for_nothing_sets_nothing(dialect: str, key: str, off: Any) -> None:
    params = SamplingParams.from_dialect(dialect, {key: off})

    assert params.fields_set <= {"profile"}
    assert params.porting_notes == ()


@pytest.mark.parametrize(
    ("dialect", "key", "row"),
    [(d, k, row) for d, k, row in ROWS if isinstance(row, dict) and "refuse" in row],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_the_setting_and_what_to_do(dialect: str, key: str, row: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.from_dialect(dialect, {key: ["something"]})

    assert caught.value.parameter == key
    assert str(caught.value).startswith(f"{key}=['something'] of {dialect} has no counterpart here")
    assert row["refuse"] in str(caught.value)


# --- names and values -----------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ParameterTypeError, match="no setting 'temprature'.*'temperature'"):
        port("sglang", temprature=1)
    with pytest.raises(ValidationError, match="did you mean 'llama.cpp'"):
        port("llama-cpp")
    with pytest.raises(ParameterTypeError, match="settings must be a mapping"):
        SamplingParams.from_dialect("openai", [("n", 2)])  # type: ignore[arg-type]


def test_a_value_out_of_range_is_refused_as_elsewhere() -> None:
    with pytest.raises(ValidationError, match="top_p must be"):
        port("openai", top_p=1.5)


def test_two_spellings_of_one_setting_must_agree() -> None:
    assert port("llama.cpp", temp=0.5, temperature=0.5).temperature == 0.5
    with pytest.raises(ValidationError, match="another spelling"):
        port("llama.cpp", temp=0.5, temperature=0.6)
    with pytest.raises(ValidationError, match="contradicts another setting that gives max_tokens"):
        port("openai", max_tokens=5, max_completion_tokens=6)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sglang", {"max_new_tokens": 9, "top_k": 1 << 30, "sampling_seed": 4, "no_stop_trim": True},
     {"max_tokens": 9, "seed": 4, "include_stop_str_in_output": True}),
    ("sglang", {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_new_tokens": 2},
     {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_tokens": 2}),
    ("llama.cpp", {"temp": -1.0, "n_predict": -1, "seed": 4294967295},
     {"temperature": 0.0, "max_tokens": None}),
    ("llama.cpp", {"logit_bias": [[5, -2.0], [6, False]], "n_probs": 3},
     {"logit_bias": {5: -2.0, 6: float("-inf")}, "logprobs": 3}),
    ("llama.cpp", {"repeat_penalty": 1.1, "repeat_last_n": 0, "top_k": -1}, {}),
    ("llama.cpp", {"repeat_penalty": 1.1, "repeat_last_n": -1, "frequency_penalty": 0.5},
     {"repetition_penalty": 1.1, "frequency_penalty": 0.5,
      "chain": [{"stage": "repetition_penalty", "last_n": None},
                {"stage": "frequency_penalty", "last_n": None}]}),
    ("llama.cpp", {"temperature": 0.8, "min_p": 0.1, "xtc_probability": 0.5, "xtc_threshold": 0.2},
     {"temperature": 0.8, "min_p": 0.1,
      "chain": ["min_p", {"stage": "xtc", "probability": 0.5, "threshold": 0.2}, "temperature"]}),
    ("llama.cpp", {"temperature": 1.0, "dynatemp_range": 0.25, "dynatemp_exponent": 2.0},
     {"chain": [{"stage": "dynamic_temperature", "low": 0.75, "high": 1.25, "exponent": 2.0}]}),
    ("llama.cpp", {"samplers": ["temperature", "top_k"], "temperature": 0.5, "top_k": 4},
     {"temperature": 0.5, "top_k": 4, "chain": ["temperature", "top_k"]}),
    ("llama.cpp", {"samplers": "top_p;temperature", "temperature": 0.5, "top_p": 0.9, "top_k": 4},
     {"temperature": 0.5, "top_p": 0.9, "chain": ["top_p", "temperature"]}),
    ("llama.cpp", {"mirostat": 2, "mirostat_tau": 4.0, "temperature": 0.7, "top_k": 40},
     {"temperature": 0.7, "picker": {"picker": "mirostat", "mode": 2, "tau": 4.0}}),
    ("llama.cpp", {"adaptive_target": 0.4, "adaptive_decay": 0.8, "min_p": 0.02},
     {"min_p": 0.02, "picker": {"picker": "adaptive_p", "target": 0.4, "decay": 0.8}}),
    ("llama.cpp", {"adaptive_target": -1.0}, {}),
    ("llama.cpp", {"top_p": 0.9, "min_keep": 3},
     {"top_p": 0.9, "chain": [{"stage": "top_p", "min_keep": 3}]}),
    ("llama.cpp", {"dry_multiplier": 0.8, "dry_penalty_last_n": -1,
                   "dry_sequence_breakers": ["\n"]},
     {"chain": [{"stage": "dry", "multiplier": 0.8, "range": -1, "breakers": ["\n"]}]}),
    ("openai", {"logprobs": True, "top_logprobs": 4, "logit_bias": {"7": 2}},
     {"logprobs": 4, "logit_bias": {7: 2.0}}),
    ("openai", {"logprobs": True}, {"logprobs": 0}),
    ("openai", {"logprobs": 5, "best_of": 3, "stop": "x"},
     {"logprobs": 5, "best_of": 3, "stop": ["x"]}),
    ("text-generation-webui", {"epsilon_cutoff": 3, "eta_cutoff": 6, "temperature": 0.7},
     {"temperature": 0.7, "chain": ["temperature", {"stage": "epsilon", "epsilon": 3e-4},
                                    {"stage": "eta", "epsilon": 6e-4}]}),
    ("text-generation-webui", {"temperature": 0.7, "top_p": 0.9, "temperature_last": True},
     {"temperature": 0.7, "top_p": 0.9, "chain": ["top_p", "temperature"]}),
    ("text-generation-webui",
     {"dynamic_temperature": True, "dynatemp_low": 0.5, "dynatemp_high": 1.5, "top_k": 0},
     {"chain": [{"stage": "dynamic_temperature", "low": 0.5, "high": 1.5}]}),
    ("text-generation-webui",
     {"dry_multiplier": 0.8, "dry_sequence_breakers": '"\\n", ":"', "tfs": 0.9},
     {"chain": [{"stage": "dry", "multiplier": 0.8, "breakers": ["\n", ":"]},
                {"stage": "tail_free", "z": 0.9}]}),
    ("text-generation-webui", {"sampler_priority": "top_p\ntemperature", "temperature": 0.5,
                               "top_p": 0.9, "top_k": 8},
     {"temperature": 0.5, "top_p": 0.9, "top_k": 8, "chain": ["top_k", "top_p", "temperature"]}),
    ("text-generation-webui", {"custom_token_bans": "3, 4", "auto_max_new_tokens": True},
     {"max_tokens": None, "chain": [{"stage": "suppress_tokens", "ids": [3, 4]}]}),
    ("text-generation-webui", {"do_sample": False, "repetition_penalty": 1.2,
                               "repetition_penalty_range": 0},
     {"temperature": 0.0, "repetition_penalty": 1.2,
      "chain": [{"stage": "repetition_penalty", "last_n": None}]}),
    ("koboldcpp", {"rep_pen": 1.1, "rep_pen_range": 256, "sampler_seed": 5, "trim_stop": False},
     {"repetition_penalty": 1.1, "seed": 5, "include_stop_str_in_output": True,
      "chain": [{"stage": "repetition_penalty", "last_n": 256}]}),
    ("koboldcpp", {"sampler_order": [6, 5, 0, 1, 3, 4, 2], "temperature": 0.7, "top_k": 9},
     {"temperature": 0.7, "top_k": 9, "chain": ["temperature", "top_k"]}),
    ("exllamav3", {"rep_p": 1.1, "rep_sustain_range": 64, "rep_decay_range": 32},
     {"repetition_penalty": 1.1,
      "chain": [{"stage": "repetition_penalty", "sustain": 64, "decay": 32}]}),
    ("exllamav3", {"temperature": 0.8, "min_p": 0.1, "temp_last": True,
                   "stop_conditions": [5, "x"]},
     {"temperature": 0.8, "min_p": 0.1, "stop": ["x"], "stop_token_ids": [5],
      "chain": ["min_p", "temperature"]}),
    ("tgi", {"temperature": 0.5, "typical_p": 0.9, "truncate": 50},
     {"temperature": 0.5, "truncate_prompt_tokens": 50,
      "chain": ["temperature", {"stage": "typical_p", "p": 0.9}]}),
    ("tgi", {"do_sample": False}, {"temperature": 0.0}),
    ("tgi", {"do_sample": False, "top_p": 0.9}, {"top_p": 0.9}),
    ("ollama", {"num_predict": -2, "repeat_penalty": 1.1, "repeat_last_n": 32, "stop": ["x"]},
     {"max_tokens": None, "repetition_penalty": 1.1, "stop": ["x"],
      "chain": [{"stage": "repetition_penalty", "last_n": 32}]}),
    ("vllm", {"temperature": 0.3, "kept_set": True}, {"temperature": 0.3, "kept_set": True}),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "settings", "expected"), CASES)
def test_settings_become_these_fields(
    dialect: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = SamplingParams.from_dialect(dialect, settings)

    assert given(params) == expected
    assert params.profile == TABLES[dialect].get("profile")


CONSTRAINTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("openai", {"response_format": {"type": "json_object"}}, {"json_object": True}),
    ("openai",
     {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
     {"json": {"type": "object"}}),
    ("sglang", {"regex": "a+"}, {"regex": "a+"}),
    ("sglang", {"json_schema": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
    ("vllm", {"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ("ollama", {"format": "json"}, {"json_object": True}),
    ("tgi", {"grammar": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "settings", "expected"), CONSTRAINTS)
def test_constraints_become_structured_outputs(
    dialect: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = SamplingParams.from_dialect(dialect, settings)

    assert params == SamplingParams(
        structured_outputs=expected, profile=TABLES[dialect].get("profile")
    )


@pytest.mark.parametrize(
    ("dialect", "settings", "told"),
    [
        ("llama.cpp", {"xtc_threshold": 0.1}, "xtc_threshold is not used, since xtc_probability"),
        ("llama.cpp", {"mirostat": 1, "top_k": 3}, "top_k is left out, as mirostat stands alone"),
        ("llama.cpp", {"samplers": ["top_k"], "top_k": 3, "temperature": 0.4},
         "temperature is left out, as samplers does not list it"),
        ("llama.cpp", {"ignore_eos": True}, "llama.cpp bans the end token"),
        ("exllamav3", {"top_p": 0.9}, "drops the token that crosses"),
        ("text-generation-webui", {"xtc_probability": 0.5}, "never removes an end token"),
        ("koboldcpp", {"banned_tokens": ["x"]}, "takes a banned phrase back"),
        ("transformers", {"do_sample": False, "top_p": 0.9}, "top_p is not used"),
        ("transformers", {"pad_token_id": 0}, "pad_token_id is left out: nothing is padded"),
    ],
)  # fmt: skip
def test_what_differs_is_noted(dialect: str, settings: dict[str, Any], told: str) -> None:
    params = SamplingParams.from_dialect(dialect, settings)

    assert any(told in note for note in params.porting_notes)
    assert params.snapshot().notes == params.porting_notes


@pytest.mark.parametrize(
    ("dialect", "settings"),
    [
        ("llama.cpp", {"samplers": ["topk"]}),
        ("llama.cpp", {"logit_bias": [["word", 1]]}),
        ("llama.cpp", {"mirostat": 3}),
        ("llama.cpp", {"n_predict": "long"}),
        ("koboldcpp", {"sampler_order": [1, 2]}),
        ("text-generation-webui", {"dry_sequence_breakers": "'x'"}),
        ("text-generation-webui", {"custom_token_bans": "a,b"}),
        ("openai", {"response_format": "json"}),
        ("tgi", {"grammar": {"type": "xml"}}),
        ("transformers", {"num_beams": 3, "do_sample": True}),
    ],
)
def test_a_value_that_cannot_be_read_names_its_setting(
    dialect: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.from_dialect(dialect, settings)

    assert caught.value.parameter in settings


# --- generate -------------------------------------------------------------------------------------


def test_generate_is_greedy_and_short_unless_told() -> None:
    params = SamplingParams.from_generate()

    assert given(params) == {"temperature": 0.0, "max_tokens": 20}
    assert SamplingParams.from_generate(do_sample=True).top_k == 50


def test_keywords_win_over_the_config() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.3, top_k=7, eos_token_id=[4, 5])
    params = SamplingParams.from_generate(config, temperature=0.9, max_new_tokens=3)

    assert (params.temperature, params.top_k, params.max_tokens) == (0.9, 7, 3)
    assert params.stop_token_ids == [4, 5]
    assert SamplingParams.from_generate({"do_sample": True}, top_k=0).top_k == 0


def test_processors_without_a_flat_field_become_stages_in_their_order() -> None:
    params = SamplingParams.from_generate(
        do_sample=True,
        typical_p=0.9,
        repetition_penalty=1.2,
        encoder_repetition_penalty=2.0,
        no_repeat_ngram_size=3,
        encoder_no_repeat_ngram_size=2,
        sequence_bias={(1, 2): 3.0},
        suppress_tokens=[8],
        begin_suppress_tokens=[9],
        exponential_decay_length_penalty=(5, 1.1),
        bad_words_ids=[[3], [4, 5]],
        top_k=0,
    )

    assert params.chain == [
        {"stage": "suppress_tokens", "ids": [8]},
        {"stage": "suppress_tokens", "id": "begin_suppress", "ids": [9], "begin_only": True},
        {"stage": "bad_words", "words": [[3], [4, 5]]},
        {"stage": "no_repeat_ngram", "n": 3},
        {"stage": "no_repeat_ngram", "id": "encoder_no_repeat_ngram", "n": 2, "scope": "prompt"},
        {"stage": "sequence_bias", "bias": [[[1, 2], 3.0]]},
        {"stage": "repetition_penalty", "id": "encoder_repetition", "penalty": 0.5,
         "scope": "prompt", "last_n": None},
        "repetition_penalty",
        {"stage": "length_decay", "start": 5, "factor": 1.1},
        {"stage": "typical_p", "p": 0.9},
    ]  # fmt: skip


def test_beams_are_asked_for_by_name() -> None:
    params = SamplingParams.from_generate(
        num_beams=4, num_return_sequences=2, length_penalty=0.5, early_stopping=True
    )

    assert (params.use_beam_search, params.best_of, params.n) == (True, 4, 2)
    assert (params.length_penalty, params.early_stopping) == (0.5, True)
    alone = SamplingParams.from_generate(length_penalty=0.5)
    assert any("num_beams is 1" in note for note in alone.porting_notes)


def test_watermarks_are_read_from_their_objects() -> None:
    green = WatermarkingConfig(greenlist_ratio=0.3, bias=1.5, seeding_scheme="selfhash")
    synth = SynthIDTextWatermarkingConfig(ngram_len=4, keys=[1, 2, 3])

    [stage] = (
        SamplingParams.from_generate(watermarking_config=green, do_sample=True, top_k=0).chain or []
    )
    assert stage["stage"] == "green_list"
    assert (stage["gamma"], stage["delta"], stage["scheme"]) == (0.3, 1.5, "selfhash")
    [stage] = (
        SamplingParams.from_generate(watermarking_config=synth, do_sample=True, top_k=0).chain or []
    )
    assert stage == {"stage": "synthid", "keys": [1, 2, 3], "ngram": 4, "history": 1024}


def test_something_else_than_a_config_is_refused() -> None:
    with pytest.raises(ParameterTypeError, match="config must be a GenerationConfig"):
        SamplingParams.from_generate(3)


def test_the_result_can_be_changed_and_shown_like_any_other() -> None:
    params = port("llama.cpp", temperature=0.8, top_k=40)
    params.top_p = 0.9

    assert eval(repr(params)) == params
    assert json.loads(json.dumps({"top_k": params.top_k})) == {"top_k": 40}
