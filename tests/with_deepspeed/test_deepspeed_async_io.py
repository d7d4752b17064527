"""DeepSpeed's native ops `async_io`, `pin_memory` and `utils` over the core's files of tensors."""

import ctypes
import errno
import gc
import os

import deepspeed_run
import pytest
import torch
from interrupts import handler_runs_after
from stepwell.deepspeed.native import async_io, locked_memory, pin_memory

PROGRAM_TIMEOUT = 150


@pytest.fixture
def handle():
    return async_io.aio_handle(block_size=8192, queue_depth=4, intra_op_parallelism=2)


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- what is in files ----


@pytest.mark.parametrize("offset", [0, 1, 4096, 70_000])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_a_file_has_the_tensor_s_bytes_from_the_offset_on(handle, tmp_path, offset, shift):
    path = tmp_path / "tensor"
    path.write_bytes(b"\x09" * 100_000)
    locked = handle.new_cpu_locked_tensor(60_000, torch.empty(0, dtype=torch.uint8))
    source = locked[shift : shift + 50_003].random_(256)
    assert handle.async_pwrite(source, str(path), offset) == 0
    assert handle.wait() == 1
    expected = bytearray(b"\x09" * 100_000)
    expected[offset : offset + 50_003] = bytes_of(source)
    assert path.read_bytes() == expected
    found = torch.zeros_like(source)
    assert handle.async_pread(found, str(path), offset) == 0
    assert handle.wait() == 1
    assert torch.equal(found, source)


def test_calls_of_all_kinds_and_names(handle, tmp_path):
    path = str(tmp_path / "tensor")
    source = torch.randn(3000)
    assert handle.write(source, path, True) == 0
    assert handle.pwrite(source, path, True, False) == 1
    assert handle.pwrite(buffer=source, filename=path, validate=False, **{"async": True}) == 0
    # A synchronous call waits for what was begun before it too, and counts it.
    assert handle.sync_pwrite(source, path, file_offset=0) == 2
    assert handle.wait() == 0
    for read, returned in (
        (lambda to: handle.read(to, path, True), 0),
        (lambda to: handle.pread(to, path, True, False, 0), 1),
        (lambda to: handle.sync_pread(to, path), 1),
        (lambda to: async_io.aio_read(to, path, 4096, 2, True, False, True), 0),
    ):
        found = torch.zeros_like(source)
        assert read(found) == returned
        assert torch.equal(found, source)
    assert async_io.aio_write(source, path, 4096, 2, False, True, True) == 0
    assert handle.get_block_size() == 8192
    assert handle.get_queue_depth() == 4
    assert handle.get_intra_op_parallelism() == 2
    assert handle.get_alignment() == 1024
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, False)
    with pytest.raises(TypeError, match="async"):
        handle.pread(source, path, False)
    with pytest.raises(TypeError, match="async"):
        handle.pread(source, path, False, sync=True)


def test_a_descriptor_stays_the_caller_s(handle, tmp_path):
    path = tmp_path / "tensor"
    path.write_bytes(b"\x09" * 100)
    source = torch.randn(3000)
    for flags in (0, os.O_APPEND, os.O_DIRECT):
        descriptor = os.open(path, os.O_WRONLY | flags)
        assert handle.async_pwrite(source, descriptor, 50) == 0
        assert handle.wait() == 1
        os.fsync(descriptor)
        os.close(descriptor)
        assert path.read_bytes() == b"\x09" * 50 + bytes_of(source)
    assert handle.async_pwrite(source, fd=os.open(path, os.O_WRONLY), file_offset=0) == 0
    assert handle.wait() == 1
    with pytest.raises(OSError, match="descriptor"):
        handle.async_pwrite(source, -1, 0)
    with pytest.raises(TypeError, match="one of them"):
        handle.async_pwrite(source, "x", fd=1)


def test_tensors_of_any_strides_dtypes_and_sizes(handle, tmp_path):
    path = tmp_path / "tensor"
    for source in (
        torch.randn(30, 50).t(),
        torch.randn(100, dtype=torch.complex64).conj(),
        torch.randn(100).bfloat16(),
        torch.arange(100) > 50,
        torch.tensor(3.0),
        torch.empty(0),
        torch.nn.Parameter(torch.randn(7)),
    ):
        path.unlink(missing_ok=True)
        assert handle.sync_pwrite(source, path) == 1
        assert path.stat().st_size == source.nbytes
        found = torch.empty_like(source.detach())
        assert handle.sync_pread(found, path) == 1
        assert torch.equal(found, source)


# ---- failures ----


def test_a_file_that_is_too_short(handle, tmp_path):
    path = tmp_path / "tensor"
    path.write_bytes(b"\x09" * 10_000)
    whole, part = torch.empty(2500), torch.empty(3000)
    handle.async_pread(whole, path)
    handle.async_pread(part, path)
    with pytest.raises(OSError, match=r"cannot read .*/tensor, offset `10000`") as caught:
        handle.wait()
    assert caught.value.errno == errno.ENODATA
    assert handle.wait() == 0
    assert handle.sync_pread(whole, path) == 1
    with pytest.raises(ValueError, match="`buffer` has `12000` bytes"):
        handle.read(part, path, False)
    with pytest.raises(ValueError, match="file_offset"):
        handle.sync_pread(part, path, -1)


