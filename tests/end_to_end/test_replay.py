"""Replay bundles: the same tokens again, with or without a seed, or exactly what differs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.bundle import Bundle, model_digest
from decodekit.core.outputs import RequestOutput
from decodekit.core.stage import Kind, Stage
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table
from decodekit.sampling_params import RequestOutputKind

Maker = Callable[..., LLM]


class Lifted(Stage):
    """A guest's stage."""

    name = "test.lifted"
    kind = Kind.BIAS

    def transform(self, logits: Tensor, rows: Any) -> None:
        logits[:, 5] += 1.0


def lowered(output_ids: list[int], row: Tensor) -> Tensor:
    row[7] -= 1.0
    return row


@pytest.fixture(scope="module")
def llm(make_llm: Maker) -> LLM:
    return make_llm(flat_table(97))


@pytest.fixture(scope="module")
def other(make_llm: Maker) -> LLM:
    """Another engine, with another seed, on the same model."""
    return make_llm(flat_table(97), seed=7)


def run(llm: LLM, prompt: Any = None, **fields: Any) -> RequestOutput:
    params = SamplingParams(**{"max_tokens": 8, **fields})
    (output,) = llm.generate([prompt or [3, 4]], params, use_tqdm=False)
    return output


def through_file(output: RequestOutput, folder: Path) -> Path:
    path = folder / "run.json"
    output.to_bundle().save(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON
    return path


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": -5, "temperature": 0.7, "top_k": 9},
        {"temperature": 0},
        {"n": 3, "top_p": 0.9},
        {"n": 1, "best_of": 3},
        {"logit_bias": {5: -math.inf, 6: 2.0}, "allowed_token_ids": [5, 6, 7]},
        {"chain": [{"stage": "top_k", "k": 5, "id": "a"}, "temperature"], "temperature": 1.3},
        {"min_tokens": 3, "stop_token_ids": [1, 2], "frequency_penalty": 0.5},
        {"profile": "llama.cpp", "top_k": 0},
        {"max_tokens": None, "stop_token_ids": list(range(40))},
        {"chain": [{"stage": "mirostat", "tau": 3.0}]},
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}},
        {"trace": "summary", "logprobs": 2, "observers": ["confidence"]},
    ],
)
def test_a_bundle_gives_the_tokens_again_on_another_engine(
    fields: dict[str, Any], llm: LLM, other: LLM, tmp_path: Path
) -> None:
    output = run(llm, **fields)

    replay = other.replay(through_file(output, tmp_path))

    assert replay.same, str(replay)
    assert [part.token_ids for part in replay.output.outputs] == [
        part.token_ids for part in output.outputs
    ]
    assert [each.what for each in replay.differences] == ["engine.seed"]
    assert str(replay).startswith("same: ")


def test_the_key_makes_an_unseeded_run_come_again(llm: LLM) -> None:
    first, second = run(llm), run(llm)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids

    for output in (second, first):
        assert llm.replay(output.to_bundle()).same


def test_a_replay_says_where_tokens_part_and_what_else_differs(llm: LLM, make_llm: Maker) -> None:
    output = run(llm, seed=1, top_k=60)
    bundle = json.loads(output.to_bundle().to_json())
    bundle["outputs"][0]["token_ids"][3] = 96
    bundle["versions"]["torch"] = "1.0"
    ids = output.outputs[0].token_ids

    edited = llm.replay(bundle)
    elsewhere = make_llm(flat_table(97, 40), profile="llama.cpp").replay(output.to_bundle())

    assert not edited.same
    assert edited.tokens[0][:4] == (0, 3, 96, ids[3])
    assert f"output 0 parts at position 3: recorded token 96, here token {ids[3]}" in str(edited)
    assert [str(each) for each in edited.differences] == [
        f"versions.torch: recorded 1.0, here {torch.__version__}"
    ]
    whats = {each.what for each in elsewhere.differences}
    assert {"model.digest", "engine.profile", "plan.profile"} <= whats


