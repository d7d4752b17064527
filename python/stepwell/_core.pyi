"""
The compiled core of Stepwell: kernels, state codecs, pool and host memory.
"""

from _typeshed import Incomplete
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

__all__ = ["CHECKSUM_SUMS", "CHUNK_LEN", "DRIVE_WEIGHT_MAX", "QUEUE_DEPTH", "QUEUE_DEPTH_MAX", "SEGMENT_LEN", "STATE_FORMAT", "STRIPE_BYTES", "STRIPE_BYTES_MAX", "__version__", "AdamTensor", "AddressSpace", "Buffer", "DeviceSteps", "Files", "GradStats", "Hyper", "Look", "MemberFile", "MemoryClaim", "OffloadEngine", "Pool", "Selectable", "StatePart", "Store", "Swap", "TensorView", "VolumePasses", "adam_step", "build_info", "check_volume", "choose_channels", "connect", "deferral_nbytes", "format_device", "free_memory_bytes", "grad_stats", "list_members", "master_parts", "moments_codecs", "moments_parts", "num_chunks", "places_of_ranks", "read_state", "remove_volume", "selection_nbytes", "stream_ceiling", "swap_buffers_nbytes", "system_info", "take_fingerprints", "write_state"]

CHECKSUM_SUMS: Final[int]
"""
How many sums the checksum of a tensor has.
"""

CHUNK_LEN: Final[int]
"""
Elements per chunk: what a worker takes at a time, and what one fingerprint covers.
"""

DRIVE_WEIGHT_MAX: Final[int]
"""
The largest weight of a drive of a volume.
"""

QUEUE_DEPTH: Final[int]
"""
Reads and writes that each drive of a volume is given at once, where nothing is said.
"""

QUEUE_DEPTH_MAX: Final[int]
"""
The most reads and writes that a drive is given at once.
"""

SEGMENT_LEN: Final[int]
"""
Elements of a segment, but for a tensor's last: what is uploaded at once, and what one
checksum covers.
"""

STATE_FORMAT: Final[int]
"""
What the bytes of coded state mean: trailing bits, fingerprints, q8 codes and scales. State
dicts of another number are refused.
"""

STRIPE_BYTES: Final[int]
"""
The most bytes of a record that lie together on one drive of a volume, if nothing is said.
"""

STRIPE_BYTES_MAX: Final[int]
"""
The largest stripe.
"""

__version__: Final[str]

@final
class AdamTensor:
    """
    One parameter of a step: where its weight, gradient and state are. The layout follows from the
    names and dtypes of the parts that are given.

    ======== ======================== ===========================================
    param    parts of the master      master
    ======== ======================== ===========================================
    float32  none                     the parameter itself
    bfloat16 trailing, fingerprints   split: exact fp32 in 2 B beside the parameter
    bfloat16 trailing                 the same, where steps alone write the parameter
    float16  master                   separate
    16-bit   none                     none: rounded to nearest
    ======== ======================== ===========================================

    Names, dtypes and lengths of all parts are those of `master_parts` and `moments_parts`. A 16-bit
    parameter without a master has moments in float32 or in its own dtype. Zeros everywhere are a
    fresh state. Beside a float32 parameter, `weight_out` (bfloat16 or float16) gets its rounded
    copy.

    Args:
        param: the parameter.
        grad: its gradient, of as many elements; a step needs it.
        weight_out: where the rounded copy of a float32 parameter goes.
        key: decorrelates the stochastic rounding of different parameters.
        parts: of the state, by their names.

    Raises:
        ValueError: naming what does not fit.
    """
    def __new__(cls, /, *, param: TensorView, grad: TensorView | None = None, weight_out: TensorView | None = None, key: int = 0, **parts: "TensorView") -> AdamTensor: ...
    @property
    def numel(self, /) -> int:
        """
        Number of elements.
        """

@final
class AddressSpace:
    """
    Addresses that nothing is at, and that nothing else gets: for tensors that name state which is
    not in host memory. An access to them ends the process.

    Args:
        nbytes: how many.

    Raises:
        OSError: where there are not so many.
    """
    def __new__(cls, /, nbytes: int) -> AddressSpace: ...
    @property
    def address(self, /) -> int:
        """
        The first of them.
        """
    @property
    def nbytes(self, /) -> int:
        """
        How many were asked for.
        """

@final
class Buffer:
    """
    Page-aligned host memory of exactly `nbytes` (rounded up to a page), zeroed, on huge pages where
    the kernel gives them, faulted in by all workers at once.

    Args:
        nbytes: how much.
        pool: whose workers touch it first; the default pool if None.
        lock: keep it resident.

    Raises:
        OSError: where there is no memory, or `lock` is above RLIMIT_MEMLOCK.
    """
    def __new__(cls, /, nbytes: int, *, pool: Pool | None = None, lock: bool = False) -> Buffer: ...
    @property
    def address(self, /) -> int:
        """
        Address of the first byte.
        """
    @property
    def nbytes(self, /) -> int:
        """
        Bytes asked for.
        """

@final
class DeviceSteps:
    """
    Steps Adam on a device, over parameters whose state is there.

    The state of a parameter is one piece of memory: master, `exp_avg` and `exp_avg_sq`, as many
    fp32 as it has elements each, and a 32-bit 0 behind them. A weight that differs from its rounded
    master was written by the program. It becomes the master before the step. Bits are those of a
    step in host memory with fp32 moments, but for the payload of a NaN. A step reads and writes 12
    bytes of state per parameter and its weight, and reads its gradient.

    Args:
        device: "cuda:N", or "cpu": then the calling thread steps.

    Raises:
        ValueError: for another device.
        OSError: where there is no such device, or its driver does not compile the kernel.
    """
    def __new__(cls, /, device: str) -> DeviceSteps: ...
    @staticmethod
    def state_nbytes(numel: int) -> int | None:
        """
        Bytes of the state of a parameter with so many elements; None: it has too many.
        """
    def step(self, /, weights: Sequence[int], grads: Sequence[int], states: Sequence[int], *, numels: Sequence[int], dtypes: Sequence[str], steps: Sequence[int], hypers: Sequence[Hyper], stream: int = 0) -> None:
        """
        Steps each parameter once, in the order of `stream`.

        Args:
            weights: addresses of the parameters on the device, each contiguous.
            grads: of their gradients, likewise, of the same dtypes.
            states: of their state, multiples of 4. All memory stays as it is until the stream is
                beyond the step, and none is named twice.
            numels: elements of each.
            dtypes: of each.
            steps: which update of each it is, from 1.
            hypers: the options of each.
            stream: a stream of the device.

        Raises:
            ValueError: with nothing stepped, for lists of other lengths, or what they cannot have.
            OSError: where the device has failed: then some are stepped, and some are not.
        """

