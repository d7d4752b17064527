"""Deferred updates (`docs/deferred.md`), simulated on one device in plain torch.

`Simulation` does to a model's weights what `OffloadAdamW(deferred=...)` does, without host memory
and without a background: what a forward reads, and when, is the same. It also has what the engine
does not: selected channels, and the mean of a turn's gradients. `tests/test_delay_simulation.py`
compares it with the engine.

Invariants:

- SIM-1 Segments are dealt into `interval` groups as `rust/offload/ring.rs` deals them. Deferred
  step `k` (from 0) is the turn of group `k % interval`. All gradients that the group has are
  applied, the newest included.
- SIM-2 What a turn makes is written to the weights in the next step: the second forward after the
  turn's backward is the first that reads it.
- SIM-3 Selected channels are stepped in every step, behind what lands. A turn neither steps nor
  lands them. The selection of a segment changes at its turn, when all its gradients are applied.

Memory: 12 B per parameter of state, its weight, `interval + 1` gradients, 1 B with selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SEGMENT_LEN", "Delay", "Hyper", "Simulation"]

SEGMENT_LEN = 64 * 65536
"""The most elements of a segment (`rust/offload/segment.rs`). Larger tensors are refused here."""

_ALIGN_BYTES = 64
_CLIP_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What all steps have in common."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments per update."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """`lr * weight_decay * weight` is taken off the weight in each update."""
    clip_norm: float = 1.0
    """What the norm of all gradients is clipped to."""


@dataclass(frozen=True, kw_only=True)
class Delay:
    """What is deferred, and how."""

    interval: int = 4
    """Every how many steps a group of segments has its turn."""
    predict: bool = True
    """Whether weights that land run ahead by `(interval + 1) / 2` updates."""
    average: bool = False
    """Whether a turn applies the mean of its gradients, as one update (ZenFlow's way); otherwise
    one after the other. An average is never predicted."""
    fraction: float = 0.0
    """The share of each matrix's channels that is stepped in every step."""
    channels: Literal["rows", "columns"] = "rows"
    """What a channel of a matrix is."""
    reselect: int = 16
    """Every how many steps channels are selected anew, by their squared norm."""
    warmup_steps: int = 0
    """So many steps are exact at first. One always is."""

    def __post_init__(self) -> None:
        if self.average and self.predict:
            raise ValueError("`average` and `predict` are set, expected one of them at most")


class _Place:
    """Where a parameter's elements are: each group has flat tensors of its own."""

    def __init__(self, group: int, begin: int, shape: torch.Size) -> None:
        self.group, self.begin, self.shape = group, begin, shape

    def of(self, flat: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter's elements, of a tensor for each group, in its shape."""
        return flat[self.group][self.begin : self.begin + self.shape.numel()].view(self.shape)


def _places(params: Sequence[torch.Tensor], interval: int) -> tuple[list[_Place], int]:
    """SIM-1. Returns the elements of the largest group, too."""
    filled = [0] * interval
    places = []
    for param in params:
        if param.numel() > SEGMENT_LEN:
            raise ValueError(
                f"a parameter has `{param.numel()}` elements, expected at most {SEGMENT_LEN}: one "
                "segment"
            )
        group = filled.index(min(filled))
        places.append(_Place(group, filled[group] // param.element_size(), param.shape))
        nbytes = param.numel() * param.element_size()
        filled[group] += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return places, max(filled) // params[0].element_size()


# The scalars of an update, in a tensor on the device: derived in double precision and rounded once,
# as `rust/adam/mod.rs` does.
_KEEP, _SIZE, _DENOM, _BETA1, _REST1, _BETA2, _REST2, _EPS, _AHEAD = range(9)


def _scalars(hyper: Hyper, lrs: Sequence[float], ahead: float) -> list[list[float]]:
    beta1, beta2 = hyper.betas
    rows = []
    for count, lr in enumerate(lrs, 1):
        size, denom = lr / (1 - beta1**count), 1 / math.sqrt(1 - beta2**count)
        keep = 1 - lr * hyper.weight_decay
        betas = [beta1, 1 - beta1, beta2, 1 - beta2]
        rows.append([keep, size, denom, *betas, hyper.eps, ahead * size])
    return rows


def _direction(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, denom_scale: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    return exp_avg / (exp_avg_sq.sqrt() * denom_scale + eps)


def _update(
    state: Sequence[torch.Tensor],
    grad: torch.Tensor,
    scale: torch.Tensor,
    scalars: torch.Tensor,
    taken: torch.Tensor | None,
    corrections: Sequence[torch.Tensor] | None,
) -> None:
    """One update of AdamW, in place, of the elements that are `taken`; None: of all.

    `corrections`: the step size and the scale of the denominator of each element; None: those of
    `scalars`.
    """
    master, exp_avg, exp_avg_sq = state
    size, denom_scale = (scalars[_SIZE], scalars[_DENOM]) if corrections is None else corrections
    g = grad.float() * scale
    m = scalars[_BETA1] * exp_avg + scalars[_REST1] * g
    v = scalars[_BETA2] * exp_avg_sq + scalars[_REST2] * g * g
    p = master * scalars[_KEEP] - size * _direction(m, v, denom_scale, scalars[_EPS])
    if taken is not None:
        p = torch.where(taken, p, master)
        m = torch.where(taken, m, exp_avg)
        v = torch.where(taken, v, exp_avg_sq)
    master.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def _predict(state: Sequence[torch.Tensor], scalars: torch.Tensor, weight: torch.Tensor) -> None:
    """Writes the weights moved on along the momentum."""
    master, exp_avg, exp_avg_sq = state
    direction = _direction(exp_avg, exp_avg_sq, scalars[_DENOM], scalars[_EPS])
    weight.copy_(master - scalars[_AHEAD] * direction)


_compiled: dict[str, Callable[..., None]] = {}


def _fused(function: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """The function as one kernel, on an accelerator."""
    if device.type == "cpu":
        return function
    if function.__name__ not in _compiled:
        _compiled[function.__name__] = torch.compile(function, dynamic=True)
    return _compiled[function.__name__]


class Simulation:
    """The optimizer of a model whose updates are deferred.

    In each step the caller copies its gradients to `grads` and calls `step()`. The parameters
    become views of memory that the simulation writes.

    Args:
        params: of one dtype and device, in forward order, at most `SEGMENT_LEN` elements each.
        lrs: the learning rate of every step that will be taken.
        hyper: what all steps have in common.
        delay: what is deferred; None: nothing, every step is exact.
        fuse: whether updates are one kernel on an accelerator.
    """

    @torch.no_grad()
    def __init__(
        self,
        params: Sequence[torch.Tensor],
        lrs: Sequence[float],
        hyper: Hyper,
        delay: Delay | None,
        *,
        fuse: bool = True,
    ) -> None:
        device, dtype = params[0].device, params[0].dtype
        self._hyper, self._delay = hyper, delay
        self._interval = delay.interval if delay is not None else 1
        self._places, numel = _places(params, self._interval)

        def flat(of: torch.dtype = torch.float32) -> list[torch.Tensor]:
            """For each group. Not parts of one tensor: compiled code is made anew for those."""
            return [torch.zeros(numel, dtype=of, device=device) for _ in range(self._interval)]

        self._weights, self._grads = flat(dtype), flat(dtype)
        masters = flat()
        self._state = list(zip(masters, flat(), flat(), strict=True))
        self.grads = [place.of(self._grads) for place in self._places]
        """Where the gradient of each parameter goes."""
        self.masters = [place.of(masters) for place in self._places]
        """The fp32 weight of each parameter, without the updates that are pending."""
        for place, param, master in zip(self._places, params, self.masters, strict=True):
            master.copy_(param)
            param.data = place.of(self._weights)
        self._write_weights()
        ahead = (self._interval + 1) / 2
        self._scalars = torch.tensor(_scalars(hyper, lrs, ahead), device=device)
        self._lrs = list(lrs)
        self._update = _fused(_update, device) if fuse else _update
        self._predict = _fused(_predict, device) if fuse else _predict
        self._steps = 0
        self._exact_steps = max(1, delay.warmup_steps) if delay is not None else len(lrs)
        # What the gradients of each step are clipped by.
        self._scales: list[torch.Tensor] = []
        # For each group the steps whose gradients it has not applied, and where those are.
        self._waiting: list[list[int]] = [[] for _ in range(self._interval)]
        self._ring = [flat(dtype) for _ in range(self._interval)] if delay is not None else []
        self._staged: tuple[int, torch.Tensor] | None = None
        self._selected = flat(torch.bool) if delay is not None and delay.fraction > 0 else None
        # The selection with which the group that is staged had its turn.
        self._kept: torch.Tensor | None = None
        # How many updates each element has had, where their number is not that of steps.
        self._counts = flat() if delay is not None and delay.average else None
        self._captured = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def share(self) -> float:
        """The share of the squared norm that the selected channels had when they were selected."""
        captured, whole = self._captured.tolist()
        return float(captured / whole) if whole else 0.0

    @torch.no_grad()
    def step(self) -> None:
        """One step, with the gradients that are in `grads`."""
        step = self._steps
        self._steps += 1
        norms = torch._foreach_norm(self._grads, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self._scales.append((self._hyper.clip_norm / (norm + _CLIP_EPS)).clamp(max=1.0))
        if self._delay is None or step < self._exact_steps:
            for group, grad in enumerate(self._grads):
                self._apply(group, grad, step, None)
            self._write_weights()
            return
        self._land()
        if self._selected is not None:
            for group, (grad, taken) in enumerate(zip(self._grads, self._selected, strict=True)):
                self._apply(group, grad, step, taken)
                weights, master = self._weights[group], self._state[group][0]
                weights.copy_(torch.where(taken, master, weights))
        torch._foreach_copy_(self._ring[self._slot(step)], self._grads)
        for waiting in self._waiting:
            waiting.append(step)
        self._turn(self._delay, step - self._exact_steps)

    @torch.no_grad()
    def drain(self) -> None:
        """Applies all that is pending. The weights have all updates, and none is predicted.

        No step may come after it.
        """
        for group in range(self._interval):
            self._apply_waiting(group)
        self._write_weights()

    def _write_weights(self) -> None:
        torch._foreach_copy_(self._weights, [master for master, *_ in self._state])

    def _turn(self, delay: Delay, turn: int) -> None:
        group = turn % self._interval
        self._apply_waiting(group)
        staged = torch.empty_like(self._weights[group])
        if delay.predict:
            self._predict(self._state[group], self._scalars_of(self._steps - 1), staged)
        else:
            staged.copy_(self._state[group][0])
        self._staged = (group, staged)
        if self._selected is not None:
            self._kept = self._selected[group].clone()
            if turn // self._interval % max(1, delay.reselect // self._interval) == 0:
                self._select(delay, group)

    def _land(self) -> None:
        if self._staged is None:
            return
        group, staged = self._staged
        if self._kept is not None:
            staged = torch.where(self._kept, self._weights[group], staged)
        self._weights[group].copy_(staged)
        self._staged = None

    def _slot(self, step: int) -> int:
        """Where the gradients of a deferred step wait."""
        return (step - self._exact_steps) % self._interval

    def _scalars_of(self, step: int) -> torch.Tensor:
        return self._scalars[step].clone()

    def _apply_waiting(self, group: int) -> None:
        """Applies the gradients that a group has, but to its selected channels."""
        waiting, self._waiting[group] = self._waiting[group], []
        if not waiting:
            return
        assert self._delay is not None
        taken = None if self._selected is None else ~self._selected[group]
        grads = [self._ring[self._slot(step)][group] for step in waiting]
        if not self._delay.average:
            for step, grad in zip(waiting, grads, strict=True):
                self._apply(group, grad, step, taken)
            return
        mean = torch.zeros_like(self._state[group][0])
        for step, grad in zip(waiting, grads, strict=True):
            mean += grad.float() * (self._scales[step] / len(grads))
        self._apply(group, mean, waiting[-1], taken, is_scaled=True)

    def _apply(
        self,
        group: int,
        grad: torch.Tensor,
        step: int,
        taken: torch.Tensor | None,
        *,
        is_scaled: bool = False,
    ) -> None:
        """One update of a group, with a gradient of this step."""
        scale = torch.ones_like(self._scales[step]) if is_scaled else self._scales[step]
        corrections = None
        if self._counts is not None:
            counts = self._counts[group]
            counts += 1 if taken is None else taken
            # What was never stepped is not taken now. It divides by no zero for all that.
            counts = counts.clamp(min=1)
            beta1, beta2 = self._hyper.betas
            corrections = [self._lrs[step] / (1 - beta1**counts), (1 - beta2**counts).rsqrt()]
        self._update(self._state[group], grad, scale, self._scalars_of(step), taken, corrections)

    def _select(self, delay: Delay, group: int) -> None:
        """Selects the channels of a group's matrices that have most squared norm."""
        assert self._selected is not None
        across = 1 if delay.channels == "rows" else 0
        for place, grad in zip(self._places, self.grads, strict=True):
            if place.group != group or len(place.shape) != 2:
                continue
            scores = torch.linalg.vector_norm(grad, dim=across, dtype=torch.float32).square()
            count = max(1, int(delay.fraction * len(scores)))
            best = scores.topk(count)
            is_best = torch.zeros_like(scores, dtype=torch.bool)
            is_best[best.indices] = True
            place.of(self._selected).copy_(is_best.unsqueeze(across).expand(place.shape))
            self._captured += torch.stack([best.values.sum(), scores.sum()])
