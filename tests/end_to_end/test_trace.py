"""Traces through the engine: same tokens, true values, plain answers, nobody else pays."""

import json
import math
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decodekit import LLM, SamplingParams
from decodekit.core.batch import TapView
from decodekit.core.outputs import CompletionOutput, RequestOutput
from decodekit.core.stage import After, BindContext, Kind, Observer, Point, Stage, Tap
from decodekit.core.trace_report import Trace
from decodekit.plugins.author.table_model import blank_table, byte_tokenizer
from decodekit.sampling_params import RequestOutputKind

Maker = Callable[..., LLM]
PROMPT = [3]
STAGES: list[dict[str, Any]] = [
    {"stage": "temperature", "t": 0.7},
    {"stage": "temperature", "t": 1.6},
    {"stage": "top_k", "k": 9},
    {"stage": "top_p", "p": 0.8},
    {"stage": "min_p", "p": 0.05},
    {"stage": "typical", "p": 0.7},
    {"stage": "epsilon", "epsilon": 0.004},
    {"stage": "top_n_sigma", "n": 1.5},
    {"stage": "quadratic", "factor": 0.3},
    {"stage": "xtc", "threshold": 0.08, "probability": 0.5},
]


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randperm(97, generator=generator) - 48 for _ in range(97)]  # no ties
    return torch.stack(rows).float() / 16


@pytest.fixture(scope="module")
def llm(make_llm: Maker, table: Tensor) -> LLM:
    return make_llm(table)


@pytest.fixture(scope="module")
def text_llm(make_llm: Maker) -> LLM:
    """Every byte leads to "a" (best), "b", "c", in this order, 1 apart."""
    table = blank_table(256)
    for place, letter in enumerate("abc"):
        table[:, ord(letter)] = -float(place)
    return make_llm(table, model={"tokenizer": byte_tokenizer()})


def one(llm: LLM, params: SamplingParams, prompt: Any = None) -> CompletionOutput:
    (output,) = llm.generate([prompt or PROMPT], params, use_tqdm=False)
    return output.outputs[0]


def traced(llm: LLM, prompt: Any = None, level: str = "tokens", **fields: Any) -> Trace:
    found = one(llm, SamplingParams(trace=level, **{"max_tokens": 4, "seed": 1, **fields}), prompt)
    assert isinstance(found.trace, Trace)
    return found.trace


# --- tokens ---------------------------------------------------------------------------------------


def random_chain(rng: random.Random) -> list[dict[str, Any]]:
    chosen = rng.sample(STAGES, rng.randint(1, 5))
    return [{**stage, "id": f"s{place}"} for place, stage in enumerate(chosen)]


@pytest.mark.parametrize("seed", range(6))
def test_a_traced_request_has_the_tokens_of_an_untraced_one(seed: int, llm: LLM) -> None:
    rng = random.Random(seed)
    plain = [
        SamplingParams(chain=random_chain(rng), seed=row, max_tokens=8, ignore_eos=True)
        for row in range(8)
    ]
    watched = [params.clone() for params in plain]
    for row, params in enumerate(watched):
        params.trace = "tokens" if row % 2 else "summary"

    alone = llm.generate([PROMPT] * 8, plain, use_tqdm=False)
    mixed = llm.generate([PROMPT] * 16, [*watched, *plain], use_tqdm=False)

    expected = [list(output.outputs[0].token_ids) for output in alone]
    tokens = [list(output.outputs[0].token_ids) for output in mixed]
    assert tokens[:8] == tokens[8:] == expected
    assert all(len(output.trace) == 8 for output in mixed[:8])
    assert all(output.trace is None for output in mixed[8:])


class Counted(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def num_operations(llm: LLM, params: SamplingParams) -> int:
    one(llm, params.clone())  # what is made once is made
    with Counted() as counted:
        one(llm, params.clone())
    return counted.number


def test_who_asks_for_no_trace_runs_the_program_of_an_engine_without_traces(
    make_llm: Maker, table: Tensor
) -> None:
    params = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, seed=1, max_tokens=5)
    without = make_llm(table, plugins=["no:plugins.observe.trace"])
    engine = make_llm(table)
    traced(engine, temperature=0.7, top_k=9, top_p=0.9)

    runner, planner = engine.llm_engine.parts.chain, engine.llm_engine.parts.planner
    program = runner.program(planner.admit(params.snapshot()))
    watched = params.clone()
    watched.trace = "summary"

    assert [len(part.elements) for part in program.segments] == [3]
    assert program.taps == frozenset() and program.segments[0].tap is None
    assert num_operations(engine, params) == num_operations(without, params)
    assert num_operations(engine, watched) > num_operations(engine, params)