@final
class Files:
    """
    Reads and writes of memory from and to files, several in flight. Any offset, size and address.

    Args:
        block_bytes: what one call moves at most.
        queue_depth: calls in flight at most.
        io_engine: "auto", "io_uring" or "positional".
        io_timeout: seconds after which drives that have ended nothing count as gone.

    Raises:
        ValueError: for arguments that cannot work.
        OSError: where io_uring is asked for and not there.
    """
    def __new__(cls, /, *, block_bytes: int = ..., queue_depth: int = ..., io_engine: str = "auto", io_timeout: float = 60.0) -> Files: ...
    @property
    def has_rings(self, /) -> bool:
        """
        Whether io_uring moves the bytes.
        """
    @property
    def num_pending(self, /) -> int:
        """
        How many reads and writes `wait` would wait for.
        """
    def read(self, /, path: str | PathLike[str], *, offset: int, address: int, nbytes: int, owner: Any) -> None:
        """
        Begins to read `nbytes` from `offset` of a file on.

        Args:
            path: of the file.
            offset: in bytes.
            address: of the memory; its bytes are nobody else's until `wait` has returned.
            nbytes: how many.
            owner: what keeps the memory alive; kept until the read is over.

        Raises:
            OSError: where the file cannot be opened.
        """
    def wait(self, /) -> int:
        """
        Waits until all that was begun is over. Interrupted by a signal it goes on where it was when
        it is called again.

        Returns:
            how many reads and writes that were.

        Raises:
            OSError: where one has failed: the first of them. All are over, and forgotten. Where
                drives do not answer, they are not over.
        """
    def write(self, /, place: int | str | PathLike[str], *, offset: int, address: int, nbytes: int, owner: Any) -> None:
        """
        Begins to write `nbytes` to `offset` of a file on, which is made if it is not there.

        Args:
            place: the path of the file, or a descriptor, which stays the caller's.
            offset: in bytes.
            address: of the memory, which is not written to until `wait` has returned.
            nbytes: how many.
            owner: what keeps the memory alive; kept until the write is over.

        Raises:
            OSError: where the file cannot be opened.
        """

@final
class GradStats:
    """
    What one read of all gradients tells.
    """
    def __repr__(self, /) -> str: ...
    @property
    def absmax(self, /) -> float:
        """
        The largest magnitude; infinite or NaN where a value is.
        """
    @property
    def finite(self, /) -> bool:
        """
        Whether all values are finite.
        """
    @property
    def sq_norm(self, /) -> float:
        """
        Sum of squares in double precision, over fixed blocks: depends on neither threads nor
        alignment. NaN if not asked for.
        """

@final
class Hyper:
    """
    What a step does, under torch's names.

    Args:
        lr: learning rate.
        betas: decay of both moments.
        eps: added to the denominator.
        weight_decay: of the weight if `decoupled`, else of the gradient.
        decoupled: AdamW rather than Adam with L2.
        bias_correction: whether moments are corrected for their start at 0.
        maximize: ascend.
        grad_scale: multiplies every gradient: inverse loss scale times clip coefficient.

    Raises:
        ValueError: naming the one that is out of its range.
    """
    def __new__(cls, /, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool, bias_correction: bool = True, maximize: bool = False, grad_scale: float = 1.0) -> Hyper: ...

@final
class Look:
    """
    What a look at the gradients has found.

    Attributes:
        params: the parameters that have a gradient, in the order of the groups.
        grads: of each its gradient.
        moved: the positions, in these lists, of what has to be bound before the step.
        groups: of each which group it is of.
        on_device: the positions of those whose state the device has.
        num_seen: how many of the store's parameters are in the groups.
        has_unknown: whether one that has a gradient is not the store's.
    """
    @property
    def grads(self, /) -> list[Any]: ...
    @property
    def groups(self, /) -> list[int]: ...
    @property
    def has_unknown(self, /) -> bool: ...
    @property
    def moved(self, /) -> list[int]: ...
    @property
    def num_seen(self, /) -> int: ...
    @property
    def on_device(self, /) -> list[int]: ...
    @property
    def params(self, /) -> list[Any]: ...

@final
class MemberFile:
    """
    A file or a block device of a volume's member, as it was found.
    """
    @property
    def drive(self, /) -> Path:
        """
        The folder that the file is in, or the device.
        """
    @property
    def holder(self, /) -> str | None:
        """
        The process that uses it, if it can be seen.
        """
    @property
    def member(self, /) -> int:
        """
        The number of the member.
        """
    @property
    def name(self, /) -> str:
        """
        The name of its volume.
        """
    @property
    def nbytes(self, /) -> int:
        """
        Bytes of the file; of a device those that the volume takes.
        """
    @property
    def num_members(self, /) -> int | None:
        """
        How many members the volume has; None: the file has no header that is whole.
        """
    @property
    def num_records(self, /) -> int | None:
        """
        How many records the volume has; None: the file has no header that is whole.
        """
    @property
    def path(self, /) -> Path:
        """
        Where it is.
        """

@final
class MemoryClaim:
    """
    Host memory that buffers will take: other processes of this host count it as used until then.

    A context manager. The claim ends behind the block, with `end`, or with the object.

    Args:
        nbytes: how much.
        held_nbytes: how much of that is taken already, by what is given back meanwhile.
        is_checked: whether the claim is refused where there is less.
    """
    def __enter__(self, /) -> MemoryClaim: ...
    def __exit__(self, /, *_args: "object") -> None: ...
    def __new__(cls, /, nbytes: int, *, held_nbytes: int = 0, is_checked: bool = True) -> MemoryClaim: ...
    def end(self, /) -> None:
        """
        What no buffer has taken is free again.
        """
    @property
    def is_refused(self, /) -> bool:
        """
        Whether nothing was claimed, since there is less.
        """
    @property
    def others(self, /) -> list[int]:
        """
        Those processes, by number.
        """
    @property
    def others_nbytes(self, /) -> int:
        """
        What other processes had claimed and not taken, in bytes.
        """
    @property
    def room_nbytes(self, /) -> int | None:
        """
        What there was, beside all claims, in bytes; None where the system does not say.
        """

