"""What waits for persistent parameters of ZeRO-3 behind a step.

Imports DeepSpeed's states of parameters, and is imported late.

On one rank each of them goes up when something waits for it (`zero.persistent`). Several ranks
gather them, whether one of them waits or not (`zero.gathers`). DeepSpeed gathers none of these: to
it they are gathered, in memory of the step. What it reads of them, and the program, waits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from stepwell.access.gate import Gate
from stepwell.deepspeed.zero.gathers import GatheredPersistents
from stepwell.deepspeed.zero.persistent import PersistentUploads, Upload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepwell.deepspeed.zero.partition import Fragment
    from stepwell.deepspeed.zero.partitions import Partitions
    from stepwell.ranks.gathering import Gatherer
    from stepwell.ranks.peers import Peers

__all__ = ["PersistentGate"]


class PersistentGate:
    """Persistent parameters whose new weights come by themselves.

    Args:
        fragments: what is stepped of each here, in the order of all ranks; none: DeepSpeed gathers.
        partitions: what steps them.
        peers: the ranks that gather them; None: there is one rank.
    """

    def __init__(
        self, fragments: Mapping[Any, Fragment], partitions: Partitions, peers: Peers | None
    ) -> None:
        self._fragments = dict(fragments)
        self._partitions = partitions
        self._world_size = 1 if peers is None else peers.world_size
        self._gathers = None if peers is None else GatheredPersistents(partitions, peers)
        self._uploads: PersistentUploads
        self._gate: Gate | None = None
        # What is called when the step that comes has begun.
        self._begun: list[partial[Any]] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Forwards of `module` are those that use the parameters, and wait for them."""
        if not self._fragments:
            return
        self._gate = Gate(module, self._fragments)
        if self._gathers is None:
            self._uploads = PersistentUploads(self._partitions, self._partitions.device)
        self._gate.attach(self._fragments, self._gathers or self._uploads)

    @property
    def gatherer(self) -> Gatherer | None:
        """What gathers them on several ranks; None: nothing does."""
        return None if self._gathers is None else self._gathers.gatherer

    def uploads(
        self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]
    ) -> dict[Any, Upload]:
        """What comes with the next step; what came with the last one is there.

        Empty where DeepSpeed gathers, as on one rank where code was compiled.

        Args:
            weights: of each sub-group, flat.
            masters: likewise.
        """
        if self._gate is None:
            return {}
        self._gate.finish()
        if not (self._gate.is_open or self._gathers):
            return {}
        uploads: dict[Any, Upload] = {}
        for param, fragment in self._fragments.items():
            flat = weights[fragment.group]
            if self._partitions.are_copied_late:
                # What is uploaded is read before the copy.
                flat = masters[fragment.group].detach()
            source = flat.narrow(0, fragment.begin, fragment.numel)
            target = torch.empty(
                self._world_size * fragment.numel,
                dtype=source.dtype,
                device=self._partitions.device,
            )
            uploads[param] = Upload(fragment, source, target)
        return uploads

    def open(self, uploads: Mapping[Any, Upload], *, is_protected: bool) -> None:
        """Has uses of `uploads` wait, of the step that comes, from its beginning on.

        Args:
            uploads: of this step.
            is_protected: whether every use of what the step writes waits. If not, one rank leaves
                them to DeepSpeed.
        """
        self._begun = []
        # Several ranks gather, whether this one waits or not.
        if self._gate is None or not uploads or not (is_protected or self._gathers):
            return
        if self._gathers is None:
            self._begun += self._uploads.submission(uploads)
        for param, upload in uploads.items():
            data = upload.target[: param.ds_numel].view(param.ds_shape)
            self._begun.append(partial(setattr, param, "data", data))
            # So DeepSpeed does not gather it.
            self._begun.append(partial(setattr, param, "ds_status", ZeroParamStatus.AVAILABLE))
        self._partitions.begin_with(self._gate.opening(uploads))

    def submission(self, uploads: Mapping[Any, Upload]) -> list[partial[Any]]:
        """The calls by which `uploads` come, made directly after the step is submitted.

        Args:
            uploads: as `open` was given them.
        """
        # They refer to weights, of which those references are counted that nothing knows.
        begun, self._begun = self._begun, []
        return begun if self._gathers is None else begun + self._gathers.submission(uploads)

    def end_step(self, *, is_protected: bool) -> None:
        """The step waits for what nothing else would, and for all unless `is_protected`."""
        if self._gate is None:
            return
        if is_protected and self._gate.is_open:
            self._gate.wait_for_uncovered()
        else:
            self._gate.finish()

    def finish(self) -> None:
        """Waits until all of them are there."""
        if self._gate is not None:
            self._gate.finish()

    def end(self) -> None:
        """Waits as `finish`; no step follows. What gathers, and has the engine, ends."""
        self.finish()
        self._fragments.clear()
        self._gate = self._gathers = None
