"""The state of one parameter: its parts, their memory, and how one form becomes another.

Moments come in three codecs, the master in one form per parameter dtype (`rust/state/mod.rs`).
Elements are counted in the row-major order of the parameter, or of this rank's piece of it,
whatever its strides are.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from stepwell import _core
from stepwell._sharding import is_dtensor, like, local, longest_piece, piece_index, row_shape, rows
from stepwell._sizes import state_bytes
from stepwell._tensors import has_memory, is_run, tensor_on, view

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "FINGERPRINTS",
    "MOMENTS",
    "Allocate",
    "State",
    "adam_tensor",
    "convert",
    "decode",
    "drop_written",
    "is_part",
    "key_of",
    "make_dense",
    "master_of",
    "moments_of",
    "nbytes",
    "nbytes_of",
    "new",
    "packed",
    "part_names",
    "placed",
    "refreshed",
    "repair_step",
    "step_of",
    "step_tensor",
    "take_fingerprints",
    "zeros",
]

_LOGGER = logging.getLogger(__name__)

State: TypeAlias = dict[str, Any]
"""What `optimizer.state[parameter]` holds."""


class _Part(NamedTuple):
    """One tensor of a parameter's state."""

    name: str
    dtype: torch.dtype
    length: Callable[[int], int] | None = None
    """Entries for a piece of that many elements, as a 1-D tensor.

    None: one per element, in the parameter's shape.
    """


FINGERPRINTS = "fingerprints"
"""The part that tells which weights the trailing bits belong to."""


