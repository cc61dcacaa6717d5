"""Beam search beside transformers' own, brute force, and its promises: company, room, no leak."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.errors import ValidationError
from decodekit.plugins.author.table_model import write_table_model
from decodekit.sampling_params import BeamSearchParams, RequestOutputKind

transformers = pytest.importorskip("transformers")

ENDS = [3, 5]
SIZE = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small random model whose attention matters, in a folder and in transformers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.7,
        eos_token_id=3,
        bos_token_id=1,
        pad_token_id=0,
    )
    theirs = transformers.LlamaForCausalLM(config).float().eval()
    folder = tmp_path_factory.mktemp("beams")
    theirs.save_pretrained(folder)
    return folder, theirs


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Any]) -> LLM:
    return LLM(
        str(model[0]),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        generation_config="vllm",
    )


def prompt_of(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, SIZE, (6,), generator=generator).tolist()


def ours(llm: LLM, prompt: list[int], width: int, max_tokens: int, driver: dict[str, Any],
         **fields: Any) -> list[tuple[list[int], float]]:  # fmt: skip
    params = SamplingParams(
        temperature=0.0,
        n=width,
        max_tokens=max_tokens,
        stop_token_ids=ENDS,
        ignore_eos=True,
        driver={"driver": "beam_search", "width": width, **driver},
        **fields,
    )
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert [part.error for part in output.outputs] == [None] * width
    return [(list(part.token_ids), part.beam_score or 0.0) for part in output.outputs]


def theirs(model: Any, prompt: list[int], width: int, max_tokens: int, **options: Any) -> Any:
    result = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=ENDS,
        pad_token_id=0,
        **options,
    )
    found = []
    for row, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((i for i, token in enumerate(tokens) if token in ENDS), len(tokens) - 1)
        found.append((tokens[: end + 1], score))
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_the_profile_transformers_gives_its_sequences_and_scores(
    llm: LLM, model: tuple[Path, Any], penalty: float, early_stopping: bool | str
) -> None:
    driver = {
        "profile": "transformers", "length_penalty": penalty, "early_stopping": early_stopping
    }  # fmt: skip
    for seed, width, max_tokens in itertools.product((0, 1), (2, 3, 4), (1, 9)):
        prompt = prompt_of(seed)
        options: dict[str, Any] = {"length_penalty": penalty, "early_stopping": early_stopping}
        own: dict[str, Any] = {"profile": "transformers"}
        if seed:
            options["repetition_penalty"] = own["repetition_penalty"] = 1.3
        right = theirs(model[1], prompt, width, max_tokens, **options)

        mine = ours(llm, prompt, width, max_tokens, driver, **own)

        assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in right]
        for (_, score), (_, known) in zip(mine, right, strict=True):
            assert score == pytest.approx(known, rel=1e-4)


def test_one_beam_is_greedy(llm: LLM) -> None:
    prompt = prompt_of(4)
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=ENDS, ignore_eos=True)
    [output] = llm.generate([prompt], params, use_tqdm=False)

    [(tokens, _)] = ours(llm, prompt, 1, 9, {})

    assert tokens == list(output.outputs[0].token_ids)


# --- on a table, where everything can be enumerated -----------------------------------------------


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randint(-40, 41, (12, 12), generator=generator) / 16).float()


@pytest.fixture(scope="module")
def small(table: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_table_model(tmp_path_factory.mktemp("table"), table)
    yield LLM(str(folder), skip_tokenizer_init=True, max_num_seqs=160)


def every_path(
    table: Tensor, start: int, length: int, banned: frozenset[int] = frozenset(), end: int = -1
) -> list[tuple[float, list[int]]]:
    """Sequences of `length` tokens, or up to `end`, with their log-probabilities, best first."""
    row = table.double().clone()
    row[:, list(banned)] = -math.inf
    logprobs = torch.log_softmax(row, 1)
    found: list[tuple[float, list[int]]] = []

    def walk(tokens: list[int], total: float) -> None:
        if len(tokens) == length or (tokens and tokens[-1] == end):
            found.append((total, tokens))
            return
        last = tokens[-1] if tokens else start
        for token in range(len(table)):
            if token not in banned:
                walk([*tokens, token], total + float(logprobs[last, token]))

    walk([], 0.0)
    return sorted(found, key=lambda item: -item[0])


def test_beams_wide_enough_are_the_best_of_all_sequences(small: LLM, table: Tensor) -> None:
    right = every_path(table, 1, 3)[:40]

    [found] = small.beam_search([[1]], BeamSearchParams(beam_width=144, max_tokens=3))

    best = found.sequences[:40]
    assert [beam.tokens[1:] for beam in best] == [tokens for _, tokens in right]
    assert [beam.cum_logprob for beam in best] == pytest.approx([t for t, _ in right], abs=1e-3)
    assert len({tuple(beam.tokens) for beam in found.sequences}) == 144


def test_bans_and_penalties_act_on_every_beam(small: LLM, table: Tensor) -> None:
    allowed = [token for token in range(12) if token not in (2, 7)]
    right = every_path(table, 1, 3, frozenset((2, 7)))[:20]
    params = BeamSearchParams(
        beam_width=100, max_tokens=3, sampling_params=SamplingParams(allowed_token_ids=allowed)
    )

    [found] = small.beam_search([[1]], params)

    assert [beam.tokens[1:] for beam in found.sequences[:20]] == [tokens for _, tokens in right]

    strong = SamplingParams(frequency_penalty=2.0, logprobs=1)
    [plain] = small.beam_search([[1]], BeamSearchParams(beam_width=4, max_tokens=8))
    [spread] = small.beam_search(
        [[1]], BeamSearchParams(beam_width=4, max_tokens=8, sampling_params=strong)
    )
    assert _distinct(spread.sequences[0].tokens) > _distinct(plain.sequences[0].tokens)
    assert [len(position) >= 1 for position in spread.sequences[0].logprobs] == [True] * 8


def _distinct(tokens: list[int]) -> int:
    return len(set(tokens))


def test_searches_in_company_and_in_a_pool_too_small_are_those_alone(
    small: LLM, table: Tensor, tmp_path: Path
) -> None:
    def beams(width: int, **fields: Any) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, n=width, max_tokens=24,
            driver={"driver": "beam_search", "width": width},
            output_kind=RequestOutputKind.FINAL_ONLY, **fields,
        )  # fmt: skip

    requests = [
        ([1] * 20, beams(3)),
        ([4, 2], beams(4, frequency_penalty=0.6)),
        ([5], SamplingParams(temperature=0.9, seed=3, max_tokens=24, top_k=5)),
        ([6, 1], beams(2, logit_bias={3: 2.0})),
        ([7], SamplingParams(temperature=0.0, max_tokens=24)),
    ]
    alone = [small.generate([prompt], params, use_tqdm=False)[0] for prompt, params in requests]
    write_table_model(tmp_path, table)
    backend = small.llm_engine.parts.runner.backend
    each = backend.bytes_per_block(backend.layout)  # type: ignore[attr-defined]
    tight = LLM(str(tmp_path), skip_tokenizer_init=True, kv_cache_memory_bytes=9 * each)

    for llm in (small, tight):
        together = llm.generate(
            [prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
        )
        for one, other in zip(alone, together, strict=True):
            assert [list(part.token_ids) for part in one.outputs] == [
                list(part.token_ids) for part in other.outputs
            ]
        assert llm.llm_engine.parts.pool.num_used == 0
    counts = {each.name: getattr(each, "value", None) for each in tight.get_metrics()}
    assert counts["decodekit:num_preemptions"] > 0


def test_an_abort_in_the_middle_leaves_nothing_behind(small: LLM) -> None:
    engine = small.llm_engine
    params = SamplingParams(
        temperature=0.0, n=4, max_tokens=50, driver={"driver": "beam_search", "width": 4},
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    engine.add_request("gone", [1, 2], params)
    for _ in range(7):
        engine.step()
    engine.abort_request("gone")
    outputs = engine.step()

    assert [part.finish_reason for part in outputs[0].outputs] == ["abort"] * 4
    assert not engine.has_unfinished_requests()
    assert engine.parts.pool.num_used == 0
    assert not engine.parts.scheduler.running and not engine.parts.scheduler.waiting


def test_stochastic_beams_are_a_sample_without_replacement(small: LLM, table: Tensor) -> None:
    """The first of the sample is a draw from the model: its law, by chi-squared."""
    right = {tuple(tokens): math.exp(total) for total, tokens in every_path(table, 1, 2)}
    counts: dict[tuple[int, ...], int] = {}
    draws = 400
    params = [
        SamplingParams(
            n=3, seed=seed, max_tokens=2,
            driver={"driver": "beam_search", "width": 3, "stochastic": True},
        )
        for seed in range(draws)
    ]  # fmt: skip
    for output in small.generate([[1]] * draws, params, use_tqdm=False):
        sample = [tuple(part.token_ids) for part in output.outputs]
        assert len(set(sample)) == 3
        counts[sample[0]] = counts.get(sample[0], 0) + 1

    often = [path for path, p in right.items() if p * draws >= 5]
    rest = 1 - sum(right[path] for path in often)
    observed = [counts.get(path, 0) for path in often]
    statistic = sum(
        (count - draws * right[path]) ** 2 / (draws * right[path])
        for count, path in zip(observed, often, strict=True)
    )
    statistic += (draws - sum(observed) - draws * rest) ** 2 / (draws * rest)
    freedom = len(often)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_diverse_groups_choose_other_tokens(small: LLM) -> None:
    def first_tokens(**driver: Any) -> set[int]:
        params = SamplingParams(
            temperature=0.0,
            n=4,
            max_tokens=3,
            driver={"driver": "beam_search", "width": 4, **driver},
        )
        [output] = small.generate([[1]], params, use_tqdm=False)
        return {part.token_ids[0] for part in output.outputs}

    assert len(first_tokens(groups=4, diversity=50.0)) == 4
    assert len(first_tokens(groups=4)) == 1  # no diversity: every group is the same search


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"driver": "beam_serch"}, "did you mean 'beam_search'"),
        ({"driver": {"driver": "beam_search"}}, "needs the parameter 'width'"),
        ({"driver": {"driver": "beam_search", "width": 0}}, "driver.width is 0"),
        ({"driver": {"driver": "beam_search", "width": 2, "wide": 1}}, "no parameter 'wide'"),
        ({"driver": {"driver": "beam_search", "width": 2}, "n": 3}, "at most the beam width"),
        ({"driver": {"driver": "beam_search", "width": 200}}, "max_num_seqs=160"),
        (
            {"driver": {"driver": "beam_search", "width": 2, "strict": True}, "top_p": 0.9},
            "top_p must be unset",
        ),
    ],
)
def test_a_bad_driver_is_refused_with_one_sentence(
    small: LLM, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        small.generate([[1]], SamplingParams(max_tokens=2, **fields), use_tqdm=False)


def test_beams_cannot_be_streamed(small: LLM) -> None:
    params = SamplingParams(
        max_tokens=2,
        driver={"driver": "beam_search", "width": 2},
        output_kind=RequestOutputKind.DELTA,
    )
    with pytest.raises(ValidationError, match="cannot be streamed"):
        small.llm_engine.add_request("x", [1], params)


def test_the_plan_says_what_runs_and_what_has_no_effect(small: LLM) -> None:
    params = SamplingParams(
        temperature=0.7, top_p=0.9, n=2, max_tokens=2, driver={"driver": "beam_search", "width": 2}
    )
    [output] = small.generate([[1]], params, use_tqdm=False)

    notes = " ".join(output.plan.notes)  # type: ignore[union-attr]
    assert "driver beam_search(width=2" in notes
    assert "temperature, top_p have no effect under driver 'beam_search'" in notes
