"""Seeds: DEC-001 to DEC-007."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import flat_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make


def test_dec_001_a_seed_survives_an_unseeded_neighbour(flat: Bench) -> None:
    seeded = SamplingParams(temperature=0.8, max_tokens=16, seed=42)
    unseeded = SamplingParams(temperature=0.8, max_tokens=16)
    other = SamplingParams(temperature=0.8, max_tokens=16, seed=43)

    free = [flat.ids([[1], [2]], [seeded, unseeded]) for _ in range(5)]
    bound = [flat.ids([[1], [2]], [seeded, other]) for _ in range(5)]
    alone = flat.ids([[1]], seeded)[0]

    assert [first for first, _ in free + bound] == [alone] * 10
    assert len({tuple(second) for _, second in free}) > 1
    assert len({tuple(second) for _, second in bound}) == 1


def test_dec_002_n_completions_under_one_seed_differ_and_are_reproducible(flat: Bench) -> None:
    many = SamplingParams(n=8, seed=7, max_tokens=16)
    alone = flat.all_ids([[1, 2]], many)[0]

    for number in range(4):
        flat.add(f"other-{number}", [3 + number], SamplingParams(max_tokens=40))
    flat.step(3)
    flat.add("many", [1, 2], many)
    together = [list(part.token_ids) for part in flat.finish()["many"].outputs]

    assert len({tuple(ids) for ids in alone}) == 8
    assert together == alone


def test_dec_003_two_requests_with_the_same_seed_do_not_disturb_each_other(flat: Bench) -> None:
    params = SamplingParams(seed=9, max_tokens=16)

    flat.add("first", [5], params)
    flat.add("second", [5], params)
    done = flat.finish()
    alone = flat.ids([[5]], params)[0]

    assert list(done["first"].outputs[0].token_ids) == alone
    assert list(done["second"].outputs[0].token_ids) == alone


def test_dec_005_a_seed_does_not_make_its_neighbours_deterministic(flat: Bench) -> None:
    params = [SamplingParams(seed=42, max_tokens=24), SamplingParams(max_tokens=24)]

    rounds = [flat.ids([[1], [1]], params) for _ in range(5)]

    assert len({tuple(seeded) for seeded, _ in rounds}) == 1
    assert len({tuple(unseeded) for _, unseeded in rounds}) >= 2


def test_dec_006_a_seeded_request_that_is_preempted_and_resumed(make: Make) -> None:
    prompts = [[number] for number in range(16)]
    params = [SamplingParams(seed=number, max_tokens=200) for number in range(16)]
    large = make(flat_table(97))
    small = make(flat_table(97), blocks=104)  # 16 requests of 201 tokens want 208

    expected = large.ids(prompts, params)
    found = small.ids(prompts, params)

    assert small.count("num_preemptions") > 0
    assert large.count("num_preemptions") == 0
    assert found == expected
