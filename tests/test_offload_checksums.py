"""Checksums of gradients, by torch and by the engine: a change is seen, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import DTYPES
from stepwell import _core
from stepwell.offload.checksums import checksum, differences, sums_of


def is_different(before, after):
    return bool(differences([before], [after]).item())


SIZES = [1, 7, 4095, 4096, 4097, 12288, 100_003]


def words(dtype, count, offset=0):
    """Bits of all kinds, NaNs among them, that begin `offset` elements into their storage."""
    size = torch.finfo(dtype).bits // 8
    return torch.randint(0, 256, ((count + offset) * size,), dtype=torch.uint8).view(dtype)[offset:]


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_checksums(dtype, count, offset):
    tensor = words(dtype, count, offset)
    before = checksum(tensor)
    assert before.dtype == torch.int64
    assert before.nbytes <= 72 << 10
    assert not is_different(before, checksum(tensor))


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
def test_changes_are_seen(dtype, count, change):
    tensor = torch.randn(count).to(dtype)
    before = checksum(tensor)
    change(tensor)
    assert is_different(before, checksum(tensor))


@pytest.mark.parametrize("period", [1, 2, 4, 64, 1024])
def test_signs_of_patterns_are_seen(period):
    # As many positive as negative ones, all of one size.
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(period)
    tensor = signs.repeat(1 << 16)[: 1 << 16]
    tensor[: len(tensor) // 3] *= 2
    before = checksum(tensor)
    tensor[::3].neg_()
    assert is_different(before, checksum(tensor))


@given(
    count=st.sampled_from(SIZES),
    offset=st.integers(0, 3),
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 31),
)
def test_a_single_bit_is_seen(count, offset, at, bit):
    tensor = torch.linspace(-1, 1, count + offset)[offset:]
    before = checksum(tensor)
    word = tensor.view(torch.int32)[int(at * count)]
    word.bitwise_xor_(torch.tensor((1 << bit) - (1 << 32 if bit == 31 else 0)).int())
    assert is_different(before, checksum(tensor))


def test_each_pair_is_told_apart():
    tensors = [torch.randn(count) for count in SIZES]
    before = [checksum(tensor) for tensor in tensors]
    for tensor in tensors[1::2]:
        tensor.neg_()
    found = differences(before, [checksum(tensor) for tensor in tensors]).tolist()
    assert found == [float(index % 2) for index in range(len(SIZES))]


def test_empty_tensors_never_differ():
    full, empty = torch.ones(3), torch.empty(0, 3)
    before = [checksum(empty), checksum(full), checksum(empty)]
    full.neg_()
    after = [checksum(empty), checksum(full), checksum(empty)]
    assert differences(before, after).tolist() == [0.0, 1.0, 0.0]
    assert differences(before[:1], after[:1]).tolist() == [0.0]


def test_memory_that_begins_amid_a_word():
    memory = bytearray(200_008)
    tensor = torch.frombuffer(memory, dtype=torch.bfloat16, offset=2)
    before = checksum(tensor)
    assert not is_different(before, checksum(tensor))
    tensor[50_000] = 1
    assert is_different(before, checksum(tensor))


# ---- checksums by the engine ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_may_have_any_stride(dtype):
    """As gradients of stacked scalars have."""
    one = torch.arange(4, dtype=dtype)[::2][:1]
    assert one.stride() == (2,)
    assert not is_different(checksum(one), checksum(one.clone()))
    before = checksum(one)
    one.add_(1.0)
    assert is_different(before, checksum(one))


def expected_sums(tensor):
    """By Python's integers, as `Device::checksums` says."""
    words = tensor.view(-1).view(torch.uint8).view(torch.int64).tolist()
    sums = [0] * _core.CHECKSUM_SUMS
    for at, word in enumerate(words):
        product = word * (2 * at + 1) % 2**64
        sums[at // 256 % _core.CHECKSUM_SUMS] += product ^ (product >> 32)
    return [(each + 2**63) % 2**64 - 2**63 for each in sums]


@pytest.fixture(name="engine")
def _engine():
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return _core.OffloadEngine(device, [1], threads=1)


def sums(engine, *tensors):
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    return sums_of(engine, tensors, stream)


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = torch.randn(count).bfloat16()
    second = torch.randint(-(2**31), 2**31, (count // 2,)).int()
    second[0] = -1
    found = sums(engine, first.to(device), second.to(device))
    assert [each.tolist() for each in found] == [expected_sums(first), expected_sums(second)]


def test_many_tensors_have_their_own_sums(engine):
    """More than one launch of the GPU's kernel takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.randn(4 * (1 + 37 * at % 600)).bfloat16().to(device) for at in range(300)]
    found = sums(engine, *tensors)
    assert [each.tolist() for each in found] == [expected_sums(each.cpu()) for each in tensors]


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 0), (0, 3), (1, 3), (1, 4), (1, 7), (2, 9), (3, 1 << 14), (0, 3_004_001), (1, 3_004_002)],
)
def test_bytes_beside_whole_words_are_kept(engine, begin, end):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.arange(end + 1).to(torch.int16).to(device)
    tensor = memory[begin:end]
    (found,) = sums(engine, tensor)
    nbytes = tensor.cpu().view(torch.uint8)
    lead = min(2 * (-begin % 4), len(nbytes))
    tail = len(nbytes) - (len(nbytes) - lead) % 8
    expected = expected_sums(nbytes[lead:tail].clone()) + nbytes[:lead].tolist()
    assert found.tolist() == expected + nbytes[tail:].tolist()


def test_words_of_any_size_that_change_places_are_seen(engine):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.randn(1001, 3001, device=device)
    (before,) = sums(engine, tensor)
    flat = tensor.view(-1)
    flat[:4] = flat[[2, 3, 0, 1]]
    (after,) = sums(engine, tensor)
    assert is_different(before, after)


def test_changes_and_swaps_change_the_engines_sums(engine):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.randn(1 << 18, dtype=torch.float64, device=device)
    before, length = tensor.clone(), 1 << 16
    tensors = [
        before,
        -before,
        before.flip(0),
        torch.cat([before[length:], before[:length]]),
        before.nextafter(before.new_tensor(9.0)),
        before.index_fill(0, torch.tensor([77], device=device), 0.0),
    ]
    (expected, *others) = [each.tolist() for each in sums(engine, *tensors)]
    assert sums(engine, tensor)[0].tolist() == expected
    assert all(other != expected for other in others)


def test_memory_that_is_not_of_words_is_refused(engine):
    with pytest.raises(ValueError, match="expected whole words"):
        engine.checksums([8], [12], 0)
    with pytest.raises(ValueError, match="expected as many"):
        engine.checksums([8], [], 0)
