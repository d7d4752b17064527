"""What ZeRO's base optimizer steps, as the core takes it.

DeepSpeedCPUAdam's form of state, torch's, and Stepwell's. Which optimizers that are.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepwell import _state, optim
from stepwell._hyper import Hyper, hyper_of
from stepwell.access.descriptive import without_waiting
from stepwell.deepspeed.native import adam
from stepwell.store.norm import CLIP_EPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stepwell.deepspeed.zero.swapped import SwappedPartitions

__all__ = ["Operand", "Operands", "global_norm", "gradient_scale", "is_torchs", "obstacle_of"]

_LOGGER = logging.getLogger(__name__)

_TORCHS = (torch.optim.Adam, torch.optim.AdamW)
# Options of torch's that change what is computed, or for which state is on the device.
_NOT_DONE = ("amsgrad", "capturable", "differentiable")


def is_torchs(optimizer: object) -> bool:
    """Whether an optimizer is torch's own Adam or AdamW. A subclass may step in another way."""
    return type(optimizer) in _TORCHS


def _options_not_done(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for name in _NOT_DONE if any(group.get(name) for group in optimizer.param_groups)]


def obstacle_of(optimizer: torch.optim.Optimizer, known: Sequence[type]) -> str | None:
    """Why the steps of an optimizer cannot be the engine's; None if they can.

    Args:
        optimizer: ZeRO's base optimizer.
        known: the types that the engine steps, beside torch's own Adam and AdamW.
    """
    kind, stepped = type(optimizer), (*_TORCHS, *known)
    if kind not in stepped:
        base = next((each for each in kind.__mro__ if each in stepped), None)
        more = "" if base is None else f", a subclass of {base.__name__} that may step differently"
        return f"the optimizer is `{kind.__name__}`{more}"
    if is_torchs(optimizer) and (names := _options_not_done(optimizer)):
        return f"the optimizer is torch's `{kind.__name__}` with {', '.join(names)}"
    # Of schedulers, which only count the calls.
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"`step` of the optimizer `{kind.__name__}` was replaced"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"the optimizer `{kind.__name__}` has step hooks"
    return None


def _scalar(norm: float) -> torch.Tensor:
    """A norm in float32, as DeepSpeed has it; in float64 where float32 cannot hold it."""
    fits = not math.isfinite(norm) or norm <= torch.finfo(torch.float32).max
    return torch.tensor(norm, dtype=torch.float32 if fits else torch.float64, device="cpu")


def global_norm(norm: float, loss_scale: float) -> torch.Tensor:
    """The norm of the gradients, for `get_global_grad_norm`.

    Args:
        norm: of the gradients, times the loss scale.
        loss_scale: that the gradients were made with.
    """
    return _scalar(norm / loss_scale)


def gradient_scale(norm: float, loss_scale: float, clip_grad: float) -> float:
    """The factor of the gradients: the inverse of the loss scale, times the clip coefficient.

    In float32, as DeepSpeed's.

    Args:
        norm: of the gradients, times the loss scale.
        loss_scale: that the gradients were made with.
        clip_grad: the norm that is clipped to; 0: none.
    """
    if clip_grad == 0.0:
        return 1.0 / loss_scale
    clip = ((_scalar(norm) / loss_scale) + CLIP_EPS) / clip_grad
    return float(1.0 / (torch.clamp(clip, min=1.0) * loss_scale))


class Operand(NamedTuple):
    """A flat partition in a step."""

    master: torch.Tensor
    hyper: Hyper
    state: dict[str, Any]
    """What `optimizer.state` is to have of it. Its `step` counts the updates before this one."""
    runs: dict[str, torch.Tensor]
    """What the step works with of its state, by the core's names."""
    key: int = 0
    """Of its stochastic rounding."""

    @property
    def memory(self) -> list[object]:
        """What keeps all of it alive."""
        return [self.master, self.state, self.runs]


