"""Checksums of tensors by the engine: a change is seen, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepwell import _core

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def is_different(before, after):
    return not torch.equal(before, after)


SIZES = [1, 7, 4095, 4096, 4097, 12288, 100_003]


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


def test_as_many_sizes_as_addresses_are_expected(engine):
    with pytest.raises(ValueError, match="expected as many"):
        engine.checksums([8], [], 0)
