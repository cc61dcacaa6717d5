"""Speculation is lossless: any request says with it what it says without, whatever else happens."""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.engine import LLMEngine
from decodekit.core.errors import ValidationError
from decodekit.core.hookspecs import hookimpl
from decodekit.core.outputs import CompletionOutput, RequestOutput
from decodekit.core.params import RequestOutputKind, StructuredOutputsParams
from decodekit.core.proposer import Proposer
from decodekit.core.stage import Kind, Stage
from decodekit.plugins.author.table_model import byte_tokenizer, write_table_model

Maker = Callable[..., LLM]

EOS = 256
VOCABULARY = 257
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def table(noise: float = 0.0) -> Tensor:
    """Each byte has one likely successor, in cycles of about ten, and a few less likely ones."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randint(-64, 33, (VOCABULARY, VOCABULARY), generator=generator) / 16
    for token in range(VOCABULARY):
        successor = token - 9 if token % 10 == 9 else token + 1
        values[token, min(successor, 255)] = 9.0
    if noise:
        values += noise * torch.randn(values.shape, generator=generator)
    values[:, EOS] = 0.5
    return values.float()


MODEL: dict[str, Any] = {
    "eos_token_id": EOS,
    "tokenizer": byte_tokenizer((), ("<eos>",), eos="<eos>"),
}


class Parity(Stage):
    """A guest with a state: every other token is less likely after an even sum."""

    name = "parity"
    kind = Kind.BIAS

    @classmethod
    def open(cls, params: Any, prompt: Sequence[int]) -> list[int]:
        return [sum(prompt) % 2]

    @classmethod
    def accept(cls, state: list[int], tokens: Sequence[int]) -> None:
        state[0] = (state[0] + sum(tokens)) % 2

    def transform(self, logits: Tensor, rows: Any) -> None:
        for row, state in enumerate(rows.states):
            if state[0] == 0:
                logits[row, ::2] -= 1.5


def fading(output_ids: list[int], logits: Tensor) -> Tensor:
    """A request's own callable."""
    return logits * (1 + len(output_ids) % 3) / 2


STAGES: list[Any] = [
    {"stage": "no_repeat_ngram", "n": 6},
    {"stage": "logit_bias", "bias": {70: 2.0, 71: -1.0}},
    {"stage": "sequence_bias", "bias": {(65, 66): 1.5}},
    {"stage": "repetition_penalty", "penalty": 1.05},
    {"stage": "frequency_penalty", "penalty": 0.1},
    {"stage": "dry", "multiplier": 0.4, "allowed_length": 12},
    {"stage": "temperature", "t": 0.8},
    {"stage": "dynamic_temperature", "low": 0.5, "high": 1.2},
    {"stage": "temperature_schedule", "points": [[0, 0.4], [12, 1.1]]},
    {"stage": "quadratic", "factor": 0.2},
    {"stage": "top_k", "k": 30},
    {"stage": "top_p", "p": 0.95},
    {"stage": "min_p", "p": 0.01},
    {"stage": "typical_p", "p": 0.9},
    {"stage": "top_h", "alpha": 0.5},
    {"stage": "xtc", "probability": 0.1, "threshold": 0.2},
    {"stage": "tail_free", "z": 0.95},
    {"stage": "top_n_sigma", "n": 3.0},
    {"stage": "green_list", "delta": 1.0},
    Parity(),
]
PICKERS: list[Any] = [
    "race",
    "greedy",
    "icdf",
    "flat_race",
    {"stage": "mirostat", "tau": 3.0},
    {"stage": "adaptive_p", "target": 0.6},
    {"stage": "keyed_gumbel", "key": 9},
]
KINDS = ["MASK", "FORCE", "BIAS", "SHAPE", "CUT", "MARK"]