# --- values ---------------------------------------------------------------------------------------


def test_every_value_is_that_of_the_formula(llm: LLM, table: Tensor) -> None:
    fields = {"logit_bias": {4: 3.0}, "temperature": 0.5, "top_k": 6}
    trace = traced(llm, **fields)

    row = 3
    for at in trace:
        raw = table[row].double()
        biased = raw.clone()
        biased[4] += 3.0
        cooled = biased / 0.5
        cut = cooled.masked_fill(cooled < cooled.topk(6).values[-1], -math.inf)
        rows = [raw, biased, cooled, cut]
        probs = [each.softmax(0) for each in rows]
        for place, effect in enumerate(at.effects):
            before, after = probs[place], probs[place + 1]
            assert effect.alive_after == int((after > 0).sum())
            assert effect.best_after == int(after.argmax())
            assert effect.removed == pytest.approx(float(before[after == 0].sum()), abs=1e-5)
            assert effect.moved == pytest.approx(float((before - after).abs().sum() / 2), abs=1e-5)
            entropy = -float(after[after > 0].log().mul(after[after > 0]).sum())
            assert effect.entropy_after == pytest.approx(entropy, abs=1e-4)
            assert effect.argmax_changed == (int(before.argmax()) != int(after.argmax()))
            assert effect.seconds > 0
        for path in at.tokens:
            for place, values in enumerate(rows):
                value = float(values[path.id])
                assert path.logits[place] == pytest.approx(value, abs=1e-4)
                assert path.probs[place] == pytest.approx(float(probs[place][path.id]), abs=1e-5)
                alive = value > -math.inf
                rank = 1 + int((values > value).sum())
                assert path.ranks[place] == (rank if alive else None)
            assert path.killer == (None if cut[path.id] > -math.inf else "top_k")
        for token in range(97):
            killed = at.killer(token, trace.points)
            assert killed == (None if cut[token] > -math.inf else "top_k")
        assert at.tokens[0].id == at.token
        assert set(raw.topk(12).indices.tolist()) <= {path.id for path in at.tokens}
        row = at.token
    assert trace.points == ("model", "logit_bias", "temperature", "top_k")


def test_the_summary_keeps_nothing_of_single_tokens(llm: LLM) -> None:
    trace = traced(llm, level="summary", temperature=0.5, top_k=6)

    assert all(at.tokens == () and at.killers == b"" for at in trace)
    with pytest.raises(ValueError, match="ask for trace='tokens'"):
        trace.why(4)


def test_the_best_tokens_are_followed_not_dead_ones(llm: LLM) -> None:
    trace = traced(llm, allowed_token_ids=[5, 6], top_k=1)

    alive = {path.id for path in trace[0].tokens if path.ranks[1] is not None}
    assert alive == {5, 6}
    assert len(trace[0].tokens) <= 12 + 2 + 1


# --- answers --------------------------------------------------------------------------------------


def test_why_names_the_stage_that_removed_a_token(text_llm: LLM) -> None:
    trace = traced(text_llm, "x", temperature=0.5, top_k=1)

    assert trace.why("b", position=3) == (
        "'b' was removed by 'top_k' (k=1) at position 3, which left 1 of 256 tokens alive; it was "
        "rank 2 (24.5 %) before every stage and rank 2 (11.7 %) before 'top_k'."
    )
    assert trace.why("a").startswith("'a' was chosen at position 0 by 'race': rank 1 (66.5 %)")
    assert "'~' at position 2 was removed by 'top_k' (k=1)" in trace.why("~", position=2)
    assert "among the best 12 at no point" in trace.why(ord("~"))


