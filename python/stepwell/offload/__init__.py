"""Parameters on an accelerator, optimizer state in host memory, for PyTorch."""

from stepwell.offload.optimizer import OffloadAdamW
from stepwell.offload.trainer import fold_clipping
from stepwell.store.deferred import Deferred
from stepwell.store.volume import Volume

__all__ = ["Deferred", "OffloadAdamW", "Volume", "fold_clipping"]