def test_another_value_is_found_in_the_plan_though_the_fingerprint_is_equal(llm: LLM) -> None:
    bundle = run(llm, seed=1, top_k=60).to_bundle()

    replay = llm.replay(bundle, top_k=3)

    assert [each.what for each in replay.differences] == ["plan.order"]
    assert "k=60" in replay.differences[0].recorded and "k=3" in replay.differences[0].here


def test_what_a_file_cannot_hold_is_named_and_can_be_given(llm: LLM, tmp_path: Path) -> None:
    output = run(llm, logits_processors=[lowered], seed=2)
    path = through_file(output, tmp_path)

    assert Bundle.read(path).left_out == {"logits_processors": f"function {__name__}.lowered"}
    with pytest.raises(ValueError, match=r"leaves out logits_processors \(function .*lowered\)"):
        llm.replay(path)
    assert llm.replay(path, logits_processors=[lowered]).same


def test_a_stage_object_is_found_again_by_its_name(make_llm: Maker, tmp_path: Path) -> None:
    engine = make_llm(flat_table(97))
    path = through_file(run(engine, chain=[Lifted(id="up"), "race"], seed=2), tmp_path)

    with pytest.raises(ValueError, match="test.lifted"):
        engine.replay(path)
    assert engine.replay(path, chain=[Lifted(id="up"), "race"]).same
    engine.register(Lifted)
    replay = engine.replay(path)
    assert replay.same
    assert [each.what.split(".")[0] for each in replay.differences] == ["plugins"]


def test_an_aborted_run_is_compared_as_far_as_it_went(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("cut", [3], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort_request("cut")
    (output,) = engine.step()

    replay = llm.replay(output.to_bundle())

    assert output.outputs[0].finish_reason == "abort"
    assert replay.same and len(replay.output.outputs[0].token_ids) == 4


def test_a_part_of_an_output_makes_no_bundle_until_it_is_joined(llm: LLM) -> None:
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
    engine.add_request("parts", [3], params)
    parts = []
    while engine.has_unfinished_requests():
        parts += engine.step()

    with pytest.raises(ValueError, match="join the parts"):
        parts[-1].to_bundle()
    whole = parts[0]
    for part in parts[1:]:
        whole.add(part, aggregate=True)
    assert llm.replay(whole.to_bundle()).same


def test_a_failed_run_fails_again_in_the_same_place(llm: LLM) -> None:
    output = run(llm, allowed_token_ids=[5], bad_words=None, chain=["top_k"], top_k=3, seed=1)
    dead = run(llm, logit_bias=dict.fromkeys(range(97), -math.inf), seed=1)

    assert llm.replay(output.to_bundle()).same
    assert dead.outputs[0].finish_reason == "error"
    assert llm.replay(dead.to_bundle()).same


def test_texts_stand_beside_ids_where_there_is_a_tokenizer(make_llm: Maker) -> None:
    engine = make_llm(flat_table(256), model={"tokenizer": byte_tokenizer()})
    output = run(engine, "hello", seed=1, stop=["zz"], bad_words=["q"])
    bundle = json.loads(output.to_bundle().to_json())
    bundle["outputs"][0]["token_ids"][0] = ord("Q")

    assert engine.replay(output.to_bundle()).same
    assert "recorded token 81 ('Q')" in str(engine.replay(bundle))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"a": 1}, "something else"),
        ({"decodekit_bundle": 99}, "format 99"),
        ("/no/such/file.json", "cannot be read"),
    ],
)
def test_what_is_no_bundle_is_refused(source: Any, said: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match=said):
        llm.replay(source)


def test_an_output_made_by_hand_has_no_bundle() -> None:
    with pytest.raises(ValueError, match="does not know its run"):
        RequestOutput("a", None, [1], None, [], True).to_bundle()


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    for name, fill in (("a", b"\0"), ("b", b"\0"), ("c", b"\1")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"head" + fill * 1_000_000)

    digests = [model_digest(tmp_path / name) for name in "abc"]

    assert digests[0] == digests[1] != digests[2]
    assert model_digest(tmp_path / "none") is None