class Operands:
    """The operands of an optimizer that steps flat partitions.

    Args:
        optimizer: a DeepSpeedCPUAdam, torch's Adam or AdamW, or one of Stepwell's.
        rank: of this process: it decorrelates stochastic rounding.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self._optimizer = optimizer
        self._rank = rank
        self._has_warned = False
        self.swapped: SwappedPartitions | None = None
        """Has the state of partitions that is on a volume; None: all is in host memory."""

    def written(self, group: int, operand: Operand) -> list[torch.Tensor]:
        """The master and the state that a step of a partition writes in host memory.

        None where they are on a volume: there they wait by themselves.
        """
        if self.swapped is not None and group in self.swapped.leases:
            return []
        return [operand.master, *operand.runs.values()]

    def moments_bytes(self, master: torch.Tensor) -> int:
        """Bytes of the state that a partition will have, beside the master."""
        optimizer = self._optimizer
        if isinstance(optimizer, optim.Adam):
            return _state.nbytes(master, optimizer._moments)
        # torch's are of the master's dtype.
        is_fp32 = getattr(optimizer, "fp32_optimizer_states", not is_torchs(optimizer))
        return 2 * master.numel() * (4 if is_fp32 else master.element_size())

    def new_state(
        self, master: torch.Tensor, memory: _state.Allocate = _state.zeros
    ) -> dict[str, Any]:
        """State of a partition that was never stepped.

        Args:
            master: the partition, or a tensor like it, detached.
            memory: gives memory for it.
        """
        optimizer = self._optimizer
        if isinstance(optimizer, optim.Adam):
            parts = _state.placed(master, optimizer._moments, memory)
            return {"step": _state.step_tensor(0), **parts}
        is_fp32 = getattr(optimizer, "fp32_optimizer_states", False)
        dtype = torch.float32 if is_fp32 else master.dtype
        moments = {name: memory(master.numel(), dtype) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": _state.step_tensor(0) if is_torchs(optimizer) else 0, **moments}

    def forget_unused_volume(self) -> None:
        """Called when the partitions are made, for which no volume may have been."""
        if self.swapped is not None and self.swapped.volume.core is None:
            self.swapped = None

    def resume(self, counts: Mapping[int, int], masters: Sequence[torch.Tensor]) -> None:
        """The optimizer has the state of a volume that was resumed.

        Args:
            counts: of its partitions, how many updates each has seen.
            masters: all partitions.
        """
        for group, count in counts.items():
            assert self.swapped is not None
            state = self.swapped.leases[group].state()
            is_tensor = isinstance(state["step"], torch.Tensor)
            state["step"] = _state.step_tensor(count) if is_tensor else count
            self._optimizer.state[masters[group]] = state

    def skips_nonfinite(self) -> bool:
        """Whether a step with a non-finite gradient, for which DeepSpeed does not look, is skipped.

        If not, it is taken.

        Raises:
            ValueError: it is neither.
        """
        optimizer = self._optimizer
        policy = (
            optimizer._nonfinite if isinstance(optimizer, optim.Adam) else adam.nonfinite(optimizer)
        )
        if policy == "raise":
            raise ValueError(
                "a gradient is not finite; nothing was changed. hint: let DeepSpeed skip such "
                "steps "
                "(bf16.check_grad_overflow), lower lr, or register(nonfinite='propagate')"
            )
        return policy != "propagate"

    def of(self, index: int, ordinal: int, master: torch.Tensor) -> Operand:
        """A partition in the coming step.

        Args:
            index: of the parameter group whose options it has.
            ordinal: of the partition.
            master: the partition.

        Raises:
            ValueError: it cannot be stepped.
        """
        group = self._optimizer.param_groups[index]
        known = self._optimizer.state.get(master) or None
        lease = None if self.swapped is None else self.swapped.leases.get(ordinal)
        if lease is None:
            return self._of(group, ordinal, master, known)
        known = lease.known(known)
        # State that is away stays there.
        with without_waiting():
            operand = self._of(group, ordinal, master, known)
            stepped = lease.stepped(operand.state)
            if stepped is not operand.state and isinstance(stepped["step"], torch.Tensor):
                # What is in memory is a snapshot from then on.
                stepped["step"] = stepped["step"].clone()
            return operand._replace(state=stepped, runs=lease.runs(operand.runs))

    def _of(
        self,
        group: dict[str, Any],
        ordinal: int,
        master: torch.Tensor,
        known: dict[str, Any] | None,
    ) -> Operand:
        flat, label = master.detach(), f"partition {ordinal}"
        optimizer = self._optimizer
        if isinstance(optimizer, optim.Adam):
            moments = optimizer._moments
            state = (
                self.new_state(flat)
                if known is None
                else _state.refreshed(flat, known, moments, label)
            )
            _count_in(state, label)
            runs = {name: state[name] for name in _state.part_names(flat, moments)}
            key = _state.key_of(group["seed"], ordinal + (self._rank << 32), flat)
            return Operand(master, hyper_of(group, f"the group of {label}"), state, runs, key)
        state = self.new_state(flat) if known is None else known
        _count_in(state, label)
        runs = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        adam.check(adam.NativeTensors(flat, flat, *runs.values()))
        if not is_torchs(optimizer):
            return Operand(master, self._deepspeeds_hyper(group), state, runs)
        if names := [name for name in _NOT_DONE if group.get(name)]:
            # Set since the engine was made, or loaded.
            raise ValueError(
                f"`{names[0]}` is set for the group of {label}, which the offload engine does not "
                'do. hint: "stepwell": {"engine": false} in the DeepSpeed JSON'
            )
        # Bias correction is no choice there.
        hyper = hyper_of({**group, "bias_correction": True}, f"the group of {label}")
        return Operand(master, hyper, state, runs)

    def _deepspeeds_hyper(self, group: dict[str, Any]) -> Hyper:
        optimizer: Any = self._optimizer
        beta1, beta2 = group["betas"]
        return Hyper(
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(optimizer.adam_w_mode),
            # Groups that torch's optimizer has saved lack it: it always corrects.
            bias_correction=bool(group.get("bias_correction", True)),
            maximize=False,
        )

    def begun(self, operands: Iterable[Operand]) -> list[Callable[[], object]]:
        """What is called when their step begins, for `optimizer.state` to have what it works with.

        Functions of C.
        """
        # One call, of hashes that are known: a tensor's is a function in Python.
        states = {operand.master: operand.state for operand in operands}
        return [partial(self._optimizer.state.update, states)]

    def note_step(self) -> None:
        """A step has begun."""
        # Schedulers of torch's look at it, to warn of a step of theirs before the first of these.
        optimizer: Any = self._optimizer
        optimizer._opt_called = True
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if hooks and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "step hooks of the optimizer `%s` are not called: they were registered after "
                "deepspeed.initialize, and the offload engine takes the step. hint: register them "
                "before, then DeepSpeed's own path calls them",
                type(optimizer).__name__,
            )


def _count_in(state: dict[str, Any], label: str) -> None:
    """Gives the count of updates a form that steps can add to: torch's, or a number."""
    if isinstance(state.get("step"), Number):
        # Also one of numpy.
        state["step"] = int(state["step"])
    count = _state.step_of(state, lambda: label)
    if isinstance(state["step"], torch.Tensor):
        _state.repair_step(state, count)
