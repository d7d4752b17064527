"""What a DeepSpeed JSON says, and its `"stepwell"` block, for what DeepSpeed has no key for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stepwell import _state
from stepwell._checks import choice, count, flag, nbytes, optional
from stepwell._option_names import check_known, named_options
from stepwell.offload.options import Memory
from stepwell.store.volume import Volume

__all__ = ["Options", "options_of", "said", "with_unpinned_weights", "written"]

_FETCH = ("stepwell", "deepspeed")


@named_options("the block `stepwell` of the DeepSpeed JSON")
@dataclass(frozen=True)
class Options:
    """The block, with defaults for what it leaves out."""

    engine: bool = True
    """Whether ZeRO with its state in host memory or on NVMe runs on the offload engine; if not, it
    is DeepSpeed's own path, on Stepwell's kernels."""
    moments: str | None = None
    """How `exp_avg` and `exp_avg_sq` are held: "fp32", "bf16" or "q8".

    None: as the optimizer's type says, or else fp32.
    """
    gate: str = "module"
    """What waits for the new weights.

    "module": each forward for its own; "step": `engine.step()` for all, as it does on one rank
    under ZeRO-3 without `offload_param`.
    """
    accumulate: str = "host"
    """Where ZeRO-2 sums 16-bit gradients of several micro-batches, and ZeRO-3 all.

    "host": as DeepSpeed does, the GPU holds no sum; "device": on the GPU, 2 more bytes per
    parameter of the rank's partition, and each gradient crosses the bus once per step.
    """
    fetch: str = "stepwell"
    """What has the weights of ZeRO-3 on the GPU while a module uses them.

    "stepwell": Stepwell's hooks, by DeepSpeed's settings, with `offload_param` or on several ranks;
    "deepspeed": DeepSpeed's.
    """
    threads: int | None = None
    """Workers that step; None: one per physical core of this process, but one; but one and an
    eighth of them where ranks share the host; with `zenflow` four fifths of these."""
    host_bytes_max: int | None = None
    """The most host memory that each rank may take, in bytes or as "40GB"; None: what is free, or
    with a volume three quarters of it, which ranks of the host share."""
    nvme_paths: Sequence[str] | None = None
    """With `offload_optimizer.device` nvme, a folder on each drive of the volume, or its device.

    None: `offload_optimizer.nvme_path` alone.
    """
    volume: Mapping[str, Any] | None = None
    """Options of `stepwell.Volume` for it, beside the drives: `durability`, `commit_interval`,
    `keep`, `name`, `resume`, ..."""
    zenflow: bool = True
    """Whether a block `zero_optimization.zenflow` runs on the offload engine, where that can; if
    not, it is DeepSpeed's own ZenFlow, on DeepSpeed's own op, which it compiles."""

    def __post_init__(self) -> None:
        for name in ("engine", "zenflow"):
            flag(getattr(self, name), f"`stepwell.{name}`", expected="true or false")
        optional(choice, self.moments, "`stepwell.moments`", _state.MOMENTS)
        choice(self.gate, "`stepwell.gate`", ("module", "step"))
        choice(self.accumulate, "`stepwell.accumulate`", get_args(Memory))
        choice(self.fetch, "`stepwell.fetch`", _FETCH)
        optional(count, self.threads, "`stepwell.threads`")
        most = optional(nbytes, self.host_bytes_max, "`stepwell.host_bytes_max`")
        object.__setattr__(self, "host_bytes_max", most)
        is_list = isinstance(self.nvme_paths, list) and all(
            isinstance(path, str) for path in self.nvme_paths
        )
        if self.nvme_paths is not None and not is_list:
            raise ValueError(
                f"`stepwell.nvme_paths` is `{self.nvme_paths}`, expected a list of folders. "
                'hint: "nvme_paths": ["/mnt/nvme0", "/mnt/nvme1"]'
            )
        if self.volume is not None:
            self._check_volume(self.volume)

    @staticmethod
    def _check_volume(volume: object) -> None:
        if not isinstance(volume, Mapping):
            raise ValueError(  # noqa: TRY004
                f"`stepwell.volume` is `{volume}`, expected a block. "
                'hint: "volume": {"durability": "none"}'
            )
        check_known(volume, Volume, where="the block `stepwell.volume`", but=("paths",))


def written(engine: Any) -> frozenset[str]:
    """The keys that the block of a DeepSpeedEngine's JSON has."""
    return frozenset(engine._config._param_dict.get("stepwell", {}))


def said(engine: Any, *keys: str) -> Any:
    """What the DeepSpeed JSON of an engine says at a path of keys; None: nothing."""
    value = engine._config._param_dict
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_unpinned_weights(config: Any) -> Any:
    """A DeepSpeed JSON, as a dict or a path, whose `offload_param` says `pin_memory` false.

    DeepSpeed pins the weights of each parameter as it says, before it lays them side by side in
    other memory: 1 s for 1.2 B parameters, for nothing. What is neither is returned as it is.
    """
    if isinstance(config, (str, Path)) and Path(config).is_file():
        # As DeepSpeed reads it, which depends on it.
        import hjson  # type: ignore[import-untyped]

        config = hjson.loads(Path(config).read_text(encoding="utf-8"))
    zero: Any = config.get("zero_optimization") if isinstance(config, Mapping) else None
    offload = zero.get("offload_param") if isinstance(zero, Mapping) else None
    if not isinstance(offload, Mapping):
        return config
    unpinned = {**offload, "pin_memory": False}
    return {**config, "zero_optimization": {**zero, "offload_param": unpinned}}


def options_of(engine: Any) -> Options:
    """The options of a DeepSpeedEngine.

    Raises:
        ValueError: its JSON has a `"stepwell"` block that cannot be understood.
    """
    block = engine._config._param_dict.get("stepwell", {})
    if not isinstance(block, Mapping):
        raise ValueError(  # noqa: TRY004
            f'`stepwell` is `{block}`, expected a block. hint: "stepwell": {{"moments": "q8"}}'
        )
    check_known(block, Options)
    return Options(**block)
