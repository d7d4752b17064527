"""What an `OffloadAdamW` is made from: one of each, by its options.

Nothing here keeps the optimizer alive: hooks of parameters and modules lead to some of it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepwell.store.background import Background
from stepwell.store.gradients import DeviceCollector
from stepwell.store.host_collector import HostCollector
from stepwell.store.host_side import HostSide
from stepwell.store.host_weights import HostWeights
from stepwell.store.residents import Residents
from stepwell.store.spans import Spans
from stepwell.store.states import States
from stepwell.store.staying import Staying
from stepwell.store.steps import Steps
from stepwell.store.swapped import Swapped
from stepwell.store.weight_owners import take_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stepwell.offload.options import Options
    from stepwell.optim import AdamW

__all__ = ["Parts"]


class Parts(NamedTuple):
    """Those of one optimizer."""

    host: HostSide
    residents: Residents
    background: Background
    collector: DeviceCollector | HostCollector
    steps: Steps
    spans: Spans
    keeper: States

    @classmethod
    def of(cls, optimizer: AdamW, options: Options, model: torch.nn.Module | None) -> Parts:
        """Those of an optimizer that has no parameters yet.

        Args:
            optimizer: held weakly.
            options: its own.
            model: whose forwards use the parameters.

        Raises:
            ValueError: the weights of the model are another optimizer's.
        """
        swapped = None
        if options.tier is not None:
            swapped = Swapped(options.tier, options.moments, options.threads)
        staying, device_bytes_max = None, options.device_bytes_max
        if options.weights == "host":
            assert model is not None
            take_over(model)
            there = options.device
            where = next(model.parameters()).device if there is None else torch.device(there)
            staying = Staying(model, where, device_bytes_max)
            device_bytes_max = staying.state_bytes_max
        residents = Residents(device_bytes_max)
        sums_on_host = options.accumulate == "host"
        host = HostSide(
            options.moments,
            options.host_bytes_max,
            deferred=options.deferred,
            swapped=swapped,
            residents=residents,
            sums_on_host=sums_on_host,
        )
        label = _labels_of(optimizer)
        background = Background(host, threads=options.threads, label=label)
        collector = (
            HostCollector(host.twins, background, label)
            if sums_on_host
            else DeviceCollector(host.twins, background, label, options.accumulation_steps)
        )
        keeper = States(optimizer, host, residents, background)
        if staying is not None:
            known = weakref.ref(background)
            host.weights = HostWeights(
                staying,
                lambda: None if (alive := known()) is None else alive.engine,
                lock=background.lock(),
                reread=_reread_of(keeper),
                owner=optimizer,
            )
        steps = Steps(host, collector, background)
        spans = Spans(host, residents, collector, background, moments=options.moments)
        return cls(host, residents, background, collector, steps, spans, keeper)


def _labels_of(optimizer: AdamW) -> Callable[[torch.Tensor], str]:
    """What errors call a parameter, also one that has left."""
    known = weakref.ref(optimizer)

    def label(param: torch.Tensor) -> str:
        found = known()
        labels = {} if found is None else dict(found._labelled())
        return labels.get(param, f"a parameter (shape {tuple(param.shape)})")

    return label


def _reread_of(keeper: States) -> Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]:
    """What copies written parameters to the host."""
    known = weakref.ref(keeper)

    def reread(written: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        found = known()
        return () if found is None else found.reread(written)

    return reread
