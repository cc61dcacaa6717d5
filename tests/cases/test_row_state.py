"""Penalties, DEC-025: the state of a row follows its request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from decodekit import SamplingParams

if TYPE_CHECKING:
    from tests.cases.conftest import Make

END = 128


def test_dec_025_state_follows_the_request_through_finishes_aborts_and_reordering(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    generator = torch.Generator().manual_seed(12)
    table = (torch.randint(-80, 81, (129, 129), generator=generator) / 16).float()
    table[::7, END] = 5.5  # some rows would end
    bench = make(
        table,
        model={"tokenizer": ascii_tokenizer(special=["</s>"], eos_token="</s>")},
        max_num_seqs=16,
    )
    random_ = random.Random(25)
    requests = {f"r{number}": _request(random_) for number in range(300)}
    aborts = {name: random_.randrange(1, 40) for name in random_.sample(list(requests), 60)}
    order = list(requests)
    random_.shuffle(order)

    for name in order:
        bench.add(name, *requests[name])
    started: dict[str, int] = {}
    step = 0
    while bench.engine.has_unfinished_requests():
        running = [each.request.request_id for each in bench.engine.parts.scheduler.running]
        assert len(running) <= 16
        for name in running:
            started.setdefault(name, step)
        for name, after in aborts.items():
            if step - started.get(name, step) == after:
                bench.engine.abort_request(name)
        bench.step()
        step += 1
    done = bench.finish()

    assert len(done) == 300
    alone = bench.fresh()
    num_aborted = 0
    for name, (prompt, params) in requests.items():
        part = done[name].outputs[0]
        ids = list(part.token_ids)
        expected = alone.ids([prompt], params)[0]
        if part.finish_reason == "abort":
            num_aborted += 1
            assert name in aborts
            assert ids == expected[: len(ids)]
        else:
            assert ids == expected, name
    assert num_aborted > 15  # the others of the 60 had ended by themselves
    bench.check_answers()


def _request(random_: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt and parameters with a mix of all that keeps state or columns in a row."""
    fields: dict[str, Any] = {}
    if random_.random() < 0.5:
        fields["presence_penalty"] = random_.choice([-0.5, 0.75, 1.5])
    if random_.random() < 0.5:
        fields["frequency_penalty"] = random_.choice([0.25, 1.0])
    if random_.random() < 0.5:
        fields["repetition_penalty"] = random_.choice([0.8, 1.2, 1.7])
    if random_.random() < 0.4:
        fields["logit_bias"] = {random_.randrange(128): random_.choice([-5.0, 3.0, 6.0])}
    if random_.random() < 0.3:
        fields["bad_words"] = [chr(random_.randrange(40, 120)) for _ in range(5)] + ["ab"]
    if random_.random() < 0.3:
        fields["allowed_token_ids"] = random_.sample(range(129), 20)
    max_tokens = random_.randrange(1, 61)
    fields["min_tokens"] = random_.choice([0, 0, max_tokens // 2])
    prompt = [random_.randrange(128) for _ in range(random_.randrange(1, 12))]
    return prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)
