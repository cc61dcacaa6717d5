"""The options that the commands share, and what is made of them."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from decodekit.core.config import EngineArgs
from decodekit.core.engine import LLMEngine
from decodekit.core.errors import ValidationError
from decodekit.core.params import DEFAULTS
from decodekit.plugins.console.options import (
    ENGINE,
    MAX_TOKENS,
    SAMPLING,
    Sampling,
    engine_args,
)

from .conftest import Decodekit, write_model

# Options that stand for another field, or for several.
OF_ENGINE = {"no_plugin_autoload", "no_fusion", "engine_json", "log_level"}
OF_SAMPLING = {"request_seed", "params_json", "json_schema", "regex", "choice"}


def names(group: object) -> set[str]:
    return {part.name for part in group.parameters()}  # type: ignore[attr-defined]


@pytest.fixture
def log_level() -> Iterator[logging.Logger]:
    logger = logging.getLogger("decodekit")
    before = logger.level
    yield logger
    logger.setLevel(before)


def test_every_engine_option_is_an_engine_argument() -> None:
    assert names(ENGINE) - OF_ENGINE <= set(EngineArgs.__dataclass_fields__)


def test_every_sampling_option_is_a_request_field() -> None:
    assert names(SAMPLING) - OF_SAMPLING <= set(DEFAULTS)


def test_no_option_is_in_both_groups() -> None:
    assert names(ENGINE).isdisjoint(names(SAMPLING))


def test_nothing_given_leaves_every_default() -> None:
    assert engine_args({}) == EngineArgs()
    assert Sampling.of_options({}) == Sampling({}, None)


def test_switches_turn_off_what_they_name() -> None:
    arguments = engine_args({"no_plugin_autoload": True, "no_fusion": True})

    assert (arguments.plugin_autoload, arguments.fusion) == (False, False)


def test_lengths_are_read_as_text() -> None:
    arguments = engine_args({"max_model_len": "32K", "kv_cache_memory_bytes": "1G"})

    assert (arguments.max_model_len, arguments.kv_cache_memory_bytes) == (32 * 1024, 2**30)


def test_any_engine_argument_comes_in_as_json() -> None:
    assert engine_args({"engine_json": '{"block_size": 32}'}).block_size == 32


def test_the_log_level_is_set(log_level: logging.Logger) -> None:
    engine_args({"log_level": "error"})

    assert log_level.level == logging.ERROR


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine_json": "{"}, "--engine is not valid JSON"),
        ({"engine_json": "[1]"}, "--engine must be a JSON object"),
        ({"engine_json": '{"dtype": "auto"}', "dtype": "auto"}, "dtype is given twice"),
        ({"engine_json": '{"blocksize": 1}'}, "blocksize"),
        ({"log_level": "loud"}, "log_level must be one of"),
        ({"max_model_len": "12x"}, "max_model_len"),
    ],
)
def test_bad_engine_options_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        engine_args(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"params_json": '{"top_p": 0.5}', "top_p": 0.5}, "top_p is given twice"),
        ({"params_json": '{"chain": ["top_p"]}', "chain": "top_p"}, "chain is given twice"),
        ({"params_json": '{"topp": 0.5}'}, "did you mean 'top_p'"),
        ({"logit_bias": '{"a": 1}'}, "logit_bias"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_bad_sampling_options_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Sampling.of_options(given)


def test_only_what_was_given_is_set(engine: LLMEngine) -> None:
    params = Sampling.of_options({"top_p": 0.5, "request_seed": 3}).build(engine)

    assert params.fields_set == {"top_p", "seed", "max_tokens"}
    assert (params.top_p, params.seed, params.max_tokens) == (0.5, 3, MAX_TOKENS)


def test_json_fields_join_the_others(engine: LLMEngine) -> None:
    given = {"top_p": 0.5, "params_json": '{"min_p": 0.1}', "logit_bias": '{"5": -1}'}

    params = Sampling.of_options(given).build(engine)

    assert (params.top_p, params.min_p, params.logit_bias) == (0.5, 0.1, {5: -1.0})


def test_a_typed_chain_is_the_requests_chain(engine: LLMEngine) -> None:
    params = Sampling.of_options({"chain": "top_k=3,temperature=0.5"}).build(engine)

    steps = [(step.stage, dict(step.params)) for step in engine.explain(params).order]
    assert [name for name, _ in steps] == ["top_k", "temperature", "race"]
    assert (steps[0][1]["k"], steps[1][1]["t"]) == (3, 0.5)


def test_a_changed_field_can_be_taken_out_again(engine: LLMEngine) -> None:
    sampling = Sampling({"top_p": 0.5})

    changed = sampling.with_fields({"top_p": None, "top_k": 7})

    assert dict(changed.fields) == {"top_k": 7}
    assert dict(sampling.fields) == {"top_p": 0.5}


def test_the_models_defaults_hold_unless_the_user_or_a_chain_says_otherwise(
    tmp_path: Path, decodekit: Decodekit
) -> None:
    write_model(tmp_path, temperature=0.6, top_p=0.8, max_new_tokens=9)
    model = [str(tmp_path), "--load-format", "dummy", "--json"]

    def order(*options: str) -> dict[str, object]:
        report = json.loads(decodekit("explain", *model, *options).stdout)
        return {step["stage"]: step["params"] for step in report["order"]}

    assert order()["top_p"]["p"] == 0.8  # type: ignore[index]
    assert order("--top-p", "0.5")["top_p"]["p"] == 0.5  # type: ignore[index]
    assert list(order("--chain", "top_k=5")) == ["top_k", "race"]
    assert order("--chain", "top_k=5,top_p")["top_p"]["p"] == 0.8  # type: ignore[index]
    assert "top_p" not in order("--generation-config", "vllm")


def test_the_options_of_an_answer_are_one_constraint(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema), encoding="utf-8")

    for given in (str(path), json.dumps(schema)):
        assert Sampling.of_options({"json_schema": given}).fields["structured_outputs"] == {
            "json": schema
        }
    assert Sampling.of_options({"choice": ["a", "b"]}).fields["structured_outputs"] == {
        "choice": ["a", "b"]
    }
    with pytest.raises(ValidationError, match="got regex and choice"):
        Sampling.of_options({"choice": ["a", "b"], "regex": "a"})
    with pytest.raises(ValidationError, match="--json-schema cannot read"):
        Sampling.of_options({"json_schema": str(tmp_path / "no.json")})
    with pytest.raises(ValidationError, match="--json-schema is not valid JSON"):
        Sampling.of_options({"json_schema": "{"})