def random_params(dice: random.Random, number: int) -> SamplingParams:
    """A request out of everything that a request may ask for."""
    fields: dict[str, Any] = {"seed": number % 7, "max_tokens": dice.randint(8, 40)}

    def maybe(share: float, **given: Any) -> None:
        if dice.random() < share:
            fields.update(given)

    if dice.random() < 0.5:
        stages = dice.sample(STAGES, dice.randint(1, 5))
        rank = {id(stage): place for place, stage in enumerate(STAGES)}
        stages.sort(key=lambda stage: rank[id(stage)])
        fields["chain"] = [*stages, dice.choice(PICKERS)]
    else:
        maybe(0.7, temperature=dice.choice([0.0, 0.3, 0.7, 1.2]))
        maybe(0.3, top_k=dice.randint(1, 40))
        maybe(0.3, top_p=dice.uniform(0.3, 1.0))
        maybe(0.2, min_p=dice.uniform(0.0, 0.3))
        maybe(0.2, repetition_penalty=dice.uniform(0.9, 1.1))
        maybe(0.2, presence_penalty=dice.uniform(-0.5, 0.5))
        maybe(0.2, logit_bias={dice.randint(60, 120): 3.0})
        maybe(0.1, allowed_token_ids=list(range(64, 120)))
        maybe(0.1, bad_words=["EF", "d"])
        maybe(0.2, logits_processors=[fading])
        maybe(0.1, repetition_detection={"max_pattern_size": 12, "min_count": 3})
        if fields.get("temperature") != 0.0:
            maybe(0.25, n=dice.randint(2, 3))
            if "n" not in fields:
                maybe(0.1, best_of=2, n=1)
    maybe(0.3, stop=[dice.choice(["GH", "z", "56", "cde"])])
    maybe(0.2, stop_token_ids=[dice.randint(48, 120)])
    maybe(0.2, min_tokens=dice.randint(1, 8))
    maybe(0.3, ignore_eos=True)
    maybe(0.3, logprobs=dice.randint(0, 3))
    maybe(0.1, prompt_logprobs=1)
    maybe(0.2, entropy=True)
    maybe(0.1, trace="tokens")
    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **fields)


def prompts(dice: random.Random, count: int) -> list[list[int]]:
    """Prompts that often hold what the model is going to say; some begin alike."""
    shared = [(48 + place % 70) for place in range(40)]
    made = []
    for _ in range(count):
        start = dice.randint(48, 100)
        own = [start + place % 10 for place in range(dice.randint(1, 30))]
        made.append(shared + own if dice.random() < 0.3 else own)
    return made


@pytest.fixture(scope="module")
def plain(make_llm: Maker) -> LLM:
    """An engine without speculation."""
    return make_llm(table(), model=MODEL)


@pytest.fixture(scope="module")
def guessing(make_llm: Maker) -> LLM:
    """The same with prompt lookup."""
    return make_llm(table(), model=MODEL, speculative_config=NGRAM)


def counters(llm: LLM) -> dict[str, Any]:
    """The metrics of an engine by the end of their name."""
    return {
        metric.name.removeprefix("decodekit:"): getattr(metric, "value", None)
        for metric in llm.get_metrics()
    }


def told(part: CompletionOutput) -> tuple[Any, ...]:
    """All that an answer says that must not depend on speculation."""
    return (
        part.text, list(part.token_ids), part.finish_reason, part.stop_reason, part.error,
        part.logprobs, part.cumulative_logprob, part.mean_logprob, part.entropy, part.index,
    )  # fmt: skip


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    assert [told(part) for part in one.outputs] == [told(part) for part in other.outputs]
    assert one.prompt_logprobs == other.prompt_logprobs


def small_blocks(llm: LLM, count: int) -> int:
    backend = llm.llm_engine.parts.runner.backend
    return count * backend.bytes_per_block(backend.layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [("roomy", 200), ("crowded", 60), ("draft", 60), ("unfused", 30)]
)
def test_mixed_requests_with_random_chains_say_the_same(
    kind: str, count: int, make_llm: Maker, plain: LLM, tmp_path: Path
) -> None:
    config: dict[str, Any] = NGRAM
    options: dict[str, Any] = {}
    if kind == "crowded":  # preemption, and prompts in chunks
        memory = small_blocks(plain, 24)
        options = {
            "kv_cache_memory_bytes": memory,
            "max_num_batched_tokens": 40,
            "max_num_seqs": 16,
            "max_model_len": 128,
        }
    if kind == "draft":
        write_table_model(tmp_path, table(noise=0.6), **MODEL)
        config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4}
    if kind == "unfused":
        options = {"fusion": False}
    llm = make_llm(table(), model=MODEL, speculative_config=config, **options)
    dice = random.Random(kind)
    params = [random_params(dice, number) for number in range(count)]
    asked = prompts(dice, count)

    found = llm.generate(asked, params, use_tqdm=False)
    expected = plain.generate(asked, params, use_tqdm=False)

    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    counts = counters(llm)
    assert counts["spec_decode_num_accepted_tokens"] > 2 * count
    assert counts["spec_decode_num_draft_tokens"] > counts["spec_decode_num_accepted_tokens"]
    assert llm.llm_engine.parts.pool.num_used == 0
    if kind == "crowded":
        assert counts["num_preemptions"] > 0
        assert counts["prefix_cache_hits"] > 0
    if kind == "draft":
        assert llm.llm_engine.parts.further[0].pool.num_used == 0


