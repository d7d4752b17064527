"""The ZenFlow part of DeepSpeed's native op `cpu_adam`.

Updates are done by a process of their own, which gets them through shared memory.

The training process lays a control block into a shared tensor and submits steps to it; the
optimizer process, which maps the same tensors, runs them one after the other. Two process-shared
semaphores carry the turns.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import os
import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from stepwell import _core
from stepwell._hyper import Hyper
from stepwell.deepspeed.native import adam, optimizers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = [
    "fail",
    "following",
    "zenflow_adam_create",
    "zenflow_adam_ctrl_exit",
    "zenflow_adam_ctrl_init",
    "zenflow_adam_ctrl_size",
    "zenflow_adam_destroy",
    "zenflow_adam_register_group",
    "zenflow_adam_run_worker",
    "zenflow_adam_submit",
    "zenflow_adam_wait",
]

GROUPS_MAX = 1024
"""Parameter groups of a control block."""
OUTSTANDING_MAX = 4
"""Steps that may be submitted and not yet done. ZenFlow runs up to two ahead."""
WAIT_SLICE_SECONDS = 0.2
"""How long a wait goes without letting Python see signals, and the worker its parent."""

_ERROR_BYTES_MAX = 2048
_COMMAND_STEP = 0
_COMMAND_EXIT = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Semaphore(ctypes.Structure):
    """Room for a `sem_t`: 32 bytes, aligned as a long, with glibc and musl on 64-bit machines."""

    _fields_ = (("opaque", ctypes.c_long * 8),)

    def init(self) -> None:
        _check(_libc.sem_init(ctypes.byref(self), 1, 0), "sem_init")

    def post(self) -> None:
        _check(_libc.sem_post(ctypes.byref(self)), "sem_post")

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it could be taken within a slice of time.

        Runs without the GIL; Ctrl-C interrupts it.
        """
        nanoseconds = time.time_ns() + int(timeout_seconds * 1e9)
        deadline = _Timespec(*divmod(nanoseconds, 10**9))
        if _libc.sem_timedwait(ctypes.byref(self), ctypes.byref(deadline)) == 0:
            return True
        error = ctypes.get_errno()
        if error not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(error, f"sem_timedwait failed: {os.strerror(error)}")
        return False


def _check(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call} failed: {os.strerror(error)}")


class _GroupHyper(ctypes.Structure):
    _fields_ = (
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("bias_correction", ctypes.c_uint8),
    )


