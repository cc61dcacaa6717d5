"""Presets: reading, inheritance, pins, and what becomes of them in parameters."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodekit.core.errors import ParameterTypeError, ValidationError
from decodekit.core.params import SamplingParams
from decodekit.core.presets import Presets, resolve

Write = Callable[..., Path]
SHIPPED = ["code", "extract", "classify", "chat", "translate", "long_form", "creative"]
HOUSE = """
    [base]
    description = "What every request here has."
    max_tokens = 200
    top_p = 0.9
    pinned = ["max_tokens"]

    [support]
    extends = "base"
    temperature = 0.3
    stop = ["END"]
    logit_bias = { 5 = 1.5 }
    pinned = ["seed"]

    [loud]
    extends = "support"
    temperature = 1.1
    unset = ["top_p"]
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "presets.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# --- the shipped ones -----------------------------------------------------------------------------


def test_these_are_shipped() -> None:
    presets = Presets.load()

    assert list(presets) == SHIPPED
    assert all(preset.description and preset.source == "built in" for preset in presets.values())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_preset_makes_parameters(name: str) -> None:
    preset = Presets.load()[name]
    params = SamplingParams.from_preset(name)

    assert params.preset == name
    assert params.presets == preset.lineage
    assert params.own_fields == frozenset()
    assert set(params.sources) == set(preset.fields) == params.fields_set
    assert params.max_tokens == preset.fields["max_tokens"]


def test_classify_inherits_from_extract() -> None:
    preset = Presets.load()["classify"]

    assert preset.lineage == ("classify", "extract")
    assert preset.origins == {"temperature": "extract", "max_tokens": "classify"}


def test_penalties_and_cuts_can_be_added_to_a_preset_with_a_chain() -> None:
    changes = {"top_k": 7, "repetition_penalty": 1.1, "temperature": 0.4}
    params = SamplingParams.from_preset("creative", **changes)
    stages = [item if isinstance(item, str) else item["stage"] for item in params.chain or []]

    assert {"top_k", "top_p", "min_p", "temperature", "repetition_penalty"} <= set(stages)
    assert (params.top_k, params.temperature, params.min_p) == (7, 0.4, 0.02)
    assert params.own_fields == {"top_k", "repetition_penalty", "temperature"}


# --- files ----------------------------------------------------------------------------------------


def test_a_file_stands_beside_the_shipped_presets(write: Write) -> None:
    presets = Presets.load(write(HOUSE))
    loud = presets["loud"]

    assert list(presets) == [*SHIPPED, "base", "support", "loud"]
    assert loud.lineage == ("loud", "support", "base")
    assert dict(loud.fields) == {
        "max_tokens": 200,
        "temperature": 1.1,
        "stop": ("END",),
        "logit_bias": {5: 1.5},
    }
    assert loud.pinned == {"seed": "support", "max_tokens": "base"}
    assert loud.origins["max_tokens"] == "base"
    assert loud.description == "What every request here has."


def test_json_reads_like_toml_and_null_takes_an_inherited_field_out(write: Write) -> None:
    text = json.dumps(
        {
            "a": {"temperature": 0.2, "chain": ["temperature", {"stage": "min_p", "p": 0.1}]},
            "b": {"extends": "a", "temperature": None, "seed": 3},
        }
    )
    presets = Presets.load(write(text, "house.json"))

    assert presets["a"].fields["chain"] == ("temperature", {"stage": "min_p", "p": 0.1})
    assert set(presets["b"].fields) == {"chain", "seed"}


def test_a_preset_of_the_same_name_replaces_the_shipped_one_and_may_extend_it(
    write: Write,
) -> None:
    presets = Presets.load(write('[chat]\nextends = "chat"\nmax_tokens = 90\n'))

    assert presets["chat"].fields == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 90}
    assert presets["chat"].lineage == ("chat", "chat")
    assert Presets.load()["chat"].fields["max_tokens"] == 1024


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a]\ntemprature = 1\n", "'temprature'.*did you mean 'temperature'"),
        ('[a]\nextend = "b"\n', "'extend'.*did you mean 'extends'"),
        ("[a]\ntemperature = -1\n", "preset 'a' of .*: temperature must be a finite number"),
        ("[a]\ntop_p = 2\n", "top_p must be a number in"),
        ("[a]\nmax_tokens = 1\nmin_tokens = 5\n", "min_tokens must be at most"),
        ('[a]\nextends = "caht"\n', "extends 'caht'.*did you mean 'chat'"),
        ("[a]\nextends = 3\n", "extends must be the name"),
        ('[a]\nextends = "b"\n[b]\nextends = "c"\n[c]\nextends = "a"\n', "circle: a > b > c > a"),
        ('[a]\nextends = "a"\n', "circle: a > a"),
        ('[a]\npinned = ["tempreature"]\n', "pinned names 'tempreature'.*'temperature'"),
        ('[a]\npinned = "seed"\n', "pinned must be a list"),
        ('[a]\npreset = "chat"\n', "has no field 'preset'"),
        ("a = 3\n", "preset 'a' must be a table"),
        ("[a\n", "no valid TOML"),
        ('[p]\ntop_p = 0.5\npinned = ["top_p"]\n[h]\nextends = "p"\ntop_p = 0.6\n',
         "preset 'h' of .* cannot change top_p, which is pinned by the preset 'p'"),
        ('[p]\ntop_p = 0.5\npinned = ["top_p"]\n[h]\nextends = "p"\nunset = ["top_p"]\n',
         "cannot change top_p"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_refused_in_one_sentence(write: Write, text: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told) as caught:
        Presets.load(write(text))

    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cannot be read: No such file"):
        Presets.load(tmp_path / "none.toml")
    with pytest.raises(ValidationError, match=r"must end in \.toml or \.json"):
        Presets.load(tmp_path / "presets.yaml")


# --- parameters -----------------------------------------------------------------------------------


def test_an_unknown_preset_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValidationError, match="did you mean 'creative'") as caught:
        SamplingParams.from_preset("creativ")

    assert (caught.value.parameter, caught.value.value) == ("preset", "creativ")