def test_why_says_how_a_token_lost(text_llm: LLM) -> None:
    trace = traced(text_llm, "x", temperature=0, logit_bias={ord("c"): 5.0})

    assert trace.why("a") == (
        "'a' stayed alive at position 0 and lost to 'c' (rank 1, 93.6 %), which 'greedy' chose: "
        "rank 1 (66.5 %) before every stage, rank 2 of 256 (4.7 %) at the end; 'logit_bias' "
        "(bias={99: 5.0}) took the first rank from it."
    )
    assert "put it in front" in trace.why("c")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"token": "ab"}, "is 2 tokens"),
        ({"token": 256}, r"token id must be in \[0, 256\), got 256"),
        ({"token": "a", "position": 4}, r"position must be in \[0, 4\), got 4"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(
    asked: dict[str, Any], said: str, text_llm: LLM
) -> None:
    trace = traced(text_llm, "x")

    with pytest.raises(ValueError, match=said):
        trace.why(**asked)


def test_tokens_can_be_watched_by_text_and_id(text_llm: LLM) -> None:
    wish = {"observer": "trace", "top": 1, "watch": ["z", 7]}
    trace = one(text_llm, SamplingParams(observers=[wish], max_tokens=2), "x").trace

    assert {ord("z"), 7, ord("a")} <= {path.id for path in trace[0].tokens}
    assert "stayed alive" in trace.why("z")
    with pytest.raises(ValueError, match="'zz', which is 2 tokens"):
        one(text_llm, SamplingParams(observers=[{**wish, "watch": ["zz"]}]), "x")
    with pytest.raises(ValueError, match=r"ids in \[0, 256\), got 300"):
        one(text_llm, SamplingParams(observers=[{**wish, "watch": [300]}]), "x")


# --- forms of requests ----------------------------------------------------------------------------


def test_each_answer_of_a_request_has_its_own_trace(llm: LLM) -> None:
    (output,) = llm.generate(
        [PROMPT], SamplingParams(n=3, seed=1, max_tokens=5, trace="tokens"), use_tqdm=False
    )

    for part in output.outputs:
        assert [at.token for at in part.trace] == list(part.token_ids)
    assert len({tuple(part.token_ids) for part in output.outputs}) > 1
    assert output.trace is output.outputs[0].trace


def test_a_streamed_trace_is_whole_in_every_part(llm: LLM) -> None:
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=4, trace="summary", output_kind=RequestOutputKind.DELTA)
    engine.add_request("traced", PROMPT, params)
    joined: RequestOutput | None = None
    lengths = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths.append(len(output.trace))
            if joined is None:
                joined = output
            else:
                joined.add(output, aggregate=True)

    assert lengths == [1, 2, 3, 4]
    assert joined is not None
    assert [at.token for at in joined.trace] == list(joined.outputs[0].token_ids)


def test_a_preempted_trace_has_no_gap(make_llm: Maker, table: Tensor) -> None:
    large = make_llm(table).llm_engine
    block = large.parts.runner.backend.bytes_per_block(large.parts.runner.backend.layout)
    small = make_llm(table, kv_cache_memory_bytes=8 * block, max_model_len=128)
    params = [
        SamplingParams(seed=row, max_tokens=20, trace="summary", temperature=0.8)
        for row in range(8)
    ]

    outputs = small.generate([[3] * 14] * 8, params, use_tqdm=False)

    assert small.llm_engine.parts.scheduler.num_preemptions > 0
    for output in outputs:
        assert [at.token for at in output.trace] == list(output.outputs[0].token_ids)


class Broken(Stage):
    """Raises at its third token."""

    name = "test.broken"
    kind = Kind.BIAS

    def transform(self, logits: Tensor, rows: Any) -> None:
        if int(rows.host_positions[0]) == 2:
            raise RuntimeError("no more")


class Emptied(Stage):
    """Leaves no token alive at the third one."""

    name = "test.emptied"
    kind = Kind.MASK

    def transform(self, logits: Tensor, rows: Any) -> None:
        logits[rows.positions == 2] = -torch.inf


def test_a_traced_request_that_died_tells_where(llm: LLM) -> None:
    raised = one(llm, SamplingParams(chain=[Broken(), "race"], max_tokens=9, trace="tokens"))
    emptied = one(
        llm,
        SamplingParams(chain=[Emptied(), {"stage": "top_k", "k": 4}], max_tokens=9, trace="tokens"),
    )

    assert raised.finish_reason == emptied.finish_reason == "error"
    assert len(raised.trace) == 2
    assert "stage=test.broken instance=test.broken position=2" in raised.trace.error
    assert [at.state for at in emptied.trace] == ["kept", "kept", "failed"]
    last = emptied.trace[2]
    assert last.token is None
    assert [effect.alive_after for effect in last.effects] == [0, 0]
    assert last.killer(4, emptied.trace.points) == "test.emptied"
    assert "removed by 'test.emptied' at position 2" in emptied.trace.why(
        last.tokens[0].id, position=2
    )
    assert "failed: stage=test.emptied" in str(emptied.trace)


def test_a_rescued_token_is_told_as_such(llm: LLM) -> None:
    found = one(
        llm,
        SamplingParams(chain=[Emptied()], on_dead_row="relax", max_tokens=4, trace="tokens"),
    )

    assert found.finish_reason == "length"
    assert "chosen all the same" in found.trace.why(found.token_ids[2], position=2)


