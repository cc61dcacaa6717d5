"""AsyncLLM streams what LLM returns; whoever leaves, errs or stops disturbs nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from decodekit import LLM, AsyncLLM, SamplingParams
from decodekit.core.errors import EngineDeadError, ParameterTypeError, ValidationError
from decodekit.core.outputs import RequestOutput
from decodekit.core.params import RequestOutputKind
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table, write_table_model

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20, "logprobs": 2},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8, "frequency_penalty": 0.7},
    {"temperature": 1.0, "seed": 4, "stop": ["a", "q"], "min_tokens": 3},
    {"temperature": 1.0, "seed": 5, "n": 2},
]
TABLE = flat_table(260, num_best=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of 128 equally likely ASCII bytes."""
    tokenizer = byte_tokenizer(special=["<end>", "<x>", "<y>", "<z>"], eos="<end>")
    return str(write_table_model(tmp_path_factory.mktemp("async"), TABLE, tokenizer=tokenizer))


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    """The same model, offline."""
    return LLM(folder, max_num_seqs=32)


@pytest.fixture(scope="module")
def shared(folder: str) -> Iterator[AsyncLLM]:
    """An engine that every test may use and none may stop."""
    engine = AsyncLLM(folder, max_num_seqs=32)
    yield engine
    engine.shutdown()


@pytest.fixture
def own(folder: str) -> Iterator[AsyncLLM]:
    """An engine of one test."""
    engine = AsyncLLM(folder, max_num_seqs=32)
    yield engine
    engine.shutdown()


async def collect(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str | None = None
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def answers(engine: AsyncLLM) -> bool:
    """Whether a plain greedy request gives its known answer."""
    [*_, last] = await collect(engine, [5], SamplingParams(temperature=0, max_tokens=4))
    return list(last.outputs[0].token_ids) == [0, 0, 0, 0]


def blocks_in_use(engine: AsyncLLM) -> int:
    return engine.engine.parts.pool.num_used


async def settled(engine: AsyncLLM) -> bool:
    """Wait until the engine has dropped what nobody listens to; False after ten seconds."""
    for _ in range(1000):
        if not engine.engine.requests and not blocks_in_use(engine):
            return True
        await asyncio.sleep(0.01)
    return False


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, 120))


def plain(llm: LLM, prompt: Any, params: SamplingParams) -> list[tuple[str, list[int], Any]]:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return [(part.text, list(part.token_ids), part.finish_reason) for part in output.outputs]


# --- the three kinds of stream --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_joined_deltas_equal_the_plain_answer(
    kind: dict[str, Any], llm: LLM, shared: AsyncLLM
) -> None:
    params = SamplingParams(max_tokens=30, **kind)
    expected = plain(llm, "hello", params)
    params.output_kind = RequestOutputKind.DELTA

    outputs = run(collect(shared, "hello", params))

    joined = [["", [], None] for _ in expected]
    for output in outputs:
        for part in output.outputs:
            mine = joined[part.index]
            mine[0] += part.text
            mine[1] = [*mine[1], *part.token_ids]
            mine[2] = part.finish_reason
            assert part.logprobs is None or len(part.logprobs) == len(part.token_ids)
    assert [tuple(part) for part in joined] == expected
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cumulative_outputs_grow_to_the_plain_answer(
    kind: dict[str, Any], llm: LLM, shared: AsyncLLM
) -> None:
    params = SamplingParams(max_tokens=30, **kind)
    expected = plain(llm, "hello", params)

    outputs = run(collect(shared, "hello", params))

    last: dict[int, Any] = {}
    for output in outputs:
        for part in output.outputs:
            before = last.get(part.index)
            assert before is None or part.text.startswith(before.text)
            assert before is None or list(part.token_ids)[: len(before.token_ids)] == list(
                before.token_ids
            )
            last[part.index] = part
    found = [last[index] for index in range(len(expected))]
    assert [(part.text, list(part.token_ids), part.finish_reason) for part in found] == expected
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_final_only_yields_once_with_every_answer(llm: LLM, shared: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=9, n=3, seed=3, output_kind=RequestOutputKind.FINAL_ONLY)

    [output] = run(collect(shared, "hello", params))

    found = [(part.text, list(part.token_ids), part.finish_reason) for part in output.outputs]
    assert output.finished
    assert found == plain(llm, "hello", params)


def test_a_slow_reader_of_deltas_loses_nothing(llm: LLM, shared: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=40, n=2, seed=8, logprobs=1)
    expected = plain(llm, "hello", params)
    params.output_kind = RequestOutputKind.DELTA

    async def read() -> list[list[int]]:
        tokens: list[list[int]] = [[], []]
        async for output in shared.generate("hello", params):
            await asyncio.sleep(0.05)
            for part in output.outputs:
                tokens[part.index] += part.token_ids
                assert part.logprobs is not None
                assert len(part.logprobs) == len(part.token_ids)
        return tokens

    assert run(read()) == [ids for _, ids, _ in expected]


def test_twenty_streams_at_once_equal_their_plain_answers(llm: LLM, shared: AsyncLLM) -> None:
    params = [
        SamplingParams(max_tokens=5 + i, **{**KINDS[i % len(KINDS)], "seed": i}) for i in range(20)
    ]
    prompts = [f"prompt {'x' * i}" for i in range(20)]
    expected = [plain(llm, prompt, own) for prompt, own in zip(prompts, params, strict=True)]

    async def all_streams() -> list[list[RequestOutput]]:
        streams = (
            collect(shared, prompt, own) for prompt, own in zip(prompts, params, strict=True)
        )
        return await asyncio.gather(*streams)

    for outputs, right in zip(run(all_streams()), expected, strict=True):
        last = {part.index: part for output in outputs for part in output.outputs}
        found = [last[index] for index in range(len(right))]
        assert [(part.text, list(part.token_ids), part.finish_reason) for part in found] == right


