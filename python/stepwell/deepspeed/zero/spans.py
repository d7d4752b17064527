"""Spans: what of ZeRO's partitions the engine steps as one, and how a step binds them.

A partition is one span. Where updates are deferred its spans are *runs*: what lies of one parameter
in this rank's partition, in whole rows, so that its channels can be selected. Where the partition
cuts a row, that part is a run of its own. Masters and moments stay flat: a run is a view of them.
Imports no DeepSpeed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell import _state
from stepwell._tensors import name_of, view
from stepwell.access.descriptive import without_waiting
from stepwell.deepspeed.zero.partition import Run, runs_of
from stepwell.store.deferred import Extents
from stepwell.store.engine import Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepwell import _core
    from stepwell.deepspeed.zero.gradients import Gradients
    from stepwell.deepspeed.zero.operands import Operand
    from stepwell.deepspeed.zero.partition import Fragment, Partition, Source
    from stepwell.deepspeed.zero.run_gradients import RunGradients

__all__ = ["Spans"]


class _Held(NamedTuple):
    """A partition in a step."""

    memory: dict[str, torch.Tensor]
    """What is stepped in host memory, but for the gradient, by the core's names."""
    where: tuple[object, ...]
    """Of it."""
    key: int
    """Of its stochastic rounding."""
    weight: int
    """The address of its weights on the device: a view would be another holder of their memory
    (`flat_gate`). 0: they stay in host memory."""
    itemsize: int
    """Of these."""

    def target(self, run: Run) -> int:
        """Where the new weights of a run go on the device; 0: nowhere."""
        return self.weight + run.begin * self.itemsize if self.weight else 0


class Spans:
    """The spans of a list of partitions.

    Attributes:
        runs: which elements each span has.
        of_fragment: the runs of each fragment, where updates are deferred.
        tensors: what stands for each span.
        extents: of all spans.
        places: of each its place in a step.

    Args:
        partitions: of all groups.
        sources: where fragments lie in their parameters, in the order of the forward: the spans are
            runs. None: they are the partitions.
        order: of the partitions, in which they are stepped.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        sources: Mapping[Fragment, Source] | None,
        order: Iterable[int],
    ) -> None:
        self._are_whole = sources is None
        self._are_offloaded = [partition.is_offloaded for partition in partitions]
        self.of_fragment = {
            fragment: runs_of(fragment, source) for fragment, source in (sources or {}).items()
        }
        self.runs = list(itertools.chain.from_iterable(self.of_fragment.values()))
        if sources is None:
            sizes = [partition.weight.numel() for partition in partitions]
            self.runs = [Run(group, 0, numel, 0) for group, numel in enumerate(sizes)]
        self._numbers = {run: span for span, run in enumerate(self.runs)}
        self.tensors = [torch.empty(0, device="cpu") for _ in self.runs]
        self.extents = Extents(
            [run.numel for run in self.runs],
            [name_of(partitions[run.group].weight.dtype) for run in self.runs],
            [run.row_len for run in self.runs],
        )
        self._of_group: list[list[int]] = [[] for _ in partitions]
        for span, run in enumerate(self.runs):
            self._of_group[run.group].append(span)
        self.places = [0] * len(self.runs)
        spans = itertools.chain.from_iterable(self._of_group[group] for group in order)
        for place, span in enumerate(spans):
            self.places[span] = place
        # Tensors of the core, by span, with where their memory is.
        self._bound: dict[int, tuple[object, _core.AdamTensor]] = {}

    def windows(self, fragments: Iterable[Fragment]) -> list[Window]:
        """The elements of spans that fragments have."""
        if self._are_whole:
            return [Window(group, begin, begin + numel) for group, begin, numel in fragments]
        return [
            Window(self._numbers[run], 0, run.numel)
            for each in fragments
            for run in self.of_fragment.get(each, ())
        ]

    def bind(
        self,
        store: _core.Store,
        operands: Mapping[int, Operand],
        gradients: Gradients | RunGradients,
        weights: Sequence[torch.Tensor],
        twins: Sequence[torch.Tensor | None],
    ) -> None:
        """Has the store look at a step's partitions, and binds all that it works with.

        In each step: they are few, and DeepSpeed may have given them other memory.

        Args:
            store: the engine's.
            operands: of the partitions that are stepped, by their number.
            gradients: complete.
            weights: of all partitions.
            twins: the host sides of `weights`; None: the master is.
        """
        groups = [self._of_group[group] for group in operands]
        stepped = list(itertools.chain.from_iterable(groups))
        grads = [gradients.of(self.runs[span]) for span in stepped]
        tensors = [[self.tensors[span] for span in group] for group in groups]
        store.look(tensors, None, (), grads=grads)
        # State that is away stays there.
        with without_waiting():
            held = {
                group: self._held(group, each, weights[group], twins[group])
                for group, each in operands.items()
            }
            for position, (span, grad) in enumerate(zip(stepped, grads, strict=True)):
                run = self.runs[span]
                store.bind(
                    position,
                    self._tensor(span, held[run.group], grad),
                    grad,
                    state=operands[run.group].state,
                    parts=[],
                    target=held[run.group].target(run),
                    is_kept=False,
                )

    def _held(
        self, group: int, operand: Operand, weight: torch.Tensor, twin: torch.Tensor | None
    ) -> _Held:
        """A partition in the step that comes."""
        memory = {"param": operand.master.detach(), **operand.runs}
        if twin is not None:
            memory["weight_out"] = twin
        where = (operand.key, *((each.data_ptr(), each.dtype) for each in memory.values()))
        first = 0 if self._are_offloaded[group] else weight.data_ptr()
        return _Held(memory, where, operand.key, first, weight.itemsize)

    def _tensor(self, span: int, held: _Held, grad: torch.Tensor) -> _core.AdamTensor | None:
        """A span as the core takes it; None: it is empty. Where it is seldom changes."""
        run, is_whole = self.runs[span], self._are_whole
        if run.numel == 0:
            return None
        where = (grad.data_ptr(), held.where) if is_whole else (0, held.where)
        known = self._bound.get(span)
        if known is None or known[0] != where:
            parts = {
                # Moments are not coded, of which there are no parts.
                name: each if is_whole else each.narrow(0, run.begin, run.numel)
                for name, each in held.memory.items()
            }
            twin = parts.pop("weight_out", None)
            tensor = _state.adam_tensor(
                parts.pop("param"),
                parts,
                grad=view(grad) if is_whole else None,
                weight_out=None if twin is None else view(twin),
                key=held.key,
            )
            known = self._bound[span] = where, tensor
        return known[1]
