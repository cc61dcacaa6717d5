"""Building blocks of the fused kernels: exact division, fixed-point masses, keys, noise.

Every function here is inlined in a generated kernel. The kernels are compiled without contraction
of a multiply and an add, so that the scan and the select, which both evaluate the head of a chain,
get the same bits. The interpreter has no fused multiply-add and no maximum that keeps NaN; there
the plain forms stand in.
"""

from __future__ import annotations

from ..lang import INTERPRETED, gdc_launch_dependents, gdc_wait, tl, triton

SEGMENT = tl.constexpr(256)  # tokens that are weighed together; part of the meaning
SUB = tl.constexpr(64)  # tokens under one maximum; a matter of speed
LOWEST = tl.constexpr(-3.4028234663852886e38)  # anchors dead rows, as in reference/mass.py
DEAD = tl.constexpr(float("-inf"))

_ONE = 1 << 40
ONE = tl.constexpr(float(_ONE))
# In [2**12, 2**13) a float64 has steps of 2**-40, so adding this rounds to a mass.
_MASS_MAGIC = tl.constexpr(6144.0)
_MASS_BITS = tl.constexpr(0x40B8000000000000)
MASS_BIAS = tl.constexpr(-0x4800000000000000)  # 256 of them, modulo 2**64
# In [2**52, 2**53) steps are 1: adding this rounds to an integer, ties to even.
_INT_MAGIC = tl.constexpr(6755399441055744.0)
_INT_BITS = tl.constexpr(0x4338000000000000)
_EXPONENT_SHIFT = tl.constexpr(896 << 52)  # from the exponent bias of float32 to that of float64

BOUND_ID = tl.constexpr(0x7FFFFFFF)  # stands in a list for the best token that is not listed


# Kernels of one chain may overlap: the second starts while the first ends, and waits for it.
PROGRAMMATIC = tl.constexpr(gdc_wait is not None)


if INTERPRETED:

    @triton.jit
    def scatter(places, values, mask):
        """Store int64 `values` at the pointers `places` where `mask` says so."""
        tl.store(places, values, mask=mask)

    @triton.jit
    def scatter32(places, values, mask):
        """The same for int32."""
        tl.store(places, values, mask=mask)

    @triton.jit
    def sort_down(keys, N: tl.constexpr):
        """Return the keys [N] from the greatest to the least."""
        ahead = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
        places = tl.arange(0, N)
        # Equal keys share a place, and fill the ones after it.
        ahead = (
            tl.sum(
                ((keys[:, None] == keys[None, :]) & (places[:, None] < places[None, :])).to(
                    tl.int32
                ),
                0,
            )
            + ahead
        )
        hits = ahead[:, None] == places[None, :]
        low = tl.where(keys == keys, keys, 0)
        return tl.max(tl.where(hits, low[:, None], _least_of(keys)), 0)

    @triton.jit
    def _least_of(keys):
        return tl.min(keys, 0)

    @triton.jit
    def divide(y, t):
        """Return y / t rounded as IEEE does; t is a scalar of the row."""
        return y / t

    @triton.jit
    def nan_max(x, axis: tl.constexpr):
        """Return the maximum along `axis`; infinite where a NaN is."""
        return tl.max(tl.where(x == x, x, float("inf")), axis)

    @triton.jit
    def larger(a, b):
        """Return the greater of two, NaN if one is."""
        return tl.maximum(a, b)