class _Command(ctypes.Structure):
    """What the worker is to do."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("now_state", ctypes.c_int),
        ("step", ctypes.c_int64),
        ("groups", _GroupHyper * GROUPS_MAX),
    )


class _Control(ctypes.Structure):
    """What the two processes share. The semaphores order all other accesses.

    Commands go round a ring, since a step may be submitted while the one before it runs.
    """

    _fields_ = (
        ("submitted", _Semaphore),
        ("done", _Semaphore),
        ("num_submitted", ctypes.c_int64),
        ("num_done", ctypes.c_int64),
        ("num_groups", ctypes.c_int),
        ("propagates_nonfinite", ctypes.c_uint8),
        # Written by the worker before it ends for a step that it could not do.
        ("error", ctypes.c_char * _ERROR_BYTES_MAX),
        ("commands", _Command * OUTSTANDING_MAX),
    )

    def submit(self) -> _Command:
        """The command to fill in before `submitted` is posted."""
        if self.num_submitted - self.num_done >= OUTSTANDING_MAX:
            raise ValueError(
                f"`{OUTSTANDING_MAX}` submitted steps are not done yet. hint: zenflow_adam_wait "
                "for each step"
            )
        command: _Command = self.commands[self.num_submitted % OUTSTANDING_MAX]
        self.num_submitted += 1
        return command

    def check_error(self) -> None:
        """Raises ValueError if the worker has ended for a step that it could not do."""
        if self.error:
            reason = self.error.decode(errors="replace")
            raise ValueError(
                f"the ZenFlow optimizer process could not step, and has ended: {reason}"
            )


def _control(address: int) -> _Control:
    if not address:
        raise ValueError(
            "the control block has the address `0`. hint: pass the data_ptr() of a shared tensor"
        )
    return _Control.from_address(address)


@dataclass
class _Group:
    """A parameter group: one flat parameter, and what belongs to it.

    Its gradients and moments in two sets, and a copy of it for the uploader.
    """

    param: torch.Tensor
    grad: tuple[torch.Tensor, torch.Tensor]
    exp_avg: tuple[torch.Tensor, torch.Tensor]
    exp_avg_sq: tuple[torch.Tensor, torch.Tensor]
    stale: torch.Tensor | None

    def tensors(self, now_state: int) -> adam.NativeTensors:
        return adam.NativeTensors(
            self.param, self.grad[now_state], self.exp_avg[now_state], self.exp_avg_sq[now_state]
        )


@dataclass
class _Worker:
    optimizer_id: int
    pool: _core.Pool
    groups: list[_Group] = field(default_factory=list)

    def step(self, control: _Control, command: _Command) -> None:
        """Does a submitted step: all groups, or none."""
        if len(self.groups) != control.num_groups:
            raise ValueError(
                f"a step of `{control.num_groups}` groups was submitted, {len(self.groups)} are "
                "registered. "
                "hint: register every group before the first step"
            )
        tensors = [group.tensors(command.now_state) for group in self.groups]
        adam.set_nonfinite("propagate" if control.propagates_nonfinite else "raise")
        with adam.all_finite([(each.param, each.grad) for each in tensors]):
            for hyper, each, group in zip(command.groups, tensors, self.groups, strict=False):
                adam.update(
                    [each],
                    step=command.step,
                    hyper=Hyper(
                        lr=hyper.lr,
                        betas=(hyper.beta1, hyper.beta2),
                        eps=hyper.eps,
                        weight_decay=hyper.weight_decay,
                        decoupled=optimizers.get(self.optimizer_id).decoupled,
                        bias_correction=bool(hyper.bias_correction),
                        maximize=False,
                    ),
                    pool=self.pool,
                )
                if group.stale is not None:
                    group.stale.copy_(group.param)


_WORKERS: dict[int, _Worker] = {}
_HANDLES = count()


def _worker(handle: int) -> _Worker:
    try:
        return _WORKERS[handle]
    except KeyError:
        raise ValueError(
            f"there is no ZenFlow worker `{handle}`, expected one of {sorted(_WORKERS)}. "
            "hint: zenflow_adam_create makes one"
        ) from None


def zenflow_adam_create(optimizer_id: int, affinity: Sequence[int]) -> int:
    """Makes a worker of an optimizer, with one thread per CPU of `affinity`. Returns its handle."""
    optimizers.get(optimizer_id)
    cpus = [int(cpu) for cpu in affinity]
    handle = next(_HANDLES)
    _WORKERS[handle] = _Worker(
        optimizer_id, _core.Pool(cpus=cpus) if cpus else _core.Pool.default()
    )
    return handle


def zenflow_adam_register_group(
    handle: int,
    param: torch.Tensor,
    grad0: torch.Tensor,
    grad1: torch.Tensor,
    exp_avg0: torch.Tensor,
    exp_avg1: torch.Tensor,
    exp_avg_sq0: torch.Tensor,
    exp_avg_sq1: torch.Tensor,
    stale: torch.Tensor | None,
) -> None:
    """Adds a group, in the order in which their hyper-parameters are submitted.

    Args:
        handle: of the worker.
        param: the flat parameter.
        grad0: gradients of steps of state 0.
        grad1: gradients of steps of state 1.
        exp_avg0: first moments of steps of state 0.
        exp_avg1: first moments of steps of state 1.
        exp_avg_sq0: second moments of steps of state 0.
        exp_avg_sq1: second moments of steps of state 1.
        stale: gets a copy of the parameter after every step, if there is one.

    Raises:
        ValueError: tensors that no step could be applied to.
    """
    group = _Group(param, (grad0, grad1), (exp_avg0, exp_avg1), (exp_avg_sq0, exp_avg_sq1), stale)
    for now_state in (0, 1):
        adam.check(group.tensors(now_state))
    if stale is not None and (stale.numel() != param.numel() or stale.dtype != param.dtype):
        raise ValueError(
            f"`stale` is `{stale.dtype}` of {stale.numel()} elements, expected `{param.dtype}` of "
            f"{param.numel()}. "
            "hint: torch.zeros_like(param)"
        )
    worker = _worker(handle)
    if len(worker.groups) == GROUPS_MAX:
        raise ValueError(
            f"ZenFlow has more than `{GROUPS_MAX}` parameter groups. hint: merge groups of equal "
            "options"
        )
    worker.groups.append(group)


def zenflow_adam_destroy(handle: int) -> None:
    """Forgets a worker and its groups, if there is one."""
    _WORKERS.pop(handle, None)


def zenflow_adam_ctrl_size() -> int:
    """Bytes of a control block."""
    return ctypes.sizeof(_Control)


def zenflow_adam_ctrl_init(address: int, num_groups: int) -> None:
    """Makes a control block at `address`, in memory that both processes map."""
    if not 1 <= num_groups <= GROUPS_MAX:
        raise ValueError(
            f"ZenFlow has `{num_groups}` parameter groups, expected 1 to {GROUPS_MAX}. "
            "hint: merge groups of equal options"
        )
    control = _control(address)
    ctypes.memset(address, 0, ctypes.sizeof(_Control))
    control.num_groups = num_groups
    control.propagates_nonfinite = adam.nonfinite() == "propagate"
    control.submitted.init()
    control.done.init()


def following(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """DeepSpeed's `start_optimizer_process`, whose process does what the optimizer's updates do."""

    @functools.wraps(start)
    def started(zf_optimizer: Any) -> None:
        with adam.following(zf_optimizer.optimizer):
            start(zf_optimizer)

    return started


def zenflow_adam_run_worker(handle: int, address: int) -> None:
    """Runs submitted steps.

    Until the exit command, the end of the training process, or a step that fails.

    Why a step failed is raised by `zenflow_adam_wait` in the training process, and here.
    """
    worker, control = _worker(handle), _control(address)
    parent = os.getppid()
    while True:
        while not control.submitted.wait(WAIT_SLICE_SECONDS):
            # A training process that was killed cannot say so.
            if os.getppid() != parent:
                return
        command = control.commands[control.num_done % OUTSTANDING_MAX]
        try:
            if command.kind == _COMMAND_EXIT:
                return
            worker.step(control, command)
        except BaseException as error:
            fail(address, error)
            raise
        finally:
            control.num_done += 1
            control.done.post()


def fail(address: int, error: BaseException) -> None:
    """Has waits for the worker raise, now and later: it has ended, for `error`."""
    _control(address).error = f"{type(error).__name__}: {error}".encode()[: _ERROR_BYTES_MAX - 1]


def zenflow_adam_submit(
    address: int,
    now_state: int,
    step: int,
    lr: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    bias_correction: Sequence[int],
) -> None:
    """Has the worker do a step. Returns at once.

    Args:
        address: of the control block.
        now_state: which of the two sets of gradients and moments, 0 or 1.
        step: the number of the update, from 1.
        lr: learning rate of each group; the others likewise.
        beta1: decay of `exp_avg`.
        beta2: decay of `exp_avg_sq`.
        eps: added to the denominator.
        weight_decay: weight decay.
        bias_correction: 1 where the moments are corrected for their start at 0.

    Raises:
        ValueError: nothing was submitted.
    """
    control = _control(address)
    hypers = (lr, beta1, beta2, eps, weight_decay, bias_correction)
    if {len(values) for values in hypers} != {control.num_groups}:
        raise ValueError(
            f"hyper-parameters of `{[len(values) for values in hypers]}` groups were submitted, "
            "expected "
            f"{control.num_groups} of each. hint: zenflow_adam_ctrl_init was given that number"
        )
    if now_state not in (0, 1) or step < 1:
        raise ValueError(
            f"`now_state, step` is `{now_state}, {step}`, expected 0 or 1, and a number from 1"
        )
    numbers = [[float(value) for value in values] for values in zip(*hypers, strict=True)]
    if not all(math.isfinite(number) for group in numbers for number in group):
        raise ValueError(f"hyper-parameters of the groups are `{numbers}`, expected finite numbers")
    control.check_error()
    command = control.submit()
    for index, (*floats, corrects) in enumerate(numbers):
        command.groups[index] = _GroupHyper(*floats, bool(corrects))
    command.now_state = now_state
    command.step = int(step)
    command.kind = _COMMAND_STEP
    control.submitted.post()


def zenflow_adam_wait(address: int, timeout_seconds: float) -> bool:
    """Whether a submitted step was done within the time given. Each step is reported once.

    Raises:
        ValueError: the worker could not do it, and has ended.
    """
    control = _control(address)
    deadline = time.monotonic() + float(timeout_seconds)
    while True:
        remaining = deadline - time.monotonic()
        is_done: bool = control.done.wait(min(max(remaining, 0.0), WAIT_SLICE_SECONDS))
        control.check_error()
        if is_done or remaining <= 0:
            return is_done


def zenflow_adam_ctrl_exit(address: int) -> None:
    """Has the worker end."""
    control = _control(address)
    control.submit().kind = _COMMAND_EXIT
    control.submitted.post()
