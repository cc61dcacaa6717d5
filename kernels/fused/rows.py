"""What a program does with one row: cuts, short lists, their order, and the statistics of a row.

A row has scratch in device memory, `own` int32 for 4 * P places of sub-segments and `listed` int64
for N tokens. Only the program of the row reads or writes it; a barrier stands between a
store and the loads of other threads.
"""

from __future__ import annotations

from ..lang import tl, triton
from .blocks import (
    BOUND_ID,
    DEAD,
    LOWEST,
    MASS_BIAS,
    ONE,
    id_of,
    rank_key,
    scatter,
    scatter32,
    sort_down,
    to_int,
    to_mass,
    unit_for,
    value_of,
)

SLACK = tl.constexpr(5)  # groups that a cut may let through beyond those wanted
MOST_STEPS = tl.constexpr(20)
NO_ENTRY = tl.constexpr((-8388608 << 32) | 0x7FFFFFFF)  # -inf and BOUND_ID in an unordered list
_FARTHEST = tl.constexpr(200.0)  # exp(-200) is 0 in float32, and 200 * 0 is no NaN
_DROP_UNIT = tl.constexpr(16777216.0)  # drops of logits are summed in steps of 2**-24
_LARGEST_DROP = tl.constexpr(16384.0)


# --- the head: steps with lists and masks of their own ------------------------------------------


@triton.jit
def add_sparse(y, ids, b, low, high, starts, listed, adds):
    """Add to the listed ids of row `b` what stands beside them; the block has ids [low, high)."""
    for place in range(tl.load(starts + b), tl.load(starts + b + 1)):
        token = tl.load(listed + place)
        if (token >= low) & (token < high):
            y = tl.where(ids == token, y + tl.load(adds + place), y)
    return y


@triton.jit
def mask_bits(y, ids, live, b, words, stride, index):
    """Mask the ids whose bit is 0 in the row's words; an index below 0 means no mask."""
    line = tl.load(index + b).to(tl.int64)
    word = tl.load(words + line * stride + (ids >> 5), mask=live & (line >= 0), other=-1)
    return tl.where(((word >> (ids & 31)) & 1) != 0, y, DEAD)


# --- the cut ------------------------------------------------------------------------------------


@triton.jit
def find_cut(gmax, wanted):
    """Return a value that at least `wanted` of `gmax` [G] reach, and seldom many more.

    -inf if there are not so many. Halving a range of values ends within SLACK of the number wanted,
    or where it cannot get nearer, as with many equal values.
    """
    alive = gmax > DEAD
    reaching = tl.sum(alive.to(tl.int32), 0)
    low = tl.min(tl.where(alive, gmax, float("inf")), 0)
    high = tl.max(gmax, 0)
    cut = tl.where(reaching >= wanted, low, DEAD)
    steps = 0
    while (reaching > wanted + SLACK) & (steps < MOST_STEPS):
        middle = low * 0.5 + high * 0.5
        count = tl.sum((gmax >= middle).to(tl.int32), 0)
        enough = count >= wanted
        reaching = tl.where(enough, count, reaching)
        cut = tl.where(enough, middle, cut)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        steps += 1
    return cut


@triton.jit
def numbered(chosen):
    """Number the entries of int32 [n, m] that are 1, from 0 on; return how many there are too."""
    within = tl.cumsum(chosen, 1)
    of_row = tl.sum(chosen, 1)
    ends = tl.cumsum(of_row, 0)
    return (ends - of_row)[:, None] + within - chosen, tl.max(ends, 0)


@triton.jit
def list_subs(maxima, places, cut, own):
    """Write the `places` of the sub-segments that reach `cut`, in any order; return how many."""
    reach = (maxima >= cut) & (maxima > DEAD)
    number, count = numbered(reach.to(tl.int32))
    scatter32(own + number, places, reach)
    tl.debug_barrier()
    return count


# --- the list -----------------------------------------------------------------------------------