else:
    # A store by Triton is laid out anew for neighbouring addresses. Here there are none, and moving
    # values between threads costs more than the stores.

    @triton.jit
    def scatter(places, values, mask):
        """Store int64 `values` at the pointers `places` where `mask` says so."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $3, 0;
            @p st.global.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r",
            [places.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def scatter32(places, values, mask):
        """The same for int32."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $3, 0;
            @p st.global.b32 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [places.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def sort_down(keys, N: tl.constexpr):
        """Return the keys [N] from the greatest to the least."""
        return tl.sort(keys, descending=True)

    @triton.jit
    def divide(y, t):
        """Return y / t rounded as IEEE does; t is a scalar of the row."""
        inverse = tl.div_rn(1.0, t)
        near = y * inverse
        rest = tl.fma(-near, t, y)
        exact = tl.fma(rest, inverse, near)
        return tl.where(tl.abs(near) < float("inf"), exact, near)

    @triton.jit
    def larger(a, b):
        """Return the greater of two, NaN if one is."""
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def nan_max(x, axis: tl.constexpr):
        """Return the maximum along `axis`; NaN where a NaN is."""
        return tl.reduce(x, axis, larger)


@triton.jit
def small_float(count):
    """Return int32 in [0, 2**23) as float32; by its bits, as a conversion takes longer."""
    return (count | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def to_mass(weight):
    """Return round(weight * 2**40) of float32 in [0, 1], int64, plus the bits of the magic number.

    A sum over a segment takes them off once, as MASS_BIAS.
    """
    bits = weight.to(tl.int32, bitcast=True).to(tl.int64)
    # Widened by shifting, which costs less than a conversion. A float32 below 2**-126 comes out
    # wrong and as small, and rounds to the same 0.
    wide = ((bits << 29) + _EXPONENT_SHIFT).to(tl.float64, bitcast=True)
    return (wide + _MASS_MAGIC).to(tl.int64, bitcast=True)


@triton.jit
def mass_of(values, best):
    """Return the mass of logits beside the logit `best` of the row, int64."""
    anchor = tl.maximum(best, LOWEST)
    return to_mass(tl.exp(values - anchor)) - _MASS_BITS


@triton.jit
def quarter_maxima(values):
    """Return the maximum of each 64 tokens of half segments [n, 128], float32 [n, 2]."""
    return nan_max(tl.reshape(values, [values.shape[0], 2, 64]), 2)


@triton.jit
def segment_masses(left, right, smax, scale):
    """Return the mass of each segment, given as halves [n, 128], beside its maximum, int64 [n].

    The weights are exp((y - smax) * scale).
    """
    anchor = tl.maximum(smax, LOWEST)[:, None]
    masses = to_mass(tl.exp((left - anchor) * scale)) + to_mass(tl.exp((right - anchor) * scale))
    return tl.sum(masses, 1) - MASS_BIAS


@triton.jit
def to_int(x):
    """Round float64 of magnitude below 2**51 to int64, ties to even."""
    return (x + _INT_MAGIC).to(tl.int64, bitcast=True) - _INT_BITS


@triton.jit
def weights_of(smax, smass, best):
    """Bring segment masses to the scale of the row, int64: round(exp(smax - best) * smass)."""
    drop = smax.to(tl.float64) - tl.maximum(best, LOWEST).to(tl.float64)
    return to_int(tl.exp(drop) * smass.to(tl.float64))


@triton.jit
def ordered(values):
    """Return int32 that sort as float32 do; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_key(values, ids):
    """Return int64 whose descending order is: value descending, id ascending."""
    return (ordered(values).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def value_of(key):
    """Return the value of a `rank_key`."""
    high = (key >> 32).to(tl.int32)
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """Return the id of a `rank_key`."""
    return 0x7FFFFFFF - key.to(tl.int32)


@triton.jit
def just_below(value):
    """Return the next smaller float32; of -inf, -inf."""
    key = ordered(value) - 1
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    below = bits.to(tl.float32, bitcast=True)
    return tl.where(value > DEAD, below, DEAD)


@triton.jit
def words_for(key, position, branch, purpose, items):
    """Return the random 32-bit word of each item (int32 block), uint32."""
    lane = items >> 2
    zero = lane * 0
    w0, w1, w2, w3 = tl.philox(
        key, lane, zero + purpose, zero + position.to(tl.int32), zero + branch.to(tl.int32)
    )
    which = items & 3
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def unit_for(key, position, branch, purpose, items):
    """Return u in (0, 1) for each item, float64."""
    words = words_for(key, position, branch, purpose, items)
    return (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def log_time_for(key, position, branch, purpose, items):
    """Return ln E, E = -ln(1 - u), for each item, float32 with an error of some 2**-22.

    A winner has a small E, near u. There 1 - u would lose what tells draws apart, so E comes from
    the series of the area tangent, -ln(1 - u) = 2 artanh(u / (2 - u)).
    """
    words = words_for(key, position, branch, purpose, items)
    # The upper half counts from the other end, where 1 - u is small and exact.
    high = words >= 0x80000000
    rest = tl.where(high, words ^ 0xFFFFFFFF, words)
    small = (rest.to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    s = small / (2.0 - small)
    t = s * s
    odd = 0.0769230769 + t * 0.0666666667
    odd = 0.1111111111 + t * (0.0909090909 + t * odd)
    odd = 1.0 + t * (0.3333333333 + t * (0.2 + t * (0.1428571429 + t * odd)))
    near = 2.0 * s * odd
    far = -tl.log(small)
    return tl.log(tl.where(high, far, near))


@triton.jit
def unit53(key, position, branch, purpose):
    """Return one u in (0, 1) of 64 random bits, float64 [1]."""
    pair = tl.arange(0, 2)
    words = words_for(key, position, branch, purpose, pair).to(tl.float64)
    high = tl.sum(tl.where(pair == 0, words, 0.0), 0)
    low = tl.sum(tl.where(pair == 1, words + 0.5, 0.0), 0)
    unit = high * 2.3283064365386963e-10 + low * 5.421010862427522e-20
    return tl.minimum(unit, 0.9999999999999999)


@triton.jit
def finish_early():
    """Let the next kernel start its own preparations."""
    if PROGRAMMATIC:
        gdc_launch_dependents()


@triton.jit
def wait_for_last():
    """Wait until everything that the kernel before has written can be read."""
    if PROGRAMMATIC:
        gdc_wait()


@triton.jit
def first_best(scores, ids):
    """Return the lowest id among the best scores."""
    best = tl.max(scores, 0)
    return tl.min(tl.where(scores == best, ids, BOUND_ID), 0)
