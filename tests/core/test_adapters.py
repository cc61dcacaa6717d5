"""Our stages in other libraries: transformers' generate, and engines of vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessorList

from decodekit import LLM, Kind, RowView, SamplingParams, Stage, StageParams
from decodekit.adapters import TransformersProcessor, vllm_processor
from decodekit.core.adapters import StageProcessor
from decodekit.core.errors import StageError, ValidationError
from decodekit.core.stage import Caps
from decodekit.core.vllm_processors import BatchUpdate, MoveDirectionality
from decodekit.logits_processors.bias.dry import Dry
from decodekit.logits_processors.bias.penalties import RepetitionPenalty
from decodekit.logits_processors.cut.top_a import TopA
from decodekit.logits_processors.cut.top_p import TopP
from decodekit.logits_processors.cut.xtc import Xtc
from decodekit.logits_processors.mask.bad_words import BadWords
from decodekit.logits_processors.mask.no_repeat_ngram import NoRepeatNGram
from decodekit.logits_processors.shape.temperature import Temperature
from decodekit.plugins.author.table_model import write_table_model
from decodekit.plugins.pick.mirostat import Mirostat
from decodekit.plugins.pick.race import Race

VOCABULARY = 61
PROMPTS = [[3, 9, 4], [7, 7, 2], [11, 5, 30]]
LENGTH = 16


class Alternate(Stage):
    """Bans the last token of the answer, from a state of its own."""

    name = "adapters.alternate"
    kind = Kind.MASK
    caps = Caps(stateful=True)

    class Params(StageParams):
        """How many."""

        last: int = Field(default=2, ge=1)

    def open(self, params: Any, prompt: Any) -> list[int]:
        return []

    def accept(self, state: list[int], tokens: Any) -> None:
        state += tokens

    def rollback(self, state: list[int], count: int) -> None:
        del state[len(state) - count :]

    def fork(self, state: list[int]) -> list[int]:
        return list(state)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, state in enumerate(rows.states):
            logits[row, state[-rows.params[row].last :]] = -torch.inf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(5)
    table = torch.randint(-40, 41, (VOCABULARY, VOCABULARY), generator=generator) / 8
    table[:, :6] += 12  # few favourites, so that a greedy answer runs in circles
    return write_table_model(tmp_path_factory.mktemp("table"), table, eos_token_id=60)


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def make_llm(folder: Path) -> Callable[..., LLM]:
    def make(**kwargs: Any) -> LLM:
        return LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256, **kwargs
        )

    return make


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


def native(llm: LLM, chain: list[Any], seeds: list[int]) -> list[list[int]]:
    params = [
        SamplingParams(chain=chain, seed=seed, max_tokens=LENGTH, ignore_eos=True) for seed in seeds
    ]
    results = llm.generate(PROMPTS[: len(seeds)], params, use_tqdm=False)
    assert [result.outputs[0].error for result in results] == [None] * len(seeds)
    return [list(result.outputs[0].token_ids) for result in results]


def generated(hf: Any, processors: list[Any], **kwargs: Any) -> list[list[int]]:
    ids = torch.tensor(PROMPTS)
    written = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=LogitsProcessorList(processors),
        max_new_tokens=LENGTH,
        min_new_tokens=LENGTH,
        pad_token_id=0,
        **{"do_sample": False, "eos_token_id": None, **kwargs},
    )
    return [row[3:].tolist() for row in written]


# --- transformers ---------------------------------------------------------------------------------

GREEDY: list[list[Stage]] = [
    [Alternate(last=4)],
    [NoRepeatNGram(n=2)],
    [RepetitionPenalty(penalty=1.4), Dry(multiplier=2.0, allowed_length=1, breakers=[])],
    [BadWords(words=[[5], [1], [2, 3]])],
]
SAMPLED: list[list[Stage]] = [
    [Alternate(), Temperature(t=1.3), TopA(a=0.3), Race()],
    [Temperature(t=1.5), Xtc(probability=0.7, threshold=0.05), TopP(p=0.9), Race()],
    [Temperature(t=1.2), Mirostat(tau=2.0, eta=0.5)],
]


@pytest.mark.parametrize("stages", GREEDY, ids=lambda stages: stages[-1].name)
def test_greedy_generate_with_our_stages_writes_what_our_engine_writes(
    hf: Any, llm: LLM, stages: list[Stage]
) -> None:
    found = generated(hf, [TransformersProcessor(*stages)])

    assert found == native(llm, [*stages, "greedy"], [0, 0, 0])
    assert found != generated(hf, [])


@pytest.mark.parametrize("stages", SAMPLED, ids=lambda stages: stages[-2].name)
def test_a_picker_at_the_end_draws_as_in_our_engine(hf: Any, llm: LLM, stages: list[Stage]) -> None:
    processor = TransformersProcessor(*stages, seed=[4, 5, 6])

    assert generated(hf, [processor]) == native(llm, list(stages), [4, 5, 6])
    assert generated(hf, [processor], do_sample=True, top_k=0) == native(
        llm, list(stages), [4, 5, 6]
    )


def test_rows_of_a_batch_are_those_of_calls_by_themselves(hf: Any) -> None:
    stages = [Temperature(t=1.3), TopP(p=0.95), Race()]
    together = generated(hf, [TransformersProcessor(*stages, seed=[1, 2, 3])])

    for place, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        alone = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[TransformersProcessor(*stages, seed=[place + 1])],
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert alone[0, 3:].tolist() == together[place]


class Reference:
    """transformers' own way: everything from `input_ids`."""

    def __init__(self, last: int, prompt_len: int) -> None:
        self.last, self.prompt_len = last, prompt_len

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt_len :].tolist()):
            scores[row, ids[-self.last :]] = -torch.inf
        return scores


