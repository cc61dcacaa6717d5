"""Drivers that rank candidates: the order, early ends, refusals, the same in any company."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    generator = torch.Generator().manual_seed(2)
    table = torch.full((256, 256), -40.0)
    letters = torch.tensor(list(b"0123."))
    table[letters[:, None], letters] = (torch.rand(5, 5, generator=generator) * 32).round() / 16
    folder = write_table_model(
        tmp_path_factory.mktemp("candidates"), table, eos_token_id=46, tokenizer=byte_tokenizer()
    )
    yield LLM(str(folder), max_num_seqs=6, generation_config="vllm", max_model_len=128)


def run(llm: LLM, driver: Any, **fields: Any) -> Any:
    params = SamplingParams(**{"seed": 1, "max_tokens": 12, "driver": driver, **fields})
    [output] = llm.generate(["0"], params, use_tqdm=False)
    assert llm.llm_engine.parts.pool.num_used == 0
    return output.outputs


def drawn(llm: LLM, n: int, **fields: Any) -> Any:
    return run(llm, None, n=n, **fields)


def test_best_of_orders_by_what_it_is_told(llm: LLM) -> None:
    for kind in ("raw", "final"):
        own = {"temperature": 0.7, "top_k": 3}
        all_of = drawn(llm, 9, logprobs=0, logprobs_mode=kind, **own)
        for by in (f"{kind}_sum", f"{kind}_mean"):
            power = 1.0 if by.endswith("mean") else 0.0
            worth = {
                tuple(each.token_ids): each.cumulative_logprob / len(each.token_ids) ** power
                for each in all_of
            }
            found = run(llm, {"driver": "best_of", "of": 9, "by": by}, n=3, **own)
            best = sorted(worth.values(), reverse=True)[:3]
            assert [each.score for each in found] == pytest.approx(best, abs=1e-4)
            assert [each.index for each in found] == [0, 1, 2]
            assert [worth[tuple(each.token_ids)] for each in found] == pytest.approx(best, abs=1e-4)


def test_best_of_agrees_with_the_older_fields(llm: LLM) -> None:
    older = run(llm, None, best_of=8, n=4)
    newer = run(llm, {"driver": "best_of", "of": 8}, n=4)
    assert [each.text for each in newer] == [each.text for each in older]


def test_a_function_may_judge(llm: LLM) -> None:
    by: Any = lambda lane: lane.text.text.count("1")  # noqa: E731
    found = run(llm, {"driver": "best_of", "of": 8, "by": by}, n=8)
    assert [each.score for each in found] == [each.text.count("1") for each in found]
    firsts = list(dict.fromkeys(each.text for each in found))
    counts = [text.count("1") for text in firsts]
    assert counts == sorted(counts, reverse=True)


def test_a_failing_judge_fails_its_request_alone(llm: LLM) -> None:
    def by(lane: Any) -> float:
        raise KeyError("no judge")

    params = [SamplingParams(driver={"driver": "best_of", "of": 2, "by": by}, max_tokens=3),
              SamplingParams(max_tokens=3, seed=1)]  # fmt: skip
    bad, good = llm.generate(["0", "0"], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "best_of" in bad.outputs[0].error
    assert good.outputs[0].error is None


def test_minimum_risk_is_the_mean_utility(llm: LLM) -> None:
    texts = [tuple(each.token_ids) for each in drawn(llm, 7)]

    def f1(one: Any, other: Any) -> float:
        shared = sum((Counter(one) & Counter(other)).values())
        precision, recall = shared / len(one), shared / len(other)
        return 2 * precision * recall / (precision + recall) if shared else 0.0

    worth = [
        sum(f1(own, other) for j, other in enumerate(texts) if j != i) / 6
        for i, own in enumerate(texts)
    ]
    found = run(llm, {"driver": "mbr", "of": 7}, n=1)
    assert found[0].score == pytest.approx(max(worth))
    assert tuple(found[0].token_ids) == texts[worth.index(max(worth))]

    alike: Any = lambda a, b: float(len(a) == len(b))  # noqa: E731
    [by_length] = run(llm, {"driver": "mbr", "of": 7, "utility": alike})
    lengths = Counter(len(text) for text in texts)
    assert lengths[len(by_length.token_ids)] == max(lengths.values())


def reference(texts: list[str], of: int, wanted: int, pattern: str) -> tuple[str, float]:
    """Count votes in their order until the leader cannot be caught."""
    votes: Counter[str] = Counter()
    for number, text in enumerate(texts, start=1):
        found = re.findall(pattern, text)
        if found:
            votes[found[-1]] += 1
        best = [count for _, count in votes.most_common(2)] + [0, 0]
        if best[0] > best[1] + of - number and number >= wanted:
            break
    most = max(votes.values())
    winner = min(answer for answer, count in votes.items() if count == most)
    return winner, most / sum(votes.values())


def test_the_commonest_answer_wins_and_the_rest_is_not_written(llm: LLM) -> None:
    pattern = "[12]"
    for seed in range(6):
        every = drawn(llm, 11, seed=seed, include_stop_str_in_output=True)
        texts = [each.text for each in every]
        driver = {"driver": "self_consistency", "of": 11, "answer": pattern}
        [found] = run(llm, driver, seed=seed)
        winner, share = reference(texts, 11, 1, pattern)
        assert found.answer == winner
        assert found.score == pytest.approx(share)
        [whole] = run(llm, {**driver, "early_stop": False}, seed=seed)
        counts = Counter(re.findall(pattern, text)[-1] for text in texts
                         if re.search(pattern, text))  # fmt: skip
        assert whole.score == pytest.approx(max(counts.values()) / sum(counts.values()))


def test_a_vote_is_the_same_alone_and_in_a_full_house(llm: LLM) -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=12, temperature=1.3,
                       driver={"driver": "majority_vote", "of": 7, "answer": "[0-3]"})
        for seed in range(6)
    ]  # fmt: skip
    together = llm.generate(["0"] * 6, params, use_tqdm=False)
    for one, output in zip(params, together, strict=True):
        [alone] = llm.generate(["0"], one, use_tqdm=False)
        [a], [b] = alone.outputs, output.outputs
        assert (a.text, a.answer, a.score) == (b.text, b.answer, b.score)


def test_a_decided_vote_saves_tokens(llm: LLM) -> None:
    def tokens(early: bool) -> int:
        before = llm.llm_engine._num_generated
        driver = {"driver": "majority_vote", "of": 15, "answer": "$", "early_stop": early}
        run(llm, driver, max_tokens=40, seed=4)  # every answer is empty
        return llm.llm_engine._num_generated - before

    assert tokens(True) < tokens(False)


def test_bad_requests_are_refused(llm: LLM) -> None:
    for driver, fields, said in (
        ({"driver": "best_of", "of": 2}, {"n": 3}, "at most the number of candidates"),
        ({"driver": "best_of", "of": 2}, {"temperature": 0.0}, "temperature above 0"),
        ({"driver": "best_of", "of": 0}, {}, "driver.of"),
        ({"driver": "majority_vote", "of": 3, "answer": "("}, {}, "no regular expression"),
    ):
        with pytest.raises(ValidationError, match=said):
            run(llm, driver, **fields)
