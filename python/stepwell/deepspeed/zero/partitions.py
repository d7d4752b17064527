"""Flat partitions of a model on the offload engine: the data of ZeRO. Imports no DeepSpeed.

A partition is the part of a parameter group that this rank steps. Its weights are contiguous on the
device. In host memory it has a master, a gradient and, where the master has another dtype, a twin
of the weights. Bytes per parameter for a 16-bit model with fp32 master and moments: 4 + 2 + 2, and
8 for the moments, which the caller holds. All of it is announced before any is taken.

The weights may also be in host memory, whence the caller uploads them by itself. Then they are
their own twin: a step writes them in place, and the engine uploads nothing. Where the master has
their dtype they are copied from it at the end of the step.

- A gradient is summed on the device until it is complete. Then it crosses the bus once, in the
  dtype that it has. Its device memory is free as soon as it has crossed.
- Or it is summed in host memory (`add_on_host`): then the sum comes up and goes down again in each
  backward, and the device holds none. The additions are the same in the same order: the same bits.
- The norm of each gradient is computed where it is complete. The host waits once, for all norms.
- An element that got no gradient is stepped with the gradient 0.
- A gradient that a program sets is held in the master's precision until the next one arrives. For a
  step with such a gradient its whole partition is widened: 4 bytes per parameter, announced then.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _core
from stepwell._tensors import tensor_on, view
from stepwell.deepspeed.zero.lanes import CudaLane, EngineLane
from stepwell.offload import adder
from stepwell.offload.adder import Adder, norm_of
from stepwell.offload.budget import announce
from stepwell.offload.engine import current_stream, device_name
from stepwell.offload.guard import exposed
from stepwell.offload.writes import Writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stepwell.deepspeed.zero.lanes import Lane

__all__ = [
    "Fragment",
    "FragmentUploads",
    "Partition",
    "PartitionWork",
    "Partitions",
    "Update",
    "without_data",
]


class Fragment(NamedTuple):
    """The part of a parameter that lies in this rank's partition of its group."""

    group: int
    """Number of the group."""
    begin: int
    """First element, within the partition."""
    numel: int
    """How many."""


class Partition(NamedTuple):
    """A partition as the caller has it."""

    master: torch.Tensor
    """What is stepped: flat, in host memory; or empty, and then it begins as a copy of the weights.

    Its data is moved to memory that suits the engine. The tensor object stays.
    """
    weight: torch.Tensor
    """Flat, as many elements: on the device, or in host memory."""
    grad_dtype: torch.dtype
    """Of its gradients."""
    moments_bytes: int
    """Of its moments, which the caller will take."""
    is_offloaded: bool = False
    """Whether `weight` is in host memory."""


def without_data(shape: torch.Tensor) -> torch.Tensor:
    """A master that begins as a copy of the weights, in the dtype of `shape`."""
    return torch.empty(0, dtype=shape.dtype, device="cpu", requires_grad=True)


class Update(NamedTuple):
    """One partition of a step."""

    group: int
    tensor: _core.AdamTensor
    step: int
    hyper: _core.Hyper


