"""Chat, text, stop strings and log-probs through the whole engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from decodekit import LLM, SamplingParams
from decodekit.core.outputs import RequestOutput
from decodekit.core.params import RequestOutputKind
from decodekit.core.stage import Observer, Tap
from decodekit.plugins.author.table_model import byte_tokenizer, flat_table

Maker = Callable[..., LLM]

TEXT = "The cat sat on a mat; é"
END, MARK = 256, 257


def spelled(text: str) -> list[int]:
    return list(text.encode())


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


# --- chat on the embedded model -------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> LLM:
    """The embedded model in float32."""
    return LLM(dtype="float32", max_model_len=512, max_num_seqs=8)


CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Count:  1\n\n2"},
]


def test_the_embedded_model_answers(embedded: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)

    [output] = embedded.chat(CAPITAL, params, use_tqdm=False)

    answer = output.outputs[0]
    assert answer.text == "The capital of France is Paris."
    assert list(answer.token_ids) == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


@pytest.mark.parametrize("messages", [CAPITAL, TALK], ids=["first", "talk"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_renders_as_transformers_does(
    messages: list[dict[str, str]], add_generation_prompt: bool, embedded: LLM
) -> None:
    expected = embedded.get_tokenizer().apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )

    [output] = embedded.chat(
        messages,
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        add_generation_prompt=add_generation_prompt,
    )

    assert list(output.prompt_token_ids or ()) == expected


def test_several_conversations_are_a_batch(embedded: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)

    outputs = embedded.chat([CAPITAL, TALK, CAPITAL], params, use_tqdm=False)

    assert outputs[0].outputs[0].text == outputs[2].outputs[0].text
    assert outputs[0].outputs[0].text.startswith("The capital of France is Paris")
    assert outputs[1].outputs[0].text != outputs[0].outputs[0].text


def test_a_final_message_is_continued(embedded: LLM) -> None:
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]

    [output] = embedded.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=1),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )

    assert output.outputs[0].text == " Paris"


def test_prompt_logprobs_equal_transformers_log_softmax(tiny: Any) -> None:
    model, folder = tiny
    prompt = [(7 * place + 3) % 97 for place in range(40)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(39), torch.tensor(prompt[1:])]
    best = logits.log_softmax(-1).amax(-1)[:39]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    whole = LLM(folder, skip_tokenizer_init=True, max_num_seqs=4)
    chunked = LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=7)

    for llm in (whole, chunked):
        values = one(llm, prompt, params).prompt_logprobs
        assert values is not None
        assert len(values) == len(prompt)
        assert values[0] is None
        found = torch.tensor([values[at][prompt[at]].logprob for at in range(1, 40)])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        top = [max(entry.logprob for entry in values[at].values()) for at in range(1, 40)]
        torch.testing.assert_close(torch.tensor(top), best, rtol=1e-4, atol=1e-4)
        assert all(2 <= len(values[at]) <= 3 for at in range(1, 40))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A random two-layer Llama and its folder."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return model, str(folder)


# --- text and stop strings ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speller(make_llm: Maker) -> LLM:
    """A model with bytes as tokens; what it writes is scripted by the request, see `script`."""
    tokenizer = byte_tokenizer(special=["<end>", "<mark>"], eos="<end>")
    return make_llm(flat_table(258), model={"tokenizer": tokenizer, "eos_token_id": END})


def script(ids: list[int]) -> Callable[[list[int], Any], Any]:
    """Return a logits processor that leaves at step t only the token ids[t]."""

    def process(output_ids: list[int], logits: Any) -> Any:
        only = torch.full_like(logits, -torch.inf)
        only[ids[len(output_ids)]] = 0.0
        return only

    return process


WRITTEN = [*spelled(TEXT), MARK, END]


def write(llm: LLM, ids: list[int] = WRITTEN, **fields: Any) -> RequestOutput:
    params = SamplingParams(
        temperature=0, logits_processors=[script(ids)], **{"max_tokens": len(ids), **fields}
    )
    return one(llm, [1], params)


def test_the_whole_text_comes_back(speller: LLM) -> None:
    answer = write(speller).outputs[0]

    assert answer.text == TEXT
    assert list(answer.token_ids) == WRITTEN
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_special_tokens_may_be_shown(speller: LLM) -> None:
    answer = write(speller, skip_special_tokens=False).outputs[0]

    assert answer.text == f"{TEXT}<mark>"  # the end token is not part of the text
    shown = write(speller, skip_special_tokens=False, include_stop_str_in_output=True).outputs[0]
    assert shown.text == f"{TEXT}<mark><end>"


def test_without_detokenisation_there_are_ids_alone(speller: LLM) -> None:
    output = write(speller, detokenize=False, logprobs=1, prompt_logprobs=1)

    answer = output.outputs[0]
    assert answer.text == ""
    assert list(answer.token_ids) == WRITTEN
    assert answer.logprobs is not None
    assert {entry.decoded_token for entry in answer.logprobs[0].values()} == {None}


@pytest.mark.parametrize(
    ("stop", "kept", "hit", "num_tokens"),
    [
        (["cat sat"], "The ", "cat sat", 11),
        (["at"], "The c", "at", 7),
        (["mat", "sat", " a "], "The cat ", "sat", 11),
        (["at s", "cat"], "The ", "cat", 7),
        (["é"], "The cat sat on a mat; ", "é", 24),
        (["<mark>"], TEXT, "<mark>", 25),
        (["dog"], TEXT, None, 26),
    ],
)
def test_a_stop_string_cuts_exactly(
    stop: list[str], kept: str, hit: str | None, num_tokens: int, speller: LLM
) -> None:
    answer = write(speller, stop=stop, logprobs=0).outputs[0]
    with_stop = write(speller, stop=stop, include_stop_str_in_output=True).outputs[0]

    assert (answer.text, answer.stop_reason, answer.finish_reason) == (kept, hit, "stop")
    assert len(answer.token_ids) == num_tokens
    assert answer.logprobs is not None
    assert len(answer.logprobs) == num_tokens
    if hit not in (None, "<mark>"):
        assert with_stop.text == kept + str(hit)


def test_min_tokens_keeps_an_early_stop_string_from_stopping(speller: LLM) -> None:
    answer = write(speller, stop=["at"], min_tokens=8).outputs[0]

    assert (answer.text, answer.stop_reason) == ("The cat s", "at")


def test_a_stop_id_ends_and_its_text_is_left_out(speller: LLM) -> None:
    answer = write(speller, stop_token_ids=[ord("s")]).outputs[0]

    assert (answer.text, answer.stop_reason) == ("The cat ", ord("s"))
    assert answer.token_ids[-1] == ord("s")


def test_a_limit_inside_a_character_gives_a_replacement(speller: LLM) -> None:
    answer = write(speller, max_tokens=len(spelled(TEXT)) - 1).outputs[0]

    assert answer.text == TEXT[:-1] + "\N{REPLACEMENT CHARACTER}"
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("stop", [["cat sat"], ["mat;"], ["t on", "zzzz"], ["é"], []])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_stream_never_shows_what_a_stop_string_takes_back(
    stop: list[str], interval: int, speller: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = speller.llm_engine
    plain = write(speller, stop=stop).outputs[0].text
    monkeypatch.setitem(engine.config.__dict__, "stream_interval", interval)

    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        params = SamplingParams(
            temperature=0,
            max_tokens=len(WRITTEN),
            stop=stop,
            logits_processors=[script(WRITTEN)],
            output_kind=kind,
        )
        engine.add_request("s", [1], params)
        shown = ""
        num_tokens = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                [part] = output.outputs
                is_delta = kind is RequestOutputKind.DELTA
                assert is_delta or part.text.startswith(shown)
                shown = shown + part.text if is_delta else part.text
                num_tokens = num_tokens + len(part.token_ids) if is_delta else len(part.token_ids)
                assert plain.startswith(shown)
        assert shown == plain
        assert num_tokens == len(write(speller, stop=stop).outputs[0].token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["at"]},
        {"stop_token_ids": [ord("s")]},
        {"max_tokens": 5},
        {"stop": ["é"], "flat_logprobs": True},
        {"max_tokens": 9, "flat_logprobs": True},
    ],
    ids=str,
)
def test_there_are_as_many_logprobs_as_tokens(fields: dict[str, Any], speller: LLM) -> None:
    answer = write(speller, logprobs=2, **fields).outputs[0]

    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entries
        assert 2 <= len(entries) <= 3


# --- defaults -------------------------------------------------------------------------------------


def test_model_defaults_fill_gaps_and_an_explicit_value_wins(make_llm: Maker) -> None:
    table = flat_table(97, num_best=8)
    file = {"temperature": 0.6, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.3}
    model = {"generation_config": file}
    llm, off = make_llm(table, model=model), make_llm(table, model=model, generation_config="vllm")

    def seen(engine: LLM, params: SamplingParams | None) -> set[int]:
        if params is not None:
            params.max_tokens = 60
        outputs = engine.generate([[1]] * 6, params, use_tqdm=False)
        return {token for output in outputs for token in output.outputs[0].token_ids}

    defaults = llm.get_default_sampling_params()
    found = {name: getattr(defaults, name) for name in file}
    assert found == file
    first = [list(one(llm, [1], defaults).outputs[0].token_ids) for _ in range(2)]
    assert first[0] == first[1]  # top_k 1 leaves no choice
    nothing = llm.generate([[1]], None, use_tqdm=False)[0].outputs[0]
    assert list(nothing.token_ids) == first[0]
    assert seen(llm, SamplingParams()) == set(range(8))  # an explicit object is taken as it is
    for name, value in {"top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}.items():
        setattr(defaults, name, value)
    assert seen(llm, defaults) == set(range(8))
    assert off.get_default_sampling_params() == SamplingParams()
    assert seen(off, off.get_default_sampling_params()) == set(range(8))


def test_the_plan_says_which_layer_set_a_value(make_llm: Maker) -> None:
    llm = make_llm(flat_table(97), model={"generation_config": {"top_k": 7, "temperature": 0.5}})
    params = llm.get_default_sampling_params()
    params.top_k = 9

    steps = {step.stage: step for step in llm.explain(params).order}

    assert (steps["top_k"].params["k"], steps["top_k"].provenance["k"]) == (9, "request")
    temperature = steps["temperature"]
    assert list(temperature.params.values())[0] == 0.5
    assert list(temperature.provenance.values())[0] == "generation_config"


# --- queueing -------------------------------------------------------------------------------------


@pytest.fixture
def idle(flat_llm: LLM) -> Iterator[LLM]:
    """The flat model, checked afterwards to hold nothing and to answer."""
    yield flat_llm
    assert not flat_llm.llm_engine.has_unfinished_requests()
    assert flat_llm.llm_engine.parts.pool.num_used == 0
    assert flat_llm.wait_for_completion(use_tqdm=False) == []
    answer = one(flat_llm, [1], SamplingParams(temperature=0, max_tokens=3)).outputs[0]
    assert list(answer.token_ids) == [0, 0, 0]


def test_waiting_returns_every_queued_request_in_the_order_of_ids(idle: LLM) -> None:
    long = idle.enqueue([[1], [2]], SamplingParams(seed=1, max_tokens=20), use_tqdm=False)
    short = idle.enqueue([3], SamplingParams(seed=1, max_tokens=2), use_tqdm=False)
    assert idle.llm_engine.parts.scheduler.running == []  # nothing has run

    outputs = idle.wait_for_completion(use_tqdm=False)

    assert [output.request_id for output in outputs] == [*long, *short]
    assert [list(output.prompt_token_ids or ()) for output in outputs] == [[1], [2], [3]]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 20, 2]


def test_generate_beside_a_queue_returns_its_own_alone(idle: LLM) -> None:
    queued = idle.enqueue([[1], [2]], SamplingParams(seed=1, max_tokens=3), use_tqdm=False)

    own = one(idle, [9], SamplingParams(seed=2, max_tokens=30))
    rest = idle.wait_for_completion(use_tqdm=False)

    assert list(own.prompt_token_ids or ()) == [9]
    assert [output.request_id for output in rest] == queued


def test_a_result_of_another_class_is_an_error(idle: LLM) -> None:
    idle.enqueue([[1]], SamplingParams(max_tokens=2), use_tqdm=False)

    with pytest.raises(AssertionError, match="RequestOutput is not"):
        idle.wait_for_completion(dict, use_tqdm=False)


# --- interrupts -----------------------------------------------------------------------------------


class InterruptingBar:
    """A bar that is interrupted when the first request is done."""

    def __init__(self, iterable: Any = None, **_: Any) -> None:
        self.iterable = iterable
        self.postfix = ""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def update(self, count: int) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing to close."""


