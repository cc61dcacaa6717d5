"""Penalties, DEC-025: the state of a row follows its request.

What each request gives alone is computed by hand, and compared with the engine for every tenth.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

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
    num_aborted = 0
    for number, (name, (prompt, params)) in enumerate(requests.items()):
        part = done[name].outputs[0]
        ids = list(part.token_ids)
        expected = _alone(table, prompt, params)
        if number % 10 == 0:
            assert bench.solo(prompt, params) == expected, name
        if part.finish_reason == "abort":
            num_aborted += 1
            assert name in aborts
            assert ids == expected[: len(ids)], name
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


def _alone(table: Tensor, prompt: list[int], params: SamplingParams) -> list[int]:
    """The greedy output of one request by the formulas: masks, bias, then the three penalties."""
    output: list[int] = []
    limit = params.max_tokens or 0
    while len(output) < limit and output[-1:] != [END]:
        row = table[(prompt + output)[-1]].numpy().astype(np.float32)
        if params.allowed_token_ids:
            row[np.setdiff1d(np.arange(129), params.allowed_token_ids)] = -np.inf
        if len(output) < params.min_tokens:
            row[END] = -np.inf
        for word in params.bad_words:
            for ids in (list(word.encode()), list(f" {word}".encode())):
                if output[len(output) - len(ids) + 1 :] == ids[:-1] or len(ids) == 1:
                    row[ids[-1]] = -np.inf
        for token, bias in (params.logit_bias or {}).items():
            row[token] += np.float32(bias)
        seen = np.array(sorted({*prompt, *output}))
        strength = np.float32(params.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / strength, row[seen] * strength)
        for token in set(output):
            row[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
            row[token] -= np.float32(params.presence_penalty)
        output.append(int(row.argmax()))
    return output
