"""RequestOutput and what hangs on it: merging, timing, the plan report, pooled results."""

import copy
import pickle

import pytest

from decodekit.core.lora_request import LoRARequest
from decodekit.core.metrics import Counter, Gauge, Histogram, Metric, Vector
from decodekit.core.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    CompletionOutput,
    DroppedStep,
    EmbeddingRequestOutput,
    FlatLogprobs,
    Logprob,
    PlanReport,
    PlanStep,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestStateStats,
    ScoringRequestOutput,
)


def request(*outputs: CompletionOutput, finished: bool = False, **fields: object) -> RequestOutput:
    return RequestOutput("r", "p", [1], None, list(outputs), finished, **fields)


def delta(text: str, ids: list[int], **fields: object) -> CompletionOutput:
    return CompletionOutput(0, text, ids, **fields)


def test_a_completion_is_finished_when_it_has_a_reason() -> None:
    assert not CompletionOutput(0, "", []).finished()
    assert CompletionOutput(0, "", [], finish_reason="stop").finished()


def test_adding_deltas_equals_the_whole() -> None:
    logprobs = [{5: Logprob(-1.0, 1)}, {6: Logprob(-2.0, 2)}]
    total = request(delta("a", (5,), cumulative_logprob=-1.0, logprobs=logprobs[:1]))

    total.add(
        request(
            delta(
                "b",
                [6],
                cumulative_logprob=-3.0,
                logprobs=logprobs[1:],
                finish_reason="stop",
                stop_reason="x",
                logprobs_at={"final": [{6: Logprob(-0.5, 1)}]},
                entropy=[0.3],
            ),
            finished=True,
        ),
        aggregate=True,
    )

    assert total.outputs == [
        CompletionOutput(
            0, "ab", [5, 6], -3.0, logprobs, None, "stop", "x",
            logprobs_at={"final": [{6: Logprob(-0.5, 1)}]}, entropy=[0.3],
        )
    ]  # fmt: skip
    assert total.finished


def test_adding_flat_logprobs_extends_them() -> None:
    first, second = FlatLogprobs(), FlatLogprobs()
    first.append({5: Logprob(-1.0)})
    second.append({6: Logprob(-2.0)})
    total = request(delta("a", [5], logprobs=first))

    total.add(request(delta("b", [6], logprobs=second)), aggregate=True)

    assert total.outputs[0].logprobs == [{5: Logprob(-1.0)}, {6: Logprob(-2.0)}]


def test_a_merge_leaves_the_later_yield_alone() -> None:
    later = request(delta("b", [6], entropy=[0.1]))
    before = copy.deepcopy(later.outputs)
    total = request(delta("a", [5]))

    total.add(later, aggregate=True)
    total.add(request(delta("c", [7], entropy=[0.2])), aggregate=True)

    assert later.outputs == before
    assert total.outputs[0].entropy == [0.1, 0.2]


def test_adding_cumulative_yields_replaces() -> None:
    total = request(delta("a", [5]))

    total.add(request(delta("ab", [5, 6])), aggregate=False)

    assert [item.text for item in total.outputs] == ["ab"]


def test_adding_another_index_adds_a_completion() -> None:
    total = request(delta("a", [5]))

    total.add(request(CompletionOutput(1, "z", [9])), aggregate=True)

    assert [(item.index, item.text) for item in total.outputs] == [(0, "a"), (1, "z")]


def test_prompt_logprobs_are_taken_from_the_yield_that_has_them() -> None:
    total, later = request(delta("a", [5])), request(delta("b", [6]))
    later.prompt_logprobs = [None]

    total.add(later, aggregate=True)

    assert total.prompt_logprobs == [None]


def test_unknown_keywords_are_dropped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="does not know new_field"):
        output = request(new_field=3)

    assert not hasattr(output, "new_field")


def test_outputs_pickle_and_print() -> None:
    output = request(delta("a", [5]), plan=PlanReport("f", ()))

    twin = pickle.loads(pickle.dumps(output))

    assert repr(twin) == repr(output)
    assert "text='a'" in repr(output)
    assert output.trace is None


def test_older_names_of_the_timing_are_there() -> None:
    stats = RequestStateStats(
        arrival_time=100.0, queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0, last_token_ts=3.0
    )

    assert (stats.time_in_queue, stats.first_scheduled_time) == (0.5, 1.5)
    assert (stats.first_token_time, stats.last_token_time) == (2.0, 3.0)
    assert stats.finished_time is None
    assert (stats.scheduler_time, stats.model_forward_time, stats.model_execute_time) == (None,) * 3
    empty = RequestStateStats()
    assert (empty.time_in_queue, empty.first_token_time) == (None, None)


def test_a_plan_report_prints_and_dumps() -> None:
    report = PlanReport(
        "abc",
        (
            PlanStep("temperature", "temperature", "SHAPE", {"t": 0.7}, {"t": "request"}),
            PlanStep("top_p", "p1", "CUT", {"p": 0.9}),
        ),
        (DroppedStep("top_k", "identity"),),
        ("something to know",),
    )

    assert str(report).splitlines() == [
        "plan abc (profile default)",
        "  1. temperature(t=0.7 [request])",
        "  2. top_p as p1(p=0.9)",
        "  dropped top_k: identity",
        "  note: something to know",
    ]
    dumped = report.to_dict()
    assert [step["stage"] for step in dumped["order"]] == ["temperature", "top_p"]
    assert dumped["order"][0]["provenance"] == {"t": "request"}
    assert dumped["dropped"] == [{"stage": "top_k", "reason": "identity"}]


def test_pooled_results_convert_and_refuse_wrong_shapes() -> None:
    torch = pytest.importorskip("torch")

    def pooled(data: object) -> PoolingRequestOutput[PoolingOutput]:
        return PoolingRequestOutput("r", PoolingOutput(data), [1, 2], 1, True)

    vector = pooled(torch.tensor([0.5, 0.25]))
    embedding = EmbeddingRequestOutput.from_base(vector)
    assert (embedding.outputs.embedding, embedding.outputs.hidden_size) == ([0.5, 0.25], 2)
    assert (embedding.request_id, embedding.num_cached_tokens) == ("r", 1)
    assert ClassificationRequestOutput.from_base(vector).outputs.num_classes == 2
    assert ScoringRequestOutput.from_base(pooled(torch.tensor([[0.5]]))).outputs.score == 0.5
    for convert in (EmbeddingRequestOutput, ClassificationRequestOutput):
        with pytest.raises(ValueError, match="1-D"):
            convert.from_base(pooled(torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="one element"):
        ScoringRequestOutput.from_base(vector)


def test_beam_results_and_metrics_hold_their_fields() -> None:
    beam = BeamSearchSequence("p", [1, 2], [])

    assert (beam.cum_logprob, beam.text, BeamSearchOutput([beam]).sequences) == (0.0, None, [beam])
    for metric in (
        Counter("decodekit:c", {}, 1),
        Gauge("decodekit:g", {}, 0.5),
        Histogram("decodekit:h", {}, 1, 0.5, {"+Inf": 1}),
        Vector("decodekit:v", {}, [1, 2]),
    ):
        assert isinstance(metric, Metric)


def test_lora_requests_are_checked_and_compared_by_name_id_and_path() -> None:
    adapter = LoRARequest("a", 1, "/path", load_inplace=True)

    assert adapter == LoRARequest("a", 1, "/path")
    assert hash(adapter) == hash(LoRARequest("a", 1, "/path"))
    assert adapter != LoRARequest("a", 2, "/path")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("a", 1, "/path")
    for bad in (("a", 0, "/p"), ("a", 1, ""), ("", 1, "/p")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*bad)
