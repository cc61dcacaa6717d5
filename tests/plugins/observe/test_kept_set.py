"""Kept sets, their mass and the entropy against plain sums."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.core.batch import TapView
from decodekit.core.logprobs import KeptSets
from decodekit.core.stage import Observer, Tap
from decodekit.plugins.author.rows import make_context
from decodekit.plugins.observe.kept_set import Entropy, KeptSet

INF = float("inf")


def watch(observer: Observer, raw: Tensor, final: Tensor, **given: Any) -> list[dict[str, Any]]:
    """Return what each row has after two equal steps."""
    request = {"kept_set": True, "entropy": True, "logprobs_mode": None, **given}
    size = request.pop("tokenizer_size", raw.shape[1])
    context = make_context(raw.shape[1], tokenizer_size=size, request=SimpleNamespace(**request))
    order = observer.bind(context)
    taps = {Tap.RAW: TapView(raw), Tap.FINAL: TapView(final)}
    records = [observer.open(order, None) for _ in raw]
    for _ in range(2):
        seen = {tap: taps[tap] for tap in observer.taps(order)}
        measured = observer.measure(order, seen, torch.zeros(len(raw), dtype=torch.int64))
        for row, record in enumerate(records):
            values = {name: value.numpy()[row] for name, value in measured.items()}
            observer.record(record, 0, values)
    return [dict(observer.result(record)) for record in records]


def cut(raw: Tensor, kept: Sequence[Sequence[int]]) -> Tensor:
    final = torch.full_like(raw, -INF)
    for row, ids in enumerate(kept):
        final[row, list(ids)] = raw[row, list(ids)]
    return final


def test_the_set_is_what_is_alive_and_the_mass_its_raw_probability(rng: torch.Generator) -> None:
    raw = torch.randn(3, 9, generator=rng)
    kept = [[4], [0, 2, 8], list(range(9))]

    results = watch(KeptSet(), raw, cut(raw, kept))

    for row, result in enumerate(results):
        mass = float(raw[row].double().softmax(0)[kept[row]].sum())
        assert result["kept_set"] == [kept[row], kept[row]]
        assert result["kept_mass"] == pytest.approx([mass, mass], abs=1e-6)
    assert results[2]["kept_mass"][0] <= 1.0


def test_padding_of_the_head_is_in_no_set() -> None:
    raw = torch.zeros(1, 6)

    (result,) = watch(KeptSet(), raw, raw, tokenizer_size=4)

    assert result["kept_set"][0].tolist() == [0, 1, 2, 3]
    assert result["kept_mass"][0] == pytest.approx(1.0)


@pytest.mark.parametrize(("mode", "kept"), [(None, range(9)), (("final", "raw"), [1, 5, 6])])
def test_the_entropy_is_that_of_the_first_mode(
    mode: tuple[str, ...] | None, kept: Sequence[int], rng: torch.Generator
) -> None:
    raw = torch.randn(4, 9, generator=rng)
    final = cut(raw, [[1, 5, 6]] * 4)

    results = watch(Entropy(), raw, final, logprobs_mode=mode)

    for row, result in enumerate(results):
        p = raw[row, list(kept)].double().softmax(0)
        expected = float(-(p * p.log()).sum())
        assert result["entropy"] == pytest.approx([expected] * 2, abs=1e-5)


def test_who_does_not_ask_is_not_watched() -> None:
    context = make_context(
        4, request=SimpleNamespace(kept_set=False, entropy=False, logprobs_mode=None)
    )

    assert KeptSet().bind(context) is None
    assert Entropy().bind(context) is None


def test_kept_sets_read_as_a_list_of_lists() -> None:
    sets = KeptSets()
    for ids in ([1, 2], [], [7]):
        sets.append(ids)

    assert len(sets) == 3
    assert sets == [[1, 2], [], [7]]
    assert sets != [[1, 2], [], [8]]
    assert sets[-1].tolist() == [7]
    assert sets[1:] == [[], [7]]
    assert sets[3:] == []
    assert [list(ids) for ids in sets] == [[1, 2], [], [7]]
    sets.extend(sets[:1])
    assert sets.offsets.tolist() == [0, 2, 2, 3, 5]
    with pytest.raises(IndexError):
        sets[4]
    assert repr(sets[:1]) == "KeptSets([[1, 2]])"