def test_what_cannot_be_opened_or_written(handle, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        handle.async_pread(torch.empty(3), tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        handle.async_pwrite(torch.empty(3), tmp_path)
    # Always full.
    handle.async_pwrite(torch.zeros(10_000), "/dev/full", 0)
    handle.async_pwrite(torch.zeros(10), "/dev/full", 0)
    with pytest.raises(OSError, match=r"/dev/full, offset `0`.*and 1 more have failed") as caught:
        handle.wait()
    assert caught.value.errno == errno.ENOSPC


# ---- memory ----


@pytest.fixture
def fifo(handle, tmp_path):
    """A file that ends no read before something is written to `far`, its other side."""
    if not handle._files.has_rings:
        pytest.skip("takes io_uring: positional calls do not read a FIFO")
    path = tmp_path / "fifo"
    os.mkfifo(path)
    far = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield path, far
    os.close(far)


def test_a_tensor_that_nobody_has_any_more_is_kept_until_its_io_has_ended(handle, fifo):
    path, far = fifo
    found = torch.zeros(1000)
    owner = found.untyped_storage()._weak_ref()
    assert handle.async_pread(found, path, 0) == 0
    # As DeepSpeed lets go of memory: the object gets another one.
    found.data = torch.empty(0)
    gc.collect()
    assert not torch.UntypedStorage._expired(owner), "freed under the read"
    os.write(far, bytes(4000))
    assert handle.wait() == 1
    assert torch.UntypedStorage._expired(owner)
    torch.UntypedStorage._free_weak_ref(owner)


def test_a_wait_can_be_interrupted_and_gone_on_with(handle, tmp_path, fifo):
    path, far = fifo
    found = torch.zeros(1000)
    handle.async_pread(found, path)
    handle.async_pwrite(torch.ones(10), tmp_path / "other")
    with pytest.raises(KeyboardInterrupt), handler_runs_after(0.2):
        handle.wait()
    os.write(far, bytes_of(torch.ones(1000)))
    assert handle.wait() == 2
    assert torch.equal(found, torch.ones(1000))


def test_locked_memory_is_known_to_every_handle(handle):
    pins = pin_memory.pin_handle()
    locked = handle.new_cpu_locked_tensor(1000, example_tenosr=torch.empty(0).bfloat16())
    assert (locked.dtype, locked.shape) == (torch.bfloat16, (1000,))
    assert locked.data_ptr() % 4096 == 0
    assert pins.is_pinned(locked)
    assert handle.is_pinned(locked[10:20])
    address = locked.data_ptr()
    beyond = torch.frombuffer(
        (ctypes.c_uint8 * 4096).from_address(address + locked.nbytes - 8), dtype=torch.uint8
    )
    assert not handle.is_pinned(beyond)
    assert not handle.is_pinned(torch.empty(3))
    assert pins.free_cpu_locked_tensor(locked)
    assert not pins.free_cpu_locked_tensor(locked)
    assert not handle.is_pinned(locked)
    locked.fill_(1)  # still there
    other = pins.new_cpu_locked_tensor(10, locked)
    assert pins.free_cpu_locked_tensor_by_ptr(other.data_ptr())
    assert pins.new_cpu_locked_tensor(0, locked).numel() == 0
    with pytest.raises(ValueError, match="`num_elem` is `-1`"):
        pins.new_cpu_locked_tensor(-1, locked)


def test_locked_memory_goes_with_its_last_tensor(handle):
    before = len(locked_memory._ALL)
    view = handle.new_cpu_locked_tensor(1000, torch.empty(0))[3:]
    gc.collect()
    assert len(locked_memory._ALL) == before + 1
    del view
    gc.collect()
    assert len(locked_memory._ALL) == before


def test_memory_that_cannot_be_locked_is_told_once(handle, monkeypatch, caplog):
    made = locked_memory._core.Buffer

    def refused(nbytes, *, lock=False):
        if lock:
            raise OSError(errno.ENOMEM, "RLIMIT_MEMLOCK is `8192`")
        return made(nbytes)

    monkeypatch.setattr(locked_memory._core, "Buffer", refused)
    monkeypatch.setattr(locked_memory, "_WARNED", set())
    assert [handle.new_cpu_locked_tensor(10, torch.empty(0)).numel() for _ in range(2)] == [10, 10]
    assert [record.message for record in caplog.records if "RLIMIT_MEMLOCK" in record.message]
    assert len(caplog.records) == 1


# ---- with DeepSpeed ----


@pytest.mark.timeout(PROGRAM_TIMEOUT + 30)
def test_what_deepspeed_does_through_it(tmp_path):
    folder = tmp_path / "drive"
    folder.mkdir()
    result = deepspeed_run.run("async_io", tmp_path, timeout=PROGRAM_TIMEOUT, folder=str(folder))
    assert result["nvme"] == result["cpu"]
    # The weight of 1024 x 1024 in bf16, and no other one has 1 MiB.
    assert [size for _, size in result["files"]] == [2 << 20]
    number, text = result["truncated"]
    assert number == errno.ENODATA
    assert "_param.tensor.swp, offset `" in text
    assert result["fast True"]
    assert result["fast False"]
    assert result["AIOHandle_Engine"]
    assert result["AIOBasic_Engine"]
