"""The objects inside or beside SamplingParams: constraints, repetition detection, beam search."""

import pytest

from decodekit.core.errors import ParameterTypeError, ValidationError
from decodekit.core.params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)


def test_nested_objects_may_be_dicts() -> None:
    class Answer:
        @classmethod
        def model_json_schema(cls) -> dict[str, object]:
            return {}

    by_dict = SamplingParams(
        structured_outputs={"regex": "a+"},
        repetition_detection={"max_pattern_size": 3, "min_count": 2},
    )

    assert by_dict.structured_outputs == StructuredOutputsParams(regex="a+")
    assert by_dict.repetition_detection == RepetitionDetectionParams(3, 0, 2)
    by_class = SamplingParams(structured_outputs=Answer).structured_outputs
    assert by_class is not None and by_class.json is Answer
    with pytest.raises(ParameterTypeError, match="did you mean 'regex'"):
        SamplingParams(structured_outputs={"regexp": "a+"})


@pytest.mark.parametrize("fields", [{}, {"json": "{}", "regex": "a"}, {"json_object": False}])
def test_constraints_exclude_one_another(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": []},
        {"choice": "ab"},
        {"grammar": " \n"},
        {"json": 3},
        {"regex": "a", "strict": 1},
        {"regex": "a", "format": "x"},
    ],
)
def test_constraints_are_checked(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"min_pattern_size": -1}, "min_pattern_size"),
        ({"min_pattern_size": 2, "max_pattern_size": 1}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
    ],
)
def test_repetition_detection_is_checked(fields: dict[str, int], parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RepetitionDetectionParams(**fields)

    assert caught.value.parameter == parameter


def test_beam_parameters_are_checked() -> None:
    beams = BeamSearchParams(beam_width=4, max_tokens=8, sampling_params=SamplingParams())

    assert (beams.length_penalty, beams.profile) == (1.0, "default")
    for fields in ({"beam_width": 0}, {"max_tokens": 0}, {"early_stopping": "x"}):
        with pytest.raises(ValidationError):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **fields})
    with pytest.raises(TypeError, match="did you mean 'beam_width'"):
        BeamSearchParams(beam_with=2, max_tokens=2)


def test_helpers_tell_which_constraint_is_set() -> None:
    tagged = StructuredOutputsParams(structural_tag="{}")

    assert tagged.all_non_structural_tag_constraints_none()
    assert not tagged.all_constraints_none()
    assert not StructuredOutputsParams(regex="a").all_non_structural_tag_constraints_none()
