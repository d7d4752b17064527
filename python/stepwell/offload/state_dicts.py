"""State dicts of OffloadAdamW: after the last step is complete, of this rank's share or whole."""

from __future__ import annotations

import abc
import logging
from typing import TYPE_CHECKING, Any

import torch

from stepwell import _state
from stepwell._sharding import local
from stepwell.offload import sharded_state
from stepwell.offload.budget import GIB
from stepwell.offload.state import OffloadState

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

    from stepwell.offload.sharding import Sharding

__all__ = ["OffloadStateDicts"]

_LOGGER = logging.getLogger(__name__)

# Of the groups of state dicts from before the first release, without effect.
_OLD_KEY = "deferred_interval"


class OffloadStateDicts(OffloadState):
    """The same as far as its state is saved and loaded."""

    _sharding: Sharding | None

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until the last step is complete."""

    @abc.abstractmethod
    def _follow_groups(self) -> None:
        """Makes ready for what has come since groups were added."""

    def _first_element(self, param: torch.Tensor) -> int:
        if self._sharding is None or param not in self._sharding.shares:
            return 0
        return self._sharding.shares.elements(param)[0]

    def _own_state(self, param: torch.Tensor, state: _state.State, label: str) -> _state.State:
        if self._sharding is None:
            return state
        # Also the rows of a frozen one: the rank that has their state steps them once it thaws.
        self._sharding.admit([param], {param: label})
        return sharded_state.own(self._sharding, param, state, label)

    def _converted(
        self, param: torch.Tensor, loaded: _state.State, key: int, label: str
    ) -> _state.State:
        if param in self._residents:
            return self._residents.converted(param, loaded, label)
        return super()._converted(param, loaded, key, label)

    def _host_side(self, param: torch.Tensor) -> torch.Tensor:
        if self._sharding is None or param in self._twins or param not in self._sharding.shares:
            return super()._host_side(param)
        return self._sharding.shares.piece(param, param.detach())

    def state_dict(self) -> StateDict:
        """As `stepwell.AdamW.state_dict`, after the last step is complete.

        Its tensors are in host memory. With `shard` they are the rows of this rank, which
        torch.distributed.checkpoint saves and loads at any number of ranks, and torch.save refuses.
        """
        found = self._own_state_dict()
        if self._sharding is not None:
            for index, param in enumerate(self._in_order()):
                if state := found["state"].get(index):
                    found["state"][index] = sharded_state.of_rank(self._sharding, param, state)
        return found

    def full_state_dict(self, rank: int | None = 0) -> StateDict:
        """The state dict of all ranks together, as without `shard`. All ranks have to call it.

        It is gathered through host memory, and takes what the state of one rank takes without
        `shard`, which is announced in the log.

        Args:
            rank: the rank of the group that gets it; None: every rank. The others get {}.

        Raises:
            ValueError: the ranks have state of different parameters; this one has no memory for
                what it reads from its volume.
            OSError: another rank is gone, or has failed; a drive of this one has.
        """
        if self._sharding is None:
            return self._own_state_dict()
        failure: Exception | None = None
        found: StateDict = {}
        try:
            found = self._own_state_dict()
        except (ValueError, OSError) as error:
            failure = error
        # The others wait for this rank.
        self._sharding.peers.tell_failure(failure)
        state = sharded_state.whole(self._sharding, self._in_order(), found["state"], rank)
        return {} if state is None else {**found, "state": state}

    def _own_state_dict(self) -> StateDict:
        """The state dict of what this rank steps."""
        self.synchronize()
        self._host.take_fingerprints(self._twins, self._states)
        state_dict = super().state_dict()
        if self._is_stepping:
            # A signal's handler. The step goes on with what is on the device.
            for index, param in enumerate(self._in_order()):
                if param in self._residents and (state := state_dict["state"].get(index)):
                    state_dict["state"][index] = self._residents.as_read(param, state)
        swapped = self._host.swapped
        if swapped is not None and swapped.commits:
            # All else is read from the volume, and not written by later steps: so are counts of
            # parameters without elements here.
            for index, param in enumerate(self._in_order()):
                if param not in swapped and (state := state_dict["state"].get(index)):
                    state_dict["state"][index] = {
                        name: each.clone() for name, each in state.items()
                    }
        return state_dict

    def _in_order(self) -> list[torch.Tensor]:
        """All parameters, as a state dict counts them."""
        return [param for group in self.param_groups for param in group["params"]]

    def decoded_state_dict(self) -> StateDict:
        """As `stepwell.AdamW.decoded_state_dict`: plain fp32 moments.

        Takes 8 bytes per parameter unless `moments` is "fp32".
        """
        if self._sharding is not None:
            raise ValueError(
                "decoded_state_dict() is called and `shard` is given, expected one rank with all "
                "state. hint: full_state_dict(), which an optimizer without `shard` loads"
            )
        if self._moments != "fp32":
            numel = sum(local(param).numel() for param in self._twins)
            _LOGGER.info("%.2f GiB of host memory for decoded moments", 8 * numel / GIB)
        return super().decoded_state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As `stepwell.AdamW.load_state_dict`, after the last step is complete."""
        self.synchronize()
        self._follow_groups()
        self._host.take_fingerprints(self._twins, self._states)
        self._host.note_load(has_state=bool(state_dict["state"]))
        shares = None if self._sharding is None else self._sharding.shares
        dealt_out = [] if shares is None else list(shares)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            if shares is not None:
                # Other ranks, whose load may have failed earlier, deal out the same from here on.
                shares.remove(set(shares).difference(dealt_out))
            raise
        for group in self.param_groups:
            group.pop(_OLD_KEY, None)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OffloadAdamW holds a device and cannot be copied or pickled. "
            "hint: use its state_dict()"
        )
