"""Checksums of tensors by the engine: a change is seen, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import DTYPES
from stepwell import _core

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def is_different(before, after):
    return not torch.equal(before, after)


SIZES = [1, 7, 4095, 4096, 4097, 12288, 100_003]


def words(dtype, count, offset=0):
    """Bits of all kinds, NaNs among them, that begin `offset` elements into their storage."""
    size = torch.finfo(dtype).bits // 8
    bits = torch.randint(0, 256, ((count + offset) * size,), dtype=torch.uint8)
    return bits.view(dtype)[offset:].to(DEVICE)


@pytest.fixture(name="engine", scope="module")
def _engine():
    return _core.OffloadEngine("cuda:0" if DEVICE == "cuda" else "cpu", [1], threads=1)


def sums(engine, *tensors):
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    shape = len(tensors), _core.CHECKSUM_SUMS
    found = torch.empty(shape, dtype=torch.int64, device=DEVICE)
    addresses = [tensor.data_ptr() for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    engine.checksums(addresses, sizes, found.data_ptr(), stream=stream)
    return list(found.unbind())


def checksum(engine, tensor):
    (found,) = sums(engine, tensor)
    return found


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_checksums(engine, dtype, count, offset):
    tensor = words(dtype, count, offset)
    before = checksum(engine, tensor)
    assert before.dtype == torch.int64
    assert not is_different(before, checksum(engine, tensor))


CHANGES = {
    "scaled": lambda t: t.mul_(0.5),
    "negated": lambda t: t.neg_(),
    "reversed": lambda t: t.copy_(t.flip(0)),
    "zeroed": lambda t: t.zero_(),
    "the first": lambda t: t[0].mul_(1.5),
    "the last": lambda t: t[-1].mul_(1.5),
    "a small one": lambda t: t[len(t) // 2].copy_(1e-30),
    "a NaN": lambda t: t[len(t) // 3].copy_(float("nan")),
    "clamped": lambda t: t.clamp_(-1e-3, 1e-3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("count", [7, 4096, 12288, 100_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_are_seen(engine, dtype, count, change):
    tensor = torch.randn(count).to(dtype).to(DEVICE)
    before = checksum(engine, tensor)
    change(tensor)
    assert is_different(before, checksum(engine, tensor))


@pytest.mark.parametrize("period", [1, 2, 4, 64, 1024])
def test_signs_of_patterns_are_seen(engine, period):
    # As many positive as negative ones, all of one size.
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(period)
    tensor = signs.repeat(1 << 16)[: 1 << 16].to(DEVICE)
    tensor[: len(tensor) // 3] *= 2
    before = checksum(engine, tensor)
    tensor[::3].neg_()
    assert is_different(before, checksum(engine, tensor))


@pytest.mark.parametrize("rows", [2, 4, 16, 64, 256])
@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 2), (torch.bfloat16, 4)])
def test_the_signs_of_a_column_are_seen(engine, rows, dtype, columns):
    # The uppermost bit of each word, and nothing else.
    for seed in range(100):
        torch.manual_seed(seed)
        tensor = torch.randn(rows, columns).to(DEVICE, dtype)
        before = checksum(engine, tensor)
        tensor[:, -1].neg_()
        assert is_different(before, checksum(engine, tensor))


def test_a_one_that_moves_among_zeros_is_seen(engine):
    tensor = torch.zeros(1 << 19, dtype=torch.bfloat16, device=DEVICE)
    found = set()
    for at in (3, 7, 4 * 256 + 3, 4 * 65536 + 3, 4 * 65536 + 7):
        tensor.zero_()
        tensor[at] = 1
        found.add(tuple(checksum(engine, tensor).tolist()))
    assert len(found) == 5


@given(
    count=st.sampled_from(SIZES),
    offset=st.integers(0, 3),
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 31),
)
def test_a_single_bit_is_seen(engine, count, offset, at, bit):
    tensor = torch.linspace(-1, 1, count + offset)[offset:].to(DEVICE)
    before = checksum(engine, tensor)
    word = tensor.view(torch.int32)[int(at * count)]
    word.bitwise_xor_(torch.tensor((1 << bit) - (1 << 32 if bit == 31 else 0)).int().to(DEVICE))
    assert is_different(before, checksum(engine, tensor))


def test_each_pair_is_told_apart(engine):
    tensors = [torch.randn(count).to(DEVICE) for count in [*SIZES, 0]]
    before = sums(engine, *tensors)
    for tensor in tensors[1::2]:
        tensor.neg_()
    found = list(map(is_different, before, sums(engine, *tensors)))
    # What is empty never differs.
    assert found == [False, True, False, True, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_may_have_any_stride(engine, dtype):
    """As gradients of stacked scalars have."""
    one = torch.arange(4, dtype=dtype, device=DEVICE)[::2][:1]
    assert one.stride() == (2,)
    before = checksum(engine, one)
    assert not is_different(before, checksum(engine, one))
    one.add_(1.0)
    assert is_different(before, checksum(engine, one))


def expected_sums(tensor, lead=0):
    """By Python's integers, as `Device::checksums` says; `lead`: bytes before it in its word."""
    memory = bytes(lead) + bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    memory += bytes(-len(memory) % 8)
    sums = [0] * _core.CHECKSUM_SUMS
    for at in range(len(memory) // 8):
        word = int.from_bytes(memory[8 * at : 8 * at + 8], "little")
        mixed = (word ^ at * 0x9E3779B97F4A7C15 % 2**64) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB % 2**64
        sums[at // 256 % _core.CHECKSUM_SUMS] += mixed ^ mixed >> 32
    return [(each + 2**63) % 2**64 - 2**63 for each in sums]


# A thread of the GPU's kernel adds four words at a time, 256 * 256 apart, and what is left singly.
FOUR_WORDS = 4 * 256 * 256 * 4


@pytest.mark.parametrize(
    "count",
    [
        4,
        1024,
        100_000,
        FOUR_WORDS * 3 // 4 + 1028,
        FOUR_WORDS - 4,
        FOUR_WORDS,
        FOUR_WORDS + 4,
        3 * FOUR_WORDS + 100_000,
    ],
)
def test_the_engine_sums_words_by_their_places(engine, count):
    first = torch.randn(count).bfloat16()
    second = torch.randint(-(2**31), 2**31, (count // 2,)).int()
    second[0] = -1
    found = sums(engine, first.to(DEVICE), second.to(DEVICE))
    assert [each.tolist() for each in found] == [expected_sums(first), expected_sums(second)]


def test_many_tensors_have_their_own_sums(engine):
    """More than one launch of the GPU's kernel takes."""
    tensors = [torch.randn(4 * (1 + 37 * at % 600)).bfloat16().to(DEVICE) for at in range(300)]
    found = sums(engine, *tensors)
    assert [each.tolist() for each in found] == [expected_sums(each.cpu()) for each in tensors]


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        *((0, 0), (0, 1), (0, 3), (1, 2), (1, 3), (1, 4), (1, 7), (3, 4), (3, 5), (2, 9)),
        *((3, 1 << 14), (0, 1_004_001), (1, 1_004_002), (2, FOUR_WORDS + 1), (1, FOUR_WORDS)),
    ],
)
def test_words_that_memory_has_a_part_of_count_with_that(engine, begin, end):
    # What lies beside it is not 0.
    memory = (torch.arange(end + 5) * 7 + 1).to(torch.int16).to(DEVICE)
    found = checksum(engine, memory[begin:end])
    assert found.tolist() == expected_sums(memory[begin:end].cpu(), lead=2 * (begin % 4))


def test_words_of_any_size_that_change_places_are_seen(engine):
    tensor = torch.randn(1001, 3001, device=DEVICE)
    (before,) = sums(engine, tensor)
    flat = tensor.view(-1)
    flat[:4] = flat[[2, 3, 0, 1]]
    (after,) = sums(engine, tensor)
    assert is_different(before, after)


def test_changes_and_swaps_change_the_engines_sums(engine):
    tensor = torch.randn(1 << 18, dtype=torch.float64, device=DEVICE)
    before, length = tensor.clone(), 1 << 16
    tensors = [
        before,
        -before,
        before.flip(0),
        torch.cat([before[length:], before[:length]]),
        before.nextafter(before.new_tensor(9.0)),
        before.index_fill(0, torch.tensor([77], device=DEVICE), 0.0),
    ]
    (expected, *others) = [each.tolist() for each in sums(engine, *tensors)]
    assert sums(engine, tensor)[0].tolist() == expected
    assert all(other != expected for other in others)


def test_as_many_sizes_as_addresses_are_expected(engine):
    with pytest.raises(ValueError, match="expected as many"):
        engine.checksums([8], [], 0)