def test_a_trace_is_plain_data_and_can_be_sent(llm: LLM) -> None:
    trace = traced(llm, temperature=0.5, top_k=6)

    data = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    again = pickle.loads(pickle.dumps(trace))

    assert again == trace
    assert data["points"] == list(trace.points)
    assert [each["parent"] for each in data["positions"]] == [-1, 0, 1, 2]
    assert str(again) == str(trace)


def test_totals_are_means_and_sums_over_the_positions(llm: LLM) -> None:
    trace = traced(llm, temperature=0.5, top_k=6)

    cooled, cut = trace.totals()

    assert (cooled.id, cut.id) == ("temperature", "top_k")
    assert cooled.alive_after == 97 and cooled.removed == 0
    removed = [at.effects[1].removed for at in trace]
    assert cut.removed == pytest.approx(sum(removed) / 4)
    assert cut.seconds == pytest.approx(sum(at.effects[1].seconds for at in trace))


# --- observers of others --------------------------------------------------------------------------


class LeftAfter(Observer):
    """Counts the tokens that a stage left alive; tells them as `entropy`."""

    name = "test.left"

    def __init__(self, point: Point) -> None:
        self.point = point
        self.seen: list[Tensor] = []

    def bind(self, ctx: BindContext) -> Point:
        return self.point

    def taps(self, order: Point) -> frozenset[Point]:
        return frozenset({order})

    def measure(
        self, order: Point, taps: Mapping[Point, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        view = taps[order]
        assert view.seconds is not None
        self.seen.append(view.logits.clone())
        return {"left": (view.logits > -torch.inf).sum(1)}

    def open(self, order: Point, tokenizer: Any) -> list[float]:
        return []

    def record(self, record: list[float], token: int, values: Mapping[str, Any]) -> None:
        record.append(float(values["left"]))

    def result(self, record: list[float]) -> Mapping[str, Any]:
        return {"entropy": record}


def test_an_observer_looks_after_any_stage_instance(llm: LLM, table: Tensor) -> None:
    chain = [
        {"stage": "top_k", "k": 9, "id": "first"},
        {"stage": "temperature", "t": 0.5},
        {"stage": "top_k", "k": 4, "id": "second"},
    ]
    first, second = LeftAfter(After("first")), LeftAfter(After("second"))
    params = SamplingParams(chain=chain, observers=[first], seed=1, max_tokens=2)

    assert one(llm, params).entropy == [9.0, 9.0]
    params.observers = [second]
    assert one(llm, params).entropy == [4.0, 4.0]
    raw = table[3]
    kept = raw.masked_fill(raw < raw.topk(9).values[-1], -math.inf)
    torch.testing.assert_close(first.seen[0][0], kept)


def test_a_watched_stage_runs_before_a_greedy_pick_too(llm: LLM) -> None:
    observer = LeftAfter(After("top_p"))
    params = SamplingParams(
        chain=["top_p", "greedy"], top_p=0.5, max_tokens=2, observers=[observer]
    )

    (output,) = llm.generate([PROMPT], params, use_tqdm=False)

    assert [step.id for step in output.plan.order] == ["top_p", "greedy"]
    assert output.outputs[0].entropy is not None


@pytest.mark.parametrize(
    ("fields", "point", "said"),
    [
        ({"top_k": 5}, After("topk"), "is no stage of this request .*did you mean 'top_k'"),
        ({"top_k": 5}, After("race"), "is the picker, which leaves no logits"),
        ({"top_p": 1.0}, After("top_p"), "does not run: top_p is neutral"),
        ({}, "top_k", r"must tap at a Tap or After\(instance\), got 'top_k'"),
    ],
)
def test_a_point_that_is_not_there_is_refused_at_admission(
    fields: dict[str, Any], point: Any, said: str, llm: LLM
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        one(llm, SamplingParams(observers=[LeftAfter(point)], **fields))

    assert "observer 'test.left'" in str(caught.value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_each_gives_the_stages_in_their_order(llm: LLM) -> None:
    points: list[list[Point]] = []

    class Listed(LeftAfter):
        name = "test.listed"

        def measure(
            self, order: Point, taps: Mapping[Point, TapView], tokens: Tensor
        ) -> Mapping[str, Tensor]:
            points.append(list(taps))
            return {"left": tokens}

    params = SamplingParams(
        observers=[Listed(Tap.EACH)], temperature=0.5, top_k=5, logit_bias={1: 1.0}, max_tokens=1
    )
    one(llm, params)

    assert points == [[After("logit_bias"), After("temperature"), After("top_k")]]
