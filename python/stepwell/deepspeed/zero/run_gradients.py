"""Gradients of ZeRO's partitions whose updates are deferred, by run (`zero.spans`).

Imports no DeepSpeed.

A gradient is summed on the device, and stays there until its step: selected channels are stepped
with it. That takes 2 bytes of device memory per parameter of the rank's partitions. When it is
complete it crosses the bus, to the engine's memory for gradients that wait. A fragment that got no
gradient is stepped with the gradient 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepwell._streams import current_stream
from stepwell.store.norm import norm_of, norm_over_ranks, squares_of, wide_squares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stepwell import _core
    from stepwell.deepspeed.zero.partition import Fragment, Run

__all__ = ["RunGradients"]


class RunGradients:
    """The gradients that the coming step takes.

    Args:
        core: the engine, whose spans are the runs.
        runs: of each fragment, in the order of the engine.
        dtypes: of the weights of each partition, and of their gradients.
        device: where gradients are made.
    """

    def __init__(
        self,
        core: _core.OffloadEngine,
        runs: Mapping[Fragment, Sequence[Run]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        self._core = core
        self._runs = runs
        self._fragment_of = {run: fragment for fragment, each in runs.items() for run in each}
        self._indices = {run: index for index, run in enumerate(self._fragment_of)}
        self._dtypes = dtypes
        self._device = device
        self.bytes_sent = 0
        """None: the engine counts them."""
        # Gradients on the device until their step; those that are on their way to the host, and
        # the streams that they were made on; the norms of complete ones.
        self._sums: dict[Fragment, torch.Tensor] = {}
        self._taken: set[Fragment] = set()
        self._streams: set[int] = set()
        self._norms: dict[Fragment, torch.Tensor] = {}

    def collect(
        self, fragment: Fragment, piece: torch.Tensor, *, is_owned: bool, is_last: bool
    ) -> None:
        """As `Gradients.collect`."""
        self.add(fragment, piece, is_owned=is_owned)
        if is_last:
            self.send(fragment)

    def add(
        self, fragment: Fragment, piece: torch.Tensor, *, is_owned: bool, is_total: bool = False
    ) -> None:
        """As `Gradients.add`."""
        if fragment in self._taken:
            # A backward after the one that was announced as the last: all are taken anew.
            self._take_back()
        known = self._sums.get(fragment)
        if known is not None and not is_total:
            known.add_(piece)
        else:
            self._sums[fragment] = piece if is_owned or is_total else piece.clone()

    @property
    def is_any_complete(self) -> bool:
        """As `Gradients.is_any_complete`."""
        return bool(self._norms)

    def has_gradient(self, fragment: Fragment) -> bool:
        """As `Gradients.has_gradient`."""
        return fragment.numel == 0 or fragment in self._sums

    def send(self, fragment: Fragment) -> None:
        """The gradient of a fragment is complete: it is copied to the host."""
        if fragment.numel == 0:
            self._sums.pop(fragment, None)
            return
        grad = self._sums[fragment]
        self._norms[fragment] = norm_of(grad)
        self._take(fragment, grad)

    def _take(self, fragment: Fragment, grad: torch.Tensor) -> None:
        expected = self._dtypes[fragment.group]
        if grad.dtype != expected:
            raise ValueError(
                f"a gradient is `{grad.dtype}`, expected `{expected}` as the weights are. "
                'hint: leave out data_types.grad_accum_dtype, or "stepwell": {"zenflow": false}'
            )
        stream = current_stream(self._device)
        size = grad.element_size()
        runs = self._runs[fragment]
        self._core.take_deferred(
            [self._indices[run] for run in runs],
            [grad.data_ptr() + (run.begin - fragment.begin) * size for run in runs],
            source_owners=[grad.untyped_storage()],
            stream=stream,
        )
        self._taken.add(fragment)
        self._streams.add(stream)

    def _take_back(self) -> None:
        """What is on its way to the host is taken anew, by `send` or the step."""
        self._core.discard()
        self._taken.clear()
        self._streams.clear()
        self._norms.clear()

    def gradient(self, fragment: Fragment) -> torch.Tensor:
        """The gradient of a fragment since the last step, in fp32: a copy, in host memory.

        Raises:
            ValueError: there is none. After the step it waits for its turn.
        """
        if fragment not in self._sums:
            raise ValueError(
                "a gradient is read that is on its way to its deferred update, expected a read "
                'between backward and step. hint: "stepwell": {"zenflow": false}'
            )
        return self._sums[fragment].detach().to("cpu", torch.float32, copy=True)

    def set_gradient(
        self, fragment: Fragment, value: torch.Tensor, *, is_norm_kept: bool = False
    ) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a gradient is set, which deferred updates (zero_optimization.zenflow) do not do. "
            'hint: "stepwell": {"zenflow": false}, or leave out zenflow'
        )

    def norm(self, add_up: Callable[[torch.Tensor], float]) -> float:
        """As `Gradients.norm`."""
        for fragment in [each for each in self._sums if each not in self._taken]:
            self.send(fragment)
        return norm_over_ranks(
            squares_of(self._norms.values(), self._device),
            lambda: wide_squares(list(self._sums.values()), self._device),
            add_up,
        )

    def drop(self) -> None:
        """Forgets all gradients since the last step."""
        self._take_back()
        self._sums.clear()

    def arrive(self) -> None:
        """As `Gradients.arrive`: nothing reads gradients in host memory but their step."""

    def let_go(self) -> None:
        """As `Gradients.let_go`: gradients stay until their step."""

    def drain(self) -> None:
        """As `Gradients.drain`: the copies are the engine's."""

    def end(self) -> None:
        """As `Gradients.end`."""
        self._sums.clear()

    # ---- the step ----

    def known(self) -> dict[Run, torch.Tensor]:
        """The gradients that have come, on the device."""
        return {
            run: self._of(run, fragment)
            for run, fragment in self._fragment_of.items()
            if fragment in self._sums
        }

    def complete(self, core: _core.OffloadEngine) -> None:
        """As `Gradients.complete`. What got no gradient is stepped with the gradient 0."""
        missing = [each for each in self._runs if each.numel and each not in self._sums]
        zeros: dict[torch.dtype, torch.Tensor] = {}
        for fragment in sorted(missing, key=lambda each: -each.numel):
            dtype = self._dtypes[fragment.group]
            if dtype not in zeros:
                # The longest comes first.
                zeros[dtype] = torch.zeros(fragment.numel, dtype=dtype, device=self._device)
            self._sums[fragment] = zeros[dtype].narrow(0, 0, fragment.numel)
            self._take(fragment, self._sums[fragment])

    def of(self, run: Run) -> torch.Tensor:
        """The gradient of a run, on the device, once all are complete."""
        return self._of(run, self._fragment_of[run])

    def _of(self, run: Run, fragment: Fragment) -> torch.Tensor:
        return self._sums[fragment].narrow(0, run.begin - fragment.begin, run.numel)

    @property
    def owners(self) -> list[object]:
        """As `Gradients.owners`: the engine holds what it copies."""
        return []

    def note_step(self, grad_scale: float) -> None:
        """A step has them: streams wait until they are copied, and they are forgotten."""
        for stream in self._streams:
            self._core.release(stream=stream)
        self._sums.clear()
        self._taken.clear()
        self._streams.clear()
        self._norms.clear()
