"""What ranks that step together tell each other, by process groups of their own.

- Every call is collective, of the thread that steps, in the same order on all ranks. Facts go
  through gloo, between the hosts: no stream of a device waits for them.
- A rank that is not there any more ends the wait of the others with an error: at once where its
  connection is closed, else after the timeout of the process group.
- Ctrl-C in a wait leaves the ranks apart. Then every later call is an error, here and, since this
  rank is missing, on the others.
- Every call begins with a round of one size. gloo ends the process where sizes differ; so ranks
  that call differently get an error.
- A rank that an error ends, while the others wait for it in a round, tells them (`awaited`). Of a
  step that has failed in the background all are told before its weights are gathered, and behind
  that (`tell_of_step`).

Cost: two rounds of 40 bytes behind a step, each 0.1 to 0.3 ms on one host.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from stepwell.ranks.collective import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

__all__ = [
    "Peers",
    "ToldOfStep",
    "failed_on",
    "left_here",
    "wait_for_work",
    "why_lost",
]

# Polls of a work that has not ended: soon after the first look, then less often.
_POLL_SECONDS_MIN, _POLL_SECONDS_MAX = 2e-5, 1e-3

# Of the text of an error that a rank tells the others.
_TEXT_BYTES = 1000


# Of each default group: how many groups of some of its ranks were made here, by these ranks. They
# are made by all of them, so all have one number.
_num_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)

# Beyond what torch counts to.
_FIRST_COUNT = 1 << 40


def failed_on(rank: int, why: str) -> OSError:
    """The error of ranks whose step another has failed."""
    return OSError(
        f"the step has failed on rank {rank} (`{why}`), and its weights are not new. "
        "hint: resume all ranks from a checkpoint"
    )


def left_here(why: str) -> OSError:
    """The error of a rank that has failed a step which others have taken."""
    return OSError(
        f"this rank has left a step (`{why}`) that others have taken. hint: resume all ranks "
        "from a checkpoint"
    )


class ToldOfStep(NamedTuple):
    """What the ranks tell of one step, on its way between them."""

    words: torch.Tensor
    work: dist.Work


class Peers(Ranks):
    """The ranks of `group`, by process groups of the optimizer's own.

    Making it is collective: all ranks of the default group take part, or those of `group` where it
    is another.

    Args:
        group: the ranks; None: all.
        gathers: whether weights are gathered among them, by `data`.
        instead: the option with which they need not agree, for an error.

    Raises:
        ValueError: there is no gloo.
        OSError: another rank is gone, or makes none.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, gathers: bool = True, instead: str
    ) -> None:
        if not dist.is_gloo_available():
            raise ValueError(
                "this build of torch has no gloo, by which ranks tell each other of their steps. "
                f"hint: {instead}; or a build of torch with gloo"
            )
        super().__init__(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.rank = self.ranks.index(dist.get_rank())
        """This one, within the group."""
        self.world_size = len(self.ranks)
        """How many ranks there are."""
        backend = dist.get_backend_config(group)
        timeout = _timeout_of(group)
        # One for each thread: collectives of one group have one order.
        self._agreeing = self._new_group("gloo", timeout)
        self.status = self._new_group("gloo", timeout)
        """Of what gathers weights, for what is in host memory."""
        self.data: dist.ProcessGroup
        """Of the same thread, for weights."""
        if gathers:
            self.data = self._new_group(backend, timeout)
        self._is_data_open = False
        self._round = 0
        # The round by which this rank has left a step, until something is called again.
        self._left: tuple[torch.Tensor, dist.Work] | None = None
        self._is_apart = False
        # What this rank knows of how the ranks have gone apart.
        self._why_apart = (
            "one was interrupted, or has called the optimizer otherwise than the others"
        )
        self._pid = os.getpid()

    def _new_group(self, backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
        is_whole_world = len(self.ranks) == dist.get_world_size()
        with contextlib.nullcontext() if is_whole_world else _counted_apart(tuple(self.ranks)):
            try:
                group = dist.new_group(
                    self.ranks,
                    timeout=timeout,
                    backend=backend,
                    # Ranks outside of a part of the world make no optimizer, or another.
                    use_local_synchronization=not is_whole_world,
                )
            except RuntimeError as error:
                raise OSError(
                    f"{why_lost(error)}. An optimizer of several ranks is made by all of them"
                ) from error
        assert isinstance(group, dist.ProcessGroup)
        return group

    def open_data(self, device: torch.device) -> None:
        """Has `data` connect, once, while no other collective of this rank is under way.

        NCCL connects, allocates and loads its kernels with the first collectives, and may wait for
        the whole device meanwhile: on the thread that gathers, beside a collective of the program
        that waits for this rank, neither would end.
        """
        if self._is_data_open or self.world_size == 1:
            return
        self._meet()
        mine = torch.zeros(1, dtype=torch.uint8, device=device)
        whole = torch.zeros(self.world_size, dtype=torch.uint8, device=device)
        for begin in (
            lambda: dist.all_gather_into_tensor(whole, mine, group=self.data, async_op=True),
            lambda: dist.broadcast(mine, self.ranks[0], group=self.data, async_op=True),
        ):
            self._wait(self._call(begin))
        self._is_data_open = True

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """In this context the others wait for this rank in the next round, or will.

        Where an error ends it before that round, they are told, and get an error that names this
        rank. Ranks that all leave so stay together.

        Raises:
            OSError: the ranks have gone apart.
            ValueError: this is a forked child.
        """
        # A step that this rank has left before is over first: its round says whether all have.
        self._check_together()
        before = self._round
        try:
            yield
        except BaseException:
            if self._round == before and not self._is_apart:
                with contextlib.suppress(OSError):
                    self._left = self._begin_round(has_left=True)
            raise

    # ---- of steps in the background ----

    def tell_of_step(self, step: int, failure: str | None) -> ToldOfStep:
        """Begins to tell all ranks whether this one has failed; `who_failed` ends it.

        Args:
            step: the number of steps before that were told of.
            failure: why it has failed; None: it has not.
        """
        has_failed = failure is not None
        words = [step, -step, int(has_failed), int(not has_failed), has_failed * (self.rank + 1)]
        mine = torch.tensor(words, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.status, async_op=True)
        return ToldOfStep(mine, work)

    def who_failed(self, told: ToldOfStep, failure: str | None) -> tuple[list[int], str]:
        """What all ranks have told: a rank that has failed, and why.

        Args:
            told: what `tell_of_step` has begun.
            failure: as there.

        Returns:
            The rank, of the default group, and why it has failed: of several the last. No rank:
            none has failed. All ranks: all have.

        Raises:
            OSError: the ranks do not tell of the same step, or one is gone.
        """
        wait_for_work(told.work)
        step, minus_step, any_failed, any_good, last = told.words.tolist()
        if step != -minus_step:
            raise OSError(f"the ranks are not at the same step any more: {self._why_apart}")
        if not any_failed:
            return [], ""
        source = self.ranks[last - 1]
        text = (failure or "").encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        memory = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        work: Any = dist.broadcast(memory, source, group=self.status, async_op=True)
        wait_for_work(work)
        found = memory.numpy().tobytes().decode(errors="replace").rstrip()
        return [source] if any_good else list(self.ranks), found

    # ---- rounds ----

    def _meet(self) -> None:
        """All ranks come here. What follows may have any size.

        Raises:
            OSError: they do not.
        """
        self._check_together()
        self._end_round(*self._begin_round(has_left=False))

    def _begin_round(self, *, has_left: bool) -> tuple[torch.Tensor, dist.Work]:
        self._round += 1
        # Ranks that are not in the same round have gone apart. So has one that leaves it.
        mark = 2 * self._round + has_left
        words = [mark, -mark, has_left * (self.rank + 1)]
        mine = torch.tensor(words, dtype=torch.int64, device="cpu")
        work = self._call(
            lambda: dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._agreeing, async_op=True)
        )
        return mine, work

    def _end_round(self, mine: torch.Tensor, work: dist.Work) -> None:
        self._wait(work)
        most, minus_least, left = mine.tolist()
        if most != -minus_least:
            self._is_apart = True
            if left:
                self._why_apart = (
                    f"rank {self.ranks[left - 1]} has left by an error, which says why"
                )
            self._check_together()

    def objects(self, mine: object) -> list[Any]:
        """The picklable objects of all ranks, in their order."""
        self._meet()
        found: list[Any] = [None] * self.world_size
        self._is_apart = True
        self._call(lambda: dist.all_gather_object(found, mine, group=self._agreeing))
        self._is_apart = False
        return found

    def check_process(self) -> None:
        """Raises ValueError in a forked child, which has no part in what the ranks do."""
        if os.getpid() != self._pid:
            raise ValueError(
                f"weights come from the ranks to process `{self._pid}`, this is `{os.getpid()}`. "
                "hint: for a child that reads weights, synchronize() before forking"
            )

    def _check_together(self) -> None:
        self.check_process()
        if self._left is not None:
            left, self._left = self._left, None
            self._end_round(*left)
        if self._is_apart:
            raise OSError(
                f"the ranks are not at the same step any more: {self._why_apart}. hint: end all "
                "ranks, and resume from a checkpoint"
            )

    def _call(self, begin: Any) -> Any:
        try:
            return begin()
        except (RuntimeError, ValueError) as error:
            self._is_apart = True
            raise _lost(error) from error

    def _wait(self, work: Any) -> None:
        is_done = False
        try:
            wait_for_work(work)
            is_done = True
        except RuntimeError as error:
            raise _lost(error) from error
        finally:
            # Also where Ctrl-C has ended the wait.
            self._is_apart = self._is_apart or not is_done


@contextlib.contextmanager
def _counted_apart(ranks: tuple[int, ...]) -> Iterator[None]:
    """In this context torch counts a group of `ranks`, a part of the world, by itself.

    torch names a group by how many this rank has made, and its ranks find one another by the name.
    Ranks outside of `ranks` make none here. Where this rank counted them, the next group of all
    ranks would have a name here that it has nowhere else, and would never be made.
    """
    world: Any = dist.distributed_c10d._world
    if not hasattr(world, "group_count"):
        yield
        return
    assert dist.group.WORLD is not None
    num_made = _num_made.setdefault(dist.group.WORLD, Counter())
    before = world.group_count
    world.group_count = _FIRST_COUNT + num_made[ranks]
    num_made[ranks] += 1
    try:
        yield
    finally:
        world.group_count = before


def wait_for_work(work: dist.Work) -> None:
    """Waits for a collective over host memory; Ctrl-C ends the wait.

    Raises:
        RuntimeError: it has failed. `why_lost` says why.
    """
    pause = _POLL_SECONDS_MIN
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS_MAX)
    work.wait()


def why_lost(error: BaseException) -> str:
    """Why a collective has failed with `error`, and what to do."""
    if not dist.is_initialized():
        return (
            "destroy_process_group() was called before the ranks were done. "
            "hint: optimizer.synchronize() before it"
        )
    return (
        f"another rank is gone, or late by more than the timeout of the process group: {error}. "
        "hint: its own error says why; resume all ranks from a checkpoint"
    )


def _lost(error: Exception) -> OSError:
    return OSError(
        f"{why_lost(error)}. An optimizer is made, and a commit asked for, by all ranks that step "
        "together"
    )


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """The timeout of `group`; None: not known, and torch's own is taken."""
    group = group or dist.group.WORLD
    try:
        device = "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"
        options = group._get_backend(torch.device(device)).options  # type: ignore[union-attr]
        timeout: timedelta = options._timeout
    except (AttributeError, RuntimeError):
        return None
    else:
        return timeout