def test_an_interrupt_from_the_bar_leaves_the_engine_usable(idle: LLM) -> None:
    queued = idle.enqueue([[1], [2]], SamplingParams(seed=5, max_tokens=6), use_tqdm=False)
    params = [SamplingParams(seed=5, max_tokens=6), SamplingParams(seed=5, max_tokens=30)]

    with pytest.raises(KeyboardInterrupt):
        idle.generate([[3], [4]], params, use_tqdm=InterruptingBar)

    outputs = idle.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == queued
    for output in outputs:
        solo = one(idle, list(output.prompt_token_ids or ()), params[0])
        assert solo.outputs[0].token_ids == output.outputs[0].token_ids


class Interrupter(Observer):
    """Raises KeyboardInterrupt once, in the part of a step that is asked for."""

    name = "interrupter"
    armed: tuple[str, int] | None = None

    def bind(self, ctx: Any) -> str:
        return "watch"

    def taps(self, order: Any) -> frozenset[Tap]:
        return frozenset({Tap.RAW})

    def _maybe(self, place: str, count: int) -> None:
        if type(self).armed == (place, count):
            type(self).armed = None
            raise KeyboardInterrupt

    def measure(self, order: Any, taps: Any, tokens: Any) -> dict[str, Any]:
        self._maybe("measure", len(tokens))
        return {"token": tokens}

    def open(self, order: Any, tokenizer: Any) -> list[int]:
        return []

    def record(self, record: list[int], token: int, values: Any) -> None:
        record.append(token)
        self._maybe("record", len(record))

    def result(self, record: list[int]) -> dict[str, Any]:
        self._maybe("result", len(record))
        return {}


