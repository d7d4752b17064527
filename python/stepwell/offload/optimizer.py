"""AdamW for parameters on an accelerator, with master and moments in host memory."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from stepwell import _core, _state
from stepwell._sharding import agree, is_dtensor, local, meshes
from stepwell._tensors import Written, check_param, view
from stepwell.offload.gate import Gate
from stepwell.offload.norm import squared_norm
from stepwell.offload.twins import Twins
from stepwell.optim import AdamW, Moments, Nonfinite, Update

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim.optimizer import ParamsT, StateDict

__all__ = ["OffloadAdamW"]

GateMode: TypeAlias = Literal["module", "step"]

_LOGGER = logging.getLogger(__name__)

_GIB = 1 << 30
# As torch.nn.utils.clip_grad_norm_ has it.
_CLIP_EPS = 1e-6


class OffloadAdamW(AdamW):
    """AdamW over parameters on an accelerator: gradients come to host memory, new weights go back, the rest stays there.

    `step()` computes the norm of all gradients on the device, decides there and then (clip coefficient, finite check), and
    leaves the rest to the background: gradients are copied to the host, stepped chunk by chunk in the order of the
    parameters, and every new weight is on its way back as soon as it is ready. The next forward waits module by module
    for its own weights (`gate="module"`), with the same result, bit for bit, as if `step()` had waited for all.

    What waits by itself: forwards of the modules that hold the parameters (also in evaluation), their `state_dict` and
    `load_state_dict`, and this optimizer's methods. What cannot: a parameter that is read or written in another way
    (`parameter.norm()`, an average of weights, `model.to(...)`). Before that call `synchronize()`, or use `gate="step"`.
    Under torch.compile, and for DTensor parameters (FSDP2), `step()` waits as with `gate="step"`.

    Host memory beside the parameters, in bytes each: for bfloat16 parameters 14 with fp32 moments, 8.1 with q8; for
    float32 parameters 16 and 10.1. It is announced in the log of `stepwell` before it is taken.

    Args:
        params: parameters on one accelerator, (name, parameter) pairs (`model.named_parameters()`) or parameter groups, in the
            order in which the forward uses them. Frozen parameters take no memory. On the CPU everything works as well.
        lr: learning rate; a number or a tensor of one element.
        betas: decay of the moments per step.
        eps: added to the root of the second moment.
        weight_decay: `lr * weight_decay * parameter` is taken off the parameter.
        clip_norm: the norm of all gradients is clipped to it, as by torch.nn.utils.clip_grad_norm_ but without a pass over the
            gradients. None: no clipping. An attribute: it may be changed between steps.
        moments: how `exp_avg` and `exp_avg_sq` are held: "fp32" (8 bytes per parameter), "bf16" (4) or "q8" (2.1).
        gate: who waits for the new weights: "module", each forward for its own; "step", `step()` for all.
        accumulation_steps: after how many backwards `step()` is called. If given, gradients come to the host during the last of
            them; if not, in `step()`, unless `no_sync()` is used. The result is the same. Only for parameters
            of one process: those of DDP are final after the backward only.
        nonfinite: what a NaN or an infinity in any gradient does: "skip" the step and count it in `skipped_steps`, "raise" a
            ValueError, or "propagate" as in torch. With DTensor parameters all ranks decide together.
        maximize: whether to go up the gradient.
        seed: of the stochastic rounding. Equal seeds give equal bits.
        threads: workers that step; None: one per physical core of this process, but one, which launches work on the device.
        host_bytes_max: the most host memory that may be taken; None: what is free.
        foreach: accepted for torch's sake, without effect: there is one implementation.
        fused: likewise.

    Attributes:
        grad_norm: the norm of all gradients of the last step before clipping; None before the first.
        clip_norm: see above.

    Raises:
        ValueError: an option or a parameter that no step could work with, or more memory than there is.
        OSError: the device or the memory cannot be had.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_norm: float | None = None,
        moments: Moments = "fp32",
        gate: GateMode = "module",
        accumulation_steps: int | None = None,
        nonfinite: Nonfinite = "skip",
        maximize: bool = False,
        seed: int = 0,
        threads: int | None = None,
        host_bytes_max: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if gate not in ("module", "step"):
            raise ValueError(f"`gate` is `{gate}`, expected module or step")
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(f"`accumulation_steps` is `{accumulation_steps}`, expected 1 or more")
        self.clip_norm = clip_norm
        self.grad_norm: float | None = None
        self._gate_mode: GateMode = gate
        self._accumulation_steps = accumulation_steps
        self._syncs = accumulation_steps is not None
        self._is_last = True
        self._threads = threads
        self._host_bytes_max = host_bytes_max
        self._twins = Twins()
        self._engine: _core.OffloadEngine | None = None
        self._indices: dict[torch.Tensor, int] = {}
        self._gate: Gate | None = None
        self._seconds: dict[str, float] = {}
        self._backwards: dict[torch.Tensor, int] = {}
        self._taken: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._device = torch.device("cpu")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            moments=moments,
            nonfinite=nonfinite,
            maximize=maximize,
            seed=seed,
            foreach=foreach,
            fused=fused,
        )

    # ---- parameters ------------------------------------------------------------------------------------------------------

    def _admit(self, params: list[torch.Tensor]) -> None:
        labels = dict(self._labelled())
        new = [param for param in params if param.requires_grad]
        for param in new:
            check_param(param, labels[param], on_device=True)
        # Refuses tensors that share memory.
        Written((labels[param], local(param)) for param in [*self._indices, *new])
        device = local(new[0]).device if new and not self._indices else self._device
        for param in new:
            if local(param).device != device:
                raise ValueError(
                    f"{labels[param]} is on `{local(param).device}`, others on `{device}`, expected one device. "
                    "hint: an optimizer for each device"
                )
        self._announce(new)
        self._close_engine()
        self._device = device
        self._twins.add(new)
        for param in new:
            self._indices[param] = len(self._indices)
            self.state[param] = _state.new(self._twins.weight(param), self._moments)
            if self._syncs:
                self._register_take(param)

    def _announce(self, params: Sequence[torch.Tensor]) -> None:
        pinned = Twins.nbytes(params)
        state = sum(_state.nbytes(param, self._moments) for param in params)
        numel = sum(local(param).numel() for param in params)
        limit, whose = (self._host_bytes_max, "`host_bytes_max`") if self._host_bytes_max else (_free_bytes(), "free")
        if limit is not None and pinned + state > limit:
            raise ValueError(
                f"{numel} parameters take `{pinned + state}` bytes of host memory, {whose} are `{limit}`. "
                "hint: moments='q8' takes 6 bytes per parameter less than fp32"
            )
        _LOGGER.info(
            "%.2f GiB of host memory for %d parameters: %.2f GiB of state, %.2f GiB pinned for gradients and weights",
            (pinned + state) / _GIB,
            numel,
            state / _GIB,
            pinned / _GIB,
        )

    def _host_side(self, param: torch.Tensor) -> torch.Tensor:
        return self._twins.weight(param) if param in self._twins else param

    def _host_grad(self, param: torch.Tensor) -> torch.Tensor:
        return self._twins.grad(param)

    # ---- the engine --------------------------------------------------------------------------------------------------------

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0

    def _opened_engine(self) -> _core.OffloadEngine:
        """The engine, which is made when it is first needed: by then all groups are there."""
        if self._engine is None:
            name = "cpu" if self._device.type == "cpu" else f"{self._device.type}:{self._device.index or 0}"
            numels = [local(param).numel() for param in self._indices]
            self._engine = _core.OffloadEngine(name, numels, threads=self._threads)
            for buffer in self._twins.buffers:
                self._engine.pin(buffer)
            self._step_stream = self._stream()
            sharded = any(is_dtensor(param) for param in self._indices)
            if self._gate_mode == "module" and not sharded:
                self._gate = Gate(self._indices, self._wait_for, self._finish)
        return self._engine

    def _close_engine(self) -> None:
        self.synchronize()
        self._gate = None
        self._engine = None

    def _wait_for(self, params: list[torch.Tensor]) -> bool:
        begin = time.perf_counter()
        stream = self._stream()
        if self._engine is not None:
            for param in params:
                self._engine.wait(self._indices[param], 0, local(param).numel(), stream=stream)
        self._seconds["gate"] = self._seconds.get("gate", 0.0) + time.perf_counter() - begin
        return stream == self._step_stream

    def _finish(self) -> None:
        if self._engine is not None:
            self._engine.finish(stream=self._stream())
            if self._gate is not None:
                self._gate.clear()

    def synchronize(self) -> None:
        """Waits until the last step is complete: then parameters can be read and written by anyone.

        Raises:
            OSError: the step failed in the background.
        """
        if self._engine is not None:
            self._finish()
            self._engine.synchronize(stream=self._stream())

    @property
    def timing(self) -> dict[str, float]:
        """Of the last step, in seconds: `norm` (waiting for the backward and the norm of its gradients), `prepare` (until the
        background had it), `step` (first chunk to last), within it `gradients` (waiting for them), `gate` (forwards that waited for
        weights since), and the bytes that crossed the bus, `bytes_downloaded` and `bytes_uploaded`.
        """
        return {**self._seconds, **(self._engine.timing() if self._engine is not None else {})}

    # ---- gradients -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in it are not the last before `step()`: their gradients stay on the device.

        Outside of it, from its first use on, every backward is taken for the last.
        """
        if not self._syncs:
            self._syncs = True
            for param in self._indices:
                self._register_take(param)
        before, self._is_last = self._is_last, False
        try:
            yield
        finally:
            self._is_last = before

    def _register_take(self, param: torch.Tensor) -> None:
        # Gradients of DTensors and of DDP are not final when autograd has accumulated them.
        if not is_dtensor(param):
            param.register_post_accumulate_grad_hook(_TakeHook(self))

    @torch.no_grad()
    def _on_grad(self, param: torch.Tensor) -> None:
        """The gradient of `param` is accumulated, maybe for the last time before the step."""
        count = self._backwards[param] = self._backwards.get(param, 0) + 1
        is_last = self._is_last and count >= (self._accumulation_steps or 1)
        if not is_last or param.grad is None or param not in self._indices or _has_peers():
            return
        grad = param.grad
        if grad.layout != torch.strided or not grad.is_contiguous() or grad.dtype != param.dtype:
            return
        if self._opened_engine().busy:
            # Some weight of the last step has not been used.
            self._finish()
        self._take([param], [grad])
        self._taken[param] = (grad, grad._version)

    def _take(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        params, grads = zip(*((p, g) for p, g in zip(params, grads, strict=True) if local(g).numel()), strict=True)
        self._opened_engine().take(
            [self._indices[param] for param in params],
            [local(grad).data_ptr() for grad in grads],
            [view(local(self._twins.grad(param))) for param in params],
            stream=self._stream(),
        )

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters that have a gradient, and those, as they are copied."""
        params, grads = [], []
        labels: dict[torch.Tensor, str] | None = None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad
                if param not in self._indices:
                    labels = labels or dict(self._labelled())
                    raise ValueError(
                        f"{labels[param]} has a gradient, but was frozen when it was added. "
                        "hint: add it to the optimizer after requires_grad_(True)"
                    )
                if local(param).device != self._device or local(grad).device != self._device:
                    labels = labels or dict(self._labelled())
                    raise ValueError(
                        f"{labels[param]} or its gradient is on `{local(param).device}`, expected `{self._device}`, where it was. "
                        "hint: move the model before the optimizer is made"
                    )
                if local(grad).layout != torch.strided or local(grad).dtype != local(param).dtype:
                    labels = labels or dict(self._labelled())
                    raise ValueError(
                        f"the gradient of {labels[param]} is `{local(grad).dtype}`, `{local(grad).layout}`, "
                        f"expected dense `{param.dtype}`. hint: use dense gradients (nn.Embedding(sparse=False))"
                    )
                if is_dtensor(param) and is_dtensor(grad) and grad.placements != param.placements:
                    grad = grad.redistribute(param.device_mesh, param.placements)
                params.append(param)
                grads.append(grad if local(grad).is_contiguous() else grad.contiguous())
        return params, grads

    # ---- the step --------------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._finish()
        taken, self._taken, self._backwards = self._taken, {}, {}
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            self._count_skipped()
            return
        begin = time.perf_counter()
        error: ValueError | None = None
        params: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        inverse_scale = 1.0
        try:
            inverse_scale = self._inverse_grad_scale()
            params, grads = self._gradients()
            self._refresh(params)
        except ValueError as caught:
            error = caught
        if self._meshes is None:
            self._meshes = meshes(param for group in self.param_groups for param in group["params"])
        (is_refused,) = agree(self._meshes, [error is not None])
        if error is not None:
            raise error
        if is_refused:
            raise ValueError("another rank could not step, and nothing was changed. hint: its own error says why")
        if not params:
            return
        # Before the norm: by the time that is known, gradients are arriving.
        missing = [
            (param, grad)
            for param, grad in zip(params, grads, strict=True)
            if not _is_same(taken.get(param), grad) and local(grad).numel()
        ]
        if missing:
            if taken:
                _LOGGER.debug(
                    "%d gradients were changed after they had been copied, and are copied again", len(missing)
                )
            self._take(*zip(*missing, strict=True))
        norm = math.sqrt(_number(squared_norm(params, grads, self._device))) * inverse_scale
        self.grad_norm = norm
        self._seconds = {"norm": time.perf_counter() - begin}
        begin = time.perf_counter()
        if not math.isfinite(norm) and self._nonfinite != "propagate":
            if self._nonfinite == "raise":
                raise ValueError(
                    f"the norm of the gradients is `{norm}`; nothing was changed. "
                    "hint: lower lr or clip; nonfinite='skip' leaves such steps out"
                )
            self._count_skipped()
            return
        may_initialize = all(group["lr"] == 0 for group in self.param_groups)
        if may_initialize and norm == 0 and not any(float(state["step"]) for state in self.state.values()):
            # The dummy step by which torch.distributed.checkpoint has state made, which is there.
            return
        self._apply(self._updates(), inverse_scale * self._clip_coefficient(norm))
        self._seconds["prepare"] = time.perf_counter() - begin
        if self._gate is None or not self._gate.is_open:
            self._finish()

    def _clip_coefficient(self, norm: float) -> float:
        if self.clip_norm is None or not math.isfinite(norm):
            return 1.0
        return min(1.0, self.clip_norm / (norm + _CLIP_EPS))

    def _refresh(self, params: Sequence[torch.Tensor]) -> None:
        """What someone else has written to parameters is what is stepped."""
        if self._twins.refresh(params):
            _LOGGER.debug("parameters were written by others since the last step, and are read again")

    def _apply(self, updates: list[Update], grad_scale: float) -> None:
        states = self._bind(updates)
        engine = self._opened_engine()
        hypers = {hyper: hyper.core(grad_scale) for hyper in {update.hyper for update in updates}}
        stepped = [update for update in updates if update.operand.tensor is not None]
        submit = partial(
            engine.submit,
            [self._indices[update.param] for update in stepped],
            [update.operand.tensor for update in stepped],
            weights=[local(update.param).data_ptr() for update in stepped],
            steps=[update.step for update in stepped],
            hypers=[hypers[update.hyper] for update in stepped],
            stream=self._stream(),
        )
        params = [update.param for update in updates]
        self._step_stream = self._stream()
        self._commit(updates, states, [submit, partial(self._twins.note, params)])
        if self._gate is not None and self._gate.is_open:
            self._gate.open(params)

    # ---- state dicts -------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """As `stepwell.AdamW.state_dict`, after the last step is complete; its tensors are in host memory."""
        self.synchronize()
        return super().state_dict()

    def decoded_state_dict(self) -> StateDict:
        """As `stepwell.AdamW.decoded_state_dict`: plain fp32 moments. Takes 8 bytes per parameter unless `moments` is "fp32"."""
        if self._moments != "fp32":
            numel = sum(local(param).numel() for param in self._indices)
            _LOGGER.info("%.2f GiB of host memory for decoded moments", 8 * numel / _GIB)
        return super().decoded_state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As `stepwell.AdamW.load_state_dict`, after the last step is complete."""
        self.synchronize()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadAdamW holds a device and cannot be copied or pickled. hint: use its state_dict()")


class _TakeHook:
    """Tells the optimizer, while it lives, that a gradient has been accumulated."""

    def __init__(self, optimizer: OffloadAdamW) -> None:
        import weakref

        self._optimizer = weakref.ref(optimizer)

    def __call__(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._on_grad(param)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """What a pickled parameter has in the place of a hook."""

    def __call__(self, param: torch.Tensor) -> None:
        pass


def _number(scalar: torch.Tensor) -> float:
    return float(scalar)


def _is_same(taken: tuple[torch.Tensor, int] | None, grad: torch.Tensor) -> bool:
    return taken is not None and taken[0] is grad and taken[1] == grad._version


def _has_peers() -> bool:
    """Whether other processes may still change gradients (DDP's all-reduce) after autograd is done with them."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _free_bytes() -> int | None:
    """Host memory that can be had without swapping, as the kernel estimates it; None if it does not."""
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