@final
class OffloadEngine:
    """
    Steps Adam over host memory in the background, while gradients come down from a device and
    weights go up to it.

    Streams are the device's handles (`torch.cuda.current_stream().cuda_stream`); of "cpu" the
    calling thread is the stream, and what a stream waits for blocks it. After a failure in the
    background every call raises OSError.

    Args:
        device: where the weights are: "cuda:N", or "cpu", which copies in the background too.
        numels: elements of each tensor, in forward order.
        threads: how many of the process's workers may step, at most as many as there are; if None,
            all but one, whose core launches work meanwhile; but one and an eighth where ranks share
            the host. Of deferred steps four fifths of these, with a nice value of 10.
        threads_share: if `threads` is None, which share of these there are, rounded up.
        generations: how many optimizer steps' gradients there may be at once: 1, or 2 to take
            those of a step while the one before is stepped, into other memory.
        interval: for steps that are deferred, every how many of them a segment has its turn: 1 to
            8. None: no step is. If given, generations is 2, and the arguments below are too.
        dtypes: of each tensor's gradient and weight.
        gradients: memory for gradients, of `deferral_nbytes`.
        predicted: memory for weights that run ahead, of `deferral_nbytes`; None: none does.
        row_lens: for channels that are stepped on the device, of each tensor the elements of a row;
            0: it is no matrix. If given, the arguments below are too.
        fraction: which share of the rows or columns of every segment is selected, 0 to 1.
        selection: address of device memory of `selection_nbytes`, and what keeps it alive; the
            engine holds that.
        staging: host memory of `selection_nbytes`.
        swap: what has the state of some tensors; None: all state is in the tensors themselves.
        swapped: for each tensor, which of the swap's it is, or None.

    Raises:
        ValueError: for another device, or a bad number of threads or generations.
        OSError: where there is no such device.
    """
    def __new__(cls, /, device: str, numels: Sequence[int], *, threads: int | None = None, threads_share: float = 1.0, generations: int = 1, interval: int | None = None, dtypes: Sequence[str] | None = None, gradients: Buffer | None = None, predicted: Buffer | None = None, row_lens: Sequence[int] | None = None, fraction: float = 0.0, selection: tuple[int, Any] | None = None, staging: Buffer | None = None, swap: Swap | None = None, swapped: Sequence[int | None] | None = None) -> OffloadEngine: ...
    @property
    def busy(self, /) -> bool:
        """
        Whether a step is running on the host.
        """
    def checksums(self, /, addresses: Sequence[int], nbytes: Sequence[int], sums: int, *, stream: int = 0) -> None:
        """
        Writes checksums of memory of the device, in the order of `stream`.

        Args:
            addresses: where each memory begins.
            nbytes: its size.
            sums: where `CHECKSUM_SUMS` int64 for each are written, one after the other.

        Raises:
            ValueError: for other than as many sizes as addresses.
            OSError: where the device has no kernel for it, or has failed.
        """
    def close(self, /) -> None:
        """
        Ends it: waits for the step that runs and for all copies, and unpins. Nothing is taken or
        submitted from now on.
        """
    def discard(self, /) -> None:
        """
        Forgets the gradients that were taken since the last `submit`: of a step that is skipped or
        refused. The thread waits until their copies have ended; then both sides may be written or
        freed. Nothing happens where none were taken.

        Raises:
            OSError: where the device has failed.
        """
    def expect_parts(self, /, indices: Sequence[int], begins: Sequence[int], ends: Sequence[int], *, stream: int = 0) -> None:
        """
        Parts of gradients come to host memory by copies of the caller's, which `stream` holds all
        now. A segment is stepped when its parts are there, if it has any, and else when all is. The
        thread waits only where too many copies are on their way.

        Args:
            indices: of the tensors.
            begins: the first element of each part within its tensor.
            ends: the end of each.
            stream: the stream that copies them.

        Raises:
            ValueError: for elements that the engine does not have, while a step is running that
                reads the only generation of gradients, or for too many parts at once.
            OSError: where the device has failed.
        """
    def finish(self, /, *, stream: int = 0) -> None:
        """
        The thread waits until the step is done on the host, and `stream` for all uploads.

        Raises:
            OSError: where the step or the device has failed.
        """
    def first_segments(self, /) -> list[int]:
        """
        For each tensor the number of its first segment, and one more for the end.
        """
    def hold(self, /) -> None:
        """
        Steps that are submitted from now on begin when something waits for them, or with
        `let_begin`: what does not wait then finds the old weights, every time. For tests.
        """
    @property
    def is_held(self, /) -> bool:
        """
        Whether a step that was submitted waits for `let_begin`.
        """
    def keep_checksums(self, /, sums: int) -> None:
        """
        Keeps checksums of weights on the device: of what was uploaded last, and of what the device
        has stepped since.

        Args:
            sums: where `CHECKSUM_SUMS` int64 for each segment are, one after the other, as long as
                the engine lives.

        Raises:
            OSError: where the device has no kernel for it.
        """
    def let_begin(self, /) -> None:
        """
        Has the step that was submitted begin.
        """
    def next_group(self, /) -> int:
        """
        The group of segments whose turn comes with the next deferred step. Waits for a step that
        runs.

        Raises:
            OSError: where the step or the device has failed.
        """
    def order_after_copies(self, /, *, stream: int = 0) -> None:
        """
        What is launched on `stream` from now on comes after the copies of gradients that were taken
        since the last `submit`: it may write them. The thread waits until the device has these
        copies.

        Raises:
            OSError: where the device has failed.
        """
    def pin(self, /, buffer: Buffer, begin: int = 0, end: int | None = None) -> None:
        """
        Pins bytes `begin` to `end` of `buffer` for the device, and keeps it alive as long as the
        engine. No copy may be of bytes that are pinned and of others.

        Args:
            end: None: all from `begin` on.

        Raises:
            ValueError: for bytes that the buffer does not have.
            OSError: where the device refuses.
        """
    @property
    def pinned_nbytes(self, /) -> int:
        """
        Bytes of host memory that are pinned for copies.
        """
    def release(self, /, *, stream: int = 0) -> None:
        """
        `stream` waits for the gradients of the last `submit`: it may write them afterwards, and
        their memory may be freed to it. The thread waits until the device has all copies, that is
        for most of them.

        Raises:
            OSError: where the device has failed.
        """
    def selectable(self, /) -> list[Selectable]:
        """
        The segments of which channels may be selected.
        """
    def settle(self, /, *, stream: int = 0) -> bool:
        """
        Starts a step of all that deferred steps have left pending, after what `stream` holds now,
        and returns: all weights land, none runs ahead. Gradients of the coming step are not
        touched.

        Returns:
            whether there was anything.

        Raises:
            ValueError: while a step is running.
            OSError: where the device has failed.
        """
    def synchronize(self, /, *, stream: int = 0) -> None:
        """
        As `finish`, and the thread waits for every copy.

        Raises:
            OSError: where the step or the device has failed.
        """
    def take(self, /, indices: Sequence[int], sources: Sequence[int], targets: Sequence[TensorView], *, source_owners: Sequence[Any], target_owners: Sequence[Any], stream: int = 0) -> None:
        """
        Copies whole gradients to host memory in the background, one after the other, after what
        `stream` holds now. The thread waits only where too many copies are on their way.

        Args:
            indices: of the tensors, each once.
            sources: addresses of their gradients on the device. They stay as they are until
                `release`, `discard` or `synchronize`.
            targets: host memory, not used until the step is done, or discarded.
            source_owners: what keeps the sources alive; the engine holds it until then.
            target_owners: what keeps the targets alive; the engine holds it until then.
            stream: the stream that made the gradients.

        Raises:
            ValueError: for a tensor or a size that is not the engine's, or while a step is running
                that reads the only generation of gradients.
            OSError: where the device has failed.
        """
    def take_deferred(self, /, indices: Sequence[int], sources: Sequence[int], *, source_owners: Sequence[Any], stream: int = 0) -> None:
        """
        As `take`, to the engine's own memory for deferred gradients.

        Args:
            indices: of the tensors, each once.
            sources: addresses of their gradients on the device. They stay as they are until
                `release`, `discard` or `synchronize`.
            source_owners: what keeps the sources alive; the engine holds it until then.
            stream: the stream that made the gradients.

        Raises:
            ValueError: for a tensor that is not the engine's, or of an engine that defers nothing.
            OSError: where the device has failed.
        """
    def take_part(self, /, sources: Sequence[int], targets: Sequence[TensorView], *, source_owners: Sequence[Any], target_owners: Sequence[Any], stream: int = 0) -> None:
        """
        Copies any device memory to host memory in the background, after what `stream` holds now;
        the next step begins when all of it is there. The thread waits only where too many copies
        are on their way.

        Args:
            sources: addresses on the device. It stays as it is until `release`, `discard` or
                `synchronize`.
            targets: host memory, which says how much.
            source_owners: as of `take`.
            target_owners: as of `take`.
            stream: the stream that made it.

        Raises:
            ValueError: while a step is running that reads the only generation of gradients, or for
                too many copies at once.
            OSError: where the device has failed.
        """
    @property
    def threads(self, /) -> int:
        """
        Workers that step.
        """
    def timing(self, /) -> "dict[str, float]":
        """
        Of the last step: seconds of `step` (first chunk to last) and, within it, `gradients`
        (waiting for them); `bytes_downloaded`, `bytes_uploaded`; `oldest_age`: how many steps
        before it the oldest gradient came that no turn has applied.
        """
    def wait(self, /, index: int, begin: int, end: int, *, stream: int = 0) -> None:
        """
        `stream` waits for the uploads of the elements `begin` to `end` of a tensor; the thread only
        until they are enqueued.

        Raises:
            ValueError: for elements that the engine does not have.
            OSError: where the step or the device has failed.
        """

