"""Constrained requests inside the engine: company, preemption, stops, biases, reasoning, errors.

A backend of this file's own, registered by the hook, stands for any third party's.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from decodekit import LLM, SamplingParams
from decodekit.core.constraint import (
    Fill,
    FillState,
    GrammarSpec,
    Refusal,
    Suited,
    Vocabulary,
)
from decodekit.core.engine import LLMEngine
from decodekit.core.errors import ValidationError
from decodekit.core.hookspecs import hookimpl
from decodekit.core.outputs import CompletionOutput, RequestOutput
from decodekit.plugins.author.table_model import blank_table, byte_tokenizer, flat_table

Maker = Callable[..., LLM]
EXTRA = ("yes", "no", "ye", "es", "</think>")
SPECIAL = ("<eos>", "<end>", "<think>")
EOS, END, THINK = 261, 262, 263
CLOSE = 260
NUM = 264
GATE = threading.Event()


class Listed:
    """A backend that knows lists of texts, byte by byte; "slow" ones wait for GATE."""

    name: ClassVar[str] = "listed"
    aliases: ClassVar[tuple[str, ...]] = ("acme_listed",)
    rank: ClassVar[int] = 99

    @classmethod
    def missing(cls) -> str | None:
        return None

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
        self.vocabulary = vocabulary

    def suit(self, spec: GrammarSpec) -> Suited:
        refusals = () if spec.kind == "choice" else (Refusal("", spec.kind, "it knows lists only"),)
        return Suited(spec, refusals)

    def compile(self, spec: GrammarSpec) -> "Program":
        texts = json.loads(spec.text)
        if "slow" in texts:
            assert GATE.wait(20)
        if "broken" in texts:
            raise ValueError("choice holds 'broken', which this backend cannot compile")
        return Program([text.encode() for text in texts], self.vocabulary)


class Program:
    memory_bytes = 0

    def __init__(self, texts: list[bytes], vocabulary: Vocabulary) -> None:
        self.texts = texts
        self.vocabulary = vocabulary

    def matcher(self, stop_ids: Sequence[int]) -> "Walker":
        return Walker(self, tuple(stop_ids), [])


class Walker:
    failure = None

    def __init__(self, program: Program, stop_ids: tuple[int, ...], ids: list[int]) -> None:
        self.program = program
        self.stop_ids = stop_ids
        self.ids = ids

    @property
    def is_terminated(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self.stop_ids

    @property
    def text(self) -> bytes:
        return b"".join(self.program.vocabulary.tokens[i] for i in self.ids)

    @property
    def is_completed(self) -> bool:
        return self.is_terminated or self.text in self.program.texts

    def legal(self) -> list[int]:
        if self.is_terminated:
            return []
        text, tokens = self.text, self.program.vocabulary.tokens
        found = [
            i
            for i, token in enumerate(tokens)
            if token and any(one.startswith(text + token) for one in self.program.texts)
        ]
        return found + (list(self.stop_ids) if text in self.program.texts else [])

    def fill(self, bitmask: torch.Tensor, row: int) -> Fill:
        legal = self.legal()
        bits = torch.zeros(bitmask.shape[1] * 32, dtype=torch.int64)
        bits[legal] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        bitmask[row] = words.to(torch.int32)
        state = FillState.CONSTRAINED if legal else FillState.DEAD
        ended = self.is_completed and set(legal) <= set(self.stop_ids)
        return Fill(state, legal[0] if len(legal) == 1 else None, ended)

    def accept(self, token: int) -> bool:
        if token not in self.legal():
            return False
        self.ids.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.ids[len(self.ids) - count :]

    def fork(self) -> "Walker":
        return Walker(self.program, self.stop_ids, list(self.ids))

    def rebuild(self, tokens: Sequence[int]) -> None:
        self.ids = []
        for token in tokens:
            if not self.accept(token):
                raise ValueError(f"token {token} is not legal")

    def forced(self) -> Sequence[int]:
        return ()


def plugin() -> ModuleType:
    module = ModuleType("listed_backend")
    hook = hookimpl(lambda: [Listed])
    module.decodekit_constraint_backends = hook  # type: ignore[attr-defined]
    return module


def tokenizer() -> Any:
    return byte_tokenizer(EXTRA, SPECIAL, eos="<eos>")


def engine(make_llm: Maker, **more: Any) -> LLM:
    table = more.pop("table", None)
    return make_llm(
        flat_table(NUM, NUM) if table is None else table,
        model={"tokenizer": tokenizer(), "eos_token_id": [EOS, END]},
        plugins=[plugin()],
        **more,
    )


@pytest.fixture(scope="module")
def llm(make_llm: Maker) -> LLM:
    """Every one of 264 tokens is as likely as any other, so that only the grammar has a say."""
    return engine(make_llm)


def one(llm: LLM, constraint: Any, **more: Any) -> CompletionOutput:
    (output,) = run(llm, [params(constraint, **more)])
    return output.outputs[0]


def params(constraint: Any, **more: Any) -> SamplingParams:
    if isinstance(constraint, list):
        constraint = {"choice": constraint, "backend": "listed"}
    given = {"max_tokens": 40, "seed": 1, **more}
    return SamplingParams(structured_outputs=constraint, **given)


def run(llm: LLM, wanted: Sequence[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([[65, 66]] * len(wanted), list(wanted), use_tqdm=False)


# --- a third party's backend ------------------------------------------------------------------


def test_a_registered_backend_constrains_and_ends_its_request(llm: LLM) -> None:
    found = {one(llm, ["yes", "no"], seed=seed).text for seed in range(20)}

    assert found == {"yes", "no"}
    output = one(llm, ["yes", "no"])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.complete is True
    assert output.token_ids[-1] not in (EOS, END)  # nothing was spent on the end token


def test_an_alias_names_the_backend_and_an_unknown_name_lists_the_known(llm: LLM) -> None:
    assert one(llm, {"choice": ["no"], "backend": "acme_listed"}).text == "no"

    with pytest.raises(
        ValidationError, match=r"backend must be one of .*listed.*'nowhere'"
    ) as caught:
        one(llm, {"choice": ["no"], "backend": "nowhere"})
    assert caught.value.parameter == "structured_outputs.backend"


def test_what_the_named_backend_cannot_do_is_refused_with_its_reason(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="it knows lists only"):
        one(llm, {"regex": "a+", "backend": "listed"})


# --- compilation --------------------------------------------------------------------------------


def test_a_request_that_waits_for_its_grammar_holds_nobody_up(llm: LLM) -> None:
    llm_engine, GATED = llm.llm_engine, params(["slow"])
    GATE.clear()
    llm_engine.add_request("slow", [65], GATED)
    llm_engine.add_request("gone", [65], params(["slow", "x"]))
    llm_engine.add_request("fast", [65], SamplingParams(max_tokens=3, ignore_eos=True))
    done = drain(llm_engine, until="fast")

    assert done["fast"].outputs[0].finish_reason == "length"
    assert not done.get("slow") and llm_engine.step() == []  # nothing else can run: it waits
    llm_engine.abort_request("gone")
    aborted = {out.request_id: out for out in llm_engine.step()}["gone"]
    assert aborted.outputs[0].finish_reason == "abort"
    GATE.set()
    done = drain(llm_engine, until="slow")
    assert done["slow"].outputs[0].text == "slow"
    assert not llm_engine.has_unfinished_requests()


def drain(llm_engine: LLMEngine, until: str) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while until not in done:
        done.update({out.request_id: out for out in llm_engine.step() if out.finished})
    return done


def test_a_grammar_that_does_not_compile_ends_its_own_request_alone(llm: LLM) -> None:
    bad, good = run(llm, [params(["broken"]), params(["no"])])

    assert bad.outputs[0].finish_reason == "error"
    assert "cannot compile" in str(bad.outputs[0].error)
    assert good.outputs[0].text == "no"


# --- company and preemption -----------------------------------------------------------------------


def words(seed: int) -> list[str]:
    return [
        f"{chr(97 + (seed * 7 + i * 3) % 26)}{'xyz'[i % 3] * (1 + seed % 5)}{i}" for i in range(5)
    ]


def crowd() -> list[SamplingParams]:
    chains: list[dict[str, Any]] = [
        {},
        {"top_p": 0.7, "temperature": 0.8},
        {"top_k": 3},
        {"min_p": 0.1, "presence_penalty": 0.5},
        {"temperature": 0.0},
        {"logprobs": 2, "repetition_penalty": 1.2},
    ]
    return [
        params(words(seed), seed=seed, max_tokens=30, **chains[seed % len(chains)])
        for seed in range(32)
    ]


def test_a_crowd_under_preemption_equals_its_solo_results(llm: LLM, make_llm: Maker) -> None:
    wanted = crowd()
    solo = [run(llm, [each])[0].outputs[0] for each in wanted]
    small = engine(make_llm, max_num_seqs=8, block_size=4, kv_cache_memory_bytes=12 * 2**15)
    together = [out.outputs[0] for out in run(small, wanted)]

    for seed, (alone, crowded) in enumerate(zip(solo, together, strict=True)):
        assert crowded.token_ids == alone.token_ids
        assert crowded.text in words(seed)
    assert small.llm_engine.parts.scheduler.num_preemptions > 0


def test_free_requests_beside_constrained_ones_are_as_alone(llm: LLM) -> None:
    free = SamplingParams(max_tokens=12, seed=5, top_p=0.9, ignore_eos=True)
    (alone,) = run(llm, [free])
    mixed = run(llm, [params(["yes", "no"]), free, params(["zebra"])])

    assert mixed[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_every_branch_of_a_request_has_a_matcher_of_its_own(llm: LLM) -> None:
    (output,) = run(llm, [params(["abcde", "abxyz", "no"], n=8)])

    found = [branch.text for branch in output.outputs]
    assert set(found) <= {"abcde", "abxyz", "no"} and len(set(found)) > 1


# --- stops, minima, biases ------------------------------------------------------------------------


def test_no_end_id_passes_before_the_value_may_end(llm: LLM) -> None:
    bias = {EOS: 100.0, END: 100.0, ord("q"): 100.0}
    output = one(llm, ["aaaa", "bbbb"], logit_bias=bias, stop_token_ids=[ord("q")])

    assert output.text in ("aaaa", "bbbb")


def test_a_value_that_may_go_on_ends_by_a_stop_id_or_goes_on(llm: LLM) -> None:
    longer = one(llm, ["a", "ab"], logit_bias={ord("b"): 100.0})
    shorter = one(llm, ["a", "ab"], logit_bias={EOS: 100.0})

    assert (longer.text, shorter.text) == ("ab", "a")
    assert shorter.finish_reason == "stop" and shorter.complete is True


def test_the_grammar_wins_over_min_tokens_and_ignore_eos(llm: LLM) -> None:
    short = one(llm, ["no"], min_tokens=20)
    empty = one(llm, [""], min_tokens=5)
    ignoring = one(llm, ["a", "ab"], ignore_eos=True, logit_bias={EOS: 100.0})

    assert (short.text, short.finish_reason) == ("no", "stop")
    assert (empty.text, empty.finish_reason) == ("", "stop")
    assert (ignoring.text, ignoring.finish_reason) == ("a", "stop")
    held_back = one(llm, ["a", "ab"], min_tokens=2, logit_bias={EOS: 100.0})
    assert held_back.text == "ab"


def test_a_stop_string_cuts_the_text_and_says_so(llm: LLM) -> None:
    output = one(llm, ["one, two"], stop=[","])

    assert (output.text, output.stop_reason, output.complete) == ("one", ",", False)


def test_max_tokens_at_the_last_token_is_an_end_and_before_it_a_cut(llm: LLM) -> None:
    assert one(llm, ["abc"], max_tokens=3).finish_reason == "stop"
    cut = one(llm, ["abcd"], max_tokens=3)
    assert (cut.finish_reason, cut.complete) == ("length", False)


def test_masks_that_leave_nothing_together_are_named_together(llm: LLM) -> None:
    banned = one(llm, ["k"], logit_bias={ord("k"): -float("inf")})
    apart = one(llm, ["k"], allowed_token_ids=[ord("j")])
    words = one(llm, ["k"], bad_words=["k"])

    for output, name in ((banned, "logit_bias"), (apart, "allowed_tokens"), (words, "bad_words")):
        assert output.finish_reason == "error"
        assert f"stage={name}" in str(output.error)
        assert "'grammar' allows 1 token" in str(output.error) and "'k'" in str(output.error)
    assert one(llm, ["k"], bad_words=["k"], on_dead_row="relax").text == "k"


def test_a_processor_sees_legal_tokens_only(llm: LLM) -> None:
    seen: list[int] = []

    def count(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(int((logits > -torch.inf).sum()))
        return logits

    one(llm, ["yes", "no"], logits_processors=[count])
    assert seen and max(seen) <= 5  # "y", "ye", "yes", "n", "no" at most


def test_ids_past_the_tokenizer_stay_impossible(make_llm: Maker) -> None:
    wide = make_llm(
        flat_table(NUM, NUM),
        model={"tokenizer": tokenizer(), "eos_token_id": EOS, "num_rows": 1000},
        plugins=[plugin()],
    )

    assert {one(wide, ["yes", "no"], seed=seed).text for seed in range(8)} == {"yes", "no"}


# --- reasoning ------------------------------------------------------------------------------------


def thinker(make_llm: Maker, path: str, **more: Any) -> LLM:
    """A model that would write `path` for ever."""
    table = blank_table(NUM)
    ids = tokenizer().encode(path, add_special_tokens=False)
    for before, after in zip(ids, ids[1:], strict=False):
        table[before, after] = 0.0
    markers = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    return engine(make_llm, table=table, reasoning_config=markers, **more)


def test_the_grammar_starts_after_the_reasoning(make_llm: Maker) -> None:
    model = thinker(make_llm, "<think>qrstuv")
    wanted = params(["yes", "no"], temperature=0.0, thinking_token_budget=4)
    (inside,) = model.generate([{"prompt": "<think>"}], [wanted], use_tqdm=False)
    found = inside.outputs[0]

    assert found.text.startswith("qrst</think>"), found
    assert found.text.removeprefix("qrst</think>") in ("yes", "no")
    assert found.complete is True


def test_a_prompt_without_a_marker_may_think_or_answer(make_llm: Maker) -> None:
    model = thinker(make_llm, "a<think>qrstuv")
    thinking = params(["yes", "no"], temperature=0.0, thinking_token_budget=3)
    (thought,) = model.generate(["a"], [thinking], use_tqdm=False)
    (answer,) = model.generate(["v"], [params(["yes", "no"], temperature=0.0)], use_tqdm=False)

    assert thought.outputs[0].token_ids[0] == THINK
    assert thought.outputs[0].text.rpartition("</think>")[2] in ("yes", "no")
    assert answer.outputs[0].complete is True


def test_an_end_before_the_reasoning_ends_is_told(make_llm: Maker) -> None:
    model = thinker(make_llm, "<think>qrstuv")
    (output,) = model.generate(
        ["<think>"], [params(["yes"], temperature=0.0, max_tokens=3)], use_tqdm=False
    )

    assert output.outputs[0].complete is False
    assert "before its reasoning did" in str(output.outputs[0].parse_error)
