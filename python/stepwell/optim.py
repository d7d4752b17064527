"""Adam and AdamW as torch optimizers for parameters in host memory."""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch.optim import Optimizer

from stepwell import _core, _state
from stepwell._hyper import Hyper, hyper_of
from stepwell._operand import Operand
from stepwell._sharding import agree, is_dtensor, local, meshes
from stepwell._tensors import Written, check_param

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import ParamsT, StateDict

__all__ = ["Adam", "AdamW"]

Moments: TypeAlias = Literal["fp32", "bf16", "q8"]
Nonfinite: TypeAlias = Literal["raise", "skip", "propagate"]

_LOGGER = logging.getLogger(__name__)

_NONFINITE = ("raise", "skip", "propagate")
# How a step is executed elsewhere, not what it computes: of a loaded group these are left behind.
_EXECUTION_KEYS = ("foreach", "fused", "capturable", "differentiable")
_FLOAT32_MAX = torch.finfo(torch.float32).max


class Update(NamedTuple):
    """One parameter of a step."""

    param: torch.Tensor
    operand: Operand
    hyper: Hyper
    state: _state.State | None
    """None: it has none yet."""
    step: int
    """Which update of the parameter this is, from 1."""
    key: Callable[[], int]
    """Of the stochastic rounding."""


def _nonfinite_message(
    updates: list[Update], stats: _core.GradStats | None, grad_scale: float
) -> str:
    """What a step with a non-finite gradient raises."""
    index = None if stats is None else stats.first_nonfinite
    if index is not None:
        what = f"the gradient of {[u.operand.label for u in updates if u.operand.grad_view.numel][index]} is not finite"
    elif stats is not None and stats.finite and stats.absmax * grad_scale > _FLOAT32_MAX:
        what = f"a gradient of `{stats.absmax}` overflows float32 times `{grad_scale}` (1 / grad_scale)"
    else:
        what = "a gradient on another rank is not finite"
    return f"{what}; nothing was changed. hint: lower lr or clip; nonfinite='skip' leaves such steps out"