@final
class Pool:
    """
    Persistent workers, each pinned to a core: performance cores before efficiency cores, within the
    allowed set.

    Args:
        threads: number of workers; all allowed physical cores if None.
        cpus: the CPU of each worker.

    Raises:
        ValueError: for a count or list that cannot be.
    """
    def __new__(cls, /, *, threads: int | None = None, cpus: Sequence[int] | None = None) -> Pool: ...
    @property
    def cpus(self, /) -> list[int]:
        """
        The CPU of each worker.
        """
    @staticmethod
    def default() -> Pool:
        """
        The process's pool, made on first use: `STEPWELL_THREADS`, the affinity mask, and this
        rank's share of the host.
        """
    @property
    def threads(self, /) -> int:
        """
        Number of workers.
        """

@final
class Selectable:
    """
    A segment of which channels may be selected.
    """
    @property
    def column_count(self, /) -> int:
        """
        How many columns may.
        """
    @property
    def first(self, /) -> int:
        """
        The element of the tensor that its rows begin with.
        """
    @property
    def group(self, /) -> int:
        """
        Which group it has its turns with.
        """
    @property
    def row_count(self, /) -> int:
        """
        How many rows may be selected.
        """
    @property
    def row_len(self, /) -> int:
        """
        Elements of a row.
        """
    @property
    def rows(self, /) -> int:
        """
        How many rows.
        """
    @property
    def segment(self, /) -> int:
        """
        Which segment of the engine.
        """
    @property
    def tensor(self, /) -> int:
        """
        Which tensor of the engine.
        """

@final
class StatePart:
    """
    One array of a parameter's state.
    """
    @property
    def dtype(self, /) -> str:
        """
        torch's name of its dtype, without the `torch.` prefix.
        """
    def length(self, /, numel: int) -> int:
        """
        Entries for a parameter of `numel` elements.

        Raises:
            ValueError: for more elements than there can be.
        """
    @property
    def name(self, /) -> str:
        """
        Its name: the key in a state dict.
        """
    @property
    def per_element(self, /) -> bool:
        """
        Whether it has one entry for each element of the parameter.
        """