@triton.jit
def append_list(y, ids, take, n, listed, N: tl.constexpr):
    """Append the tokens in `take` [n, m] to the list; return its length, N or more if full.

    An entry of an unordered list has the bits of its value in the high word and its id in the low.
    """
    number, count = numbered(take.to(tl.int32))
    bits = y.to(tl.int32, bitcast=True).to(tl.int64)
    scatter(listed + n + number, (bits << 32) | ids.to(tl.int64), take & (n + number < N - 1))
    return n + count


@triton.jit
def sort_list(listed, n, bound, has_bound: tl.constexpr, N: tl.constexpr):
    """Return the first n of the list in rank order, values float32 [N] and ids int32 [N].

    With `has_bound`, `bound` stands at its end as one more token, if it is not -inf.
    """
    count = n
    if has_bound:
        bits = bound.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(listed + n, (bits << 32) | BOUND_ID)
        count = n + (bound > DEAD).to(tl.int32)
    tl.debug_barrier()
    return _in_order(listed, count, N)


@triton.jit
def sort_again(values, ids, N: tl.constexpr):
    """Return the tokens in rank order after their values changed."""
    keys = sort_down(rank_key(values, ids), N)
    return value_of(keys), id_of(keys)


@triton.jit
def _key_of(entry):
    return rank_key((entry >> 32).to(tl.int32).to(tl.float32, bitcast=True), entry.to(tl.int32))


@triton.jit
def _in_order(listed, count, N: tl.constexpr):
    places = tl.arange(0, N)
    inside = places < count
    keys = _key_of(tl.load(listed + places, mask=inside, other=NO_ENTRY))
    keys = sort_down(keys, N)
    return value_of(keys), id_of(keys)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def mass_above(values, before, N: tl.constexpr):
    """Return the mass of the tokens with larger values, int64 [N]; equal values share it."""
    places = tl.arange(0, N)
    last = tl.gather(values, tl.maximum(places - 1, 0), 0)
    is_first = (values != last) | (places == 0)
    return tl.associative_scan(tl.where(is_first, before, 0), 0, _larger)


# --- statistics of rows: what a segment notes, and what the row makes of it -----------------------


@triton.jit
def _drops(y, smax):
    return tl.minimum(tl.maximum(smax, LOWEST)[:, None] - y, _FARTHEST)


@triton.jit
def _surprise(y, smax):
    drops = _drops(y, smax)
    return to_mass(tl.exp(-drops) * drops)


@triton.jit
def sum_mean_drop(left, right, smax):
    """Return the sum of w * d of each segment, d = smax - y and w = exp(-d), as a mass."""
    return tl.sum(_surprise(left, smax) + _surprise(right, smax), 1) - MASS_BIAS


@triton.jit
def _square(y, smax):
    weights = tl.exp(-_drops(y, smax))
    return to_mass(weights * weights)


@triton.jit
def sum_squares(left, right, smax):
    """Return the sum of w**2 of each segment, as a mass."""
    return tl.sum(_square(left, smax) + _square(right, smax), 1) - MASS_BIAS


@triton.jit
def count_alive(left, right):
    """Return the number of alive tokens of each segment."""
    return tl.sum((left > DEAD).to(tl.int64) + (right > DEAD).to(tl.int64), 1)


@triton.jit
def _far_drops(y, smax):
    drops = tl.minimum(tl.maximum(smax, LOWEST)[:, None] - y, _LARGEST_DROP)
    return tl.where(y > DEAD, drops, 0.0).to(tl.float64)


@triton.jit
def sum_drops(left, right, smax):
    """Return the sum of smax - y over the alive tokens of each segment, in steps of 2**-24."""
    drops = to_int(_far_drops(left, smax) * _DROP_UNIT)
    return tl.sum(drops + to_int(_far_drops(right, smax) * _DROP_UNIT), 1)


@triton.jit
def _far_square(y, smax):
    drops = _far_drops(y, smax)
    return (drops * drops * _DROP_UNIT).to(tl.int64)


