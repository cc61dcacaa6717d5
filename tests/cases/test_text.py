"""Detokenisation: DEC-071 to DEC-076."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from decodekit import CompletionOutput, SamplingParams
from decodekit.plugins.author.table_model import blank_table, byte_tokenizer

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make, Stream

Spell = Callable[..., SamplingParams]

END = 256
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MARK = "\N{LOWER ONE EIGHTH BLOCK}"


@pytest.fixture(scope="module")
def writers(make: Make) -> Callable[[int], Bench]:
    """Return a function that gives an engine on 256 byte tokens, by its stream interval."""
    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>")
    first = make(blank_table(257), model={"tokenizer": tokenizer})
    made = {1: first}

    def writer(interval: int) -> Bench:
        if interval not in made:
            made[interval] = first.fresh(stream_interval=interval)
        return made[interval]

    return writer


def check_stream(stream: Stream, part: CompletionOutput) -> None:
    """Streamed = plain, in text, ids and ending."""
    assert stream.text() == part.text
    assert stream.ids() == list(part.token_ids)
    assert stream.last().finish_reason == part.finish_reason


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("size", [1, 16])
def test_dec_071_characters_split_over_tokens_streamed(
    writers: Callable[[int], Bench], spell: Spell, interval: int, size: int
) -> None:
    bench = writers(interval)
    text = "ďá 你好 👍🏽 👨\u200d👩\u200d👧 ok"
    params = spell(text.encode())

    plain = bench.generate([[0]] * size, params)
    streams = bench.stream([[0]] * size, params)

    tokenizer = bench.llm.get_tokenizer()
    for output, stream in zip(plain, streams, strict=True):
        part = output.outputs[0]
        assert part.text == text == tokenizer.decode(part.token_ids)
        assert not any(REPLACEMENT in delta.text for delta in stream.parts())
        check_stream(stream, part)
    if interval == 1:
        assert len(streams[0].parts()) == len(text.encode())


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_dec_072_never_a_character_twice_never_one_lost(
    writers: Callable[[int], Bench], spell: Spell, interval: int
) -> None:
    bench = writers(interval)
    text = "A 世é世 a삼겹살b"
    params = spell(text.encode())

    stream = bench.stream([[0]], params)[0]

    shown = ""
    for delta in stream.parts():
        shown += delta.text
        assert text.startswith(shown)
    assert shown == text
    check_stream(stream, bench.generate([[0]], params)[0].outputs[0])


@pytest.mark.parametrize("interval", [1, 3])
def test_dec_073_the_limit_falls_inside_a_character(
    writers: Callable[[int], Bench], spell: Spell, interval: int
) -> None:
    bench = writers(interval)
    tokens = [*"hi🙂".encode(), *b"!!!!"]

    tails = set()
    for limit in (3, 4, 5, 6):
        params = spell(tokens, max_tokens=limit)
        part = bench.generate([[0]], params)[0].outputs[0]
        check_stream(bench.stream([[0]], params)[0], part)
        assert part.finish_reason == "length"
        assert len(part.token_ids) == limit
        if limit == 6:
            assert part.text == "hi🙂"
        else:
            tails.add(part.text)
    ended = spell([*tokens[:4], END])
    part = bench.generate([[0]], ended)[0].outputs[0]
    check_stream(bench.stream([[0]], ended)[0], part)
    assert part.finish_reason == "stop"
    tails.add(part.text)
    assert len(tails) == 1
    assert tails <= {"hi", "hi" + REPLACEMENT}


@pytest.mark.parametrize("interval", [1, 3])
def test_dec_074_invalid_bytes_from_the_model(
    writers: Callable[[int], Bench], spell: Spell, interval: int
) -> None:
    bench = writers(interval)
    params = spell([ord("a"), 0xFF, 0xC3, ord("b"), 0x80, ord("c")])

    part = bench.generate([[0]], params)[0].outputs[0]

    a, between, rest = part.text[0], *part.text[1:].split("b")
    assert (a, rest[-1]) == ("a", "c")
    assert set(between) == set(rest[:-1]) == {REPLACEMENT}
    assert part.finish_reason == "length"
    check_stream(bench.stream([[0]], params)[0], part)


@pytest.fixture(scope="module")
def marked_tokenizer() -> Any:
    """A sentencepiece-like tokenizer: a mark is a space, and the first one of a text is dropped."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyzHW", MARK]
    words = [MARK + "leading", MARK + "two", MARK + "Hi", "spaces", MARK + MARK]
    vocab = {token: place for place, token in enumerate(["<unk>", "<s>", *letters, *words])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=MARK, prepend_scheme="first", split=False
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize("prompt", [["<s>"], ["<s>", MARK + "Hi"], ["<s>", MARK]])
def test_dec_075_leading_and_inner_spaces_of_sentencepiece_tokenizers(
    make: Make, spell: Spell, marked_tokenizer: Any, interval: int, prompt: list[str]
) -> None:
    model = {"tokenizer": marked_tokenizer}
    bench = make(blank_table(len(marked_tokenizer)), model=model, stream_interval=interval)
    written = [MARK + "leading", MARK + MARK, "t", "w", "o", MARK, *"spaces"]
    before = marked_tokenizer.convert_tokens_to_ids(prompt)
    params = spell(marked_tokenizer.convert_tokens_to_ids(written))

    part = bench.generate([before], params)[0].outputs[0]

    def decode(ids: list[int]) -> str:
        text: str = marked_tokenizer.decode(ids, skip_special_tokens=True)
        return text

    head, whole = decode(before), decode([*before, *part.token_ids])
    assert whole.startswith(head)
    assert part.text == whole[len(head) :]
    assert part.text.lstrip(" ") == "leading  two spaces"
    if len(prompt) > 1:
        assert part.text == " leading  two spaces"
    check_stream(bench.stream([before], params)[0], part)


def test_dec_076_logit_rows_without_a_token(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    generator = torch.Generator().manual_seed(2)
    table = (torch.randint(-32, 33, (138, 138), generator=generator) / 16).float()
    table[:, 133] = 9.0  # a row that stands for no token, and the best of all
    bench = make(table, model={"tokenizer": ascii_tokenizer(special=["<s>", "</s>"])})
    greedy = SamplingParams(temperature=0.0, max_tokens=20, logprobs=5)
    drawn = [SamplingParams(seed=seed, max_tokens=20, logprobs=5) for seed in range(8)]

    outputs = bench.generate([[5]] * 10 + [[5, 133, 6]], [greedy, *drawn, greedy, greedy])
    streams = bench.stream([[5, 133]], greedy)

    for output in outputs:
        part = output.outputs[0]
        assert part.finish_reason == "length"
        assert len(part.token_ids) == 20
        assert part.logprobs is not None
        listed = {token for position in part.logprobs for token in position}
        assert max(*part.token_ids, *listed) < 130
    assert streams[0].last().finish_reason == "length"
    scored = bench.generate(
        [[5, 133, 6]], SamplingParams(prompt_logprobs=5, max_tokens=1, temperature=0.0)
    )[0]
    assert scored.prompt_logprobs is not None
    assert (scored.prompt_logprobs[1] or {})[133].decoded_token == ""
    alternatives = [token for token in scored.prompt_logprobs[2] or {} if token != 6]
    assert max(alternatives) < 130
    assert bench.engine.parts.tokenizer is not None
    assert bench.engine.parts.tokenizer.decode([133]) == ""
    text = bench.generate([[ord("H"), 133, ord("i")]], greedy)[0].outputs[0].text
    assert text == bench.generate([[ord("H"), ord("i")]], greedy)[0].outputs[0].text
