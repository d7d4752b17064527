"""State of a partition that is brought from a volume, chunk by chunk, into a mapped file."""

import os

import torch
from partition_cases import BF16
from stepwell import _core
from stepwell.deepspeed.zero.mapped import MappedState


def places(numel):
    """Like moments in fp32, and codes with their scales."""
    return {
        "exp_avg": torch.empty(numel, device="meta"),
        "codes": torch.empty(numel, dtype=torch.uint8, device="meta"),
        "scales": torch.empty(-(-numel // 128), dtype=BF16, device="meta"),
    }


def test_chunks_are_brought_once(tmp_path):
    size = _core.CHUNK_LEN
    numel = 3 * size + 5
    mapped = MappedState(tmp_path, places(numel), numel)
    assert mapped.missing(0, 1) == [(0, size)]
    assert mapped.missing(size - 1, size + 1) == [(0, 2 * size)]
    assert mapped.missing(size, size + 1) == [(size, 2 * size)]
    assert mapped.missing(0, numel) == [(0, numel)]
    mapped.note(size, 2 * size)
    assert mapped.missing(size, 2 * size) == []
    assert mapped.missing(0, numel) == [(0, size), (2 * size, numel)]
    assert mapped.missing(3 * size, numel) == [(3 * size, numel)]


def test_tensors_of_a_file_lie_apart(tmp_path):
    numel = 1000
    mapped = MappedState(tmp_path, places(numel), numel)
    assert {name: (each.dtype, each.numel()) for name, each in mapped.tensors.items()} == {
        name: (each.dtype, each.numel()) for name, each in places(numel).items()
    }
    for value, each in enumerate(mapped.tensors.values(), 1):
        assert each.data_ptr() % 64 == 0
        each.fill_(value)
    assert [each.unique().tolist() for each in mapped.tensors.values()] == [[1], [2], [3]]
    assert list(tmp_path.iterdir()) == []


def test_writes_to_what_was_brought_are_seen(tmp_path):
    size = _core.CHUNK_LEN
    mapped = MappedState(tmp_path, places(3 * size), 3 * size)
    for each in mapped.tensors.values():
        each.zero_()
    mapped.note(0, size)
    mapped.note(2 * size, 3 * size)
    assert not mapped.is_written
    # Not there, and no fragments are had of it.
    mapped.tensors["exp_avg"][size : 2 * size] = 1.0
    mapped.tensors["scales"][0] = 1.0
    assert not mapped.is_written
    for name, at in (("exp_avg", size - 1), ("codes", 2 * size), ("exp_avg", 3 * size - 1)):
        mapped.tensors[name][at] = 1
        assert mapped.is_written
        mapped.tensors[name][at] = 0
        assert not mapped.is_written


def test_space_is_taken_for_what_is_brought(tmp_path):
    size = _core.CHUNK_LEN
    numel = 64 * size
    mapped = MappedState(tmp_path, places(numel), numel)

    def taken():
        # In units of 512 bytes, whatever the file system's block is.
        return 512 * os.fstat(mapped._file.fileno()).st_blocks

    assert taken() < size
    mapped.take(size, 2 * size)
    one = size * 4 + size + size // 64
    assert one <= taken() < 2 * one
    mapped.take(63 * size, numel)
    assert 2 * one <= taken() < 4 * one