def test_states_follow_beams_that_change_places(hf: Any) -> None:
    ours = generated(hf, [TransformersProcessor(Alternate(last=4))], num_beams=4)

    assert ours == generated(hf, [Reference(4, 3)], num_beams=4)
    assert ours != generated(hf, [], num_beams=4)


def test_padding_on_the_left_is_no_history(hf: Any) -> None:
    stage = RepetitionPenalty(penalty=3.0)
    ids = torch.tensor([[0, 0, 3, 9], [5, 6, 7, 8]])
    scores = torch.ones(2, VOCABULARY)

    padded = TransformersProcessor(stage, pad_token_id=0)(ids, scores)

    assert padded[0, 0] == 1.0
    assert padded[0, 3] == pytest.approx(1 / 3)


def test_rows_that_have_ended_are_left_alone() -> None:
    processor = TransformersProcessor(Alternate(), eos_token_id=60)
    scores = torch.zeros(2, VOCABULARY)
    processor(torch.tensor([[1], [2]]), scores)

    after = processor(torch.tensor([[1, 60], [2, 7]]), scores)

    assert after[0].tolist() == scores[0].tolist()
    assert after[1, 7] == -torch.inf


def test_scores_keep_their_dtype_and_the_argument_is_not_changed() -> None:
    scores = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
    after = TransformersProcessor(BadWords(words=[[5]]))(torch.tensor([[1]]), scores)

    assert after.dtype == torch.bfloat16
    assert after[0, 5] == -torch.inf
    assert scores[0, 5] == 0


def test_what_cannot_run_there_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValidationError, match="seed must be given, since the stage 'xtc' draws"):
        TransformersProcessor(Xtc(probability=0.5))
    with pytest.raises(ValidationError, match="the picker 'race' must be last"):
        TransformersProcessor(Race(), TopP(p=0.5), seed=1)
    with pytest.raises(ValidationError, match="stages must be Stage objects"):
        TransformersProcessor(TopP)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="at least one stage"):
        TransformersProcessor()


class Emptying(Stage):
    """Leaves nothing."""

    name = "adapters.emptying"
    kind = Kind.MASK

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.fill_(-torch.inf)


def test_a_stage_that_leaves_no_token_is_named_with_its_position() -> None:
    with pytest.raises(StageError, match="stage=adapters.emptying .* position=0: it left no token"):
        TransformersProcessor(Emptying())(torch.tensor([[1]]), torch.zeros(1, 5))


# --- vLLM's interface -----------------------------------------------------------------------------

AlternateProcessor = vllm_processor(Alternate)
TopAProcessor = vllm_processor(TopA, key="top_a", argmax_invariant=True)
DryProcessor = vllm_processor(Dry)


