"""Addressed noise against published vectors, a plain-integer Philox, and the uniform law."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decodekit.kernels.reference import noise

WORD = st.integers(0, 2**32 - 1)
KEY = st.integers(0, 2**64 - 1)

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, words.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(counter: tuple[int, ...], key: int) -> list[int]:
    """Philox4x32-10 as the paper writes it, in Python's integers."""
    x = list(counter)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ x[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x


def column(values: list[int]) -> Tensor:
    """Keys, positions or branches of a batch, int64 [R]."""
    return torch.tensor([noise.signed_key(value) for value in values])


@pytest.mark.parametrize(("counter", "halves", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], halves: tuple[int, int], words: tuple[int, ...]
) -> None:
    lane, purpose, position, branch = counter
    key = np.array([halves[0] | halves[1] << 32], dtype=np.uint64)

    got = noise.philox(key, np.array([lane]), purpose, np.array([position]), np.array([branch]))

    assert got.tolist() == [list(words)]


@pytest.mark.parametrize(("counter", "halves", "words"), KNOWN_ANSWERS)
def test_philox_torch_gives_the_published_words(
    counter: tuple[int, ...], halves: tuple[int, int], words: tuple[int, ...]
) -> None:
    lane, purpose, position, branch = (torch.tensor([word]) for word in counter)

    got = noise.philox_torch(
        column([halves[0] | halves[1] << 32]), lane, int(purpose), position, branch
    )

    assert got.tolist() == [list(words)]


@given(key=KEY, counter=st.tuples(WORD, WORD, WORD, WORD))
def test_both_forms_equal_the_plain_loop(key: int, counter: tuple[int, int, int, int]) -> None:
    lane, purpose, position, branch = counter

    in_numpy = noise.philox(
        np.array([key], dtype=np.uint64),
        np.array([lane]),
        purpose,
        np.array([position]),
        np.array([branch]),
    )
    in_torch = noise.philox_torch(
        column([key]),
        torch.tensor([lane]),
        purpose,
        torch.tensor([position]),
        torch.tensor([branch]),
    )

    assert in_numpy.tolist() == in_torch.tolist() == [plain_philox(counter, key)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 1024), (5, 1000)])
