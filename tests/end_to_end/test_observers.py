"""Observers through the engine: values of the right rows, streams that join, neighbours unmoved."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import CompletionOutput, RequestOutput
from decodekit.plugins.author.table_model import write_table_model
from decodekit.sampling_params import RequestOutputKind

Maker = Callable[..., LLM]
EVERYTHING: dict[str, Any] = {
    "logprobs": 2,
    "logprob_token_ids": [5, 6],
    "logprobs_mode": ["raw", "final"],
    "kept_set": True,
    "entropy": True,
    "output_tensors": True,
}
CHAIN: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return (torch.randint(-80, 80, (97, 97), generator=generator) / 16).float()


@pytest.fixture(scope="module")
def llm(make_llm: Maker, table: Tensor) -> LLM:
    return make_llm(table)


def one(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> CompletionOutput:
    (output,) = llm.generate([prompt or [3]], params, use_tqdm=False)
    return output.outputs[0]


def rows_of(table: Tensor, found: CompletionOutput, prompt: int = 3) -> Tensor:
    """Return the model's row at each position of the output."""
    return table[[prompt, *found.token_ids[:-1]]]


def test_every_value_is_that_of_the_table(llm: LLM, table: Tensor) -> None:
    found = one(llm, SamplingParams(seed=1, **CHAIN, **EVERYTHING))

    raw = rows_of(table, found).double().log_softmax(1)
    chosen = torch.tensor(list(found.token_ids))
    assert found.tensors is not None and found.logprobs is not None
    assert found.kept_set is not None and found.kept_mass is not None
    assert found.entropy is not None and found.logprobs_at is not None
    assert list(found.tensors) == ["raw", "final"]
    torch.testing.assert_close(found.tensors["raw"].double(), raw, rtol=0, atol=1e-5)
    for place, token in enumerate(chosen.tolist()):
        logits = table[([3, *found.token_ids])[place]]
        kept = (logits >= logits.topk(6).values[-1]).nonzero()[:, 0].tolist()  # with ties
        final = found.tensors["final"][place]
        assert found.kept_set[place].tolist() == kept
        assert (final > -math.inf).nonzero()[:, 0].tolist() == kept
        assert found.kept_mass[place] == pytest.approx(
            float(raw[place, kept].exp().sum()), abs=1e-5
        )
        entropy = -float((raw[place].exp() * raw[place]).sum())
        assert found.entropy[place] == pytest.approx(entropy, abs=1e-4)
        assert {token, 5, 6} <= set(found.logprobs[place])
        assert found.logprobs_at["final"][place][token].logprob == float(final[token])
    expected = float(raw.gather(1, chosen[:, None]).sum())
    assert found.cumulative_logprob == pytest.approx(expected, abs=1e-4)
    assert found.mean_logprob == pytest.approx(expected / 12, abs=1e-5)


@pytest.mark.parametrize("chain", [CHAIN, {**CHAIN, "temperature": 0.0}])
def test_mean_logprob_is_raw_and_needs_no_logprobs(
    llm: LLM, table: Tensor, chain: dict[str, Any]
) -> None:
    found = one(llm, SamplingParams(**chain, presence_penalty=1.0, logit_bias={4: 5.0}))

    raw = rows_of(table, found).double().log_softmax(1)
    expected = raw.gather(1, torch.tensor(list(found.token_ids))[:, None]).mean()
    assert found.logprobs is None and found.cumulative_logprob is None
    assert found.mean_logprob == pytest.approx(float(expected), abs=1e-5)


def test_watching_changes_no_token_of_anyone(llm: LLM) -> None:
    watched = [SamplingParams(seed=row, **CHAIN, **EVERYTHING) for row in range(3)]
    plain = [SamplingParams(seed=row, **CHAIN) for row in range(3)]

    mixed = llm.generate([[3]] * 6, [*watched, *plain], use_tqdm=False)

    tokens = [list(output.outputs[0].token_ids) for output in mixed]
    assert tokens[:3] == tokens[3:]
    for output in mixed[3:]:
        other = output.outputs[0]
        assert other.tensors is other.kept_set is other.entropy is other.logprobs is None


