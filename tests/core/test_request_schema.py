"""The schema of a request: valid itself, and of one mind with SamplingParams and the planner."""

import json
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import Field

from decodekit import SamplingParams, Stage, StageParams, request_schema
from decodekit.core.errors import ValidationError
from decodekit.core.params import DEFAULTS, FIELD_NAMES
from decodekit.core.plan import Planner
from decodekit.core.presets import Presets
from decodekit.core.registry import Registry
from decodekit.core.request_fields import FIELDS, NOT_IN_JSON, RELATIONS
from decodekit.core.stage import Kind
from decodekit.core.structured_params import (
    RepetitionDetectionParams,
    StructuredOutputsParams,
    public_fields,
)

Json = dict[str, Any]


class Shift(Stage):
    """Moves every logit."""

    name = "acme_shift"
    aliases = ("acme_move",)
    kind = Kind.BIAS

    class Params(StageParams):
        """By how much."""

        by: float = Field(ge=-5, le=5, allow_inf_nan=False)
        twice: bool = False

    def transform(self, logits: Any, rows: Any) -> None:
        logits += rows.column("by")[:, None]


REGISTRY = Registry.load(autoload=False)
REGISTRY.register(Shift)
SCHEMA = request_schema(REGISTRY)
VALIDATOR = Draft202012Validator(SCHEMA)
PLANNER = Planner(
    REGISTRY,
    vocab_size=300,
    tokenizer_size=300,
    max_model_len=512,
    eos_ids=(0,),
    device=torch.device("cpu"),
)
# What a schema cannot say; see RELATIONS.
UNSAYABLE = (
    "min_tokens must be at most max_tokens",
    "best_of must be at least n",
    "a list without two equal ids",
    "min_pattern_size must be at most",
    "min_count must be an integer >= 2",
)


def fits(document: Json) -> bool:
    return bool(VALIDATOR.is_valid(document))


