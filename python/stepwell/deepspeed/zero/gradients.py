"""Gradients of ZeRO's partitions on their way to host memory, by fragment. Imports no DeepSpeed.

- A gradient is summed on the device until it is complete. Then it crosses the bus once, in the
  dtype that it has. Its device memory is free as soon as it has crossed.
- Or it is summed in host memory (`add_on_host`): then the sum comes up and goes down again in each
  backward, and the device holds none. The additions are the same in the same order: the same bits.
- The norm of each gradient is computed where it is complete. The host waits once, for all norms.
- What a reduction leaves of several gradients is copied at once (`collect_all`), so that its memory
  is free behind it: a bucket that is written again, or memory of all ranks. A call per gradient
  takes the thread of autograd, which is late with its launches, 20 microseconds and more.
- An element that got no gradient is stepped with the gradient 0.
- A gradient that a program sets is held in the master's precision until the next one arrives. For a
  step with such a gradient its whole partition is widened: 4 bytes per parameter, announced then.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from stepwell import _core
from stepwell._budget import announce
from stepwell._tensors import tensor_on
from stepwell.deepspeed.zero.lanes import Copy
from stepwell.store import adder
from stepwell.store.adder import Adder
from stepwell.store.norm import norm_of, norm_over_ranks, norms_of, squares_of, wide_squares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stepwell.deepspeed.zero.lanes import Lane
    from stepwell.deepspeed.zero.partition import Fragment, Run

__all__ = ["Gradients"]


class Gradients:
    """The gradients that the coming step takes, and what is left of those of the last one.

    Attributes:
        grads: the host side of each partition's gradient, flat. Only valid after `arrive`.
        bytes_sent: that gradients took on the bus since this was last set.

    Args:
        grads: the host side of each partition's gradient.
        master_dtypes: of each partition.
        device: where gradients are made.
        lane: the way down.
        is_summed_on_host: whether gradients of several backwards are summed in host memory.
        host_bytes_left: the most host memory that may be taken yet; None: what is free.
        end_last_step: a method that waits for the last step where it is running; held weakly.
    """

    def __init__(
        self,
        grads: list[torch.Tensor],
        master_dtypes: Sequence[torch.dtype],
        *,
        device: torch.device,
        lane: Lane,
        is_summed_on_host: bool,
        host_bytes_left: int | None,
        end_last_step: Callable[[], None],
    ) -> None:
        self.grads = grads
        self.bytes_sent = 0
        self._master_dtypes = master_dtypes
        self._device = device
        self._lane = lane
        self._adds_on_host = is_summed_on_host
        self._host_bytes_left = host_bytes_left
        self._waits_for_last_step = weakref.WeakMethod(end_last_step)
        # Fragments that a program has set since the last step and since their gradient arrived,
        # with the norm of what was set; None: the norm remains that of the gradient.
        self._set: dict[Fragment, torch.Tensor | None] = {}
        # What was set, where `grads` is narrower.
        self._values_set: dict[Fragment, torch.Tensor] = {}
        self._widened: dict[int, torch.Tensor] = {}
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

    def collect_all(
        self,
        fragments: Sequence[Fragment | None],
        pieces: Sequence[torch.Tensor],
        *,
        is_last: bool,
    ) -> None:
        """As `collect`, of what a reduction of several gradients has left.

        Args:
            fragments: whose gradients; None: there is none, and nothing is added.
            pieces: of each as many elements, or fewer at the end of a parameter.
            is_last: whether the gradients are complete then.
        """
        pairs = [
            (fragment, _flat(piece, fragment.numel))
            for fragment, piece in zip(fragments, pieces, strict=True)
            if fragment is not None
        ]
        if not pairs:
            return
        whole = torch.cat([piece for _, piece in pairs]).to(self.grads[pairs[0][0].group].dtype)
        parts = torch.split(whole, [fragment.numel for fragment, _ in pairs])
        found = {fragment: part for (fragment, _), part in zip(pairs, parts, strict=True)}
        # Of what is complete by that. What it is added to has a norm of its own.
        alone = [each for each in found if is_last and not self.has_gradient(each)]
        norms = dict(zip(alone, norms_of([found[each] for each in alone]), strict=True))
        for fragment, part in found.items():
            if fragment in norms:
                self.add(fragment, part, is_owned=True)
            else:
                self.collect(fragment, part, is_owned=True, is_last=is_last)
        self._send(norms)

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

    @property
    def is_any_complete(self) -> bool:
        """Whether a gradient is complete that no step has taken."""
        return bool(self._norms) or any(norm is not None for norm in self._set.values())

    def has_gradient(self, fragment: Fragment) -> bool:
        """Whether a fragment has got a gradient since the last step, or has no elements."""
        found = (self._sums, self._norms, self._on_host)
        return fragment.numel == 0 or any(fragment in each for each in found)

    def send(self, fragment: Fragment) -> None:
        """The gradient of a fragment is complete: it is copied to the host."""
        if fragment.numel == 0:
            self._sums.pop(fragment, None)
        elif fragment in self._norms:
            # A second backward after the one that was announced as the last.
            self._end_last_step()
            piece = self._sums.pop(fragment)
            self.arrive()
            target = self._held(fragment)
            target.add_(piece.to(target.device, target.dtype))
            self._norms[fragment] = [norm_of(target).to(self._device)]
            self._set.pop(fragment, None)
        else:
            self._send({fragment: norm_of(self._sums[fragment])})

    def _send(self, norms: Mapping[Fragment, torch.Tensor]) -> None:
        """Gradients with these norms are complete: they are copied to the host."""
        if not norms:
            return
        # Some weight of the last step may not have been used.
        self._end_last_step()
        copies = [Copy(self._sums[each], self._grad(each), each) for each in norms]
        for piece, _, fragment in copies:
            self._arriving(fragment)
            self.bytes_sent += piece.nbytes
        self._lane.copy(copies)
        # Last, and no call: what Ctrl-C has left is copied again.
        for fragment, norm in norms.items():
            self._norms[fragment] = [norm]
            del self._sums[fragment]

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
        # Some weight of the last step may not have been used.
        self._end_last_step()
        if self._adder is None:
            self._adder = Adder(self._device)
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
        self.bytes_sent += piece.nbytes
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
        self._set.pop(fragment, None)
        self._values_set.pop(fragment, None)

    def _grad(self, fragment: Fragment) -> torch.Tensor:
        return self.grads[fragment.group].narrow(0, fragment.begin, fragment.numel)

    def _held(self, fragment: Fragment) -> torch.Tensor:
        """The gradient of a fragment, where it is."""
        return self._values_set.get(fragment, self._grad(fragment))

    def gradient(self, fragment: Fragment) -> torch.Tensor:
        """The gradient of a fragment, in the master's dtype: a copy, where that is.

        After a step, until the next gradient arrives: as it was stepped, unscaled and clipped.
        """
        self.arrive()
        grad = self._held(fragment).to(self._master_dtypes[fragment.group], copy=True)
        return grad if fragment in self._unscaled else grad.mul_(self._last_grad_scale)

    def set_gradient(
        self, fragment: Fragment, value: torch.Tensor, *, is_norm_kept: bool = False
    ) -> None:
        """Sets the gradient of a fragment, in the master's precision.

        As DeepSpeed has it, the next backward drops what is set before it, or between two backwards
        of a step: the sum goes on as if nothing had been set.

        Args:
            fragment: whose gradient.
            value: flat, as many elements, on any device.
            is_norm_kept: whether the norm remains that of the gradient that was there.
        """
        self.arrive()
        self._end_last_step()
        dtype = self._master_dtypes[fragment.group]
        self._set.setdefault(fragment, None)
        self._written.add(fragment)
        self._unscaled.add(fragment)
        is_on_host = fragment in self._on_host
        if fragment in self._sums or (is_on_host and fragment not in self._norms):
            # The sum is not complete.
            self._values_set[fragment] = value.detach().to("cpu", dtype, copy=True)
            return
        if is_on_host:
            self._on_host.discard(fragment)
            self._norms[fragment] = [norm_of(self._held(fragment)).to(self._device)]
        target = self._held(fragment)
        if target.dtype == dtype:
            target.copy_(value)
        else:
            target = value.detach().to("cpu", dtype, copy=True)
            self._values_set[fragment] = target
        if not is_norm_kept:
            self._set[fragment] = norm_of(target).to(self._device)

    def norm(self, add_up: Callable[[torch.Tensor], float]) -> float:
        """The norm of all gradients since the last step; not finite if one of them is not.

        All gradients are complete now. The host waits for the backward. Squares that float32 cannot
        hold are summed anew in double precision.

        Args:
            add_up: gives the sum over the ranks of a scalar on the device, which it may write to.
                All ranks call it equally often.
        """
        for fragment in list(self._sums):
            self.send(fragment)
        if self._adder is not None and self._device.type == "cuda":
            self._adder.norms_to(torch.cuda.current_stream(self._device))
        norms = {
            **self._norms,
            **{fragment: [norm] for fragment, norm in self._set.items() if norm is not None},
        }
        squares = squares_of(itertools.chain.from_iterable(norms.values()), self._device)
        # Sums that got nothing in the last backward.
        if incomplete := self._on_host - norms.keys():
            squares = squares + self._wide_squares(incomplete)
        found = norms.keys() | self._on_host
        norm = norm_over_ranks(squares, lambda: self._wide_squares(found), add_up)
        # Behind it: both come down on the same way. What cannot be launched now still waits, and
        # raises in `complete`, within which the other ranks are told.
        with contextlib.suppress(OSError, RuntimeError):
            self._lane.launch()
        return norm

    def _wide_squares(self, fragments: Iterable[Fragment]) -> torch.Tensor:
        """As `wide_squares`, of gradients in host memory."""
        self.arrive()
        # In the order of memory: one order of summation.
        return wide_squares([self._held(each) for each in sorted(fragments)], self._device)

    def arrive(self) -> None:
        """Waits until all gradients that were sent or added on the host are in `grads`."""
        self._lane.wait()
        self._wait_for_sums()

    def drain(self) -> None:
        """Waits until no copy and no addition writes to memory that is pinned."""
        for wait in (self._lane.drain, self._wait_for_sums):
            with contextlib.suppress(ValueError, OSError, RuntimeError):
                wait()

    def _wait_for_sums(self) -> None:
        """Waits until all additions on the host are in `grads`."""
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
        """Forgets all gradients since the last step, and what has failed on their way."""
        self._lane.drop()
        self._wait_for_sums()
        self._sums.clear()
        self._on_host.clear()
        self._norms.clear()
        self._set.clear()

    def complete(self, core: _core.OffloadEngine) -> None:
        """The next step of `core` takes what there is, behind all copies and additions.

        None is running.

        Raises:
            ValueError: there is not as much memory as gradients that were set take.
            OSError: a copy has failed.
        """
        current = self._norms.keys() | self._on_host | self._set.keys()
        for fragment in self._written - current:
            self._grad(fragment).zero_()
            self._values_set.pop(fragment, None)
        self._written &= current
        if self._values_set:
            self._widen()
        else:
            self._widened.clear()
        self._lane.launch()
        if self._adder is not None:
            self._adder.order(core)

    def of(self, run: Run) -> torch.Tensor:
        """The gradient of a partition that the coming step takes, in host memory."""
        return self._widened.get(run.group, self.grads[run.group])

    def _widen(self) -> None:
        """Partitions of which gradients were set have theirs in the master's dtype."""
        self.arrive()
        groups = {fragment.group for fragment in self._values_set}
        self._widened = {group: self._wide(group) for group in groups}
        for group, wide in self._widened.items():
            wide.copy_(self.grads[group])
        for (group, begin, numel), value in self._values_set.items():
            self._widened[group].narrow(0, begin, numel).copy_(value)

    def _wide(self, group: int) -> torch.Tensor:
        """Memory for a partition's gradient in the master's dtype."""
        if group in self._widened:
            return self._widened[group]
        numel, dtype = self.grads[group].numel(), self._master_dtypes[group]
        state = numel * dtype.itemsize
        with announce(numel, state=state, crossing=0, limit=self._host_bytes_left):
            return tensor_on(_core.Buffer(state)).view(dtype)

    @property
    def owners(self) -> list[object]:
        """What keeps the memory of what is stepped alive."""
        return [list(self.grads), self._widened]

    def note_step(self, grad_scale: float) -> None:
        """A step has begun with all gradients, which later ones are not added to.

        Args:
            grad_scale: what it has scaled them by.
        """
        for held in (self._norms, self._on_host, self._set, self._unscaled):
            held.clear()
        self._last_grad_scale = grad_scale

    def end(self) -> None:
        """Frees all memory, after `arrive`. Nothing is possible from now on."""
        del self._lane
        self._adder = None
        for held in (
            self.grads,
            self._sums,
            self._norms,
            self._on_host,
            self._values_set,
            self._widened,
        ):
            held.clear()

    def _end_last_step(self) -> None:
        wait = self._waits_for_last_step()
        if wait is not None:
            wait()


def _flat(piece: torch.Tensor, numel: int) -> torch.Tensor:
    """A piece, flat, with zeros behind it to so many elements."""
    flat = piece.detach().reshape(-1)
    padding = numel - flat.numel()
    return torch.nn.functional.pad(flat, (0, padding)) if padding else flat
