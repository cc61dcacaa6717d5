"""Processors written against vLLM's interface, run by the engine with the import line changed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import CompletionOutput
from decodekit.plugins.author.table_model import flat_table
from decodekit.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)

Maker = Callable[..., LLM]


class OnlyToken(LogitsProcessor):
    """Leaves the token that a request names in `only_token`, by a dict of rows."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        token = (sampling_params.extra_args or {}).get("only_token")
        if token is not None and not isinstance(token, int):
            raise ValueError(f"only_token must be an int, got {token!r}")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.tokens: dict[int, int] = {}
        self.most = vllm_config.scheduler_config.max_num_seqs
        self.size = vllm_config.model_config.get_vocab_size()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.tokens,
            batch_update,
            lambda params, prompt, output: (params.extra_args or {}).get("only_token"),
        )

    def apply(self, logits: Tensor) -> Tensor:
        assert len(logits) <= self.most and logits.shape[1] == self.size
        assert logits.dtype == torch.float32
        if not self.tokens:
            return logits
        rows = torch.tensor(list(self.tokens))
        columns = torch.tensor(list(self.tokens.values()))
        kept = logits[rows, columns].clone()
        logits[rows] = -torch.inf
        logits[rows, columns] = kept
        return logits


class OwnMinP(LogitsProcessor):
    """min-p over a column of the batch, as vLLM's own; cannot change the winner."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.least: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.least,
            batch_update,
            lambda params, prompt, output: (params.extra_args or {}).get("own_min_p"),
        )

    def apply(self, logits: Tensor) -> Tensor:
        column = torch.zeros(len(logits), 1)
        for row, least in self.least.items():
            column[row] = least
        shares = logits.softmax(1)
        return logits.masked_fill(shares < column * shares.amax(1, keepdim=True), -torch.inf)


class Steering(AdapterLogitsProcessor):
    """A request-level callable driven by extra_args: raises the token after the last one."""

    seen: list[tuple[list[int], list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        strength = (params.extra_args or {}).get("steer")
        if strength is None:
            return None

        def steer(prompt_ids: list[int], output_ids: list[int], row: Tensor) -> Tensor:
            if strength == "fail":
                raise RuntimeError("told to fail")
            Steering.seen.append((list(prompt_ids), list(output_ids)))
            last = (output_ids or prompt_ids)[-1]
            row[(last + 1) % 97] += strength
            return row

        return steer


ALL = [OnlyToken, OwnMinP, Steering]


@pytest.fixture(scope="module")
def table() -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return (torch.randint(-80, 80, (97, 97), generator=generator) / 16).float()


@pytest.fixture(scope="module")
def llm(make_llm: Maker, table: Tensor) -> LLM:
    return make_llm(table, logits_processors=ALL)


def run(llm: LLM, params: list[SamplingParams]) -> list[list[CompletionOutput]]:
    prompts = [[3 + row, 5] for row in range(len(params))]
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def tokens(found: list[list[CompletionOutput]]) -> list[list[list[int]]]:
    return [[list(each.token_ids) for each in outputs] for outputs in found]


def asking(row: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"extra_args": {"only_token": 40 + row}},
        {"extra_args": {"own_min_p": 0.2}, "temperature": 1.4},
        {"extra_args": {"steer": 30.0}, "temperature": 0.0},
        {"extra_args": {"steer": 2.0, "own_min_p": 0.1}, "n": 2},
        {},
        {"presence_penalty": 1.0, "top_k": 10, "extra_args": {"steer": 1.0}},
        {"chain": ["vllm.own_min_p", "top_k"], "top_k": 9, "extra_args": {"own_min_p": 0.3}},
    ]
    base: dict[str, Any] = {"seed": row, "max_tokens": 4 + 3 * (row % 6), "ignore_eos": True}
    return SamplingParams(**base, **kinds[row % len(kinds)])


def test_each_does_what_its_request_asks(llm: LLM) -> None:
    only, steered, plain = run(llm, [asking(0), asking(2), asking(4)])

    assert set(only[0].token_ids) == {40}
    path = [5, *steered[0].token_ids]
    assert all(after == (before + 1) % 97 for before, after in zip(path, path[1:], strict=False))
    assert plain[0].error is None


def test_company_and_order_do_not_show(llm: LLM) -> None:
    params = [asking(row) for row in range(28)]
    together = tokens(run(llm, params))

    backwards = tokens(
        [
            output.outputs
            for output in llm.generate(
                [[3 + row, 5] for row in reversed(range(28))], params[::-1], use_tqdm=False
            )
        ]
    )

    alone = [
        tokens([llm.generate([[3 + row, 5]], own, use_tqdm=False)[0].outputs])[0]
        for row, own in enumerate(params)
    ]
    assert together == alone
    assert backwards[::-1] == alone


def test_preemption_changes_no_token(make_llm: Maker, llm: LLM, table: Tensor) -> None:
    backend = llm.llm_engine.parts.runner.backend
    block = backend.bytes_per_block(backend.layout)
    small = make_llm(
        table, logits_processors=ALL, kv_cache_memory_bytes=14 * block, max_model_len=128
    )
    params = [asking(row) for row in range(14)]
    for own in params:
        own.max_tokens = 50

    found = tokens(run(small, params))

    assert small.llm_engine.parts.scheduler.num_preemptions > 0
    assert found == tokens(run(llm, params))


def test_the_own_min_p_draws_what_the_built_in_draws(llm: LLM) -> None:
    shared: dict[str, Any] = {"seed": 3, "temperature": 1.5, "max_tokens": 40, "ignore_eos": True}

    own, built_in = run(
        llm,
        [
            SamplingParams(extra_args={"own_min_p": 0.15}, **shared),
            SamplingParams(min_p=0.15, **shared),
        ],
    )
    (same_prompt,) = llm.generate([[3, 5]], SamplingParams(min_p=0.15, **shared), use_tqdm=False)

    assert own[0].token_ids == same_prompt.outputs[0].token_ids
    assert built_in[0].error is None


def test_they_stand_where_vllm_has_them(llm: LLM) -> None:
    params = SamplingParams(
        logit_bias={1: 1.0},
        presence_penalty=0.5,
        repetition_penalty=1.1,
        temperature=0.7,
        min_p=0.1,
        top_k=5,
        top_p=0.9,
    )

    order = [step.stage for step in llm.explain(params).order]
    greedy = [step.stage for step in llm.explain(SamplingParams(temperature=0)).order]

    assert order == [
        "logit_bias",
        "vllm.only_token",
        "vllm.steering",
        "repetition_penalty",
        "presence_penalty",
        "temperature",
        "min_p",
        "vllm.own_min_p",
        "top_k",
        "top_p",
        "race",
    ]
    assert greedy == ["vllm.only_token", "vllm.steering", "greedy"]  # invariant: left out


def test_histories_are_whole_and_without_placeholders(llm: LLM) -> None:
    Steering.seen.clear()
    params = SamplingParams(extra_args={"steer": 0.5}, max_tokens=6, seed=2, ignore_eos=True)

    ((found,),) = run(llm, [params])

    assert Steering.seen == [([3, 5], list(found.token_ids)[:count]) for count in range(6)]


def test_validate_params_refuses_at_admission(llm: LLM) -> None:
    with pytest.raises(ValueError, match="OnlyToken refuses .* only_token must be an int"):
        run(llm, [asking(4), SamplingParams(extra_args={"only_token": "five"})])

    assert not llm.llm_engine.has_unfinished_requests()
    assert run(llm, [asking(4)])[0][0].error is None


def test_a_failure_ends_its_request_and_no_other(llm: LLM) -> None:
    params = [asking(row) for row in range(7)]
    expected = tokens(run(llm, [*params, SamplingParams(max_tokens=2)]))[:7]

    found = run(llm, [*params, SamplingParams(extra_args={"steer": "fail"}, max_tokens=9)])

    (failed,) = found[7]
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "stage=vllm.steering" in failed.error and "told to fail" in failed.error
    assert tokens(found[:7]) == expected


def test_a_masked_token_stays_masked_and_the_dead_row_is_told(llm: LLM) -> None:
    params = SamplingParams(extra_args={"only_token": 40}, allowed_token_ids=[1, 2], max_tokens=3)
    relaxed = params.clone()
    relaxed.on_dead_row = "relax"

    (failed,), (saved,) = run(llm, [params, relaxed])

    assert failed.error is not None and "stage=vllm.only_token" in failed.error
    assert set(saved.token_ids) <= {1, 2}


def test_a_chain_of_ones_own_may_leave_them_out(llm: LLM) -> None:
    params = SamplingParams(chain=["top_k"], top_k=1, extra_args={"only_token": 40}, max_tokens=3)

    (output,) = llm.generate([[3, 5]], params, use_tqdm=False)

    assert 40 not in output.outputs[0].token_ids
    assert output.plan is not None
    assert any("'vllm.only_token' does not run" in note for note in output.plan.notes)


def test_they_may_come_and_go_while_the_engine_runs(make_llm: Maker) -> None:
    llm = make_llm(flat_table(97))
    params = SamplingParams(extra_args={"only_token": 40}, max_tokens=3, ignore_eos=True)

    llm.register(OnlyToken)
    with_it = run(llm, [params])
    llm.unregister("vllm.only_token")
    without = run(llm, [params])

    assert list(with_it[0][0].token_ids) == [40] * 3
    assert list(without[0][0].token_ids) != [40] * 3


PACKAGE = '''
from decodekit.v1.sample.logits_processor import LogitsProcessor


class Holder:
    class Zero(LogitsProcessor):
        """Leaves token 0."""

        def __init__(self, vllm_config, device, is_pin_memory):
            pass

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            pass

        def apply(self, logits):
            logits[:, 1:] = -float("inf")
            return logits


Zero = Holder.Zero
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a distribution with a processor as an entry point of vLLM's group."""
    (tmp_path / "zero_processor.py").write_text(PACKAGE)
    info = tmp_path / "zero_processor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zero-processor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.logits_processors]\nzero = zero_processor:Zero\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "zero_processor"
    sys.modules.pop("zero_processor", None)


@pytest.mark.parametrize(
    ("engine", "runs"),
    [
        ({}, False),
        ({"vllm_entry_points": True}, True),
        ({"logits_processors": ["zero_processor:Holder.Zero"]}, True),
        ({"logits_processors": ["zero_processor:Zero"], "vllm_entry_points": True}, True),
    ],
)
def test_names_and_entry_points_are_loaded_on_request(
    make_llm: Maker, package: str, engine: dict[str, Any], runs: bool
) -> None:
    llm = make_llm(flat_table(97), **engine)

    found = run(llm, [SamplingParams(max_tokens=20, seed=1, ignore_eos=True)])[0][0]

    assert (set(found.token_ids) == {0}) is runs
    steps = [step.stage for step in llm.explain().order]
    assert steps.count("vllm.zero") == int(runs)


def test_what_cannot_be_loaded_is_an_error_at_start(make_llm: Maker) -> None:
    with pytest.raises(RuntimeError, match="no_such_module"):
        make_llm(flat_table(97), logits_processors=["no_such_module:X"])
    with pytest.raises(ValueError, match="LogitsProcessor classes"):
        make_llm(flat_table(97), logits_processors=[int])
