"""What the options of a comparison mean, and which are refused."""

import pytest

from decodekit.core.errors import ValidationError
from decodekit.plugins.console.comparison.columns import columns_of, seeds_of


def test_a_sweep_moves_one_field_at_a_time_from_the_baseline() -> None:
    columns = columns_of(baseline=["temperature=0"], vary=["temperature=.2,1", "top_k=5"])

    assert [(column.name, dict(column.fields)) for column in columns] == [
        ("baseline", {"temperature": 0}),
        ("temperature=0.2", {"temperature": 0.2}),
        ("temperature=1", {"temperature": 1}),
        ("top_k=5", {"temperature": 0, "top_k": 5}),
    ]
    assert [(column.varied, column.value) for column in columns] == [
        (None, None),
        ("temperature", 0.2),
        ("temperature", 1),
        ("top_k", 5),
    ]


def test_a_value_with_commas_is_a_list_of_json() -> None:
    columns = columns_of(vary=['stop=[["a", "b"], "c"]'])

    assert [column.fields.get("stop") for column in columns] == [None, ["a", "b"], "c"]


def test_profiles_presets_and_own_columns_stand_side_by_side() -> None:
    columns = columns_of(
        profiles="vllm, llama.cpp", presets="chat", given=['wild={"temperature": 1.4}']
    )

    assert [(column.name, dict(column.fields)) for column in columns] == [
        ("vllm", {"profile": "vllm"}),
        ("llama.cpp", {"profile": "llama.cpp"}),
        ("chat", {"preset": "chat"}),
        ("wild", {"temperature": 1.4}),
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs 2 to 64 columns, got 0"),
        ({"profiles": "vllm"}, "needs 2 to 64 columns, got 1"),
        ({"profiles": "vllm,vllm"}, "two columns are called 'vllm'"),
        ({"profiles": "vllm,"}, "--profiles must be names with commas between"),
        ({"vary": ["temprature=1,2"]}, "no request field; did you mean 'temperature'"),
        ({"vary": ["temperature"]}, "--vary must be FIELD=VALUE,VALUE"),
        ({"baseline": ["temperature"]}, "--baseline must be FIELD=VALUE"),
        ({"given": ["wild"]}, "--column must be NAME="),
        ({"given": ['wild={"hot": 1}']}, "--column names 'hot'"),
    ],
)
def test_a_bad_option_is_refused_with_one_sentence(
    options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence.replace("(", r"\(")):
        columns_of(**options)  # type: ignore[arg-type]


def test_seeds_are_different_integers() -> None:
    assert seeds_of("3,1") == [3, 1]
    for text in ("", "a", "1,1", "1,,2", "1.5"):
        with pytest.raises(ValidationError, match="different integers"):
            seeds_of(text)