def test_a_pinned_field_is_refused_and_an_equal_value_is_not(write: Write) -> None:
    path = write(HOUSE)

    with pytest.raises(ValidationError, match="max_tokens is pinned to 200 by the preset 'base'"):
        SamplingParams.from_preset("loud", preset_file=path, max_tokens=201)
    with pytest.raises(ValidationError, match="seed is pinned by the preset 'support'"):
        SamplingParams.from_preset("loud", preset_file=path, seed=1)
    params = SamplingParams.from_preset("loud", preset_file=path, max_tokens=200, stop="END")
    assert params.own_fields == {"max_tokens", "stop"}


def test_a_pin_holds_on_assignment_too(write: Write) -> None:
    params = SamplingParams.from_preset("base", preset_file=write(HOUSE))

    with pytest.raises(ValidationError, match="pinned to 200"):
        params.max_tokens = 5
    params.top_p = 0.5

    assert (params.max_tokens, params.top_p) == (200, 0.5)
    assert params.own_fields == {"top_p"}


def test_another_preset_takes_the_place_of_the_former_ones_values() -> None:
    params = SamplingParams.from_preset("creative", top_k=9)
    params.preset = "chat"

    assert params.chain is None
    assert (params.min_p, params.max_tokens, params.top_k) == (0.0, 16, 9)
    assert params.sources == {}
    resolve(params, Presets.load())
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 9)


def test_values_are_the_presets_own_copies() -> None:
    first, second = SamplingParams.from_preset("creative"), SamplingParams.from_preset("creative")
    assert first.chain is not None and second.chain is not None
    first.chain[3]["multiplier"] = 9.0

    assert second.chain[3]["multiplier"] == 0.8
    assert Presets.load()["creative"].fields["chain"][3]["multiplier"] == 0.8


def test_copies_keep_what_came_from_where() -> None:
    params = SamplingParams.from_preset("chat", top_k=3)

    for twin in (params.clone(), copy.copy(params), copy.deepcopy(params),
                 pickle.loads(pickle.dumps(params))):  # fmt: skip
        assert twin == params
        assert twin.sources == params.sources
        assert twin.presets == ("chat",)
        twin.temperature = 0.1
        assert "temperature" not in twin.sources
    assert params.sources["temperature"] == "preset chat"


# --- layers ---------------------------------------------------------------------------------------


def laid(presets: Presets, server: str | None, **fields: Any) -> SamplingParams:
    params = SamplingParams(**fields)
    resolve(params, presets, None if server is None else presets[server])
    resolve(params, presets, None if server is None else presets[server])  # twice is once
    return params


def test_a_named_preset_is_laid_under_the_request() -> None:
    params = laid(Presets.load(), None, preset="chat", top_p=0.5)

    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.5, 1024)
    assert params.sources == {"temperature": "preset chat", "max_tokens": "preset chat"}


def test_the_servers_preset_holds_where_the_request_names_none(write: Write) -> None:
    presets = Presets.load(write(HOUSE))

    params = laid(presets, "support", temperature=0.7)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.7, 0.9, 200)

    named = laid(presets, "support", preset="chat")
    assert (named.temperature, named.top_p) == (0.6, 0.9)
    assert named.max_tokens == 200  # a pin stays where another preset is named
    assert named.sources["max_tokens"] == "preset support"
    assert named.stop == []


def test_the_servers_pins_bind_every_request(write: Write) -> None:
    presets = Presets.load(write(HOUSE))

    for fields in ({"max_tokens": 4}, {"preset": "chat", "max_tokens": 4}, {"seed": 8}):
        with pytest.raises(ValidationError, match="is pinned"):
            laid(presets, "support", **fields)


def test_a_bad_key_keeps_its_type(write: Write) -> None:
    with pytest.raises(ParameterTypeError):
        Presets.load(write("[a]\ntemprature = 1\n"))
