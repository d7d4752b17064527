"""Adam and AdamW as torch optimizers for parameters in host memory."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch._compile import _disable_dynamo

from stepwell import _core, _state
from stepwell._binding import Rounding
from stepwell._checks import choice
from stepwell._decision import NONFINITE, Facts, Nonfinite, Outcome, decide
from stepwell._hyper import Hyper, hyper_of
from stepwell._notices import Notices
from stepwell._option_names import check_group_keys, named_options
from stepwell._sharding import greatest, local, meshes, parted
from stepwell._spans import Spans
from stepwell._state_dict import StateDicts
from stepwell._tensors import Written, check_param, ordinary_tensors

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import ParamsT

__all__ = ["Adam", "AdamW"]

Moments: TypeAlias = Literal["fp32", "bf16", "q8"]

_LOGGER = logging.getLogger(__name__)

# A GradScaler's first scale of 65,536 is 1e-10 after as many: it looks for no other any more.
_SKIPPED_IN_A_ROW_MAX = 50

_FLOAT32_MAX = torch.finfo(torch.float32).max


@named_options("`Adam`")
class Adam(StateDicts):
    """Adam over parameters in host memory, stepped by the Rust core.

    The algorithm and the interface are those of torch.optim.Adam.

    Each step is one pass over the memory of each parameter, its gradient and its state, on all
    cores. Beside a float32 parameter only its moments are kept. A bfloat16 parameter has an exact
    float32 master, of which it is the upper half and 16 trailing bits are state; a float16
    parameter has a float32 master. A write to a parameter between two steps (`load_state_dict`,
    `copy_`, `.data`) sets its master to what was written. Models may mix these dtypes; a gradient
    is float32, bfloat16 or float16, whatever its parameter is. DTensor parameters (FSDP2 with
    `CPUOffloadPolicy`) have DTensor state, and a step works on the local shards.

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
            step, count it in `skipped_steps` and warn in the log of `stepwell` (the 50th in a row
            raises), or "propagate" as in torch, which saves reading the gradients once more. With
            DTensor parameters every rank does as the rank that found it.
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

    _hypers: list[Hyper]
    _notices: Notices
    _meshes: list[DeviceMesh] | None
    _num_skipped_in_a_row = 0
    _num_skipped_here = 0  # by this object: a loaded `skipped_steps` counts others' as well

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
        choice(moments, "`moments`", _state.MOMENTS)
        choice(nonfinite, "`nonfinite`", NONFINITE)
        self._moments: Moments = moments
        self._nonfinite: Nonfinite = nonfinite
        self._look_anew()
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
        self._notices = Notices(self)
        super().__init__(params, defaults)
        self._notices.note_made(param for group in self.param_groups for param in group["params"])

    # ---- parameters and their groups ----

    @ordinary_tensors
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch's optimizers do.

        Raises:
            ValueError: an option or a parameter of the group that no step could work with; the
                group is not added.
        """
        if isinstance(param_group, dict):
            check_group_keys(param_group, {"params", "param_names", *self.defaults}, self)
        super().add_param_group(param_group)
        try:
            hyper_of(param_group, f"group {len(self.param_groups) - 1}")
            self._admit(param_group["params"])
            # Raises where two of them share memory.
            Written(self._memory())
        except BaseException:
            self.param_groups.pop()
            raise
        self._notices.note_params(param_group["params"])
        self._meshes = None

    def _admit(self, params: list[torch.Tensor]) -> None:
        """Makes ready for steps of `params`, which have just been added.

        If it raises, it has changed nothing.

        Raises:
            ValueError: one of them could not be stepped.
        """
        labels = dict(self._labelled())
        for param in params:
            if param.requires_grad:
                check_param(param, labels[param])

    @property
    def _states(self) -> defaultdict[torch.Tensor, _state.State]:
        """`state`, for what only asks where its tensors are."""
        return self.state

    def _labelled(self) -> Iterable[tuple[torch.Tensor, str]]:
        """Every parameter, with what errors call it."""
        for group_index, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                name = f"parameter `{names[index]}`" if names else "the parameter"
                shape = "unknown" if torch.nn.parameter.is_lazy(param) else tuple(param.shape)
                yield param, f"{name} (group {group_index}, index {index}, shape {shape})"

    def _label(self, param: torch.Tensor) -> str:
        return dict(self._labelled())[param]

    @property
    def _store(self) -> _core.Store:
        """The parameters with their states, as they are stepped."""
        return self._spans_in_memory.store

    def _look_anew(self) -> None:
        """Has the next step look at every parameter, and at all state, as if it were the first."""
        self._spans_in_memory = Spans(self._moments)
        # Of one that was unpickled as well.
        self.__dict__.setdefault("_notices", Notices(self))
        # What steps have made and no step has put into `state` yet.
        self._new_states: dict[torch.Tensor, _state.State] = {}
        self._meshes = None

    def _memory(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All that a step may write, with its name."""
        for param, label in self._labelled():
            piece = local(self._host_side(param))
            if param.requires_grad and piece.is_cpu and piece.layout == torch.strided:
                yield label, piece
            for name, value in self._states.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"`{name}` of {label}", local(value)

    @property
    def skipped_steps(self) -> int:
        """Steps left out for a non-finite gradient, under nonfinite="skip" or a GradScaler."""
        return max(int(group["skipped_steps"]) for group in self.param_groups)

    # ---- the step ----

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # A compiled function that steps calls this as it is.
    @_disable_dynamo
    @ordinary_tensors
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
            # It holds gradients, which the program may free.
            self._store.discard()
        return loss

    def _step(self) -> None:
        if self._scaler_found_inf():
            self._is_taken(Facts(found_inf=True), None, "", has_updates=False)
            return
        is_first_at_lr_0 = self._is_first_at_lr_0()
        must_inspect = is_first_at_lr_0 or self._nonfinite != "propagate"
        params: list[torch.Tensor] = []
        grad_scale = 1.0
        stats: _core.GradStats | None = None
        error: ValueError | None = None
        try:
            grad_scale = self._inverse_grad_scale()
            params = self._look().params
            if must_inspect:
                stats = self._store.stats()
        except ValueError as caught:
            error = caught
        is_nonfinite = stats is not None and not (
            stats.finite and stats.absmax * grad_scale <= _FLOAT32_MAX
        )
        is_nonzero = stats is not None and stats.absmax != 0
        has_error = error is not None
        if must_inspect:
            # Ranks that share parameters step together or not at all, so each hears of the others'
            # errors.
            has_error, is_nonfinite, is_nonzero = self._agree(has_error, is_nonfinite, is_nonzero)
        facts = Facts(
            has_error=has_error,
            is_nonfinite=is_nonfinite,
            is_nonzero=is_nonzero,
            is_first_at_lr_0=is_first_at_lr_0,
        )
        what = self._describe_nonfinite(params, stats, grad_scale) if is_nonfinite else ""
        try:
            is_taken = self._is_taken(facts, error, what, has_updates=bool(params))
        finally:
            del error
        if is_taken:
            self._store.has_left = True
            self._apply(grad_scale)

    def _apply(self, grad_scale: float) -> None:
        """Steps what was looked at last.

        All that can fail comes before the first change.
        """
        # State with no update counted is as none.
        self._put_new_states()
        self._store.step([hyper.core(grad_scale) for hyper in self._hypers])

    def _put_new_states(self) -> None:
        """What the last look has made is the parameters' state from now on."""
        self.__dict__["state"].update(self._new_states)
        self._new_states = {}

    def _rounding(self, ordinal: int, group: dict[str, Any], param: torch.Tensor) -> Rounding:
        """What the stochastic rounding of a parameter follows from.

        A state dict has all of it, so a resumed run rounds alike.
        """
        return Rounding(group["seed"], ordinal)

    def _look(self) -> _core.Look:
        """The gradients of the coming step, all that it works with checked in full.

        Raises:
            ValueError: the step cannot be done.
        """
        groups = self.param_groups
        self._hypers = [hyper_of(group, f"group {at}") for at, group in enumerate(groups)]
        self._new_states = {}
        states = self.__dict__["state"]
        return self._spans_in_memory.look(
            groups, states, self._new_states, self._labelled, self._memory, self._rounding
        )

    def _agree(self, *flags: bool) -> list[bool]:
        """The flags that are set on any of the ranks that share parameters. All of them call it.

        Raises:
            OSError: on all ranks: some have taken the step before, and others have left it.
        """
        together, has_left = self._agreeing_meshes(), self._store.has_left
        # Of the ranks that have left it, the last, from 1.
        last = 1 + torch.distributed.get_rank() if together and has_left else 0
        *found, last_left, has_any_stayed = greatest(together, [*flags, last, not has_left])
        if last_left and has_any_stayed:
            raise parted(f"rank {last_left - 1:.0f} has")
        return [value > 0 for value in found]

    def _is_taken(
        self,
        facts: Facts,
        error: ValueError | None,
        nonfinite: str,
        *,
        has_updates: bool,
    ) -> bool:
        """Whether the updates are to be applied; if not, this has done what is to be done instead.

        Args:
            facts: what the decision follows from.
            error: what keeps this rank from stepping.
            nonfinite: what is not finite, if anything is.
            has_updates: whether there is anything to apply, here or on another rank.

        Raises:
            ValueError: the step is refused.
        """
        outcome = decide(facts, self._nonfinite)
        if outcome is Outcome.REFUSE:
            if error is not None:
                try:
                    raise error
                finally:
                    # Or it would refer to itself by this frame, and hold gradients.
                    del error
            if facts.has_error:
                raise ValueError(
                    "another rank could not step, and nothing was changed. "
                    "hint: its own error says why"
                )
            raise ValueError(
                f"{nonfinite}; nothing was changed. "
                f"hint: {self._cure}; nonfinite='skip' leaves such steps out"
            )
        if outcome is Outcome.SKIP:
            self._count_skipped(nonfinite)
        elif outcome is Outcome.MAKE_STATE:
            self._put_new_states()
        else:
            self._num_skipped_in_a_row = 0
            has_state = bool(self.__dict__["state"])
            self._notices.note_step(has_updates=has_updates, has_state=has_state)
        return outcome is Outcome.STEP and has_updates

    def _scaler_found_inf(self) -> bool:
        """Whether a GradScaler has found a gradient that is not finite."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and float(found_inf) > 0

    def _is_first_at_lr_0(self) -> bool:
        """Whether torch.distributed.checkpoint may have asked for this step, to have state made."""
        is_at_0 = all(_is_0(group.get("lr")) for group in self.param_groups)
        return is_at_0 and not any(self.__dict__["state"].values())

    def _agreeing_meshes(self) -> list[DeviceMesh]:
        if self._meshes is None:
            self._meshes = meshes(param for group in self.param_groups for param in group["params"])
        return self._meshes

    def _inverse_grad_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return 1.0
        if not 0.0 < float(scale) < math.inf:
            raise ValueError(
                f"`grad_scale` is `{float(scale)}`, expected a positive number. hint: GradScaler "
                "sets it"
            )
        return 1.0 / float(scale)

    def _describe_nonfinite(
        self, params: Sequence[torch.Tensor], stats: _core.GradStats | None, grad_scale: float
    ) -> str:
        """What is not finite."""
        if stats is not None and not stats.finite:
            grads = ((param, param.grad) for param in params if param.grad is not None)
            param = next(param for param, grad in grads if not local(grad).isfinite().all())
            return f"the gradient of {self._label(param)} is not finite"
        if stats is not None and stats.absmax * grad_scale > _FLOAT32_MAX:
            return (
                f"a gradient of `{stats.absmax}` overflows float32 times `{grad_scale}` "
                "(1 / grad_scale)"
            )
        return "a gradient on another rank is not finite"

    def _count_skipped(self, nonfinite: str) -> None:
        """Counts a step that was skipped, and warns.

        It warns of the first, and whenever their number has doubled.

        `nonfinite`: what is not finite; empty: a GradScaler said so, which looks for its scale.
        """
        for group in self.param_groups:
            group["skipped_steps"] += 1
        self._num_skipped_in_a_row += 1
        if self._num_skipped_in_a_row >= _SKIPPED_IN_A_ROW_MAX:
            raise ValueError(
                f"`{self._num_skipped_in_a_row}` steps in a row were skipped, and this one too"
                f"{': ' if nonfinite else ''}{nonfinite}{self._first_nonfinite()}. Nothing is "
                f"trained any more. hint: go on from a checkpoint, {self._cure}; nonfinite='raise' "
                "stops at the first"
            )
        if not nonfinite:
            _LOGGER.info("skipped a step for a GradScaler (%d so far)", self.skipped_steps)
            return
        self._num_skipped_here += 1
        is_power_of_2 = self._num_skipped_here & (self._num_skipped_here - 1) == 0
        _LOGGER.log(
            logging.WARNING if is_power_of_2 else logging.INFO,
            "skipped a step: %s (%d skipped so far; said again when twice as many are). "
            "hint: %s; nonfinite='raise' stops at the first",
            nonfinite,
            self.skipped_steps,
            self._cure,
        )

    @property
    def _cure(self) -> str:
        """What to do about gradients that are not finite, and is not done yet."""
        return "lower lr" if getattr(self, "clip_norm", None) else "lower lr or clip"

    def _first_nonfinite(self) -> str:
        """The first parameter that is not finite, or whose gradient is not, to go on a message."""
        for param, label in self._labelled():
            grad = self._gradient(param)
            if not local(self._host_side(param)).isfinite().all():
                return f"; {label} is not finite"
            if grad is not None and not local(grad).isfinite().all():
                return f"; the gradient of {label} is not finite"
        return ""

    def _host_side(self, param: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory that stands for `param` in a step: `param` itself."""
        return param

    def _gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """The gradient of `param` in the coming step, wherever it is."""
        return param.grad


def _is_0(lr: Any) -> bool:
    """Whether `lr` is the number 0. What is no number is refused by `hyper_of`."""
    try:
        return float(lr) == 0
    except (TypeError, ValueError, RuntimeError):
        return False


@named_options("`AdamW`")
class AdamW(Adam):
    """AdamW over parameters in host memory.

    `Adam` with decoupled weight decay, 0.01 unless given.
    """

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
