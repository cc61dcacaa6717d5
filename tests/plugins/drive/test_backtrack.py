"""Backtracking beside a plain simulation, and its promises: streams, states, company, no leak."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, Kind, RowView, SamplingParams, Stage, StageParams
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model
from decodekit.sampling_params import RequestOutputKind, StructuredOutputsParams

LETTERS = b"abcde"


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    values = torch.full((256, 256), -40.0)
    letters = torch.tensor(list(LETTERS))
    noise = torch.rand(5, 5, generator=generator).fill_diagonal_(0)  # greedy writes a cycle
    values[letters[:, None], letters] = (noise * 64).round() / 16
    return values


@pytest.fixture(scope="module")
def llm(table: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_table_model(
        tmp_path_factory.mktemp("backtrack"), table, tokenizer=byte_tokenizer()
    )
    yield LLM(str(folder), block_size=4, generation_config="vllm", max_model_len=256)


def run(llm: LLM, driver: Any, prompt: str = "a", **fields: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "driver": driver, **fields})
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert used(llm) == 0
    return output.outputs[0] if params.n == 1 else output.outputs


def used(llm: LLM) -> int:
    return llm.llm_engine.parts.pool.num_used


def simulate(
    table: Tensor, banned: list[str], length: int, start: str = "a"
) -> tuple[str, list[tuple[str, int]]]:
    """Write greedily; where a banned string appears, go back to its first letter."""
    text, explored, taken = "", {}, []
    while len(text) < length:
        row = table[ord((start + text)[-1])].clone()
        row[list(explored.get(len(text), ()))] = -torch.inf
        text += chr(int(row.argmax()))
        hits = [(text.rindex(each), each) for each in banned if text.endswith(each)]
        if hits:
            place, which = min(hits)
            taken.append((which, place))
            explored.setdefault(place, set()).add(ord(text[place]))
            explored = {at: ids for at, ids in explored.items() if at <= place}
            text = text[:place]
    return text, taken


def test_banned_strings_are_taken_back_as_a_plain_simulation_does(llm: LLM, table: Tensor) -> None:
    plain = run(llm, None).text
    assert len(plain) == 24
    for banned in ([plain[3:6]], [plain[0:2]], [plain[5:8], plain[1:3]], [plain[2]]):
        text, taken = simulate(table, banned, 24)

        found = run(llm, {"driver": "backtrack", "strings": banned})

        assert found.text == text
        assert not any(each in found.text for each in banned)
        assert [(each["text"], each["position"]) for each in found.suppressed] == taken
        assert not any(each["allowed"] for each in found.suppressed)
        assert list(found.token_ids) == [ord(char) for char in text]


def test_without_a_match_nothing_changes(llm: LLM) -> None:
    for seed in range(3):
        plain = run(llm, None, temperature=1.0, seed=seed, logprobs=2)
        found = run(
            llm, {"driver": "backtrack", "strings": ["zz"]}, temperature=1.0, seed=seed, logprobs=2
        )
        assert found.text == plain.text
        assert found.logprobs == plain.logprobs
        assert found.cumulative_logprob == plain.cumulative_logprob
        assert found.mean_logprob == plain.mean_logprob
        assert found.suppressed == []


def test_regexes_are_taken_back_and_see_what_follows(llm: LLM) -> None:
    import re

    plain = run(llm, None, temperature=1.5, seed=3, max_tokens=60).text
    letter = plain[10]
    found = run(
        llm, {"driver": "backtrack", "regexes": [rf"{letter}+[a-e]\b", "(ab){2,}"]},
        temperature=1.5, seed=3, max_tokens=60,
    )  # fmt: skip
    assert not re.search(r"(ab){2,}", found.text)
    # \b holds at the end of the text alone, where the last letters were taken back
    assert found.text[:-1].startswith(plain[:10][: len(found.text) - 1][:3])
    assert not re.search(rf"{letter}+[a-e]$", found.text)


def test_case_is_folded_unless_it_counts(llm: LLM) -> None:
    plain = run(llm, None).text
    upper = plain[3:6].upper()
    folded = run(llm, {"driver": "backtrack", "strings": [upper]})
    assert plain[3:6] not in folded.text
    strict = run(llm, {"driver": "backtrack", "strings": [upper], "ignore_case": False})
    assert strict.text == plain


class BannedAt(Stage):
    """Kills given tokens at given places."""

    name = "banned_at"
    kind = Kind.MASK

    class Params(StageParams):
        """Pairs (place, id)."""

        pairs: tuple[tuple[int, int], ...] = ()

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, params in enumerate(rows.params):
            for place, token in params.pairs:
                if place == int(rows.host_positions[row]):
                    logits[row, token] = -torch.inf


def test_states_histories_and_scores_are_as_if_the_tokens_never_stood_there(llm: LLM) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.8, "seed": 11, "frequency_penalty": 0.7, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "logprobs": 3, "kept_set": True, "entropy": True, "top_p": 0.95,
        "chain": [
            "repetition_penalty", "frequency_penalty", "presence_penalty",
            {"stage": "dry", "multiplier": 0.8, "allowed_length": 1}, "temperature", "top_p",
        ],
    }  # fmt: skip
    found = run(llm, {"driver": "backtrack", "strings": ["eac", "cd", "de", "da", "be"]}, **fields)
    assert len(found.suppressed) > 1
    bans: list[tuple[int, int]] = []
    for each in found.suppressed:
        place = each["position"]
        bans = [ban for ban in bans if ban[0] <= place] + [(place, ord(each["text"][0]))]
    chain = [BannedAt(pairs=bans), *fields.pop("chain")]

    plain = run(llm, None, **fields, chain=chain)

    assert found.token_ids == plain.token_ids
    for name in ("text", "logprobs", "cumulative_logprob", "mean_logprob", "kept_set", "entropy"):
        assert getattr(found, name) == getattr(plain, name), name


def test_a_stream_never_unsays_anything(llm: LLM) -> None:
    plain = run(llm, None).text
    driver = {"driver": "backtrack", "strings": [plain[3:7], plain[8:10]]}
    whole = run(llm, driver, logprobs=1)
    engine = llm.llm_engine
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        params = SamplingParams(
            temperature=0.0, max_tokens=24, driver=driver, output_kind=kind, logprobs=1
        )
        engine.add_request("stream", "a", params)
        text, ids, logprobs, steps = "", [], [], 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                part = output.outputs[0]
                steps += 1
                if kind is RequestOutputKind.DELTA:
                    text += part.text
                    ids += part.token_ids
                    logprobs += part.logprobs
                else:
                    assert part.text.startswith(text)
                    text, ids, logprobs = part.text, list(part.token_ids), part.logprobs
                assert len(ids) == len(logprobs)
        assert (text, ids, logprobs) == (whole.text, list(whole.token_ids), whole.logprobs)
        assert steps > 3


def test_where_nothing_else_can_be_written_it_gives_way_or_fails(llm: LLM) -> None:
    grammar = StructuredOutputsParams(regex="ab+c")
    driver = {"driver": "backtrack", "strings": ["ab"]}
    found = run(llm, driver, structured_outputs=grammar)
    assert found.text.startswith("ab")
    assert [each["allowed"] for each in found.suppressed][-1]

    failed = run(llm, {**driver, "on_exhausted": "error"}, structured_outputs=grammar)
    assert failed.finish_reason == "error"
    assert "nothing but 'ab' could be written" in failed.error


def test_a_grammar_is_followed_back(llm: LLM) -> None:
    grammar = StructuredOutputsParams(choice=["abc", "abd", "dab", "ede"])
    plain = run(llm, None, structured_outputs=grammar).text
    found = run(llm, {"driver": "backtrack", "strings": [plain]}, structured_outputs=grammar)
    assert found.text != plain
    assert found.text in ("abc", "abd", "dab", "ede")


def test_retries_are_bounded(llm: LLM) -> None:
    found = run(llm, {"driver": "backtrack", "strings": list("abcde"), "max_retries": 2})
    assert len(found.text) == 24
    assert sum(each["allowed"] for each in found.suppressed) == 24
    assert sum(not each["allowed"] for each in found.suppressed) == 48


def test_shared_prompts_and_short_caches_are_not_written_to(
    llm: LLM, table: Tensor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_table_model(tmp_path_factory.mktemp("b"), table, tokenizer=byte_tokenizer())
    backend = llm.llm_engine.parts.runner.backend
    block = backend.bytes_per_block(backend.layout)
    small = LLM(str(folder), block_size=4, kv_cache_memory_bytes=24 * block, max_model_len=64,
                generation_config="vllm", enable_prefix_caching=True)  # fmt: skip
    prompt = "abcdeabcdea"
    drivers = [{"driver": "backtrack", "strings": [a + b]} for a in "abcde" for b in "abcde"]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=14, driver=driver, n=1 + i % 2)
        for i, driver in enumerate(drivers)
    ]
    together = small.generate([prompt] * len(params), params, use_tqdm=False)
    assert used(small) == 0
    for one, output in zip(params, together, strict=True):
        [alone] = small.generate([prompt], one, use_tqdm=False)
        assert [part.text for part in alone.outputs] == [part.text for part in output.outputs]
        assert all(part.error is None for part in alone.outputs)
    plain = SamplingParams(temperature=0.9, seed=3, max_tokens=14)
    [first] = small.generate([prompt], plain, use_tqdm=False)
    assert first.outputs[0].finish_reason == "length"


def test_bad_parameters_are_refused(llm: LLM) -> None:
    for driver, said in (
        ({"driver": "backtrack"}, "at least one"),
        ({"driver": "backtrack", "strings": [""]}, "must not be empty"),
        ({"driver": "backtrack", "regexes": ["("]}, "no regular expression"),
        ({"driver": "backtrack", "regexes": ["a*"]}, "matches the empty text"),
        ({"driver": "backtrack", "string": ["a"]}, "no parameter 'string'"),
    ):
        with pytest.raises(ValidationError, match=said.replace("(", r"\(")):
            run(llm, driver)
    with pytest.raises(ValidationError, match="detokenize"):
        run(llm, {"driver": "backtrack", "strings": ["a"]}, detokenize=False)


def test_a_trace_shows_what_was_taken_back(llm: LLM) -> None:
    plain = run(llm, None).text
    found = run(llm, {"driver": "backtrack", "strings": [plain[3:6]]}, trace="tokens")
    assert [at.position for at in found.trace] == list(range(24))
    assert [at.token for at in found.trace] == list(found.token_ids)
    gone = found.trace.rewound
    assert {at.state for at in gone} == {"rewound"}
    start, text = found.suppressed[0]["position"], plain[3:6]
    assert [(at.position, at.token) for at in gone[:3]] == [
        (start + 2 - i, ord(text[2 - i])) for i in range(3)
    ]
