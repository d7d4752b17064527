"""The options of `OffloadAdamW`, and which of them go together."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from stepwell._checks import choice, count, nbytes, optional
from stepwell.store.deferred import Deferred
from stepwell.store.volume import Volume

__all__ = ["Memory", "Options"]

Memory: TypeAlias = Literal["device", "host"]
"""Where weights are between their uses, activations between forward and backward, and sums of
gradients."""


class Options(NamedTuple):
    """What an `OffloadAdamW` is given, beside what its parameter groups have."""

    moments: str
    weights: Memory
    activations: Memory
    device: torch.device | str | None
    accumulate: Memory
    accumulation_steps: int | None
    deferred: Deferred | None
    tier: Volume | None
    host_bytes_max: int | None
    device_bytes_max: int
    threads: int | None

    @classmethod
    def of(
        cls,
        *,
        moments: str,
        weights: Memory,
        activations: Memory,
        device: torch.device | str | None,
        accumulate: Memory | None,
        accumulation_steps: int | None,
        deferred: Deferred | None,
        tier: Volume | None,
        host_bytes_max: int | str | None,
        device_bytes_max: int | str,
        threads: int | None,
        has_model: bool,
    ) -> Options:
        """The options, checked, as numbers and without those that are left open.

        Raises:
            ValueError: one is not what `OffloadAdamW` takes, or two do not go together.
        """
        if accumulate is None:
            accumulate = "host" if weights == "host" else "device"
        found = cls(
            moments=moments,
            weights=weights,
            activations=activations,
            device=device,
            accumulate=accumulate,
            accumulation_steps=optional(count, accumulation_steps, "`accumulation_steps`"),
            deferred=deferred,
            tier=tier,
            host_bytes_max=optional(nbytes, host_bytes_max, "`host_bytes_max`"),
            device_bytes_max=nbytes(device_bytes_max, "`device_bytes_max`"),
            threads=optional(count, threads, "`threads`"),
        )
        _check(found, has_model=has_model)
        return found


def _check(options: Options, *, has_model: bool) -> None:
    """Raises ValueError for options that do not go together."""
    weights, activations, device = options.weights, options.activations, options.device
    accumulate, deferred, tier = options.accumulate, options.deferred, options.tier
    choice(weights, "`weights`", get_args(Memory))
    choice(activations, "`activations`", get_args(Memory))
    choice(accumulate, "`accumulate`", get_args(Memory))
    if activations == "host" and not has_model:
        raise ValueError(
            "`activations` is `host` and no model is given, whose forwards make them. "
            "hint: OffloadAdamW(model, activations='host'), or model=model beside parameters"
        )
    if weights == "host":
        _check_host_weights(
            device,
            has_model=has_model,
            accumulate=accumulate,
            beside={"deferred": deferred},
        )
    elif device is not None:
        raise ValueError(
            f"`device` is `{device}` and `weights` is `device`, expected None: parameters stay "
            "where they are. hint: model.to(device); or weights='host'"
        )
    if deferred is not None and not isinstance(deferred, Deferred):
        raise ValueError(
            f"`deferred` is `{deferred!r}`, expected a stepwell.Deferred or None. "
            "hint: deferred=stepwell.Deferred(interval=4)"
        )
    if deferred is not None and accumulate == "host":
        raise ValueError(
            "`deferred` is given and `accumulate` is `host`, expected device. "
            "hint: no_sync() or accumulation_steps"
        )
    if tier is not None and not isinstance(tier, Volume):
        raise ValueError(
            f"`tier` is `{tier!r}`, expected a stepwell.Volume or None. "
            "hint: tier=stepwell.Volume([FOLDER, ...])"
        )
    if deferred is not None and tier is not None:
        _check_deferred_on_volume(deferred, tier)
    is_summed_there = accumulate == "device" or weights == "host"
    _check_device_bytes(options.device_bytes_max, is_summed_there=is_summed_there, tier=tier)


def _check_host_weights(
    device: torch.device | str | None,
    *,
    has_model: bool,
    accumulate: Memory,
    beside: dict[str, object],
) -> None:
    """Raises ValueError where weights cannot lie in host memory."""
    for name, value in beside.items():
        if value is not None:
            raise ValueError(
                f"`weights` is `host` and `{name}` is `{value}`, expected it to be left out. "
                "hint: weights='device' where the weights fit; larger micro-batches hide steps"
            )
    try:
        torch.empty(0, device="cpu" if device is None else device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"`device` is `{device}`, expected one that torch can use here, which says `{reason}`. "
            "hint: device='cuda', with a torch that sees the GPU"
        ) from error
    if not has_model:
        raise ValueError(
            "`weights` is `host` and no model is given, whose modules would fetch them. "
            "hint: OffloadAdamW(model, weights='host'), or model=model beside parameters"
        )
    if accumulate == "device":
        raise ValueError(
            "`weights` is `host` and `accumulate` is `device`, expected host: all gradients "
            "would be on the device. hint: leave `accumulate` out, or weights='device'"
        )


def _check_device_bytes(
    device_bytes_max: int, *, is_summed_there: bool, tier: Volume | None
) -> None:
    """Raises ValueError where so much state cannot stay on the device."""
    if device_bytes_max == 0:
        return
    what = f"`device_bytes_max` is `{device_bytes_max}` and "
    if not is_summed_there:
        raise ValueError(
            what + "`accumulate` is `host`, expected device: what is stepped there is summed there"
        )
    if tier is not None and tier.durability == "commit":
        raise ValueError(
            what + "`tier` has durability `commit`, expected none: state on the device is in no "
            "commit. hint: Volume(..., durability='none'), and checkpoints of state_dict()"
        )


def _check_deferred_on_volume(deferred: Deferred, tier: Volume) -> None:
    """Raises ValueError where updates of state on this volume cannot be deferred this way."""
    if tier.durability == "commit":
        raise ValueError(
            "`deferred` is given and `tier` has durability `commit`, expected none: gradients that "
            "wait in host memory are in no commit. hint: Volume(..., durability='none'), and "
            "checkpoints of state_dict()"
        )
    if deferred.selects:
        raise ValueError(
            f"`tier` is given and `deferred` has `fraction={deferred.fraction}`, expected no "
            "selected channels: their state has to be in host memory. hint: Deferred(fraction=0)"
        )