@final
class Store:
    """
    Parameters with their states, which are stepped together.

    Args:
        is_beside: whether they are beside a device; else they are in host memory, and stepped
            there.
        engine: has the host sides of those that were added; None: the device has all state.
    """
    def __new__(cls, /, *, is_beside: bool = False, engine: OffloadEngine | None = None) -> Store: ...
    def add(self, /, params: Sequence[Any]) -> None:
        """
        Adds parameters that are stepped beside a device, in the order of the engine's tensors.
        (Those in host memory are added where `look` finds them.)
        """
    def bind(self, /, position: int, tensor: AdamTensor | None, grad: Any, *, state: Any, parts: Sequence[tuple[str, Any, Any]], piece: Any | None = None, target: int | None = None, is_kept: bool = True, write_backs: Sequence[Any] = ...) -> None:
        """
        Binds what is at `position` of the last look.

        Args:
            position: in its lists.
            tensor: what the core steps, with the gradient's memory in the host; None: this rank
                has nothing of the parameter.
            grad: the gradient that is stepped, dense.
            state: the optimizer's state of it.
            parts: of the state what the step works with: its name, what the state has, and what
                this rank has of that.
            piece: what is stepped of the parameter; None: the parameter itself.
            target: where on the device the new weight goes, in memory that the caller keeps alive;
                0: it stays in host memory, where the step writes it. None: to the parameter.
            is_kept: whether the next step may go on with it.
            write_backs: what is called without arguments behind the step, functions of C.

        Raises:
            ValueError: the gradient is another than the tensor's, or lies elsewhere.
        """
    def bind_on_device(self, /, position: int, grad: Any, *, memory: Any, state: Any, piece: Any | None = None, is_kept: bool = True) -> None:
        """
        Binds what is at `position` of the last look, whose state is on the device.

        Args:
            position: in its lists.
            grad: the gradient that is stepped, dense, at a multiple of its elements' size.
            memory: the state, `DeviceSteps.state_nbytes` on the device. The caller holds it while
                the optimizer's state is `state`.
            state: what the optimizer has in its place.
            piece: what is stepped of the parameter; None: the parameter itself.
            is_kept: whether the next step may go on with it.

        Raises:
            ValueError: the gradient or the memory is not that of the parameter.
        """
    def discard(self, /) -> None:
        """
        Forgets the last look, of a step that is not taken: its gradients may be freed.
        """
    @property
    def has_left(self, /) -> bool:
        """
        Whether this rank has not taken a step on which all ranks have decided: set by the caller,
        cleared by the step itself.
        """
    @has_left.setter
    def has_left(self, /, value: bool) -> None:
        """
        Whether this rank has not taken a step on which all ranks have decided: set by the caller,
        cleared by the step itself.
        """
    @property
    def held(self, /) -> list[Any]:
        """
        The parameters whose storage the store keeps alive between deferred steps, by one reference
        each.
        """
    @property
    def landing(self, /) -> list[Any]:
        """
        The parameters whose weights come from the host with the step of the last look: its own, and
        those that are pending.
        """
    def look(self, /, groups: Sequence[Sequence[Any]], states: Any | None, seeds: Any, *, grads: Sequence[Any] | None = None) -> Look:
        """
        Finds the gradients of the step that comes.

        Args:
            groups: the parameters of each group.
            states: those of the optimizer, by parameter; None: no program has them, so none has
                changed.
            seeds: of each group, of its stochastic rounding. Where they have changed all is bound
                anew.
            grads: of each parameter of all groups its gradient; None in it: there is none. None:
                they are what the parameters have as `grad`.

        Raises:
            ValueError: other than as many gradients as parameters are given.
            Whatever torch raises of a tensor.
        """
    def note_settled(self, /) -> None:
        """
        Nothing is pending any more, and the engine writes no weight.
        """
    @property
    def num_settled(self, /) -> int:
        """
        How often all that was pending has been applied.
        """
    def numbers(self, /) -> list[int]:
        """
        The number of the update that comes of each parameter of the last look, from 1; 0: it is not
        bound.
        """
    def overlapping(self, /) -> list[int]:
        """
        The positions, in the last look's lists, of gradients that lie in memory which the step
        writes.
        """
    @property
    def params(self, /) -> list[Any]:
        """
        The parameters.
        """
    @property
    def pending(self, /) -> list[Any]:
        """
        The parameters of which the device may lack an update, or have a predicted weight.
        """
    @property
    def record(self, /) -> Any | None:
        """
        What the caller has said of the last step that has begun; None: none has.
        """
    def set_residents(self, /, params: Sequence[Any], steps: DeviceSteps | None) -> None:
        """
        Has the parameters whose state is on the device be these, after all of `add`. Where they
        are others than before, the last look is forgotten.

        Args:
            params: the parameters.
            steps: steps them.
        """
    def stats(self, /) -> GradStats:
        """
        Finite check and largest magnitude of the gradients of the last look, which are in host
        memory; the GIL is released.
        """
    def step(self, /, hypers: Sequence[Hyper]) -> None:
        """
        Steps what the last look has found, all of it or nothing; the arithmetic runs without the
        GIL.

        Args:
            hypers: of each group, as it was given to `look`.

        Raises:
            ValueError: with nothing changed: a gradient or a parameter was given other memory since
                the look, or memory overlaps.
        """
    def submit(self, /, hypers: Sequence[Hyper], *, buffers: Sequence[Any], stream: int, record: Any, order: Sequence[int] | None = None, verified: set[int] | None = None, deferred: Incomplete | None = None, selected: Sequence[tuple[int, bool, Sequence[int]]] | None = None, protection: tuple[Sequence[tuple[Any, Any]], Sequence[tuple[type, Sequence[Any]]]] = ..., begun: Sequence[Any] = ...) -> bool:
        """
        Starts the step of what the last look has found, in the background: all of it, or nothing.
        Gradients on the device may be written after `release`.

        Args:
            hypers: of each group, as it was given to `look`.
            buffers: what has the memory of all host sides.
            stream: the stream that uses the weights.
            record: what is the store's `record` from the moment on in which the step has begun.
            order: of each parameter its place in the step; None: as they were added.
            verified: the spans of which fingerprints are verified, and taken.
            deferred: how updates are deferred: `predicted_updates`, `steps_pending`, `at_once`, and
                the `num_settled` of then. None: none is, and all that is pending is applied.
            selected: as `OffloadEngine.submit`; None: no channel is selected.
            protection: what has uses of tensors wait that the step writes: dicts, each with a dict
                that is put into it, and classes, each with the tensors that get it.
            begun: what is called without arguments when the step has begun, functions of C.

        Returns:
            whether updates are deferred: not where all that was pending has been applied since.

        Raises:
            ValueError: with nothing changed: a parameter or a gradient was given other memory since
                the look; what `OffloadEngine.submit` refuses.
            OSError: where the device has failed.
        """
    def take(self, /, positions: Sequence[int], *, buffers: Sequence[Any], stream: int, is_deferred: bool, order: Sequence[int] | None = None) -> None:
        """
        Copies gradients of the last look to host memory, in the background, after what `stream`
        holds now.

        Args:
            positions: in the look's lists.
            buffers: what has the memory of all host sides.
            stream: the stream that made them.
            order: of each parameter its place in the step; None: as they were added.

        Raises:
            ValueError: as `OffloadEngine.take`.
            OSError: where the device has failed.
        """
    def take_checksums(self, /, sums: int, *, stream: int) -> list[int]:
        """
        Writes the checksums of the weights on the device that come with the step of the last look,
        as `OffloadEngine.keep_checksums` has them, in the order of `stream`. Those of others are
        left as they are.

        Args:
            sums: where `CHECKSUM_SUMS` int64 for each segment are, one after the other.
            stream: the stream that has waited for these weights.

        Returns:
            the spans of which none was taken: these are not what they were, of another size, dtype
            or device.

        Raises:
            OSError: where the device has failed.
        """
    def unbind(self, /) -> None:
        """
        Looks at all parameters and states anew in the next step, as if it were the first.
        """