def test_forms_agree_on_broadcast_batches(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    key = random.integers(-(2**63), 2**63, size=(shape[0], 1))
    lane = random.integers(0, 2**32, size=shape)
    position = random.integers(0, 2**20, size=(shape[0], 1))
    branch = np.zeros((1, 1), dtype=np.int64)

    in_numpy = noise.philox(key, lane, 77, position, branch)
    in_torch = noise.philox_torch(
        torch.from_numpy(key),
        torch.from_numpy(lane),
        77,
        torch.from_numpy(position),
        torch.from_numpy(branch),
    )

    assert in_numpy.dtype == np.uint32
    assert in_numpy.shape == (*shape, 4)
    assert np.array_equal(in_numpy.astype(np.int64), in_torch.numpy())


def test_uniform_reads_word_id_mod_4_of_lane_id_div_4() -> None:
    keys, positions, branches = [5, 2**64 - 3], [0, 900], [0, 2]
    ids = torch.tensor([[0, 1, 6, 151935], [3, 3, 49151, 8]])

    got = noise.uniform_for_ids(column(keys), column(positions), column(branches), 2, ids)

    for row in range(2):
        for place, item in enumerate(ids[row].tolist()):
            words = plain_philox((item // 4, 2, positions[row], branches[row]), keys[row])
            assert got[row, place].item() == (words[item % 4] + 0.5) / 2**32


@pytest.mark.parametrize("num_ids", [1, 4, 5, 192, 594])
def test_a_range_draws_what_its_ids_draw(num_ids: int) -> None:
    keys, positions, branches = column([1, 2, 3]), column([0, 5, 9]), column([0, 1, 0])
    first = torch.tensor([0, 256, 49148])
    ids = first[:, None] + torch.arange(num_ids)

    unit = noise.uniform_for_range(keys, positions, branches, 1, first, num_ids)
    exponential = noise.exponential_for_range(keys, positions, branches, 1, first, num_ids)

    assert torch.equal(unit, noise.uniform_for_ids(keys, positions, branches, 1, ids))
    assert torch.equal(exponential, noise.exponential_for_ids(keys, positions, branches, 1, ids))


def test_a_draw_does_not_depend_on_its_company() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-(2**62), 2**62, (64,), generator=generator)
    positions = torch.randint(0, 4000, (64,), generator=generator)
    branches = torch.randint(0, 4, (64,), generator=generator)
    ids = torch.randint(0, 151936, (64, 50), generator=generator)
    order = torch.randperm(64, generator=generator)

    together = noise.exponential_for_ids(keys, positions, branches, 2, ids)
    shuffled = noise.exponential_for_ids(
        keys[order], positions[order], branches[order], 2, ids[order]
    )

    assert torch.equal(shuffled, together[order])
    for row in range(64):
        one = slice(row, row + 1)
        alone = noise.exponential_for_ids(keys[one], positions[one], branches[one], 2, ids[one, 7:])
        assert torch.equal(alone, together[one, 7:])


@pytest.mark.parametrize("changed", ["key", "purpose", "position", "branch", "id"])
def test_every_part_of_the_address_moves_the_draw(changed: str) -> None:
    address = {"key": 11, "purpose": 2, "position": 3, "branch": 0, "id": 40}
    moved = {**address, changed: address[changed] + 1}

    def draw(at: dict[str, int]) -> float:
        return noise.uniform_for_ids(
            column([at["key"]]),
            column([at["position"]]),
            column([at["branch"]]),
            at["purpose"],
            torch.tensor([[at["id"]]]),
        ).item()

    assert draw(address) != draw(moved)


def test_the_extreme_words_stay_inside_the_open_interval() -> None:
    words = np.array([0, 2**32 - 1], dtype=np.uint32)

    unit = noise._to_unit_numpy(words)
    exponential = noise._exponential_(unit.copy())

    assert unit.tolist() == [2.0**-33, 1 - 2.0**-33]
    assert exponential[0] == pytest.approx(2.0**-33, rel=1e-9)
    assert exponential[1] == pytest.approx(33 * math.log(2), rel=1e-15)


def test_uniform_is_uniform_over_1e5_draws() -> None:
    num_bins, num_draws = 64, 100_000
    one = torch.zeros(1, dtype=torch.int64)

    unit = noise.uniform_for_range(one + 123, one, one, 1, one, num_draws)
    observed = torch.histc(unit, num_bins, 0.0, 1.0)

    expected = num_draws / num_bins
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    assert chi_squared < 63 + 4 * math.sqrt(2 * 63)  # mean + 4 sigma with 63 degrees of freedom


def test_exponential_has_the_unit_law_over_1e5_draws() -> None:
    num_bins, num_draws = 64, 100_000
    zero = torch.zeros(1, dtype=torch.int64)

    drawn = noise.exponential_for_range(zero + 7, zero, zero, 0, zero, num_draws)
    observed = torch.histc(torch.exp(-drawn), num_bins, 0.0, 1.0)  # uniform if E is exponential

    expected = num_draws / num_bins
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    assert drawn.min() > 0
    assert chi_squared < 63 + 4 * math.sqrt(2 * 63)


def test_the_device_form_of_every_draw_equals_the_cpu_form() -> None:
    """The torch formula is what other devices run; here it runs on the CPU by hand."""
    keys, positions, branches = column([9, 2**63]), column([1, 2]), column([0, 3])
    ids = torch.tensor([[0, 17, 100, 3], [5, 6, 7, 49151]])

    words = noise.philox_torch(keys[:, None], ids >> 2, 2, positions[:, None], branches[:, None])
    unit = noise._to_unit(words.gather(-1, (ids & 3)[..., None])[..., 0])

    assert torch.equal(unit, noise.uniform_for_ids(keys, positions, branches, 2, ids))
    exponential = unit.neg().log1p_().neg_()
    torch.testing.assert_close(
        exponential,
        noise.exponential_for_ids(keys, positions, branches, 2, ids),
        rtol=1e-15,
        atol=0,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_draws_the_same_numbers() -> None:
    keys, positions, branches = column([9, 2**63]), column([1, 2]), column([0, 3])
    first = torch.tensor([0, 256])
    ids = first[:, None] + torch.arange(300)
    device = [tensor.cuda() for tensor in (keys, positions, branches)]

    by_ids = noise.uniform_for_ids(*device, 1, ids.cuda()).cpu()
    by_range = noise.uniform_for_range(*device, 1, first.cuda(), 300).cpu()

    assert torch.equal(by_ids, noise.uniform_for_ids(keys, positions, branches, 1, ids))
    assert torch.equal(by_range, by_ids)


def test_purposes_are_the_published_ones_and_stages_stay_clear_of_them() -> None:
    words = [noise.purpose_of(f"stage#{number}") for number in range(1000)]

    assert [int(purpose) for purpose in noise.Purpose] == [0, 1, 2, 3]
    assert len(set(words)) == 1000
    assert min(words) >= 16
    assert max(words) < 2**32


def test_hashes_do_not_move_between_versions() -> None:
    """Seeded output is a promise: these addresses may never change."""
    assert noise.purpose_of("xtc") == 1466311979
    assert noise.request_key(0, 0) == 0xE7494F907A55052


@given(first=st.tuples(KEY, KEY), second=st.tuples(KEY, KEY))
def test_request_keys_differ_with_either_number(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    same = noise.request_key(*first) == noise.request_key(*second)

    assert same == (first == second)


@pytest.mark.parametrize(
    ("seed", "key"),
    [(0, 0), (42, 42), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)],
)
def test_a_seed_is_its_own_key(seed: int, key: int) -> None:
    assert noise.seed_key(seed) == key
    assert torch.tensor(noise.signed_key(key)).item() & (2**64 - 1) == key


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_past_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=r"seed is -?\d+; it must be in \[-2\*\*63, 2\*\*64\)"):
        noise.seed_key(seed)
