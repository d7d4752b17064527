"""A plan: all placements of a run on a machine, what each lacks there, and which to use.

Bytes are those that the library takes (`stepwell._sizes`); of peers those of their documentation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from stepwell.planning.machine import Machine
from stepwell.planning.measuring import machine_here
from stepwell.planning.model import Model, model_of
from stepwell.planning.offloaded import deferred, device_share, exact
from stepwell.planning.on_device import all_on_device, paged_8_bit
from stepwell.planning.on_drives import volume
from stepwell.planning.placement import CONTEXT_BYTES, PROCESS_BYTES, Placement, Run
from stepwell.planning.recipe import recipe_of
from stepwell.planning.streamed import streamed
from stepwell.planning.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepwell.planning.model import Source
    from stepwell.planning.workload import Dtype

__all__ = ["Plan", "plan", "plan_of"]

# What is this much slower is as fast, as well as a plan can tell: the first in the list is taken.
_AS_FAST = 1.05
_LOSS_TOKENS = 2048


@dataclass(frozen=True)
class Plan:
    """What a run takes in each placement, on one machine."""

    model: Model
    workload: Workload
    machine: Machine
    placements: list[Placement]

    @property
    def best(self) -> list[Placement]:
        """The fastest that fits, and the second.

        Those whose updates are AdamW's over masters, if any of them fits.
        """
        fitting = [each for each in self.placements if each.fits]
        left = [each for each in fitting if each.is_exact] or fitting
        found: list[Placement] = []
        while left and len(found) < 2:
            least = min(each.step.total for each in left)
            first = next(each for each in left if each.step.total <= _AS_FAST * least)
            found.append(first)
            # Not the same with activations elsewhere, which costs something and gains nothing.
            is_other = [(each.kind, each.moments) != (first.kind, first.moments) for each in left]
            left = list(compress(left, is_other))
        return found

    def code(self, placement: Placement) -> str:
        """What to write for a placement."""
        return recipe_of(placement, self.workload)

    def tokens_per_second(self, placement: Placement) -> float:
        """Of all GPUs."""
        return self.workload.tokens_of_step / placement.step.total

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        model = {name: each for name, each in asdict(self.model).items() if name != "tensors"}
        return {
            "model": {**model, "num_params": self.model.num_params},
            "workload": {
                **asdict(self.workload),
                "tokens_of_step": self.workload.tokens_of_step,
            },
            "machine": self.machine.to_dict(),
            "placements": [self._row(each) for each in self.placements],
            "best": [self.placements.index(each) for each in self.best],
        }

    def _row(self, placement: Placement) -> dict[str, Any]:
        row = {name: each for name, each in asdict(placement).items() if name != "step"}
        return {
            **row,
            "fits": placement.fits,
            "host_total": placement.host_total,
            "seconds": placement.step.total,
            "seconds_of": placement.step.seconds,
            "binds": placement.step.binds,
            "tokens_per_second": self.tokens_per_second(placement),
            "code": self.code(placement),
        }


def plan(
    model: Source,
    *,
    tokens: int = 4096,
    micro_batch: int = 1,
    accumulation: int = 1,
    gpus: int = 1,
    drives: Sequence[str] = (),
    checkpointing: bool = True,
    loss_tokens: int | None = None,
    dtype: Dtype = "bfloat16",
    machine: Machine | None = None,
) -> Plan:
    """Says where a model can be trained, what that takes, and how long a step is.

    `docs/plan.md` has what is predicted from what, and how well.

    Args:
        model: a `config.json` of transformers, or a folder that has one; a number of parameters,
            also as "7B"; a callable that builds the model on `meta`, or "MODULE:CALLABLE"; or the
            model.
        tokens: of a sample.
        micro_batch: samples of a forward, on each GPU.
        accumulation: forwards of a step.
        gpus: of one host.
        drives: for a volume: folders that `stepwell tune` has measured, or rates, as "3GB/s".
        checkpointing: whether layers compute their activations again in the backward.
        loss_tokens: tokens whose logits are there at once, where the loss is computed in parts.
        dtype: of the parameters.
        machine: what `stepwell.planning.described` gives; None: this one, which is measured once.

    Raises:
        ValueError: an argument that is not what was expected; or there is no GPU, and no machine is
            described.
    """
    workload = Workload(
        tokens=tokens,
        micro_batch=micro_batch,
        accumulation=accumulation,
        gpus=gpus,
        checkpointing=checkpointing,
        loss_tokens=loss_tokens,
        dtype=dtype,
    )
    sizes = model_of(model)
    where = (machine_here() if machine is None else machine).with_drives(drives)
    return plan_of(sizes, workload, where)


def plan_of(model: Model, workload: Workload, machine: Machine) -> Plan:
    """The plan of a run."""
    found = _placements(model, workload, machine)
    short = [
        index for index, each in enumerate(found) if each.lacks.keys() == {"GPU"}
        and not each.refused
    ]  # fmt: skip
    for what, other in _smaller(workload) if short else ():
        others = _placements(model, other, machine)
        for index in short:
            if not found[index].remedy and others[index].fits:
                found[index].remedy = what
    return Plan(model, workload, machine, found)


def _placements(model: Model, workload: Workload, machine: Machine) -> list[Placement]:
    """All placements, with what each takes and lacks."""
    run = Run(model, workload, machine)
    found = [
        all_on_device(run),
        paged_8_bit(run),
        exact(run, "fp32"),
        exact(run, "q8"),
        device_share(run),
        deferred(run),
        streamed(run, "fp32"),
        streamed(run, "q8"),
        streamed(run, "q8", activations_on_host=True),
        volume(run, "fp32", is_streamed=False),
        volume(run, "q8", is_streamed=True),
    ]
    for placement in found:
        lacks = {
            "GPU": placement.peak + CONTEXT_BYTES - machine.gpu_memory,
            "host": placement.host_total + PROCESS_BYTES - machine.host_memory,
        }
        placement.lacks |= {name: nbytes for name, nbytes in lacks.items() if nbytes > 0}
    return found


def _smaller(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """The same step with less on the device, the cheapest changes first."""
    found, said = workload, []
    if found.loss_tokens is None and found.tokens_of_forward > _LOSS_TOKENS:
        found = replace(found, loss_tokens=_LOSS_TOKENS)
        said.append(f"the loss in parts of {_LOSS_TOKENS:,} tokens")
        yield said[-1], found
    while found.micro_batch > 1 and found.micro_batch % 2 == 0:
        found = replace(
            found, micro_batch=found.micro_batch // 2, accumulation=found.accumulation * 2
        )
        smaller = f"micro-batch {found.micro_batch}, accumulation {found.accumulation}"
        yield " and ".join([*said, smaller]), found
    if not found.checkpointing:
        said = [*said, "gradient checkpointing"]
        found = replace(found, checkpointing=True)
        yield " and ".join(said), found