@final
class Swap:
    """
    The state of some parameters, on a volume and in host memory of its own.

    Args:
        drives: a folder or a block device for each member of the volume.
        places: the parameters; their state is at addresses of `addresses`.
        addresses: what the places are made of.
        name: of the volume; if None, one that no other job has.
        weights: the bandwidth of each member; empty: all are alike.
        stripe_bytes: the most bytes of a record that lie together on one member.
        durability: "commit", a crash leaves the last committed step whole; or "none".
        keep: whether the files stay.
        resume: whether to go on from the volume, where it has a committed step.
        step: of a volume that is resumed, the committed step to go on from: the last one, or the
            one before it, if nothing was written since; None: the last one.
        counts_each_step: whether a step counts that changes nothing here.
        commit_interval: steps from one commit to the next. The first step is committed too.
        run: what its commits say of the run that makes them; the same for the volumes of all ranks.
        packed: the places whose fp32 masters are packed beside their bfloat16 weights. These stay
            where they are, and only steps write them.
        ram_nbytes: host memory for the state of the first chunks.
        buffers_nbytes_max: the most host memory for what is on its way.
        workers: how many step.
        io_engine: "auto", "io_uring" or "positional".
        queue_depth: operations that each drive is given at once.
        io_timeout: seconds that a drive may take to answer.

    Raises:
        ValueError: for arguments that cannot work, or a volume of other parameters.
        OSError: where a drive is full, or a member is missing, used or damaged.
    """
    def __new__(cls, /, drives: Sequence[str | PathLike[str]], places: Sequence[AdamTensor], *, addresses: AddressSpace, name: str | None = None, weights: Sequence[int] = ..., stripe_bytes: int = ..., durability: str = "commit", keep: bool = False, resume: bool = False, step: int | None = None, counts_each_step: bool = False, commit_interval: int = ..., identity: int = 0, run: int = 0, packed: Sequence[int] = ..., ram_nbytes: int = 0, buffers_nbytes_max: int = ..., workers: int | None = None, io_engine: str = "auto", queue_depth: int = ..., io_timeout: float = 60.0) -> Swap: ...
    @property
    def buffers_nbytes(self, /) -> int:
        """
        Bytes of host memory for what is on its way.
        """
    @property
    def bytes_moved(self, /) -> tuple[int, int]:
        """
        Bytes that were read from the drives, and written, since it was made.
        """
    def check(self, /) -> None:
        """
        Raises OSError if a step, a write or a commit has failed.
        """
    def close(self, /, *, keep: bool | None = None) -> None:
        """
        Removes the files, unless they are kept, and uses them no more.

        Args:
            keep: whether they are kept; None: as the volume was made.
        """
    def commit(self, /) -> None:
        """
        Commits the last step, if it is not committed. Not while a step runs. Ctrl-C is raised when
        that has ended.

        Raises:
            ValueError: while a step runs, or before all `weights_behind` are written.
            OSError: where a drive fails.
        """
    @property
    def commits_next(self, /) -> bool:
        """
        Whether a commit ends the next step.
        """
    @property
    def counts(self, /) -> list[int] | None:
        """
        Of a volume that was resumed: how many updates each parameter has seen. None: it is new.
        """
    @property
    def has_rings(self, /) -> bool:
        """
        Whether io_uring moves the bytes.
        """
    @property
    def is_behind(self, /) -> bool:
        """
        Whether the last step that was made is not committed.
        """
    @property
    def is_direct(self, /) -> bool:
        """
        Whether the page cache is bypassed on every member.
        """
    @property
    def is_kept(self, /) -> bool:
        """
        Whether files stay when the volume ends, and it commits steps.
        """
    @property
    def name(self, /) -> str:
        """
        The volume's name.
        """
    @property
    def paths(self, /) -> list[Path]:
        """
        The files of its members.
        """
    @property
    def ram_nbytes(self, /) -> int:
        """
        Bytes of host memory for the state of the first chunks.
        """
    def read(self, /, tensor: int, to: AdamTensor, *, begin: int = 0, end: int | None = None) -> None:
        """
        Copies the state of a parameter to memory, as it is after the last step. Not while one runs.

        Args:
            tensor: which of the places.
            to: the parameter with memory for its state; its fingerprints are left alone.
            begin: the first element that is copied; those of its chunk are copied with it.
            end: the element before which copying ends, likewise; None: the last one is copied too.

        Raises:
            ValueError: for another layout, elements that there are not, or while a step runs.
            OSError: where a drive fails.
        """
    def read_weights(self, /, tensor: int, to: TensorView) -> None:
        """
        Copies the weights of a parameter's last committed step to memory, where it was stepped.

        Args:
            tensor: which of the places.
            to: memory for the weight.

        Raises:
            ValueError: for another dtype or size, or without durability "commit".
            OSError: where a drive fails.
        """
    @property
    def resumed_run(self, /) -> int | None:
        """
        Of a volume that was resumed: the `run` of the commit that it goes on from. None: it is new.
        """
    @property
    def step(self, /) -> int | None:
        """
        The number of the last step that is committed; None: none is.
        """
    @property
    def step_before(self, /) -> int | None:
        """
        Of a volume that was resumed: the committed step before the one that it was resumed at. It
        can go back to it while nothing was written. None: there is none, or it is new.
        """
    def weights_behind(self, /) -> list[int]:
        """
        Which of the places have weights that the next commit would lack, unless its step writes
        them.
        """
    def write_weights(self, /, tensor: int, weights: TensorView) -> None:
        """
        Writes the weights of a parameter, as its last step has left them, for the next commit. Not
        while a step runs.

        Args:
            tensor: which of the places.
            weights: memory of them.

        Raises:
            ValueError: for another dtype or size, or while a step runs.
            OSError: where a drive fails.
        """