def test_deltas_join_to_the_whole(llm: LLM) -> None:
    whole = one(llm, SamplingParams(seed=4, **CHAIN, **EVERYTHING))
    params = SamplingParams(seed=4, output_kind=RequestOutputKind.DELTA, **CHAIN, **EVERYTHING)
    engine = llm.llm_engine
    engine.add_request("delta", [3], params)
    joined: RequestOutput | None = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.outputs[0].tensors is not None
            assert len(output.outputs[0].tensors["raw"]) == len(output.outputs[0].token_ids)
            if joined is None:
                joined = output
            else:
                joined.add(output, aggregate=True)
    assert joined is not None

    found = joined.outputs[0]
    for name in ("token_ids", "logprobs", "logprobs_at", "kept_mass", "entropy", "mean_logprob"):
        assert getattr(found, name) == getattr(whole, name), name
    assert found.kept_set == whole.kept_set
    assert found.tensors is not None and whole.tensors is not None
    assert all(torch.equal(found.tensors[mode], whole.tensors[mode]) for mode in whole.tensors)


def test_longer_outputs_keep_their_first_rows(llm: LLM, table: Tensor) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, output_tensors=True)

    found = one(llm, params)

    assert found.tensors is not None
    assert list(found.tensors) == ["raw_logprobs"]  # the engine's own mode
    expected = rows_of(table, found).log_softmax(1)
    torch.testing.assert_close(found.tensors["raw_logprobs"], expected)


def test_listed_ids_have_a_limit_and_a_range(llm: LLM, make_llm: Maker, table: Tensor) -> None:
    with pytest.raises(ValueError, match="at most max_logprob_token_ids .128. ids, got 129"):
        one(llm, SamplingParams(logprob_token_ids=[1] * 129))
    with pytest.raises(ValueError, match=r"token ids in \[0, 97\), got 97"):
        one(llm, SamplingParams(logprob_token_ids=[97]))
    free = make_llm(table, max_logprob_token_ids=-1)
    assert one(free, SamplingParams(logprob_token_ids=[1] * 129)).logprobs


def test_confidence_flags_the_weak_output_of_a_batch(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    table = torch.full((97, 97), -30.0)
    table[1, 1] = 0.0  # sure of itself
    table[2, :64] = 0.0  # guesses, and goes on guessing
    table[3:64, :64] = 0.0
    llm = LLM(
        str(write_table_model(tmp_path_factory.mktemp("sure"), table)),
        skip_tokenizer_init=True,
        max_num_seqs=8,
    )
    asked = {"observer": "confidence", "threshold": -2.0}
    params = SamplingParams(max_tokens=6, observers=[asked], allowed_token_ids=[1, *range(3, 64)])
    plain = SamplingParams(max_tokens=6)

    sure, guess, other = (
        output.outputs[0]
        for output in llm.generate([[1], [2], [2]], [params, params, plain], use_tqdm=False)
    )

    assert (sure.low_confidence, sure.low_confidence_reason) == (False, None)
    assert guess.low_confidence is True
    assert guess.low_confidence_reason is not None
    assert "below the threshold -2" in guess.low_confidence_reason
    assert (other.low_confidence, other.low_confidence_reason) == (None, None)
    assert [line for line in caplog.messages if "low confidence" in line][0].startswith(
        "request 1 "
    )
    counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert counts["decodekit:low_confidence"] == 1
    assert counts["decodekit:confidence_checked"] == 2


@pytest.mark.parametrize(
    ("observers", "said"),
    [
        (["confidance"], "unknown observer 'confidance'; did you mean 'confidence'"),
        ([{"observer": "confidence", "threshold": 2}], "cannot take threshold=2"),
        ([{"observer": "confidence", "treshold": -2}], "no parameter 'treshold'"),
    ],
)
def test_a_wrong_wish_is_refused(llm: LLM, observers: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        one(llm, SamplingParams(observers=observers))
