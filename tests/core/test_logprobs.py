"""FlatLogprobs reads as the list of dicts that it replaces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.logprobs import FlatLogprobs, Logprob

positions = st.lists(
    st.dictionaries(
        st.integers(0, 50),
        st.builds(
            Logprob,
            st.floats(-50, 0),
            st.none() | st.integers(1, 9),
            st.none() | st.text(max_size=3),
        ),
        max_size=4,
    ),
    max_size=6,
)


def flat(entries: list[dict[int, Logprob]]) -> FlatLogprobs:
    out = FlatLogprobs()
    out.extend(entries)
    return out


@given(positions)
def test_it_reads_as_the_list(entries: list[dict[int, Logprob]]) -> None:
    out = flat(entries)

    assert len(out) == len(entries)
    assert list(out) == entries
    assert out == entries
    assert [out[i] for i in range(-len(entries), 0)] == entries
    assert out.start_indices[:1] == [0] * bool(entries)


@given(positions, st.slices(6))
def test_a_slice_is_the_slice_of_the_list(entries: list[dict[int, Logprob]], part: slice) -> None:
    cut = flat(entries)[part]

    assert isinstance(cut, FlatLogprobs)
    assert list(cut) == entries[part]
    assert cut.start_indices[:1] == [0] * bool(len(cut))


@given(positions)
def test_dict_order_is_kept(entries: list[dict[int, Logprob]]) -> None:
    assert [list(position) for position in flat(entries)] == [list(p) for p in entries]


def test_the_fast_way_equals_the_slow_one() -> None:
    fast = FlatLogprobs()

    fast.append_fast([4, 9], [-0.5, -1.5], [1, 2], ["a", None])

    assert fast == [{4: Logprob(-0.5, 1, "a"), 9: Logprob(-1.5, 2)}]


def test_none_and_empty_positions_read_as_empty() -> None:
    out = FlatLogprobs()
    out.append(None)
    out.append({})

    assert list(out) == [{}, {}]
    assert out == [None, {}]


def test_a_repeated_id_is_merged_and_the_last_value_wins() -> None:
    out = FlatLogprobs()

    out.append_fast([7, 3, 7], [-1.0, -0.1, -1.0], [None, 1, 2], ["x", "y", "z"])

    assert list(out[0].items()) == [(7, Logprob(-1.0, 2, "z")), (3, Logprob(-0.1, 1, "y"))]


def test_it_extends_by_itself() -> None:
    out = flat([{1: Logprob(-1.0)}])

    out.extend(out)

    assert out == [{1: Logprob(-1.0)}] * 2


def test_only_appending_changes_it() -> None:
    out = flat([{1: Logprob(-1.0)}])

    with pytest.raises(TypeError):
        out[0] = {}
    with pytest.raises(TypeError):
        del out[0]
    with pytest.raises(TypeError):
        out.insert(0, {})
    with pytest.raises(TypeError, match="int or a slice"):
        out["a"]  # type: ignore[call-overload]
    with pytest.raises(IndexError):
        out[1]