@final
class TensorView:
    """
    A dense run of `numel` elements of `dtype` at `address`.

    The caller that makes a view keeps the memory alive, and unused by other code, during the calls
    that it is handed to.

    Args:
        address: of the first element, in bytes; a multiple of the element's size (of 4 for uint8).
        dtype: "float32", "bfloat16", "float16", "int16", "int32", "uint8" or "float64".
        numel: number of elements.

    Raises:
        ValueError: for an unknown dtype, or an address that cannot hold the elements.
    """
    def __new__(cls, /, *, address: int, dtype: str, numel: int) -> TensorView: ...
    def __repr__(self, /) -> str: ...
    @property
    def address(self, /) -> int:
        """
        Address of the first element, in bytes.
        """
    @property
    def dtype(self, /) -> str:
        """
        torch's name of the dtype, without the `torch.` prefix.
        """
    @property
    def numel(self, /) -> int:
        """
        Number of elements.
        """

@final
class VolumePasses:
    """
    A volume of records of one size, to measure what it moves. Its files are removed with it.

    Args:
        drives: a folder or a block device for each member.
        record_nbytes: bytes of a record.
        num_records: how many.
        num_buffers: records in flight.
        weights: the bandwidth of each member; empty: all are alike.
        stripe_bytes: the most bytes of a record that lie together on one member.
        durability: "commit" or "none".
        io_engine: "auto", "io_uring" or "positional".
        queue_depth: operations that each drive is given at once.
        io_timeout: seconds that a drive may take to answer.

    Raises:
        ValueError: for arguments that cannot work.
        OSError: where a drive is full or fails.
    """
    def __new__(cls, /, drives: Sequence[str | PathLike[str]], *, record_nbytes: int, num_records: int, num_buffers: int, weights: Sequence[int] = ..., stripe_bytes: int = ..., durability: str = "none", io_engine: str = "auto", queue_depth: int = ..., io_timeout: float = 60.0) -> VolumePasses: ...
    def close(self, /) -> None:
        """
        Removes the files.
        """
    @property
    def has_rings(self, /) -> bool | None:
        """
        Whether io_uring moves the bytes; None after `close`.
        """
    @property
    def is_direct(self, /) -> bool | None:
        """
        Whether the page cache is bypassed on every member; None after `close`.
        """
    def run(self, /, pattern: str) -> tuple[int, int]:
        """
        One pass over all records.

        Args:
            pattern: "write", "read" or "swap", which reads and writes each record.

        Returns:
            the bytes that were read, and written.

        Raises:
            ValueError: for another pattern, or after `close`.
            OSError: where a drive fails.
        """

def adam_step(tensors: Sequence[AdamTensor], *, steps: Sequence[int], hyper: Hyper, pool: Pool | None = None) -> None:
    """
    Steps every tensor once, in place, in one pass over each; the GIL is released.

    Formula: Adam (Kingma and Ba, 2015, algorithm 1), AdamW if `decoupled` (Loshchilov and Hutter,
    2019, algorithm 2). Bias corrections are computed in double precision. Bits depend on neither
    threads nor ISA.

    Args:
        tensors: each with a gradient.
        steps: for each tensor the number of this update, from 1.
        hyper: what to step them with.
        pool: the default pool if None.

    Raises:
        ValueError: before anything is changed: a hyper-parameter out of range, a tensor without a
            gradient, memory that overlaps.
    """

def build_info() -> "dict[str, object]":
    """
    How this module was built: a dict of plain values, for bug reports.
    """

def check_volume(name: str, drives: Sequence[str | PathLike[str]]) -> tuple[int | None, int, list[str]]:
    """
    Reads every record of a volume that no process uses.

    Returns:
        the committed step, how many records there are, and what is wrong, one text each.

    Raises:
        ValueError: for a name that a volume cannot have.
        OSError: where a process uses it, or a member is missing or damaged.
    """

def choose_channels(norms: TensorView, extents: Sequence[tuple[int, int, int, int]]) -> list[tuple[bool, list[int], float, float]]:
    """
    Of each matrix the rows or columns with the largest norms; the GIL is released.

    Of the axis whose chosen channels capture more; rows where both capture the same, or no column
    may be chosen. Of equal norms the one with the lowest index comes first, a NaN after all
    numbers. Takes linear time.

    Args:
        norms: a float32 view: for each matrix the norms of its rows, then those of its columns.
        extents: for each matrix its rows and columns, and how many of each may be chosen.

    Returns:
        for each matrix whether channels are columns, the chosen ones, ascending, their squared norm
        and that of the whole matrix.

    Raises:
        ValueError: for another dtype or size, or more channels than there are.
    """