def test_a_model_that_looks_at_its_context_says_the_same(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(11)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=97, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None, **size,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    model.save_pretrained(tmp_path / "draft")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 16}
    speaks = LLM(str(tmp_path / "model"), **options)
    guesses = LLM(
        str(tmp_path / "model"),
        speculative_config={"method": "draft_model", "model": str(tmp_path / "draft")},
        max_num_batched_tokens=24,
        **options,
    )
    dice = random.Random(3)
    asked = [[dice.randint(0, 96) for _ in range(dice.randint(2, 40))] for _ in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=2)

    pairs = zip(
        guesses.generate(asked, params, use_tqdm=False),
        speaks.generate(asked, params, use_tqdm=False),
        strict=True,
    )

    for one, other in pairs:
        assert_equal_or_tied(one.outputs[0], other.outputs[0])
    counts = counters(guesses)
    assert counts["spec_decode_num_accepted_tokens"] > 50
    assert counts["spec_decode_num_draft_tokens"] > counts["spec_decode_num_accepted_tokens"] + 50


def assert_equal_or_tied(mine: CompletionOutput, theirs: CompletionOutput) -> None:
    """Tokens are equal up to where the two best are within 1e-4."""
    pairs = zip(mine.token_ids, theirs.token_ids, strict=True)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is not None:
        assert mine.logprobs is not None
        best = sorted((entry.logprob for entry in mine.logprobs[place].values()), reverse=True)
        assert best[0] - best[1] < 1e-4


def steps_of(engine: LLMEngine, request: str, prompt: Any, params: SamplingParams) -> list[Any]:
    """Run one request step by step; return what each step said."""
    engine.add_request(request, prompt, params)
    said = []
    while engine.has_unfinished_requests():
        said += engine.step()
    return said


@pytest.mark.parametrize("fields", [{}, {"stop": ["67"]}, {"temperature": 0.9, "seed": 3}])
def test_deltas_join_to_the_answer_in_fewer_steps(
    plain: LLM, guessing: LLM, fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, **fields})
    params.output_kind = RequestOutputKind.DELTA
    prompt = [50 + place % 10 for place in range(25)]

    said = steps_of(guessing.llm_engine, "a", prompt, params)
    expected = steps_of(plain.llm_engine, "a", prompt, params)

    def joined(parts: list[Any]) -> Any:
        ids = [token for part in parts for token in part.outputs[0].token_ids]
        return (
            "".join(part.outputs[0].text for part in parts),
            ids,
            parts[-1].outputs[0].stop_reason,
        )

    assert joined(said) == joined(expected)
    assert len(said) < len(expected)


def test_a_stream_speaks_whenever_it_passes_a_multiple_of_the_interval(make_llm: Maker) -> None:
    llm = make_llm(table(), model=MODEL, speculative_config=NGRAM, stream_interval=5)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    params.output_kind = RequestOutputKind.CUMULATIVE

    said = steps_of(llm.llm_engine, "a", [50 + place % 10 for place in range(25)], params)

    lengths = [len(part.outputs[0].token_ids) for part in said]
    assert lengths[0] == 1
    assert lengths[-1] == 40
    assert all(later // 5 > earlier // 5 for earlier, later in itertools.pairwise(lengths))


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xy", "xyxyxy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "constraint",
    [{"json": SCHEMA}, {"regex": "(ab|abc){3,9}d"}, {"choice": ["0123456789", "01234567", "zz"]}],
)
def test_structured_answers_are_the_same(
    plain: LLM, guessing: LLM, constraint: dict[str, Any]
) -> None:
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(**constraint),
            max_tokens=60,
            temperature=0.8,
            seed=seed,
        )
        for seed in range(8)
    ]
    text = json.dumps({"a": "xyxyxy", "b": True}) + " abcabcabcd 0123456789 "
    asked = [list(text.encode())] * len(params)
    before = counters(guessing)["spec_decode_num_accepted_tokens"]

    found = guessing.generate(asked, params, use_tqdm=False)
    expected = plain.generate(asked, params, use_tqdm=False)

    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
        assert one.outputs[0].finish_reason == "stop"
    assert counters(guessing)["spec_decode_num_accepted_tokens"] > before


# --- who speculates -----------------------------------------------------------------------------

PROMPT = [50 + place % 10 for place in range(25)]


def drafts_of(llm: LLM, **fields: Any) -> tuple[int, RequestOutput]:
    """Run a request of forty tokens; return the tokens guessed and the output."""
    before = counters(llm)["spec_decode_num_draft_tokens"]
    fields = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **fields}
    [output] = llm.generate([PROMPT], SamplingParams(**fields), use_tqdm=False)
    return counters(llm)["spec_decode_num_draft_tokens"] - before, output