class Partitions:
    """Gradients, norms, steps and waits of a list of partitions, one per group.

    Attributes:
        grads: the host side of each partition's gradient, flat. Only valid after `arrive`.
        twins: the host side of each partition's weights; None where that is the master itself.

    Args:
        partitions: of all groups.
        device: where gradients are made, and weights that are not offloaded are.
        threads: workers that step; None: one per physical core of this process, but one.
        host_bytes_max: the most host memory that may be taken; None: what is free.
        is_pinned: whether the host side of gradients and weights is pinned.
        adds_on_host: whether gradients of several backwards are summed in host memory.

    Raises:
        OSError: the device or the memory cannot be had.
        ValueError: there is not as much memory.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        *,
        device: torch.device,
        threads: int | None = None,
        host_bytes_max: int | None = None,
        is_pinned: bool = True,
        adds_on_host: bool = False,
    ) -> None:
        self._adds_on_host = adds_on_host
        self._host_bytes_left = _announce(partitions, host_bytes_max, is_pinned=is_pinned)
        self.device = device
        numels = [partition.weight.numel() for partition in partitions]
        self._engine = _core.OffloadEngine(device_name(self.device), numels, threads=threads)
        self._submit_stream = 0
        # None while a step is being submitted: weights that are waited for then are old ones.
        self._step_stream: int | None = 0
        self._lane = (
            CudaLane(self.device) if self.device.type == "cuda" else EngineLane(self._engine)
        )
        self._finalizer = weakref.finalize(self, _drain, self._engine, self._lane)
        self.grads: list[torch.Tensor] = []
        self.twins: list[torch.Tensor | None] = []
        # Offloaded weights with the masters that they are copies of, and whether the last step has
        # not been copied.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_uncopied = False
        for master, weight, grad_dtype, _, is_offloaded in partitions:
            numel, is_same = weight.numel(), master.dtype == weight.dtype
            moved = self._memory(
                numel, master.dtype, pinned=is_pinned and is_same and not is_offloaded
            )
            twin = None
            if is_same:
                self._copies += [(weight, master)] if is_offloaded else []
            elif is_offloaded:
                twin = weight
            else:
                twin = self._memory(numel, weight.dtype, pinned=is_pinned)
            if master.numel() == numel:
                moved.copy_(master.detach())
            elif twin is None or is_offloaded:
                moved.copy_(weight)
            else:
                # By way of pinned memory, and widened by all cores.
                moved.copy_(twin.copy_(weight))
            master.data = moved
            self.twins.append(twin)
            self.grads.append(self._memory(numel, grad_dtype, pinned=is_pinned))
        self._is_offloaded = [partition.is_offloaded for partition in partitions]
        self._master_dtypes = [partition.master.dtype for partition in partitions]
        # What a program has set since a fragment's gradient arrived, where `grads` is narrower.
        self._values_set: dict[Fragment, torch.Tensor] = {}
        self._widened: dict[int, torch.Tensor] = {}
        # Fragments that a program has set since the last step.
        self._set: set[Fragment] = set()
        # Fragments whose gradient has not been stepped; what others were scaled by.
        self._unscaled: set[Fragment] = set()
        self._last_grad_scale = 1.0
        # Sums that are not complete; and the norms of complete ones, which are on their way.
        self._sums: dict[Fragment, torch.Tensor] = {}
        self._norms: dict[Fragment, list[torch.Tensor]] = {}
        # Sums in host memory, complete or not.
        self._on_host: set[Fragment] = set()
        self._adder: Adder | None = None
        # Fragments whose gradient of some step lies in host memory.
        self._written: set[Fragment] = set()
        # Of the step that is being prepared, and of the one before.
        self._bytes_sent = self._bytes_downloaded = 0
        self._seconds_waited = 0.0
        self._writes: Writes[Sequence[Fragment]] = Writes(self._wait_for_parts)

    def _memory(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        buffer = _core.Buffer(numel * dtype.itemsize)
        if pinned:
            self._engine.pin(buffer)
        return tensor_on(buffer).view(dtype)

    def pin(self, buffer: _core.Buffer) -> None:
        """Pins the memory of weights that are offloaded, as long as this object can step."""
        self._engine.pin(buffer)

    # ---- gradients ----

    def collect(
        self, fragment: Fragment, piece: torch.Tensor, *, is_owned: bool, is_last: bool
    ) -> None:
        """Adds to the gradient of a fragment, where that is summed.

        Args:
            fragment: whose gradient.
            piece: what is added: flat.
            is_owned: whether `piece` alone uses its memory from now on.
            is_last: whether the gradient is complete then.
        """
        # A lone backward of a step has nothing to be added to.
        if self._adds_on_host and (fragment in self._on_host or not is_last):
            self.add_on_host(fragment, piece if is_owned else piece.clone(), is_last=is_last)
            return
        self.add(fragment, piece, is_owned=is_owned)
        if is_last:
            self.send(fragment)

    def add(
        self, fragment: Fragment, piece: torch.Tensor, *, is_owned: bool, is_total: bool = False
    ) -> None:
        """Adds to the gradient of a fragment, on the device.

        Args:
            fragment: whose gradient.
            piece: what is added: flat.
            is_owned: whether `piece` alone uses its memory from now on.
            is_total: whether `piece` is the sum of all that was added, in memory that holds it
                until the step.
        """
        known = self._sums.get(fragment)
        if known is not None and not is_total:
            known.add_(piece)
        else:
            self._sums[fragment] = piece if is_owned or is_total else piece.clone()
        if is_total:
            # A sum that is on its way already is out of date.
            self._norms.pop(fragment, None)

    def has_gradient(self, fragment: Fragment) -> bool:
        """Whether a fragment has got a gradient since the last step, or has no elements."""
        found = (self._sums, self._norms, self._on_host)
        return fragment.numel == 0 or any(fragment in each for each in found)

    def send(self, fragment: Fragment) -> None:
        """The gradient of a fragment is complete: it is copied to the host."""
        if fragment.numel == 0:
            self._sums.pop(fragment, None)
            return
        if self._engine.busy:
            # Some weight of the last step has not been used.
            self.finish()
        piece, target = self._sums.pop(fragment), self._grad(fragment)
        if fragment in self._norms:
            # A second backward after the one that was announced as the last.
            self.arrive()
            target = self._values_set.get(fragment, target)
            target.add_(piece.to(target.device, target.dtype))
            self._norms[fragment] = [norm_of(target).to(self.device)]
            return
        self._norms[fragment] = [norm_of(piece)]
        self._arriving(fragment)
        self._bytes_sent += piece.nbytes
        self._lane.copy(piece, target)

    def add_on_host(
        self, fragment: Fragment, piece: torch.Tensor, *, is_last: bool = False
    ) -> None:
        """Adds to the gradient of a fragment, in host memory.

        Args:
            fragment: whose gradient.
            piece: what is added: flat. Its memory may be freed from now on, but not written.
            is_last: whether the sum is complete then.
        """
        if fragment.numel == 0:
            return
        if self._engine.busy:
            # Some weight of the last step has not been used.
            self.finish()
        if self._adder is None:
            self._adder = Adder(self.device)
            # The engine unpins what it adds to. There is a finalizer at any time.
            earlier = self._finalizer
            self._finalizer = weakref.finalize(self, _drain, self._engine, self._lane, self._adder)
            earlier.detach()
        if self._norms.pop(fragment, None) is not None and fragment not in self._on_host:
            # It was sent as complete.
            self._lane.wait()
            self._on_host.add(fragment)
        operation = adder.add if fragment in self._on_host else adder.assign
        if is_last:
            # Of the sum, while it is on the device.
            norms: list[torch.Tensor] = []
            self._adder.run(operation, self._grad(fragment), piece, norms)
            self._norms[fragment] = norms
        else:
            self._adder.run(operation, self._grad(fragment), piece)
        self._bytes_sent += piece.nbytes
        self._on_host.add(fragment)
        self._arriving(fragment)

    def let_go(self) -> None:
        """A forward or backward begins: what was copied in the last one is freed on the device."""
        self._lane.let_go()
        if self._adder is not None:
            self._adder.let_go()

    def _arriving(self, fragment: Fragment) -> None:
        """A gradient is on its way, in the place of what a program has set."""
        self._written.add(fragment)
        self._unscaled.add(fragment)
        self._set.discard(fragment)
        self._values_set.pop(fragment, None)

    def _grad(self, fragment: Fragment) -> torch.Tensor:
        return self.grads[fragment.group].narrow(0, fragment.begin, fragment.numel)

    def _held(self, fragment: Fragment) -> torch.Tensor:
        """The gradient of a fragment, where it is."""
        return self._values_set.get(fragment, self._grad(fragment))

    def gradient(self, fragment: Fragment) -> torch.Tensor:
        """The gradient of a fragment, in the master's dtype: a copy, in host memory.

        After a step, until the next gradient arrives: as it was stepped, unscaled and clipped.
        """
        self.arrive()
        grad = self._held(fragment).to(self._master_dtypes[fragment.group], copy=True)
        return grad if fragment in self._unscaled else grad.mul_(self._last_grad_scale)

    def set_gradient(
        self, fragment: Fragment, value: torch.Tensor, *, is_norm_kept: bool = False
    ) -> None:
        """Sets the gradient of a fragment, in the master's precision.

        As DeepSpeed has it, the next backward drops what is set between two backwards of a step:
        the sum goes on as if nothing had been set.

        Args:
            fragment: whose gradient.
            value: flat, as many elements, on any device.
            is_norm_kept: whether the norm remains that of the gradient that was there.
        """
        self.arrive()
        self.finish()
        dtype = self._master_dtypes[fragment.group]
        self._set.add(fragment)
        self._written.add(fragment)
        self._unscaled.add(fragment)
        is_on_host = fragment in self._on_host
        if fragment in self._sums or (is_on_host and fragment not in self._norms):
            # The sum is not complete.
            self._values_set[fragment] = value.detach().to("cpu", dtype, copy=True)
            return
        if is_on_host:
            self._on_host.discard(fragment)
            self._norms[fragment] = [norm_of(self._held(fragment)).to(self.device)]
        target = self._held(fragment)
        if target.dtype == dtype:
            target.copy_(value)
        else:
            target = value.detach().to("cpu", dtype, copy=True)
            self._values_set[fragment] = target
        if not is_norm_kept:
            self._norms[fragment] = [norm_of(target).to(self.device)]

    def norm(self, add_up: Callable[[torch.Tensor], None]) -> float:
        """The norm of all gradients since the last step; not finite if one of them is not.

        All gradients are complete now. The host waits for the backward. Squares that float32 cannot
        hold are summed anew in double precision.

        Args:
            add_up: sums a scalar on the device over the ranks, in place. All ranks call it equally
                often.
        """
        for fragment in list(self._sums):
            self.send(fragment)
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if self._norms:
            if self._adder is not None and self.device.type == "cuda":
                self._adder.norms_to(torch.cuda.current_stream(self.device))
            norms = list(itertools.chain.from_iterable(self._norms.values()))
            squares = torch.stack(norms).double().square().sum()
        # Sums that got nothing in the last backward.
        if incomplete := self._on_host - self._norms.keys():
            squares = squares + self._host_squares(incomplete)
        squares = squares.float()
        add_up(squares)
        total = float(squares)
        if not math.isfinite(total):
            wide = torch.tensor(self._exact_squares(), dtype=torch.float64, device=self.device)
            add_up(wide)
            total = float(wide)
        return math.sqrt(total) if math.isfinite(total) else math.inf

    def _exact_squares(self) -> float:
        """The sum of squares of all gradients, from host memory; infinite if one is not finite."""
        return self._host_squares(self._norms.keys() | self._on_host)

    def _host_squares(self, fragments: Iterable[Fragment]) -> float:
        self.arrive()
        # In the order of memory: one order of summation.
        stats = _core.grad_stats([view(self._held(fragment)) for fragment in sorted(fragments)])
        return stats.sq_norm if stats.finite else math.inf

    def arrive(self) -> None:
        """Waits until all gradients that were sent or added on the host are in `grads`."""
        if not self._finalizer.alive:
            return
        self._lane.wait()
        if self._adder is not None:
            self._adder.finish()

    def drop_sums(self) -> None:
        """Forgets all gradients that are not complete."""
        if self._on_host:
            # What is still being added would be written over the next gradient.
            self.arrive()
        for fragment in self._on_host:
            self._norms.pop(fragment, None)
        self._sums.clear()
        self._on_host.clear()

    def drop(self) -> None:
        """Forgets all gradients since the last step."""
        self.arrive()
        self._engine.discard()
        self._sums.clear()
        self._on_host.clear()
        self._norms.clear()
        self._set.clear()

    # ---- the step ----

    @property
    def is_busy(self) -> bool:
        """Whether a step is running in host memory."""
        return self._finalizer.alive and self._engine.busy

    def stepped_grads(self) -> list[torch.Tensor]:
        """The gradients that the coming step takes, by group. All are complete.

        Raises:
            ValueError: there is not as much memory as gradients that were set take.
        """
        self.finish()
        current = self._norms.keys() | self._on_host | self._set
        for fragment in self._written - current:
            self._grad(fragment).zero_()
            self._values_set.pop(fragment, None)
        self._written &= current
        if not self._values_set:
            self._widened.clear()
            return self.grads
        self.arrive()
        groups = {fragment.group for fragment in self._values_set}
        self._widened = {group: self._wide(group) for group in groups}
        for group, wide in self._widened.items():
            wide.copy_(self.grads[group])
        for (group, begin, numel), value in self._values_set.items():
            self._widened[group].narrow(0, begin, numel).copy_(value)
        return [self._widened.get(group, grad) for group, grad in enumerate(self.grads)]

    def _wide(self, group: int) -> torch.Tensor:
        """Memory for a partition's gradient in the master's dtype."""
        if group in self._widened:
            return self._widened[group]
        numel, dtype = self.grads[group].numel(), self._master_dtypes[group]
        state = numel * dtype.itemsize
        announce(numel, state=state, pinned=0, limit=self._host_bytes_left)
        return self._memory(numel, dtype, pinned=False)

    def prepare(
        self,
        updates: Sequence[Update],
        weights: Sequence[torch.Tensor],
        in_use: Sequence[object],
        *,
        grad_scale: float,
    ) -> list[partial[Any]]:
        """Makes everything ready for a step, and returns the calls that start it in the background.

        They are made one directly after the other. The first raises ValueError where the step
        cannot be taken, with nothing changed, and OSError where the device has failed. After them
        comes `forget`, or `drop` if it raised.

        Args:
            updates: all partitions, in the order in which they are stepped; their tensors have
                `stepped_grads` and `twins`.
            weights: the partitions' weights.
            in_use: what keeps the memory of the updates alive; held until the step has ended.
            grad_scale: the factor of all gradients.
        """
        self.finish()
        self._lane.order(self._engine)
        if self._adder is not None:
            self._adder.order(self._engine)
        self._bytes_downloaded, self._bytes_sent, self._seconds_waited = self._bytes_sent, 0, 0.0
        self._submit_stream, self._step_stream = self.stream(), None
        submit = partial(
            self._engine.submit,
            [update.group for update in updates],
            [update.tensor for update in updates],
            weights=[
                None if self._is_offloaded[update.group] else weights[update.group].data_ptr()
                for update in updates
            ],
            steps=[update.step for update in updates],
            hypers=[update.hyper for update in updates],
            owners=[*in_use, list(weights), list(self.grads), list(self.twins), self._widened],
            stream=self._submit_stream,
        )
        # Gradients that are stepped are not added to.
        return [
            submit,
            partial(setattr, self, "_step_stream", self._submit_stream),
            partial(setattr, self, "_is_uncopied", bool(self._copies)),
            partial(self._norms.clear),
            partial(self._on_host.clear),
            partial(self._set.clear),
            partial(self._unscaled.clear),
            partial(setattr, self, "_last_grad_scale", grad_scale),
        ]

    def forget(self) -> None:
        """The gradients since the last step have been used.

        From now on their device memory may be written or freed.
        """
        self._engine.release(stream=self._submit_stream)
        self._lane.let_go()

    def protect(
        self, parts: Mapping[torch.Tensor, Sequence[Fragment]], holders: Iterable[torch.Tensor]
    ) -> bool:
        """Has uses of tensors in host memory wait for the step that comes, each for its own part.

        Call it between `prepare` and its calls.

        Args:
            parts: plain tensors that the step writes, with what they hold.
            holders: other tensors on the same memory, which are used after a wait only.

        Returns:
            Whether that is all. If not, nothing was done, and the caller calls `finish` after the
            step.
        """
        # A view refers to the tensor that it was made of, which nothing else does.
        bases = [tensor._base for tensor in parts if tensor._base is not None]
        if self._copies or exposed(parts, [*parts, *bases, *holders], torch.Tensor):
            return False
        self._writes.protect(parts)
        return True

    def _wait_for_parts(self, parts: Iterable[Sequence[Fragment]]) -> bool:
        return self.wait(fragment for part in parts for fragment in part)

    def settle(self) -> None:
        """Called after an exception that may have come after the submit.

        When it returns, the step is complete, or there was none.
        """
        with contextlib.suppress(OSError):
            self.arrive()
            self.finish()

    def wait(self, fragments: Iterable[Fragment]) -> bool:
        """The current stream and the step's stream wait for the new weights of `fragments`.

        Returns whether these are the weights of the last step; not so while one is being submitted.
        """
        self._lane.let_go()
        # Read before the wait: a step may be submitted on another thread meanwhile.
        started, step_stream = time.perf_counter(), self._step_stream
        streams = self._streams(step_stream)
        for group, begin, numel in fragments:
            for stream in streams:
                self._engine.wait(group, begin, begin + numel, stream=stream)
        self._seconds_waited += time.perf_counter() - started
        return step_stream is not None

    def finish(self) -> None:
        """Waits until the last step is complete in host memory.

        The current stream and the stream that the step began on wait for the weights.
        """
        if not self._finalizer.alive:
            return
        for stream in self._streams(self._step_stream):
            self._engine.finish(stream=stream)
        self._writes.wait_for_all()
        if self._is_uncopied:
            with torch.no_grad():
                for weight, master in self._copies:
                    weight.copy_(master)
            self._is_uncopied = False

    def _streams(self, step_stream: int | None) -> set[int]:
        """The current stream, and that of the last step."""
        return {self.stream(), *([] if step_stream is None else [step_stream])}

    def synchronize(self) -> None:
        """Waits until the last step is complete, and all copies have ended."""
        self.arrive()
        self._engine.synchronize(stream=self.stream())

    def end(self) -> None:
        """Waits as `synchronize`, and frees `grads` and `twins`.

        Masters stay, and waiting for them is possible; nothing else is from now on.
        """
        if not self._finalizer.alive:
            return
        self.finish()
        self.synchronize()
        self._finalizer.detach()
        del self._engine, self._lane
        self._adder = None
        for held in (
            self.grads,
            self.twins,
            self._copies,
            self._sums,
            self._norms,
            self._on_host,
            self._values_set,
            self._widened,
        ):
            held.clear()

    def stream(self) -> int:
        """The current stream of the device, as the engine knows it."""
        return current_stream(self.device)

    def timing(self) -> dict[str, float]:
        """What the last step took, with the keys of `OffloadAdamW.timing`.

        Left out is what the optimizer does before the step.
        """
        return {
            **self._engine.timing(),
            "gate": self._seconds_waited,
            "bytes_downloaded": self._bytes_downloaded,
        }


class PartitionWork:
    """The work on one partition that is under way: what its `Home` waits for, and its gradient.

    Args:
        partitions: what steps it.
        group: its number.
    """

    def __init__(self, partitions: Partitions, group: int) -> None:
        self._partitions = partitions
        self._group = group

    def finish(self) -> None:
        """Waits until the last step is complete."""
        self._partitions.finish()

    def gradient(self, begin: int, numel: int) -> torch.Tensor:
        """As `Partitions.gradient`."""
        return self._partitions.gradient(Fragment(self._group, begin, numel))

    def set_gradient(self, begin: int, value: torch.Tensor) -> None:
        """As `Partitions.set_gradient`. As DeepSpeed has it, the norm remains what it was."""
        fragment = Fragment(self._group, begin, value.numel())
        self._partitions.set_gradient(fragment, value, is_norm_kept=True)


class FragmentUploads:
    """New weights of parameters: what a `Gate` waits for.

    Args:
        partitions: what steps them.
        fragments: each parameter's fragment, which holds the whole parameter.
    """

    def __init__(self, partitions: Partitions, fragments: Mapping[torch.Tensor, Fragment]) -> None:
        self._partitions = partitions
        self._fragments = fragments

    def wait(self, params: Iterable[torch.Tensor], /) -> bool:
        """The current stream and the step's stream wait for the weights of `params`.

        Returns whether these are the weights of the last step; not so while one is being submitted.
        """
        return self._partitions.wait(self._fragments[param] for param in params)

    def finish(self) -> None:
        """The current stream waits for all of them."""
        self._partitions.finish()


def _announce(
    partitions: Sequence[Partition], host_bytes_max: int | None, *, is_pinned: bool
) -> int | None:
    """Announces what partitions take. Returns what is left of `host_bytes_max`."""
    state = pinned = held = 0
    for master, weight, grad_dtype, moments_bytes, is_offloaded in partitions:
        numel, is_same = weight.numel(), weight.dtype == master.dtype
        # Then the master itself is what is uploaded.
        is_upload = is_same and not is_offloaded
        state += moments_bytes + (0 if is_upload else numel * master.dtype.itemsize)
        pinned += weight.nbytes + numel * grad_dtype.itemsize
        held += master.nbytes + (weight.nbytes if is_offloaded else 0)
    if not is_pinned:
        state, pinned = state + pinned, 0
    announce(
        sum(partition.weight.numel() for partition in partitions),
        state=state,
        pinned=pinned,
        limit=host_bytes_max,
        held=held,
    )
    return None if host_bytes_max is None else host_bytes_max - state - pinned


def _drain(engine: _core.OffloadEngine, lane: Lane, adder: Adder | None = None) -> None:
    # In a forked child there is nothing to wait for, and what a device that has failed says was
    # said before.
    waits: list[Callable[[], object]] = [lane.wait, partial(engine.synchronize, stream=0)]
    if adder is not None:
        waits.append(adder.finish)
    for wait in waits:
        with contextlib.suppress(ValueError, OSError, RuntimeError):
            wait()
