"""What goes wrong inside one request ends that request, says where, and touches nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import CompletionOutput
from decodekit.core.params import RequestOutputKind
from decodekit.core.stage import (
    BindContext,
    Caps,
    Form,
    Kind,
    Observer,
    Picker,
    Stage,
    StageParams,
    Stop,
    Tap,
    Verdict,
)
from decodekit.plugins.author.table_model import flat_table, write_table_model

Maker = Callable[..., LLM]
Break = Callable[[Tensor], None]

BAD_POSITION = 5
NEIGHBOURS = 15


# --- stages that fail at token 5 ------------------------------------------------------------------


class FailingParams(StageParams):
    """The position at which the stage fails."""

    at: int = BAD_POSITION


class Failing(Stage):
    """Does nothing to a row until position `at`; subclasses say what happens then."""

    kind = Kind.BIAS
    Params = FailingParams

    def transform(self, logits: Tensor, rows: Any) -> None:
        for row, params in enumerate(rows.params):
            if int(rows.host_positions[row]) == params.at:
                self.harm(logits, row)

    def harm(self, logits: Tensor, row: int) -> None:
        """Do what this stage is here for."""
        raise NotImplementedError


class Raises(Failing):
    name = "raises"

    def harm(self, logits: Tensor, row: int) -> None:
        raise KeyError("no such entry")


class WritesNan(Failing):
    name = "writes_nan"

    def harm(self, logits: Tensor, row: int) -> None:
        logits[row, 40:43] = torch.nan


class WritesInfinity(Failing):
    name = "writes_infinity"

    def harm(self, logits: Tensor, row: int) -> None:
        logits[row, 7] = torch.inf


class KillsTheRow(Failing):
    name = "kills_the_row"

    def harm(self, logits: Tensor, row: int) -> None:
        logits[row] = -torch.inf


class Resurrects(Failing):
    name = "resurrects"

    def harm(self, logits: Tensor, row: int) -> None:
        logits[row, 90] = 1.0  # masked by allowed_token_ids


class ShapeWritesNan(Failing):
    """Claims to be monotone, so that it runs on the short list."""

    name = "shape_writes_nan"
    kind = Kind.SHAPE
    form = Form.ELEMENTWISE
    caps = Caps(monotone=True)

    def harm(self, logits: Tensor, row: int) -> None:
        logits[row, 1] = torch.nan


class FailsInAccept(Stage):
    """Its state counts tokens and gives up at the sixth."""

    name = "fails_in_accept"
    kind = Kind.BIAS
    caps = Caps(stateful=True)

    def open(self, params: Any, prompt: Any) -> list[int]:
        return []

    def accept(self, state: list[int], tokens: Any) -> None:
        state.extend(tokens)
        if len(state) > BAD_POSITION:
            raise ValueError("it has seen enough")

    def transform(self, logits: Tensor, rows: Any) -> None:
        logits[:, 3] += 0.0


class FailsInOpen(Stage):
    name = "fails_in_open"
    kind = Kind.BIAS
    caps = Caps(stateful=True)

    def open(self, params: Any, prompt: Any) -> None:
        raise RuntimeError("cannot begin")

    def transform(self, logits: Tensor, rows: Any) -> None:
        logits[:, 3] += 0.0


class PickParams(StageParams):
    """What the picker returns at position 5."""

    value: int = 10**6


class OddPicker(Picker):
    """Takes the best token, and `value` at position 5."""

    name = "odd_picker"
    Params = PickParams

    def pick(self, view: Any, rows: Any) -> Tensor:
        chosen: Tensor = view.logits.argmax(1)
        for row, params in enumerate(rows.params):
            if int(rows.host_positions[row]) == BAD_POSITION:
                chosen[row] = params.value
        return chosen


class ShapelessPicker(Picker):
    name = "shapeless_picker"

    def pick(self, view: Any, rows: Any) -> Any:
        return view.logits


# --- stops and observers that fail for requests that ask for it -----------------------------------


def asks(ctx: BindContext, name: str) -> bool:
    """Whether a request wants the failing plugin `name`."""
    return (ctx.request.extra_args or {}).get("fails") == name


class FailingStop(Stop):
    name = "failing_stop"
    rank = 1

    def bind(self, ctx: BindContext) -> Any:
        if asks(ctx, "stop_value"):
            return lambda sequence: True if len(sequence.output_ids) == 6 else None
        if not asks(ctx, "stop"):
            return None

        def check(sequence: Any) -> Verdict | None:
            if len(sequence.output_ids) == BAD_POSITION + 1:
                raise ZeroDivisionError("stop gone wrong")
            return None

        return check


class FailingObserver(Observer):
    """Fails where the request says: in measure, record or result."""

    name = "failing_observer"
    places: ClassVar[tuple[str, ...]] = ("measure", "record", "result", "field")

    def bind(self, ctx: BindContext) -> Any:
        return next((place for place in self.places if asks(ctx, place)), None)

    def taps(self, order: Any) -> frozenset[Tap]:
        return frozenset({Tap.RAW})

    def measure(self, order: Any, taps: Any, tokens: Tensor) -> Mapping[str, Tensor]:
        if order == "measure":
            raise OverflowError("measured too much")
        return {"token": tokens}

    def open(self, order: Any, tokenizer: Any) -> list[Any]:
        return [order]

    def record(self, record: list[Any], token: int, values: Any) -> None:
        assert int(values["token"]) == token
        record.append(token)
        if record[0] == "record" and len(record) == BAD_POSITION + 2:
            raise LookupError("record lost")

    def result(self, record: list[Any]) -> Mapping[str, Any]:
        if record[0] == "result":
            raise BufferError("no result")
        return {"colour": 1} if record[0] == "field" else {}


# --- the engine and its neighbours ----------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "plain"])
def llm(request: pytest.FixtureRequest, make_llm: Maker) -> Iterator[LLM]:
    """An engine with the failing stop and observer in it."""
    llm = make_llm(flat_table(97), fusion=request.param, model={"eos_token_id": 96})
    llm.register(FailingStop)
    llm.register(FailingObserver)
    yield llm
    assert llm.llm_engine.parts.pool.num_used == 0


def neighbours() -> list[SamplingParams]:
    """Fifteen requests of several kinds."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.2, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 10},
    ]
    return [
        SamplingParams(**{"seed": i, "max_tokens": 8 + i % 4, **kinds[i % len(kinds)]})
        for i in range(NEIGHBOURS)
    ]


def ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@cache
def solo(llm: LLM, fields: str) -> list[int]:
    """Return what a request gives alone; computed once."""
    return ids(llm.generate([[4]], ALONE[fields], use_tqdm=False))[0]


ALONE: dict[str, SamplingParams] = {}  # by their repr


def run_beside(llm: LLM, bad: SamplingParams, company: list[SamplingParams]) -> CompletionOutput:
    """Run `bad` in the middle of its neighbours; check them and the engine; return its answer."""
    ALONE.update({repr(own): own for own in company})
    expected = [solo(llm, repr(own)) for own in company]
    half = len(company) // 2

    outputs = llm.generate(
        [[4]] * (len(company) + 1), [*company[:half], bad, *company[half:]], use_tqdm=False
    )

    failed = outputs.pop(half).outputs[0]
    assert [output.outputs[0].error for output in outputs] == [None] * len(company)
    assert ids(outputs) == expected
    assert llm.llm_engine.parts.pool.num_used == 0
    [after] = llm.generate([[4]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert list(after.outputs[0].token_ids) == [0, 0, 0]
    return failed


def cuts(fields: dict[str, Any]) -> list[str]:
    """Name the truncations that a request's fields switch on, as an explicit chain must."""
    return [name for name in fields if name in ("top_k", "top_p")]


def blames(failed: CompletionOutput, stage: str, instance: str, position: int) -> bool:
    return str(failed.error).startswith(f"stage={stage} instance={instance} position={position}: ")


STAGES: list[tuple[type[Stage], dict[str, Any], str]] = [
    (Raises, {}, "KeyError"),
    (Raises, {"temperature": 0.0}, "KeyError"),
    (WritesNan, {}, "NaN"),
    (WritesNan, {"top_k": 5}, "NaN"),
    (WritesNan, {"top_p": 0.5}, "NaN"),
    (WritesNan, {"temperature": 0.0}, "NaN"),
    (ShapeWritesNan, {"top_k": 5}, "NaN"),
    (WritesInfinity, {}, "infinity"),
    (WritesInfinity, {"top_k": 5}, "infinity"),
    (KillsTheRow, {}, "no token alive"),
    (KillsTheRow, {"top_p": 0.9}, "no token alive"),
    (Resurrects, {"allowed_token_ids": [1, 2, 3]}, "masked token"),
    (Resurrects, {"allowed_token_ids": [1, 2, 3], "top_k": 2}, "masked token"),
    (FailsInAccept, {}, "seen enough"),
]


@pytest.mark.parametrize(("stage", "fields", "reason"), STAGES)
def test_a_stage_that_fails_at_token_five_fails_its_request_alone(
    stage: type[Stage], fields: dict[str, Any], reason: str, llm: LLM
) -> None:
    bad = SamplingParams(seed=99, max_tokens=12, chain=[stage(id="mine"), *cuts(fields)], **fields)

    failed = run_beside(llm, bad, neighbours())

    assert failed.finish_reason == "error"
    assert blames(failed, stage.name, "mine", BAD_POSITION), failed.error
    assert reason in str(failed.error)
    assert len(failed.token_ids) == BAD_POSITION


@pytest.mark.parametrize("stage", [Raises, WritesNan, KillsTheRow])
def test_neighbours_in_the_same_program_are_spared(stage: type[Stage], llm: LLM) -> None:
    company = [
        SamplingParams(seed=i, max_tokens=8 + i % 4, chain=[stage(at=1000, id="mine")])
        for i in range(NEIGHBOURS)
    ]
    bad = SamplingParams(seed=99, max_tokens=12, chain=[stage(id="mine")])

    failed = run_beside(llm, bad, company)

    assert blames(failed, stage.name, "mine", BAD_POSITION), failed.error


def test_a_state_that_cannot_be_opened_fails_its_request(llm: LLM) -> None:
    bad = SamplingParams(max_tokens=12, chain=[FailsInOpen()])

    failed = run_beside(llm, bad, neighbours())

    assert blames(failed, "fails_in_open", "fails_in_open", 0), failed.error
    assert "RuntimeError: cannot begin" in str(failed.error)
    assert failed.token_ids == []


@pytest.mark.parametrize("value", [10**6, 97, -1, 2])
def test_a_picker_that_chooses_no_living_token_fails_its_request(value: int, llm: LLM) -> None:
    def picked(value: int, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            logit_bias={2: float("-inf")},
            top_k=2,
            max_tokens=max_tokens,
            chain=["logit_bias", "top_k", OddPicker(value=value, id="mine")],
        )

    failed = run_beside(llm, picked(value, 12), [*neighbours(), picked(1, 9)])

    assert blames(failed, "odd_picker", "mine", BAD_POSITION), failed.error
    assert f"the id {value}, which is" in str(failed.error)


def test_a_picker_that_returns_another_shape_fails_its_request(llm: LLM) -> None:
    bad = SamplingParams(temperature=1, max_tokens=12, chain=[ShapelessPicker()])

    failed = run_beside(llm, bad, neighbours())

    assert blames(failed, "shapeless_picker", "shapeless_picker", 0), failed.error
    assert "shape [1]" in str(failed.error)


# --- the model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "plain"])
def nan_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A flat table whose token 70 makes every logit NaN."""
    folder: Path = write_table_model(tmp_path_factory.mktemp("nan"), flat_table(97))
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][70] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return LLM(str(folder), skip_tokenizer_init=True, max_num_seqs=32, fusion=request.param)


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 5}, {"temperature": 0.0}, {"allowed_token_ids": [1]}], ids=str
)
def test_a_row_of_nan_from_the_model_fails_its_request(
    fields: dict[str, Any], nan_llm: LLM
) -> None:
    company = neighbours()
    expected = ids(nan_llm.generate([[4]] * NEIGHBOURS, company, use_tqdm=False))

    failed, *rest = nan_llm.generate(
        [[5, 70], *[[4]] * NEIGHBOURS], [SamplingParams(**fields), *company], use_tqdm=False
    )

    assert blames(failed.outputs[0], "model", "logits", 0), failed.outputs[0].error
    assert ids(rest) == expected


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.5}, {"allowed_token_ids": [1]}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_broken_logit_is_not_hidden_by_a_cut_or_a_mask(
    value: float, fields: dict[str, Any], nan_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nan_llm.llm_engine.parts.runner.model
    whole = model.logits

    def broken(hidden: Tensor) -> Tensor:
        logits = whole(hidden)
        logits[0, 90] = value
        return logits

    monkeypatch.setattr(model, "logits", broken, raising=False)
    [failed] = nan_llm.generate([[4]], SamplingParams(**fields), use_tqdm=False)

    assert blames(failed.outputs[0], "model", "logits", 0), failed.outputs[0].error


# --- callables ------------------------------------------------------------------------------------


def at_five(change: Callable[[Tensor], Any]) -> Callable[[list[int], Tensor], Any]:
    """Return a logits processor that leaves rows alone but at position 5."""

    def process(output_ids: list[int], logits: Tensor) -> Any:
        return change(logits) if len(output_ids) == BAD_POSITION else logits

    return process


def raising(logits: Tensor) -> Tensor:
    raise OSError("a processor raised")


def with_value(value: float, place: slice) -> Callable[[Tensor], Tensor]:
    def change(logits: Tensor) -> Tensor:
        changed = logits.clone()
        changed[place] = value
        return changed

    return change


CALLABLES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nothing": (lambda logits: None, "it returned nothing"),
    "another_shape": (lambda logits: logits[:-1], "of shape [96]"),
    "a_list": (lambda logits: logits.tolist(), "it returned a list"),
    "integers": (lambda logits: logits.long(), "torch.int64"),
    "a_nan": (with_value(float("nan"), slice(40, 41)), "NaN"),
    "all_nan": (with_value(float("nan"), slice(None)), "NaN"),
    "infinity": (with_value(float("inf"), slice(3, 4)), "infinity"),
    "no_token": (with_value(float("-inf"), slice(None)), "no token alive"),
    "an_exception": (raising, "OSError: a processor raised"),
}


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("name", CALLABLES)
def test_a_callable_that_fails_fails_its_request_alone(
    name: str, fields: dict[str, Any], llm: LLM
) -> None:
    change, reason = CALLABLES[name]
    bad = SamplingParams(seed=9, max_tokens=12, logits_processors=[at_five(change)], **fields)

    failed = run_beside(llm, bad, neighbours())

    assert blames(failed, "per_request", "per_request", BAD_POSITION), failed.error
    assert reason in str(failed.error)
    assert len(failed.token_ids) == BAD_POSITION


# --- dead rows ------------------------------------------------------------------------------------


def disjoint(**fields: Any) -> SamplingParams:
    """Parameters whose allowed ids are all banned."""
    return SamplingParams(
        allowed_token_ids=[5, 6],
        logit_bias={5: float("-inf"), 6: float("-inf")},
        max_tokens=12,
        **fields,
    )


def test_a_dead_row_is_an_error_that_names_who_killed_it(llm: LLM) -> None:
    failed = run_beside(llm, disjoint(), neighbours())

    assert failed.finish_reason == "error"
    assert blames(failed, "logit_bias", "logit_bias", 0), failed.error
    assert "no token alive" in str(failed.error)


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"temperature": 0.0}, {"logprobs": 1}], ids=str)
def test_a_dead_row_may_end_its_request_instead(fields: dict[str, Any], llm: LLM) -> None:
    ended = run_beside(llm, disjoint(on_dead_row="eos", **fields), neighbours())

    assert (ended.finish_reason, ended.error) == ("stop", None)
    assert list(ended.token_ids) == [96]


# --- stops, observers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "plugin", "instance", "position", "reason"),
    [
        ("stop", "failing_stop", "stop", 5, "ZeroDivisionError: stop gone wrong"),
        ("stop_value", "failing_stop", "stop", 5, "must return a Verdict or None, got True"),
        ("measure", "failing_observer", "observer", 0, "OverflowError: measured too much"),
        ("record", "failing_observer", "observer", 5, "LookupError: record lost"),
        ("result", "failing_observer", "observer", 12, "BufferError: no result"),
        ("field", "failing_observer", "observer", 12, "no field 'colour'"),
    ],
)
def test_a_stop_or_observer_that_raises_fails_its_request_alone(
    fails: str, plugin: str, instance: str, position: int, reason: str, llm: LLM
) -> None:
    bad = SamplingParams(seed=9, max_tokens=12, logprobs=1, extra_args={"fails": fails})

    failed = run_beside(llm, bad, neighbours())

    assert failed.finish_reason == "error"
    assert blames(failed, plugin, instance, position), failed.error
    assert reason in str(failed.error)
    assert len(failed.token_ids) == position
    assert failed.logprobs is not None
    assert len(failed.logprobs) == position


def test_the_other_branches_of_a_failing_request_go_on(llm: LLM) -> None:
    good = SamplingParams(seed=3, n=3, max_tokens=9)
    [expected] = llm.generate([[4]], good, use_tqdm=False)
    second = list(expected.outputs[1].token_ids[:4])

    def picky(output_ids: list[int], logits: Tensor) -> Tensor:
        if output_ids == second:
            raise RuntimeError("not this one")
        return logits

    [found] = llm.generate(
        [[4]], SamplingParams(seed=3, n=3, max_tokens=9, logits_processors=[picky]), use_tqdm=False
    )

    assert [part.finish_reason for part in found.outputs] == ["length", "error", "length"]
    assert list(found.outputs[1].token_ids) == second
    for branch in (0, 2):
        assert list(found.outputs[branch].token_ids) == list(expected.outputs[branch].token_ids)


def test_failures_are_counted(llm: LLM) -> None:
    def errors() -> int:
        return next(
            int(metric.value)
            for metric in llm.get_metrics()
            if metric.name == "decodekit:request_errors"
        )

    before = errors()
    llm.generate([[4]] * 3, disjoint(), use_tqdm=False)

    assert errors() == before + 3


# --- the engine's own parts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "method", "blamed", "num_tokens"),
    [
        ("text", "push", "stage=detokenizer instance=text position=0", 0),
        ("text", "finish", "stage=detokenizer instance=text position=4", 4),
        ("prompt_logprobs", "add", "stage=prompt_logprobs instance=prompt position=0", 0),
    ],
)
def test_text_and_prompt_logprobs_that_fail_end_their_sequence_alone(
    part: str,
    method: str,
    blamed: str,
    num_tokens: int,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = llm.llm_engine
    fields: dict[str, Any] = {"seed": 4, "max_tokens": 4, "n": 2}
    if part == "prompt_logprobs":
        fields["prompt_logprobs"] = 1
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **fields)
    [right] = llm.generate([[4, 5]], params, use_tqdm=False)

    def fails(*_: Any, **__: Any) -> Any:
        raise UnicodeError("cannot be written")

    for name in ("bad", "good"):
        engine.add_request(name, [4, 5], params)
    broken = engine.requests["bad"]
    owner = broken.sequences[0].text if part == "text" else broken.prompt_logprobs
    monkeypatch.setattr(owner, method, fails, raising=True)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())

    first, second = outputs["bad"].outputs
    assert (first.finish_reason, len(first.token_ids)) == ("error", num_tokens)
    assert str(first.error) == f"{blamed}: cannot be written"
    assert list(second.token_ids) == list(right.outputs[1].token_ids)
    for branch in (0, 1):
        found = outputs["good"].outputs[branch]
        assert list(found.token_ids) == list(right.outputs[branch].token_ids)