@pytest.mark.parametrize(
    ("processor", "extra", "native_chain"),
    [
        (AlternateProcessor, {"adapters.alternate": {"last": 3}}, [Alternate(last=3)]),
        (
            DryProcessor,
            {"dry": {"multiplier": 2.0, "allowed_length": 1, "breakers": []}},
            [Dry(multiplier=2.0, allowed_length=1, breakers=[])],
        ),
    ],
    ids=["alternate", "dry"],
)
def test_the_host_of_vllms_classes_runs_a_wrapped_stage_as_the_stage_itself(
    make_llm: Callable[..., LLM],
    llm: LLM,
    processor: type[Any],
    extra: dict[str, Any],
    native_chain: list[Stage],
) -> None:
    own = make_llm(logits_processors=[processor])
    params = [
        SamplingParams(
            temperature=1.2, seed=seed, max_tokens=LENGTH, ignore_eos=True, extra_args=args
        )
        for seed, args in ((1, extra), (2, None), (3, extra))
    ]

    found = own.generate(PROMPTS, params, use_tqdm=False)

    shaped = [Temperature(t=1.2)]
    with_stage = native(llm, [*native_chain, *shaped], [1, 2, 3])
    plain = native(llm, list(shaped), [1, 2, 3])
    tokens = [list(each.outputs[0].token_ids) for each in found]
    assert tokens == [with_stage[0], plain[1], with_stage[2]]


def test_a_wrapped_cut_stands_after_the_temperature(make_llm: Callable[..., LLM], llm: LLM) -> None:
    own = make_llm(logits_processors=[TopAProcessor])
    params = [
        SamplingParams(
            temperature=1.4,
            seed=seed,
            max_tokens=LENGTH,
            ignore_eos=True,
            extra_args={"top_a": {"a": 0.4}},
        )
        for seed in (1, 2, 3)
    ]

    found = own.generate(PROMPTS, params, use_tqdm=False)

    expected = native(llm, [Temperature(t=1.4), TopA(a=0.4)], [1, 2, 3])
    assert [list(each.outputs[0].token_ids) for each in found] == expected


def test_rows_are_followed_as_vllm_tells_of_them() -> None:
    processor = AlternateProcessor(None, torch.device("cpu"), False)
    outputs: list[list[int]] = [[], [], []]
    params = [
        SamplingParams(extra_args={"adapters.alternate": {"last": 1}}),
        SamplingParams(),
        SamplingParams(extra_args={"adapters.alternate": {"last": 2}}),
    ]
    added = [(row, params[row], [1], outputs[row]) for row in range(3)]
    processor.update_state(BatchUpdate(3, [], added, []))

    def banned() -> list[list[int]]:
        after = processor.apply(torch.zeros(3, 9))
        return [(row == -torch.inf).nonzero()[:, 0].tolist() for row in after]

    assert banned() == [[], [], []]
    for output, token in zip(outputs, (4, 5, 6), strict=True):
        output.append(token)
    processor.update_state(None)
    assert banned() == [[4], [], [6]]
    processor.update_state(BatchUpdate(3, [], [], [(0, 2, MoveDirectionality.SWAP)]))
    outputs[2].append(7)
    assert banned() == [[6, 7], [], [4]]
    outputs[2].pop()  # a draft was rejected
    assert banned() == [[6], [], [4]]
    processor.update_state(BatchUpdate(2, [0], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert banned() == [[4], [], []]


def test_a_bad_parameter_is_refused_before_the_request_runs(make_llm: Callable[..., LLM]) -> None:
    own = make_llm(logits_processors=[AlternateProcessor])

    with pytest.raises(ValueError, match=r"adapters.alternate.last is 0, but"):
        own.generate(
            [PROMPTS[0]],
            SamplingParams(extra_args={"adapters.alternate": {"last": 0}}),
            use_tqdm=False,
        )
    with pytest.raises(ValidationError, match="must be a dict of the stage's parameters, got 3"):
        AlternateProcessor.validate_params(SamplingParams(extra_args={"adapters.alternate": 3}))


def test_placeholders_of_asynchronous_scheduling_are_refused() -> None:
    processor = AlternateProcessor(None, torch.device("cpu"), False)
    params = SamplingParams(extra_args={"adapters.alternate": {}})
    processor.update_state(BatchUpdate(1, [], [(0, params, [1], [-1])], []))

    with pytest.raises(ValidationError, match="switch asynchronous scheduling off"):
        processor.apply(torch.zeros(1, 9))


def test_a_picker_has_no_place_in_vllm() -> None:
    with pytest.raises(ValidationError, match="is a picker"):
        vllm_processor(Race)


def test_a_class_has_the_base_that_is_asked_for() -> None:
    class Theirs:
        """vLLM's base."""

    made = vllm_processor(TopA, base=Theirs)

    assert issubclass(made, Theirs)
    assert issubclass(made, StageProcessor)
    assert made.__name__ == "TopAProcessor"
