"""DeepSpeedCPUAdam without its question for the vendor of the CPU.

Its constructor asks py-cpuinfo, whose subprocesses take 1.6 s, to warn of fp16 on one vendor: of
kernels that are not used here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["not_asked"]

_NAME = "cpuinfo"
_LOCK = threading.RLock()


class _KnowsNothing(ModuleType):
    """In the place of py-cpuinfo."""

    @staticmethod
    def get_cpu_info() -> dict[str, object]:
        """Nothing: DeepSpeed then takes the vendor for unknown."""
        return {}


def not_asked(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor `original`, to which py-cpuinfo says nothing."""

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        with _LOCK, _replaced():
            original(self, *args, **kwargs)

    return construct


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    known = sys.modules.get(_NAME)
    sys.modules[_NAME] = _KnowsNothing(_NAME)
    try:
        yield
    finally:
        if known is None:
            del sys.modules[_NAME]
        else:
            sys.modules[_NAME] = known