class Adam(Optimizer):
    """Adam over parameters in host memory: torch.optim.Adam's algorithm and interface, stepped by the Rust core.

    Each step is one pass over the memory of each parameter, its gradient and its state, on all
    cores. Beside a float32 parameter only its moments are kept. A bfloat16 parameter has an exact
    float32 master, of which it is the upper half and 16 trailing bits are state; a float16
    parameter has a float32 master. Whoever writes to a parameter between two steps
    (`load_state_dict`, `copy_`, `.data`) sets its master to what was written. Models may mix these
    dtypes; a gradient is float32, bfloat16 or float16, whatever its parameter is. DTensor
    parameters (FSDP2 with `CPUOffloadPolicy`) have DTensor state, and a step works on the local
    shards.

    A step is applied to all parameters or, if it raises, to none. A step at lr 0 with all gradients
    0 that would be the first only makes the state and is not counted: so
    torch.distributed.checkpoint makes room for what it loads.

    Every keyword up to `maximize`, `seed` excepted, may be set per parameter group.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        lr: learning rate; a number or a tensor of one element.
        betas: decay of the moments per step.
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, times the parameter (see `decoupled_weight_decay`).
        decoupled_weight_decay: whether `lr * weight_decay * parameter` is taken off the parameter
            instead, as AdamW does.
        maximize: whether to go up the gradient.
        moments: how `exp_avg` and `exp_avg_sq` are held: "fp32" (8 bytes per parameter), "bf16" (4,
            rounded stochastically) or "q8" (2.1, 8-bit codes with a scale per group, rounded
            stochastically).
        nonfinite: what a NaN or an infinity in any gradient does: "raise" a ValueError, "skip" the
            step and count it in `skipped_steps`, or "propagate" as in torch, which saves reading
            the gradients once more. With DTensor parameters every rank does as the rank that found
            it.
        seed: of the stochastic rounding. Equal seeds give equal bits.
        foreach: accepted for torch's sake, without effect: there is one implementation.
        fused: likewise.
        amsgrad: not supported.
        capturable: not supported.
        differentiable: not supported.

    Raises:
        ValueError: an option or a parameter that no step could work with; what to do instead is in
            the message.
    """

    # torch.amp.GradScaler leaves unscaling to us, and sets the attributes `grad_scale` and
    # `found_inf`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        moments: Moments = "fp32",
        nonfinite: Nonfinite = "raise",
        seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        amsgrad: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        if moments not in _state.MOMENTS:
            raise ValueError(
                f"`moments` is `{moments}`, expected one of {', '.join(_state.MOMENTS)}"
            )
        if nonfinite not in _NONFINITE:
            raise ValueError(
                f"`nonfinite` is `{nonfinite}`, expected one of {', '.join(_NONFINITE)}"
            )
        self._moments: Moments = moments
        self._nonfinite: Nonfinite = nonfinite
        self._operands: dict[torch.Tensor, Operand] = {}
        self._written: Written | None = None
        self._meshes: list[DeviceMesh] | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            # Keys beyond torch's. DeepSpeedCPUAdam needs the first; the others make a resumed run
            # the same run.
            "bias_correction": True,
            "seed": seed,
            "skipped_steps": 0,
            "state_format": _core.STATE_FORMAT,
        }
        hyper_of(defaults, "the optimizer")
        super().__init__(params, defaults)

    # ---- parameters and their groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch's optimizers do.

        Raises:
            ValueError: an option or a parameter of the group that no step could work with; the
                group is not added.
        """
        for key in ("moments", "nonfinite"):
            if key in param_group:
                raise ValueError(
                    f"`{key}` is set for a parameter group, expected for the optimizer as a whole"
                )
        super().add_param_group(param_group)
        try:
            index = len(self.param_groups) - 1
            hyper_of(param_group, f"group {index}")
            with torch.no_grad():
                self._admit(param_group["params"])
                self._written = Written(self._memory())
            self._meshes = None
        except ValueError:
            self.param_groups.pop()
            raise

    def _admit(self, params: list[torch.Tensor]) -> None:
        """Raises ValueError if one of `params`, which have just been added, could not be stepped."""
        labels = dict(self._labelled())
        for param in params:
            if param.requires_grad:
                check_param(param, labels[param])

    def _labelled(self) -> Iterable[tuple[torch.Tensor, str]]:
        """Every parameter, with what errors call it."""
        for group_index, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                name = f"parameter `{names[index]}`" if names else "the parameter"
                shape = "unknown" if torch.nn.parameter.is_lazy(param) else tuple(param.shape)
                yield param, f"{name} (group {group_index}, index {index}, shape {shape})"

    def _memory(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All that a step may write, with its name."""
        for param, label in self._labelled():
            piece = local(self._host_side(param))
            if param.requires_grad and piece.is_cpu and piece.layout == torch.strided:
                yield label, piece
            for name, value in self.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"`{name}` of {label}", local(value)

    @property
    def skipped_steps(self) -> int:
        """Steps that a non-finite gradient kept from being applied, under nonfinite="skip" or a GradScaler."""
        return max(int(group["skipped_steps"]) for group in self.param_groups)

    # ---- the step ----

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates the parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss that `closure` returned, or None.

        Raises:
            ValueError: a gradient is not finite (unless `nonfinite` says otherwise), or a
                parameter, gradient, option or state cannot be worked with. No parameter and no
                state was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        finally:
            for operand in self._operands.values():
                operand.release()
        return loss

    def _step(self) -> None:
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            self._count_skipped()
            return
        may_initialize = all(group["lr"] == 0 for group in self.param_groups) and not any(
            self.state.values()
        )
        must_inspect = may_initialize or self._nonfinite != "propagate"
        updates: list[Update] = []
        grad_scale = 1.0
        stats: _core.GradStats | None = None
        error: ValueError | None = None
        try:
            grad_scale = self._inverse_grad_scale()
            updates = self._updates()
            if must_inspect:
                stats = _core.grad_stats(
                    [u.operand.grad_view for u in updates if u.operand.grad_view.numel], norm=False
                )
        except ValueError as caught:
            error = caught
        is_nonfinite = stats is not None and not (
            stats.finite and stats.absmax * grad_scale <= _FLOAT32_MAX
        )
        is_nonzero = stats is not None and stats.absmax != 0
        is_refused = error is not None
        if must_inspect:
            # Ranks that share parameters step together or not at all, so each hears of the others'
            # errors.
            if self._meshes is None:
                self._meshes = meshes(
                    param for group in self.param_groups for param in group["params"]
                )
            is_refused, is_nonfinite, is_nonzero = agree(
                self._meshes, [is_refused, is_nonfinite, is_nonzero]
            )
        if error is not None:
            raise error
        if is_refused:
            raise ValueError(
                "another rank could not step, and nothing was changed. hint: its own error says why"
            )
        if is_nonfinite and self._nonfinite != "propagate":
            if self._nonfinite == "raise":
                raise ValueError(_nonfinite_message(updates, stats, grad_scale))
            self._count_skipped()
        elif may_initialize and not is_nonzero:
            # The dummy step by which torch.distributed.checkpoint has state made.
            for update in updates:
                self.state[update.param] = _state.new(update.operand.param, self._moments)
        else:
            self._apply(updates, grad_scale)

    def _inverse_grad_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return 1.0
        if not 0.0 < float(scale) < math.inf:
            raise ValueError(
                f"`grad_scale` is `{float(scale)}`, expected a positive number. hint: GradScaler sets it"
            )
        return 1.0 / float(scale)

    def _count_skipped(self) -> None:
        for group in self.param_groups:
            group["skipped_steps"] += 1
        _LOGGER.info("skipped a step: a gradient is not finite (%d so far)", self.skipped_steps)

    def _updates(self) -> list[Update]:
        """What the coming step does, checked in full.

        Raises:
            ValueError: it cannot be done.
        """
        updates = []
        labels = None
        hypers = [
            hyper_of(group, f"group {index}") for index, group in enumerate(self.param_groups)
        ]
        params = (
            (hyper, group, param)
            for hyper, group in zip(hypers, self.param_groups, strict=True)
            for param in group["params"]
        )
        for index, (hyper, group, param) in enumerate(params):
            if param.grad is None:
                continue
            operand = self._operands.get(param)
            if operand is None:
                labels = labels or dict(self._labelled())
                operand = self._operands[param] = Operand(self._host_side(param), labels[param])
            operand.take(self._host_grad(param))
            state = self.state.get(param) or None
            step = 1
            if state is not None:
                step = 1 + _state.step_of(state, operand.label)
                state = operand.check(state, self._moments)
            key = partial(_state.key_of, group["seed"], index, param)
            updates.append(Update(param, operand, hyper, state, step, key))
        if self._written is None or any(update.operand.moved for update in updates):
            self._written = Written(self._memory())
            for update in updates:
                update.operand.moved = False
        for update in updates:
            update.operand.check_grad(self._written)
        return updates

    def _host_side(self, param: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory that stands for `param` in a step: `param` itself."""
        return param

    def _host_grad(self, param: torch.Tensor) -> torch.Tensor:
        """The gradient of `param` in host memory; it has one."""
        assert param.grad is not None
        return param.grad

    def _apply(self, updates: list[Update], grad_scale: float) -> None:
        """Applies updates that were checked: nothing is changed before nothing can fail any more."""
        states = self._bind(updates)
        batches: dict[Hyper, tuple[list[_core.AdamTensor], list[int]]] = {}
        calls: list[partial[Any]] = []
        for update in updates:
            if update.operand.tensor is not None:
                tensors, steps = batches.setdefault(update.hyper, ([], []))
                tensors.append(update.operand.tensor)
                steps.append(update.step)
                calls += update.operand.write_backs
        stepping: list[partial[Any]] = [
            partial(_core.adam_step, tensors, steps=steps, hyper=hyper.core(grad_scale))
            for hyper, (tensors, steps) in batches.items()
        ]
        self._commit(updates, states, [*stepping, *calls])

    def _bind(self, updates: list[Update]) -> list[_state.State]:
        """Binds the operands of the updates to their states, which are returned; those that have none get one."""
        states = []
        for _, operand, _, known_state, step, key in updates:
            state = _state.new(operand.param, self._moments) if known_state is None else known_state
            if not isinstance(state["step"], torch.Tensor):
                state["step"] = torch.tensor(float(step - 1))
            operand.bind(state, self._moments, key)
            states.append(state)
        return states

    def _commit(
        self, updates: list[Update], states: list[_state.State], calls: list[partial[Any]]
    ) -> None:
        """Makes the calls that step, counts the updates, and tells autograd."""
        if states:
            calls.append(partial(torch._foreach_add_, [state["step"] for state in states], 1))
        for update, state in zip(updates, states, strict=True):
            if self.state.get(update.param) is not state:
                self.state[update.param] = state
            torch.autograd.graph.increment_version(update.param)
            if is_dtensor(update.param):
                torch.autograd.graph.increment_version(local(update.param))
        # Not a loop: Python runs signal handlers between bytecodes, and Ctrl-C must not come
        # between two of these calls.
        deque(map(partial.__call__, calls), maxlen=0)

    # ---- state dicts ----

    def state_dict(self) -> StateDict:
        """The state dict, as torch's optimizers have it; its tensors are those of the optimizer.

        With moments="fp32", torch.optim.AdamW and DeepSpeedCPUAdam load it; see
        `decoded_state_dict` for the others.
        """
        result = super().state_dict()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        with torch.no_grad():
            for index, state in result["state"].items():
                if isinstance(index, int) and index < len(params):
                    result["state"][index] = _state.packed(self._host_side(params[index]), state)
        for group in result["param_groups"]:
            # DeepSpeed copies all keys of a universal checkpoint's groups into living ones.
            group["state_format"] = _core.STATE_FORMAT
        return result

    def decoded_state_dict(self) -> StateDict:
        """The state dict with plain Adam moments, whatever `moments` is, for other optimizers and for tools.

        Per parameter: `step` (an int), `exp_avg` and `exp_avg_sq` (float32, shape of the
        parameter). float32 moments are those of the optimizer, as in `state_dict`; others are
        decoded copies. torch.optim.AdamW and DeepSpeedCPUAdam load it, and every version of this
        class. Masters of 16-bit parameters are left out, since those optimizers keep none.
        """
        packed = self.state_dict()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        decoded = {}
        with torch.no_grad():
            for index, state in packed["state"].items():
                if isinstance(index, int) and state:
                    step = _state.step_of(state, f"parameter {index}")
                    decoded[index] = {
                        "step": step,
                        **_state.decode(self._host_side(params[index]), state),
                    }
        groups = [
            {key: value for key, value in group.items() if key != "state_format"}
            for group in packed["param_groups"]
        ]
        return {**packed, "state": decoded, "param_groups": groups}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class, of torch.optim.Adam(W) or of DeepSpeedCPUAdam.

        Moments are converted to this optimizer's codec; what is held in the same form is copied bit
        for bit, so that a resumed run is the run that was interrupted. `foreach`, `fused`,
        `capturable` and `differentiable` stay as they are. The dict's tensors are copied, except
        those that are this optimizer's own.

        Args:
            state_dict: an optimizer state dict over the same parameters.

        Raises:
            ValueError: it does not fit; nothing was changed.
        """
        shield = self.register_load_state_dict_pre_hook(_state.shield)
        try:
            super().load_state_dict(state_dict)
        finally:
            shield.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_moments": self._moments, "_nonfinite": self._nonfinite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch calls this on an empty object to unpickle it, and on a living one at the end of
        # `load_state_dict`.
        if self.__dict__:
            self._complete(state["param_groups"])
            state = {**state, "state": self._convert(state["state"], state["param_groups"])}
        super().__setstate__(state)
        self._operands = {}
        self._written = None
        self._meshes = None

    def _complete(self, groups: list[dict[str, Any]]) -> None:
        """Gives loaded groups what another optimizer's do not say, and checks them."""
        for index, (group, live) in enumerate(zip(groups, self.param_groups, strict=True)):
            if group.get("state_format", _core.STATE_FORMAT) != _core.STATE_FORMAT:
                raise ValueError(
                    f"`state_format` of the loaded state dict is `{group['state_format']}`, expected `{_core.STATE_FORMAT}`: another "
                    "version of stepwell saved it. hint: load it with that version, and save `decoded_state_dict()`"
                )
            group.update(
                {key: live[key] for key in _EXECUTION_KEYS}, state_format=_core.STATE_FORMAT
            )
            for key, value in live.items():
                group.setdefault(key, value)
            hyper_of(group, f"loaded group {index}")

    @torch.no_grad()
    def _convert(self, loaded: dict[Any, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
        """Loaded state in this optimizer's form."""
        labels = dict(self._labelled())
        params = ((param, group["seed"]) for group in groups for param in group["params"])
        converted = defaultdict(
            dict,
            {key: _state.unshielded(value) for key, value in loaded.items() if key not in labels},
        )
        for index, (param, seed) in enumerate(params):
            source = _state.unshielded(loaded.get(param, {}))
            if source:
                host_side = self._host_side(param)
                check_param(host_side, labels[param])
                converted[param] = _state.convert(
                    host_side,
                    source,
                    self._moments,
                    key=_state.key_of(seed, index, param),
                    current=self.state.get(param, {}),
                    label=labels[param],
                )
        return converted


class AdamW(Adam):
    """AdamW over parameters in host memory: `Adam` with decoupled weight decay, 0.01 unless given."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        moments: Moments = "fp32",
        nonfinite: Nonfinite = "raise",
        seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        amsgrad: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            decoupled_weight_decay=True,
            maximize=maximize,
            moments=moments,
            nonfinite=nonfinite,
            seed=seed,
            foreach=foreach,
            fused=fused,
            amsgrad=amsgrad,
            capturable=capturable,
            differentiable=differentiable,
        )

    def _complete(self, groups: list[dict[str, Any]]) -> None:
        super()._complete(groups)
        for group in groups:
            group["decoupled_weight_decay"] = True