def connect() -> None:
    """
    Has the core's log records come to Python's `logging`, under "stepwell", and remembers this
    process's affinity mask. Called once, by the package, before it imports torch.
    """

def deferral_nbytes(numels: Sequence[int], dtypes: Sequence[str], interval: int) -> tuple[int, int]:
    """
    Bytes of host memory that an engine needs for steps that are deferred.

    Args:
        numels: elements of each tensor, in forward order.
        dtypes: of each tensor's gradient and weight.
        interval: every how many deferred steps a segment has its turn: 1 to 8.

    Returns:
        for gradients, and for weights that run ahead.

    Raises:
        ValueError: for an interval out of range.
    """

def format_device(device: str | PathLike[str], *, overwrite: bool = False) -> None:
    """
    Prepares a block device for volumes. Everything on it is lost.

    Args:
        device: its path.
        overwrite: whether anything may be there.

    Raises:
        ValueError: for another file, a device that is too small, or one that has something.
        OSError: where something uses it, or it cannot be written.
    """

def free_memory_bytes() -> int | None:
    """
    Bytes of host memory that this process can still take: what the kernel estimates, and what its
    control groups leave; less what processes have claimed of that. None where the system does not
    say.
    """

def grad_stats(grads: Sequence[TensorView], *, norm: bool = True, pool: Pool | None = None) -> GradStats:
    """
    Finite check, largest magnitude and, with `norm`, squared norm of all gradients in one read; the
    GIL is released.

    Raises:
        ValueError: for a dtype that gradients do not have.
    """

def list_members(drive: str | PathLike[str]) -> list[MemberFile]:
    """
    The files of volumes' members in a folder, by name; of a block device the member that it is, if
    any. Takes no lock.

    Raises:
        OSError: where the drive cannot be read.
    """

def master_parts(dtype: str) -> list[StatePart]:
    """
    What is kept beside a parameter of this dtype so that all bits of its master are.

    Raises:
        ValueError: for a dtype that parameters do not have.
    """

def moments_codecs() -> list[str]:
    """
    Names of the codecs of moments.
    """

def moments_parts(codec: str) -> list[StatePart]:
    """
    The parts of moments in this codec.

    Raises:
        ValueError: for an unknown codec.
    """

def num_chunks(numel: int) -> int:
    """
    Chunks of a parameter of `numel` elements.
    """

def places_of_ranks(num_ranks: int) -> list[tuple[list[int], str | None]]:
    """
    What would fall to each of `num_ranks` ranks of this host, with the CPUs that this process may
    use.

    Returns:
        for each rank the CPUs of its workers, and the PCI address of its GPU, if that is known.

    Raises:
        ValueError: for no ranks.
    """

def read_state(tensor: AdamTensor, *, master: TensorView | None = None, exp_avg: TensorView | None = None, exp_avg_sq: TensorView | None = None, pool: Pool | None = None) -> None:
    """
    Decodes a tensor's state into float32 views of `numel` elements: the master, both moments, or
    all three.

    Raises:
        ValueError: for views of another dtype or size, that overlap, or one moment without the
            other.
    """

def remove_volume(name: str, drives: Sequence[str | PathLike[str]]) -> None:
    """
    Removes the files of a volume that no process uses, and makes its devices free.

    Raises:
        ValueError: for a name that a volume cannot have.
        OSError: where a process uses it, or none of its files is there.
    """

def selection_nbytes(numels: Sequence[int], dtypes: Sequence[str], interval: int, row_lens: Sequence[int], *, fraction: float) -> tuple[int, int]:
    """
    Bytes that an engine needs for channels that are stepped on the device.

    Args:
        numels: elements of each tensor, in forward order.
        dtypes: of each tensor's gradient and weight.
        interval: as of `deferral_nbytes`.
        row_lens: elements of a row of each; 0: it is no matrix.
        fraction: which share of the rows or columns of every segment is selected, 0 to 1.

    Returns:
        of device memory, and of host memory.

    Raises:
        ValueError: for an interval or a fraction out of range.
    """

def stream_ceiling(*, numel: int, read_write_bytes: Sequence[int], read_bytes: Sequence[int], write_bytes: Sequence[int], passes: int = 5, pool: Pool | None = None) -> float:
    """
    Seconds of one pass over `numel` elements of streams with these bytes per element, on the pool,
    with next to no arithmetic: the ceiling of a kernel that reads and writes as much.

    Args:
        numel: elements.
        read_write_bytes: streams that are read and written in place.
        read_bytes: streams that are only read.
        write_bytes: streams that are only written.
        passes: the median of how many.
        pool: the default pool if None.

    Raises:
        ValueError: for no elements or no streams.
        OSError: where there is no memory for them.
    """

def swap_buffers_nbytes(drives: Sequence[str | PathLike[str]], places: Sequence[AdamTensor], *, durability: str = "commit", packed: Sequence[int] = ..., buffers_nbytes_max: int = ..., workers: int | None = None) -> int:
    """
    Bytes of the buffers of a swap, at most; the arguments are its own.

    Raises:
        ValueError: for another durability.
    """

def system_info() -> "dict[str, object]":
    """
    What this machine is, as `stepwell doctor` shows it: a dict of plain values.

    A setting that is refused ends nothing here: `isa` or `pool_cpus` is None then, and `isa_error`
    or `pool_error` holds the message.
    """

def take_fingerprints(tensor: AdamTensor, *, pool: Pool | None = None) -> None:
    """
    Takes the fingerprints of a bfloat16 parameter whose trailing bits belong to it: after steps
    without fingerprints, before other code may write the parameter.

    Raises:
        ValueError: for a tensor without fingerprints.
    """

def write_state(tensor: AdamTensor, *, step: int, master: TensorView | None = None, exp_avg: TensorView | None = None, exp_avg_sq: TensorView | None = None, pool: Pool | None = None) -> None:
    """
    Encodes float32 views of `numel` elements into a tensor's state; a master also writes the
    parameter itself.

    Args:
        step: seeds the stochastic rounding; the count of updates that the moments hold.

    Raises:
        ValueError: as `read_state`.
    """