def test_a_request_can_switch_speculation_off(guessing: LLM) -> None:
    assert drafts_of(guessing)[0] > 0
    assert drafts_of(guessing, speculation=False)[0] == 0


def test_a_request_can_ask_for_it_where_the_engine_has_none(plain: LLM) -> None:
    engine = plain.llm_engine.parts.speculation
    assert drafts_of(plain)[0] == 0
    assert drafts_of(plain, speculation="ngram")[0] > 0

    engine.accepted_at.clear()
    wide = {"method": "prompt_lookup", "num_speculative_tokens": 3}
    assert drafts_of(plain, speculation=wide)[0] > 0
    assert len(engine.accepted_at) == 3


def test_a_request_with_the_engines_method_keeps_its_other_settings(guessing: LLM) -> None:
    guessing.llm_engine.parts.speculation.accepted_at.clear()

    assert drafts_of(guessing, speculation={"num_speculative_tokens": 2})[0] > 0
    assert len(guessing.llm_engine.parts.speculation.accepted_at) == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("nrgam", "speculation.method must be one of .*, got 'nrgam'; did you mean 'ngram'"),
        ("draft_model", "needs an engine that was made with"),
        ({"method": "ngram", "k": 3}, "speculation has no key 'k' with method 'ngram'"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "speculation.num_speculative_tokens is 0",
        ),
        ({"method": "ngram", "prompt_lookup_max": 1, "prompt_lookup_min": 2}, "at most"),
        ({"num_speculative_tokens": 3}, "speculation.method must be one of"),
    ],
)
def test_what_cannot_guess_is_refused(plain: LLM, asked: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        drafts_of(plain, speculation=asked)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "eagle"}, "speculative_config.method must be one of"),
        ({"num_speculative_tokens": 2}, "speculative_config.method must be one of"),
        ({"method": "draft_model"}, "speculative_config needs the key 'model'"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "speculative_config.prompt_lookup_max is 0"),
    ],
)
def test_a_bad_speculative_config_is_refused(
    make_llm: Maker, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        make_llm(table(), model=MODEL, speculative_config=config)


def test_a_draft_model_with_another_tokenizer_is_refused(make_llm: Maker, tmp_path: Path) -> None:
    other = {**MODEL, "tokenizer": byte_tokenizer(("ab",), ("<eos>",), eos="<eos>")}
    write_table_model(tmp_path, table(), **other)
    config = {"method": "draft_model", "model": str(tmp_path)}

    with pytest.raises(ValidationError, match=r"another tokenizer than the engine's model \(\d+ "):
        make_llm(table(), model=MODEL, speculative_config=config)


def test_a_draft_model_like_the_model_guesses_right_even_where_tokens_are_drawn(
    make_llm: Maker, tmp_path: Path
) -> None:
    write_table_model(tmp_path, table(), **MODEL)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 5}
    llm = make_llm(table(), model=MODEL, speculative_config=config)

    for fields in ({"temperature": 1.3}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}):
        before = counters(llm)
        drafts_of(llm, seed=4, **fields)
        after = counters(llm)
        guessed, right = (
            after[name] - before[name]
            for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        )
        assert right == guessed > 20


def test_a_driver_that_takes_tokens_back_does_the_same(plain: LLM, guessing: LLM) -> None:
    driver = {"driver": "backtrack", "strings": ["67", "CDE", "yz"]}
    params = [
        SamplingParams(driver=driver, max_tokens=40, temperature=0.9, seed=seed, ignore_eos=True)
        for seed in range(12)
    ]
    asked = [[50 + (seed + place) % 10 for place in range(25)] for seed in range(12)]
    before = counters(guessing)["spec_decode_num_accepted_tokens"]

    found = guessing.generate(asked, params, use_tqdm=False)
    expected = plain.generate(asked, params, use_tqdm=False)

    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
        assert "67" not in one.outputs[0].text
    assert counters(guessing)["spec_decode_num_accepted_tokens"] > before + 50
    assert guessing.llm_engine.parts.pool.num_used == 0


def test_lanes_that_a_driver_chooses_for_do_not_speculate(guessing: LLM) -> None:
    guessed, output = drafts_of(guessing, driver={"driver": "beam_search", "width": 2})

    assert guessed == 0
    assert output.plan is not None
    assert any("no speculation: driver 'beam_search'" in note for note in output.plan.notes)


