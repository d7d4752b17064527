"""The engine of a rank that steps some rows of each parameter, and gets the others' from the ranks.

It steps as `Engine` does, and waits for what the thread of `gathering` has brought.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from stepwell._sharding import local
from stepwell.ranks.gathering import Gatherer, Piece, bytes_of
from stepwell.store.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    import torch

    from stepwell.ranks.sharding import Sharding
    from stepwell.store.swapped import Swapped
    from stepwell.store.twins import Twins

__all__ = ["RankEngine"]


class RankEngine(Engine):
    """Steps the rows of this rank, and brings all new weights to all ranks.

    Args:
        sharding: the ranks, and the rows of each.
        device: as `Engine` has it.
        params: likewise, the same in the same order on all ranks.
        twins: likewise.
        threads: likewise.
        swapped: likewise.
    """

    def __init__(
        self,
        sharding: Sharding,
        device: torch.device,
        params: Iterable[torch.Tensor],
        twins: Twins,
        threads: int | None,
        swapped: Swapped | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(device, params, twins, threads, swapped=swapped, lock=lock)
        self._shares = sharding.shares
        self._commits = swapped is not None and swapped.commits
        self._gatherer = Gatherer(self._core, sharding.peers, device, commits=self._commits)

    @property
    @override
    def busy(self) -> bool:
        return super().busy or self._gatherer.is_busy

    @override
    def options(self, params: Sequence[torch.Tensor]) -> dict[str, Any]:
        if self._commits:
            # Until all ranks have committed the step before, those that have may have to go back
            # from it (`sharded_volume.py`).
            self.confirm()
        stepped = set(map(id, params))
        in_order = [param for param in self._params if id(param) in stepped]
        begun = self._gatherer.submission(
            [self._piece(param) for param in in_order],
            {self._indices[id(param)]: nth for nth, param in enumerate(in_order)},
        )
        return {"begun": begun}

    def _piece(self, param: torch.Tensor) -> Piece:
        whole = local(param)
        memory, ranks = bytes_of(whole), range(self._shares.world_size)
        cuts = [self._shares.elements(param, rank)[0] * whole.itemsize for rank in ranks]
        cuts.append(whole.nbytes)
        parts = [memory[begin:end] for begin, end in itertools.pairwise(cuts)]
        is_even = len({part.numel() for part in parts}) == 1
        begin, end = self._shares.elements(param)
        return Piece(
            self._indices[id(param)], 0, end - begin, parts, whole=memory if is_even else None
        )

    @override
    def wait(self, params: Iterable[torch.Tensor], /) -> bool:
        begin = time.perf_counter()
        # Read before the wait: a step may begin on another thread meanwhile.
        is_last, streams = self.is_last_step, self._streams
        self._gatherer.wait([self._indices[id(param)] for param in params], streams)
        self.seconds_waited += time.perf_counter() - begin
        return is_last

    def confirm(self) -> None:
        """Waits until all ranks have told that their parts of the last step are good.

        Raises:
            OSError: one is not.
        """
        self._gatherer.confirm()

    @override
    def decided(self) -> AbstractContextManager[None]:
        """As `Gatherer.decided`."""
        return self._gatherer.decided()

    @override
    def finish(self) -> None:
        super().finish()
        self._gatherer.finish(self._streams)

    @override
    def synchronize(self) -> None:
        super().synchronize()
        self.finish()
        self._gatherer.synchronize()

    @override
    def timing(self) -> dict[str, float]:
        """As `Engine.timing`, with `bytes_gathered`: of weights that came from other ranks."""
        return {**super().timing(), "bytes_gathered": self._gatherer.bytes_received}
