"""Choosing by probability: against a sum over every path, ties, spaces, streams, refusals."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, AsyncLLM, SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.core.params import RequestOutputKind, StructuredOutputsParams
from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model

Maker = Callable[..., LLM]
EXTRA = ("yes", " yes", "ye", "es", "no", " n", "yesno")
NUM = 256 + len(EXTRA) + 1
WORDS = [bytes([i]) for i in range(256)] + [text.encode() for text in EXTRA]
PROMPT = [65, 66]


@pytest.fixture(scope="module")
def table() -> Tensor:
    return torch.randn(NUM, NUM, generator=torch.Generator().manual_seed(3)) * 2


@pytest.fixture(scope="module")
def folder(table: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("choose")
    tokens = byte_tokenizer(EXTRA, ("<eos>",), eos="<eos>")
    return write_table_model(made, table, eos_token_id=NUM - 1, tokenizer=tokens)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=32)


def spellings(text: bytes) -> Iterator[tuple[int, ...]]:
    """Every path of tokens that writes `text`."""
    if not text:
        yield ()
    for token, word in enumerate(WORDS):
        if text.startswith(word):
            for rest in spellings(text[len(word) :]):
                yield (token, *rest)


def mass(table: Tensor, text: str) -> float:
    logprobs = torch.log_softmax(table.double(), 1)
    total = 0.0
    for form in (text.encode(), f" {text}".encode()):
        for path in spellings(form):
            steps = zip([PROMPT[-1], *path], path, strict=False)
            total += float(torch.stack([logprobs[a, b] for a, b in steps]).sum().exp())
    return total


def test_the_shares_are_the_sums_over_all_paths(llm: LLM, table: Tensor) -> None:
    (found,) = llm.choose([PROMPT], ["yes", "no", "es"])
    expected = {text: mass(table, text) for text in ("yes", "no", "es")}

    total = sum(expected.values())
    assert found.mass == pytest.approx(total, rel=1e-3)
    assert found.unresolved < 1e-3
    for text, value in expected.items():
        assert found.probs[text] == pytest.approx(value / total, rel=2e-3)
        assert found.logprobs[text] == pytest.approx(torch.tensor(value).log().item(), rel=1e-3)
    assert found.choice == max(expected, key=expected.__getitem__)
    assert sum(found.probs.values()) == pytest.approx(1.0)


def test_what_goes_on_into_a_longer_option_counts_for_that_one(llm: LLM, table: Tensor) -> None:
    (found,) = llm.choose([PROMPT], ["ye", "yes"])

    longer, both = mass(table, "yes"), mass(table, "ye")
    # Paths that jump over the end of the short option in one token are the longer one's alone.
    jumps = sum(mass_of(table, form, b"ye") for form in (b"yes", b" yes"))
    assert found.logprobs["yes"] == pytest.approx(torch.tensor(longer).log().item(), rel=1e-3)
    short = both - (longer - jumps)
    assert found.logprobs["ye"] == pytest.approx(torch.tensor(short).log().item(), rel=2e-3)


def mass_of(table: Tensor, form: bytes, inner: bytes) -> float:
    """Probability of the paths of `form` that have no token ending where `inner` ends in it."""
    logprobs = torch.log_softmax(table.double(), 1)
    at = form.index(inner) + len(inner)
    total = 0.0
    for path in spellings(form):
        ends = [sum(len(WORDS[token]) for token in path[: i + 1]) for i in range(len(path))]
        if at not in ends:
            steps = zip([PROMPT[-1], *path], path, strict=False)
            total += float(torch.stack([logprobs[a, b] for a, b in steps]).sum().exp())
    return total


def test_equal_options_are_told_to_tie_and_the_first_is_taken(make_llm: Maker) -> None:
    table = torch.zeros(NUM, NUM)
    tokens = byte_tokenizer(EXTRA, ("<eos>",), eos="<eos>")
    flat = make_llm(table, model={"tokenizer": tokens})
    (found,) = flat.choose([PROMPT], ["b", "a", "cc"])

    assert found.is_tie and found.tied == ["b", "a"]
    assert found.choice == "b"


def test_many_prompts_give_what_each_gives_alone(llm: LLM) -> None:
    prompts: list[list[int]] = [[i, i + 1] for i in range(80)]
    together = llm.choose(prompts, ["yes", "no"])

    for place in (0, 41, 79):
        (alone,) = llm.choose([prompts[place]], ["yes", "no"])
        assert alone == together[place]


def test_a_choice_request_returns_the_same_shares(llm: LLM) -> None:
    wanted = StructuredOutputsParams(choice=["yes", "no"], choice_probs=True)
    params = SamplingParams(structured_outputs=wanted, seed=1, max_tokens=8, n=2)
    plain = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    asked, other = llm.generate([PROMPT, PROMPT], [params, plain], use_tqdm=False)
    (found,) = llm.choose([PROMPT], ["yes", "no"])

    for output in asked.outputs:
        assert output.text in ("yes", "no")
        assert output.choice_probs == pytest.approx(found.probs, rel=1e-6)
    assert other.outputs[0].choice_probs is None
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_aborted_request_takes_its_inquiry_along(llm: LLM) -> None:
    engine = llm.llm_engine
    wanted = {"choice": ["yes", "no"], "choice_probs": True}
    engine.add_request("gone", PROMPT, SamplingParams(structured_outputs=wanted))
    engine.abort_request("gone")
    outputs = [output for _ in range(5) for output in engine.step()]

    assert [(out.request_id, out.outputs[0].finish_reason) for out in outputs] == [
        ("gone", "abort")
    ]
    assert not engine.has_unfinished_requests()


def test_a_stream_ends_with_the_shares(folder: Path) -> None:
    async def main() -> list[Any]:
        engine = AsyncLLM(str(folder))
        params = SamplingParams(
            structured_outputs={"choice": ["yes", "no"], "choice_probs": True},
            output_kind=RequestOutputKind.DELTA,
            seed=2,
        )
        found = [output async for output in engine.generate({"prompt_token_ids": PROMPT}, params)]
        engine.shutdown()
        return found

    outputs = asyncio.run(main())
    assert outputs[-1].finished
    assert set(outputs[-1].outputs[0].choice_probs) == {"yes", "no"}


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (["yes"], "at least two"),
        ([], "at least two"),
        (["yes", " yes"], "leading space"),
        (["yes", " "], "not blank"),
        (["yes", 3], "not blank"),
    ],
)
def test_choices_that_are_no_choice_are_refused(llm: LLM, choices: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        llm.choose([PROMPT], choices)


def test_shares_without_a_choice_are_refused() -> None:
    with pytest.raises(ValidationError, match="choice_probs"):
        StructuredOutputsParams(regex="a", choice_probs=True)
