"""Makes every access to a sharded parameter wait while this rank's new shard is under way.

FSDP2 gathers a module's parameters before it uses them, and reads their shards then: from memory of
its own beside the DTensor, on a stream of its own. That memory, the DTensor and its local tensor
have the class of what a step writes (`access.writes`) until the first use of one of the three. So
each gather waits for the shards that it reads, whenever FSDP2 launches it: before the module's
forward, ahead of it (`set_modules_to_forward_prefetch`), in a backward, or by `unshard()`. The wait
is this rank's own. Ranks need not agree on anything, and every collective is FSDP2's or the
program's, in their order.

Where other memory than this refers to a shard, also what another version of FSDP2 may hold, the
parameter is exposed, and the step itself waits for it.

Cost per parameter and step: three assignments of a class, and a dozen entries of dicts.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from stepwell._sharding import is_dtensor, is_exactly_dtensor, piece_of
from stepwell.access.guard import Forwards, Uploads, WeightGuard, exposed
from stepwell.access.writes import ThreadWait

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["ShardGuard", "are_offloaded"]


def are_offloaded(params: Iterable[torch.Tensor], model: torch.nn.Module | None) -> bool:
    """Whether all of `params` are shards that FSDP2 keeps in host memory (`CPUOffloadPolicy`).

    Args:
        params: those.
        model: what they are of; None: not known, and where the mesh is tells.
    """
    modules = () if model is None else model.modules()
    of_fsdp = [each for each in _fsdp_params(modules) if getattr(each, "offload_to_cpu", False)]
    ids = {id(each.sharded_param) for each in of_fsdp}
    return all(
        is_dtensor(param)
        and piece_of(param).is_cpu
        and (id(param) in ids or param.device_mesh.device_type != "cpu")
        for param in params
    )


class ShardGuard(WeightGuard):
    """Guards parameters of which some are DTensors.

    Args:
        params: all of them.
        uploads: as `WeightGuard` has it.
        forwards: likewise.
        modules: those of the model, of which some may be FSDP2's.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        uploads: Uploads,
        forwards: Forwards,
        modules: Iterable[torch.nn.Module],
    ) -> None:
        self._shards = {param for param in params if is_dtensor(param)}
        # What FSDP2 has of each, which may get other memory; by the parameter's id.
        self._of_fsdp: dict[int, weakref.ref[Any]] = {
            id(each.sharded_param): weakref.ref(each) for each in _fsdp_params(modules)
        }
        self._thread_wait = ThreadWait(next(iter(params)).device)
        super().__init__(uploads, forwards, partial(_finish, self._thread_wait, uploads))

    @override
    def is_reduced(self, param: torch.Tensor) -> bool:
        reference = self._of_fsdp.get(id(param))
        # Gradients that FSDP2 offloads may still be on their way to where they are read.
        return reference is not None and not getattr(reference(), "offload_to_cpu", True)

    @override
    def exposed(
        self,
        params: Iterable[torch.Tensor],
        holders: Iterable[torch.Tensor],
        held: Collection[int] = (),
    ) -> list[torch.Tensor]:
        params = list(params)
        shards = [param for param in params if param in self._shards]
        found = super().exposed(
            [param for param in params if param not in self._shards],
            [param for param in holders if param not in self._shards],
            held,
        )
        memories = {shard: self._memories(shard) for shard in shards}
        known = [each for own in memories.values() for each in (*own, *_bases(own))]
        # All of a shard's are on one memory.
        of_piece = {own[0]: shard for shard, own in memories.items() if own}
        found += [shard for shard, own in memories.items() if not own]
        return found + [of_piece[piece] for piece in exposed(of_piece, known, torch.Tensor)]

    def _memories(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The tensors over the memory of a shard: its local one, and FSDP2's.

        None where one of them has a class of its own.
        """
        reference = self._of_fsdp.get(id(shard))
        flat = None if reference is None else getattr(reference(), "_sharded_param_data", None)
        # Not what `to_local` gives, which is a view.
        found = [shard._local_tensor, *([] if flat is None else [flat])]  # type: ignore[attr-defined]
        is_plain = all(type(each) is torch.Tensor for each in found)
        is_one = len({each.untyped_storage()._cdata for each in found}) == 1
        return found if is_plain and is_one and is_exactly_dtensor(shard) else []

    @override
    def exposed_reads(self, read: Mapping[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        # Those of one group are on one memory.
        pieces = {piece_of(grad): shard for shard, grad in read.items() if _is_plain(grad)}
        found = [shard for shard, grad in read.items() if not _is_plain(grad)]
        known = [*pieces, *_bases(pieces)]
        return found + [pieces[piece] for piece in exposed(pieces, known, torch.Tensor)]

    @override
    def parts(
        self, params: Iterable[torch.Tensor], read: Mapping[torch.Tensor, torch.Tensor]
    ) -> dict[torch.Tensor, torch.Tensor]:
        # Of each shard other tensors have the memory, whose classes change too.
        parts: dict[torch.Tensor, torch.Tensor] = {}
        for shard in [param for param in params if param in self._shards]:
            if memories := self._memories(shard):
                parts.update(dict.fromkeys([shard, *memories], shard))
        for shard, grad in read.items():
            if _is_plain(grad):
                parts.update(dict.fromkeys([grad, piece_of(grad)], shard))
        return parts

    @override
    def enter(self, params: Iterable[torch.Tensor]) -> None:
        super().enter(params)
        if not self.any_under_way:
            self.uploads.note_waited()

    @override
    def wait(self, params: Sequence[torch.Tensor]) -> None:
        shards = [param for param in params if param in self._shards]
        others = [param for param in params if param not in self._shards]
        if others:
            super().wait(others)
        if shards:
            # FSDP2 gathers on streams that come after no other.
            with self._thread_wait.waiting():
                super().wait(shards)

    @override
    def clear(self, step: int) -> None:
        if step == self.num_steps:
            # As `wait` has it.
            self._writes.wait_for(self._shards)
        super().clear(step)


def _fsdp_params(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """FSDP2's objects, one per sharded parameter."""
    found: list[Any] = []
    for module in modules:
        # Not of a proxy, which may have every attribute.
        if not hasattr(type(module), "_get_fsdp_state"):
            continue
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            # Before torch 2.12.
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        found += [
            each for group in groups for each in group.fsdp_params if hasattr(each, "sharded_param")
        ]
    return found


def _is_plain(grad: torch.Tensor) -> bool:
    return is_exactly_dtensor(grad) and type(piece_of(grad)) is torch.Tensor


def _bases(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What views are views of, which nothing else refers to."""
    return [tensor._base for tensor in tensors if tensor._base is not None]


def _finish(thread_wait: ThreadWait, uploads: Uploads) -> None:
    with thread_wait.waiting():
        uploads.finish()