def test_chat_needs_a_template_and_says_so(shared: AsyncLLM) -> None:
    async def talk() -> None:
        async for _ in shared.chat([{"role": "user", "content": "hi"}]):
            raise AssertionError("nothing may come")

    with pytest.raises(ValidationError, match="chat_template"):
        run(talk())
    assert run(answers(shared))


# --- leaving early --------------------------------------------------------------------------------


def test_closing_a_stream_ends_its_request_and_frees_its_blocks(shared: AsyncLLM) -> None:
    async def leave() -> bool:
        stream = shared.generate("hello", SamplingParams(max_tokens=2000, n=2, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        return await settled(shared) and await answers(shared)

    assert run(leave())


def test_cancelling_a_reader_ends_its_request_and_frees_its_blocks(shared: AsyncLLM) -> None:
    async def cancel() -> bool:
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        tasks = [asyncio.create_task(collect(shared, "hello", params)) for _ in range(4)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in ended)
        return await settled(shared) and await answers(shared)

    assert run(cancel())


def test_abort_ends_a_stream_with_what_there_is(shared: AsyncLLM) -> None:
    async def abort() -> RequestOutput:
        last: RequestOutput | None = None
        async for output in shared.generate(
            "hello", SamplingParams(max_tokens=2000, seed=3, ignore_eos=True), "mine"
        ):
            if last is None:
                await shared.abort("mine")
                await shared.abort(["mine", "nobody"])
            last = output
        assert last is not None
        assert await settled(shared)
        return last

    last = run(abort())

    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert 1 <= len(last.outputs[0].token_ids) < 2000


# --- bad requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "parameter"),
    [
        ("hello", {"logit_bias": {5000: 1.0}}, "logit_bias"),
        ("hello", {"chain": ["topp"]}, "chain"),
        ([], {}, "prompt"),
        ([70000], {}, "prompt_token_ids"),
        ({"promt": "x"}, {}, "promt"),
        (None, {}, "prompt"),
    ],
)
def test_a_bad_request_raises_at_its_first_item(
    prompt: Any, fields: dict[str, Any], parameter: str, shared: AsyncLLM
) -> None:
    with pytest.raises(ValidationError) as caught:
        run(collect(shared, prompt, SamplingParams(max_tokens=3, **fields)))

    assert caught.value.parameter == parameter
    assert run(answers(shared))


def test_params_of_another_type_are_refused(shared: AsyncLLM) -> None:
    with pytest.raises(ParameterTypeError, match="sampling_params must be SamplingParams"):
        run(collect(shared, "hello", {"max_tokens": 3}))  # type: ignore[arg-type]
    assert run(answers(shared))


def test_an_id_in_use_is_refused_and_the_first_goes_on(shared: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)

    async def twice() -> list[Any]:
        first = asyncio.create_task(collect(shared, "hello", params, "same"))
        while "same" not in shared.engine.requests:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(collect(shared, "hello", params, "same"))
        return await asyncio.gather(first, second, return_exceptions=True)

    outputs, error = run(twice())

    assert isinstance(error, ValidationError)
    assert "'same' is already running" in str(error)
    assert len(outputs[-1].outputs[0].token_ids) == 60


def test_a_failing_request_ends_its_own_stream_alone(llm: LLM, shared: AsyncLLM) -> None:
    def breaks(output_ids: list[int], logits: Any) -> Any:
        if len(output_ids) == 5:
            raise RuntimeError("broken")
        return logits

    good = SamplingParams(max_tokens=20, seed=4)
    bad = SamplingParams(max_tokens=20, seed=4, logits_processors=[breaks])

    async def both() -> list[list[RequestOutput]]:
        return await asyncio.gather(collect(shared, "hello", bad), collect(shared, "hello", good))

    failed, fine = run(both())

    assert failed[-1].finished
    assert failed[-1].outputs[0].finish_reason == "error"
    assert "position=5" in str(failed[-1].outputs[0].error)
    assert list(fine[-1].outputs[0].token_ids) == plain(llm, "hello", good)[0][1]


# --- the end --------------------------------------------------------------------------------------


def test_shutdown_ends_running_streams_with_an_error(own: AsyncLLM) -> None:
    async def stop() -> list[Any]:
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        tasks = [asyncio.create_task(collect(own, "hello", params)) for _ in range(3)]
        await asyncio.sleep(0.05)
        own.shutdown()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = run(stop())

    assert [type(result) for result in ended] == [EngineDeadError] * 3
    with pytest.raises(EngineDeadError):
        run(collect(own, "hello", SamplingParams()))
    with pytest.raises(EngineDeadError):
        run(own.check_health())
    own.shutdown()  # once more is harmless


@pytest.mark.parametrize("error", [RuntimeError("the step broke"), SystemExit(3)])
def test_an_engine_that_breaks_leaves_nobody_waiting(
    error: BaseException, own: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    async def use() -> list[Any]:
        monkeypatch.setattr(own.engine.parts.scheduler, "schedule", broken)
        tasks = [asyncio.create_task(collect(own, "hello", SamplingParams())) for _ in range(3)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = run(use())

    assert [type(result) for result in ended] == [EngineDeadError] * 3
    with pytest.raises(EngineDeadError):
        run(collect(own, "hello", SamplingParams()))
    with pytest.raises(EngineDeadError):
        run(own.check_health())


def test_streams_of_several_event_loops_share_one_engine(llm: LLM, shared: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=7, seed=1)
    expected = plain(llm, "hello", params)[0][1]

    found = [run(collect(shared, "hello", params))[-1] for _ in range(3)]

    assert [list(output.outputs[0].token_ids) for output in found] == [expected] * 3
