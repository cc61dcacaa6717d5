"""PoolingParams and PoolerConfig load, check themselves and map the deprecated task."""

import pytest

from decodekit.core.params import RequestOutputKind
from decodekit.core.pooling_params import PoolerConfig, PoolingParams


def test_defaults_and_the_prefix_cache_follow_the_task() -> None:
    assert PoolingParams().output_kind is RequestOutputKind.FINAL_ONLY
    assert PoolingParams(task="embed").skip_reading_prefix_cache is False
    assert PoolingParams(task="token_embed").skip_reading_prefix_cache is True
    assert PoolingParams(task="plugin", skip_reading_prefix_cache=False).clone() == PoolingParams(
        task="plugin", skip_reading_prefix_cache=False
    )


def test_score_is_read_as_classify_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="classify"):
        params = PoolingParams(task="score")

    assert params.task == "classify"


@pytest.mark.parametrize(
    "fields",
    [
        {"task": "sing"},
        {"dimensions": 0},
        {"task": "classify", "dimensions": 4},
        {"output_kind": RequestOutputKind.DELTA},
        {"output_kind": 2},
        {"use_activation": 1},
    ],
)
def test_bad_fields_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        PoolingParams(**fields)


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="did you mean 'dimensions'"):
        PoolingParams(dimension=4)
    with pytest.raises(TypeError, match="did you mean 'pooling_type'"):
        PoolerConfig(poolingtype="CLS")


def test_the_engines_defaults_are_checked() -> None:
    assert PoolerConfig(pooling_type="MEAN", logit_bias=0.5).logit_bias == 0.5
    with pytest.raises(ValueError, match="pooling_type"):
        PoolerConfig(pooling_type="SUM")
