"""DeepSpeed's own op `cpu_adam`, on which its ZenFlow and SuperOffload run.

Its builder compiles it where it was not built before. Nothing else asks for it.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from stepwell.deepspeed.seams import op_caches

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["load", "stepping", "used_by"]

_NAME = "cpu_adam"


@functools.cache
def load() -> Any:
    """The op. Stepwell's stays where DeepSpeed's builders find it.

    Raises:
        RuntimeError: it cannot be built.
    """
    caches = op_caches()
    found = [dict(cache) for cache in caches]
    for cache in caches:
        cache.pop(_NAME, None)
    try:
        return importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()
    except Exception as error:
        raise RuntimeError(
            f"DeepSpeed's own op `{_NAME}`, on which its ZenFlow and SuperOffload run, cannot be "
            f"built: {error}; expected a C++ compiler and ninja. hint: leave out "
            "zero_optimization.zenflow or offload_optimizer.super_offload, or install them (apt "
            "install g++, pip install ninja)"
        ) from error
    finally:
        for cache, ops in zip(caches, found, strict=True):
            cache.update(ops)


def stepping(optimizer: Any) -> None:
    """Has a DeepSpeedCPUAdam step on the op.

    Raises:
        RuntimeError: it cannot be built.
    """
    op = load()
    # Updates bring everything else along.
    op.create_adam(
        optimizer.opt_id, 1e-3, 0.9, 0.999, 1e-8, 0.0, bool(optimizer.adam_w_mode), False
    )
    optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
    optimizer.ds_opt_adam = op


def used_by(process: Callable[..., None]) -> Callable[..., None]:
    """`process`, which DeepSpeed spawns, on the op: as what it works for is.

    A spawned process imports the program's main module, which may call `register`.
    """

    # By whose name a spawned process finds it.
    @functools.wraps(process)
    def run(*args: Any, **kwargs: Any) -> None:
        op = load()
        for cache in op_caches():
            cache[_NAME] = op
        process(*args, **kwargs)

    return run