def _parts(parts: list[_core.StatePart]) -> tuple[_Part, ...]:
    return tuple(
        _Part(part.name, getattr(torch, part.dtype), None if part.per_element else part.length)
        for part in parts
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_MOMENTS = {codec: _parts(_core.moments_parts(codec)) for codec in _core.moments_codecs()}
_MASTERS = {
    dtype: _parts(_core.master_parts(_name_of(dtype)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
_PARTS = {part.name: part for parts in (*_MOMENTS.values(), *_MASTERS.values()) for part in parts}
_MASTER_NAMES = {part.name for parts in _MASTERS.values() for part in parts}

MOMENTS = tuple(_MOMENTS)
"""The codecs of the moments."""

BUFFER_BYTES_MIN = 1 << 20
"""From this size on, state lies on huge pages that all workers fault in.

Below, torch's allocator does as well.
"""


def key_of(seed: int, index: int, param: torch.Tensor) -> int:
    """The number that decorrelates the stochastic rounding of different parameters and pieces."""
    packed = struct.pack("<QQQ", int(seed) % 2**64, index, piece_index(param))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Fresh host memory for state, as a 1-D tensor."""
    nbytes = numel * dtype.itemsize
    if nbytes < BUFFER_BYTES_MIN:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    return tensor_on(_core.Buffer(nbytes)).view(dtype)


Allocate: TypeAlias = Callable[[int, torch.dtype], torch.Tensor]
"""Gives memory for so many elements of a dtype, as a 1-D tensor."""


def _part(param: torch.Tensor, part: _Part, memory: Allocate = zeros) -> torch.Tensor:
    """A part of fresh state, all zeros, unless `memory` gives other."""
    if part.length is None:
        piece = local(param)
        return _like_part(param, part, memory(piece.numel(), part.dtype).view(piece.shape))
    return _like_part(param, part, memory(part.length(longest_piece(param)), part.dtype))


def _like_part(param: torch.Tensor, part: _Part, piece: torch.Tensor) -> torch.Tensor:
    """State of `param` from this rank's piece of a part."""
    return like(param, piece) if part.length is None else rows(param, piece.view(-1))


def _shape(param: torch.Tensor, part: _Part) -> list[int]:
    return (
        list(param.shape)
        if part.length is None
        else row_shape(param, part.length(longest_piece(param)))
    )


def _placement(tensor: DTensor) -> tuple[object, object]:
    return tensor.device_mesh, tuple(tensor.placements)


def _problem(param: torch.Tensor, part: _Part, value: object) -> str | None:
    """What keeps `value` from being this part of the state of `param`; None if it fits."""
    if not isinstance(value, torch.Tensor):
        return f"is `{type(value).__name__}`, expected a tensor"
    # Before its shape and its memory, which such a tensor may not have.
    if local(value).layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(local(value).layout).removeprefix("torch.")
        return f"is `{kind}`, expected a dense tensor, as to_dense() gives"
    if value.dtype != part.dtype:
        return f"is `{value.dtype}`, expected `{part.dtype}`"
    if is_dtensor(param) != is_dtensor(value):
        return (
            "is a DTensor, expected a plain tensor"
            if is_dtensor(value)
            else "is a plain tensor, expected a DTensor"
        )
    if list(value.shape) != _shape(param, part):
        return f"has the shape `{tuple(value.shape)}`, expected `{tuple(_shape(param, part))}`"
    if is_dtensor(param) and is_dtensor(value) and _placement(param) != _placement(value):
        return (
            f"is placed as `{value.placements}` on `{value.device_mesh}`, expected as the "
            "parameter is"
        )
    if not local(value).is_cpu:
        return f"is on `{local(value).device}`, expected the CPU"
    if not has_memory(local(value)):
        return f"takes `{local(value).nbytes}` bytes, but its storage was freed, or has fewer"
    return None


def is_part(name: str) -> bool:
    """Whether `name` is the key of a part of state that grows with the parameter."""
    return name in _PARTS


def part_names(param: torch.Tensor, moments: str) -> tuple[str, ...]:
    """The keys of the state of `param`, beside `step`."""
    return tuple(part.name for part in (*_MOMENTS[moments], *_MASTERS[param.dtype]))


def nbytes(param: torch.Tensor, moments: str) -> int:
    """Bytes of the state of `param`, this rank's piece of it, beside `step`."""
    return state_bytes([local(param).numel()], _name_of(param.dtype), moments)


def nbytes_of(state: State) -> int:
    """Bytes of the tensors of `state`, this rank's pieces, beside `step`."""
    return sum(
        local(value).nbytes
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    )


def new(param: torch.Tensor, moments: str) -> State:
    """State for a parameter that was never stepped."""
    parts = (*_MOMENTS[moments], *_MASTERS[param.dtype])
    return {"step": step_tensor(0), **{part.name: _part(param, part) for part in parts}}


def placed(param: torch.Tensor, moments: str, memory: Allocate) -> State:
    """The parts of the state of `param`, without `step`, in `memory`; fingerprints are zeros."""
    parts = (*_MOMENTS[moments], *_MASTERS[param.dtype])
    return {
        part.name: _part(param, part, zeros if part.name == FINGERPRINTS else memory)
        for part in parts
    }


def step_tensor(step: int) -> torch.Tensor:
    """A counter of updates as torch's optimizers have it.

    It is float32 and on the CPU, whatever torch's defaults are.
    """
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def _floats(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.float32, device="cpu")


def step_of(state: State, label: Callable[[], str]) -> int:
    """The number of updates that `state` has seen."""
    step = state.get("step")
    # A short cut for what steps leave: all that is asked below holds of it.
    if (
        type(step) is torch.Tensor
        and step.dtype == torch.float32
        and step.dim() == 0
        and step.layout == torch.strided
        and step.is_cpu
    ):
        value: float = step.item()
        if value >= 0 and value.is_integer():
            return int(value)
    is_number = isinstance(step, (int, float))
    if isinstance(step, torch.Tensor):
        is_number = step.layout == torch.strided and not step.is_nested and step.numel() == 1
    value = float(cast("float", step)) if is_number else -1.0
    if not (value >= 0 and value.is_integer()):
        raise ValueError(
            f"the state of {label()} has the step `{step}`, expected a count. hint: load a "
            "complete state dict"
        )
    return int(value)


def repair_step(state: State, step: int) -> None:
    """Makes `state["step"]` a counter that steps can add to.

    Loaded state may have a number there, or a tensor of another kind.
    """
    counter = state["step"]
    is_counter = (
        isinstance(counter, torch.Tensor)
        and counter.dtype == torch.float32
        and counter.is_cpu
        and not counter.is_inference()
    )
    if not is_counter:
        state["step"] = step_tensor(step)


def make_dense(param: torch.Tensor, state: State, moments: str) -> None:
    """Gives those tensors of `state` that are not one run of memory a run of their own."""
    for name in part_names(param, moments):
        piece = local(state[name])
        if not is_run(piece):
            dense = zeros(piece.numel(), piece.dtype).view(piece.shape).copy_(piece)
            state[name] = _like_part(param, _PARTS[name], dense)


def _in_host_memory(state: State) -> State:
    """`state` itself, or with copies of what is on a device.

    Trainers that load a checkpoint move all state to where the parameters are (Lightning does).
    """
    on_device = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not is_dtensor(value) and not value.is_cpu
    }
    if not on_device:
        return state
    return state | {name: value.cpu() for name, value in on_device.items() if not value.is_meta}


def refreshed(param: torch.Tensor, state: State, moments: str, label: str) -> State:
    """`state` itself, or another that fits `param` as it is now.

    It has a fresh master where the dtype of `param` has changed: what the user wrote is the master.
    Tensors that were moved to a device are back in host memory.

    Raises:
        ValueError: the moments do not fit the parameter.
    """
    state = _in_host_memory(state)
    for part in _MOMENTS[moments]:
        if problem := _problem(param, part, state.get(part.name)):
            raise ValueError(
                f"`{part.name}` in the state of {label} {problem}. hint: load state by "
                "load_state_dict, or start afresh: del optimizer.state[parameter]"
            )
    masters = {part.name: part for part in _MASTERS[param.dtype]}
    fits = all(_problem(param, part, state.get(name)) is None for name, part in masters.items())
    if fits and not (_MASTER_NAMES - masters.keys()) & state.keys():
        return state
    kept = {name: value for name, value in state.items() if name not in _MASTER_NAMES}
    return kept | {name: _part(param, part) for name, part in masters.items()}


def adam_tensor(
    param: torch.Tensor,
    runs: dict[str, torch.Tensor],
    *,
    grad: _core.TensorView | None = None,
    weight_out: _core.TensorView | None = None,
    key: int = 0,
) -> _core.AdamTensor:
    """One parameter as the core takes it: contiguous local tensors, `runs` by parts' names."""
    numel = param.numel()
    views: dict[str, Any] = {}
    for name, run in runs.items():
        length = _PARTS[name].length
        # A row may be longer than this rank's piece has use for.
        views[name] = view(run, numel if length is None else length(numel))
    return _core.AdamTensor(param=view(param), grad=grad, weight_out=weight_out, key=key, **views)


def _moment_runs(state: State, moments: str) -> dict[str, torch.Tensor]:
    # Of a stand-in what it stands for.
    return {part.name: local(state[part.name]).detach().contiguous() for part in _MOMENTS[moments]}


def take_fingerprints(param: torch.Tensor, state: State, moments: str) -> None:
    """Takes the fingerprints of the weights of `param` as they are.

    The caller knows that the trailing bits in the state belong to these weights.
    """
    piece = local(param)
    if FINGERPRINTS in state and piece.numel() > 0:
        runs = {name: local(state[name]) for name in part_names(param, moments)}
        _core.take_fingerprints(adam_tensor(piece, runs))


def drop_written(weight: torch.Tensor, before: torch.Tensor, state: State, moments: str) -> bool:
    """Drops the trailing bits of the elements of `weight` that were `before`.

    The others' stay, and the fingerprints are those of `weight`. So a mask or a clamp behind every
    step stalls what it changes alone. Four passes over the weight, on this thread.

    Returns:
        False: `state` did not belong to `before`, or has no trailing bits. Nothing was changed, and
        the step that verifies it drops those of whole chunks.
    """
    if "trailing" not in state:
        return False
    trailing, fingerprints = local(state["trailing"]), local(state[FINGERPRINTS])
    # A row of it may be longer than this rank's piece has use for.
    own = state | {FINGERPRINTS: fingerprints.clone()}
    take_fingerprints(before, own, moments)
    if not (is_run(trailing) and torch.equal(own[FINGERPRINTS], fingerprints)):
        return False
    differs = before.view(torch.int16) != weight.view(torch.int16)
    trailing.view(torch.int16).view(-1).masked_fill_(differs.view(-1), 0)
    take_fingerprints(weight, state, moments)
    return True


def master_of(state: State) -> tuple[object, ...]:
    """What `state` has of the master beside the weight, and what tells whether it belongs to it."""
    return state.get("trailing"), state.get(FINGERPRINTS)


def packed(param: torch.Tensor, state: State) -> State:
    """`state` for a state dict.

    16-bit integers of a sharded parameter become bfloat16 of the same bits, in the same memory:
    neither gloo nor NCCL moves 16-bit integers, and full state dicts are gathered.
    """
    if not is_dtensor(param) or "trailing" not in state:
        return state
    return state | {"trailing": like(param, local(state["trailing"]).view(torch.bfloat16))}


def _unpacked(param: torch.Tensor, state: State) -> State:
    trailing = state.get("trailing")
    if not (is_dtensor(param) and is_dtensor(trailing) and trailing.dtype == torch.bfloat16):
        return state
    if _placement(trailing) != _placement(param) or trailing.shape != param.shape:
        return state
    return state | {"trailing": like(param, local(trailing).view(torch.int16))}


def _codec_of_codes(state: State) -> str | None:
    """The codec of moments that are held in codes; None: `exp_avg` holds them as they are."""
    for codec, parts in _MOMENTS.items():
        if all(part.name in state and part.name != "exp_avg" for part in parts):
            return codec
    return None


def moments_of(state: State) -> str | None:
    """How the moments of loaded state are held, where that is one of ours."""
    parts = _float_parts(state)
    floats = (codec for codec, known in _MOMENTS.items() if known == parts)
    return _codec_of_codes(state) or next(floats, None)


def decode(param: torch.Tensor, state: State) -> State:
    """`exp_avg` and `exp_avg_sq` of `state` as float32 in the shape of `param`.

    float32 moments are returned as they are, not copied.
    """
    if "exp_avg" in state:
        return {name: state[name].float() for name in ("exp_avg", "exp_avg_sq")}
    piece = local(param)
    decoded = {name: _floats(piece.shape) for name in ("exp_avg", "exp_avg_sq")}
    codec = _codec_of_codes(state)
    assert codec is not None
    if piece.numel() > 0:
        # The codec of the moments does not look at the parameter: memory that is never touched
        # stands for it.
        runs = _moment_runs(state, codec)
        tensor = adam_tensor(_floats((piece.numel(),)), runs)
        _core.read_state(
            tensor, exp_avg=view(decoded["exp_avg"]), exp_avg_sq=view(decoded["exp_avg_sq"])
        )
    return {name: like(param, moment) for name, moment in decoded.items()}


def _encode(
    param: torch.Tensor,
    state: State,
    moments: str,
    *,
    key: int,
    step: int,
    decoded: State,
) -> None:
    """Writes float32 moments into the parts of `state`; rounding is without bias."""
    piece = local(param)
    if piece.numel() == 0:
        return
    runs = _moment_runs(state, moments)
    tensor = adam_tensor(_floats((piece.numel(),)), runs, key=key)
    exp_avg, exp_avg_sq = (local(decoded[name]).contiguous() for name in ("exp_avg", "exp_avg_sq"))
    _core.write_state(tensor, step=step, exp_avg=view(exp_avg), exp_avg_sq=view(exp_avg_sq))


def _copy(param: torch.Tensor, part: _Part, value: torch.Tensor, current: State) -> torch.Tensor:
    """`value` in memory of our own; the tensor of `current` itself if it is its memory already."""
    own: torch.Tensor | None = current.get(part.name)
    if (
        own is not None
        and _problem(param, part, own) is None
        and local(own).data_ptr() == local(value).data_ptr()
    ):
        return own
    copy = _part(param, part)
    local(copy).copy_(local(value))
    return copy


def convert(
    param: torch.Tensor,
    loaded: State,
    moments: str,
    *,
    key: int,
    current: State,
    label: str,
) -> State:
    """State for `param` from loaded state.

    That may be ours in any codec, torch.optim.AdamW's or DeepSpeedCPUAdam's.

    What is held in the same form is copied bit for bit. The master of another dtype is left behind:
    the parameter is what the user has loaded into it.

    Args:
        param: the parameter.
        loaded: its loaded state. It is only read.
        moments: the codec to convert to.
        key: decorrelates the rounding (see `key_of`).
        current: the state that the parameter has now: what `loaded` shares with it is kept, not
            copied.
        label: names the parameter in errors.

    Raises:
        ValueError: the state is not of an Adam, or not of this parameter.
    """
    if "max_exp_avg_sq" in loaded:
        raise ValueError(
            f"the loaded state of {label} is AMSGrad's. hint: train on with "
            "torch.optim.AdamW(amsgrad=True)"
        )
    step = step_of(loaded, lambda: label)
    loaded = _unpacked(param, {name: _to_cpu(value) for name, value in loaded.items()})
    codec = _codec_of_codes(loaded)
    source = _float_parts(loaded) if codec is None else _MOMENTS[codec]
    for part in source:
        if problem := _problem(param, part, loaded.get(part.name)):
            raise ValueError(
                f"`{part.name}` in the loaded state of {label} {problem}. hint: load the state "
                "dict of an Adam(W) over the same parameters; sharded parameters take it through "
                "torch.distributed.checkpoint.state_dict"
            )
    state: State = {"step": step_tensor(step)}
    target = _MOMENTS[moments]
    if source == target:
        state |= {part.name: _copy(param, part, loaded[part.name], current) for part in target}
    else:
        state |= {part.name: _part(param, part) for part in target}
        decoded = decode(param, loaded)
        _encode(param, state, moments, key=key, step=max(step, 1), decoded=decoded)
    # A frozen parameter may be of any dtype; it gets its master when it is stepped.
    for part in _MASTERS.get(param.dtype, ()):
        if part.name not in loaded:
            state[part.name] = _part(param, part)
        elif problem := _problem(param, part, loaded[part.name]):
            _LOGGER.warning(
                "`%s` in the loaded state of %s %s: the parameter is its own master",
                part.name,
                label,
                problem,
            )
            state[part.name] = _part(param, part)
        else:
            state[part.name] = _copy(param, part, loaded[part.name], current)
    return state | {
        name: value for name, value in loaded.items() if name not in _PARTS and name != "step"
    }


def _to_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) and not is_dtensor(value) else value


def _float_parts(loaded: State) -> tuple[_Part, ...]:
    """The parts of moments without a code, in the floating-point type that `loaded` has."""
    values = ((part, loaded.get(part.name)) for part in _MOMENTS["fp32"])
    return tuple(
        part._replace(dtype=value.dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else part
        for part, value in values
    )
