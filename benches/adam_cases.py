"""What `adam.py` compares.

For each layout: our one pass, and what DeepSpeed and torch do for the same result.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from stepwell import AdamW, _core
from stepwell._tensors import view

if TYPE_CHECKING:
    from collections.abc import Callable

    from pairs import Passes
    from stepwell._decision import Nonfinite

__all__ = ["OURS", "Case", "Contender", "Memory", "Run", "Streams", "cases"]

OURS = "stepwell"

_LR, _BETAS, _EPS, _WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
# A gradient that is scaled in place must not vanish over many steps: up again in every second one.
# Powers of two are exact.
_FACTORS_IN_PLACE = (0.5, 2.0)
_FACTORS = (0.5, 1.0)  # the same, of a gradient that stays as it is

_IDENTITIES = itertools.count()  # of DeepSpeed's native optimizers

# Largest L2 norm of the difference of two weight changes over that of the change, by what is
# rounded on the way.
_TOLERANCE_FLOAT32 = (
    1e-3  # the order of operations; a change is some 1e-2 of its weight, of 24 bits
)
_TOLERANCE_BFLOAT16_WEIGHT = (
    5e-2  # a change is a few ulps of its weight, where operations end on either side of a tie
)
_TOLERANCE_BFLOAT16_MOMENTS = 1e-2  # 8 bits
_TOLERANCE_Q8_MOMENTS = 5e-2


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Bytes per parameter of each array that a pass reads, writes, or both."""

    read_write: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    write: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes moved per parameter: every array once in each direction that it goes."""
        return 2 * sum(self.read_write) + sum(self.read) + sum(self.write)


class Memory:
    """Named tensors of one length, made when first asked for.

    They come from one allocator: on huge pages, first touched by the pool.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._tensors: dict[str, torch.Tensor] = {}

    def zeros(self, name: str, dtype: torch.dtype, *, numel: int | None = None) -> torch.Tensor:
        """The tensor of this name, zeros at first."""
        if name not in self._tensors:
            nbytes = (self.numel if numel is None else numel) * dtype.itemsize
            buffer = _core.Buffer(nbytes)
            memory = (ctypes.c_uint8 * nbytes).from_address(buffer.address)
            # The buffer lives as long as the tensor's storage, which holds `memory`.
            memory.owner = buffer  # type: ignore[attr-defined]
            self._tensors[name] = torch.frombuffer(memory, dtype=dtype)
        return self._tensors[name]

    def param(self, dtype: torch.dtype) -> torch.Tensor:
        """Weights, at first the same in every dtype."""
        return self._normal("param", dtype, std=2e-2, seed=0)

    def grad(self, dtype: torch.dtype) -> torch.Tensor:
        """Their gradient, the same in every dtype."""
        return self._normal("grad", dtype, std=1e-3, seed=1)

    def moments(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Both moments, one value per parameter."""
        return {name: self.zeros(f"{name} {dtype}", dtype) for name in ("exp_avg", "exp_avg_sq")}

    def q8_moments(self) -> dict[str, torch.Tensor]:
        """Both moments as codes and scales, by their names in `AdamTensor`."""
        return {
            part.name: self.zeros(
                part.name, getattr(torch, part.dtype), numel=part.length(self.numel)
            )
            for part in _core.moments_parts("q8")
        }

    def _normal(self, role: str, dtype: torch.dtype, *, std: float, seed: int) -> torch.Tensor:
        name = f"{role} {dtype}"
        if name not in self._tensors:
            generator = torch.Generator().manual_seed(seed)
            for piece in torch.split(self.zeros(name, dtype), 1 << 20):
                piece.copy_((torch.randn(piece.numel(), generator=generator) * std).bfloat16())
        return self._tensors[name]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A contender over some memory."""

    memory: Memory
    """Where its tensors are; the core knows addresses only."""
    passes: Passes
    """All of them are one step."""
    weights: Callable[[], torch.Tensor]
    """The weights, in float32."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to step."""

    name: str
    """The package, and how it steps."""
    streams: tuple[Streams, ...]
    """What each of its passes moves."""
    prepare: Callable[[Memory], Run]
    """Makes its state."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders that do the same to the same tensors."""

    name: str
    """Short, for the JSON."""
    title: str
    """For people."""
    tolerance: float
    """How far our change of the weights may be from a peer's.

    The L2 norm of the difference over that of the change.
    """
    ours: Contender
    """This package."""
    peers: tuple[Contender, ...]
    """The others; none where none can do it."""


# ---- ours ----


def _adam_step(factors: tuple[float, ...], **tensors: torch.Tensor) -> Passes:
    views: dict[str, Any] = {name: view(tensor) for name, tensor in tensors.items()}
    adam_tensors = [_core.AdamTensor(**views)]
    steps, scales = itertools.count(1), itertools.cycle(factors)

    def step() -> None:
        _core.adam_step(
            adam_tensors,
            steps=[next(steps)],
            hyper=_core.Hyper(
                lr=_LR,
                betas=_BETAS,
                eps=_EPS,
                weight_decay=_WEIGHT_DECAY,
                decoupled=True,
                grad_scale=next(scales),
            ),
        )

    return {"step": step}


def _plain(memory: Memory, *, dtype: torch.dtype) -> Run:
    """The parameter is its own master."""
    param = memory.param(dtype)
    passes = _adam_step(
        (1.0,), param=param, grad=memory.grad(dtype), **memory.moments(torch.float32)
    )
    return Run(memory=memory, passes=passes, weights=param.float)


def _split(memory: Memory, *, moments: Callable[[Memory], dict[str, torch.Tensor]]) -> Run:
    """A bfloat16 parameter is the high half of its master, and the weight that goes out."""
    tensors = {
        "param": memory.param(torch.bfloat16),
        "trailing": memory.zeros("trailing", torch.int16),
        "fingerprints": memory.zeros(
            "fingerprints", torch.int32, numel=_core.num_chunks(memory.numel)
        ),
        **moments(memory),
    }

    def weights() -> torch.Tensor:
        master = torch.empty(memory.numel)
        views: dict[str, Any] = {name: view(tensor) for name, tensor in tensors.items()}
        adam_tensor = _core.AdamTensor(**views)
        _core.read_state(adam_tensor, master=view(master))
        return master

    return Run(
        memory=memory,
        passes=_adam_step(_FACTORS, grad=memory.grad(torch.bfloat16), **tensors),
        weights=weights,
    )


def _optimizer(memory: Memory, *, nonfinite: Nonfinite) -> Run:
    param = torch.nn.Parameter(memory.param(torch.float32))
    param.grad = memory.grad(torch.float32)
    optimizer = AdamW(
        [param], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, nonfinite=nonfinite
    )
    optimizer.state[param] = {"step": torch.tensor(0.0), **memory.moments(torch.float32)}
    return Run(memory=memory, passes={"step": optimizer.step}, weights=param.detach)


# ---- the peers ----


def _torch(memory: Memory, *, three_passes: bool) -> Run:
    param = torch.nn.Parameter(memory.param(torch.float32))
    param.grad = memory.grad(torch.float32)
    optimizer = torch.optim.AdamW(
        [param], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
    )
    optimizer.state[param] = {"step": torch.tensor(0.0), **memory.moments(torch.float32)}
    passes: Passes = {"AdamW": optimizer.step}
    return Run(
        memory=memory,
        passes=_between_casts(memory, passes) if three_passes else passes,
        weights=param.detach,
    )


def _deepspeed(memory: Memory, *, native: Any, dtype: torch.dtype, three_passes: bool) -> Run:
    param, moments = memory.param(dtype), memory.moments(torch.float32)
    arrays = (param, memory.grad(dtype), moments["exp_avg"], moments["exp_avg_sq"])
    identity = next(_IDENTITIES)
    native.create_adam(identity, _LR, *_BETAS, _EPS, _WEIGHT_DECAY, True, False)
    steps = itertools.count(1)

    def step() -> None:
        native.adam_update(identity, next(steps), _LR, *_BETAS, _EPS, _WEIGHT_DECAY, True, *arrays)

    passes: Passes = {"CPUAdam": step}
    return Run(
        memory=memory,
        passes=_between_casts(memory, passes) if three_passes else passes,
        weights=param.float,
    )


def _between_casts(memory: Memory, passes: Passes) -> Passes:
    """The step as ZeRO's CPU offload does it.

    The gradient is scaled in place before it, the weights are cast after it.
    """
    param, grad, weight = (
        memory.param(torch.float32),
        memory.grad(torch.float32),
        memory.zeros("weight", torch.bfloat16),
    )
    factors = itertools.cycle(_FACTORS_IN_PLACE)
    return {
        "mul_": lambda: grad.mul_(next(factors)),
        **passes,
        "copy_": lambda: weight.copy_(param),
    }


# ---- the cases ----

_FLOAT32 = Streams(read_write=(4, 4, 4), read=(4,))
_THREE_PASSES = (Streams(read_write=(4,)), _FLOAT32, Streams(read=(4,), write=(2,)))


def _core_contender(prepare: Callable[[Memory], Run], streams: Streams) -> Contender:
    return Contender(name=OURS, streams=(streams,), prepare=prepare)


def cases(native: Any | None) -> tuple[Case, ...]:
    """All cases.

    Args:
        native: the native module of DeepSpeedCPUAdam, a peer where it is given.
    """

    def peers(*, three_passes: bool) -> tuple[Contender, ...]:
        streams = _THREE_PASSES if three_passes else (_FLOAT32,)
        name = "{} between casts" if three_passes else "{}"
        others = [
            Contender(
                name=name.format("torch fused"),
                streams=streams,
                prepare=partial(_torch, three_passes=three_passes),
            )
        ]
        if native is not None:
            prepare = partial(
                _deepspeed, native=native, dtype=torch.float32, three_passes=three_passes
            )
            others.insert(
                0, Contender(name=name.format("DeepSpeed"), streams=streams, prepare=prepare)
            )
        return tuple(others)

    half = Streams(read_write=(2, 4, 4), read=(2,))
    half_peers: tuple[Contender, ...] = ()
    if native is not None:
        prepare = partial(_deepspeed, native=native, dtype=torch.bfloat16, three_passes=False)
        half_peers = (Contender(name="DeepSpeed", streams=(half,), prepare=prepare),)

    def fused(
        name: str, moments: str, tolerance: float, streams: Streams, state: Callable[[Memory], Any]
    ) -> Case:
        return Case(
            name=name,
            title=f"bf16 gradient, scale, bf16 weight with an exact fp32 master, {moments} moments",
            tolerance=tolerance,
            ours=_core_contender(partial(_split, moments=state), streams),
            peers=peers(three_passes=True),
        )

    def optimizer(
        name: str, title: str, nonfinite: Nonfinite, streams: tuple[Streams, ...]
    ) -> Case:
        ours = Contender(
            name=OURS, streams=streams, prepare=partial(_optimizer, nonfinite=nonfinite)
        )
        return Case(
            name=name,
            title=title,
            tolerance=_TOLERANCE_FLOAT32,
            ours=ours,
            peers=(peers(three_passes=False)[-1],),
        )

    return (
        Case(
            name="fp32",
            title="fp32 weight, gradient and moments",
            tolerance=_TOLERANCE_FLOAT32,
            ours=_core_contender(partial(_plain, dtype=torch.float32), _FLOAT32),
            peers=peers(three_passes=False),
        ),
        Case(
            name="bf16",
            title="bf16 weight and gradient, fp32 moments, no master",
            tolerance=_TOLERANCE_BFLOAT16_WEIGHT,
            ours=_core_contender(partial(_plain, dtype=torch.bfloat16), half),
            peers=half_peers,
        ),
        fused(
            "fused",
            "fp32",
            _TOLERANCE_FLOAT32,
            Streams(read_write=(2, 2, 4, 4), read=(2,)),
            lambda memory: memory.moments(torch.float32),
        ),
        fused(
            "fused_bf16",
            "bf16",
            _TOLERANCE_BFLOAT16_MOMENTS,
            Streams(read_write=(2, 2, 2, 2), read=(2,)),
            lambda memory: memory.moments(torch.bfloat16),
        ),
        # The scales, an eighth of a byte per parameter, are not counted.
        fused(
            "fused_q8",
            "q8",
            _TOLERANCE_Q8_MOMENTS,
            Streams(read_write=(2, 2, 1, 1), read=(2,)),
            Memory.q8_moments,
        ),
        optimizer(
            "optimizer",
            "AdamW.step() of fp32, with its finite check",
            "raise",
            (Streams(read=(4,)), _FLOAT32),
        ),
        optimizer(
            "optimizer_propagate",
            'AdamW.step() of fp32, nonfinite="propagate"',
            "propagate",
            (_FLOAT32,),
        ),
    )
