"""Parameters on an accelerator, optimizer state in host memory, for PyTorch."""

from stepwell.offload.deferred import Deferred
from stepwell.offload.optimizer import OffloadAdamW
from stepwell.offload.trainer import fold_clipping
from stepwell.offload.volume import Volume

__all__ = ["Deferred", "OffloadAdamW", "Volume", "fold_clipping"]