@triton.jit
def sum_square_drops(left, right, smax):
    """Return the sum of (smax - y)**2 likewise."""
    return tl.sum(_far_square(left, smax) + _far_square(right, smax), 1)


@triton.jit
def _fall(smax, best):
    return (tl.maximum(best, LOWEST) - tl.maximum(smax, LOWEST)).to(tl.float64)


@triton.jit
def mean_drop_of(smax, smass, moments, best, total):
    """Return the sum of p * (best - y) of the row, float64."""
    fall = tl.minimum(_fall(smax, best), _FARTHEST)
    terms = tl.exp(-fall) * (moments.to(tl.float64) + fall * smass.to(tl.float64))
    return tl.sum(to_int(terms), 0).to(tl.float64) / tl.maximum(total, 1).to(tl.float64)


@triton.jit
def squares_of(smax, smass, moments, best, total):
    """Return the sum of w**2 of the row, w = exp(y - best), float64."""
    fall = tl.minimum(_fall(smax, best), _FARTHEST)
    terms = tl.exp(-2.0 * fall) * moments.to(tl.float64)
    return tl.sum(to_int(terms), 0).to(tl.float64) / ONE


@triton.jit
def deviation_of(smax, smass, counts, firsts, seconds, best, total):
    """Return the standard deviation of the row's alive logits, float64."""
    fall = tl.where(counts > 0, tl.minimum(_fall(smax, best), _LARGEST_DROP), 0.0)
    number = counts.to(tl.float64)
    first = firsts.to(tl.float64)
    ones = first + number * fall * _DROP_UNIT
    twos = seconds.to(tl.float64) + 2.0 * fall * first + number * fall * fall * _DROP_UNIT
    return _spread(tl.sum(counts, 0), tl.sum(ones.to(tl.int64), 0), tl.sum(twos.to(tl.int64), 0))


@triton.jit
def _spread(number, ones, twos):
    count = tl.maximum(number, 1).to(tl.float64)
    mean = ones.to(tl.float64) / (count * _DROP_UNIT)
    variance = twos.to(tl.float64) / (count * _DROP_UNIT) - mean * mean
    return tl.sqrt(tl.maximum(variance, 0.0))


@triton.jit
def list_mean_drop(values, alive, mass, best, total):
    """Return `mean_drop_of` of a list that is all that is left of the row."""
    drops = tl.where(alive, best - values, 0.0).to(tl.float64)
    terms = to_int(mass.to(tl.float64) * drops)
    return tl.sum(terms, 0).to(tl.float64) / tl.maximum(total, 1).to(tl.float64)


@triton.jit
def list_squares(values, alive, mass, best, total):
    """Return `squares_of` of such a list."""
    weights = mass.to(tl.float64) / ONE
    return tl.sum(to_int(weights * weights * ONE), 0).to(tl.float64) / ONE


@triton.jit
def list_deviation(values, alive, mass, best, total):
    """Return `deviation_of` of such a list."""
    drops = tl.where(alive, tl.minimum(best - values, _LARGEST_DROP), 0.0).to(tl.float64)
    ones = tl.sum(to_int(drops * _DROP_UNIT), 0)
    twos = tl.sum((drops * drops * _DROP_UNIT).to(tl.int64), 0)
    return _spread(tl.sum(alive.to(tl.int64), 0), ones, twos)


# --- chance -------------------------------------------------------------------------------------


@triton.jit
def fires_now(key, position, branch, purpose, probability):
    """Say whether a stage that acts now and then acts on this row at this position."""
    unit = tl.max(unit_for(key, position, branch, purpose, tl.arange(0, 2) * 0), 0)
    return unit < probability.to(tl.float64)


@triton.jit
def skewed(chance, skew):
    """Return chance ** exp(-skew), below 1."""
    bent = tl.exp(tl.log(chance) * tl.exp(-skew.to(tl.float64)))
    return tl.minimum(tl.where(skew == 0.0, chance, bent), 0.9999999999999999)
