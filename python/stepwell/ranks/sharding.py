"""`OffloadAdamW(shard=...)`: ranks with the same parameters step a share of them each.

What makes it safe is that no rank steps alone:

- Before a step all ranks tell each other whether they can step, what they step, and how: each
  steps its rows with its own hyper-parameters, its own seed and the count of its own state.
- Where parameters were written since the last step, and so before the first, the ranks compare
  checksums of all of them.
- The norm of the gradients is that of all, on every rank, and has to be the same to the last bit.

A rank that meets an error or a difference raises it, and so do all; nothing was changed.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from stepwell._checks import flag
from stepwell._sharding import is_dtensor
from stepwell._tensors import contiguous_hint
from stepwell.ranks.peers import Peers, StepFacts
from stepwell.ranks.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from stepwell._hyper import Hyper

__all__ = ["Shard", "Sharding", "UpdateFacts", "awaited", "open_sharding"]

Shard: TypeAlias = "bool | dist.ProcessGroup"
"""Whether ranks with the same parameters share the step; the ranks, where they are not all."""

Checksums: TypeAlias = "Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]"
"""`Engine.checksums`."""

_LOGGER = logging.getLogger(__name__)


class Sharding:
    """The ranks that share the step of one optimizer, and what each of them steps.

    Args:
        shard: True: all ranks; or a group of them.

    Raises:
        ValueError: there is no such group.
    """

    def __init__(self, shard: Literal[True] | dist.ProcessGroup) -> None:
        self.peers = Peers(None if shard is True else shard)
        self.shares = Shares(self.peers.rank, self.peers.world_size)
        # DistributedDataParallel over what is stepped.
        self._replicas: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def watch(self, model: torch.nn.Module) -> None:
        """This model's forwards are those before a step."""
        kind = torch.nn.parallel.DistributedDataParallel
        self._replicas.update(each for each in model.modules() if isinstance(each, kind))

    def admit(self, params: Iterable[torch.Tensor], labels: Mapping[torch.Tensor, str]) -> None:
        """Deals out the rows of `params`, which are new; those that were dealt out stay so.

        Raises:
            ValueError: the rows of one cannot be dealt out; nothing was changed.
        """
        params = [param for param in params if param not in self.shares]
        for param in params:
            if is_dtensor(param):
                raise ValueError(
                    f"{labels[param]} is a DTensor and `shard` is given, expected plain "
                    "parameters. hint: shard=False; FSDP2 has dealt them out already"
                )
            if not param.is_contiguous():
                raise ValueError(
                    f"{labels[param]} has the strides `{param.stride()}` and `shard` is given, "
                    f"expected rows one after the other. hint: {contiguous_hint(param)}, or "
                    "shard=False"
                )
        self.shares.add(params)

    def check_durability(self, mine: str | None) -> None:
        """Raises ValueError, on all ranks, where only some have a volume, or one that commits.

        Ranks with volumes make them together, and would wait for the others.
        """
        word = int.from_bytes(str(mine).encode(), "little")
        if self.peers.first_difference([word]) is not None:
            what = "no `tier`" if mine is None else f"a `tier` of durability `{mine}`"
            raise ValueError(
                f"`shard` is given, and this rank has {what}, others have not, expected the same "
                "on all ranks. hint: one Volume(...) for all: each adds its number to the name"
            )

    def check_batches(self) -> None:
        """Raises ValueError where ranks may have different numbers of batches.

        Under DistributedDataParallel.join a rank that has no more answers the collectives of the
        model, and takes no step: the others would wait for it.
        """
        for replica in self._replicas:
            config = getattr(replica, "_join_config", None)
            if config is not None and config.enable and not config.throw_on_early_termination:
                raise ValueError(
                    "`shard` is given and DistributedDataParallel.join() is in use, expected as "
                    "many batches on all ranks: one that has no more takes no step. "
                    "hint: join(throw_on_early_termination=True), or shard=False"
                )

    def agree(
        self,
        params: Sequence[torch.Tensor],
        updates: Sequence[UpdateFacts],
        *,
        clip_norm: float | None,
        nonfinite: str,
        has_error: bool,
        found_inf: bool,
        is_rounded: bool,
        is_written: bool,
        checksums: Checksums,
        label: Callable[[torch.Tensor], str],
    ) -> tuple[bool, bool]:
        """Whether a rank has found an infinity, and whether one cannot step.

        Args:
            params: of the step.
            updates: of these.
            clip_norm: what the norm of all gradients is clipped to.
            nonfinite: what is done with a norm that is not finite.
            has_error: whether this rank cannot step.
            found_inf: whether a GradScaler has found an infinity here.
            is_rounded: whether moments are rounded stochastically.
            is_written: whether some of `params` were written here since the last step.
            checksums: gives those of tensors on the device.
            label: what errors call a parameter.

        Raises:
            ValueError: on all ranks: they step different parameters or differently, or weights
                differ.
            OSError: another rank is gone.
        """
        mine = StepFacts(has_error=has_error, found_inf=found_inf, is_written=is_written)
        is_refused = has_error or found_inf
        of_any = self.peers.agree_on_step(
            mine,
            params=0 if is_refused else self.shares.digest(params),
            settings=(
                0 if is_refused else _digest(updates, clip_norm, nonfinite, is_rounded=is_rounded)
            ),
        )
        if params and not of_any.has_error and not of_any.found_inf:
            if of_any.is_written:
                self._check_weights(params, checksums, label)
            self.peers.open_data(params[0].device)
        return of_any.found_inf, of_any.has_error

    def _check_weights(
        self,
        params: Sequence[torch.Tensor],
        checksums: Checksums,
        label: Callable[[torch.Tensor], str],
    ) -> None:
        """Raises ValueError, on all ranks, if `params` do not have the same values on all.

        Cost: a read of all weights on the device, and 16 bytes per parameter between the ranks.
        """
        with self.peers.awaited():
            sums = checksums(list(params))
        found = [blake2b(each.cpu().numpy().tobytes(), digest_size=8).digest() for each in sums]
        digests = [int.from_bytes(each, "little") >> 2 for each in found]
        if (at := self.peers.first_difference(digests)) is not None:
            raise ValueError(
                f"{label(params[at])} is not the same on all ranks, expected equal parameters, "
                "and nothing was changed. hint: DistributedDataParallel(model) makes them equal; "
                "load and write weights alike on all ranks; shard=False steps each rank's own"
            )