def test_the_metrics_of_a_request_count_its_guesses(make_llm: Maker) -> None:
    llm = make_llm(table(), model=MODEL, speculative_config=NGRAM, disable_log_stats=False)

    guessed, output = drafts_of(llm)

    assert output.metrics is not None
    assert output.metrics.num_draft_tokens == guessed
    assert 0 < output.metrics.num_accepted_draft_tokens <= guessed
    per_place = next(m for m in llm.get_metrics() if m.name.endswith("accepted_tokens_per_pos"))
    assert sum(per_place.values) == counters(llm)["spec_decode_num_accepted_tokens"]


def test_an_abort_in_the_middle_leaves_nothing(make_llm: Maker, tmp_path: Path) -> None:
    write_table_model(tmp_path, table(noise=0.6), **MODEL)
    config = {"method": "draft_model", "model": str(tmp_path)}
    engine = make_llm(table(), model=MODEL, speculative_config=config).llm_engine
    for number in range(6):
        engine.add_request(str(number), PROMPT, SamplingParams(max_tokens=60, seed=number))
    for _ in range(5):
        engine.step()

    engine.abort_request([str(number) for number in range(6)])
    engine.step()

    assert engine.parts.pool.num_used == 0
    assert engine.parts.further[0].pool.num_used == 0
    assert engine.parts.speculation.num_users == 0


def test_a_draft_model_sleeps_and_wakes_with_the_engine(make_llm: Maker, tmp_path: Path) -> None:
    write_table_model(tmp_path, table(noise=0.3), **MODEL)
    config = {"method": "draft_model", "model": str(tmp_path)}
    llm = make_llm(table(), model=MODEL, speculative_config=config, enable_sleep_mode=True)
    engine = llm.llm_engine
    expected = drafts_of(llm)[1].outputs[0].token_ids

    for level in (1, 2):
        engine.add_request(
            "a", PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        )
        for _ in range(4):
            engine.step()
        engine.sleep(level, mode="keep")
        engine.wake_up()
        while engine.has_unfinished_requests():
            said = engine.step()
        assert said[-1].outputs[0].token_ids == expected


# --- proposers of others ------------------------------------------------------------------------


class Successor(Proposer):
    """A guest that knows the model's cycles."""

    name = "successor"
    calls: ClassVar[int] = 0

    def propose(self, prompt_ids: Sequence[int], output_ids: Sequence[int], k: int) -> list[int]:
        type(self).calls += 1
        last = output_ids[-1]
        return [last - 9 if last % 10 == 9 else last + 1]


class Wild(Proposer):
    """Guesses ids that no vocabulary has."""

    name = "wild"

    def propose(self, prompt_ids: Sequence[int], output_ids: Sequence[int], k: int) -> list[int]:
        return [VOCABULARY + 1] if len(output_ids) > 5 else [3]


class Breaks(Proposer):
    """Raises at once."""

    name = "breaks"

    def propose(self, prompt_ids: Sequence[int], output_ids: Sequence[int], k: int) -> list[int]:
        raise ArithmeticError("no idea")


def offered(*proposers: type[Proposer]) -> ModuleType:
    """A plugin module that offers them."""
    module = ModuleType("guests")

    @hookimpl
    def decodekit_proposers() -> list[type[Proposer]]:
        return list(proposers)

    module.decodekit_proposers = decodekit_proposers  # type: ignore[attr-defined]
    return module


def test_a_guests_proposer_is_asked_once_a_step(make_llm: Maker, plain: LLM) -> None:
    llm = make_llm(table(), model=MODEL, plugins=[offered(Successor, Wild, Breaks)])

    guessed, output = drafts_of(llm, speculation="successor")

    assert 0 < guessed <= Successor.calls < 30
    assert_same(output, drafts_of(plain)[1])


@pytest.mark.parametrize(
    ("name", "said"),
    [("wild", "ValueError: it guessed 258"), ("breaks", "ArithmeticError: no idea")],
)
def test_a_proposer_that_fails_stops_guessing_and_the_plan_tells(
    make_llm: Maker, plain: LLM, name: str, said: str
) -> None:
    llm = make_llm(table(), model=MODEL, plugins=[offered(Successor, Wild, Breaks)])
    fields = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    alone = SamplingParams(speculation=name, **fields)
    beside = SamplingParams(speculation="successor", **fields)

    outputs = llm.generate([PROMPT, PROMPT], [alone, beside], use_tqdm=False)
    [expected] = plain.generate([PROMPT], SamplingParams(**fields), use_tqdm=False)

    for output in outputs:
        assert_same(output, expected)
    assert outputs[0].plan is not None
    assert any(said in note for note in outputs[0].plan.notes)
    assert outputs[1].plan is not None
    assert not any("speculation" in note for note in outputs[1].plan.notes)
