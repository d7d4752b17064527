"""Which weights stay on the device where the others lie in host memory: `device_bytes_max`.

Of that many bytes the first are for what is fetched, and for gradients on their way down. Of the
rest weights stay, from both ends of the model inwards: nothing hides the fetch of what a pass uses
first, and a step ends with what it uses last. What is left once all weights stay is for state
(`residents`).

A weight that stays is as with `weights="device"`: steps upload it, and the gate waits for it.

There may be less device memory than was said. Then fewer stay: none that was not moved yet, and
those that were moved last leave for what is made room for.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from stepwell._budget import GIB
from stepwell._sizes import AHEAD_NUMEL, SUMS_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.nn import Parameter

__all__ = ["Kept", "Staying"]

_LOGGER = logging.getLogger(__name__)


class Kept(NamedTuple):
    """A parameter that stays on the device."""

    param: Parameter
    source: torch.Tensor | None
    """Where a step has its weight in host memory; None: nowhere."""


class Staying:
    """The parameters of a model that stay on the device.

    Args:
        model: whose weights lie in host memory, but for these.
        device: where modules use them.
        bytes_max: device memory for all that is taken; 0: none stays, and nothing is limited.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, bytes_max: int) -> None:
        self.device = device
        # What has no shape yet is refused where it is admitted.
        found: list[Any] = [*model.parameters()]
        params: list[Parameter] = _inwards([param for param in found if not is_lazy(param)])
        left = bytes_max - (SUMS_BYTES_MAX if device.type == "cuda" else 0)

        def needed(num: int) -> int:
            away = params[num:]
            fetched = _fetched_numel(_block_numel(model, away)) * _itemsize(away)
            return _nbytes(params[:num]) + min(fetched, _nbytes(away))

        num = bisect_right(range(1, len(params) + 1), left, key=needed) if bytes_max else 0
        self._planned = set(map(id, params[:num]))
        # By the parameter's id, which this holds; in the order in which they came.
        self._kept: dict[int, Kept] = {}
        away = params[num:]
        self.block_numel = _block_numel(model, away)
        """Elements of the largest block of the model, of what does not stay."""
        self.ahead_numel_max = AHEAD_NUMEL
        """How many elements are fetched ahead of their use."""
        self.live_numel_max = _fetched_numel(self.block_numel)
        """With how many elements on the device nothing is fetched ahead."""
        self.state_bytes_max = 0
        """Device memory for state."""
        if bytes_max and away:
            room = max(left - _nbytes(params[:num]), 0) // _itemsize(away)
            self.live_numel_max = min(self.live_numel_max, room)
        elif bytes_max:
            self.state_bytes_max = max(left - needed(num), 0)
        if num:
            stay = _nbytes(params[:num]) / GIB
            _LOGGER.info("%.2f GiB of device memory for %d weights that stay there", stay, num)

    def __contains__(self, param: torch.Tensor) -> bool:
        return id(param) in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Parameter]:
        return iter([kept.param for kept in self._kept.values()])

    def keep(self, param: Parameter, source: torch.Tensor | None = None) -> bool:
        """Moves a parameter to the device that stays there. Returns whether it does.

        `source`: as `Kept` has it.
        """
        if id(param) not in self._kept:
            if id(param) not in self._planned:
                return False
            try:
                param.data = param.detach().to(self.device)
            except torch.OutOfMemoryError:
                _LOGGER.info("the device has no memory for more weights that stay there")
                self._planned.clear()
                return False
        self._kept[id(param)] = Kept(param, source)
        return True

    def give_way(self) -> Kept | None:
        """One that has its weight in host memory, too, stays no more: the last. None: none has."""
        self._planned.clear()
        for key, kept in reversed(self._kept.items()):
            if kept.source is not None:
                del self._kept[key]
                return kept
        return None

    def let_go(self) -> Sequence[Parameter]:
        """All that stay are in host memory from now on, and are returned."""
        params = list(self)
        for param, source in self._kept.values():
            on_host = param.detach()
            param.data = on_host.cpu() if source is None else source.copy_(on_host).data
        self._kept.clear()
        self._planned.clear()
        return params


def _inwards(params: Sequence[Parameter]) -> list[Parameter]:
    """The first, the last, the second, the last but one, and so on."""
    last, found = len(params) - 1, []
    for nth in range((last + 2) // 2):
        found += [params[nth]] if 2 * nth == last else [params[nth], params[last - nth]]
    return found


def _nbytes(params: Sequence[Parameter]) -> int:
    return sum(param.nbytes for param in params)


def _itemsize(params: Sequence[Parameter]) -> int:
    return max((param.itemsize for param in params), default=0)


def _fetched_numel(block_numel: int) -> int:
    """How many elements are fetched to the device at most, where the largest block has so many."""
    return 2 * (block_numel + AHEAD_NUMEL)


def _block_numel(model: torch.nn.Module, params: Sequence[Parameter]) -> int:
    """Elements of the largest module that is one of a list, or has parameters of its own.

    `params`: those that count.
    """
    numels = {id(param): param.numel() for param in params}
    lists = torch.nn.ModuleList, torch.nn.Sequential
    blocks = chain.from_iterable(m.children() for m in model.modules() if isinstance(m, lists))
    in_block = (_numel_of(block, numels, recurse=True) for block in blocks)
    own = (_numel_of(module, numels, recurse=False) for module in model.modules())
    return max(chain(in_block, own), default=0)


def _numel_of(module: torch.nn.Module, numels: Mapping[int, int], *, recurse: bool) -> int:
    return sum(numels.get(id(param), 0) for param in module.parameters(recurse=recurse))