class UpdateFacts(NamedTuple):
    """What ranks have to agree on of the update of a parameter."""

    hyper: Hyper
    number: int
    """Which one it is, from 1."""
    seed: int


def _digest(
    updates: Sequence[UpdateFacts], clip_norm: float | None, nonfinite: str, *, is_rounded: bool
) -> int:
    """A number of 62 bits that is the same where the same is done with equal gradients.

    Seeds count where moments are rounded: a checkpoint has one for all ranks.
    """
    found = blake2b(f"{clip_norm} {nonfinite}".encode(), digest_size=8)
    hyper = None
    for update in updates:
        # Parameters of one group have one object.
        if update.hyper is not hyper:
            hyper = update.hyper
            found.update(f"{hyper}".encode())
        found.update(f" {update.number}".encode())
        if is_rounded:
            found.update(f" {update.seed}".encode())
    return int.from_bytes(found.digest(), "little") >> 2


def awaited(sharding: Sharding | None) -> AbstractContextManager[None]:
    """A context in which other ranks, if there are any, wait for what this one tells them next."""
    return contextlib.nullcontext() if sharding is None else sharding.peers.awaited()


def open_sharding(
    shard: Shard, *, deferred: bool, accumulate: str, durability: str | None
) -> Sharding | None:
    """The ranks that share the step; None: there is nothing to share.

    Args:
        shard: the option.
        deferred: whether updates are deferred.
        accumulate: where gradients are summed.
        durability: of this rank's volume; None: it has none.

    Raises:
        ValueError: there is no such group, or the options do not go together; on all ranks, where
            their volumes do not.
        OSError: another rank is gone.
    """
    # `new_group` gives ranks that are not in it a number.
    outside = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
    is_group = dist.is_available() and (isinstance(shard, dist.ProcessGroup) or shard == outside)
    if not is_group:
        shard = flag(shard, "`shard`", expected="True, False or a process group")
    if shard is False:
        _tell_of_copies()
        return None
    if deferred:
        raise ValueError(
            "`shard` and `deferred` are both given, expected one: a look at a weight applies what "
            "is deferred, and only on the rank that looks. hint: shard=False"
        )
    if accumulate == "host":
        raise ValueError(
            "`shard` is given and `accumulate` is `host`, expected device: other ranks have a part "
            "in the gradients. hint: no_sync() of the model"
        )
    sharding = Sharding(shard)
    sharding.check_durability(durability)
    return sharding


def _tell_of_copies() -> None:
    """Says in the log that each of several ranks has all state."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _LOGGER.info(
            "each of %d ranks keeps the state of all its parameters in host memory, and steps "
            "them. hint: under DistributedDataParallel, shard=True has each rank do its share",
            dist.get_world_size(),
        )
