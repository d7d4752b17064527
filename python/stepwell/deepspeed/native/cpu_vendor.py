"""DeepSpeedCPUAdam without its question for the vendor of the CPU.

Its constructor asks py-cpuinfo, whose subprocesses take 1.6 s, to warn of fp16 on one vendor: of
kernels that are not used here. DeepSpeed 0.19.8 imports py-cpuinfo in the constructor, and the
releases before it import `get_cpu_info` into the constructor's module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["not_asked"]

_LOCK = threading.RLock()
_ABSENT = object()


class _KnowsNothing(ModuleType):
    """In the place of py-cpuinfo."""

    @staticmethod
    def get_cpu_info() -> dict[str, object]:
        """Nothing: DeepSpeed then takes the vendor for unknown."""
        return {}


_PY_CPUINFO = _KnowsNothing("cpuinfo")


def not_asked(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor `original`, to which py-cpuinfo says nothing."""
    module: dict[str, Any] = getattr(inspect.unwrap(original), "__globals__", {})

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        with (
            _LOCK,
            _replaced(sys.modules, "cpuinfo", _PY_CPUINFO),
            _replaced(module, "get_cpu_info", _PY_CPUINFO.get_cpu_info),
        ):
            original(self, *args, **kwargs)

    return construct


@contextlib.contextmanager
def _replaced(names: dict[str, Any], name: str, value: object) -> Iterator[None]:
    known = names.get(name, _ABSENT)
    names[name] = value
    try:
        yield
    finally:
        if known is _ABSENT:
            del names[name]
        else:
            names[name] = known
