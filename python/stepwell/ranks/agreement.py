"""What ranks of ZeRO agree on: that all can take a step, and that all have.

- *Before it.* The norm of the gradients is the first that the ranks do together (`add_up`). A rank
  that has left `step()` by an error would not be there, and the others would wait for it until the
  timeout of the process group. So it takes part (`awaited`), and numbers beside its squares say so.
  Others say whether it has left the last step, and what it has gathered since. Where the sum is not
  finite all add up a second time, and a rank that fails between the two says so in the second.
- *Behind it.* A rank that leaves a step on which all have decided (`decided`) tells the others
  before they wait for its weights: by the thread that gathers; else at the end of the step, if
  DeepSpeed gathers then; else, if nothing is gathered behind a step, with the next norm.

What a rank says all conclude alike: they raise, and none hangs. Where no rank has taken a step
nothing was changed, and they go on. Ctrl-C before the norm is not told: the others may be on their
way out, and nothing could end the wait for them. Imports no DeepSpeed.

Cost: no collective but that of the norm, and those of the thread; at the end of a step one of 32
bytes between the hosts, 0.1 to 0.3 ms.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from stepwell._sharding import parted
from stepwell.ranks.collective import why_lost
from stepwell.ranks.peers import left_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepwell.ranks.gathering import Gatherer
    from stepwell.ranks.peers import Peers
    from stepwell.weights.gather_order import GatherOrder

__all__ = ["NORM_DTYPE", "WIDE_NORM_DTYPE", "Agreement"]

# Of what ranks add up, and of what they add up again where that is not finite.
NORM_DTYPE, WIDE_NORM_DTYPE = torch.float32, torch.float64


class Agreement:
    """What this rank tells the others of its steps, and hears.

    Args:
        group: the ranks.
        device: where norms are.
        gatherer: gathers weights behind each step; None: nothing does.
        peers: without a gatherer: by whom ranks tell at the end of a step. None: they do not.
        order: has what was gathered since the last step, which all compare; None: they do not.
        forget_order: called where that is not the same on all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        gatherer: Gatherer | None = None,
        peers: Peers | None = None,
        order: GatherOrder | None = None,
        forget_order: Callable[[], None] | None = None,
    ) -> None:
        self._group, self._device = group, device
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size(group)
        self._gatherer, self._peers = gatherer, peers
        self._order, self._forget_order = order, forget_order
        # What the others add up next with this rank has this dtype; None: they wait for it no more.
        self._awaited_as: torch.dtype | None = None
        # All have decided on a step, and this rank has not taken it.
        self._has_left = False
        # Of a step that some ranks have taken, and some have not.
        self._failure: OSError | None = None

    def check(self) -> None:
        """Raises OSError, on all ranks, if some have failed a step that others have taken."""
        if self._failure is not None:
            raise OSError(str(self._failure)) from self._failure

    # ---- before a step ----

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """A context in which this rank comes to `add_up`, where the others wait for it.

        An error that ends it before that is told to them. It must not be that of a rank that is
        gone, for which nothing may wait.
        """
        self._awaited_as = None if self._num_ranks == 1 else NORM_DTYPE
        try:
            yield
        except Exception:
            if self._awaited_as is not None:
                # Of this dtype whatever the program has made torch's default.
                nothing = torch.zeros((), dtype=self._awaited_as, device=self._device)
                # The error that this rank raises is its own.
                with contextlib.suppress(Exception):
                    self._meet(nothing, can_step=False)
            raise
        finally:
            self._awaited_as = None

    def add_up(self, squares: torch.Tensor) -> float:
        """The sum of this rank's squared norm and those of the others.

        Args:
            squares: this rank's: a scalar on the device.

        Raises:
            OSError: some ranks cannot step; or have left the last step, which others have taken.
            RuntimeError: ranks have gathered other weights since the last step.
        """
        return float(squares) if self._num_ranks == 1 else self._meet(squares, can_step=True)

    def _meet(self, squares: torch.Tensor, *, can_step: bool) -> float:
        dtype, self._awaited_as = self._awaited_as, None
        # Of each fact how many ranks, and the sum of their numbers: of one rank which it is.
        words: list[float] = [not can_step, self._rank * (not can_step)]
        words += [self._has_left, self._rank * self._has_left]
        words += [] if self._order is None else self._order.end()
        # A copy to the device would wait for the backward.
        beside = squares.new_tensor(words) if any(words) else squares.new_zeros(len(words))
        sums = torch.cat((squares.reshape(1), beside))
        dist.all_reduce(sums, group=self._group)
        # One copy to the host, for which it waits.
        total, num_unable, unable, num_left, left, *gathered = sums.tolist()
        if num_unable:
            if can_step:
                raise OSError(
                    f"{_named(num_unable, unable)} cannot take this step, so none has taken it and "
                    "nothing was changed. hint: the errors of those ranks say why"
                )
        elif 0 < num_left < self._num_ranks:
            raise parted(f"{_named(num_left, left)} {'has' if num_left == 1 else 'have'}")
        elif self._order is not None and not self._order.is_common(gathered, self._num_ranks):
            if self._forget_order is not None:
                self._forget_order()
            raise RuntimeError(
                "ranks have gathered other weights, or in another order, since the last step, so "
                "what they have computed with is mixed up. Nothing was stepped. hint: under ZeRO-3 "
                "all ranks call the same modules in one order, and write partitions alike"
            )
        elif dtype is NORM_DTYPE and not math.isfinite(total):
            self._awaited_as = WIDE_NORM_DTYPE
        return float(total)

    # ---- a step ----

    @contextlib.contextmanager
    def decided(self) -> Iterator[None]:
        """In this context a step is taken, on which all ranks have decided.

        Without a gatherer it is waited for there.

        Raises:
            OSError: another rank has failed, or is gone; this one has taken the step.
        """
        self._has_left = True
        try:
            yield
        except BaseException as error:
            self._tell_error(f"{type(error).__name__}: {error}")
            raise
        if self._peers is None or self._gatherer is not None:
            return
        try:
            self._failure = self._peers.tell(None, is_taken=True).error()
        except (OSError, RuntimeError) as error:
            self._failure = OSError(f"the step is not gathered: {why_lost(error)}")
            raise self._failure from error
        self.check()

    @property
    def taking(self) -> partial[None]:
        """The call that notes that this rank has taken the step, made directly behind its submit.

        What begins to gather its weights comes behind that.
        """
        return partial(setattr, self, "_has_left", False)

    def _tell_error(self, why: str) -> None:
        """This rank has left a step by an error, or has taken it and that has failed."""
        if self._gatherer is not None:
            # A step that was taken is told of behind its weights.
            if self._has_left:
                self._gatherer.leave(why)
        elif self._peers is not None:
            self._failure = left_here(why)
            # The error that this rank raises is its own.
            with contextlib.suppress(OSError, RuntimeError):
                self._failure = self._peers.tell(why, is_taken=not self._has_left).error()

    def end(self) -> None:
        """No step follows. What gathers, and has the engine, ends."""
        self._gatherer = self._peers = None


def _named(count: float, total: float) -> str:
    """So many ranks, whose numbers add up to `total`."""
    return f"rank {total:.0f}" if count == 1 else f"{count:.0f} ranks"