def accepted(document: Json) -> str | None:
    """None, or the sentence of SamplingParams."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a value that is raised or clamped
        try:
            SamplingParams.from_optional(**document)
        except ValidationError as error:
            return str(error)
    return None


# --- the schema itself ----------------------------------------------------------------------------


def test_it_is_a_schema_of_draft_2020_12_and_plain_json() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA


def test_it_has_every_field_with_a_line_and_its_default() -> None:
    assert set(SCHEMA["properties"]) == set(FIELD_NAMES) - NOT_IN_JSON
    assert set(FIELDS) == set(FIELD_NAMES) - NOT_IN_JSON
    for name, field in SCHEMA["properties"].items():
        assert field["description"].endswith("."), name
        if DEFAULTS[name] is None or isinstance(DEFAULTS[name], int | float | str):
            assert field["default"] == DEFAULTS[name], name


def test_the_objects_in_fields_have_every_field_of_theirs() -> None:
    for name, cls in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        assert set(FIELDS[name].schema["properties"]) == set(public_fields(cls))


def test_off_values_are_told_and_change_nothing() -> None:
    for name, field in SCHEMA["properties"].items():
        for value in field.get("x-off", ()):
            assert getattr(SamplingParams(**{name: value}).snapshot(), name) is None


def test_every_stage_is_there_a_strangers_included() -> None:
    cards = SCHEMA["x-decodekit"]["stages"]

    assert set(cards) == set(REGISTRY.stages)
    assert cards["acme_shift"] | {"order": 0, "docs": ""} == {
        "kind": "BIAS",
        "order": 0,
        "title": "Moves every logit",
        "docs": "",
        "defaults": {"twice": False},
        "fields": {},
        "aliases": ["acme_move"],
        "mandatory": False,
        "built_in": False,
        "version": 1,
    }
    assert all(card["title"] for card in cards.values())
    assert all(card["docs"] for card in cards.values())
    places = [card["order"] for card in cards.values() if card["order"] is not None]
    assert sorted(places) == list(range(1, len(places) + 1))
    assert cards["vocab_padding"]["order"] == 1
    assert cards["temperature"]["order"] < cards["min_p"]["order"] < cards["top_p"]["order"]


def test_an_editor_finds_profiles_presets_and_the_other_plugins() -> None:
    known = SCHEMA["x-decodekit"]

    assert set(known["profiles"]) == set(REGISTRY.profiles)
    assert known["profiles"]["sglang"]["fields"]["top_k"] == ["top_k_top_p", "k"]
    assert set(known["presets"]) == set(Presets.load())
    assert known["presets"]["classify"]["extends"] == ["extract"]
    assert "confidence" in known["observers"]
    assert "idle_cuts" in known["reviewers"]
    assert known["relations"] == list(RELATIONS)
    assert SCHEMA["properties"]["profile"]["enum"] == [*REGISTRY.profiles, None]


def test_presets_of_a_file_are_named(tmp_path: Any) -> None:
    path = tmp_path / "p.toml"
    path.write_text("[mine]\nseed = 3\n")
    schema = request_schema(REGISTRY, presets=Presets.load(path))

    assert "mine" in schema["properties"]["preset"]["enum"]
    assert schema["x-decodekit"]["presets"]["mine"]["fields"] == {"seed": 3}


def test_a_field_whose_stage_is_gone_takes_nothing() -> None:
    schema = request_schema(Registry.load(plugins=["no:min_p"], autoload=False))
    validator = Draft202012Validator(schema)

    assert validator.is_valid({"top_p": 0.5})
    assert not validator.is_valid({"min_p": 0.5})
    assert "stage.min_p" not in schema["$defs"]


# --- of one mind: flat fields ---------------------------------------------------------------------

EXAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 2, 16384], [0, -1, 16385, 1.5, "2", True]),
    "presence_penalty": ([-2, 2.0, 0], [-2.1, 2.1, "0", True]),
    "repetition_penalty": ([0.01, 1, 9.5], [0, -1, False]),
    "temperature": ([0, 0.0, 0.5, 3], [-0.1, "hot", True]),
    "top_p": ([0.01, 1], [0, 1.01, -1]),
    "top_k": ([-1, 0, 1, 50], [-2, 1.5]),
    "min_p": ([0, 1, 0.05], [-0.1, 1.1]),
    "seed": ([-1, 0, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1, "x"]),
    "stop": (["x", ["x", "y"], []], ["", [""], [1], 3]),
    "stop_token_ids": ([[], [1, 2]], [[-1], ["1"], 5]),
    "ignore_eos": ([True, False], [0, "yes"]),
    "max_tokens": ([1, 99], [0, -1, 1.5]),
    "logprobs": ([0, 5, -1, True], [-2, False, "5"]),
    "logit_bias": ([{}, {"5": 1.5}, {"7": -100}], [{"x": 1}, {"5": "1"}, [5], {"-1": 1}]),
    "allowed_token_ids": ([[1]], [[], [-1], "1"]),
    "bad_words": ([[], ["x"]], [[""], [3]]),
    "structured_outputs": (
        [{"regex": "a"}, {"json": {"type": "object"}}, {"choice": ["a"], "strict": False}],
        [{}, {"regex": "a", "choice": ["b"]}, {"regexp": "a"}, {"choice": []}, "a"],
    ),
    "repetition_detection": (
        [{"max_pattern_size": 3, "min_count": 2}, {}],
        [{"max_pattern_size": -1}, {"size": 3}, 4],
    ),
    "thinking_token_budget": ([0, -1, 7], [-2, "7"]),
    "truncate_prompt_tokens": ([-1, 1], [0, -2]),
    "on_dead_row": (["error", "relax"], ["errors", 1]),
    "logprobs_mode": (
        ["raw", ["raw", "final"], "processed_logits"], ["rew", [], ["raw", "raw"], 3],
    ),
    "trace": (["off", "tokens"], ["on"]),
    "output_kind": ([0, 1, 2], [3, "DELTA"]),
    "extra_args": ([{}, {"a": [1]}], [[], "a"]),
    "kept_set": ([True], [1]),
    "picker": (["greedy", "gumbel", {"picker": "mirostat", "tau": 3}], [{"tau": 3}, 5, ""]),
    "chain": (
        [[], ["top_k"], [{"stage": "top_p", "p": 0.9}, "race"], [{"stage": "tfs", "z": 0.9}]],
        ["top_k", [{"p": 0.9}], [3], [{"stage": ""}]],
    ),
    "observers": ([[], [{"observer": "confidence", "threshold": -1.5}]], ["confidence", [7]]),
    "preset": (["chat"], [3, ""]),
    "profile": (["vllm"], [3, ""]),
    "plan_review": ([True, False], [1, "no"]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_field_takes_and_what_it_does_not(name: str) -> None:
    good, bad = EXAMPLES[name]
    for value in [*good, None]:
        assert accepted({name: value}) is None, value
        assert fits({name: value}), value
    for value in bad:
        assert accepted({name: value}) is not None, value
        assert not fits({name: value}), value


@pytest.mark.parametrize(
    ("document", "is_good"),
    [
        ({"temperature": 0, "n": 1}, True),
        ({"temperature": 0, "n": 2}, False),
        ({"temperature": 0, "best_of": 2}, False),
        ({"temperature": 0, "n": 2, "best_of": 3, "use_beam_search": True}, True),
        ({"use_beam_search": True}, False),
        ({"use_beam_search": True, "best_of": 2, "early_stopping": "never"}, True),
        ({"length_penalty": 2.0}, False),
        ({"length_penalty": 1.0}, True),
        ({"early_stopping": True}, False),
        ({"stop": ["x"], "detokenize": False}, False),
        ({"stop": [], "detokenize": False}, True),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, False),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": True}, True),
        ({"temprature": 1}, False),
    ],
)
def test_relations_between_fields(document: Json, is_good: bool) -> None:
    assert fits(document) == is_good
    assert (accepted(document) is None) == is_good


NUMBER = st.one_of(
    st.sampled_from([-2, -1, 0, 1, 2, 0.5, 1.0, 2.0, -2.5, 1e-6, 1e9]),
    st.integers(-5, 40),
    st.floats(-3, 3, allow_nan=False),
)


def values(schema: Json) -> st.SearchStrategy[Any]:
    """Values that fit a property, and values near it."""
    odd = st.one_of(
        st.none(), st.booleans(), NUMBER, st.sampled_from(["", "raw", "x"]),
        st.lists(st.integers(-1, 5), max_size=2), st.just({}),
    )  # fmt: skip
    enum = [item for item in _all(schema, "enum") for item in item]
    return st.one_of(odd, st.sampled_from(enum)) if enum else odd


def _all(schema: Any, key: str) -> list[Any]:
    if isinstance(schema, dict):
        own = [schema[key]] if key in schema and isinstance(schema[key], list) else []
        return own + [item for value in schema.values() for item in _all(value, key)]
    if isinstance(schema, list):
        return [item for value in schema for item in _all(value, key)]
    return []


PLAIN = {
    name: field
    for name, field in SCHEMA["properties"].items()
    if name not in ("chain", "picker", "observers", "stops", "driver", "profile", "preset")
}


@settings(max_examples=600)
@given(st.data())
def test_the_schema_and_the_parameters_agree_on_flat_fields(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(PLAIN)), min_size=1, max_size=4, unique=True))
    document = {name: data.draw(values(PLAIN[name]), label=name) for name in names}
    # 1.0 is an integer of JSON schema, and none of Python.
    assume(not any(_whole_float(document[name], PLAIN[name]) for name in names))
    sentence = accepted(document)

    if fits(document):
        assert sentence is None or any(part in sentence for part in UNSAYABLE), sentence
    else:
        assert sentence is not None, document


def _whole_float(value: Any, schema: Json) -> bool:
    if isinstance(value, list):
        return any(_whole_float(item, schema) for item in value)
    takes_whole = "integer" in json.dumps(schema)
    return isinstance(value, float) and math.isfinite(value) and value == int(value) and takes_whole


# --- of one mind: chains --------------------------------------------------------------------------


def parameter_values(schema: Json) -> st.SearchStrategy[Any]:
    """A value that fits one parameter of a stage."""
    if "anyOf" in schema:
        return st.one_of(
            [parameter_values(choice) for choice in schema["anyOf"] if "not" not in str(choice)]
        )
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        high = schema.get("maximum", schema.get("exclusiveMaximum", 10**6) - 1)
        return st.integers(max(low, -5), min(high, max(low, 0) + 200))
    if kind == "number":
        low, high = schema.get("minimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
        floor = schema.get("exclusiveMinimum", low)
        return st.floats(
            -10 if floor is None else floor,
            10 if high is None else high,
            exclude_min="exclusiveMinimum" in schema,
            exclude_max="exclusiveMaximum" in schema,
        )
    if kind == "string":
        return st.sampled_from(["a", "word"])
    if kind == "array":
        if "prefixItems" in schema:
            return st.tuples(*map(parameter_values, schema["prefixItems"])).map(list)
        least = schema.get("minItems", 0)
        items = schema.get("items", {})
        return st.lists(parameter_values(items), min_size=least, max_size=max(least, 2))
    if kind == "object":
        extra = schema.get("additionalProperties", {})
        return st.dictionaries(st.sampled_from(["3", "7"]), parameter_values(extra), max_size=2)
    return st.none()


def entries(name: str) -> st.SearchStrategy[Json]:
    schema = SCHEMA["$defs"][f"stage.{name}"]
    own = {
        key: parameter_values(value)
        for key, value in schema["properties"].items()
        if key not in ("stage", "id")
    }
    needed = {key: own.pop(key) for key in schema["required"] if key in own}
    return st.fixed_dictionaries({"stage": st.just(name), **needed}, optional=own)


@settings(max_examples=300)
@given(st.sampled_from(sorted(REGISTRY.stages)).flatmap(entries))
def test_an_entry_that_fits_is_accepted_by_its_stage(entry: Json) -> None:
    document = {"chain": [entry]}
    assert fits(document), [error.message for error in VALIDATOR.iter_errors(document)]
    assert accepted(document) is None
    stage = REGISTRY.stage(entry["stage"])
    params = {key: value for key, value in entry.items() if key != "stage"}

    try:
        stage.validate(params)
    except ValidationError as error:  # only a rule of the stage's own code may object
        assert "must" in str(error) or "but" in str(error)
        fields = stage.Params.model_fields
        assert any(stage.Params.__pydantic_decorators__.field_validators), (fields, error)


@pytest.mark.parametrize(
    "entry",
    [
        {"stage": "top_p", "p": 0},
        {"stage": "top_p", "p": 1.5},
        {"stage": "top_p", "q": 0.5},
        {"stage": "top_k", "k": 0},
        {"stage": "top_k", "k": 5, "ties": "all"},
        {"stage": "toppp"},
        {"stage": "acme_shift"},
        "acme_shift",
        "keyed_gumbel",
        {"stage": "acme_shift", "by": 6},
        {"stage": "xtc", "probability": 2},
        {"stage": "keyed_gumbel"},
        {"stage": "min_p", "p": "0.1x"},
        "toppp",
    ],
)
def test_an_entry_that_does_not_fit_is_refused_by_the_planner(entry: Any) -> None:
    document = {"chain": [entry]}

    assert not fits(document)
    with pytest.raises(ValidationError):
        PLANNER.admit(SamplingParams.from_optional(**document).snapshot())


def test_a_strangers_stage_is_taken_by_name_and_alias() -> None:
    for name in ("acme_shift", "acme_move"):
        document = {"chain": [{"stage": name, "by": 1.5, "id": "x"}]}
        assert fits(document)
        report = PLANNER.admit(SamplingParams(**document).snapshot()).report
        assert [step.stage for step in report.order] == ["acme_shift", "race"]


def test_a_chain_holds_as_many_stages_as_the_planner_takes() -> None:
    assert fits({"chain": ["top_k"] * 64})
    assert not fits({"chain": ["top_k"] * 65})


def test_what_only_python_can_give_is_not_in_it() -> None:
    assert not fits({"logits_processors": []})
    assert not fits({"chain": [{"stage": "per_request", "callables": ["f"]}]})
    assert fits({"chain": [{"stage": "per_request", "callables": None}]})