@pytest.mark.parametrize(("place", "count"), [("measure", 3), ("record", 4), ("result", 6)])
def test_an_interrupt_inside_a_step_loses_no_queued_request(
    place: str, count: int, make_llm: Maker
) -> None:
    llm = make_llm(flat_table(97))
    llm.register(Interrupter)
    params = SamplingParams(seed=3, max_tokens=6, logprobs=1, frequency_penalty=0.5)
    expected = [one(llm, [prompt], params).outputs[0] for prompt in (1, 2)]
    queued = llm.enqueue([[1], [2]], params, use_tqdm=False)
    Interrupter.armed = (place, count)

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3]], params, use_tqdm=False)

    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == queued
    answers = [output.outputs[0] for output in outputs]
    broken = [answer for answer in answers if answer.finish_reason == "error"]
    assert len(broken) <= 1  # the one that was being written down, if it was a queued one
    for answer, right in zip(answers, expected, strict=True):
        count_kept = len(answer.token_ids)
        assert list(answer.token_ids) == list(right.token_ids)[:count_kept]
        assert answer.logprobs == (right.logprobs or [])[:count_kept]
        assert answer in broken or count_kept == 6
    assert llm.llm_engine.parts.pool.num_used == 0
    after = one(llm, [1], params).outputs[0]
    assert list(after.token_ids) == list(expected[0].token_ids)
